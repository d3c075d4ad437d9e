"""Which Gemms of a program share a launch: those that do not wait for each other, where that saves more than it costs.

In: a `spec.Program` with one Gemm a launch, nominal extents. Out: the program with `Together` records, in an order in which everything is
written before it is read. One launch of several fills the multiprocessors that the last tiles of each would leave idle, and is launched
once; but all share a tile configuration, shared memory for the one that needs most, and registers for the heaviest epilogue. The model of
`configs.cycles` weighs that, each side at its best configuration; those that share an operand need to gain less, and come first.
Non-goals: map kernels and finishers, which wait for memory; what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from math import inf, prod

from . import configs, spec
from .prune import written

LAUNCH_CYCLES = 3500.0  # from the last tile of one kernel to the first of the next: 2 microseconds, estimated
MARGIN = 0.02  # of their time apart, what two launches must save together
MARGIN_SHARED = 0.01  # of the shorter one's, where they read the same matrix, which the second may find in the cache
MEMORY = 1.1  # times what the program holds at most with one Gemm a launch: more may not be held
MOST = 4  # Gemms in a launch: each is a loop of its own in every role

Extents = Mapping[str, int]
Gemms = tuple[spec.Gemm, ...]
Cost = Callable[[Gemms], float]
Waits = dict[str, set[str]]


@dataclass(frozen=True)
class Gain:
    """What one launch saves of several: estimated cycles at nominal extents, launching included, and the operands that two of them read."""

    apart: tuple[float, ...]
    together: float
    shared: tuple[str, ...]

    @property
    def saved(self) -> float:
        return sum(self.apart) - self.together

    @property
    def worthwhile(self) -> bool:
        """Is the saving worth a kernel that is compiled anew for every subset of its results?"""
        return self.saved > (MARGIN_SHARED * min(self.apart) if self.shared else MARGIN * sum(self.apart))


def together(
    program: spec.Program, extents: Extents, variants: Sequence[spec.Program] = (), saved: frozenset[str] = frozenset()
) -> spec.Program:
    """The program with the Gemms together that should be, at most `MEMORY` of what is held else.

    `variants` (see `alike`) must be able to run the same ones together. `saved` are inputs that are dropped after their last reader.

    A program with loops stays as it is: what is launched for every chunk has an order of its own.
    """
    if any(p.loops for p in (program, *variants)):
        return program
    programs = [list(p.kernels) for p in (program, *variants)]
    cost, room = costs(extents), [MEMORY * peak(launches, extents, saved) for launches in programs]
    while True:
        waits = [_after(launches) for launches in programs]
        pairs = combinations([k for k in programs[0] if any(gemm.products for gemm in spec.gemms(k))], 2)
        found = [
            (gain, a, b)
            for a, b in pairs
            if len(spec.gemms(a) + spec.gemms(b)) <= MOST and all(map(_may, programs, waits, [a] * len(waits), [b] * len(waits)))
            if (gain := measured((spec.gemms(a), spec.gemms(b)), cost)) is not None and gain.worthwhile
        ]
        for _, a, b in sorted(found, key=lambda x: (bool(x[0].shared), x[0].saved), reverse=True):
            merged = [_merged(launches, before, a, b) for launches, before in zip(programs, waits)]
            if all(peak(launches, extents, saved) <= most for launches, most in zip(merged, room)):
                programs = merged
                break
        else:
            return replace(program, kernels=tuple(programs[0]))


def alike(program: spec.Program, whole: spec.Program) -> spec.Program:
    """The program, kernels of `whole` with fewer results, with those together that are so there: then reductions have the same bits."""
    launches: list[spec.Kernel] = list(program.kernels)
    for launch in spec.launches(whole):
        first, *rest = spec.gemms(launch)
        for gemm in rest:
            launches = _merged(launches, _after(launches), first, gemm)
    return replace(program, kernels=tuple(launches))


def costs(extents: Extents) -> Cost:
    """Estimated cycles of one launch of some Gemms in the best configuration, infinite where none serves them all; remembered."""

    @cache
    def cost(gemms: Gemms) -> float:
        launch = spec.joined(gemms)
        sizes = configs.problems(launch, extents)
        found = (configs.cycles(launch, config, sizes, memory=memory) for config, memory in configs.budgets(launch))
        return LAUNCH_CYCLES + min(found, default=inf)

    return cost


def measured(launches: Sequence[Gemms], cost: Cost) -> Gain | None:
    """What some launches cost, and would cost as one; None where they cannot be one."""
    both = cost(tuple(gemm for gemms in launches for gemm in gemms))
    shared = {m.tensor for one, other in combinations(launches, 2) for m in _operands(one) & _operands(other)}
    return Gain(tuple(map(cost, launches)), both, tuple(sorted(shared))) if both < inf else None


def _operands(gemms: Gemms) -> set[spec.Matrix]:
    return {m for gemm in gemms for p in gemm.products for m in (p.a, *p.b)}


def report(program: spec.Program, extents: Extents, saved: frozenset[str] = frozenset()) -> list[str]:
    """A paragraph for each launch of several, for people; and what they hold more than without."""
    lines, cost = [], costs(extents)
    for launch in spec.launches(program):
        gain = measured([(gemm,) for gemm in launch.gemms], cost) if isinstance(launch, spec.Together) else None
        if gain is not None:
            names = ", ".join(gemm.name for gemm in spec.gemms(launch))
            lines.append(f"one launch: {names}" + (f", which share {', '.join(gain.shared)}" if gain.shared else ""))
            tiles, alone = configs.choose(launch, extents).key, sum(gain.apart)
            lines.append(f"  {gain.together / 1e3:.0f} thousand cycles with tiles {tiles}, {alone / 1e3:.0f} in launches of their own")
    held = peak(program.kernels, extents, saved)
    apart = peak([part for kernel in program.kernels for part in spec.members(kernel)], extents, saved)
    return [*lines, f"  memory held at most: {held / 1e6:.1f} MB, {apart / 1e6:.1f} in launches of their own"] if held > apart else lines


# --- what may run together ---------------------------------------------------------------------------------------------


def _after(launches: Sequence[spec.Kernel]) -> Waits:
    """For each kernel by name, those that it waits for: they write what it touches, or touch what it writes, directly or by others."""
    names = [{t.name for t in kernel.tensors} for kernel in launches]
    writes = [written(kernel) for kernel in launches]
    before: Waits = {}
    for i, kernel in enumerate(launches):
        before[kernel.name] = set()
        for j in range(i):
            if writes[j] & names[i] or names[j] & writes[i]:
                before[kernel.name] |= {launches[j].name} | before[launches[j].name]
    return before


def _variants(launches: Sequence[spec.Kernel], a: spec.Kernel, b: spec.Kernel) -> list[int]:
    """Where the launches stand that have a Gemm of `a` and of `b`, or a variant of it: two, or fewer where one is not there."""
    found = []
    for like in (a, b):
        products = {gemm.products for gemm in spec.gemms(like)}
        found += [i for i, k in enumerate(launches) if products & {gemm.products for gemm in spec.gemms(k)}]
    return sorted(set(found))


def _may(launches: Sequence[spec.Kernel], waits: Waits, a: spec.Kernel, b: spec.Kernel) -> bool:
    """Does neither wait for the other?"""
    names = [launches[i].name for i in _variants(launches, a, b)]
    return not any(one in waits[other] for one in names for other in names)


def peak(launches: Sequence[spec.Kernel], extents: Extents, saved: frozenset[str] = frozenset()) -> int:
    """Bytes held while the launch that holds most runs: results to the end, `saved` inputs until they were read last, no other inputs."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    size: dict[str, int] = {}
    for i, kernel in enumerate(launches):
        for t in kernel.tensors:
            first.setdefault(t.name, 0 if t.role == "in" else i)
            last[t.name] = len(launches) if t.role == "out" else i
            counts = t.role in ("temp", "out") or t.name in saved
            size[t.name] = configs.BYTES[t.dtype] * prod(spec.product(mode, extents) for mode in t.modes) if counts else 0
    return max((sum(size[n] for n in size if first[n] <= i <= last[n]) for i in range(len(launches))), default=0)


def _merged(launches: list[spec.Kernel], waits: Waits, a: spec.Kernel, b: spec.Kernel) -> list[spec.Kernel]:
    """The launches with those of `a` and of `b` as one, behind all that either waits for; as they are where one is missing."""
    found = _variants(launches, a, b)
    if len(found) < 2:
        return launches
    first, last = found
    one, other = launches[first], launches[last]
    between = launches[first + 1 : last]
    before = [k for k in between if k.name in waits[other.name]]
    both = spec.joined(spec.gemms(one) + spec.gemms(other))
    return [*launches[:first], *before, both, *(k for k in between if k not in before), *launches[last + 1 :]]
