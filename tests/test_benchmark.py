"""What `codac bench` measures, without a GPU: stand-ins for executables and for clocks; which calls are timed, what is counted."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from coda_lang import benchmark, tables  # noqa: E402
from coda_lang.backend_cute import arguments, roofline, timing  # noqa: E402
from coda_lang.backend_cute.derivative import extents as backward_extents  # noqa: E402
from coda_lang.backend_cute.selfcheck import inputs  # noqa: E402
from tests import handwritten as hw  # noqa: E402
from tests.autograd_cases import Kernels, function  # noqa: E402
from tests.handwritten.training import SWIGLU_TRAINED  # noqa: E402

SIZES = {"m": 33, "d": 24, "n": 40, "f": 16, "lane": 2}


@pytest.fixture
def card(monkeypatch):
    """A machine whose GPU is the CPU: `card.ms` says how long a call or kernel takes, `card.timed` what was timed together."""

    class Card:
        ms: dict[str, float] = {}
        timed: list[list[str]] = []
        name = "NVIDIA H200"

    Card.ms, Card.timed = {}, []

    def interleaved(calls):
        for call in calls.values():
            call()
        Card.timed.append([*calls])
        return {name: [Card.ms.get(name, 1.0)] * 3 for name in calls}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: Card.name)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 20)
    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(timing, "graph", lambda call: call)
    monkeypatch.setattr(timing, "host", lambda call: 7.0)
    monkeypatch.setattr(benchmark.selfcheck, "inputs", lambda program, sizes, seed, device: hw.inputs(program, sizes, seed))
    monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    return Card


def measured():
    fn, _ = function(SWIGLU_TRAINED, "kernels", SIZES)
    return fn, benchmark.reports(fn, SIZES)


def test_calls_and_every_kernel_of_both_passes_are_timed(card):
    fn, (forward, training) = measured()
    assert [*forward.ms] == ["coda_lang", "products", "coda_lang in a graph", "as written, eager"]
    assert [*training.ms] == ["coda_lang", "products"] and training.program == f"{fn.program.name} with gradients"
    assert forward.host_us == 7.0 and set(forward.peak_mib.values()) == {2.0} and forward.first_call_s > 0
    names = [k.kernel for k in training.kernels]
    assert {k.name for p in (fn.saving or fn.program, fn.backward) for k in p.kernels} == set(names) and len(names) == len(set(names))
    assert card.timed[0] == [*forward.ms] and [k.kernel for k in forward.kernels] in card.timed


def test_kernels_are_counted_as_the_roofline_counts_them(card):
    card.ms = {"swiglu": 4.0}
    fn, (forward, training) = measured()
    for program, report in ((fn.program, forward), (fn.backward, training)):
        counts = {c.kernel: c for c in roofline.of_program(program, SIZES)}
        found = [k for k in report.kernels if k.kernel in counts]
        assert found and all((k.bytes, k.flops) == (counts[k.kernel].bytes, counts[k.kernel].flops) for k in found)
        assert all(k.floor_ms == pytest.approx(roofline.peak(card.name).floor_ms(k.bytes, k.flops)) and k.bound for k in found)
    text = tables.reports([forward, training])
    assert all(k.kernel in text for k in training.kernels) and "host 7.0 us a call" in text
    assert json.loads(tables.json_of([forward]))[0]["kernels"][0]["bytes"] == forward.kernels[0].bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama/layer", "llama/head", "qkv_apart", "residual_sumsq"])
def test_launches_of_several_finishers_and_loops_are_timed_too(card, root, name, monkeypatch):
    made = coda_lang.compile(root / "specs" / f"{name}.coda", extents={"qh": 2, "kh": 2, "pair": 4} if name == "llama/layer" else None)
    monkeypatch.setattr(benchmark.selfcheck, "inputs", lambda program, sizes, seed, device: inputs(program, sizes, seed, "cpu"))
    for fn in vars(made).values() if isinstance(made, SimpleNamespace) else [made]:
        fixed = {a: n for a, n in fn.program.extents if n is not None}
        free = {"m": 40, "d": 48, "f": 56, "k": 48, "v": 8200, "head": 2, "kv": 2}
        sizes = roofline.complete(fn.program, {a: free[a] for a, n in fn.program.extents if n is None and a in free})
        every = {a: n for p in fn.programs for a, n in p.extents if n is not None} | sizes
        loops = [loop for p in fn.programs for loop in p.loops]
        fn.objects = Kernels(fn.functions, every, fixed, [], loops)
        forward, training = benchmark.reports(fn, sizes)
        timed = {k.kernel for k in (*forward.kernels, *training.kernels)}
        assert {k.name for p in (fn.program, fn.saving or fn.program, fn.backward) for k in p.kernels} == timed
        for loop in loops:  # counted as what was timed: the first chunk, not the whole axis
            whole = {c.kernel: c for c in roofline.of_program(fn.backward, backward_extents(fn.backward, sizes))}
            looped = [k for k in training.kernels if k.kernel in loop.kernels]
            assert looped and all(k.times == whole[k.kernel].times for k in looped)
            assert all(k.flops <= whole[k.kernel].flops and (k.times == 1 or k.bytes < whole[k.kernel].bytes) for k in looped)
        assert all(k.bytes > 0 and (k.flops > 0) == (k.bound == "tensor cores") or k.bound == "memory" for k in training.kernels)


def test_a_card_that_is_not_known_has_no_floors(card):
    card.name = "NVIDIA H300"
    _, (forward, _) = measured()
    assert forward.device == card.name and all(k.floor_ms is None and k.bound == "" for k in forward.kernels)
    assert "of floor" in tables.reports([forward]) and "x  " not in tables.reports([forward])
