"""Other schedules of a launch than the planned one: products cut along K, then a kernel a Gemm that adds the parts and runs its epilogue.

In: a launch of `spec`, into how many parts. Out: `Split`, records made of what exists: the parts of all its Gemms in one launch, each
storing its accumulators in f32, and map kernels whose epilogues read them. One part is the unfused schedule. Parts are added in order, so
the same call has the same bits every time. `applied` puts splits into a program; `estimates` says what each schedule of a launch takes at
a shape, and `best` which one to take. Needs neither torch nor cutlass.
Non-goals: splitting inside a launch (a mainloop that meets others), kernels of a loop over chunks, which stay as they are.
"""

from __future__ import annotations

import ast
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from . import configs, slices, spec
from .prune import target

MOST = 4  # Gemms of a launch, as in `together`: each is a loop of its own in every role
PLANNED = 0  # parts: as the compiler planned it
GAIN = 0.9  # of the planned schedule's time, below which another must be by the model to be taken; the model is off by 0.09 (1 sigma)

# Microseconds, bytes a microsecond; fitted to launches of few tiles, whose time the power of the card does not limit.
FIRST = 6.0  # of any launch: until the first operands are there, and after the last products
SUM = 3.5  # of a map kernel that follows another launch; estimated, not measured
BLOCK, BLOCK_FEW = 0.17, 0.14  # of a k-block at least: one warp brings it; the second of at most 16 rows, which are one load
CLOCK = 1780.0  # cycles at few tiles
LIMITED = 2066.0  # cycles of `configs.cycles` where the card's power is the limit
COLD = 3.2e6  # operands from memory, as long as few tiles wait for them
MEMORY, CACHE, SHARE = 4.5e6, 9e6, 0.12e6  # of map kernels: all of them from memory or from the L2 cache, one multiprocessor
HELD = 24 << 20  # bytes of parts that the L2 cache still has when they are added

Functions = Mapping[str, Callable[..., tuple]]
Extents = Mapping[str, int]


@dataclass(frozen=True)
class Split:
    """A launch as several kernels. `parts` stores accumulators into `temps`; `sums` are map kernels, one for each Gemm of `of`, in order.

    `functions`: new scalar functions by name: the one each is made from, and how many accumulators it adds up from the parts of (none: it
    returns its accumulators as they are).
    """

    of: spec.Launch
    count: int
    parts: spec.Launch
    sums: tuple[spec.Gemm, ...]
    temps: tuple[spec.Argument, ...]
    functions: tuple[tuple[str, str, int], ...]

    @property
    def kernels(self) -> tuple[spec.Launch, ...]:
        """In launch order."""
        return (self.parts, *self.sums)

    @property
    def note(self) -> str:
        """What a call does, for people."""
        how = "unfused" if self.count == 1 else f"K in {self.count} parts"
        return f"{self.of.name}: {how} by {self.parts.name}, then {', '.join(total.name for total in self.sums)}"


@cache
def split(launch: spec.Launch, count: int) -> Split | None:
    """The launch with its products in `count` parts along K; None where that cannot be, or no configuration serves."""
    gemms = spec.gemms(launch)
    if count < 1 or count * len(gemms) > MOST:
        return None
    made = [_split(gemm, count) for gemm in gemms]
    found = [m for m in made if m is not None]
    if len(found) < len(made):
        return None
    parts = spec.joined(tuple(part for parts, *_ in found for part in parts))
    sums = tuple(total for _, total, *_ in found)
    if not all(map(configs.offered, (parts, *sums))):
        return None
    temps = tuple(temp for *_, temps, _ in found for temp in temps)
    return Split(launch, count, parts, sums, temps, tuple(dict.fromkeys(f for *_, functions in found for f in functions)))


Parts = tuple[tuple[spec.Gemm, ...], spec.Gemm, tuple[spec.Argument, ...], tuple[tuple[str, str, int], ...]]


