"""The law *scale moves across*: a choice by cost, both ways; its meaning and gradients on random programs; what it leaves alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from meaning import inputs, only  # noqa: E402

from coda_lang import gradcheck, passes  # noqa: E402
from coda_lang.ir import interp  # noqa: E402
from coda_lang.ir.graph import Program  # noqa: E402
from coda_lang.ir.kernels import Gemm, Plan, Store  # noqa: E402
from coda_lang.ir.verify import verify  # noqa: E402
from coda_lang.passes.differentiate import differentiate  # noqa: E402
from coda_lang.passes.laws import scale_across  # noqa: E402
from coda_lang.passes.normalise import paying  # noqa: E402

LAW = scale_across.LAW.name
# few experts, many tokens: the norm's weight may as well scale 64 rows as 8192
ROUTER = """
program router(x: bf16[m, d], g: bf16[d], w: bf16[e, d]) -> (z: f32[m, e])
nominal m = {m}, d = 4096, e = {e}
z = rmsnorm[d](x, g, 1e-5) @ w
"""
# a weight with a scale for each of its inputs: its product's kernel would wait for a pass over all of it
SCALED = """
program scaled(x: {x}, u: bf16[h, k], s: f32[h], w: bf16[n, h]) -> (y: bf16[m, n])
nominal m = {m}, k = 512, h = 4096, n = 4096
y = {a} @ bf16(w * s)
"""
COMPUTED = SCALED.format(x="bf16[m, k]", a="silu(x @ u)", m=8192)
BOTH = (
    "program p(x: bf16[m, k], g: f32[k], w: bf16[n, k], v: bf16[j, k]) -> (y: bf16[m, n], z: bf16[m, j])\nh = x * g\ny, z = h @ w, h @ v\n"
)


def used(plan: Plan) -> bool:
    return any(n.startswith(LAW) for n in plan.notes)


def stored(plan: Plan, *axes: str) -> int:
    """How many tensors with these axes its kernels write."""
    return sum(
        isinstance(s, Store) and {a for a, _ in s.access.at} == set(axes) for k in plan.launched if isinstance(k, Gemm) for s in k.sinks
    )


# --- a choice, both ways ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "e", "moves"), [(8192, 64, True), (8192, 1, True), (8192, 8192, False), (64, 4096, False)])
def test_the_weight_of_a_norm_scales_whichever_is_smaller(m: int, e: int, moves: bool) -> None:
    plan = passes.trained(only(ROUTER.format(m=m, e=e)))
    assert used(plan) == moves and plan.derived is not None
    assert stored(plan, "m", "d") == (not moves) and stored(plan, "e", "d") == moves
    assert stored(plan.derived.backward, "m", "d") == (1 if moves else 2), "dx; and the operand of dw, which x itself is now"


def test_a_scaled_weight_scales_the_activation_where_a_kernel_computes_that() -> None:
    plan = passes.run(only(COMPUTED))
    assert used(plan) and [len(k.products) for k in plan.launched if isinstance(k, Gemm)] == [1, 1], "no pass over the weight"
    strict = passes.run(only(COMPUTED), strict=True)
    assert not used(strict) and sorted(len(k.products) for k in strict.launched if isinstance(k, Gemm)) == [0, 1, 1]


@pytest.mark.parametrize(("m", "moves"), [(64, True), (16384, False)])
def test_a_stored_activation_is_scaled_where_it_is_the_smaller(m: int, moves: bool) -> None:
    text = SCALED.format(x="bf16[m, h]", a="x", m=m).replace("u: bf16[h, k], ", "").replace("k = 512, ", "")
    assert used(passes.run(only(text))) == moves


def test_bytes_and_launches_decide_and_a_training_step_is_no_dearer() -> None:
    text = (
        "program p(a: bf16[m, h], wo: bf16[d, h], g: bf16[d], w: bf16[n, d]) -> (x: bf16[m, d], y: bf16[m, n])\n"
        "nominal m = 8192, h = 4096, d = 4096, n = {n}\nx = a @ wo\ny = rmsnorm[d](x, g, 1e-5) @ w\n"
    )
    assert not used(passes.run(only(text.format(n=4096)))), "the kernel that makes x writes x · g almost for nothing"


def test_it_takes_very_many_tokens_until_the_projections_of_a_llama_are_the_smaller() -> None:
    source = "program pre(x: bf16[m, d], g: bf16[d], wq: bf16[q, d], wk: bf16[k, d]) -> (a: bf16[m, q], b: bf16[m, k])\n"
    source += "nominal m = {m}, d = 4096, q = 4096, k = 2048\n"
    source += "n = rmsnorm[d](x, g, 1e-5)\na, b = n @ wq, n @ wk\n"
    assert not used(passes.run(only(source.format(m=8192)))) and used(passes.run(only(source.format(m=65536))))


def test_the_plan_says_what_moved_and_what_is_rounded_now() -> None:
    program = passes.prepared(only(COMPUTED), strict=True)
    (use,) = scale_across.rewrite(program)[1]
    assert use.moved == ("s",) and use.rounds.endswith("· s") and "is rounded now" in use.did


def test_an_operand_moves_with_all_its_products_or_not_at_all() -> None:
    program = passes.prepared(only(BOTH), strict=True)
    after, (use,) = scale_across.rewrite(program)
    assert [e.args[0].name for e in after.eqns if e.op == "contract"] == ["x", "x"] and use.moved == ("g",)


# --- where it does not hold ------------------------------------------------------------------------------------------------

HEAD = "program p(x: {t}[m, k], g: f32[k], r: f32[m], w: {t}[n, k]) -> ({o})\n"
LEFT_ALONE = {
    "f16": HEAD.format(t="f16", o="y: f16[m, n]") + "y = (x * g) @ w\n",
    "stored as well": HEAD.format(t="bf16", o="y: bf16[m, n], h: bf16[m, k]") + "h = x * g\ny = h @ w\n",
    "read by more than products": HEAD.format(t="bf16", o="y: f32[m, n], s: f32[m]") + "h: bf16 = x * g\ny = h @ w\ns = sum[k](h)\n",
    "beside another summand": HEAD.format(t="bf16", o="y: bf16[m, n]") + "y = (x * g + 1.0) @ w\n",
    "nothing left": HEAD.format(t="bf16", o="y: bf16[m, n]") + "y = bf16(r * g) @ w\n",
    "contracted by one product only": "program p(x: bf16[m, k, j], g: f32[k], w: bf16[n, k], v: bf16[q, j])\n"
    "    -> (y: f32[m, j, n], z: f32[m, k, q])\nh: bf16 = x * g\ny, z = h @ w, h @ v\n",
    "along the rows": HEAD.format(t="bf16", o="y: bf16[m, n]") + "y = (x * r) @ w\n",
    "with itself": "program p(x: bf16[m, k], g: f32[k]) -> (y: f32[m, j])\nh: bf16 = x * g\ny = h @ rename[m -> j](h)\n",
}


@pytest.mark.parametrize("text", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_no_scale_moves_where_the_law_does_not_hold(text: str) -> None:
    program = passes.prepared(only(text), strict=True)
    assert scale_across.rewrite(program) == (program, ()) and not scale_across.places(program)


# --- meaning ---------------------------------------------------------------------------------------------------------------


@st.composite
def scaled(draw) -> str:
    """One or two products of an operand with scales over contracted axes, before or in the epilogue of another, on either side."""
    lanes = draw(st.booleans())
    k = "lane=2, k" if lanes else "k"
    norm = draw(st.sampled_from(["", " * rsqrt(mean[axes](f32(v) * f32(v)) + 1.0)", " * r", " / (1.0 + r * r)"]))
    made = draw(st.sampled_from(["x", "silu(x @ u)", "x * 0.5"]))
    scale = draw(st.sampled_from(["g", "(1.0 + g)", "g * c", "g / (2.0 + c * c)"] + (["c", "h"] if lanes else [])))
    side = draw(st.sampled_from(["left", "right", "both"]))
    several = draw(st.booleans())
    x = "bf16[m, j]" if "u" in made else f"bf16[m, {k}]"
    text = f"program p(x: {x}, u: bf16[{k}, j], r: f32[m], g: bf16[{k}], c: f32[{'lane' if lanes else 'k'}], h: f32[k],\n"
    text += f"          w: bf16[n, {k}], w2: bf16[{k}, q])\n"
    text += "    -> (y: bf16[m, n]" + (", z: f32[m, q])\n" if several else ")\n")
    axes = "lane, k" if lanes else "k"
    text += f"v = {made}\n"
    left = f"v{norm.replace('axes', axes)}" + (f" * {scale}" if side != "right" else "")
    right = f"bf16(w * {scale})" if side != "left" else "w"
    text += f"a: bf16 = {left}\ny = a @ {right}\n"
    if several:
        text += "z = a @ w2\n"
    return text


@settings(max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=scaled(), seed=st.integers(0, 99))
def test_values_and_gradients_are_those_of_the_program_as_written(text: str, seed: int) -> None:
    program = only(text)
    before = passes.prepared(program, strict=True)
    after, uses = scale_across.rewrite(before)
    assert bool(uses) == (after != before)
    if not uses:
        return
    verify(after)
    given, size = inputs(program, SIZES, seed=seed), {a.name: a.extent or SIZES[a.name] for a in program.axes}
    for name, value in interp.run(program, given, torch, "exact", size).items():
        torch.testing.assert_close(interp.run(after, given, torch, "exact", size)[name], value, rtol=1e-9, atol=1e-9)
    derived = differentiate(after)
    cotangents, wanted = gradcheck.autograd(program, given, dict(derived.cotangents), dict(derived.gradients), size)
    held = {**given, **{k: v.double() for k, v in cotangents.items()}}
    found = interp.run(derived.program, held, torch, "exact", size)
    for name, truth in wanted.items():
        torch.testing.assert_close(found[name], truth.double(), rtol=1e-6, atol=1e-8)


SIZES = {"m": 5, "k": 6, "j": 3, "n": 4, "q": 7}


@pytest.mark.slow
@pytest.mark.parametrize("text", [ROUTER.format(m=8192, e=64), COMPUTED], ids=["router", "scaled weight"])
def test_every_gradient_of_the_kernels_under_every_way_to_save(text: str) -> None:
    findings = list(gradcheck.check(only(text)))
    assert findings and all(f.good for f in findings), [str(f) for f in findings if not f.good]


@pytest.mark.parametrize("text", [ROUTER.format(m=8192, e=64), COMPUTED], ids=["router", "scaled weight"])
def test_rounded_results_are_as_near_as_those_of_the_strict_program(text: str) -> None:
    program = only(text)
    size = {a.name: {"m": 48, "d": 160, "e": 40, "k": 32, "h": 160, "n": 40}[a.name] for a in program.axes}

    def error(strict: bool) -> float:
        fn = gradcheck.function_of(passes.run(program, strict=strict))
        found = []
        for seed in range(3):
            given = gradcheck.inputs(program, size, seed)
            exact = interp.run(program, {k: v.double() for k, v in given.items()}, torch, "exact")
            planned = fn.reference_planned(*given.values())
            (truth,) = exact.values()
            found.append(gradcheck.relative(planned, truth))
        return sorted(found)[1]

    assert used(passes.run(program)) and error(False) <= 1.3 * error(True)


def test_of_two_operands_the_one_that_pays_moves() -> None:
    program: Program = passes.prepared(
        only(
            "program p(x: bf16[m, k], g: f32[k], w: bf16[n, k], t: bf16[j, k], h: f32[k], v: bf16[q, k]) -> (y: f32[m, n], z: f32[j, q])\n"
            "nominal m = 8192, k = 4096, n = 16, j = 16, q = 8192\ny = (x * g) @ w\nz = (t * h) @ v\n"
        ),
        strict=True,
    )
    assert len(scale_across.sites(program)) == 2
    assert len(paying(scale_across.LAW, program)) == 1
