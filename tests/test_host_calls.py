"""What a call of a known kind costs the host, counted in calls of functions: unlike times, the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from bench.host_time import PROGRAMS, Empty, Stubs, training  # noqa: E402
from coda_lang.backend_cute import arguments, host  # noqa: E402
from tests.standins import StandIns, poisoning  # noqa: E402

SIZES = {"m": 16, "n": 8, "k": 24, "lane": 2}


def counted(call: Callable[[], Any]) -> tuple[int, int]:
    """How many Python functions run in a call, and how many of C."""
    events: list[str] = []
    for _ in range(3):  # the first calls decide
        call()
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
    return events.count("call") - 1, events.count("c_call") - 1  # `call` itself, and the last setprofile


@pytest.fixture(params=sorted(PROGRAMS))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[torch.Tensor]]:
    """A function whose kernels do nothing, on CPU tensors taken for a GPU's, and its arguments."""
    fn = coda_lang.compile(PROGRAMS[request.param])
    fn.objects = Stubs()
    monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    return fn, [torch.randn([SIZES.get(a, 2) for a in argument.axes]).bfloat16() for argument in fn.program.inputs]


def test_a_forward_is_a_handful_of_functions(case) -> None:
    """__call__, is_compiling, kind, key, the kept call (two), the plan, an allocation each (two and the C function), the launch."""
    fn, tensors = case
    python, c = counted(lambda: fn(*tensors))
    assert fn.last_path == "kernels"
    assert python <= 12 and c <= 14


def test_a_node_of_autograd_costs_little_more_than_an_empty_one(case) -> None:
    """Of a launch the plan takes two functions and one of C for each buffer and view, and the launch."""
    fn, tensors = case
    (ours, ours_c), (empty, empty_c) = counted(training(fn, *tensors)), counted(training(Empty.apply, *tensors))
    assert fn.last_path == fn.last_backward == "kernels"
    launches = 1 + len(next(iter(next(iter(fn._training.kinds.values())).steps.values())).plan.launches)
    assert ours <= empty + 12 + 5 * launches
    assert ours_c <= empty_c + 30 + 4 * launches


def test_a_known_kind_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither grad mode nor what requires a gradient is taken for what it was at the first call."""
    monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    monkeypatch.setattr(host, "allocate", poisoning)
    fn = coda_lang.compile(PROGRAMS["linear"])
    x, w = (torch.randn(SIZES[a], SIZES["k"]).bfloat16() for a in "mn")

    class Every(StandIns):
        def select(self, program, functions):
            return Every(functions, self.extents)

    fn.objects = Every(fn.functions, SIZES)
    plain = fn(x, w)
    for _ in range(2):
        assert not fn(x, w).requires_grad
        w.requires_grad_()
        with torch.no_grad():
            assert not fn(x, w).requires_grad
        y = fn(x, w)
        assert y.requires_grad and torch.equal(y, plain)
        (gradient,) = torch.autograd.grad(y, [w], torch.ones_like(y))
        torch.testing.assert_close(gradient, torch.ones_like(plain).T @ x, rtol=1e-2, atol=1e-2)
        with torch.inference_mode():
            assert torch.equal(fn(x, w), plain)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(fn(x, w), plain) and torch.equal(fn(x.float(), w), plain)
        with pytest.raises(coda_lang.CodaError, match="C0703"):
            fn(x.float(), w)
        with pytest.raises(coda_lang.CodaError, match="C0515"):
            torch.func.grad(lambda x: fn(x, w).sum())(x)
        w.requires_grad_(False)
