"""Loops over chunks of an axis: which kernels are in one, what a chunk's extents are, which tensors it sees a part of.

In: a `spec.Program` with `loops`. Out: its kernels in launch order with each loop as one item, chunks, extents; for the launcher
(`host_loops`), the twin and pruning. Pure arithmetic: needs no torch. Non-goals: memory, launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from . import spec


@dataclass(frozen=True)
class Round:
    """A loop with its kernels, in launch order."""

    loop: spec.Loop
    kernels: tuple[spec.Kernel, ...]


def items(program: spec.Program) -> Iterator[spec.Kernel | Round]:
    """Kernels that are launched once, and loops in the place of their first kernel."""
    home = {name: loop for loop in program.loops for name in loop.kernels}
    done: set[spec.Loop] = set()
    for kernel in program.kernels:
        loop = home.get(kernel.name)
        if loop is None:
            yield kernel
        elif loop not in done:
            done.add(loop)
            yield Round(loop, tuple(k for k in program.kernels if k.name in loop.kernels))


def chunks(loop: spec.Loop, extents: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """First position and length of each chunk; none of an empty axis."""
    whole = extents[loop.axis]
    for start in range(0, whole, loop.size):
        yield start, min(loop.size, whole - start)


def inside(loop: spec.Loop, extents: Mapping[str, int], start: int, length: int) -> dict[str, int]:
    """The extents that the kernels of one chunk see."""
    return {**extents, loop.axis: length, loop.start: start, loop.whole: extents[loop.axis]}


def along(program: spec.Program, loop: spec.Loop) -> dict[str, int]:
    """The tensors of the program of which a chunk sees a part, and which of their dims is the axis."""
    whole = (a for a in (*program.inputs, *program.outputs, *program.temps) if a.name not in loop.local)
    return {a.name: a.axes.index(loop.axis) for a in whole if loop.axis in a.axes}


def kept(loops: Sequence[spec.Loop], names: Mapping[str, str], tensors: set[str]) -> tuple[spec.Loop, ...]:
    """The loops of a smaller program: kernels under their new names where they are still there, tensors that are still used."""
    made = []
    for loop in loops:
        kernels = tuple(names[k] for k in loop.kernels if k in names)
        local = tuple(t for t in loop.local if t in tensors)
        carried = tuple(pair for pair in loop.carried if pair[1] in tensors)
        if kernels:
            made.append(replace(loop, kernels=kernels, local=local, carried=carried))
    return tuple(made)
