"""`passes.laws`, law by law: what the record says of itself, the float64 meaning of every program and every derivative that it rewrites,
and what each is good for: what is saved, how many kernels there are, how far rounded gradients are from float64."""

from __future__ import annotations

import pytest
import strategies
from conftest import ROOT
from gallery import PROGRAMS
from hypothesis import HealthCheck, given, settings
from test_normalise import CONTRACTED, DEQUANTISE, LM_HEAD, MLP_BLOCK, QUOTIENT, sizes
from test_stages import doubles, programs, tidy

from coda_lang import gradcheck, passes
from coda_lang.ir import interp
from coda_lang.ir.graph import Program
from coda_lang.ir.kernels import Gemm, Plan
from coda_lang.ir.verify import verify
from coda_lang.passes import saving, training
from coda_lang.passes.differentiate import differentiate
from coda_lang.passes.laws import ASKED, CHOSEN, LAWS, OF_DERIVATIVES, AnyLaw, ChosenLaw, DerivativeLaw, Law
from coda_lang.passes.laws.euler import ADJOINT, EULER, ROUNDED

torch = pytest.importorskip("torch")

ROTATED = """
program qkv(x0: bf16[m, d], a: bf16[m, h], wo: bf16[d, h], g: bf16[d], wq: bf16[qh=4, lane=2, pair=8, d], wk: bf16[kh=2, lane, pair, d],
            wv: bf16[kh, lane, pair, d], pos: i32[m], const freq: f32[pair])
    -> (x: bf16[m, d], q: bf16[m, qh, lane, pair], k: bf16[m, kh, lane, pair], v: bf16[m, kh, lane, pair])
x = a @ wo + x0
n = rmsnorm[d](x, g, 1e-5)
q = rope[lane](n @ wq, pos, freq)
k = rope[lane](n @ wk, pos, freq)
v = n @ wv
"""
NORM = """
program p(a: {t}[m, h], wo: {t}[d, h], g: {t}[d], w: {t}[n, d]) -> (x: {t}[m, d], y: {t}[m, n])
x = a @ wo
y = {f}(rmsnorm[d](x, g, 1e-5) @ w)
"""
GATED = """
program p(a: bf16[m, h], wo: bf16[d, h], g: bf16[d], wg: bf16[f, d], wu: bf16[f, d]) -> (x: bf16[m, d], y: bf16[m, f])
x = a @ wo
n = rmsnorm[d](x, g, 1e-5)
y = {gate} * ({up})
"""
RELU = "program p(x: bf16[m, d], w: bf16[f, d], v: bf16[d, f]) -> (y: bf16[m, d])\ny = {f}(x @ w) @ v + x\n"
ALONE = "program p(x: {t}[m, d], w: {t}[f, d]) -> (y: {t}[m, f])\ny = {f}(x @ w)\n"
REGLU = GATED.format(gate="relu(n @ wg)", up="n @ wu")
WRITTEN = """
program p(x0: bf16[m, d], wo: bf16[d, h], a: bf16[m, h], g: bf16[d], wg: bf16[f, d], wu: bf16[f, d], wd: bf16[d, f])
    -> (x2: bf16[m, d])
x1: bf16 = a @ wo + x0
n = rmsnorm[d](x1, g, 1e-5)
gate: bf16 = n @ wg
up: bf16 = n @ wu
x2 = (silu(gate) * up) @ wd + x1
"""
SOURCES = (*PROGRAMS.values(), MLP_BLOCK, LM_HEAD, DEQUANTISE, QUOTIENT, CONTRACTED)
NORMS = [ROTATED, REGLU, WRITTEN, *(NORM.format(t=t, f=f) for t in ("bf16", "f16") for f in ("relu", "relu2", "silu", "abs"))]
NORMS += [RELU.format(f=f) for f in ("relu", "relu2", "tanh")] + [ALONE.format(t=t, f=f) for t in ("bf16", "f16") for f in ("exp", "relu2")]
APART = """
program p(x: bf16[m, d], g: bf16[d], b: bf16[d], w: bf16[f, d], c: bf16[f]) -> (y: bf16[m, f])
n = layernorm[d](x, g, b, 1e-5)
h: bf16 = {h}
y = {y}
distribute n
"""
NORMS += [APART.format(h="n @ w + c", y=y) for y in ("gelu(h)", "h")] + [APART.format(h="2.0 * (n @ w)", y="relu(h) + h")]
EVERY = pytest.mark.parametrize("law", (*ASKED, *LAWS, *CHOSEN), ids=lambda law: law.name)
ALL: tuple[AnyLaw, ...] = (*ASKED, *LAWS, *CHOSEN, *OF_DERIVATIVES)
EVERY_OTHER = pytest.mark.parametrize("law", OF_DERIVATIVES, ids=lambda law: law.name)


