"""What `codac bench` measures: every kernel of a program against the time its bytes and its multiplications take at least.

In: a `Function`, extents, a Hopper GPU. Out: `Report`s as plain data: the call as a whole (GPU time, in a graph, host time, first call,
peak memory), the products alone by torch.mm, the program as written run eagerly, and a `Roof` a kernel. Times are medians of interleaved
rounds (`backend_cute.timing`). Non-goals: rivals' own fused kernels (bench/ of the repository), tuning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .backend_cute import eager, host, loops, plans, roofline, selfcheck, spec, timing
from .backend_cute.binding import Binding, bind
from .backend_cute.compile import versions
from .backend_cute.derivative import extents as backward_extents
from .backend_cute.errors import ARCHITECTURE, refuse


@dataclass(frozen=True)
class Roof:
    """One kernel: what it has to move and multiply, the time that takes at least and what limits it, the time it took.

    `floor_ms` is None, `bound` "" on a card whose peaks are not known. Of a kernel that runs in chunks, all of it is of the first of its
    `times` launches.
    """

    kernel: str
    config: str
    bytes: int
    flops: int
    floor_ms: float | None
    bound: str
    ms: float
    times: int = 1

    @property
    def distance(self) -> float | None:
        """Times the floor."""
        return self.ms / self.floor_ms if self.floor_ms else None


@dataclass(frozen=True)
class Report:
    """One program at one shape; times in milliseconds by method, "products" being its plain products by torch.mm."""

    program: str
    extents: Mapping[str, int]
    device: str
    versions: Mapping[str, str]
    ms: Mapping[str, float]
    host_us: float
    first_call_s: float
    peak_mib: Mapping[str, float]
    kernels: tuple[Roof, ...] = field(default=())


def reports(fn: Any, extents: Mapping[str, int], seed: int = 0) -> list[Report]:
    """The forward, and where there is a derivative the forward with the backward. Raises CallError without a GPU."""
    if not torch.cuda.is_available():
        help = "`codac plan FILE --shape …` tells bytes and FLOPs without one"
        raise refuse(ARCHITECTURE, "measuring needs a Hopper GPU, and torch finds none", help=help)
    inputs = selfcheck.inputs(fn.program, dict(extents), seed, "cuda")

    def written() -> Any:
        with torch.no_grad():
            return fn.reference(*inputs, library=eager.Eager())

    found = [_report(fn, fn.program.name, extents, [(fn.program, inputs)], lambda: fn(*inputs), written)]
    if fn.backward is not None:
        found.append(_training(fn, inputs, extents))
    return found


def _training(fn: Any, inputs: list[Any], extents: Mapping[str, int]) -> Report:
    given = {g for g, _ in fn.gradients}
    leaves = [t.detach().requires_grad_(a.name in given) for a, t in zip(fn.program.inputs, inputs, strict=True)]
    wanted = [t for t in leaves if t.requires_grad]
    known: dict[str, Any] = {a.name: t for a, t in zip(fn.program.inputs, inputs, strict=True)}
    saving = fn.saving or fn.program
    outputs = _plan(fn, saving, inputs, extents).run(inputs)
    known |= {o.name: t for o, t in zip(saving.outputs, outputs, strict=True)}
    cotangents = {o: torch.randn_like(known[o]) for o, _ in fn.cotangents}
    known |= {c: cotangents[o] for o, c in fn.cotangents}

    def training() -> Any:
        result = fn(*leaves)
        results = dict(zip([o.name for o in fn.program.outputs], result if isinstance(result, tuple) else (result,)))
        return torch.autograd.grad([results[o] for o in cotangents], wanted, [cotangents[o] for o in cotangents], allow_unused=True)

    parts = [(saving, inputs), (fn.backward, [known[a.name] for a in fn.backward.inputs])]
    return _report(fn, f"{fn.program.name} with gradients", extents, parts, training)


def _report(
    fn: Any, name: str, extents: Mapping[str, int], parts: list, ours: Callable[[], Any], written: Callable[[], Any] | None = None
) -> Report:
    """`parts` are the programs that run, with their inputs; `written` is the program as written, where torch can run it too."""
    began = time.perf_counter()
    ours()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    plans = [(program, _plan(fn, program, values, extents), values) for program, values in parts]
    calls: dict[str, Callable[[], Any]] = {"coda_lang": ours, "products": _products(parts, fn, extents)}
    if len(parts) == 1:
        calls |= {"coda_lang in a graph": timing.graph(ours)}
    peak = {method: _peak(call) for method, call in calls.items()}
    if written is not None:
        try:
            peak["as written, eager"] = _peak(written)
            calls["as written, eager"] = written
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    ms = timing.medians(timing.interleaved(calls))
    roofs = tuple(roof for program, plan, values in plans for roof in _roofs(program, plan, values))
    about = {"torch": torch.__version__, **versions()}
    return Report(name, dict(extents), torch.cuda.get_device_name(), about, ms, timing.host(ours), first, peak, roofs)


def _peak(call: Callable[[], Any]) -> float:
    """MiB that a call needs beyond what is there."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - held) / 2**20, 1)


