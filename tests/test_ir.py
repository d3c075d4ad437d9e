"""Programs as text, verification, and the interpreter; properties over random programs (`strategies.programs`)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from strategies import programs  # noqa: E402

from coda_lang.diagnostics.model import InternalError  # noqa: E402
from coda_lang.ir.graph import Eqn, Lit, Output, Program, Tensor, Var  # noqa: E402
from coda_lang.ir.interp import run, values  # noqa: E402
from coda_lang.ir.printer import to_text  # noqa: E402
from coda_lang.ir.reader import IRSyntaxError, from_text  # noqa: E402
from coda_lang.ir.types import BF16, BOOL, F16, F32, I32, I64, Axis, Ty  # noqa: E402
from coda_lang.ir.verify import problems, verify  # noqa: E402
from coda_lang.ops.builder import EqnBuilder  # noqa: E402
from coda_lang.source import Span  # noqa: E402

SOME = settings(max_examples=40, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SWIGLU = """\
program swiglu(x: bf16[m, d], w: bf16[f, lane, d], const s: f32[]) -> (y: bf16[f, m] = y) {
  doc "it's a test"
  axes m, d, f, lane=2
  nominal m=8192
  nominal d=4096
  require 'd % 8 == 0'
  save t0
  recompute t1, t2
  distribute t4
  forward
  t0: f32[m, f, lane] = contract(x, w) axes=[d] batch=[]
  t1: f32[m, f] = lane(t0) axis=lane index=0
  t2: f32[m, f] = lane(t0) axis=lane index=1
  t3: f32[m, f] = silu(t1)
  t4: f32[m, f] = mul(t3, t2)
  t5: f32[m, f] = mul(t4, 0.10000000149011612:f32)
  t6: f32[m, f] = mul(t5, s)
  y: bf16[m, f] = cast(t6) dtype=bf16
}
"""


def swiglu() -> Program:
    return from_text(SWIGLU)


# --- text --------------------------------------------------------------------------------------------------------------


def test_the_text_of_a_program():
    assert to_text(verify(swiglu())) == SWIGLU


@SOME
@given(programs())
def test_text_reads_back_equal(generated):
    assert from_text(to_text(generated.program)) == generated.program


@given(st.one_of(
    st.floats(width=32, allow_nan=False).map(lambda v: Lit(v, F32)),
    st.integers(-(2**63), 2**63 - 1).map(lambda v: Lit(v, I64)),
    st.booleans().map(lambda v: Lit(v, BOOL)),
))  # fmt: skip
def test_constants_read_back_exactly(lit):
    eqn = Eqn(Var("y", Ty(lit.dtype)), "stop_gradient", (lit,))
    program = Program("p", (), (), (Output(Tensor("y", lit.dtype, ()), eqn.out),), (eqn,))
    (back,) = from_text(to_text(program)).eqns[0].args
    assert back == lit and type(back.value) is type(lit.value) and math.copysign(1, back.value) == math.copysign(1, lit.value)


def test_nan_reads_back():
    eqn = Eqn(Var("y", Ty(F32)), "neg", (Lit(math.nan, F32),))
    program = Program("p", (), (), (Output(Tensor("y", F32, ()), eqn.out),), (eqn,))
    assert math.isnan(from_text(to_text(verify(program))).eqns[0].args[0].value)


@pytest.mark.parametrize("doc", ["", "two\nlines", "a 'quote' and \"another\"", "back\\slash", "naïve → ✓", "}"])
def test_any_doc_reads_back(doc):
    program = replace(swiglu(), doc=doc, requires=("a < b", "'odd'"))
    assert from_text(to_text(program)) == program


def test_names_that_look_like_keywords_or_have_dots_read_back():
    x = Var("forward", Ty(F32, ("axes",)))
    eqns = (Eqn(Var("save", x.ty), "neg", (x,)), Eqn(Var("rmsnorm.n'", x.ty), "neg", (Var("save", x.ty),)))
    given_, made = Tensor("forward", F32, ("axes",)), Output(Tensor("const", F32, ("axes",)), eqns[1].out)
    program = Program("program", (Axis("axes"),), (given_,), (made,), eqns)
    assert from_text(to_text(verify(program))) == program


def test_spans_do_not_matter():
    program = swiglu()
    placed = replace(program, eqns=tuple(replace(e, span=Span("a.coda", 1, 1, 1, 5)) for e in program.eqns))
    assert placed == program and to_text(placed) == to_text(program)


@pytest.mark.parametrize(
    "old,new,words",
    [
        ("program swiglu", "swiglu", "line 1: expected `program`"),
        ("axes m, d, f, lane=2", "axes m, d, f", "axis lane in the list of axes"),
        ("silu(t1)", "silu(t9)", "`t9` is not"),
        ("silu(t1)", "silu(t1", "line 15: expected `,`, found 't4"),
        ("t3: f32[m", "t3: f99[m", "a dtype"),
        ("0.10000000149011612:f32", "0.1", "expected `:`"),
        ("}\n", "} more", "the end"),
        ("dtype=bf16\n}", "dtype=bf16\n", "the end"),
    ],
)
def test_text_that_is_no_program_says_where(old, new, words):
    assert old in SWIGLU
    with pytest.raises(IRSyntaxError) as caught:
        from_text(SWIGLU.replace(old, new))
    assert words in str(caught.value)


# --- verification ------------------------------------------------------------------------------------------------------

BROKEN = [
    ("t3: f32[m, f] = silu(t1)", "t3: f32[f, m] = silu(t1)", "has the type f32[f, m], inferred is f32[m, f]"),
    ("t3: f32[m, f] = silu(t1)", "t3: bf16[m, f] = silu(t1)", "inferred is f32[m, f]"),
    ("t3: f32[m, f] = silu(t1)", "t3: f32[m, f] = swosh(t1)", "there is no op swosh"),
    ("t3: f32[m, f] = silu(t1)", "t3: f32[m, f] = silu(t1, t2)", "takes 1 argument, not 2"),
    ("t3: f32[m, f] = silu(t1)", "t1: f32[m, f] = silu(t1)\n  t3: f32[m, f] = silu(t1)", "t1 is assigned twice"),
    ("axes=[d] batch=[]", "batch=[] axes=[d]", "not sorted"),
    ("axes=[d] batch=[]", "axes=[d]", "takes the attributes axes, batch"),
    ("axes=[d] batch=[]", "axes=[f] batch=[]", "axis f is not on both sides"),
    ("index=1", "index=2", "which has 2"),
    ("0.10000000149011612:f32", "0.1:f32", "not exactly of that type"),
    ("0.10000000149011612:f32", "1:f32", "not exactly of that type"),
    ("0.10000000149011612:f32", "1:i32", "needs its y as f32"),
    ("y: bf16[f, m] = y)", "y: f32[f, m] = y)", "is declared f32[m, f], its value y is bf16[m, f]"),
    ("y: bf16[f, m] = y)", "y: bf16[f, f] = y)", "has the axis f twice"),
    ("y: bf16[f, m] = y)", "y: bf16[f, m] = y, y: bf16[m, f] = y)", "declared twice"),
    ("const s: f32[]", "const s: f32[], x: f32[]", "input x is declared twice"),
    ("axes m, d, f, lane=2", "axes m, d, f, lane=2, m", "axis m is listed twice"),
    ("axes m, d, f, lane=2", "axes m, d, f, lane=0", "has extent 0"),
    ("save t0", "save t77", "names t77, which is no value"),
    ("nominal m=8192", "nominal q=8192", "nominal q=8192"),
]


@pytest.mark.parametrize("old,new,words", BROKEN, ids=[f"{b[2][:30]}-{i}" for i, b in enumerate(BROKEN)])
def test_the_verifier_finds(old, new, words):
    assert old in SWIGLU
    program = from_text(SWIGLU.replace(old, new))
    assert any(words in p for p in problems(program)), list(problems(program))
    with pytest.raises(InternalError, match="after the pass"):
        verify(program, "the pass")


def test_the_verifier_finds_use_before_assignment_and_other_types():
    program = swiglu()
    assert any("before it is assigned" in p for p in problems(replace(program, eqns=program.eqns[::-1])))
    other = replace(program.eqns[3], args=(Var("t1", Ty(BF16, ("m", "f"))),))
    found = list(problems(replace(program, eqns=(*program.eqns[:3], other, *program.eqns[4:]))))
    assert any("uses t1 as bf16[m, f], it is f32[m, f]" in p for p in found)
    assert "there is no output" in list(problems(replace(program, outputs=())))


@SOME
@given(programs())
def test_random_programs_verify(generated):
    assert verify(generated.program) is generated.program


# --- the interpreter ---------------------------------------------------------------------------------------------------


def test_swiglu_is_what_torch_computes():
    torch.manual_seed(0)
    x, w, s = torch.randn(5, 16).bfloat16(), torch.randn(3, 2, 16).bfloat16(), torch.tensor(0.5)
    y = run(swiglu(), {"x": x, "w": w, "s": s}, torch)["y"]
    exact = run(swiglu(), {"x": x, "w": w, "s": s}, torch, "exact")["y"]
    z = torch.einsum("md,fld->fml", x.double(), w.double())
    want = torch.nn.functional.silu(z[..., 0]) * z[..., 1] * float(torch.tensor(0.1)) * 0.5
    assert y.dtype is torch.bfloat16 and exact.dtype is torch.float64
    torch.testing.assert_close(exact, want, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-6)


@SOME
@given(programs())
def test_written_is_within_the_errors_of_exact(generated):
    given_tensors = generated.tensors()
    written = run(generated.program, given_tensors, torch)
    exact = run(generated.program, given_tensors, torch, "exact")
    for o in generated.program.outputs:
        a, e = written[o.tensor.name], exact[o.tensor.name]
        assert a.shape == e.shape == tuple(generated.extents[x] for x in o.tensor.axes)
        assert e.isfinite().all()
        assert (a.double() - e).abs().max().item() <= generated.errors[o.tensor.name], to_text(generated.program)


@SOME
@given(programs(), st.randoms(use_true_random=False))
def test_the_order_of_axes_is_only_storage(generated, random):
    """Storing every tensor in another order and listing the axes in another gives the same numbers."""
    program = generated.program
    axes = list(program.axes)
    random.shuffle(axes)
    order = {a.name: i for i, a in enumerate(axes)}

    def resort(v):
        return replace(v, ty=replace(v.ty, axes=tuple(sorted(v.ty.axes, key=order.__getitem__)))) if isinstance(v, Var) else v

    eqns = tuple(replace(e, out=resort(e.out), args=tuple(map(resort, e.args))) for e in program.eqns)
    outputs = tuple(replace(o, value=resort(o.value)) for o in program.outputs)
    inputs = tuple(replace(t, axes=t.axes[::-1]) for t in program.inputs)
    other = verify(replace(program, axes=tuple(axes), eqns=eqns, outputs=outputs, inputs=inputs))
    before = generated.tensors()
    after = {name: x.permute(tuple(reversed(range(x.dim())))) for name, x in before.items()}
    one, two = run(program, before, torch, "exact"), run(other, after, torch, "exact")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-12, atol=1e-12)


def test_exact_takes_a_float64_input_as_it_is_and_is_differentiable():
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    s = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w, s: run(swiglu(), {"x": x, "w": w, "s": s}, torch, "exact")["y"], (x, w, s))


def test_written_rounds_inputs_to_their_declared_type():
    x = torch.full((1, 8), 1 + 2**-10, dtype=torch.float64)
    w, s = torch.ones(1, 2, 8), torch.tensor(1.0)
    got, want = (run(swiglu(), {"x": v, "w": w, "s": s}, torch)["y"] for v in (x, torch.ones(1, 8)))
    assert torch.equal(got, want)


def test_m_equal_to_zero():
    y = run(swiglu(), {"x": torch.zeros(0, 8), "w": torch.zeros(3, 2, 8), "s": torch.tensor(1.0)}, torch)["y"]
    assert y.shape == (3, 0) and y.dtype is torch.bfloat16


def test_an_output_broadcasts_to_its_declared_axes_only_by_expand():
    axes = (Axis("m"), Axis("n"))
    b = EqnBuilder(axes, ["r"])
    y = b.expand(b.value(Var("r", Ty(F32, ("n",)))), axes=("m",))
    z = b.index(axis="m")
    program = Program("p", axes, (Tensor("r", F32, ("n",)), Tensor("c", F32, ("m",))),
                      (Output(Tensor("y", F32, ("m", "n")), y.atom), Output(Tensor("z", I32, ("m",)), z.atom)), tuple(b.eqns))  # fmt: skip
    out = run(verify(program), {"r": torch.tensor([1.0, 2.0]), "c": torch.zeros(3)}, torch)
    assert out["y"].tolist() == [[1, 2]] * 3 and out["z"].tolist() == [0, 1, 2]


def test_an_axis_made_by_rename_has_the_extent_of_its_origin():
    axes = (Axis("a"), Axis("b"))
    b = EqnBuilder(axes, ["x"])
    x = b.value(Var("x", Ty(F32, ("a",))))
    y = x * b.rename(x, axis="a", to="b")
    program = Program("outer", axes, (Tensor("x", F32, ("a",)),), (Output(Tensor("y", F32, ("b", "a")), y.atom),), tuple(b.eqns))
    assert run(verify(program), {"x": torch.tensor([2.0, 3.0])}, torch)["y"].tolist() == [[4, 6], [6, 9]]
    two = replace(program, inputs=(*program.inputs, Tensor("z", F32, ("b",))))
    with pytest.raises(ValueError, match="a and b are one by a rename"):
        run(two, {"x": torch.zeros(2), "z": torch.zeros(3)}, torch)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"x": None}, "takes x, w, s"),
        ({"x": (5,)}, "has axes"),
        ({"w": (3, 3, 8)}, "axis lane is 2, given 3"),
        ({"w": (3, 2, 9)}, "axis d is 8, given 9"),
    ],
)
def test_inputs_that_do_not_fit(change, words):
    shapes = {"x": (5, 8), "w": (3, 2, 8), "s": ()} | change
    with pytest.raises(ValueError, match=words):
        run(swiglu(), {k: torch.zeros(s) for k, s in shapes.items() if s is not None}, torch)


def test_precision_is_written_or_exact():
    with pytest.raises(ValueError, match="written or exact"):
        values(swiglu(), {"x": torch.zeros(1, 8), "w": torch.zeros(1, 2, 8), "s": torch.tensor(1.0)}, torch, "double")


def test_f16_overflow_is_infinite():
    b = EqnBuilder((), ["x"])
    y = b.cast(b.value(Var("x", Ty(F32))), dtype="f16")
    program = Program("p", (), (Tensor("x", F32, ()),), (Output(Tensor("y", F16, ()), y.atom),), tuple(b.eqns))
    assert run(program, {"x": torch.tensor(1e6)}, torch)["y"].isinf()
