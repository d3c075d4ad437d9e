"""The tuner without a GPU: stand-ins for executables and for times; what is tried, what is kept, what later calls take."""

from __future__ import annotations

import importlib.util
import json

import pytest

torch = pytest.importorskip("torch")

from coda_lang import driver, tables  # noqa: E402
from coda_lang.backend_cute import arguments, compile, configs, host, spec, timing, tune, tuned  # noqa: E402
from coda_lang.backend_cute.errors import CallError  # noqa: E402
from coda_lang.diagnostics.model import CodaError  # noqa: E402
from tests import handwritten as hw  # noqa: E402
from tests.autograd_cases import function  # noqa: E402
from tests.handwritten.training import SWIGLU_TRAINED  # noqa: E402

SIZES = {"m": 33, "d": 24, "n": 40, "f": 16, "lane": 2}
SIZE = ((33, 16, 24),)  # of the forward: rows, columns a segment, depth


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """A machine whose GPU is the CPU: `bench.times` says how long a configuration takes, `bench.broken` computes nonsense."""

    class Bench:
        times: dict[str, float] = {}
        broken: set[str] = set()
        tried: list[str] = []

    Bench.tried = []
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(host, "device_name", lambda device: "a card")
    monkeypatch.setattr(compile, "objects_for", lambda jobs, done=None: [done(i) for i, _ in enumerate(jobs, 1)])

    def interleaved(calls):
        for call in calls.values():
            call()
        Bench.tried += calls
        return {key: [Bench.times.get(key, 1.0)] * 3 for key in calls}

    monkeypatch.setattr(timing, "interleaved", interleaved)
    return Bench


def trained(bench):
    fn, _ = function(SWIGLU_TRAINED, "kernels", SIZES)

    def broken(kernel, config):
        return config is not None and config.key in bench.broken

    spoil(fn, broken, lambda record: record.role != "in")
    return fn


def spoil(fn, kernels, tensors):
    """Executables of some kernels leave something else in some tensors."""

    class Spoiled(type(fn.objects)):
        def executable(self, kernel, config):
            call = super().executable(kernel, config)

            def spoiled(*args):
                call(*args)
                for record, t in zip(kernel.tensors, args):
                    if kernels(kernel, config) and tensors(record) and t.dtype.is_floating_point:
                        t.mul_(3)

            return spoiled

    fn.objects.__class__ = Spoiled


def gemms(fn):
    return [k for p in (fn.saving or fn.program, fn.backward) for k in p.kernels if isinstance(k, spec.Gemm)]


def test_every_kernel_is_tried_in_several_configurations_and_the_fastest_is_kept(bench):
    fn = trained(bench)
    first = configs.ranked(gemms(fn)[0], SIZE, within=tune.WORSE)
    default = configs.default(gemms(fn)[0], 33, 16, 24)
    best = next(c for c in first[: tune.MOST] if c != default)
    bench.times = {best.key: 0.5}
    trials = tune.tune(fn, SIZES)
    assert {t.kernel for t in trials} == {k.name for k in gemms(fn)}
    for kernel in gemms(fn):
        own = [t for t in trials if t.kernel == kernel.name]
        assert len({t.config for t in own}) == len(own) <= tune.MOST and sum(t.chosen for t in own) == sum(t.default for t in own) == 1
        faster = best.key in {t.config for t in own}
        assert all(t.chosen == (t.config == best.key if faster else t.default) for t in own)
    assert tuned.find(gemms(fn)[0], SIZE, "a card") == best
    text = tables.trials(trials)
    assert "chosen" in text and "0.5000 ms" in text


def test_a_call_takes_what_was_tuned_and_a_variant_takes_the_whole_ones(bench, monkeypatch):
    fn = SWIGLU_TRAINED.function()
    saving = next(k for k in fn.saving.kernels if isinstance(k, spec.Gemm))
    plain = next(k for k in fn.program.kernels if isinstance(k, spec.Gemm))
    other = next(c for c in configs.offered(saving) if c != configs.default(saving, 33, 16, 24))
    assert fn.objects.config(plain, SIZES, torch.device("cpu")) != other
    tuned.keep(saving, SIZE, "a card", other, {})
    assert fn.objects.config(plain, SIZES, torch.device("cpu")) == other
    assert fn.objects.config(saving, SIZES, torch.device("cpu")) == other
    assert fn.objects.config(plain, {**SIZES, "m": 3333}, torch.device("cpu")) != other, "another bucket"
    monkeypatch.setattr(host, "device_name", lambda device: "another card")
    assert fn.objects.config(plain, SIZES, torch.device("cpu")) != other


