"""Which Gemms of a program share a launch: those that do not wait for each other, where that saves more than it costs.

In: a `spec.Program` with one Gemm a launch, nominal extents. Out: the program with `Together` records, in an order in which everything is
written before it is read. One launch of several fills the multiprocessors that the last tiles of each would leave idle, and is launched
once; but all share a tile configuration, shared memory for the one that needs most, and registers for the heaviest epilogue. The model of
`configs.cycles` weighs that, each side at its best configuration. Gemms that share an operand need only gain anything; others must gain
more than the model may be wrong by. Non-goals: map kernels and finishers, which wait for memory; what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from . import configs, spec
from .prune import written

LAUNCH_CYCLES = 3500.0  # from the last tile of one kernel to the first of the next: 2 microseconds, estimated
MARGIN = 0.02  # of both, what a launch of Gemms without a common operand must save
MOST = 4  # Gemms in a launch: each is a loop of its own in every role

Extents = Mapping[str, int]
Waits = dict[str, set[str]]


@dataclass(frozen=True)
class Gain:
    """What a launch of several saves: estimated cycles at nominal extents, with the launches themselves, and the operands read by two."""

    apart: float
    together: float
    shared: tuple[str, ...]

    @property
    def saved(self) -> float:
        return self.apart - self.together

    @property
    def worthwhile(self) -> bool:
        """Is the saving more than the model's error, or with a common operand anything at all?"""
        return self.saved > (0.0 if self.shared else MARGIN * self.apart)


def together(program: spec.Program, extents: Extents, variants: Sequence[spec.Program] = ()) -> spec.Program:
    """The program with the Gemms together that should be. `variants` (see `alike`) must be able to run the same ones together.

    A program with loops stays as it is: what is launched for every chunk has an order of its own.
    """
    if any(p.loops for p in (program, *variants)):
        return program
    programs = [list(p.kernels) for p in (program, *variants)]
    gain = cache(lambda gemms: measured(spec.joined(gemms), extents))
    while True:
        waits = [_after(launches) for launches in programs]
        pairs = combinations([k for k in programs[0] if any(gemm.products for gemm in spec.gemms(k))], 2)
        found = [
            (saved, a, b)
            for a, b in pairs
            if len(spec.gemms(a) + spec.gemms(b)) <= MOST and all(map(_may, programs, waits, [a] * len(waits), [b] * len(waits)))
            if (saved := _added(gain, a, b)) is not None and saved.worthwhile
        ]
        if not found:
            return replace(program, kernels=tuple(programs[0]))
        _, a, b = max(found, key=lambda x: (bool(x[0].shared), x[0].saved))
        programs = [_merged(launches, before, a, b) for launches, before in zip(programs, waits)]


def alike(program: spec.Program, whole: spec.Program) -> spec.Program:
    """The program, kernels of `whole` with fewer results, with those together that are so there: then reductions have the same bits."""
    launches: list[spec.Kernel] = list(program.kernels)
    for launch in spec.launches(whole):
        first, *rest = spec.gemms(launch)
        for gemm in rest:
            launches = _merged(launches, _after(launches), first, gemm)
    return replace(program, kernels=tuple(launches))


def measured(launch: spec.Launch, extents: Extents) -> Gain | None:
    """What a launch costs and its Gemms would cost apart; None where no configuration serves them all."""
    offered = configs.offered(launch)
    if not offered:
        return None
    sizes = configs.problems(launch, extents)
    apart = sum(_best(gemm, [size]) for gemm, size in zip(spec.gemms(launch), sizes))
    shared = {name for one, other in combinations(spec.gemms(launch), 2) for name in _operands(one) & _operands(other)}
    return Gain(apart, _best(launch, sizes), tuple(sorted(shared)))


def report(program: spec.Program, extents: Extents) -> list[str]:
    """A paragraph for each launch of several, for people."""
    lines = []
    for launch in spec.launches(program):
        gain = measured(launch, extents) if isinstance(launch, spec.Together) else None
        if gain is None:
            continue
        sizes = configs.problems(launch, extents)
        config = min(configs.offered(launch), key=lambda c: configs.cycles(launch, c, sizes))
        lines += [
            f"one launch: {', '.join(gemm.name for gemm in spec.gemms(launch))}"
            + (f", which share {', '.join(gain.shared)}" if gain.shared else ""),
            f"  {gain.together / 1e3:.0f} thousand cycles with tiles {config.key}, {gain.apart / 1e3:.0f} in launches of their own",
        ]
    return lines


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


# --- what it saves -----------------------------------------------------------------------------------------------------


def _added(gain: Callable[[tuple[spec.Gemm, ...]], Gain | None], a: spec.Kernel, b: spec.Kernel) -> Gain | None:
    """What joining two launches saves beyond what each of them does."""
    both, one, other = (gain(gemms) for gemms in (spec.gemms(a) + spec.gemms(b), spec.gemms(a), spec.gemms(b)))
    if both is None or one is None or other is None:
        return None
    return Gain(one.together + other.together, both.together, tuple(sorted(_operands(a) & _operands(b))))


def _operands(launch: spec.Kernel) -> set[str]:
    return {m.tensor for gemm in spec.gemms(launch) for p in gemm.products for m in (p.a, *p.b)}


def _best(launch: spec.Launch, sizes: Sequence[configs.Problem]) -> float:
    return LAUNCH_CYCLES + min(configs.cycles(launch, config, sizes) for config in configs.offered(launch))
