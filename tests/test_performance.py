"""What docs/performance.md shows is what the raw files in bench/results hold: tables, sentences and plots are made again and compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench import performance, roofs
from coda_lang import benchmark, tables

PAGE = performance.PAGE.read_text(encoding="utf-8")


def test_every_figure_is_made_from_raw_files():
    assert set(performance.MARK.findall(PAGE)) == set(performance.BLOCKS), "every block stands in the page, and nothing else"
    new = performance.filled(PAGE)
    changed = [line for line in new.splitlines() if line not in PAGE.splitlines()]
    assert new == PAGE, "python -m bench.performance writes the page again; it would change\n" + "\n".join(changed[:5])


def test_a_figure_that_was_changed_by_hand_is_found(monkeypatch):
    monkeypatch.setattr(performance, "BLOCKS", {name: (lambda name=name: f"| {name} 1.023 |") for name in performance.BLOCKS})
    page = performance.filled(PAGE)
    assert performance.filled(page) == page
    assert performance.filled(page.replace("| plain 1.023 |", "| plain 1.024 |")) == page


def test_figures_follow_the_raw_files(monkeypatch):
    real = roofs.records("layers_h200.jsonl")
    slower = tuple({**r, "ms": {**r["ms"], "coda": 2 * r["ms"]["coda"]}} if "ms" in r else r for r in real)
    before = performance.layers()
    monkeypatch.setattr(performance, "records", lambda name: slower if name == "layers_h200.jsonl" else roofs.records(name))
    assert performance.layers() != before and "0.50" in performance.layers()


def test_no_figure_of_a_raw_file_is_written_by_hand():
    """Outside of the marks a page says how, not how much: no times, no ratios beside others. What schedules are expected to take is
    no measurement (tests/test_schedule_model.py), and what the host takes without a card is no raw file's."""
    prose = re.sub(r"^(### Schedules|## The host)\n.*?(?=^## )", "", performance.MARK.sub("", PAGE), flags=re.S | re.M)
    allowed = {"580.159", "2.11", "13.0", "0.8", "4.8", "4.26", "1.22"}  # versions, the data sheet, a copy, cuBLAS's distance
    assert set(re.findall(r"\d+\.\d+", prose)) <= allowed


def test_every_command_and_raw_file_is_there(root):
    for name in re.findall(r"`([\w/]+_(?:h200|cpu|check)\.(?:jsonl?|txt))`", PAGE):
        assert (root / "bench" / "results" / name).is_file(), name
    for script in re.findall(r"(?<=[ `(])(bench/\w+\.py)", PAGE):
        assert (root / script).is_file(), script


@pytest.mark.parametrize("name", sorted(p.name for p in roofs.RESULTS.glob("*_h200.jsonl")))
def test_raw_files_say_where_they_come_from(name):
    head = roofs.records(name)[0]
    assert head["device"] == "NVIDIA H200" and head["commit"] and head["command"].startswith("bench/"), name


def test_points_of_the_roofline_lie_below_it():
    points = [p for _, p in roofs.plain()] + [*roofs.fused(), *roofs.told()]
    assert len(points) > 55 and all(p.distance > 1 for p in points)
    (one,) = (p for p in points if p.name == "product 8192 × 8192 × 8192" and p.ms == min(q.ms for q in points if q.name == p.name))
    assert one.flops == 2 * 8192**3 and one.bytes == 3 * 2 * 8192**2 and one.bound == "tensor cores"


def test_counts_of_fused_kernels_are_those_of_today():
    """A layer's plan may change; what one kernel has to move does not, but for the partial results of other tiles."""
    kept = {(r["group"], r["method"]): r for r in roofs.records("counts.jsonl") if "group" in r}
    for record in roofs.counts():
        if "group" not in record:
            break
        old = kept[record["group"], record["method"]]
        assert old["flops"] == record["flops"] and old["bytes"] == pytest.approx(record["bytes"], rel=0.05)


