"""How everything here is measured and written down: one protocol for ours and for rivals.

In: the methods of one piece of work by name, and what its results must be. Out: a record. A method is called once before anything is timed,
and what it gives is compared with the reference: one that raises or gives something else is reported and not timed. Then, each for all
methods: peaks of memory, microseconds of the host, the GPU's milliseconds of a plain call and of a replayed CUDA graph. Times are medians
of rounds in which every method runs once, beginning with another one each time, each call with a cold L2 cache and behind a wait that hides
the host (`coda_lang.backend_cute.timing`). A `Sheet` is a file of such records, a line of JSON each, the first of them saying where, by
what, and at which commit the others were made. Non-goals: what is compared (`works`, `rivals`), tables and plots.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import math
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from coda_lang.backend_cute import timing

ROOT = Path(__file__).resolve().parent.parent
FAR = 3e-2  # results whose relative Frobenius distance is larger are not the same computation in bf16
BUDGET = 1500.0  # milliseconds of GPU time for a set of methods, if the least number of rounds does not take more
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "liger-kernel", "quack-kernels", "coda-kernels")

Call = Callable[[], Any]
Tensors = Sequence[torch.Tensor | None]


def several(outputs: Any) -> tuple[Any, ...]:
    """The outputs as a tuple."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def no_grad(call: Call) -> Call:
    """The call without gradients."""

    def quiet() -> Any:
        with torch.no_grad():
            return call()

    return quiet


@dataclass(frozen=True)
class Method:
    """One way to do a piece of work.

    `results` makes of what `call` gives the work's outputs in their order and shapes, outside of what is timed; None stands for one that
    the method does not make. A `part` does a part of the work, its products: nothing to compare, and the floor that others are held to.
    `ours` is what others are held against. `says` is what a reader must know to compare fairly.
    """

    call: Call
    results: Callable[[Any], Tensors] = several
    part: bool = False
    ours: bool = False
    says: str = ""


# --- measuring ------------------------------------------------------------------------------------------------------------------