def test_a_law_is_named_once() -> None:
    assert len({law.name for law in ALL}) == len(ALL)


@pytest.mark.parametrize("law", ALL, ids=lambda law: law.name)
def test_a_law_says_what_it_is_and_strict_forbids_what_moves_a_rounding(law: AnyLaw) -> None:
    assert law.name and law.statement and law.condition
    assert law.strict_forbids == bool(law.rounding)


def test_every_law_is_documented() -> None:
    text = (ROOT / "docs" / "laws.md").read_text(encoding="utf-8")
    for law in ALL:
        assert f"| {law.name} | {law.statement} |" in text


@EVERY
def test_a_law_keeps_the_meaning_of_every_program_and_reports_each_change(law: Law | ChosenLaw) -> None:
    used = 0
    for program in [tidy(p) for text in SOURCES for p in programs(text)]:
        after, uses = law.rewrite(program) if isinstance(law, Law) else law.rewrite(program, None)
        assert bool(uses) == (after != program)
        if uses:
            used += 1
            assert all(use.law is law and bool(use.rounds) == law.strict_forbids and str(use).startswith(law.name) for use in uses)
            given = doubles(program, sizes(program))
            before, now = (interp.run(p, given, torch, "exact") for p in (program, verify(after)))
            for name, value in before.items():
                torch.testing.assert_close(now[name], value, rtol=1e-9, atol=1e-9)
    assert used, "no program of the gallery uses this law"


# --- laws of derivatives ---------------------------------------------------------------------------------------------------


def only(text: str) -> Program:
    (program,) = programs(text)
    return program


def same_gradients(program: Program, law: DerivativeLaw) -> int:
    """How often the law is used in a derivative, whose meaning it keeps."""
    before = differentiate(program)
    after, uses = law.rewrite(before, None)
    assert bool(uses) == (after.program != before.program)
    assert all(use.law is law and bool(use.rounds) == law.strict_forbids and str(use).startswith(law.name) for use in uses)
    given = doubles(before.program, gradcheck.default_extents(before.program))
    whole = interp.run(verify(after.program), given, torch, "exact")
    for name, value in interp.run(before.program, given, torch, "exact").items():
        torch.testing.assert_close(whole[name], value, rtol=1e-6, atol=1e-9)
    return len(uses)


@EVERY_OTHER
def test_a_law_of_derivatives_keeps_every_gradient_and_reports_each_change(law: DerivativeLaw) -> None:
    used = sum(same_gradients(passes.prepared(p), law) for text in (*NORMS, *SOURCES) for p in programs(text) if training.differentiable(p))
    assert used >= 3