def _split(gemm: spec.Gemm, count: int) -> Parts | None:
    """The parts of one Gemm, what adds them, the tensors between, the functions of both."""
    records = {t.name: t for t in gemm.tensors}
    along = _along(gemm)
    if along is None:
        return None
    a, b = gemm.products[0].a, gemm.products[0].b[0]
    axes = [tuple(x for mode in m.rows for x in records[m.tensor].modes[mode]) for m in (a, b)]
    rows, cols = axes
    if not rows or not cols or len({*rows, *cols}) < len(rows) + len(cols):
        return None
    names = [[f"{gemm.name}@{i}.{s}" for i in range(count)] for s in range(gemm.segments)]  # for no other tensor has such a name
    between = {name: spec.Tensor(name, "f32", (rows, cols), "temp") for each in names for name in each}
    matrix = {name: spec.Matrix(name, (0,), (1,)) for name in between}
    plain = f"accumulators_{gemm.segments}"

    def part(i: int) -> spec.Gemm:
        operands = tuple(replace(records[name], part=spec.Part(mode, i, count, configs.TILE_K)) for name, mode in along.items())
        own = [each[i] for each in names]
        return spec.Gemm(
            f"{gemm.name}_k{count}_{i}", (*operands, *(between[name] for name in own)), gemm.products, (spec.Phase(plain),),
            sinks=tuple(spec.Store(matrix[name]) for name in own), rows=gemm.rows, cols=gemm.cols, granule=gemm.granule,
        )  # fmt: skip

    used = {_read(port) for port in gemm.ports} | {target(sink) for sink in gemm.sinks}
    free = (size for size in (*gemm.extents, *gemm.rows, *gemm.cols) if isinstance(size, str))
    functions = {phase.fn: f"{phase.fn}_sum{count}" for phase in gemm.phases}
    total = replace(
        gemm,
        name=f"{gemm.name}_sum{count}",
        tensors=(*between.values(), *(t for t in gemm.tensors if t.name in used)),
        products=(),
        phases=tuple(replace(phase, fn=functions[phase.fn]) for phase in gemm.phases),
        ports=(*(spec.Tile(name, matrix[name]) for name in between), *gemm.ports),
        extents=tuple(dict.fromkeys(free)),
    )
    temps = tuple(spec.Argument(name, "f32", (*rows, *cols)) for name in between)
    made = ((plain, gemm.phases[0].fn, 0), *((new, old, gemm.segments) for old, new in functions.items()))
    return tuple(map(part, range(count))), total, temps, made


def _along(gemm: spec.Gemm) -> dict[str, int] | None:
    """The mode of each operand that is contracted; None where parts cannot be cut there: K of several modes, pairs of elements, a tensor
    that is contracted along one mode here and has it, or another, as rows there."""
    found: dict[str, int] = {}
    rows: set[tuple[str, int]] = set()
    for matrix in (m for p in gemm.products for m in (p.a, *p.b)):
        if len(matrix.cols) != 1 or matrix.pack > 1 or found.setdefault(matrix.tensor, matrix.cols[0]) != matrix.cols[0]:
            return None
        rows |= {(matrix.tensor, mode) for mode in matrix.rows}
    return None if not found or rows & set(found.items()) else found


def _read(port: spec.Port) -> str:
    """The tensor of a port, "" where it reads none."""
    return port.matrix.tensor if isinstance(port, spec.Tile) else port.tensor if isinstance(port, spec.Load) else ""


# --- scalar functions ----------------------------------------------------------------------------------------------------


def functions(made: Split, known: Functions) -> dict[str, Callable[..., tuple]] | None:
    """The scalar functions of a split; None where one that it is made from is not straight-line."""
    found = {}
    for name, old, segments in made.functions:
        like = known[old]
        fn = _summed(name, like, segments, made.count) if segments else _as_they_are(name, int(name.rpartition("_")[2]), like)
        if fn is None:
            return None
        found[name] = fn
    return found


def _as_they_are(name: str, segments: int, like: slices.Scalar) -> slices.Scalar:
    values = [f"a{i}" for i in range(segments)]
    return slices.define(f"def {name}({', '.join(['f', *values])}):\n    return ({', '.join(values)},)\n", name, like)


def _summed(name: str, function: slices.Scalar, segments: int, count: int) -> slices.Scalar | None:
    """A function that takes the parts of each accumulator where `function` takes accumulators, and adds them in order."""
    text = slices.straight(function)
    if text is None:
        return None
    taken = {*text.arguments, text.library} | {n.id for line in text.lines for n in ast.walk(line) if isinstance(n, ast.Name)}
    lines, given = [], []
    for accumulator in text.arguments[:segments]:
        stem = f"{accumulator}_part"
        while any(t.startswith(stem) for t in taken):
            stem += "_"
        parts = [f"{stem}{i}" for i in range(count)]
        given += parts
        lines += ast.parse(f"{accumulator} = {' + '.join(parts)}").body
    changed = replace(text, lines=(*lines, *text.lines))  # type: ignore[arg-type]
    return slices.written(changed, [*given, *text.arguments[segments:]], text.results, name, function)


# --- programs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Applied:
    """A program with some launches split: its functions beside those known, and what kernels are variants of (`configs.whole_of`)."""

    program: spec.Program
    functions: Functions = field(default_factory=dict)
    wholes: configs.Wholes = field(default_factory=dict)
    splits: tuple[Split, ...] = ()

    def serving(self, objects: Any) -> Any:
        """Executables (`host.Objects`) for the program."""
        return objects.extended(self) if self.splits else objects


