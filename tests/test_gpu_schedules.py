"""bench/gpu_schedules.py without a GPU: what it checks, compiles and times, with stand-ins for kernels and for the clock."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from bench import gpu_schedules  # noqa: E402
from coda_lang.backend_cute import compile, schedules, timing  # noqa: E402
from coda_lang.backend_cute.function import fixed  # noqa: E402
from tests import standins  # noqa: E402


def test_a_program_is_checked_in_parts():
    (row,) = gpu_schedules.check("linear", 3, (37, 64, 200), "cpu")
    assert row["ok"] and row["split"] == ["linear: K in 3 parts by linear_k3_0+1+2, then linear_sum3"]
    assert json.dumps(row)


def test_what_has_to_be_compiled_is_known_beforehand():
    (fn,) = gpu_schedules.functions("linear", 2).values()
    names = {job.kernel.name for job in gpu_schedules.jobs(fn, 2, gpu_schedules.shape(fn, 200, 512, 640))}
    assert {"linear_k2_0+1", "linear_sum2"} <= names and any("backward" in name and "_sum2" in name for name in names)


@pytest.mark.parametrize("broken", [False, True])
def test_schedules_are_compared_before_they_are_timed(broken, monkeypatch):
    class Cut(standins.StandIns):
        def parts(self, launch, extents, device):
            return self.count

        def executable(self, kernel, config):
            call = super().executable(kernel, config)

            def spoiled(*args):
                call(*args)
                if broken and kernel.name.endswith("_sum2"):
                    args[-1 if not kernel.extents else len(kernel.tensors) - 1].add_(1)

            return spoiled

    def executables(fn, count):
        made = Cut(fn.functions, gpu_schedules.shape(fn, 9, 64, 200), fixed(fn.program))
        made.count = count
        return made

    timed = []
    monkeypatch.setattr(gpu_schedules, "executables", executables)
    monkeypatch.setattr(compile, "objects_for", lambda jobs: [])
    monkeypatch.setattr(timing, "interleaved", lambda calls, budget: timed.extend(calls) or dict.fromkeys(calls, [1.0]))
    row = gpu_schedules.timed("linear", 9, 64, 200, "cpu")
    every = ["as planned", "unfused", "K in 2", "K in 3", "K in 4"]
    assert row["wrong"] == (["K in 2"] if broken else []) and row["ok"] != broken
    assert timed == [*[k for k in every if k not in row["wrong"]], "torch.mm"]
    assert set(row["expected"]) == set(every) and row["taken"] == schedules.name_of(schedules.PLANNED)


def test_the_choice_is_judged_by_what_was_measured(tmp_path, capsys):
    row = {"part": "time", "program": "linear", "size": [64, 2048, 8192], "taken": "K in 3"}
    row["ms"] = {"as planned": 0.026, "K in 2": 0.02, "K in 3": 0.016, "torch.mm": 0.02}
    file = tmp_path / "schedules.jsonl"
    file.write_text(json.dumps({"part": "check", "ok": True}) + "\n" + json.dumps(row) + "\n")
    gpu_schedules.judge(file)
    said = capsys.readouterr().out
    assert "as planned 0.769" in said and "taken 1.250 (K in 3)" in said and "fastest 1.250" in said
    assert "taken: torch.mm / ours, geometric mean 1.250, least 1.250" in said
