"""Host time of a call: microseconds a call takes before the GPU has anything to do, forward alone and forward with backward.

    python bench/host_time.py [--stubs] [--calls N] [--out FILE]

Programs of one product at m = n = k = 256, where a kernel is shorter than its call: `linear` (saves its inputs alone) and `swiglu` (saves
its pre-activations). Beside them an autograd.Function that only allocates what the call allocates, torch's own matmul, and the same call
through its registered operator. With a Hopper GPU, kernels are launched; without one, or with --stubs, executables that do nothing take
their place on CPU tensors, and torch's matmul is left out. A line a measurement, of JSON with --out: median and best over repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
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
SIZE = 256
REPEATS = 9


class Stubs:
    """Executables that do nothing."""

    arch = "sm_90a"
    whole = False

    def config(self, launch: Any, extents: Any, device: Any) -> Any:
        """The default configuration."""
        return configs.choose(launch, extents)

    def executables(self, wanted: list[Any]) -> list[Callable[..., None]]:
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


def measure(call: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Median and best microseconds of a call."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(calls // 4 + 3):
        call()
    times = []
    for _ in range(REPEATS):
        finish()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        finish()
    return statistics.median(times), min(times)


def training(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Callable[[], Any]:
    """Forward and backward, gradients left in `.grad`."""
    inputs = [t.detach().clone().requires_grad_() for t in tensors]
    cotangent = torch.ones_like(call(*inputs))

    def step() -> None:
        for t in inputs:
            t.grad = None
        call(*inputs).backward(cotangent)

    return step


def rows(name: str, fn: Any, tensors: tuple[torch.Tensor, ...], calls: int, peers: bool) -> Iterator[dict[str, Any]]:
    """Every measurement of one function."""

    def row(what: str, call: Callable[[], Any]) -> dict[str, Any]:
        median, best = measure(call, calls)
        return {"program": name, "what": what, "median_us": round(median, 2), "best_us": round(best, 2)}

    def empty(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return Empty.apply(x, w)

    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    with torch.no_grad():
        yield row("forward without gradients", lambda: fn(*tensors))
        fn.prepare()
        yield row("forward without gradients, through the operator", lambda: fn.operator.forward(*tensors))
        yield row("allocating the output", lambda: torch.empty((SIZE, SIZE), dtype=torch.bfloat16, device=tensors[0].device))
        if peers:
            yield row("torch.matmul", lambda: tensors[0] @ tensors[1].flatten(0, -2).T)
    yield row("forward with gradients", lambda: fn(*leaves))
    yield row("forward with gradients, an empty autograd.Function", lambda: empty(*leaves))
    yield row("forward and backward", training(fn, *tensors))
    yield row("forward and backward, through the operator", training(fn.operator.forward, *tensors))
    yield row("forward and backward, an empty autograd.Function", training(empty, *tensors))
    if peers:
        yield row("forward and backward, torch.matmul", training(lambda x, w: x @ w.flatten(0, -2).T, *tensors))


def main() -> int:
    """Measure all programs; the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stubs", action="store_true", help="launch nothing, on the CPU")
    parser.add_argument("--calls", type=int, default=2000, help="calls a repeat (default 2000)")
    parser.add_argument("--out", type=Path, help="write JSON lines here")
    options = parser.parse_args()
    import coda_lang

    stubs = options.stubs or bool(missing())
    device = "cpu" if stubs else "cuda"
    print(f"on {'the CPU, launching nothing' if stubs else torch.cuda.get_device_name()}; torch {torch.__version__}")
    found = []
    for name, text in PROGRAMS.items():
        fn = coda_lang.compile(text)
        if fn.backward is None:
            print(f"{name}: this version derives no backward", file=sys.stderr)
            return 1
        shapes = [[SIZE if a in ("m", "n", "k") else 2 for a in argument.axes] for argument in fn.program.inputs]
        tensors = tuple(torch.randn(shape, device=device).to(torch.bfloat16) for shape in shapes)
        for row in rows(name, stub(fn) if stubs else fn, tensors, options.calls, not stubs):
            print(f"{row['program']:8} {row['what']:52} {row['median_us']:9.2f} us, best {row['best_us']:9.2f}")
            found.append(row)
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in (protocol.about(sys.argv), *found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