class Gpu:
    """The clock of the GPU at hand; tests put another in its place."""

    def __init__(self, budget: float = BUDGET, ahead: int = timing.AHEAD) -> None:
        self.budget, self.ahead = budget, ahead

    def wait(self) -> None:
        """Until the GPU has done everything."""
        torch.cuda.synchronize()

    def times(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        """Milliseconds of every timed run of every call."""
        return timing.interleaved(calls, self.budget, ahead=self.ahead)

    def graph(self, call: Call) -> Call:
        """The call as a replay of a CUDA graph."""
        return timing.graph(call)

    def host(self, call: Call) -> float:
        """Microseconds of the host a call takes; the fewer calls at once, the more launches each may have."""
        return timing.host(call, calls=200 if self.ahead <= timing.AHEAD else 10)

    def peak(self, call: Call) -> float:
        """MiB that a call allocates above what is held before it, results included."""
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        del result
        return round((torch.cuda.max_memory_allocated() - held) / 2**20)


def distance(got: Tensors, want: Tensors) -> float:
    """The largest relative Frobenius distance of outputs, infinite where their number, a shape or a NaN differs; None is left out."""
    if len(got) != len(want) or all(g is None for g in got):
        return math.inf
    return max((_distance(g, w) for g, w in zip(got, want) if g is not None and w is not None), default=math.inf)


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape:
        return math.inf
    a, b = got.detach().double(), want.detach().double()
    off = float((a - b).norm()) / max(float(b.norm()), 1e-30) if b.numel() else 0.0
    return off if math.isfinite(off) else math.inf


def measure(
    methods: Mapping[str, Method], want: Call, clock: Gpu | None = None, *, graphs: bool = True, far: float = FAR
) -> dict[str, Any]:
    """The record of one piece of work whose outputs are `want()`. `ok`: no method gave anything else, and none of ours raised."""
    clock = clock or Gpu()
    found = _checked(methods, want, clock, far)
    calls = {name: methods[name].call for name in found["first_call_s"] if name not in found["wrong"]}
    found["peak_mib"] = {name: clock.peak(call) for name, call in calls.items()}
    found["host_us"] = {name: round(clock.host(call), 1) for name, call in calls.items()}
    times = clock.times(calls) if calls else {}
    found |= summary(times)
    if graphs and calls:
        replays, refused = _graphs(calls, clock)
        if replays:
            found["graph_ms"] = summary(clock.times(replays))["ms"]
        if refused:
            found["no_graph"] = refused
    found["ratios"] = ratios(found["ms"], methods)
    if says := {name: m.says for name, m in methods.items() if m.says}:
        found["says"] = says
    return {key: value for key, value in found.items() if value or key in ("ok", "ms")}


def summary(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, and how wide the middle four fifths of each are."""
    medians = timing.medians({name: list(taken) for name, taken in times.items()})
    spread = {n: round((sorted(t)[len(t) * 9 // 10] - sorted(t)[len(t) // 10]) / max(medians[n], 1e-9), 3) for n, t in times.items()}
    rounds = min((len(t) for t in times.values()), default=0)
    return {"ms": {n: round(t, 4) for n, t in medians.items()}, "spread_p10_p90": spread, "rounds": rounds}


def ratios(ms: Mapping[str, float], methods: Mapping[str, Method]) -> dict[str, float]:
    """Every method over the fastest part, and others over ours."""
    floor = min((t for name, t in ms.items() if methods[name].part), default=None)
    whole = [name for name in ms if not methods[name].part]
    ours = [name for name in whole if methods[name].ours]
    found = {f"{name} / products": round(ms[name] / floor, 3) for name in whole} if floor else {}
    return found | {f"{other} / {name}": round(ms[other] / ms[name], 3) for name in ours for other in whole if other not in ours}


def _checked(methods: Mapping[str, Method], want: Call, clock: Gpu, far: float) -> dict[str, Any]:
    """Call every method once; the seconds that took, what was off, what was raised, which outputs are left out."""
    true = [t if t is None else t.detach() for t in several(want())]
    seconds: dict[str, float] = {}
    off: dict[str, float] = {}
    raised: dict[str, str] = {}
    left: dict[str, list[int]] = {}
    for name, method in methods.items():
        try:
            began = time.perf_counter()
            result = method.call()
            clock.wait()
            took = time.perf_counter() - began
            if not method.part:
                outputs = [*method.results(result)]
                off[name] = float(f"{distance(outputs, true):.3g}")
                if missing := [i for i, t in enumerate(outputs) if t is None]:
                    left[name] = missing
        except Exception as problem:
            raised[name] = f"{type(problem).__name__}: {problem}"[:500]
            off.pop(name, None)
        else:
            seconds[name] = round(took, 3)
        result = outputs = None  # type: ignore[assignment]
    gc.collect()
    wrong = [name for name, x in off.items() if not x <= far]
    shown = {name: x if math.isfinite(x) else str(x) for name, x in off.items()}  # JSON has no infinity
    return {
        "ok": not wrong and not any(methods[name].ours for name in raised), "first_call_s": seconds, "distance": shown, "wrong": wrong,
        "raised": raised, "without": left,
    }  # fmt: skip


def _graphs(calls: Mapping[str, Call], clock: Gpu) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls that a CUDA graph can hold, and why others cannot be."""
    replays: dict[str, Call] = {}
    refused: dict[str, str] = {}
    for name, call in calls.items():
        try:
            replays[name] = clock.graph(call)
            clock.wait()
        except Exception as problem:
            refused[name] = f"{type(problem).__name__}: {problem}"[:200]
    return replays, refused


# --- writing down ---------------------------------------------------------------------------------------------------------------


def about(command: Sequence[str], **more: Any) -> dict[str, Any]:
    """Where and by what measurements are made: the first line of a sheet."""
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "no GPU", "driver": _driver() if gpu else "", "cuda": torch.version.cuda or "",
        **{name: version for name in PACKAGES if (version := _version(name))}, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit(), "command": " ".join(_plain(word) for word in command), **more,
    }  # fmt: skip


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def commit() -> str:
    """The commit of this checkout, marked where files differ from it; of an exported tree, what its file COMMIT says."""
    exported = ROOT / "COMMIT"
    if exported.is_file():
        return exported.read_text(encoding="utf-8").strip()
    found = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    return found + ("-changed" if found and _output("git", "-C", str(ROOT), "status", "--porcelain", "-uno") else "") or "unknown"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _plain(word: str) -> str:
    """A word of a command without the folders of this machine."""
    path = Path(word)
    return (
        path.relative_to(ROOT).as_posix() if path.is_absolute() and path.is_relative_to(ROOT) else path.name if path.is_absolute() else word
    )


class OtherRun(Exception):
    """A sheet holds measurements of another commit or machine."""


@dataclass
class Sheet:
    """A file of records, each told apart by the values of `keys`. One that is there already is gone on with, if it is of the same device,
    commit and versions; raises OtherRun if it is not."""

    path: Path
    head: Mapping[str, Any]
    keys: tuple[str, ...]
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        found = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()] if self.path.is_file() else []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not found:
            self.path.write_text(json.dumps(dict(self.head)) + "\n", encoding="utf-8")
            return
        first = {k: v for k, v in found[0].items() if k not in ("date", "command")}
        if differing := [k for k, v in self.head.items() if k not in ("date", "command") and first.get(k) != v]:
            raise OtherRun(f"{self.path} holds another run: {', '.join(differing)} differ; give another file")
        self.done = {self._key(r) for r in found[1:] if "left_out" not in r}

    def _key(self, record: Mapping[str, Any]) -> str:
        return json.dumps([record.get(k) for k in self.keys])

    def has(self, **record: Any) -> bool:
        """Is there a record with these values of the keys?"""
        return self._key(record) in self.done

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record down, and print it."""
        line = json.dumps(dict(record))
        with self.path.open("a", encoding="utf-8") as sink:
            sink.write(line + "\n")
        self.done.add(self._key(record))
        print(line, flush=True)
