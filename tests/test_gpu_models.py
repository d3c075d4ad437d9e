"""The checks and measurements of whole models on a GPU, as far as they go without one: what is called, compared, compiled."""

from __future__ import annotations

import argparse

import pytest

torch = pytest.importorskip("torch")

from bench import gpu_layers, gpu_models  # noqa: E402
from coda_lang.backend_cute import compile  # noqa: E402
from tests.clocks import AnyClock  # noqa: E402

SMALL = {"8B": (72, 104, 4, 2, 16, 203)}


@pytest.fixture(scope="module")
def bench():
    return gpu_layers.Bench("cpu", SMALL)


@pytest.mark.parametrize("case", ["layer", "loss"])
def test_every_method_computes_the_same(bench, case):
    torch.manual_seed(0)
    groups = getattr(bench, case)("8B", 37)
    assert list(groups) == (["forward", "forward+backward"] if case == "layer" else ["forward+backward"])
    for methods in groups.values():
        found = gpu_layers.measure(methods, AnyClock({}))
        assert found["ok"] and {"coda", "eager", "compile", "gemm", "coda_gemm"} <= set(found["ms"]), found


def test_the_floor_is_every_product_once_or_three_times(bench, monkeypatch):
    count = []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: count.append((a.shape[0], b.shape[1], a.shape[1])) or real(a, b))
    for passes in (1, 3):
        count.clear()
        bench.plain("8B", 37, passes)["gemm"].call()
        d, f, heads, kv_heads, hd, _ = SMALL["8B"]
        work = d * heads * hd + 3 * f * d + d * (heads + 2 * kv_heads) * hd
        assert sum(m * n * k for m, n, k in count) == passes * 37 * work


def test_kernels_are_compiled_before_anything_is_timed(bench, monkeypatch):
    asked = []
    monkeypatch.setattr(compile, "objects_for", lambda jobs, workers=None: asked.extend(jobs))
    assert bench.compile([("layer", "8B", 37), ("loss", "8B", 37)]) == len(asked) > 30
    names = {j.kernel.name for j in asked}
    assert "forward_product" in names and any(n.startswith("llama_layer_backward") for n in names)


def test_a_table_of_what_was_measured():
    ms = {"coda": 5.0, "eager": 6.0, "compile": 5.5, "gemm": 4.0, "coda_gemm": 4.5}
    record = {"case": "layer", "model": "8B", "tokens": 8192, "pass": "forward", "ms": ms, "peak_mib": dict.fromkeys(ms, 100)}
    lines = gpu_layers.table([record, {"case": "layer", "raised": "…"}]).splitlines()
    assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1
    assert "| 4.00 |" in lines[2] and "5.00, 100 MiB" in lines[2] and lines[2].endswith("| 1.25 | 1.10 |")


@pytest.mark.slow
def test_models_and_programs_are_checked(tmp_path):
    found = gpu_models.check_model("gpt2", "cpu", (2, 19))
    assert found["ok"] and found["compared"] == 54 and 0.3 < found["mean_ratio"] < 1.2, found
    options = argparse.Namespace(parts=["programs"], only=["lora"], device="cpu", limit=600.0, out=tmp_path)
    (record,) = gpu_models.checks(options)
    assert record["ok"] and set(record["gradients"]) == {"x", "a", "b"} and set(record["outputs"]) == {"y"}
    (late,) = gpu_models.checks(argparse.Namespace(**{**vars(options), "limit": -1.0}))
    assert not late["ok"] and late["left_out"]


@pytest.mark.slow
def test_every_program_of_the_folders_is_checked():
    found = gpu_models.programs([])
    layers = {f"{family}_layer" for family in ("llama", "gpt2", "gemma2", "gemma3", "qwen2", "qwen3")}
    assert layers | {"llama_pre", "llama_post", "llama_head", "lora_mlp"} <= set(found) and len(found) >= 21
