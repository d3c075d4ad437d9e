"""A program's derivative as kernels: right under every save plan, equal bits in both forwards, residuals and refusals; each rule counts."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import optable  # noqa: E402
from conftest import ROOT  # noqa: E402
from gallery import PROGRAMS  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from strategies import Generated, programs  # noqa: E402

from coda_lang import driver, gradcheck, ops, passes  # noqa: E402
from coda_lang.diagnostics.model import CodaError  # noqa: E402
from coda_lang.ir.graph import Lit, Output, Program, Tensor, Var  # noqa: E402
from coda_lang.ir.kernels import Gemm, Plan  # noqa: E402
from coda_lang.ir.types import BF16, F32, Ty  # noqa: E402
from coda_lang.passes import saving, training  # noqa: E402
from coda_lang.source import Source  # noqa: E402

SPECS = {p.name: p.read_text(encoding="utf-8") for p in sorted((ROOT / "specs").glob("*.coda"))}
BLOCKS = {
    "mlp": "program mlp(x: bf16[m, d], w: bf16[f, d], v: bf16[d, f]) -> (y: bf16[m, d])\ny = relu(x @ w) @ v + x\n",
    "gated mlp": """
program mlp_block(a: bf16[m, h], x0: bf16[m, d], wo: bf16[d, h], g: bf16[d], wg: bf16[f, d], wu: bf16[f, d], wd: bf16[d, f])
    -> (x2: bf16[m, d])
param eps = 1e-5
x1: bf16 = a @ wo + x0
n        = rmsnorm[d](x1, g, eps)
x2       = (silu(n @ wg) * (n @ wu)) @ wd + x1
""",
    "a norm between products": """
program p(a: bf16[m, h], w: bf16[d, h], g: bf16[d], v: bf16[n, d]) -> (x: bf16[m, d], y: bf16[m, n])
x = a @ w
y = rmsnorm[d](x, g, 1e-5) @ v
""",
    "a layer norm before a product": """
program p(x: bf16[m, d], g: bf16[d], b: bf16[d], w: bf16[n, d]) -> (y: bf16[m, n])
y = layernorm[d](x, g, b, 1e-5) @ w
""",
    "a head with its norm": """
program lm_head(x: bf16[m, d], g: bf16[d], w: bf16[v, d], target: i64[m]) -> (loss: f32[m])
z    = rmsnorm[d](x, g, 1e-5) @ w
loss = cross_entropy[v](z, target)
""",
    "a norm alone": "program p(x: bf16[m, d], g: bf16[d]) -> (y: bf16[m, d])\ny = rmsnorm[d](x, g, 1e-5)\n",
    "softmax": "program p(x: f32[m, n]) -> (y: bf16[m, n])\ny = softmax[n](x)\n",
    "a loss alone": "program p(z: bf16[m, v], t: i64[m]) -> (l: f32[m])\nl = cross_entropy[v](z, t)\n",
    "an activation alone": "program p(x: bf16[m, k], b: bf16[k]) -> (y: bf16[m, k])\ny = silu(x + b)\n",
    "one axis": "program p(x: f32[m], s: f32[]) -> (y: f32[m], t: f32[])\ny = exp(x) * s\nt = sum[m](y)\n",
    "swiglu, halves": """