def test_wrong_numbers_are_never_chosen(bench):
    fn = trained(bench)
    key = configs.ranked(gemms(fn)[0], SIZE)[1].key
    bench.times, bench.broken = {key: 0.01}, {key}
    trials = [t for t in tune.tune(fn, SIZES) if t.config == key]
    assert trials and all(t.milliseconds is None and not t.chosen and "is off by" in t.problem for t in trials)


def test_the_default_stays_unless_another_is_clearly_faster(bench):
    fn = trained(bench)
    bench.times = {c.key: 0.995 for c in configs.offered(gemms(fn)[0])} | {configs.default(gemms(fn)[0], 33, 16, 24).key: 1.0}
    assert all(t.default == t.chosen for t in tune.tune(fn, SIZES) if t.kernel == gemms(fn)[0].name)


def test_progress_is_told(bench):
    told = []
    tune.tune(trained(bench), SIZES, most=2, progress=lambda *what: told.append(what))
    assert [w for w, *_ in told] == sorted(w for w, *_ in told) and {w for w, *_ in told} == {"compiling", "measuring"}
    assert told[-1][1] == told[-1][2] > 2


def test_only_what_has_no_entry_is_tuned_at_run_time(bench, monkeypatch):
    fn = trained(bench)
    tune.once(fn, SIZES)
    assert bench.tried
    bench.tried.clear()
    tune.once(fn, SIZES)
    tune.once(trained(bench), SIZES)  # as another process would
    assert not bench.tried
    larger = {**SIZES, "m": 1000}
    tune.once(function(SWIGLU_TRAINED, "kernels", larger)[0], larger)
    assert bench.tried


def test_a_call_tunes_where_the_user_asked_for_it(bench, monkeypatch):
    monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    asked = []
    monkeypatch.setattr(tune, "once", lambda fn, extents: asked.append(extents))
    fn, _ = function(SWIGLU_TRAINED, "kernels", SIZES)
    tensors = hw.inputs(SWIGLU_TRAINED.program, SIZES)
    fn(*tensors)
    assert not asked, "tuning is off unless it is asked for"
    monkeypatch.setenv("CODA_TUNE", "1")
    fn, _ = function(SWIGLU_TRAINED, "kernels", SIZES)
    fn(*tensors)
    fn(*tensors)
    assert len(asked) == 1 and asked[0]["m"] == 33


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 100, 129, 4096, 4097, 8192])
def test_buckets_are_at_most_a_quarter_wide(size):
    up = tuned.bucket(size)
    assert size <= up <= size * 1.25 + 1 and tuned.bucket(up) == up
    assert tuned.bucket(4096) == 4096 and tuned.bucket(8192) == 8192


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"config": {"tile": 3}}', '{"config": null}'])
def test_a_damaged_entry_is_none(bench, damage):
    gemm = gemms(SWIGLU_TRAINED.function())[0]
    tuned.keep(gemm, SIZE, "a card", spec.Config(), {"ms": 1.0})
    place = tuned.path(gemm, SIZE, "a card")
    assert json.loads(place.read_text())["ms"] == 1.0
    place.write_text(damage)
    assert tuned.find(gemm, SIZE, "a card") is None


def test_refusals(monkeypatch):
    fn = SWIGLU_TRAINED.function()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CallError, match="needs a Hopper GPU"):
        tune.tune(fn, SIZES)
    text = "program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\nnominal m = 8\ny = x @ w\n"
    with pytest.raises(CodaError, match="there is no free axis q"):
        driver.tune(text, driver.Options(), {"q": 3})
    with pytest.raises(CodaError, match="nothing says how large d is"):
        driver.bench(text, driver.Options(), {})


def test_without_a_gpu_no_package_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "cutlass" else found(name, *rest))
    text = "program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\nnominal m = 8, n = 8, d = 8\ny = x @ w\n"
    for measure in (driver.tune, driver.bench):
        with pytest.raises(CallError, match="C0705: measuring kernels needs a Hopper GPU"):
            measure(text, driver.Options(), {})
    with pytest.raises(CallError, match=r"C0715: .*\n.*in the clone: pip install -e '\.\[torch,cute\]'"):
        driver.build(text, "never", driver.Options())
