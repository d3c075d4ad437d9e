"""Gradients added to buffers by the kernels that store them: the buffer is one more tile (or vector) that the epilogue reads, the sum is
rounded once to the buffer's type, and the buffer is what is written.

In: a backward program, its functions, an output and the type of its buffer. Out: the program with the buffer as an input and
`Program.into`; or None where the kernel cannot: an output with lanes in one tile or in windows, one that other kernels read or that chunks
add up, a body of several phases, a finisher of several axes, or where no tile has room. Then the gradient is made in f32 and added after.
Needs neither torch nor cutlass. Non-goals: what may be a buffer (`accumulate`), launching (`host`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from . import configs, loops, slices, spec
from .prune import Single, each, target, used, written

Functions = Mapping[str, Callable[..., tuple]]
SUFFIX = "_into"


def added(program: spec.Program, functions: Functions, name: str, dtype: str) -> tuple[spec.Program, Functions] | None:
    """The program that adds its output `name` to a buffer of this dtype, its input `{name}_into`."""
    writers = [k for k in program.kernels if name in written(k)]
    if len(writers) != 1 or any(name in used(k) for k in program.kernels if k not in writers) or name in dict(program.same):
        return None
    made = dict(functions)
    kernel = each(writers[0], partial(_added, name=name, dtype=dtype, functions=made))
    looping = {kernel_name for loop in program.loops for kernel_name in loop.kernels}
    if kernel is None or kernel == writers[0] or writers[0].name in looping:
        return None
    if not isinstance(kernel, spec.Finish) and not configs.fits(kernel):
        return None
    output = next(o for o in program.outputs if o.name == name)
    names = {k.name: kernel.name if k is writers[0] else k.name for k in program.kernels}
    kernels = tuple(kernel if k is writers[0] else k for k in program.kernels)
    return replace(
        program,
        inputs=(*program.inputs, replace(output, name=name + SUFFIX, dtype=dtype)),
        outputs=tuple(replace(o, dtype=dtype) if o.name == name else o for o in program.outputs),
        kernels=kernels,
        loops=loops.kept(program.loops, names, set().union(*map(used, kernels))),
        into=(*program.into, (name, name + SUFFIX)),
    ), made


def _added(kernel: Single, name: str, dtype: str, functions: dict[str, Callable[..., tuple]]) -> Single:
    """A kernel that adds, if it writes the output and can; else as it is."""
    if name not in written(kernel):
        return kernel
    record = next(t for t in kernel.tensors if t.name == name)
    buffer = replace(record, name=name + SUFFIX, dtype=dtype, role="in")
    tensors = (*(replace(t, dtype=dtype) if t.name == name else t for t in kernel.tensors), buffer)
    renamed = f"{kernel.name}_into_{dtype}_{name}"
    if isinstance(kernel, spec.Finish):
        if len(record.modes) > 1:
            return kernel
        place = kernel.outputs.index(name)
        port = spec.Load(buffer.name, buffer.name, tuple(spec.Index("row") for _ in record.modes))
        fn = _adding(functions, kernel.fn, {place: "into_0"}, len(kernel.partials) + len(kernel.ports), dtype, name)
        return kernel if fn is None else replace(kernel, name=renamed, tensors=tensors, fn=fn, ports=(*kernel.ports, port))
    places: dict[int, str] = {}
    ports: list[spec.Port] = []
    position = 0
    for sink in kernel.sinks:
        if target(sink) == name:
            if not isinstance(sink, spec.Store) or sink.matrix.pack > 1 or sink.window is not None:
                return kernel
            places[position] = f"into_{len(places)}"
            ports.append(spec.Tile(f"{buffer.name}_{len(ports)}", replace(sink.matrix, tensor=buffer.name)))
        position += sink.matrix.pack if isinstance(sink, spec.Store) else 2 if isinstance(sink, spec.Point) else 1
    if len(kernel.phases) > 1 or any(isinstance(p, spec.Tile) and p.matrix.pack > 1 for p in kernel.ports):
        return kernel
    at = (kernel.segments if kernel.products else 0) + len(kernel.ports)
    fn = _adding(functions, kernel.phases[0].fn, places, at, dtype, name)
    if fn is None:
        return kernel
    return replace(kernel, name=renamed, tensors=tensors, ports=(*kernel.ports, *ports), phases=(replace(kernel.phases[0], fn=fn),))


def _adding(functions: dict[str, Callable[..., tuple]], fn: str, places: Mapping[int, str], at: int, dtype: str, name: str) -> str | None:
    """The name of a function that adds its new arguments to these results."""
    called = f"{fn}_into_{dtype}_{name}"
    made = slices.plus(functions[fn], places, at=at, rounding=dtype if dtype in slices.ROUNDINGS else "", name=called)
    if made is None:
        return None
    functions[called] = made
    return called
