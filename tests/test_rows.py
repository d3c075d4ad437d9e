"""Row kernels: which map stages become one, what they are made of, configurations, and (slow) their machine code."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import gemm_cases  # noqa: E402
from gallery import PROGRAMS  # noqa: E402
from meaning import only  # noqa: E402

import coda_lang  # noqa: E402
from coda_lang import gradcheck, passes  # noqa: E402
from coda_lang.backend_cute import configs, row_configs, selfcheck, spec, torch_fns, twin  # noqa: E402
from coda_lang.ir.kernels import Finish, Gemm, Plan  # noqa: E402

NORM = "program p(x: bf16[m, d], g: bf16[d]) -> (y: bf16[m, d])\ny = rmsnorm[d](x, g, 1e-5)"
LAYER_NORM = "program p(x: bf16[m, d], g: bf16[d], b: bf16[d]) -> (y: bf16[m, d])\ny = layernorm[d](x, g, b, 1e-5)"
SOFTMAX = "program p(x: f32[m, d]) -> (y: f32[m, d])\ny = softmax[d](x)"
BEFORE = (
    "program p(x: bf16[m, d], g: bf16[d], b: bf16[d], w: bf16[n, d]) -> (y: bf16[m, n])\nh = layernorm[d](x, g, b, 1e-5)\ny = gelu(h @ w)"
)
NAMES = ("rows_layer_norm", "rows_rms_of_lanes", "rows_softmax_thrice", "rows_of_heads", "columns_softmax")
SIZES = {"m": 5, "d": 40, "n": 24, "b": 2, "t": 3, "head": 5}


def kernels(plan: Plan) -> list[str]:
    return ["finish" if isinstance(k, Finish) else "rows" if k.whole_rows else "gemm" if k.products else "map" for k in plan.launched]


@pytest.mark.parametrize("text", [NORM, LAYER_NORM, SOFTMAX], ids=["rms", "layer norm", "softmax"])
def test_a_norm_of_an_input_is_one_kernel_and_its_backward_another(text: str) -> None:
    plan = passes.trained(only(text))
    assert kernels(plan) == ["rows"]
    assert plan.derived is not None and plan.derived.saving is not None
    assert kernels(plan.derived.saving) == ["rows"]
    assert kernels(plan.derived.backward) == (["rows"] if text is SOFTMAX else ["rows", "finish"]), "gradients of weights are finished"
    phases = [len(k.phases) for p in (plan, plan.derived.backward) for k in p.launched if isinstance(k, Gemm)]
    assert phases == [2, 2], "statistics in one walk, everything else in the next"


def test_a_norm_of_an_input_before_a_product() -> None:
    plan = passes.trained(only(BEFORE))
    assert kernels(plan) == ["rows", "gemm"]
    assert plan.derived is not None
    assert kernels(plan.derived.backward).count("map") <= 2, "dz, and dx: the row sums leave the dgrad's epilogue"


def test_what_is_no_row_kernel() -> None:
    assert "rows" not in kernels(passes.run(only(PROGRAMS["columns_softmax"]))), "tensors are stored by rows, statistics run over them"
    small = "program p(x: bf16[m, d=64], g: bf16[d]) -> (y: bf16[m, d])\ny = rmsnorm[d](x, g, 1e-5)"
    assert kernels(passes.run(only(small))) == ["map"], "a tile holds these rows"
    alone = "program p(x: f32[m, d]) -> (s: f32[m])\ns = sum[d](exp(x))"
    assert kernels(passes.run(only(alone))) == ["map", "finish"], "nothing re-enters"
    nested = "program p(x: bf16[m, h, d=16]) -> (y: bf16[m, h, d])\ny = x * rsqrt(mean[d](x * x)) * rsqrt(mean[h, d](x * x))"
    assert "rows" not in kernels(passes.run(only(nested))), "a head's statistic within a row's is not for threads that share a row"


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_under_every_way_to_save(name: str) -> None:
    program = only(PROGRAMS[name])
    findings = list(gradcheck.check(program, {a.name: SIZES[a.name] for a in program.axes if a.extent is None}))
    assert findings and all(f.good for f in findings), [str(f) for f in findings if not f.good]


@pytest.mark.parametrize("ratio", [0.0, 30.0, 1000.0])
def test_a_layer_norm_of_an_input_is_as_accurate_as_two_passes(ratio: float) -> None:
    program = only(LAYER_NORM.replace("bf16", "f32"))
    fn = gradcheck.function_of(passes.run(program))
    gen = torch.Generator().manual_seed(1)
    given = {"x": torch.randn(9, 1000, generator=gen) + ratio, "g": torch.ones(1000), "b": torch.zeros(1000)}
    got = twin.run(fn.program, fn.functions, given)["y"].double()
    want = torch.nn.functional.layer_norm(given["x"].double(), (1000,), eps=1e-5)
    eager = torch.nn.functional.layer_norm(given["x"], (1000,), eps=1e-5).double()
    assert (got - want).norm() <= 2 * (eager - want).norm() + 1e-6 * want.norm()


def test_a_rows_results_are_there_without_columns() -> None:
    fn = gradcheck.function_of(passes.run(only("program p(x: f32[m, d]) -> (y: f32[m, d], s: f32[m])\ns = sum[d](x)\ny = x - s")))
    assert [type(k) for k in fn.program.kernels] == [spec.Gemm] and row_configs.of_rows(fn.program.kernels[0])
    got = twin.run(fn.program, fn.functions, {"x": torch.zeros(3, 0)}, f=torch_fns.Written())
    assert got["y"].shape == (3, 0) and got["s"].tolist() == [0.0] * 3


@pytest.mark.parametrize("columns", [600, 2100])
def test_a_row_sum_beside_a_statistic_is_of_all_columns(columns: int) -> None:
    text = "program p(x: bf16[m, d], w: bf16[q, d], g: f32[q]) -> (y: bf16[m, q])\ny = rmsnorm[q](rmsnorm[d](x, 1.0, 1e-6) @ w, g, 1e-6)"
    fn = coda_lang.compile(text)
    (rows,) = [k for k in fn.backward.kernels if isinstance(k, spec.Gemm) and row_configs.of_rows(k)]
    assert {spec.RowReduce, spec.ColReduce} <= set(map(type, rows.sinks))
    assert selfcheck.check_gradients(fn, {"m": 5, "d": 24, "q": columns}, 0, "cpu")


# --- configurations ----------------------------------------------------------------------------------------------------

CASES = [name for name, case in gemm_cases.ALL.items() if row_configs.of_rows(case.gemm)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("m,n", [(1, 1), (7, 128), (64, 4096), (2048, 768), (8192, 4096), (100_000, 64), (3, 100_000)])
def test_what_is_taken_fits_and_keeps_threads_busy(name: str, m: int, n: int) -> None:
    gemm = gemm_cases.ALL[name].gemm
    config = configs.default(gemm, m, n, 1)
    assert config in configs.offered(gemm) and row_configs.sharing(config) * row_configs.together(config) == row_configs.THREADS
    assert config.tile_m % row_configs.together(config) == 0 and row_configs.kept_bytes(gemm, config) <= row_configs.MOST_KEPT
    if m >= 2048:
        assert -(-m // config.tile_m) >= 200, "every multiprocessor has a block"
    for sink in gemm.sinks:
        if isinstance(sink, spec.RowReduce):
            assert configs.partial_shape(gemm, config, sink, m, n)[-2] == -(-n // row_configs.panel(config))
        if isinstance(sink, spec.ColReduce):
            assert configs.partial_shape(gemm, config, sink, m, n)[-2:] == (-(-m // config.tile_m), n)


def test_a_norm_of_a_model_gives_a_warp_to_a_row() -> None:
    assert configs.default(gemm_cases.ALL["row_norm"].gemm, 8192, 4096, 1).key == "8x256_pp_c1x1"
