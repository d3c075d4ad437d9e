"""Times of calls on a GPU: interleaved rounds with a cold L2 cache, medians. One protocol for the tuner, `codac bench` and `bench/`.

In: calls by name. Out: milliseconds of the GPU, every call of every name; microseconds of the host. A wait ahead of each call lets the
host get ahead, so that what is timed is the GPU's work alone; each round runs every call once, beginning with another one, so that all
meet the same clocks. Needs a CUDA device. Non-goal: deciding what is compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLUSH = 1 << 28  # bytes, several times the L2 cache
AHEAD = 2_000_000  # cycles that the GPU waits before a call
BUDGET = 2500.0  # milliseconds of GPU time for one set of calls
LEAST, MOST = 10, 60  # rounds

Call = Callable[[], Any]


def interleaved(calls: Mapping[str, Call], budget: float = BUDGET, least: int = LEAST, ahead: int = AHEAD) -> dict[str, list[float]]:
    """Milliseconds of every timed run of every call, after two rounds that are not; `ahead` is longer for calls of many launches."""
    flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda")
    names = list(calls)

    def once(name: str) -> tuple[Any, Any]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(ahead)
        start.record()
        calls[name]()
        end.record()
        return start, end

    for _ in range(2):
        first = [once(name) for name in names]
    torch.cuda.synchronize()
    rounds = max(least, min(MOST, int(budget / max(sum(s.elapsed_time(e) for s, e in first), 1e-3))))
    turns = [[*names[r % len(names) :], *names[: r % len(names)]] for r in range(rounds)]
    taken = [(name, once(name)) for turn in turns for name in turn]
    torch.cuda.synchronize()
    return {name: [s.elapsed_time(e) for n, (s, e) in taken if n == name] for name in names}


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The middle of each."""
    return {name: statistics.median(taken) for name, taken in times.items()}


def host(call: Call, calls: int = 200) -> float:
    """Microseconds of the host a call takes, the best of several runs in which the GPU never makes the host wait."""
    call()
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD * 20)
        began = time.perf_counter()
        for _ in range(calls // 10):
            call()
        found.append((time.perf_counter() - began) / (calls // 10) * 1e6)
    torch.cuda.synchronize()
    return min(found)


def graph(call: Call) -> Call:
    """The call captured in a CUDA graph; running the result replays it. Buffers that the call makes belong to the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    return captured.replay
