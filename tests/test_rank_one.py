"""`distribute`: products of a layer norm taken apart. Meaning and gradients on random programs, the bound on errors, which kernels there
are, what is refused, what `--strict` does."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from meaning import inputs, only  # noqa: E402

from coda_lang import driver, gradcheck, passes  # noqa: E402
from coda_lang.backend_cute import torch_fns, twin  # noqa: E402
from coda_lang.diagnostics.model import CodaError  # noqa: E402
from coda_lang.ir import interp  # noqa: E402
from coda_lang.ir.graph import Program  # noqa: E402
from coda_lang.ir.kernels import Gemm, Plan  # noqa: E402
from coda_lang.ir.verify import verify  # noqa: E402
from coda_lang.passes.differentiate import Derivative, differentiate  # noqa: E402
from coda_lang.passes.laws import centred_products, rank_one  # noqa: E402
from coda_lang.passes.laws.euler import SHIFTED  # noqa: E402
from coda_lang.source import Source  # noqa: E402

LAW = rank_one.LAW.name
NORM = """
program p(x: {t}[m, d], g: bf16[d], b: bf16[d], w: bf16[f, d], bf: bf16[f]) -> (y: f32[m, f])
n = layernorm[d](x, g, b, 1e-5)
y = n @ w + bf
{distribute}
"""
BLOCK = """
program p(a: bf16[m, h], wo: bf16[d, h], x0: bf16[m, d], g: bf16[d], b: bf16[d], w: bf16[d, part=2, e], c: bf16[part, e])
    -> (x: bf16[m, d], q: bf16[m, e], k: bf16[m, e], s: bf16[m, e])
x = a @ wo + x0
n = layernorm[d](x, g, b, 1e-5)
h: bf16 = n @ w + c
q, k = h
s = gelu(q) * k
distribute n
"""
CODES = """
program p(x: bf16[m, k], scale: f32[m], zero: f32[m], w: bf16[n, k]) -> (y: bf16[m, n])
v = (x - zero) * scale
y = v @ w
distribute v
"""


def used(plan: Plan) -> bool:
    return any(n.startswith(LAW) for n in plan.notes)


def maps(plan: Plan, *axes: str) -> int:
    """How many kernels pass over these axes without a product."""
    return sum(not k.products and {*k.rows, *k.cols} == set(axes) for k in plan.launched if isinstance(k, Gemm))


# --- meaning ---------------------------------------------------------------------------------------------------------------


@st.composite
def norms(draw) -> str:
    """An operand of one or two products: a value that is centred, scaled and shifted in some way; something after the product, too."""
    x = draw(st.sampled_from(["v", "f32(v)", "silu(x @ u)", "v * 0.5 + t"]))
    centre = draw(st.sampled_from(["c - mean[k](c)", "c - r", "c + r", "-(c - r)", "c - r * h", "h - c", "c", "c - 0.5"]))
    scale = draw(st.sampled_from(["", " * rsqrt(mean[k](square(c)) + 1.0)", " * r", " / (1.0 + r * r)"]))
    weight = draw(st.sampled_from(["", " * g", " * (1.0 + g)", " * g / (2.0 + h * h)"]))
    shift = draw(st.sampled_from(["", " + h", " - h", " + r", " + r * h", " + g * r"]))
    right = draw(st.sampled_from(["w", "bf16(w * 0.5)", "w"]))
    after = draw(st.sampled_from(["{}", "relu({} + bias)", "silu({} * 2.0 - bias)", "bias - {}", "shown"]))
    named = draw(st.sampled_from(["n", "n: bf16"]))
    several = draw(st.booleans())
    text = "program p(x: bf16[m, j], v: bf16[m, k], t: bf16[m, k], u: bf16[k, j], r: f32[m], g: bf16[k], h: f32[k], w: bf16[n, k],\n"
    text += f"          w2: bf16[k, q], bias: f32[n])\n    -> (y: bf16[m, n]{', z: f32[m, q]' if several else ''})\n"
    text += f"c = {x}\n{named} = ({centre}){scale}{weight}{shift}\n"
    if after == "shown":  # as an output, and by what follows, in parts
        text = text.replace("(y: bf16[m, n]", "(y: bf16[m, n], p: bf16[m, n1], s: f32[m, n2]").replace("w: bf16[n,", "w: bf16[n=4,")
        text += f"y = n @ {right} + bias\np, o = split[n -> n1=1, n2=3](y * 2.0)\ns = silu(o) - o\n"
    else:
        text += f"y = {after.format(f'(n @ {right})')}\n"
    return text + ("z = n @ w2\n" if several else "")


SIZES = {"m": 5, "k": 6, "j": 3, "n": 4, "q": 7}


def lawful(program: Program) -> Derivative:
    """The derivative with all that is done for products which were taken apart."""
    return SHIFTED.rewrite(centred_products.settled(differentiate(program)), None)[0]


def same_as_written(written: Program, after: Program, seed: int) -> None:
    """Values and gradients in float64, those by torch's autograd."""
    verify(after)
    held, size = inputs(written, SIZES, seed=seed), {a.name: a.extent or SIZES[a.name] for a in written.axes}
    for name, value in interp.run(written, held, torch, "exact", size).items():
        torch.testing.assert_close(interp.run(after, held, torch, "exact", size)[name], value, rtol=1e-9, atol=1e-9)
    derived = lawful(after)
    verify(derived.program)
    cotangents, wanted = gradcheck.autograd(written, held, dict(derived.cotangents), dict(derived.gradients), size)
    found = interp.run(derived.program, {**held, **{k: v.double() for k, v in cotangents.items()}}, torch, "exact", size)
    for name, truth in wanted.items():
        torch.testing.assert_close(found[name], truth.double(), rtol=1e-6, atol=1e-7)


