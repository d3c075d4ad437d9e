"""The list of what no card has run: its commands can be called as they stand, and a run goes on where another was cut off."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("torch")

from bench import gpu_pending, need_gpu
from bench.gpu_pending import Step


def python(text, *results, name="one", seconds=30, before=()):
    return Step(name, "a test", seconds, (*before, ("-c", text)), results)


def options(out, **changed):
    return argparse.Namespace(**{"out": out, "limit": 1000.0, "steps": [], **changed})


def lines(out):
    return [json.loads(line) for line in (out / "pending.jsonl").read_text().splitlines()][1:]


def held(out):
    with zipfile.ZipFile(out / "results.zip") as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


WRITES = "import pathlib; pathlib.Path('{dir}/a.jsonl').write_text('found'); print('said')"


def test_steps_run_in_order_and_leave_two_files(tmp_path):
    steps = [python(WRITES, "a.jsonl", name="one"), python("print('{limit}')", ">printed.json", name="two")]
    assert gpu_pending.run(options(tmp_path), steps) == 0
    assert [(r["step"], r["ok"], r["status"]) for r in lines(tmp_path)] == [("one", True, "0"), ("two", True, "0")]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pending.jsonl", "results.zip"]
    found = held(tmp_path)
    assert found["one/a.jsonl"] == "found" and found["one/log.txt"] == "said\n" and 0 < int(found["two/printed.json"]) <= 60


def test_what_is_done_is_not_run_again_and_what_failed_is(tmp_path):
    mark = tmp_path / "mark"
    fails = f"import sys, pathlib; p = pathlib.Path({str(mark)!r}); n = p.exists(); p.touch(); print('again', n); sys.exit(not n)"
    steps = [python(WRITES, "a.jsonl", name="one"), python(fails, name="two"), python("pass", name="three")]
    out = tmp_path / "out"
    assert gpu_pending.run(options(out), steps) == 1
    assert [(r["step"], r["ok"]) for r in lines(out)] == [("one", True), ("two", False), ("three", True)]
    assert "again False" in lines(out)[1]["said"]
    assert gpu_pending.run(options(out), steps) == 0
    assert [r["step"] for r in lines(out)] == ["one", "two", "three", "two"] and held(out)["two/log.txt"] == "again True\n"
    assert held(out)["one/a.jsonl"] == "found"


def test_a_step_that_was_cut_off_finds_what_it_had_written(tmp_path):
    text = (
        "import pathlib, sys; p = pathlib.Path('{dir}/a.jsonl'); f = p.open('a'); f.write('x'); f.close(); sys.exit(p.read_text() != 'xx')"
    )
    step = python(text, "a.jsonl")
    assert gpu_pending.run(options(tmp_path), [step]) == 1 and held(tmp_path)["one/a.jsonl"] == "x"
    assert gpu_pending.run(options(tmp_path), [step]) == 0 and held(tmp_path)["one/a.jsonl"] == "xx"


def test_a_step_is_ended_with_what_it_started_and_keeps_what_it_wrote(tmp_path):
    child = "import subprocess, sys, time; " + WRITES.replace("import pathlib; ", "import pathlib; ")
    text = f"{child}; sys.stdout.flush(); subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    step = python(text, "a.jsonl", seconds=3)
    assert gpu_pending.run(options(tmp_path), [step]) == 1
    (record,) = lines(tmp_path)
    assert record["status"] == "ended after 6 s" and record["seconds"] < 30 and held(tmp_path)["one/a.jsonl"] == "found"


def test_a_step_without_time_is_left_for_another_run(tmp_path, capsys):
    steps = [python("pass", name="long", seconds=4000), python("pass", name="short")]
    assert gpu_pending.run(options(tmp_path), steps) == 1
    assert "long: 4000 s are wanted" in capsys.readouterr().out and [r["step"] for r in lines(tmp_path)] == ["short"]
    assert gpu_pending.run(options(tmp_path, steps=["short"]), steps) == 0


def test_a_command_that_fails_ends_its_step(tmp_path):
    step = python("print('never')", ">b", before=(("-c", "raise SystemExit(3)"),))
    assert gpu_pending.run(options(tmp_path), [step]) == 1
    assert lines(tmp_path)[0]["status"] == "3" and "one/b" not in held(tmp_path)


def test_every_step_can_be_called_as_it_stands(root):
    """Scripts are there, and know every option that they are given; modules too."""
    names = [s.name for s in gpu_pending.STEPS]
    assert len(names) == len(set(names)) and all(s.seconds > 0 and s.shows for s in gpu_pending.STEPS)
    said = {}
    for step in gpu_pending.STEPS:
        for command in step.commands:
            target = [sys.executable, *command[: 3 if command[:2] == ("-m", "coda_lang") else 2 if command[0] == "-m" else 1]]
            key = " ".join(target)
            if key not in said:
                said[key] = subprocess.run([*target, "--help"], cwd=root, capture_output=True, text=True, timeout=120).stdout
            for word in command[len(target) - 1 :]:
                if word.startswith("--"):
                    assert word in said[key], f"{step.name}: {key} knows no {word}"
            for word in command:
                if word.endswith((".py", ".coda")):
                    assert (root / word).is_file(), word
        for result in step.results:
            written = any(result in word or word == "{dir}" for command in step.commands for word in command)
            assert written or result.startswith(">"), f"{step.name} leaves no {result}"


def test_the_readme_shows_the_list(root):
    page = (root / "bench" / "README.md").read_text(encoding="utf-8")
    assert gpu_pending.listing() in page, "python bench/gpu_pending.py --list prints what stands in bench/README.md"
    assert "90 s" in gpu_pending.listing() and "(needs pytest)" in gpu_pending.listing()


@pytest.mark.parametrize("name", ["gpu_pending", "gpu_rivals", "gpu_layers"])
def test_without_a_gpu_it_is_said_and_nothing_is_run(name, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(f"bench.{name}")
    monkeypatch.setattr(need_gpu, "missing", lambda: "torch finds no CUDA device")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 1 and "needs a Hopper GPU" in capsys.readouterr().err and not (tmp_path / "out").exists()