def test_kernels_that_codac_bench_printed_are_counted_alike():
    """The file has the counts of the day; ours of today must agree with them."""
    fn = roofs.compiled("specs/linear_residual.coda")["linear_residual"]
    known = {"m": 8192, "k": 4096, "n": 4096}
    today = {c.kernel: c for p in (fn.program, fn.backward) for c in roofs.roofline.of_program(p, known)}
    for point in (p for p in roofs.told() if p.raw.endswith(".txt")):
        count = today[point.name.split()[0]]
        assert point.bytes == pytest.approx(count.bytes, rel=1e-3) and point.flops == pytest.approx(count.flops, rel=1e-3)


@pytest.mark.slow
def test_plots_are_those_of_the_raw_files(tmp_path: Path, root: Path):
    matplotlib = pytest.importorskip("matplotlib")
    from bench import plots

    for name, draw in plots.PLOTS.items():
        kept = (root / "docs" / f"{name}.svg").read_text(encoding="utf-8")
        assert f"({name}.svg)" in PAGE
        draw(tmp_path / f"{name}.svg")
        new = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        if f"Matplotlib v{matplotlib.__version__}," in kept:
            assert new == kept, f"python bench/plots.py draws docs/{name}.svg again"
        else:  # another version draws the same things a little differently
            assert sorted(re.findall(r">([^<>\n]+)</text>", new)) == sorted(re.findall(r">([^<>\n]+)</text>", kept))


def test_what_codac_bench_prints_as_json_is_taken_up(tmp_path, monkeypatch):
    known = roofs.PEAK
    counts = [roofs.roofline.Count("one", "128x128_pp_c1x1", 1000, 5000), roofs.roofline.Count("one_rows", "", 10, 0)]
    kernels = tuple(benchmark.roof(c, 2.0, known) for c in counts)
    report = benchmark.Report("p", {"m": 1}, "NVIDIA H200", {}, {"coda_lang": 2.0}, 1.0, 0.1, {}, kernels)
    (tmp_path / "roofs_layer.json").write_text(tables.json_of([report, report]))
    (tmp_path / "tune_bench_host_h200.txt").write_text("")
    monkeypatch.setattr(roofs, "RESULTS", tmp_path)
    one, rows = roofs.told()
    assert (one.name, one.bytes, one.flops, one.ms, one.raw) == ("one (128x128_pp_c1x1)", 1000, 5000, 2.0, "roofs_layer.json")
    assert rows.name == "one_rows" and rows.bound == "memory" and rows.rate == 0


def test_rivals_and_norms_are_shown_once_a_card_has_run_them(tmp_path, monkeypatch):
    assert "No card has run" in performance.rivals() or "| work |" in performance.rivals()
    head = {"device": "NVIDIA H200", "commit": "abc", "command": "bench/x.py", "missing": {"quack": "quack-kernels is not installed"}}
    record = {"work": "gemm", "of": "cube", "sizes": {"m": 1, "n": 2, "k": 3}, "ok": True, "ms": {"coda": 2.0, "gemm": 1.0, "quack": 3.0}}
    norm = {"program": "rms", "shape": [8192, 4096], "us": {"copy": 30.0, "forward": 33.0, "both": 90.0}, "copy_TBps": 4.2}
    norm |= {"forward_of_copy": 0.9, "backward_of_copy": 0.8}
    for name, lines in (("rivals", [head, record]), ("norms", [head, norm, {"program": "rms", "ok": True}])):
        (tmp_path / f"{name}_h200.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(roofs, "RESULTS", tmp_path)
    roofs.records.cache_clear()
    rivals, norms = performance.rivals(), performance.norms()
    roofs.records.cache_clear()
    assert "| gemm | cube: m 1, n 2, k 3 | 2 | 1 | 3 |" in rivals and "Left out: quack-kernels is not installed." in rivals
    assert "| rms | 8192 × 4096 | 33.0 | 0.90 | 0.80 |" in norms and "1 comparisons with float64, 0 wrong" in norms