def applied(program: spec.Program, known: Functions, count: Callable[[spec.Launch], int], wholes: configs.Wholes) -> Applied:
    """The program with each launch in as many parts as `count` says (0: as it is), where that can be."""
    looping = {name for loop in program.loops for name in loop.kernels}
    kernels: list[spec.Kernel] = []
    more: dict[str, Callable[..., tuple]] = {}
    whole: dict[tuple[spec.Product, ...] | str, spec.Launch] = {}
    splits = []
    for kernel in program.kernels:
        parts = 0 if isinstance(kernel, spec.Finish) or kernel.name in looping else count(kernel)
        made = split(kernel, parts) if parts and not isinstance(kernel, spec.Finish) else None
        made_functions = functions(made, known) if made else None
        if made is None or made_functions is None:
            kernels.append(kernel)
            continue
        kernels += made.kernels
        more |= made_functions
        splits.append(made)
        like = configs.whole_of(made.of, wholes)
        if like is not None and (model := split(like, parts)) is not None:
            places = {gemm.products: i for i, gemm in enumerate(spec.gemms(like))}
            whole |= {s.name: model.sums[places[g.products]] for g, s in zip(spec.gemms(made.of), made.sums) if g.products in places}
    if not splits:
        return Applied(program)
    temps = (*program.temps, *(temp for made in splits for temp in made.temps))
    return Applied(replace(program, kernels=tuple(kernels), temps=temps), more, whole, tuple(splits))


def scheduled(program: spec.Program, extents: Extents, device: Any, objects: Any, known: Functions | None = None) -> Applied:
    """The program as executables want it run at these extents: `objects.parts` says each launch's schedule; without it, as planned.

    `known` are the scalar functions, those of `objects` without it.
    """
    parts = getattr(objects, "parts", None)
    if parts is None:
        return Applied(program)
    functions = objects.functions if known is None else known
    return applied(program, functions, lambda launch: parts(launch, extents, device) if computes(launch, extents) else 0, objects.wholes)


def computes(launch: spec.Launch, extents: Extents) -> bool:
    """Is there a product with rows and columns in every Gemm?"""
    return all(g.products and spec.product(g.rows, extents) * spec.product(g.cols, extents) for g in spec.gemms(launch))


@dataclass
class Ahead:
    """What a build ahead of time has besides: programs of nothing but the kernels of splits, their functions, a few configurations of each
    kernel, and the parts that each launch can be in."""

    programs: list[spec.Program] = field(default_factory=list)
    functions: dict[str, Callable[..., tuple]] = field(default_factory=dict)
    configs: dict[str, tuple[spec.Config, ...]] = field(default_factory=dict)
    parts: dict[str, list[int]] = field(default_factory=dict)


def ahead(programs: Iterable[tuple[spec.Program, configs.Wholes]], known: Functions, counts: Iterable[int]) -> Ahead:
    """The launches of programs, and their Gemms alone, in each of `counts` parts where that can be."""
    more = Ahead()
    for (program, wholes), count in itertools.product(programs, sorted(set(counts))):
        made = applied(replace(program, kernels=spec.built(program)), known, lambda launch, count=count: count, wholes)  # type: ignore[misc]
        kernels = tuple(dict.fromkeys(kernel for each in made.splits for kernel in each.kernels))
        more.programs.append(replace(made.program, kernels=kernels))
        more.functions.update(made.functions)
        for each in made.splits:
            more.parts.setdefault(each.of.name, []).append(count)
            more.configs.update({kernel.name: _portfolio(kernel, count, made.wholes) for kernel in each.kernels})
    return more