@EVERY_OTHER
@settings(max_examples=30, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(generated=strategies.programs())
def test_a_law_of_derivatives_keeps_the_gradients_of_random_programs(law: DerivativeLaw, generated: strategies.Generated) -> None:
    before = differentiate(generated.program)
    after, _ = law.rewrite(before, None)
    given = {k: v.double() if v.is_floating_point() else v for k, v in strategies.tensors(before.program, generated.extents).items()}
    whole = interp.run(verify(after.program), given, torch, "exact")
    for name, value in interp.run(before.program, given, torch, "exact").items():
        torch.testing.assert_close(whole[name], value, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_a_law_is_used_at_chosen_places_only() -> None:
    before = differentiate(passes.prepared(only(ROTATED)))
    _, uses = EULER.rewrite(before, None)
    assert len(uses) == 3
    _, (one,) = EULER.rewrite(before, frozenset({uses[1].place}))
    assert one.place == uses[1].place


def trained(text: str, strict: bool = False) -> Plan:
    return passes.trained(only(text), strict=strict)


def residuals(plan: Plan) -> list[str]:
    """What is saved, vectors of a row apart."""
    assert plan.derived is not None
    return sorted(f"{t.dtype}[{' '.join(t.axes)}]" for t in plan.derived.residuals if len(t.axes) > 1)


def notes(plan: Plan) -> set[str]:
    assert plan.derived is not None
    return {n.split(",")[0] for n in plan.derived.backward.notes}


def products(plan: Plan) -> int:
    assert plan.derived is not None
    return sum(len(k.products) > 0 for k in plan.derived.backward.kernels if isinstance(k, Gemm))


def test_nothing_of_a_rotation_is_saved_and_strict_saves_what_the_norm_needs() -> None:
    plan = trained(ROTATED)
    assert not [r for r in residuals(plan) if "pair" in r] and notes(plan) >= {"homogeneous", "narrow residual"}
    plain = saving.plain(passes.prepared(only(ROTATED)))
    assert "f32[m qh lane pair]" in [f"{t.dtype}[{' '.join(t.axes)}]" for t in plain.residuals]
    assert not {"narrow residual", "adjoint swap"} & notes(trained(ROTATED, strict=True))


@pytest.mark.parametrize("f", ["relu", "relu2"])
def test_an_activation_that_its_result_tells_is_not_saved(f: str) -> None:
    assert residuals(trained(RELU.format(f=f))) == ["bf16[m f]"]
    assert residuals(trained(RELU.format(f=f), strict=True)) == ["bf16[m f]", "f32[m f]"]


def test_a_rounding_that_would_grow_is_not_used() -> None:
    assert residuals(trained(ALONE.format(t="bf16", f="tanh"))) == ["f32[m f]"]
    assert residuals(trained(ALONE.format(t="bf16", f="exp"))) == []
    assert residuals(trained(ALONE.format(t="f16", f="relu2"))) == ["f32[m f]"], "f16 loses the squares of small values"


def test_a_branch_that_is_not_taken_counts_nothing_even_if_it_is_nan() -> None:
    """u, not normalised, and the row's other uses are finite; what is divided by 0 is not chosen."""
    program = passes.prepared(
        only(
            "program p(x: f32[m, d], w: bf16[n, d], c: f32[n], g: f32[d]) -> (y: f32[m, n], v: f32[m, n])\n"
            "z = bf16(rmsnorm[d](x, g, 1e-5)) @ w\ny = where(c > 0.0, z / c, 0.0)\nv = z * 2.0\n"
        )
    )
    before = differentiate(program)
    after, uses = EULER.rewrite(before, None)
    assert uses and " and " in uses[0].did, "followed into the branch, and beside it"
    held = doubles(before.program, gradcheck.default_extents(before.program))
    held["c"][::2] = 0.0
    whole = interp.run(verify(after.program), held, torch, "exact")
    for name, value in interp.run(before.program, held, torch, "exact").items():
        assert bool(value.isfinite().all())
        torch.testing.assert_close(whole[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("behind", ["relu(v * 2.0)", "v * v", "-bf16(v * 0.5)"])
def test_what_a_shown_value_becomes_counts_once(behind: str) -> None:
    """v is read as it is, as an output; what is made of it has its part in v's gradient already, however far on."""
    text = "program p(x: bf16[m, d], g: bf16[d], w: bf16[n, d]) -> (v: bf16[m, n], s: bf16[m, n])\n"
    program = passes.prepared(only(f"{text}v = rmsnorm[d](x, g, 1e-5) @ w\ns = {behind}\n"))
    assert same_gradients(program, ROUNDED) == 1


def test_a_squared_gate_counts_twice() -> None:
    before = differentiate(passes.prepared(only(NORM.format(t="bf16", f="relu2"))))
    _, (use,) = EULER.rewrite(before, None)
    assert "degree 2" in use.did


def test_the_row_sum_of_a_norm_that_stays_is_known_before_the_product() -> None:
    text = NORM.format(t="f16", f="relu")  # f16: the scale does not move out
    swapped, kept = trained(text), trained(text, strict=True)
    assert ADJOINT.name in notes(swapped) and swapped.derived is not None and kept.derived is not None
    assert len(swapped.derived.backward.parts) < len(kept.derived.backward.parts) and products(swapped) == products(kept) == 4


def test_what_a_tile_of_the_backward_holds_is_stored_there_for_the_weight_gradient() -> None:
    plan = trained(WRITTEN)
    assert residuals(plan) == ["bf16[m d]", "bf16[m f]", "bf16[m f]"], (
        "x1, gate and up: no f32 beside them, neither the norm nor the product of the gates"
    )
    assert products(plan) == 7


@pytest.mark.slow
@pytest.mark.parametrize("text", [ROTATED, WRITTEN, REGLU, *NORMS[3:11]], ids=range(11))
def test_rounded_gradients_stay_as_near_as_those_of_the_strict_program(text: str) -> None:
    """The laws that move a rounding against the program's own roundings: errors of all gradients against float64."""
    program = only(text)
    size = {a.name: a.extent or {"m": 48, "d": 32, "h": 24, "f": 40, "n": 40}[a.name] for a in program.axes}

    def errors(strict: bool) -> dict[str, float]:
        """The median of three draws: where an activation has a kink, one element on its other side shows."""
        plan, forward = passes.run(program, strict=strict), passes.prepared(program, strict)
        made = training.planned(plan, saving.joint(forward, strict=strict))
        found: dict[str, list[float]] = {}
        for seed in (0, 1, 5):
            for f in gradcheck.compare(program, made, "", gradcheck.inputs(program, size, seed), size):
                found.setdefault(f.gradient, []).append(f.error if f.how == "rounded" else 0.0)
        return {name: sorted(values)[-2] for name, values in found.items()}

    loose, strict = errors(False), errors(True)
    for name, error in loose.items():
        assert error <= 1.5 * strict[name] + 2e-3, f"{name}: {error:.1e} against {strict[name]:.1e}"