def _plan(fn: Any, program: spec.Program, values: list[Any], extents: Mapping[str, int]) -> plans.Plan:
    if program is fn.backward:
        binding = Binding(dict(backward_extents(program, extents)))
    else:
        binding = bind(program, [tuple(t.shape) for t in values])
    return host.plan(program, binding, values, values[0].device, fn.objects)


def _roofs(program: spec.Program, plan: plans.Plan, values: list[Any]) -> list[Roof]:
    slots = plan.start(values)
    for step in plan.steps:
        step(slots)
    calls = {name: (lambda step=plan.steps[place]: step(slots)) for name, place in plan.places.items()}
    ms = timing.medians(timing.interleaved(calls))
    known, work, found = roofline.peak(torch.cuda.get_device_name()), dict[str, int](), []
    for name in plan.places:
        kernel, config, chunk = plan.kernels[name], plan.configs.get(name), _chunk(program, name, plan.extents)
        extents, times = chunk or (plan.extents, 1)
        work.update(roofline.partials(kernel, extents, config))
        found.append(replace(roof(roofline.of_kernel(kernel, extents, config, work), ms[name], known), times=times))
    return found


def _chunk(program: spec.Program, kernel: str, extents: Mapping[str, int]) -> tuple[dict[str, int], int] | None:
    """The extents of a kernel's first chunk, and how many chunks there are; None for one that runs whole."""
    for loop in program.loops:
        if kernel in loop.kernels:
            found = [*loops.chunks(loop, extents)]
            return loops.inside(loop, extents, *found[0]), len(found)
    return None


def roof(count: roofline.Count, ms: float, peak: roofline.Peak | None) -> Roof:
    """A measured kernel against a card's peaks."""
    moved, flops = count.bytes, count.flops
    floor, bound = (peak.floor_ms(moved, flops), peak.bound(moved, flops)) if peak else (None, "")
    return Roof(count.kernel, count.config, moved, flops, floor, bound, ms)


def _products(parts: list, fn: Any, extents: Mapping[str, int]) -> Callable[[], Any]:
    """The plain products of all kernels by torch.mm, operands that share a tile as one matrix; random operands of the sizes."""
    made: list[tuple[Any, Any]] = []
    for program, values in parts:
        known = backward_extents(program, extents) if program is fn.backward else extents
        for gemm in (gemm for kernel in program.kernels for gemm in spec.gemms(kernel)):
            dtype = torch.float16 if any(t.dtype == "f16" for t in gemm.tensors) else torch.bfloat16
            for m, n, k in roofline.products(gemm, {**dict(program.extents), **known}):
                shapes = (m, k), (n * gemm.segments, k)
                made.append(tuple(torch.randn(s, device=values[0].device, dtype=dtype) for s in shapes))

    def call() -> None:
        with torch.no_grad():
            for a, b in made:
                torch.mm(a, b.mT)

    return call