def _portfolio(launch: spec.Launch, count: int, wholes: configs.Wholes) -> tuple[spec.Config, ...]:
    """A few configurations for the few rows that splits are for."""
    whole = configs.whole_of(launch, wholes)
    sizes = [(m, n) for m in (16, 64, 256) for n in (2048, 4096)]
    return tuple(dict.fromkeys(configs.default(launch, m, n, 8192 // count, whole=whole) for m, n in sizes))


# --- choosing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """What a launch is expected to take in so many parts (0: as planned), in microseconds, and the tiles of each kernel."""

    parts: int
    microseconds: float
    tiles: tuple[tuple[str, str], ...]


def name_of(parts: int) -> str:
    """What a schedule is called."""
    return "as planned" if parts == PLANNED else "unfused" if parts == 1 else f"K in {parts}"


def wanted() -> bool:
    """Does the user want the schedule of each launch to be chosen by the model when a new shape is met (CODA_SCHEDULES=1)?"""
    return os.environ.get("CODA_SCHEDULES") == "1"


def counts(launch: spec.Launch, extents: Extents) -> tuple[int, ...]:
    """The parts that a launch can be in at these extents, with something to multiply in each; none where it computes nothing."""
    if not computes(launch, extents):
        return ()
    shallow = min(k for *_, k in configs.problems(launch, extents))
    found = range(1, min(MOST // len(spec.gemms(launch)), -(-shallow // configs.TILE_K)) + 1)
    return tuple(n for n in found if split(launch, n) is not None)


def estimates(launch: spec.Launch, extents: Extents, sms: int = 132, among: tuple[int, ...] | None = None) -> tuple[Estimate, ...]:
    """Each schedule of a launch, the planned one first; `among` are the parts to look at, all that can be without it."""
    config = configs.choose(launch, extents, sms)
    found = [Estimate(PLANNED, _time(launch, config, extents, sms), ((launch.name, config.key),))]
    for parts in counts(launch, extents):
        made = split(launch, parts) if among is None or parts in among else None
        if made is not None:
            found.append(_estimate(made, extents, sms))
    return tuple(found)


def best(found: tuple[Estimate, ...]) -> Estimate:
    """The schedule to take: the planned one, unless another is clearly faster."""
    planned, fastest = found[0], min(found, key=lambda e: e.microseconds)
    return fastest if fastest.microseconds < GAIN * planned.microseconds else planned


def _estimate(made: Split, extents: Extents, sms: int) -> Estimate:
    chosen = {k.name: configs.choose(k, extents, sms) for k in made.kernels}
    between = {temp.name: 4 * spec.product(temp.axes, extents) for temp in made.temps}
    kept = sum(between.values())
    rate = CACHE if kept <= HELD else MEMORY
    time = _time(made.parts, chosen[made.parts.name], extents, sms) + kept / rate
    time += sum(_sum_time(total, chosen[total.name], set(between), rate, extents, sms) for total in made.sums)
    return Estimate(made.count, time, tuple((name, config.key) for name, config in chosen.items()))


def _time(launch: spec.Launch, config: spec.Config, extents: Extents, sms: int) -> float:
    """A launch that multiplies: its busiest block, or memory, as one waits for the other; or what the card's power allows."""
    problems, gemms = configs.problems(launch, extents), spec.gemms(launch)
    used = max(sms // (config.cluster_m * config.cluster_n), 1)
    steps, starts, read, moved = [], [0], 0.0, 0.0
    for gemm, (m, n, k) in zip(gemms, problems, strict=True):
        width = configs.columns_per_segment(gemm, config)
        starts.append(starts[-1] + -(-m // (config.tile_m * config.cluster_m)) * -(-n // (width * config.cluster_n)))
        least = BLOCK_FEW if m <= configs.FEW_ROWS and config.tile_m == configs.MMA_ROWS else BLOCK
        steps.append(-(-k // configs.TILE_K) * max(least, configs.multiply_cycles(config) / CLOCK))
        read += 2 * k * (m + n * gemm.segments)
        moved += m * n * sum(configs.element_bytes(gemm, matrix) for matrix in _tiles(gemm))

    def busy(block: int) -> float:
        counts = (-(-max(end - block, 0) // used) - -(-max(start - block, 0) // used) for start, end in zip(starts, starts[1:]))
        return sum(count * step for count, step in zip(counts, steps))

    longest = max(busy(block) for block in {start % used for start in starts[:-1]})
    few = FIRST + (longest**4 + (read / COLD + moved / MEMORY) ** 4) ** 0.25
    return max(few, configs.cycles(launch, config, problems, sms) / LIMITED)


def _sum_time(gemm: spec.Gemm, config: spec.Config, parts: set[str], rate: float, extents: Extents, sms: int) -> float:
    """A map kernel that adds `parts`: what memory delivers to all of its blocks, or the L2 cache to each."""
    m, n, _ = configs.problem(gemm, extents)
    between = sum(4 for p in gemm.ports if isinstance(p, spec.Tile) and p.matrix.tensor in parts)
    moved = sum(configs.element_bytes(gemm, matrix) for matrix in _tiles(gemm)) - between
    tiles = -(-m // config.tile_m) * -(-n // configs.columns_per_segment(gemm, config))
    each = -(-tiles // sms) * config.tile_m * config.tile_n * (moved + between) / SHARE
    return SUM + max(m * n * (moved / MEMORY + between / rate), each)


def _tiles(gemm: spec.Gemm) -> list[spec.Matrix]:
    """What an epilogue loads and stores by tiles."""
    return [p.matrix for p in gemm.ports if isinstance(p, spec.Tile)] + [s.matrix for s in gemm.sinks if isinstance(s, spec.Store)]
