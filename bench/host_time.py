"""Host time of a call: microseconds a call takes before the GPU has anything to do, forward alone and forward with backward.

    python bench/host_time.py [--stubs] [--calls N] [--out FILE]

Programs of one product at m = n = k = 256, where a kernel is shorter than its call: `linear` (saves its inputs alone) and `swiglu` (saves
its pre-activations). Beside them an autograd.Function that only allocates what the call allocates, torch's own matmul, and the same call
through its registered operator; all take turns. With a Hopper GPU, kernels are launched; without one, or with --stubs, executables that do
nothing take their place on CPU tensors of 64 x 64 (beyond, the C library asks the system for each buffer), times are the process's own CPU
time, and torch's matmul is left out. A line a measurement, of JSON with --out: median and best over repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import protocol
from bench.need_gpu import missing
from coda_lang.backend_cute import arguments, configs

PROGRAMS = {
    "linear": "program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n",
    "swiglu": "program swiglu(x: bf16[m, k], w: bf16[n, lane=2, k]) -> (y: bf16[m, n])\ngate, up = x @ w\ny = silu(gate) * up\n",
}
SIZE, SMALL = 256, 64
REPEATS = 21
EMPTY_FORWARD, EMPTY_BOTH = (f"{what}, an empty autograd.Function" for what in ("forward with gradients", "forward and backward"))


class Stubs:
    """Executables that do nothing."""

    arch = "sm_90a"
    whole = False

    def config(self, launch: Any, extents: Any, device: Any) -> Any:
        """The default configuration."""
        return configs.choose(launch, extents)

    def executables(self, wanted: list[Any], device: Any) -> list[Callable[..., None]]:
        """One a kernel."""
        return [lambda *tensors: None for _ in wanted]

    def select(self, program: Any, functions: Any) -> Stubs:
        """The same for every program."""
        return self


class Empty(torch.autograd.Function):
    """Allocates what a call allocates, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(w)


def stub(fn: Any) -> Any:
    """The function, launching nothing, on whatever device its tensors are."""
    fn.objects = Stubs()
    arguments.runs_kernels = lambda device: True  # type: ignore[assignment]
    arguments.check_gpu = lambda *a: None  # type: ignore[assignment]
    return fn


def measure(rows: dict[str, Callable[[], Any]], calls: int, clock: Callable[[], float]) -> dict[str, tuple[float, float]]:
    """Median and best microseconds of a call of each; they take turns, so that what else the machine does meets them all."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times: dict[str, list[float]] = {what: [] for what in rows}
    for call in rows.values():
        for _ in range(20):
            call()
    for _ in range(REPEATS):
        for what, call in rows.items():
            finish()
            start = clock()
            for _ in range(max(calls // REPEATS, 1)):
                call()
            times[what].append((clock() - start) / max(calls // REPEATS, 1) * 1e6)
    finish()
    return {what: (statistics.median(found), min(found)) for what, found in times.items()}


def training(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Callable[[], Any]:
    """Forward and backward, gradients left in `.grad`."""
    inputs = [t.detach().clone().requires_grad_() for t in tensors]
    cotangent = torch.ones_like(call(*inputs))

    def step() -> None:
        for t in inputs:
            t.grad = None
        call(*inputs).backward(cotangent)

    return step


def rows(fn: Any, tensors: tuple[torch.Tensor, ...], peers: bool) -> dict[str, Callable[[], Any]]:
    """What is measured of one function."""

    def empty(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return Empty.apply(x, w)

    def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.flatten(0, -2).T

    x, leaves = tensors[0], [t.detach().clone().requires_grad_() for t in tensors]
    fn.prepare()
    found = {
        "forward without gradients": lambda: fn(*tensors),
        "forward without gradients, through the operator": lambda: fn.operator.forward(*tensors),
        "allocating the output": lambda: torch.empty(x.shape, dtype=torch.bfloat16, device=x.device),
        "forward with gradients": lambda: fn(*leaves),
        EMPTY_FORWARD: lambda: empty(*leaves),
        "forward and backward": training(fn, *tensors),
        "forward and backward, through the operator": training(fn.operator.forward, *tensors),
        EMPTY_BOTH: training(empty, *tensors),
    }
    if peers:
        found |= {"torch.matmul": lambda: matmul(*tensors), "forward and backward, torch.matmul": training(matmul, *tensors)}
    return found


def main() -> int:
    """Measure all programs; the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stubs", action="store_true", help="launch nothing, on the CPU")
    parser.add_argument("--calls", type=int, default=2000, help="calls a repeat (default 2000)")
    parser.add_argument("--out", type=Path, help="write JSON lines here")
    options = parser.parse_args()
    import coda_lang

    stubs = options.stubs or bool(missing())
    device, clock = ("cpu", time.process_time) if stubs else ("cuda", time.perf_counter)
    print(f"on {'the CPU, launching nothing' if stubs else torch.cuda.get_device_name()}; torch {torch.__version__}")
    found = []
    for name, text in PROGRAMS.items():
        fn = coda_lang.compile(text)
        if fn.backward is None:
            print(f"{name}: this version derives no backward", file=sys.stderr)
            return 1
        size = SMALL if stubs else SIZE
        shapes = [[size if a in ("m", "n", "k") else 2 for a in argument.axes] for argument in fn.program.inputs]
        tensors = tuple(torch.randn(shape, device=device).to(torch.bfloat16) for shape in shapes)
        times = measure(rows(stub(fn) if stubs else fn, tensors, not stubs), options.calls, clock)
        for what, (median, best) in times.items():
            print(f"{name:8} {what:52} {median:9.2f} us, best {best:9.2f}")
            found.append({"program": name, "what": what, "median_us": round(median, 2), "best_us": round(best, 2)})
        for what, empty in (("forward with gradients", EMPTY_FORWARD), ("forward and backward", EMPTY_BOTH)):
            over = [ours - theirs for ours, theirs in zip(times[what], times[empty])]
            print(f"{name:8} {what + ', over the empty one':52} {over[0]:9.2f} us, best {over[1]:9.2f}")
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in (protocol.about(sys.argv), *found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
