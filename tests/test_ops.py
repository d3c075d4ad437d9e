"""The operator table: every facet of every entry against torch: value, emission, derivative, laws, types, documentation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from optable import AXES, EXTENTS, FRAME, Case, cases, cotangents, differentiable, forward, out_type, sample, ty  # noqa: E402

from coda_lang import ops  # noqa: E402
from coda_lang.backend_cute import torch_fns  # noqa: E402
from coda_lang.ir.graph import Lit, Output, Program, Tensor, Var  # noqa: E402
from coda_lang.ir.interp import run  # noqa: E402
from coda_lang.ir.types import BF16, BOOL, F16, F32, I32, I64, Ty  # noqa: E402
from coda_lang.ir.verify import verify  # noqa: E402
from coda_lang.ops import TABLE, TypeProblem  # noqa: E402
from coda_lang.ops.builder import EqnBuilder, EvalBuilder, literal, unbroadcast  # noqa: E402

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


UNDECIDED = ("div", "cast", "pow")  # 0 at 0 or not, by the other argument
NEVER_ZERO = [c for c in SMOOTH if not c.entry.laws.zero and c.entry.kind == "map" and differentiable(c) and c.op not in UNDECIDED]


@by_id(NEVER_ZERO)
def test_ops_without_the_zero_law_do_not_keep_zero(case):
    y = forward(case, [torch.zeros_like(t) if t.is_floating_point() else t for t in sample(case, 1)])
    assert not torch.equal(y, torch.zeros_like(y))


# --- types -------------------------------------------------------------------------------------------------------------

WRONG = [
    (Case("add", (ty(F32, "m"), ty(BOOL, "m"))), 1, "bool"),
    (Case("add", (ty(F32, "m"), ty(I32, "m"))), 1, "needs its y as f32"),
    (Case("add", (ty(F32, "m"),)), None, "takes 2 arguments, not 1"),
    (Case("silu", (ty(BOOL, "m"),)), 0, "takes numbers"),
    (Case("silu", (ty(I32, "m"),)), 0, "as f32, not i32"),
    (Case("and", (ty(BOOL), ty(F32))), 1, "needs a bool"),
    (Case("where", (ty(F32), ty(F32), ty(F32))), 0, "needs a bool"),
    (Case("cast", (ty(F32),), {"dtype": "i32"}), 0, "no rounding to integers"),
    (Case("cast", (ty(I64),), {"dtype": "i32"}), 0, "may not fit"),
    (Case("cast", (ty(F32),), {"dtype": "bool"}), None, "cannot convert to bool"),
    (Case("cast", (ty(F32),), {"dtype": "fp8"}), None, "cannot convert to fp8"),
    (Case("sum", (ty(F32, "m"),), {"axes": ("n",)}), 0, "cannot reduce over n"),
    (Case("sum", (ty(F32, "m"),), {"axes": ()}), None, "at least one axis"),
    (Case("sum", (ty(F32, "m"),), {"axes": ("m", "m")}), None, "named twice"),
    (Case("sum", (ty(F32, "m"),), {}), None, "attributes"),
    (Case("gather", (ty(F32, "m"), ty(I32, "m")), {"axis": "n"}), 0, "cannot gather along n"),
    (Case("gather", (ty(F32, "m n"), ty(I32, "n")), {"axis": "n"}), 1, "has the axis n"),
    (Case("gather", (ty(F32, "m n"), ty(F32, "m")), {"axis": "n"}), 1, "needs an integer"),
    (Case("contract", (ty(F32, "m k"), ty(BF16, "n k")), {"axes": ("k",), "batch": ()}), 0, "must be bf16 or f16"),
    (Case("contract", (ty(F16, "m k"), ty(BF16, "n k")), {"axes": ("k",), "batch": ()}), 1, "differ in type"),
    (Case("contract", (ty(BF16, "m k"), ty(BF16, "n")), {"axes": ("k",), "batch": ()}), 1, "axis k is not on both sides"),
    (Case("contract", (ty(BF16, "m k"), ty(BF16, "n k")), {"axes": (), "batch": ()}), None, "needs an axis that both sides have"),
    (Case("contract", (ty(BF16, "m k b"), ty(BF16, "n k b")), {"axes": ("k",), "batch": ()}), None, "either contracted or a batch"),
    (Case("contract", (ty(BF16, "k"), ty(BF16, "n k")), {"axes": ("k",), "batch": ()}), 0, "an axis of its own"),
    (Case("lane", (ty(F32, "m n"),), {"axis": "n", "index": 0}), None, "no fixed extent"),
    (Case("lane", (ty(F32, "m n"),), {"axis": "lane", "index": 0}), 0, "no axis lane"),
    (Case("lane", (ty(F32, "m lane"),), {"axis": "lane", "index": 2}), None, "which has 2"),
    (Case("pack", (ty(F32, "m"),), {"axis": "lane"}), None, "has 2 lanes, but 1"),
    (Case("pack", (ty(F32, "m lane"), ty(F32, "m")), {"axis": "lane"}), 0, "already has the axis"),
    (Case("pack", (ty(F32, "m"), ty(BOOL, "m")), {"axis": "lane"}), 1, "side by side"),
    (Case("run", (ty(F32, "m head"),), {"axis": "head", "start": 3, "to": "kh"}), None, "which has 5"),
    (Case("run", (ty(F32, "m"),), {"axis": "head", "start": 0, "to": "kh"}), 0, "no axis head"),
    (Case("join", (ty(F32, "qh"), ty(F32, "lane")), {"axis": "head", "of": ("qh", "lane")}), None, "together have 4"),
    (Case("join", (ty(F32, "qh"),), {"axis": "head", "of": ("qh", "kh")}), None, "2 axes are named for 1"),
    (Case("rename", (ty(F32, "m"),), {"axis": "n", "to": "p"}), 0, "no axis n"),
    (Case("rename", (ty(F32, "n p"),), {"axis": "n", "to": "p"}), 0, "already has the axis p"),
    (Case("rename", (ty(F32, "n"),), {"axis": "n", "to": "lane"}), None, "differ in extent"),
    (Case("rename", (ty(F32, "n"),), {"axis": "n", "to": "zz"}), None, "unknown axis zz"),
    (Case("expand", (ty(F32, "n"),), {"axes": ("n",)}), 0, "already has the axis n"),
    (Case("expand", (ty(F32, "n"),), {"axes": ("zz",)}), None, "unknown axis zz"),
    (Case("index", (), {"axis": "zz"}), None, "unknown axis zz"),
    (Case("size", (), {"axes": ("zz",)}), None, "unknown axis zz"),
]


@pytest.mark.parametrize("case,arg,words", WRONG, ids=[str(w[0]) for w in WRONG])
def test_wrong_applications_say_which_argument_and_why(case, arg, words):
    with pytest.raises(TypeProblem) as caught:
        out_type(case)
    assert words in caught.value.message
    assert caught.value.arg_index == arg


RIGHT = [
    (Case("add", (ty(BF16, "n"), ty(F16, "m"))), Ty(F32, ("m", "n"))),
    (Case("add", (ty(I32, "n"), ty(I32, "m"))), Ty(I32, ("m", "n"))),
    (Case("div", (ty(F32), ty(F32))), Ty(F32)),
    (Case("lt", (ty(I64, "m"), ty(I64))), Ty(BOOL, ("m",))),
    (Case("pack", (ty(BF16, "m"), ty(BF16, "n")), {"axis": "lane"}), Ty(BF16, ("m", "n", "lane"))),
    (Case("pack", (ty(BF16, "m"), ty(F32, "n")), {"axis": "lane"}), Ty(F32, ("m", "n", "lane"))),
    (Case("run", (ty(BF16, "head m"),), {"axis": "head", "start": 2, "to": "kh"}), Ty(BF16, ("m", "kh"))),
    (Case("index", (), {"axis": "n"}), Ty(I32, ("n",))),
    (Case("size", (), {"axes": ("n",)}), Ty(I32)),
    (Case("contract", (ty(F16, "m b k"), ty(F16, "k n b")), {"axes": ("k",), "batch": ("b",)}), Ty(F32, ("m", "n", "b"))),
]


@pytest.mark.parametrize("case,expected", RIGHT, ids=[str(r[0]) for r in RIGHT])
def test_types_of_results(case, expected):
    assert out_type(case) == expected


@pytest.mark.parametrize(
    "value,beside,expected",
    [
        (2, (), Lit(2, I32)),
        (2**40, (), Lit(2**40, I64)),
        (0.1, (), Lit(0.10000000149011612, F32)),
        (2, (F32,), Lit(2.0, F32)),
        (2, (BF16, I32), Lit(2.0, F32)),
        (2.0, (I32,), Lit(2, I32)),
        (2.5, (I32,), Lit(2.5, F32)),
        (-100, (I64,), Lit(-100, I64)),
        (2**40, (I32,), Lit(2**40, I64)),
        (True, (F32,), Lit(True, BOOL)),
        (-inf, (F32,), Lit(-inf, F32)),
        (-inf, (I32,), Lit(-inf, F32)),
    ],
)
def test_a_number_takes_the_type_beside_it_where_exact(value, beside, expected):
    got = literal(value, beside)
    assert got == expected and type(got.value) is type(expected.value)


@pytest.mark.parametrize("value,beside", [(2**24 + 1, (F32,)), (2**70, ()), (1e39, ()), (2**200, (F32,))])
def test_a_number_that_no_type_holds_is_refused(value, beside):
    with pytest.raises(TypeProblem):
        literal(value, beside)


def test_integers_meet_floats_by_casts_that_stand_in_the_program():
    b = EqnBuilder(AXES, ["x", "i", "j"])
    x, i, j = Var("x", ty(F32, "m")), Var("i", ty(I32, "m")), Var("j", ty(I64, "n"))
    assert b.mul(x, i).ty.dtype is F32 and [e.op for e in b.eqns] == ["cast", "mul"]
    assert b.eq(i, j).ty == Ty(BOOL, ("m", "n")) and dict(b.eqns[-2].attrs) == {"dtype": "i64"}
    assert (b.value(i) + 1).ty.dtype is I32
    assert (b.value(i) / 2).ty.dtype is F32
    assert (b.value(i) * 0.5).ty.dtype is F32
    assert b.apply("add", (1, 0.5)).ty == Ty(F32)


# --- look-up and documentation -----------------------------------------------------------------------------------------

PRIMITIVES = """+ - * / ** == != < <= > >= and or not @ where abs min max clamp floor round fma exp exp2 log log1p sqrt rsqrt square
reciprocal erf tanh sigmoid softplus sin cos relu relu2 silu gelu gelu_tanh quick_gelu sum mean amax logsumexp gather index size pack
split rename expand stop_gradient matmul""".split()


@pytest.mark.parametrize("name", PRIMITIVES)
def test_every_primitive_of_the_language_is_there(name):
    assert any(name in (op.surface, op.symbol) for op in TABLE.values())


def test_look_up_by_what_a_source_writes():
    assert ops.by_symbol("-", 1).name == "neg" and ops.by_symbol("-", 2).name == "sub" and ops.by_symbol("%", 2) is None
    assert ops.find("min").name == "minimum" and ops.find("min", "axes").name == "min"
    assert ops.find("pack", "axis").name == "pack" and ops.find("pack", "arrow").name == "join"
    assert ops.find("split", "axis").name == "lane" and ops.find("split", "arrow").name == "run"
    assert ops.find("contract") is None and ops.find("matmul", "axes") is ops.CONTRACT
    assert set(ops.names()) >= {"silu", "split", "min"} and list(ops.names()) == sorted(set(ops.names()))


@pytest.mark.parametrize("op", list(TABLE.values()), ids=lambda op: op.name)
def test_entries_are_documented(op):
    assert op.doc.endswith(".") and op.derivative.endswith(".")
    assert (op.vjp is None) == (op.derivative.startswith(("none", "dx = 0.")) and op.name not in ("logsumexp",))
    if op.emit is not None:
        calls = {name for name in torch_fns.NAMES if f"f.{name}(" in op.emit}
        assert calls or not op.emit.startswith("f.") or op.attrs, f"{op.emit} names no function of the libraries"
