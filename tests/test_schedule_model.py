"""Which schedule is taken: the model beside what was measured, the choice by shape, what `codac plan --shape` says, the tuner."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner  # noqa: E402

from coda_lang import driver  # noqa: E402
from coda_lang.backend_cute import host, schedules, spec, tune, tuned  # noqa: E402
from coda_lang.backend_cute.function import Compiled  # noqa: E402
from coda_lang.cli import cli  # noqa: E402
from coda_lang.diagnostics.model import CodaError  # noqa: E402
from coda_lang.source import Source  # noqa: E402
from tests import gemm_cases, test_tune  # noqa: E402
from tests.conftest import ROOT  # noqa: E402

bench = test_tune.bench  # the fixture
CPU = torch.device("cpu")
MEASURED = Path(ROOT) / "bench/results/configs_h200.jsonl"
LAYOUTS = {"kk": "linear", "kn": "major_kn", "mn": "major_mn"}
LINEAR = gemm_cases.ALL["linear"].gemm
LONG = {"m": 64, "n": 2048, "k": 8192}


def sizes(gemm, m, n, k):
    axes = {a for t in gemm.tensors for mode in t.modes for a in mode}
    return {a: {"m": m, "n": n}.get(a, k) for a in axes}


def measured():
    """(rows, microseconds measured of the default configuration, of torch.mm, the estimates)."""
    for record in map(json.loads, MEASURED.read_text().splitlines()[1:]):
        gemm, (m, n, k), ms = gemm_cases.ALL[LAYOUTS[record["layout"]]].gemm, record["size"], record["ms"]
        found = schedules.estimates(gemm, sizes(gemm, m, n, k))
        key = dict(found[0].tiles)[gemm.name]
        if key in ms:
            yield (m, n, k), ms[key] * 1e3, ms["torch.mm"] * 1e3, found


@pytest.fixture(scope="module")
def records():
    found = list(measured())
    assert len(found) > 95
    return found


@pytest.mark.parametrize("few, spread", [(True, 1.26), (False, 1.32)])
def test_the_estimate_of_the_planned_schedule_is_near_what_was_measured(records, few, spread):
    ratios = [estimates[0].microseconds / time for (m, *_), time, _, estimates in records if (m < 1024) == few]
    assert 0.97 < geometric_mean(ratios) < 1.03 and max(ratios) < spread and min(ratios) > 1 / spread


def test_k_is_cut_where_few_tiles_have_a_long_way(records):
    """At none of the shapes where the planned kernel is no slower than cuBLAS, which itself cuts K, by more than a tenth."""
    cut = {size: (time, peer, schedules.best(found)) for size, time, peer, found in records if schedules.best(found).parts}
    assert {(64, 2048, 8192), (128, 2048, 8192)} == set(cut)
    for time, peer, taken in cut.values():
        assert time > 1.1 * peer and taken.parts > 1


def test_the_planned_schedule_is_taken_unless_another_is_clearly_faster():
    planned, other = schedules.Estimate(0, 10.0, ()), schedules.Estimate(2, 9.5, ())
    assert schedules.best((planned, other)) is planned
    assert schedules.best((planned, schedules.Estimate(3, 8.0, ()), other)).parts == 3


def test_no_part_is_empty_and_nothing_is_cut_that_computes_nothing():
    assert schedules.counts(LINEAR, sizes(LINEAR, 64, 64, 130)) == (1, 2, 3)
    assert schedules.counts(LINEAR, sizes(LINEAR, 64, 64, 64)) == (1,)
    assert schedules.counts(LINEAR, sizes(LINEAR, 0, 64, 640)) == ()
    assert schedules.counts(gemm_cases.ALL["map"].gemm, {"m": 8, "n": 64}) == ()


@pytest.fixture
def linear(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(driver.emit(str(ROOT / "specs" / "linear_residual.coda")))
    from coda_lang.backend_cute import load

    (fn,) = load.functions_of(load.import_file(path))
    return fn


def test_a_call_takes_the_planned_schedule_unless_asked(linear, monkeypatch):
    (launch,) = linear.program.kernels
    monkeypatch.delenv("CODA_SCHEDULES", raising=False)
    assert linear.objects.parts(launch, LONG, CPU) == schedules.PLANNED
    monkeypatch.setenv("CODA_SCHEDULES", "1")
    assert linear.objects.parts(launch, LONG, CPU) > 1
    assert linear.objects.parts(launch, {**LONG, "m": 8192}, CPU) == schedules.PLANNED


def test_only_kernels_of_the_schedule_taken_are_compiled(linear, monkeypatch):
    monkeypatch.setenv("CODA_SCHEDULES", "1")
    asked = []

    def executables(self, wanted, device):
        asked.extend(kernel.name for kernel, _ in wanted)
        return [print for _ in wanted]

    monkeypatch.setattr(Compiled, "executables", executables)
    tensors = [torch.empty([LONG[a] for a in arg.axes], dtype=torch.bfloat16) for arg in linear.program.inputs]
    host.plan(linear.program, linear.bind(tensors), tensors, CPU, linear.objects)
    assert len(asked) == 2 and "_k3_" in asked[0] and asked[1].endswith("_sum3")


def test_explain_says_which_schedule_a_call_takes(linear, monkeypatch):
    monkeypatch.setenv("CODA_SCHEDULES", "1")
    tensors = [torch.empty([LONG[a] for a in arg.axes], dtype=torch.bfloat16) for arg in linear.program.inputs]
    text = str(linear.explain(*tensors))
    assert "linear_residual: K in 3 parts by linear_residual_k3_0+1+2, then linear_residual_sum3" in text
    assert "would launch linear_residual_k3_0+1+2 with tiles" in text
    monkeypatch.setenv("CODA_SCHEDULES", "0")
    assert linear.explain(*tensors).launches == ("linear_residual",)


def test_the_forward_that_saves_decides_for_the_one_that_does_not(tmp_path, monkeypatch):
    """Whatever each would take by itself: then outputs have the same bits."""
    text = "program p(x: bf16[m, k], w: bf16[n, k], b: f32[n]) -> (y: bf16[m, n])\ny = gelu(x @ w + b)\n"
    path = tmp_path / "kernel.py"
    path.write_text(driver.emit(Source("p.coda", text)))
    from coda_lang.backend_cute import load

    (fn,) = load.functions_of(load.import_file(path))
    (plain,), (saving,) = spec.launches(fn.program), spec.launches(fn.saving)
    assert plain != saving
    monkeypatch.setenv("CODA_SCHEDULES", "1")
    seen = []
    monkeypatch.setattr(schedules, "estimates", lambda launch, *a: seen.append(launch) or (schedules.Estimate(0, 1.0, ()),))
    for launch in (plain, saving):
        assert fn.objects.parts(launch, LONG, CPU) == 0
    assert seen == [saving, saving]


# --- codac plan --shape ---------------------------------------------------------------------------------------------------------


def test_the_plan_tells_the_time_of_each_schedule(monkeypatch):
    arguments = ["plan", str(ROOT / "specs" / "linear_residual.coda"), "--shape", "m=64,k=8192,n=2048"]
    monkeypatch.delenv("CODA_SCHEDULES", raising=False)
    text = CliRunner().invoke(cli, arguments).output
    forward, backward = text.split("schedules of linear_residual_backward at m=64, k=8192, n=2048")
    lines = {line.split("  ")[2]: line for line in forward.split("\n") if line.startswith("    ") and " us " in line}
    assert list(lines) == ["as planned", "unfused", "K in 2", "K in 3", "K in 4"]
    assert lines["as planned"].endswith("<- taken") and lines["K in 3"].endswith("<- taken with CODA_SCHEDULES=1")
    assert sum("<-" in line for line in lines.values()) == 2 and " us " in backward
    monkeypatch.setenv("CODA_SCHEDULES", "1")
    text = CliRunner().invoke(cli, arguments).output
    taken = [line for line in text.split("schedules of linear_residual_backward")[0].split("\n") if " us " in line and "<-" in line]
    assert len(taken) == 1 and "K in 3" in taken[0] and taken[0].endswith("<- taken")


def test_an_axis_that_is_not_there_is_refused():
    done = CliRunner().invoke(cli, ["plan", str(ROOT / "specs" / "linear_residual.coda"), "--shape", "q=3"])
    assert isinstance(done.exception, CodaError) and "no free axis q" in str(done.exception)


def test_an_axis_of_one_of_several_programs_may_be_given(tmp_path):
    file = tmp_path / "two.coda"
    file.write_text(
        "forward program up(x: bf16[m, d], w: bf16[f, d]) -> (h: bf16[m, f])\nh = relu(x @ w)\n"
        "forward program down(h: bf16[m, q], v: bf16[d, q]) -> (y: bf16[m, d])\ny = h @ v\n"
    )
    done = CliRunner().invoke(cli, ["plan", str(file), "--shape", "f=48,q=56"])
    assert done.exit_code == 0 and "f=48" in done.output and "q=56" in done.output
    for wrong in ("m=-3", "m=3,m=4"):
        assert CliRunner().invoke(cli, ["plan", str(file), "--shape", wrong]).exit_code == 2


# --- the tuner: row 31 of the known failures, "unfused" is a candidate; a good default without it ---------------------------------


def long(bench):
    fn = test_tune.trained(bench)
    return fn, dict(test_tune.SIZES)


def test_the_tuner_tries_other_schedules_and_keeps_what_is_fastest(bench, monkeypatch):
    fn, shape = long(bench)
    monkeypatch.setattr(tune, "WORSE", 100)
    bench.times = {"unfused": 0.5}
    trials = tune.tune(fn, shape)
    products = {k.name: k for k in test_tune.gemms(fn) if k.products}
    assert {t.kernel for t in trials if t.config == "unfused"} == set(products)
    assert all(t.chosen == (t.config == "unfused") and not t.default for t in trials if t.kernel in products and t.config == "unfused")
    whole = next(k for k in fn.saving.kernels if isinstance(k, spec.Gemm))
    assert tuned.schedule(whole, test_tune.SIZE, "a card") == 1 and tuned.find(whole, test_tune.SIZE, "a card") is not None
    objects = Compiled(fn.program, fn.functions, fn.saving)
    plain = next(k for k in fn.program.kernels if isinstance(k, spec.Gemm))
    assert objects.parts(plain, shape, CPU) == 1 == objects.parts(whole, shape, CPU), "later calls take it, without being asked"
    assert objects.parts(plain, {**shape, "m": 3333}, CPU) == 0, "another bucket"


def test_a_schedule_that_is_not_clearly_faster_is_not_kept(bench, monkeypatch):
    fn, shape = long(bench)
    monkeypatch.setattr(tune, "WORSE", 100)
    bench.times = {"unfused": 0.995}
    assert any(t.config == "unfused" for t in tune.tune(fn, shape))
    whole = next(k for k in fn.saving.kernels if isinstance(k, spec.Gemm))
    assert tuned.schedule(whole, test_tune.SIZE, "a card") == 0
    monkeypatch.setenv("CODA_SCHEDULES", "1")
    assert Compiled(fn.program, fn.functions, fn.saving).parts(whole, shape, CPU) == 0, "what was measured counts"


def test_what_the_model_rules_out_is_not_tried(bench):
    fn, shape = long(bench)
    assert not any(t.config == "unfused" for t in tune.tune(fn, shape)), "a launch of six microseconds has no room for a second one"


def test_wrong_numbers_of_a_schedule_are_never_chosen(bench, monkeypatch):
    fn, shape = long(bench)
    monkeypatch.setattr(tune, "WORSE", 100)
    bench.times = {"unfused": 0.01}  # what is between its kernels is not what it should be
    test_tune.spoil(fn, lambda kernel, config: any(g.products for g in spec.gemms(kernel)), lambda record: "@" in record.name)
    found = [t for t in tune.tune(fn, shape) if t.config == "unfused"]
    assert found and all(not t.chosen and "is off by" in t.problem for t in found)
