"""The check of every spec on a GPU, as far as it can be tested without one: shapes, configurations, workers that hang."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from bench import gpu_specs  # noqa: E402
from coda_lang import driver  # noqa: E402
from coda_lang.backend_cute import configs, load, spec  # noqa: E402


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("emitted"), {}
    for source in gpu_specs.sources():
        path = folder / f"{source.stem}.py"
        path.write_text(driver.emit(str(source)))
        found |= {fn.program.name: fn.program for fn in load.functions_of(load.import_file(path))}
    return found


def gemm_of(program):
    return spec.launches(program)[0]


@pytest.mark.slow
def test_every_source_is_run(programs, root):
    assert len(programs) >= len(list((root / "specs").glob("*.coda"))) + 7


def test_shapes_are_those_asked_for_where_axes_are_free(programs):
    shapes = gpu_specs.shapes_of(programs["linear_bf16"], True)
    assert len(shapes) == 126 and {"m": 7, "n": 1000, "k": 1} in shapes and {"m": 128, "n": 128, "k": 128} in shapes
    assert shapes[-1] == {"m": 4096, "n": 14336, "k": 4096}
    assert gpu_specs.shapes_of(programs["lm_head"], False)[-1] == {"m": 4096, "v": 128256, "d": 4096}
    assert gpu_specs.extents_of(programs["lora_linear"], 128, 7, 1000) == {"m": 128, "n": 7, "k": 1000, "r": 64}
    rope = gpu_specs.shapes_of(programs["qkv_rope"], True)
    assert {e["head"] for e in rope} == {1, 2, 15, 64, 224} and len(rope) == len({tuple(e.items()) for e in rope})


def test_configurations_are_defaults_and_of_every_kind(programs):
    for program in programs.values():
        gemm = gemm_of(program)
        picked = gpu_specs.chosen(gemm, 4)
        assert len(set(picked)) == len(picked) == min(4, len(configs.offered(gemm))) and set(picked) <= set(configs.offered(gemm))
        assert configs.default(gemm, 4096, 4096, 4096) in picked
    kinds = {(c.pingpong, c.cluster_m, c.cluster_n) for c in gpu_specs.chosen(gemm_of(programs["linear_bf16"]), 10)}
    assert len(kinds) == 6


def test_distance_in_units_of_the_last_place():
    one = torch.tensor([1.0, 100.0]).bfloat16()
    assert gpu_specs.ulps(one, one) == 0
    assert gpu_specs.ulps(one, torch.tensor([1.0, 100.5]).bfloat16()) == 1
    assert gpu_specs.ulps(torch.tensor([1.0, 1e-9]), torch.tensor([1.0, 2e-9])) < 0.1  # noise far below the largest element


@pytest.mark.parametrize("script, said", [("import time; time.sleep(60)", "hung"), ("import sys; sys.exit(3)", "ended with status 3")])
def test_a_worker_that_hangs_or_dies_costs_one_call(script, said, monkeypatch):
    monkeypatch.setattr(gpu_specs, "PATIENCE", 1.0)
    jobs = [{"program": "a"}, {"program": "b"}, {"program": "c"}]
    kept: list[dict] = []
    first = f"print({json.dumps(json.dumps({'job': 0, 'ok': True}))}, flush=True)\n"
    worker = subprocess.Popen([sys.executable, "-c", first + script], stdout=subprocess.PIPE, text=True)
    assert gpu_specs._watch(worker, jobs, 0, kept.append, 1e12) == 2
    assert kept[0] == {"job": 0, "ok": True} and kept[1]["program"] == "b" and not kept[1]["ok"] and said in kept[1]["raised"]
    assert worker.poll() is not None


def test_a_summary_fails_for_a_wrong_call_and_for_missing_ones(capsys):
    good = {"ok": True, "program": "p", "outputs": {"y": {"error": 1e-3, "bound": 2e-3, "ulps": 1.0}}}
    assert gpu_specs.summarise([good], 1) == 0 and gpu_specs.summarise([good], 2) == 1
    assert gpu_specs.summarise([{**good, "ok": False}], 1) == 1
    assert "p " in capsys.readouterr().out
