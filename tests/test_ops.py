"""The operator table: every facet of every entry against torch: value, emission, derivative, laws, types, documentation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from optable import AXES, EXTENTS, FRAME, Case, cases, cotangents, differentiable, forward, out_type, sample, ty  # noqa: E402

from coda_lang.backend_cute import torch_fns  # noqa: E402
from coda_lang.ir.graph import Lit, Output, Program, Tensor, Var  # noqa: E402
from coda_lang.ir.interp import run  # noqa: E402
from coda_lang.ir.types import BOOL, F32, I32, I64, Ty  # noqa: E402
from coda_lang.ir.verify import verify  # noqa: E402
from coda_lang.ops import TABLE  # noqa: E402
from coda_lang.ops.builder import EqnBuilder, EvalBuilder, unbroadcast  # noqa: E402

CASES = cases()
GRADED = [c for c in CASES if c.entry.vjp is not None and differentiable(c)]
MAPS = [op for op in TABLE.values() if op.kind == "map"]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3e38, -3e38, 1e-30, math.inf, -math.inf, math.nan]


def by_id(values):
    return pytest.mark.parametrize("case", values, ids=str)


def test_every_op_has_an_application_here():
    assert {c.op for c in CASES} == set(TABLE)


# --- values and emission -----------------------------------------------------------------------------------------------


def emitted(op, f, args, **attrs):
    names = {name.lstrip("*"): f"a{i}" for i, name in enumerate(op.args)}
    return eval(op.emit.format(**names, **attrs), {"f": f, **{f"a{i}": a for i, a in enumerate(args)}})


@pytest.mark.parametrize("exact", [False, True], ids=["written", "exact"])
@by_id([c for c in CASES if c.entry.kind == "map"])
def test_emission_computes_what_the_oracle_computes(case, exact):
    f = torch_fns.Exact() if exact else torch_fns.Written()
    args = sample(case, dtype=torch.float64 if exact else torch.float32)
    got, want = emitted(case.entry, f, args, **case.attrs), forward(case, args, exact)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-13 if exact else 3e-6, atol=1e-14 if exact else 3e-7)


@pytest.mark.parametrize("op", [op for op in MAPS if all(r in ("f32", "number") for r in op.reads)], ids=lambda op: op.name)
def test_emission_agrees_at_infinity_nan_and_zero(op):
    grid = torch.meshgrid(*[torch.tensor(SPECIAL)] * len(op.args), indexing="ij")
    got, want = emitted(op, torch_fns.Written(), grid), op.ref(torch, *grid)
    odd = {"gelu", "gelu_tanh", "silu", "quick_gelu"} & {op.name}  # -inf: the formula gives NaN, a stable one may give the limit 0
    keep = ~torch.isinf(grid[0]) if odd else torch.ones_like(grid[0], dtype=torch.bool)
    torch.testing.assert_close(got[keep], want[keep], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("op", [op for op in MAPS if "number" in op.reads], ids=lambda op: op.name)
def test_integers_stay_integers_and_exact(op, dtype):
    grid = torch.tensor([0, 1, -7, 100, 2**24 + 1, -(2**30)], dtype=dtype)
    args = [g > 0 if op.read(i) == "bool" else g for i, g in enumerate(torch.meshgrid(*[grid] * len(op.args), indexing="ij"))]
    got, want = emitted(op, torch_fns.Written(), args), op.ref(torch, *args)
    inferred = op.infer(tuple(Ty({torch.int32: I32, torch.int64: I64, torch.bool: BOOL}[a.dtype]) for a in args), {}, ()).dtype
    assert got.dtype == want.dtype == {I32: torch.int32, I64: torch.int64, BOOL: torch.bool}[inferred]
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype,torch_dtype", [("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)])
def test_casts_round_to_nearest_even_unless_exact(dtype, torch_dtype):
    x = torch.randn([64 if a == "m" else 1 for a in FRAME.order]) * 10
    case = Case("cast", (ty(F32, "m"),), {"dtype": dtype})
    assert torch.equal(forward(case, [x], exact=False), x.to(torch_dtype).float())
    assert torch.equal(forward(case, [x.double()], exact=True), x.double())


def test_casts_of_integers_and_bools_are_exact():
    i = torch.tensor([2**24 + 1]).reshape([1] * FRAME.rank)
    assert forward(Case("cast", (ty(I64),), {"dtype": "f32"}), [i], True).item() == 2**24 + 1
    assert forward(Case("cast", (ty(I32),), {"dtype": "i64"}), [i.int()], False).dtype == torch.int64
    assert forward(Case("cast", (ty(BOOL),), {"dtype": "i32"}), [i > 0], False).item() == 1


# --- derivatives -------------------------------------------------------------------------------------------------------


def check_derivative(case: Case, vjp=None) -> None:
    """The rule against torch.autograd of the oracle and against central differences, in float64."""
    tensors = sample(case, seed=3)
    where = differentiable(case)
    for i in where:
        tensors[i].requires_grad_(True)
    y = forward(case, tensors)
    g = torch.rand(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64) + 0.5
    auto = torch.autograd.grad(y, [tensors[i] for i in where], g, allow_unused=True) if y.requires_grad else [None] * len(where)
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in tensors]
    rule = cotangents(case, plain, g, vjp)
    for i, expected in zip(where, auto):
        expected = torch.zeros_like(plain[i]) if expected is None else expected
        got = torch.zeros_like(plain[i]) if rule[i] is None else rule[i]
        if case.op == "stop_gradient":
            assert rule[i] is None
            continue
        torch.testing.assert_close(got.expand_as(expected), expected, rtol=1e-7, atol=1e-7)  # constants in the rules are f32
        torch.testing.assert_close(difference(case, plain, g, i), expected, rtol=1e-5, atol=1e-6)


def difference(case, tensors, g, i, h=1e-6):
    """Central differences of Σ g·y with respect to every element of argument i."""
    out = torch.zeros_like(tensors[i])
    for at in range(out.numel()):
        step = torch.zeros_like(out)
        step.view(-1)[at] = h
        up, down = ([t + s * step if j == i else t for j, t in enumerate(tensors)] for s in (1, -1))
        out.view(-1)[at] = ((forward(case, up) - forward(case, down)) * g).sum() / (2 * h)
    return out


@by_id([c for c in CASES if differentiable(c)])
def test_derivative_equals_autograd_and_finite_differences(case):
    check_derivative(case)


MUTANTS = [(c, i) for c in {c.op: c for c in reversed(GRADED)}.values() for i in differentiable(c)]


@pytest.mark.parametrize("case,arg", MUTANTS, ids=[f"{c.op}-{i}" for c, i in MUTANTS])
def test_a_wrong_derivative_would_be_found(case, arg):
    def wrong(b, *args, **attrs):
        found = list(case.entry.vjp(b, *args, **attrs))
        found[arg] = found[arg] * 1.0001
        return tuple(found)

    if case.entry.vjp(*_dummy(case), **case.attrs)[arg] is None:
        pytest.skip("no derivative there")
    with pytest.raises(AssertionError):
        check_derivative(case, wrong)


def _dummy(case):
    b = EvalBuilder(AXES, FRAME, torch)
    tensors = sample(case)
    args = [b.tensor(t, a) if isinstance(a, Ty) else b.value(float(a)) for a, t in zip(case.args, tensors)]
    y = forward(case, tensors)
    return b, b.tensor(torch.ones_like(y), Ty(F32, out_type(case).axes)), b.tensor(y, out_type(case)), *args


def derivative_program(case: Case) -> tuple[Program, list[int]]:
    """g and the arguments in, the unbroadcast cotangents out: the rule on the builder that passes use."""
    inputs = [Var(f"x{i}", a) for i, a in enumerate(case.args) if isinstance(a, Ty)]
    names = iter(inputs)
    atoms = [next(names) if isinstance(a, Ty) else Lit(float(a), F32) for a in case.args]
    g = Var("g", Ty(F32, out_type(case).axes))
    b = EqnBuilder(AXES, [v.name for v in (*inputs, g)])
    args = [b.value(a) for a in atoms]
    y = b.apply(case.op, args, dict(case.attrs))
    found = case.entry.vjp(b, b.value(g), y, *args, **case.attrs)
    outputs, where = [], []
    for i, (d, a) in enumerate(zip(found, args)):
        if d is not None and not a.is_literal:
            value = b.cast(unbroadcast(b, b.value(d), a.ty.axes), dtype="f32").atom
            outputs.append(Output(Tensor(f"d{i}", F32, value.ty.axes), value))
            where.append(i)
    signature = tuple(Tensor(v.name, v.ty.dtype, v.ty.axes) for v in (*inputs, g))
    return Program("vjp", AXES, signature, tuple(outputs), tuple(b.eqns)), where


@by_id(GRADED)
def test_derivative_rules_build_well_typed_equations_of_the_same_value(case):
    program, where = derivative_program(case)
    verify(program)
    for axis in set(EXTENTS) - {a for t in program.inputs for a in t.axes}:  # every free axis needs an input that has it
        program = replace(program, inputs=(*program.inputs, Tensor(f"extent_{axis}", F32, (axis,))))
    tensors = sample(case, seed=5)
    g = torch.randn(forward(case, tensors).shape, dtype=torch.float64)
    given = {f"x{i}": FRAME.take(t, a.axes) for i, (t, a) in enumerate(zip(tensors, case.args)) if isinstance(a, Ty)}
    given |= {"g": FRAME.take(g, out_type(case).axes)}
    given |= {t.name: torch.zeros(EXTENTS[t.axes[0]]) for t in program.inputs if t.name.startswith("extent_")}
    got, want = run(program, given, torch, "exact"), cotangents(case, tensors, g)
    for i in where:
        torch.testing.assert_close(got[f"d{i}"], FRAME.take(want[i], case.args[i].axes), rtol=1e-12, atol=1e-14)


# --- kinks, ties, infinities -------------------------------------------------------------------------------------------

inf, nan = math.inf, math.nan
ROW = [-1.0, 0.0, 1.0, 2.0]
KINKS = [
    ("relu", torch.relu, (ROW,)),
    ("relu", torch.relu, ([0.0, -0.0, nan, -inf],)),
    ("relu2", lambda x: torch.relu(x).square(), (ROW,)),
    ("abs", torch.abs, ([0.0, -0.0, nan, inf],)),
    ("floor", torch.floor, (ROW,)),
    ("round", torch.round, ([0.5, 1.5, -0.5, 2.5],)),
    ("sqrt", torch.sqrt, ([0.0, 1.0, inf, 4.0],)),
    ("rsqrt", torch.rsqrt, ([0.0, 1.0, inf, 4.0],)),
    ("log", torch.log, ([0.0, 1.0, inf, 4.0],)),
    ("exp", torch.exp, ([-inf, inf, nan, 0.0],)),
    ("tanh", torch.tanh, ([-inf, inf, 0.0, 30.0],)),
    ("sigmoid", torch.sigmoid, ([-inf, inf, 0.0, 60.0],)),
    ("silu", torch.nn.functional.silu, ([-30.0, 0.0, 1.0, 20.0],)),
    ("gelu", torch.nn.functional.gelu, ([-4.0, 0.0, 1.0, 20.0],)),
    ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh"), ([-4.0, 0.0, 1.0, 20.0],)),
    ("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x), ([-4.0, 0.0, 1.0, 20.0],)),
    ("softplus", torch.nn.functional.softplus, ([-30.0, 0.0, 1.0, -inf],)),
    ("clamp", torch.clamp, (ROW, [-1.0] * 4, [1.0] * 4)),
    ("clamp", torch.clamp, (ROW, [1.0] * 4, [0.0] * 4)),
    ("clamp", lambda x, lo, hi: torch.clamp(x, lo, hi), (ROW, -1.0, 1.0)),
    ("clamp", lambda x, lo, hi: torch.clamp(x, lo, hi), ([inf, -inf, 0.0, 5.0], -1.0, 1.0)),
    ("minimum", torch.minimum, (ROW, [0.0] * 4)),
    ("minimum", torch.minimum, ([nan, inf, 1.0, -inf], [0.0, inf, nan, 1.0])),
    ("maximum", torch.maximum, (ROW, [1.0] * 4)),
    ("maximum", torch.maximum, ([nan, inf, 1.0, -inf], [0.0, inf, nan, 1.0])),
    ("minimum", lambda x, y: torch.clamp(x, max=y), (ROW, 1.0)),
    ("minimum", lambda y, x: torch.clamp(x, max=y), (1.0, ROW)),
    ("maximum", lambda x, y: torch.clamp(x, min=y), (ROW, 0.0)),
    ("pow", torch.pow, ([0.0, 0.0, 2.0, 0.0], [0.0, 2.0, 0.0, 1.0])),
    ("pow", lambda x, y: torch.pow(x, y), ([0.0, -1.0, 2.0, -2.0], 2.0)),
    ("pow", lambda x, y: torch.pow(x, y), (ROW, 0.0)),
    ("div", torch.div, ([1.0, inf, 0.0, 1.0], [0.0, 2.0, 4.0, inf])),
    ("where", lambda c, x, y: torch.where(c, x, y), ([True, False, True, False], [nan, nan, 1.0, inf], [nan, 1.0, nan, inf])),
]


@pytest.mark.parametrize("name,like,args", KINKS, ids=[f"{k[0]}-{i}" for i, k in enumerate(KINKS)])
def test_at_kinks_ties_and_infinities_value_and_derivative_are_torchs(name, like, args):
    case, tensors = _special(name, args)
    plain = [t.reshape(-1).clone() if isinstance(t, torch.Tensor) else t for t in tensors]
    where = [i for i, t in enumerate(plain) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    for i in where:
        plain[i].requires_grad_(True)
    y = like(*plain)
    torch.testing.assert_close(forward(case, tensors).reshape(-1), y.detach(), equal_nan=True)
    expected = torch.autograd.grad(y.sum(), [plain[i] for i in where])
    got = cotangents(case, tensors, torch.ones_like(forward(case, tensors)))
    for i, e in zip(where, expected):
        torch.testing.assert_close(torch.zeros(4, dtype=e.dtype) if got[i] is None else got[i].reshape(-1), e, equal_nan=True)


def _special(name, args):
    shape = [4 if a == "n" else 1 for a in FRAME.order]
    dtypes = [torch.bool if isinstance(a, list) and isinstance(a[0], bool) else torch.float64 for a in args]
    tensors = [torch.tensor(a, dtype=d).reshape(shape) if isinstance(a, list) else a for a, d in zip(args, dtypes)]
    types = tuple(ty(BOOL if t.dtype == torch.bool else F32, "n") if isinstance(t, torch.Tensor) else t for t in tensors)
    return Case(name, types), tensors


REDUCE_TIES = [
    ("max", lambda x: torch.amax(x), [1.0, 2.0, 2.0, 0.0]),
    ("min", lambda x: torch.amin(x), [1.0, 0.0, 0.0, 0.0]),
    ("amax", lambda x: torch.linalg.vector_norm(x, inf), [1.0, -2.0, 2.0, 0.0]),
    ("max", lambda x: torch.amax(x), [inf, 1.0, inf, 0.0]),
    ("logsumexp", lambda x: torch.logsumexp(x, 0), [1.0, -inf, 2.0, 0.0]),
]


@pytest.mark.parametrize("name,like,row", REDUCE_TIES)
def test_reductions_share_the_derivative_among_ties_as_torch_does(name, like, row):
    case, (x,) = _special(name, (row,))
    case = replace(case, attrs={"axes": ("n",)})
    leaf = x.reshape(-1).clone().requires_grad_(True)
    y = like(leaf)
    y.backward()
    out = forward(case, [x])
    torch.testing.assert_close(out.reshape(()), y.detach())
    torch.testing.assert_close(cotangents(case, [x], torch.ones_like(out))[0].reshape(-1), leaf.grad)


def test_logsumexp_of_minus_infinity_has_a_zero_derivative():
    case, (x,) = _special("logsumexp", ([-inf] * 4,))
    case = replace(case, attrs={"axes": ("n",)})
    y = forward(case, [x])
    assert y.item() == -inf
    assert torch.equal(cotangents(case, [x], torch.ones_like(y))[0], torch.zeros_like(x))


@pytest.mark.parametrize("name,extra", [("relu", ()), ("clamp", (-1.0, 1.0)), ("minimum", (1.0,)), ("maximum", (0.0,))])
def test_nan_passes_in_the_value_and_in_the_derivative(name, extra):
    case, tensors = _special(name, ([nan] * 4, *extra))
    y = forward(case, tensors)
    assert y.isnan().all()
    assert cotangents(case, tensors, y)[0].isnan().all()  # a NaN downstream is not swallowed
    assert (cotangents(case, tensors, torch.ones_like(y))[0] == 1).all()


@pytest.mark.parametrize("name,empty", [("sum", 0.0), ("mean", nan), ("max", -inf), ("min", inf), ("amax", 0.0), ("logsumexp", -inf)])
def test_reductions_over_nothing(name, empty):
    frame = replace(FRAME, extents={**EXTENTS, "n": 0})
    x = torch.zeros([3 if a == "m" else 0 if a == "n" else 1 for a in FRAME.order])
    y = TABLE[name].ref(torch, frame, x, axes=("n",))
    assert tuple(y.shape) == tuple(1 if a == "n" else s for a, s in zip(FRAME.order, x.shape))
    torch.testing.assert_close(y, torch.full_like(y, empty), equal_nan=True)


@pytest.mark.parametrize("index", [-1, 4, 2**31 + 5, -(2**40)])
def test_gather_outside_the_axis_is_nan_and_has_no_derivative(index):
    x = torch.arange(4.0, dtype=torch.float64).reshape([4 if a == "n" else 1 for a in FRAME.order])
    i = torch.tensor([2, index]).reshape([2 if a == "b" else 1 for a in FRAME.order])
    case = Case("gather", (ty(F32, "n"), ty(I64, "b")), {"axis": "n"})
    y = forward(case, [x, i])
    assert y.reshape(-1)[0] == 2 and y.reshape(-1)[1].isnan()
    dx, di = cotangents(case, [x, i], torch.ones_like(y))
    assert di is None and dx.reshape(-1).tolist() == [0, 0, 1, 0]


# --- laws --------------------------------------------------------------------------------------------------------------

SMOOTH = [c for c in CASES if not any(not isinstance(a, Ty) for a in c.args)]


@by_id([c for c in SMOOTH if c.entry.laws.homogeneous is not None])
def test_homogeneous(case):
    tensors, r = sample(case, 1), 1.75
    scaled = [t * r if t.is_floating_point() else t for t in tensors]
    torch.testing.assert_close(forward(case, scaled), forward(case, tensors) * r**case.entry.laws.homogeneous)


@by_id([c for c in SMOOTH if c.entry.laws.linear])
def test_linear(case):
    one, two = sample(case, 1), sample(case, 2)
    for group in case.entry.laws.linear:
        inside = [case.entry.arg(i) in group for i in range(len(one))]
        other = [b if i else a for a, b, i in zip(one, two, inside)]
        mixed = [1.5 * a - 0.75 * b if i else a for a, b, i in zip(one, other, inside)]
        torch.testing.assert_close(forward(case, mixed), 1.5 * forward(case, one) - 0.75 * forward(case, other))


@by_id([c for c in SMOOTH if c.entry.laws.commutative and c.entry.kind == "map"])
def test_commutative(case):
    x, y = sample(case, 1)
    assert torch.equal(case.entry.ref(torch, x, y), case.entry.ref(torch, y, x))


@by_id([c for c in SMOOTH if c.entry.laws.zero])
def test_zero_stays_zero(case):
    tensors = [torch.zeros_like(t) if t.is_floating_point() else t for t in sample(case, 1)]
    y = forward(case, tensors)
    assert torch.equal(y, torch.zeros_like(y))


@by_id([c for c in SMOOTH if c.entry.laws.nonzero])
def test_never_zero(case):
    extremes = torch.tensor([1e-45, 1e-30, 1.0, 3e38]).reshape([4, *[1] * 7][: len(FRAME.order)])
    assert bool((case.entry.ref(torch, *(extremes for _ in case.args)) != 0).all())


UNDECIDED = ("div", "cast", "pow")  # 0 at 0 or not, by the other argument
NEVER_ZERO = [c for c in SMOOTH if not c.entry.laws.zero and c.entry.kind == "map" and differentiable(c) and c.op not in UNDECIDED]


@by_id(NEVER_ZERO)
def test_ops_without_the_zero_law_do_not_keep_zero(case):
    y = forward(case, [torch.zeros_like(t) if t.is_floating_point() else t for t in sample(case, 1)])
    assert not torch.equal(y, torch.zeros_like(y))