def test_values_and_gradients_are_those_of_the_program_as_written() -> None:
    used: list[bool] = []

    @settings(max_examples=100, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(text=norms(), seed=st.integers(0, 99))
    def one(text: str, seed: int) -> None:
        program = only(text)
        after, uses = rank_one.rewrite(passes.prepared(program, strict=True))
        used.append(bool(uses))
        if uses:
            same_as_written(program, after, seed)

    one()
    assert sum(used) > len(used) / 3, "most random programs have nothing to be taken apart"


@pytest.mark.slow
@pytest.mark.parametrize("text", [BLOCK, CODES, NORM.format(t="bf16", distribute="distribute n")], ids=["block", "codes", "norm"])
def test_every_gradient_of_the_kernels_under_every_way_to_save(text: str) -> None:
    program = only(text)
    size = {a.name: a.extent or {"m": 5, "h": 4, "d": 6, "f": 8, "e": 8, "k": 7, "n": 9}[a.name] for a in program.axes}
    findings = list(gradcheck.check(program, size))
    assert findings and all(f.good for f in findings), [str(f) for f in findings if not f.good]


# --- the bound ---------------------------------------------------------------------------------------------------------------

M, D, F = 64, 256, 96


def errors(t: str, rho: float, distribute: bool, seed: int) -> dict[str, float]:
    """Relative errors of result and gradients, rounded where the kernels do, for rows whose mean is rho standard deviations."""
    program = only(NORM.format(t=t, distribute="distribute n" if distribute else ""))
    plan, size = passes.trained(program), {"m": M, "d": D, "f": F}
    assert used(plan) == distribute and plan.derived is not None
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    x = normal(M, D) + rho * torch.sign(normal(M, 1))
    given = {"g": 1 + 0.3 * normal(D), "b": 0.5 * normal(D), "w": normal(F, D) / 16, "bf": normal(F)}
    given = {"x": x if t == "f32" else x.bfloat16(), **{k: v.bfloat16() for k, v in given.items()}}
    fn, derived = gradcheck.function_of(plan), plan.derived
    exact = interp.run(program, {k: v.double() for k, v in given.items()}, torch, "exact")
    made = twin.run((fn.saving or fn.program), fn.functions, given, f=torch_fns.Written(), extents=size)
    cotangents, truth = gradcheck.autograd(program, given, dict(derived.cotangents), dict(derived.gradients), size)
    held = {**given, **made, **cotangents}
    back = twin.run(fn.backward, fn.functions, {a.name: held[a.name] for a in fn.backward.inputs}, f=torch_fns.Written(), extents=size)
    return {"y": gradcheck.relative(made["y"], exact["y"]), **{n: gradcheck.relative(back[n], v) for n, v in truth.items()}}


def bound(plain: float, rho: float, exact: bool, depth: int) -> float:
    """docs/numerics.md: twice what the norm that is rounded as an operand has; f32 sums, and the rounding of x, times ρ."""
    return 2 * plain + (1 + rho) * depth * 2.0**-28 + (0.0 if exact else rho * 2.0**-8)


@pytest.mark.slow
@settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(t=st.sampled_from(["bf16", "f32"]), rho=st.sampled_from([0.0, 1.0, 5.0, 30.0, 300.0]), seed=st.integers(0, 99))
def test_errors_stay_under_the_bound(t: str, rho: float, seed: int) -> None:
    """K is the deepest sum: of rows for the weight's gradient, of columns else."""
    apart, plain = errors(t, rho, True, seed), errors(t, rho, False, seed)
    for name, error in apart.items():
        assert error <= bound(plain[name], rho, t == "bf16", max(M, D, F)), (name, error, plain[name])


@pytest.mark.slow
def test_the_rounding_of_x_grows_as_the_plan_warns_and_without_it_nothing_does() -> None:
    grown, plain = errors("f32", 30.0, True, 0), errors("f32", 30.0, False, 0)
    assert grown["y"] > 10 * plain["y"] and grown["d_w"] > 5 * plain["d_w"]
    kept, plain = errors("bf16", 30.0, True, 0), errors("bf16", 30.0, False, 0)
    assert all(kept[n] <= 1.5 * plain[n] for n in kept), "x has 16 bits: the mean comes off exactly"
    notes = {t: " ".join(passes.run(only(NORM.format(t=t, distribute="distribute n"))).notes) for t in ("f32", "bf16")}
    assert "the error of rounding x grows by ρ" in notes["f32"] and "x has 16 bits: only the error of f32 sums grows" in notes["bf16"]


# --- kernels -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gpt2_block_makes_no_norm_and_passes_over_no_activation_between_products() -> None:
    source = (Path(__file__).parent.parent / "specs" / "gpt2" / "attn_out_mlp.coda").read_text(encoding="utf-8")
    source = source.replace("h: bf16 = layernorm[d](x1, g1, b1, eps) @", "n1 = layernorm[d](x1, g1, b1, eps)\nh: bf16 = n1 @")
    source = source.replace(
        "q, k, v = split[part](layernorm[d](x2, g2, b2, eps) @", "n2 = layernorm[d](x2, g2, b2, eps)\nq, k, v = split[part](n2 @"
    )
    plain, apart = passes.trained(only(source)), passes.trained(only(source + "distribute n1, n2\n"))
    assert plain.derived is not None and apart.derived is not None
    assert [maps(p, "m", "d") for p in (plain, plain.derived.backward, apart, apart.derived.backward)] == [2, 2, 0, 0]
    assert maps(apart, "d", "f") == 1 and maps(apart.derived.backward, "m", "f") == 0
    held = [f"{t.dtype}[{' '.join(t.axes)}]" for t in apart.derived.residuals]
    assert "f32[m f]" not in held and held.count("bf16[m f]") == 2 and held.count("bf16[m d]") == 1, "h, its GELU, x1"
    assert any(n.startswith(SHIFTED.name) for n in apart.derived.backward.notes)


def test_the_statistics_come_from_the_kernel_that_makes_x() -> None:
    plan = passes.run(only(BLOCK))
    assert used(plan) and any(n.startswith("moments") for n in plan.notes) and maps(plan, "m", "d") == 0


def test_what_the_statistics_are_of_is_taken_whole() -> None:
    """Its bias is no term of its own: then the kernel that makes x would have to store it without."""
    text = BLOCK.replace("x = a @ wo + x0\n", "y = a @ wo + x0 + b\nx = y\n").replace("layernorm[d](x,", "layernorm[d](y,")
    (site,) = rank_one.asked(passes.prepared(only(text), strict=True), "n").values()
    assert isinstance(site, rank_one.Site) and site.core.name == "y" and len(site.ranks) == 2 and not site.exact


def test_strict_does_not_follow_it_and_says_so() -> None:
    program, plain = only(BLOCK), only(BLOCK.replace("distribute n\n", ""))
    strict = passes.trained(program, strict=True)
    assert not used(strict) and any("`distribute n` is not followed" in n for n in strict.notes)
    assert strict.kernels == passes.trained(plain, strict=True).kernels


def test_a_bias_is_followed_only_where_it_was_asked_for() -> None:
    """A bias that is larger than the product, as those of keys are in some models, would cost accuracy."""
    text = "program p(x: bf16[m, d], g: bf16[d], w: bf16[n, d], b: bf16[n]) -> (y: bf16[m, n])\ny = rmsnorm[d](x, g, 1e-5) @ w + b\n"
    derivative = differentiate(passes.prepared(only(text)))
    assert SHIFTED.rewrite(derivative, None) == (derivative, ())
    assert centred_products.settled(derivative) is derivative


# --- refusals ----------------------------------------------------------------------------------------------------------------

HEAD = "program p(x: bf16[m, d], g: bf16[d], b: bf16[d], w: bf16[f, d]) -> (y: f32[m, f]{})\nn = {}\ny = n @ w\n{}distribute n\n"
LAYER = "layernorm[d](x, g, b, 1e-5)"
REFUSED = {
    "stored besides": (HEAD.format(", z: f32[m, d]", LAYER, "z = n\n"), "stored or read besides"),
    "read besides": (HEAD.format(", z: f32[m]", LAYER, "z = sum[d](n)\n"), "stored or read besides"),
    "rounded, and read besides": (
        HEAD.format(", z: f32[m]", LAYER, "z = sum[d](n)\n").replace("n = layer", "n: bf16 = layer"),
        "stored or read besides",
    ),
    "nothing of rank one": (HEAD.format("", "rmsnorm[d](x, g, 1e-5)", ""), "no part of it"),
    "two tensors": (HEAD.format("", "silu(x) * g + x * b", ""), "no part of it"),
    "a product of two tensors": (HEAD.format("", "x * silu(x) - mean[d](x)", ""), "no sum of one value"),
    "not linear": (HEAD.format("", "silu(x - mean[d](x))", ""), "no part of it"),
    "no operand": (HEAD.format("", LAYER, "").replace("distribute n", "distribute y"), "stored or read besides"),
    "f16": (HEAD.format("", "layernorm[d](silu(x), g, b, 1e-5)", "").replace("bf16", "f16"), "f16 may not hold it"),
}


@pytest.mark.parametrize(("text", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_distributed_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(CodaError) as e:
        driver.check(Source("p.coda", text), driver.Options())
    (found,) = e.value.diagnostics
    assert found.code == "C0416" and why in found.message and found.span is not None


@pytest.mark.parametrize("name", ["x", "c"])
def test_an_input_or_a_constant_has_nothing_to_distribute(name: str) -> None:
    text = f"program p(x: bf16[m, d], w: bf16[f, d]) -> (y: bf16[m, f])\nparam c = 2.0\ny = x @ w\ndistribute {name}\n"
    with pytest.raises(CodaError) as e:
        only(text)
    assert [d.code for d in e.value.diagnostics] == ["C0322"]


def test_what_is_said_of_a_value_is_said_of_the_one_that_equals_it() -> None:
    text = NORM.format(t="bf16", distribute="k = layernorm[d](x, g, b, 1e-5)\nz = k @ w\ndistribute k").replace(
        "(y: f32[m, f])", "(y: f32[m, f], z: f32[m, f])"
    )
    assert used(passes.run(only(text)))
