"""Norms before and behind products: the moments law, sums that split, how accurate a variance is, which kernels a LayerNorm costs."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gallery import PROGRAMS  # noqa: E402
from meaning import only  # noqa: E402

from coda_lang import gradcheck, passes  # noqa: E402
from coda_lang.backend_cute import configs, spec, torch_fns, twin  # noqa: E402
from coda_lang.ir import interp  # noqa: E402
from coda_lang.ir.kernels import Finish, Gemm, Plan, Reduce, Store  # noqa: E402
from coda_lang.passes.laws import linear, moments  # noqa: E402

BLOCK = PROGRAMS["layer_norm_block"]
NAMES = ("layer_norm_block", "moments_every_way", "moments_of_lanes", "moments_of_runs", "sums_that_split")
SIZES = {"m": 5, "h": 4, "d": 6, "k": 7, "n": 9, "f": 8}
# the variance by hand, in a form that no law takes for one; its backward has two row sums, one of which waits for the other
BY_HAND = """
program p(a: bf16[m, h], w: bf16[d, h], g: f32[d]) -> (y: f32[m, d])
x = a @ w
c = x - mean[d](x)
y = c * rsqrt(mean[d](c * x) + 1e-5) * g
"""
CENTRED = """
program p(x: bf16[m, k], w: bf16[n, k]) -> (y: f32[m, n])
z = x @ w
c = z - mean[n](z)
r = mean[n](z * z)
y = c + mean[n](c * r + z)
"""


def passes_over(plan: Plan, axes: set[str]) -> list[str]:
    """The map kernels over these axes, by name."""
    return [k.name for k in plan.launched if isinstance(k, Gemm) and not k.products and {*k.rows, *k.cols} == axes]


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_under_every_way_to_save(name: str) -> None:
    program = only(PROGRAMS[name])
    extents = {a.name: SIZES[a.name] for a in program.axes if a.extent is None}
    findings = list(gradcheck.check(program, extents))
    assert findings and all(f.good for f in findings), [str(f) for f in findings if not f.good]


@pytest.mark.parametrize("text", [BY_HAND, CENTRED], ids=["by hand", "centred"])
def test_sums_split_in_the_backward_too(text: str) -> None:
    program = only(text)
    findings = list(gradcheck.check(program, {a.name: SIZES[a.name] for a in program.axes}))
    assert findings and all(f.good for f in findings), [str(f) for f in findings if not f.good]


def test_a_layer_norm_costs_one_pass_forward_and_one_backward() -> None:
    plan = passes.trained(only(BLOCK))
    assert any(n.startswith("moments") for n in plan.notes)
    assert passes_over(plan, {"m", "d"}) == ["p_t11"], "n, as an operand of the next product"
    assert plan.derived is not None
    assert passes_over(plan.derived.backward, {"m", "d"}) == ["p_backward_d_x0"], "dx, once both row sums are whole"
    assert not passes_over(plan.derived.backward, {"m", "f"})
    (dgrad,) = [k for k in plan.derived.backward.launched if isinstance(k, Gemm) and sum(isinstance(s, Reduce) for s in k.sinks) == 4]
    kept = sorted(s.kept for s in dgrad.sinks if isinstance(s, Reduce))
    assert dgrad.products and kept == ["col", "col", "row", "row"], "dγ and dβ, and both sums of a row, where dn is made"


def test_sums_split_where_the_variance_is_no_moment() -> None:
    plan = passes.trained(only(BY_HAND))
    assert plan.derived is not None and not any(n.startswith("moments") for n in plan.notes)
    assert any(n.startswith("reductions split") for n in plan.derived.backward.notes)
    first = plan.derived.backward.parts[0].gemm
    assert first.whole_rows and [len(p.statistics) for p in first.phases] == [2, 0], "both row sums in one walk"


def test_no_sum_is_split_where_nothing_waits() -> None:
    text = "program p(x: bf16[m, k], w: bf16[n, k], s: f32[m]) -> (t: f32[m])\nt = sum[n](s * (x @ w) + s)"
    program = only(text)
    assert linear.rewrite(program) == (program, ())


@pytest.mark.parametrize(
    "variance",
    [
        "mean[n](x * x) - mean[n](x) * mean[n](x)",  # as written: it cancels, and that is the program's own doing
        "mean[n]((x - mean[n](w)) ** 2)",  # another mean
        "mean[n]((x - mean[m](x)) ** 2)",  # over another axis
        "mean[n]((x - mean[n](x)) ** 3)",
        "mean[n]((x - sum[n](x)) ** 2)",
        "mean[n]((x - mean[n](x)) * (w - mean[n](w)))",
    ],
)
def test_what_is_no_variance_stays_as_it_is(variance: str) -> None:
    program = only(f"program p(x: f32[m, n], w: f32[m, n]) -> (v: f32[m])\nv = {variance}")
    assert moments.rewrite(program) == (program, ())


def test_strict_takes_moments_too() -> None:
    assert any(n.startswith("moments") for n in passes.run(only(BLOCK), strict=True).notes)


# --- accuracy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 30.0, 1000.0])
@pytest.mark.parametrize("kept", ["row", "col"])
def test_partial_moments_are_as_accurate_as_two_passes(ratio: float, kept: str) -> None:
    """The records' own arithmetic in f32, ragged tiles included, against float64; two passes in f32 beside it."""
    m, n = 37, 1000
    gen = torch.Generator().manual_seed(3)
    x = torch.randn((m, n) if kept == "row" else (n, m), generator=gen) + ratio
    dim = 1 if kept == "row" else 0
    truth = x.double().var(dim, unbiased=False) * n
    sink = spec.RowReduce("moments", "work") if kept == "row" else spec.ColReduce("moments", "work")
    kernel = spec.Gemm("k", (), (), (), sinks=(sink,), rows=("m",), cols=("n",))
    run = twin._Run(kernel, {}, {"x": x}, {"m": x.shape[0], "n": x.shape[1]}, {}, torch_fns.Written())
    run.size = tuple(x.shape)
    work = run.partials(kernel, sink, x, spec.Config(128, 128))
    assert work.shape[0] == spec.PLANES["moments"] and work[0].sum(0).unique().tolist() == [float(n)]
    two = torch.square(x - x.mean(dim, keepdim=True)).sum(dim)

    def off(value: torch.Tensor) -> float:
        return ((value.double() - truth) / truth).abs().max().item()

    assert off(twin.combine("moments", work)) < max(2 * off(two), 1e-6)