program p(x: bf16[m, d], w: bf16[lane=2, f, d], b: f32[lane, f]) -> (y: bf16[m, f])
g, u = x @ w + b
y = silu(g) * u
""",
    "swiglu, apart": "program p(x: bf16[m, d], wg: bf16[f, d], wu: bf16[f, d]) -> (y: bf16[m, f])\ny = silu(x @ wg) * (x @ wu)\n",
    "tied weights": "program p(x: bf16[m, d], w: bf16[f, d]) -> (y: bf16[m, d])\ny = relu(x @ w) @ w\n",
    "a gradient that is zero": "program p(x: bf16[m, d], w: bf16[f, d], s: f32[f]) -> (y: bf16[m, f])\ny = x @ w + stop_gradient(s)\n",
}


def some(examples: int, derandomize: bool = True):
    """The same programs on every run; other ones each night."""
    return settings(max_examples=examples, derandomize=derandomize, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def only(text: str) -> Program:
    (program,) = driver.programs(Source("p.coda", text))
    return program


def trained(text: str) -> Plan:
    return passes.trained(only(text))


def assert_good(program: Program, **options) -> list[gradcheck.Finding]:
    found = list(gradcheck.check(program, **options))
    assert found and all(f.good for f in found), "\n".join(str(f) for f in found if not f.good)
    return found


# --- it is the derivative ------------------------------------------------------------------------------------------------


SOURCES = SPECS | BLOCKS
FEW = 2  # save plans, where not all are tried


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_the_backward_is_the_derivative(name: str) -> None:
    for program in driver.programs(Source(name, SOURCES[name])):
        if training.differentiable(program):
            assert_good(program, most=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES | PROGRAMS)
def test_the_backward_is_the_derivative_under_every_save_plan(name: str) -> None:
    for program in driver.programs(Source(name, (SOURCES | PROGRAMS)[name])):
        if training.differentiable(program):
            assert_good(program)


@pytest.mark.slow
@some(15)
@given(programs())
def test_random_programs_have_their_derivatives_under_every_save_plan(g: Generated) -> None:
    assert_good(g.program, extents=g.extents, seed=g.seed, most=6)


@pytest.mark.nightly
@some(1000, derandomize=False)
@given(programs())
def test_other_random_programs_each_night(g: Generated) -> None:
    assert_good(g.program, extents=g.extents, seed=g.seed)


# --- every rule counts -----------------------------------------------------------------------------------------------------


def alone(case: optable.Case) -> tuple[Program, dict]:
    """A program of one operator, and inputs inside its domain."""
    args, inputs, given = [], [], {}
    for i, (a, t) in enumerate(zip(case.args, optable.sample(case))):
        if isinstance(a, Ty):
            inputs.append(Tensor(f"x{i}", a.dtype, a.axes))
            given[f"x{i}"] = optable.FRAME.take(t, a.axes).contiguous().to(gradcheck.torch_fns.DTYPES[a.dtype.name])
        args.append(Var(f"x{i}", a) if isinstance(a, Ty) else Lit(float(a), F32))
    b = ops.builder.EqnBuilder(optable.AXES, {t.name for t in inputs})
    y = b.apply(case.op, args, case.attrs)
    if y.ty.dtype is not F32:
        y = b.cast(y, dtype="f32")
    held = {a for t in inputs for a in t.axes} | set(y.ty.axes)
    axes = tuple(a for a in optable.AXES if a.name in held or a.name == case.attrs.get("axis"))
    return Program("alone", axes, tuple(inputs), (Output(Tensor("y", F32, y.ty.axes), y.atom),), tuple(b.eqns)), given


def counts(case: optable.Case) -> bool:
    """Is the case a program that a source can be (every axis in an input, no batch, no gather of an input's vector), with a gradient?"""
    if case.attrs.get("batch") or case.op == ops.EXPAND.name or case.op == ops.GATHER.name and len(case.args[0].axes) < 2:  # type: ignore[union-attr]
        return False
    if optable.out_type(case).dtype.kind != "float" or not any(isinstance(a, Ty) and a.dtype.kind == "float" for a in case.args):
        return False
    if case.entry.vjp is None:
        return True
    if not optable.differentiable(case):
        return False
    axes = optable.out_type(case).axes
    g = torch.ones([optable.EXTENTS[a] if a in axes else 1 for a in optable.FRAME.order], dtype=torch.float64)
    found = optable.cotangents(case, optable.sample(case), g)
    return any(d is not None and bool((d != 0).any()) for d in found)


GRADED = [c for c in optable.cases() if counts(c)]


def wrong(rule):
    """The rule with its cotangents halved; in place of none, the cotangent passed through."""

    def halved(b, g, *args, **attrs):
        return tuple(None if d is None else b.value(d) * 0.5 for d in rule(b, g, *args, **attrs))

    def through(b, g, y, *args, **attrs):
        return tuple(None if a.ty.dtype.kind != "float" else g for a in args)

    return halved if rule is not None else through


def spread() -> tuple[Program, dict]:
    """A program that needs the rule of `expand`: one along an axis that another input has."""
    inputs = Tensor("x", F32, ("m",)), Tensor("v", F32, ("m", "n"))
    b = ops.builder.EqnBuilder(optable.AXES, {"x", "v"})
    y = b.square(b.expand(Var("x", Ty(F32, ("m",))), axes=("n",)) + Var("v", Ty(F32, ("m", "n"))))
    axes = tuple(a for a in optable.AXES if a.name in ("m", "n"))
    size = [optable.EXTENTS[a.name] for a in axes]
    given = {"x": torch.arange(size[0]) / 8, "v": torch.arange(size[0] * size[1]).reshape(size) / 16}
    return Program("alone", axes, inputs, (Output(Tensor("y", F32, ("m", "n")), y.atom),), tuple(b.eqns)), given


def far(program: Program, given: dict) -> float:
    """The largest error of a program's gradients, under the planned way of saving."""
    size = {a.name: optable.EXTENTS[a.name] for a in program.axes}
    plan = training.planned(passes.run(program), saving.joint(passes.prepared(program)))
    found = gradcheck.compare(program, plan, "as planned", given, size)
    return max(f.error for f in found if f.how in ("oracle", "twin"))


def falls_with(op: str, program: Program, given: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are right, and wrong as soon as the rule of `op` is."""
    right = far(program, given)
    assert right <= 1e-6, f"off by {right}"
    entry = ops.TABLE[op]
    monkeypatch.setitem(ops.TABLE, op, dataclasses.replace(entry, vjp=wrong(entry.vjp)))
    assert far(program, given) > 0.05, "another derivative is no derivative"


@pytest.mark.parametrize("case", GRADED, ids=str)
def test_an_operators_rule_counts(case: optable.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    falls_with(case.op, *alone(case), monkeypatch)


def test_the_rule_of_expand_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    falls_with(ops.EXPAND.name, *spread(), monkeypatch)


def test_every_rule_is_counted() -> None:
    """Of every operator whose result is a float and that reads one: also that it has no derivative, if it has none."""
    smooth = {c.op for c in optable.cases() if optable.out_type(c).dtype.kind == "float" and any(isinstance(a, Ty) for a in c.args)}
    assert smooth - {c.op for c in GRADED} == {ops.EXPAND.name} and set(ops.TABLE) - smooth <= {
        name for name, op in ops.TABLE.items() if op.vjp is None
    }


# --- what is saved ---------------------------------------------------------------------------------------------------------


def residuals(text: str) -> list[str]:
    derived = trained(text).derived
    assert derived is not None
    return [f"{t.name}: {t.dtype}" for t in derived.residuals]


LINEAR = "program p(x: bf16[m, k], w: bf16[n, k], b: f32[n]) -> (y: bf16[m, n])\n"


def test_one_preactivation_is_saved_and_not_the_factors_of_its_slope() -> None:
    assert len(residuals(LINEAR + "z = x @ w + b\ny = silu(z)\n")) == 1


def test_a_stored_preactivation_is_not_saved_again() -> None:
    assert residuals(SPECS["swiglu.coda"]) == []


def test_the_rounded_value_is_saved_where_the_forward_uses_it_rounded() -> None:
    assert [r.split(": ")[1] for r in residuals(LINEAR + "z = bf16(x @ w)\ny = silu(z)\n")] == ["bf16"]


def test_save_and_recompute_overrule() -> None:
    head = SPECS["lm_head_lse.coda"].split("\n\n")
    text = "\n\n".join(part for part in head if "lm_head_logits" not in part and "The same with" not in part)
    assert "z: f32" in residuals(text)
    again = trained(text.replace("lse  =", "recompute z\nlse  =", 1))
    assert again.derived is not None and "z" not in [t.name for t in again.derived.residuals]
    products = [k for k in again.derived.backward.kernels if isinstance(k, Gemm) and k.products]
    assert len(products) == 3, "the logits once more, and two gradients"
    saved = residuals(LINEAR + "z = x @ w + b\nt = tanh(z)\nsave t\ny = t * t\n")
    assert "t: f32" in saved


def test_the_forward_that_saves_has_the_forwards_kernels_with_more_stores() -> None:
    plan = trained(SPECS["geglu.coda"])
    assert plan.derived is not None and plan.derived.saving is not None
    (kernel,), (saving,) = plan.kernels, plan.derived.saving.kernels
    assert (kernel.products, kernel.rows, kernel.cols) == (saving.products, saving.rows, saving.cols)
    assert len(saving.sinks) == len(kernel.sinks) + 2


def test_a_gradient_that_is_its_cotangent_is_no_kernel() -> None:
    derived = trained(SPECS["linear_residual.coda"]).derived
    assert derived is not None and derived.backward.same == (("d_r", "d_y"),)


def test_products_whose_rows_are_lanes_are_summed_in_one_accumulator() -> None:
    derived = trained(BLOCKS["swiglu, apart"]).derived
    assert derived is not None
    assert [len(k.products) for k in derived.backward.kernels if isinstance(k, Gemm) and "d_x" in k.name] == [2]


def test_programs_without_a_derivative_have_none() -> None:
    assert passes.trained(only("forward " + BLOCKS["mlp"].strip())).derived is None
    assert trained("program p(const x: bf16[m, k], const w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n").derived is None


def test_no_residual_is_narrower_than_what_the_forward_uses() -> None:
    for text in (*SPECS.values(), *BLOCKS.values()):
        for program in driver.programs(Source("p.coda", text)):
            derived = passes.trained(program).derived if training.differentiable(program) else None
            values = {e.out.name: e.out.ty.dtype for e in derived.saving.program.eqns} if derived and derived.saving else {}
            for o in derived.saving.program.outputs if derived and derived.saving else ():
                assert o.tensor.dtype is values.get(o.value.name, o.tensor.dtype) or o.tensor.dtype is BF16 and o.value.ty.dtype is BF16


def test_a_refused_derivative_says_how_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from coda_lang.diagnostics.model import Diagnostic

    def refuse(*_, **__):
        raise CodaError([Diagnostic("C0601", "no tile holds it", None)])

    monkeypatch.setattr(training, "planned", refuse)
    with pytest.raises(CodaError) as e:
        trained(BLOCKS["mlp"])
    assert "forward program mlp" in e.value.diagnostics[0].notes[-1]


def test_alike_sees_another_equation() -> None:
    from coda_lang.passes.alike import alike

    first, second = trained(LINEAR + "y = silu(x @ w)\n"), trained(LINEAR + "y = gelu(x @ w)\n")
    assert alike(first, first) and not alike(first, second)
    kernel = first.kernels[0]
    assert isinstance(kernel, Gemm)
    assert not alike(first, replace(first, kernels=(replace(kernel, sinks=()),)))


@pytest.mark.parametrize("reduction", ["a = amax[m](z)", "a = amax[hd](z)"])
def test_the_largest_is_found_among_the_very_bits_that_were_reduced(reduction: str) -> None:
    """A statistic's order is its kernel's own: computed again it may differ in the last bit, and no element would be the largest."""
    axes = "n, hd" if "[m]" in reduction else "m, n"
    text = f"program p(x: bf16[m, k], w: bf16[n, hd=8, k]) -> (a: f32[{axes}], y: bf16[m, n, hd])\n"
    program = only(text + f"u = x @ w\nz = u * rsqrt(mean[hd](u * u) + 1.0)\n{reduction}\ny = z\nsave a\n")
    derived = passes.trained(program).derived
    assert derived is not None and ("z" in [t.name for t in derived.residuals]) == ("[m]" in reduction)
    assert_good(program, extents={"m": 40, "n": 5, "k": 24}, most=4)