def test_parts_of_nothing_do_not_count() -> None:
    x = torch.randn(3, 300)
    kernel = spec.Gemm("k", (), (), (), sinks=(sink := spec.RowReduce("moments", "work", spec.Window(200, 50)),), rows=("m",), cols=("n",))
    run = twin._Run(kernel, {}, {"x": x}, {"m": 3, "n": 300}, {}, torch_fns.Written())
    run.size = (3, 300)
    work = run.partials(kernel, sink, x, spec.Config(128, 128))
    assert work[0, :, 0].tolist() == [0.0, 50.0, 0.0] and not work.isnan().any()
    torch.testing.assert_close(twin.combine("moments", work), x[:, 200:250].var(1, unbiased=False) * 50)
    assert twin.combine("moments", torch.zeros(4, 1, 3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("ratio", [0.0, 30.0, 1000.0])
def test_the_planned_variance_of_a_product_is_that_of_two_passes(ratio: float) -> None:
    head = "program p(x: bf16[m, k], w: bf16[n, k], b: f32[]) -> (z: f32[m, n], v: f32[m])\n"
    program = only(head + "z = x @ w + b\nc = z - mean[n](z)\nv = mean[n](c * c)")
    fn = gradcheck.function_of(passes.run(program))
    gen = torch.Generator().manual_seed(5)
    x, w = (torch.randn(s, generator=gen).bfloat16() for s in ((19, 64), (300, 64)))
    given = {"x": x, "w": w / 8, "b": torch.tensor(float(ratio))}
    got = twin.run(fn.program, fn.functions, given)
    exact = got["z"].double().var(1, unbiased=False)
    written = interp.run(program, given, torch, "written")["v"].double()
    off, two = (((v.double() - exact) / exact).abs().max().item() for v in (got["v"], written))
    assert off < max(2 * two, 1e-6)
    (gemm, finish) = passes.run(program).kernels
    assert isinstance(gemm, Gemm) and isinstance(finish, Finish), "one kernel and its finisher"
    assert [type(s) for s in gemm.sinks] == [Store, Reduce]
    assert configs.partial_shape(fn.program.kernels[0], spec.Config(128, 128), fn.program.kernels[0].sinks[1], 19, 300) == (4, 3, 19)


def test_a_gpt2_block_passes_over_a_tensor_once_a_norm_forward_and_once_backward() -> None:
    source = (Path(__file__).parent.parent / "specs" / "gpt2" / "attn_out_mlp.coda").read_text(encoding="utf-8")
    plan = passes.trained(only(source))
    assert plan.derived is not None
    forward, backward = (passes_over(p, {"m", "d"}) for p in (plan, plan.derived.backward))
    assert len(forward) == len(backward) == 2, (forward, backward)
