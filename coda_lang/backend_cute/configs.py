"""Which tile configurations a `Gemm` is offered, or several `Together`, which is the default for a shape, what each costs in shared memory.

In: the records of `spec`. Out: `Config`s, a `Budget` (pipeline depths, sub-tile width, bytes), the shapes of workspaces.
Pure arithmetic: needs neither torch nor cutlass, so host, tuner, compiler and device code share one statement of it.
Non-goals: measuring (a tuner's job) and knowing how a tile is computed (`gemm_sm90`).

Vocabulary: a *warpgroup* owns `warpgroup_rows` consecutive rows of the tile, 64 rows to an MMA atom; the epilogue walks *steps* of
64 rows x `step_n` columns of every segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Any

from . import row_configs
from .spec import (
    PLANES,
    ColReduce,
    Config,
    Gemm,
    Launch,
    Load,
    Matrix,
    Product,
    Program,
    RowReduce,
    Sink,
    Store,
    Tile,
    Together,
    built,
    gemms,
    launches,
    mode_shape,
    planes,
    product,
)

MULTIPROCESSORS = 132  # of an H100 SXM or H200; other cards of the architecture have 78 to 132, a part of one fewer
TILE_K = 64
MMA_ROWS = 64
FEW_ROWS = 16  # tiles of 64 rows load so many at a time, and none beyond the matrix: TMA takes its time to fill in zeros
WARPGROUPS = 2  # that multiply; one more loads
SMEM_BYTES = 227 * 1024  # what one block may use on sm_90
SMEM_RESERVED = 2048  # barriers, and the padding that aligns the buffers
MIN_AB_STAGES = 3
ENOUGH_AB_STAGES, MAX_AB_STAGES, MAX_STORE_STAGES, MAX_TILE_STAGES = 8, 12, 4, 4
AHEAD = 3000  # cycles that loads are wanted ahead of the products: what comes from the L2 cache under load takes about as long
L2_BYTES = 69  # a cycle, to one multiprocessor with all of them reading
MISS_BYTES = 50  # a cycle, to one multiprocessor, of what the L2 cache does not have: added to the time of what it has
MEMORY_BYTES = 2700  # a cycle, to all of them
SHARED_ENERGY = 0.0005  # of a byte that the tensor cores read of shared memory; a cycle of theirs is 1
LATE_LOSS = 0.3  # of the time of the products, at the very most, where fewer stages are ahead
START_CYCLES = 8000  # until the first operands are there, and after the last products

Problem = tuple[int, int, int]  # rows, columns a segment, depth
Wholes = Mapping[tuple[Product, ...] | str, Launch]  # what kernels are variants of, by their products, of map kernels by their name

BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8, "bool": 1}

_PINGPONG_TILES = ((128, 128), (128, 160), (128, 192), (128, 208), (192, 128), (64, 128), (64, 192), (64, 256))
_COOPERATIVE_TILES = ((256, 128), (256, 160), (256, 192), (256, 208), (128, 192), (128, 224), (128, 256))
_CLUSTERS = ((1, 1), (2, 1), (1, 2))
_NARROW = tuple(Config(64, n, True, m) for n in (64, 32) for m in (1, 2))  # few rows: every multiprocessor brings a share of the weights


@dataclass(frozen=True)
class Budget:
    """Pipeline depths and shared-memory bytes of one configuration. Stages of stores and tiles are per warpgroup."""

    step_n: int
    ab_stages: int
    store_stages: int
    tile_stages: int
    smem_bytes: int


def columns_per_segment(gemm: Gemm, config: Config) -> int:
    """Columns of one N-segment in a tile."""
    return config.tile_n // gemm.segments


def warpgroup_rows(config: Config) -> int:
    """Consecutive rows of a tile that one warpgroup computes: all of them in ping-pong, half of them when two cooperate."""
    return config.tile_m if config.pingpong else config.tile_m // WARPGROUPS


def accumulators(config: Config) -> int:
    """f32 accumulator registers of a thread."""
    return warpgroup_rows(config) * config.tile_n // 128


def multiply_cycles(config: Config) -> int:
    """Cycles that the tensor cores need for one k-block of a tile at full rate."""
    return config.tile_m * config.tile_n // 32


def max_accumulators(gemm: Gemm) -> int:
    """f32 registers a thread can give to the accumulator and still run this epilogue without spilling (tests/test_cubins.py holds it)."""
    stores = [s for s in gemm.sinks if isinstance(s, Store)]
    if not gemm.products and _crowded(gemm, len(gemm.sinks) > len(stores)):
        return 64
    if len(gemm.phases) > 1:
        return 160 if len(stores) <= 1 else 64
    if len(gemm.sinks) > len(stores):
        return 160 if len(gemm.sinks) - len(stores) <= 2 else 128
    vectors = [p for p in gemm.ports if isinstance(p, Load) and p.index]
    most = 176 if any(s.matrix.pack > 1 for s in stores) else 192 if any(isinstance(p, Tile) for p in gemm.ports) else 208
    return max(min(most, 208 - 24 * (len(vectors) - 1)), 128)


def _crowded(gemm: Gemm, reduces: bool) -> bool:
    """Does a map kernel keep more in registers than a second atom of rows or wide steps leave room for: matrices read element by element;
    or, with more to reduce besides, tiles that are read before and after a statistic, or several vectors along columns?"""
    sides = [{i.of for i in p.index} for p in gemm.ports if isinstance(p, Load)]
    twice = len(gemm.phases) > 1 and sum(isinstance(p, Tile) for p in gemm.ports) > 1
    return sum({"row", "col"} <= s for s in sides) > 8 or (reduces and (twice or sum("col" in s for s in sides) > 2))


def element_bytes(gemm: Gemm, matrix: Matrix) -> int:
    """Bytes of one element of a matrix as it travels: a packed pair of 16-bit values is one 32-bit element."""
    dtype = next(t.dtype for t in gemm.tensors if t.name == matrix.tensor)
    return BYTES[dtype] * matrix.pack


def tile_stores(gemm: Gemm) -> list[Store]:
    """The stores that go through shared memory and TMA: all but windows that start where no step can. Those are written by elements."""
    return [s for s in gemm.sinks if isinstance(s, Store) and (s.window is None or s.window.start % 8 == 0)]


def step_columns(gemm: Gemm, config: Config) -> int:
    """Columns of each segment in one epilogue step: a power of two that divides what a tile and a split axis allow.

    At most 32, and 16 where the accumulators leave few registers to an epilogue that reduces or reads tiles.
    """
    if config.step:
        return config.step
    matrices = [s.matrix for s in tile_stores(gemm)] + [p.matrix for p in gemm.ports if isinstance(p, Tile)]
    split = any(len(m.cols) > 1 for m in matrices)
    heavy = any(not isinstance(s, Store) for s in gemm.sinks) or any(isinstance(p, Tile) for p in gemm.ports)
    many = sum(2 if s.kind == "moments" else 1 for s in gemm.sinks if isinstance(s, (RowReduce, ColReduce))) > 3
    widest = 16 if heavy and accumulators(config) > (127 if many else 128) else 32
    starts = [s.window.start for s in tile_stores(gemm) if s.window]
    return gcd(widest, columns_per_segment(gemm, config), *starts, gemm.granule if split else 0)


def budget(launch: Launch, config: Config) -> Budget | None:
    """How shared memory is divided, or None where fewer than three mainloop stages would fit.

    Wanted, most of all first: as many stages of operands as take `AHEAD` cycles to multiply, wide steps, three stages of stores and four
    of tiles. A map kernel has no mainloop: nothing but tiles on their way, and `ab_stages` is 0. Gemms that run together have the same
    steps and stages, and each uses the room for tiles and stores in turn.
    """
    widest, needs = min(step_columns(gemm, config) for gemm in gemms(launch)), _needs(launch)
    steps = [widest >> i for i in range(6) if not config.step and widest % (8 << i) == 0] or [widest]
    enough = min(max(-(-AHEAD // multiply_cycles(config)), MIN_AB_STAGES), ENOUGH_AB_STAGES)
    usual = [step for step in steps if step >= 16] or steps
    for some in (usual, steps):  # narrower than usual only where nothing else fits
        for ab_stages in range(enough, MIN_AB_STAGES - 1, -1):
            for step_n in some:
                for store_stages, tile_stages in ((3, 4), (2, 2)):
                    found = _divided(needs, config, step_n, store_stages, tile_stages, ab_stages)
                    if found is not None:
                        return found
    return None


@dataclass(frozen=True)
class _Needs:
    """Bytes of an element of all stores, of all tiles, and of scratch for a column of a step: of the Gemm that needs most."""

    store: int
    tile: int
    scratch: int
    multiplies: bool


def _needs(launch: Launch) -> _Needs:
    parts = gemms(launch)
    store = max(sum(element_bytes(g, s.matrix) for s in tile_stores(g)) for g in parts)
    tile = max(sum(element_bytes(g, p.matrix) for p in g.ports if isinstance(p, Tile)) for g in parts)
    return _Needs(store, tile, max(scratch_bytes(g, 1) for g in parts), bool(parts[0].products))


def _divided(needs: _Needs, config: Config, step_n: int, store_stages: int, tile_stages: int, ab_stages: int) -> Budget | None:
    """The budget with steps of this width and at least so many stages, None where they do not fit."""
    step_elements = WARPGROUPS * MMA_ROWS * step_n
    store_bytes, tile_bytes = step_elements * needs.store, step_elements * needs.tile
    ab_bytes = (config.tile_m + config.tile_n) * TILE_K * 2 if needs.multiplies else 0
    fixed = SMEM_RESERVED + needs.scratch * step_n
    left = SMEM_BYTES - fixed - store_stages * store_bytes - tile_stages * tile_bytes - ab_stages * ab_bytes
    if left < 0:
        return None

    def more(stages: int, size: int, most: int) -> int:
        """Stages with those that fit into what is left."""
        nonlocal left
        added = min(left // size, most - stages) if size else -stages
        left -= added * size
        return stages + added

    ab_stages = more(ab_stages, ab_bytes, MAX_AB_STAGES)
    tile_stages = more(tile_stages, tile_bytes, MAX_TILE_STAGES)
    store_stages = more(store_stages, store_bytes, MAX_STORE_STAGES)
    return Budget(step_n, ab_stages, store_stages, tile_stages, SMEM_BYTES - left)


def scratch_bytes(gemm: Gemm, step_n: int) -> int:
    """Where the four warps of a warpgroup meet to reduce columns: two buffers of [warp, column] f32 for each quantity."""
    quantities = sum(PLANES.get(s.kind, 1) for s in gemm.sinks if isinstance(s, ColReduce))
    return WARPGROUPS * 2 * quantities * 4 * step_n * 4


def _legal(launch: Launch, config: Config, limit: int) -> Budget | None:
    """The budget, the same in all clusters, of tiles of whole segments, groups and steps in at most `limit` accumulator registers."""
    small = config.tile_n <= 256 and accumulators(config) <= limit
    whole = small and all(config.tile_n % (g.segments * g.granule) == 0 and step_columns(g, config) % 8 == 0 for g in gemms(launch))
    return budget(launch, config) if whole else None


def _shared(gemm: Gemm, config: Config) -> bool:
    """Can the blocks of a cluster share the loads of B's rows? Each loads a part of them, whole runs of a split axis."""
    split = any(len(b.rows) > 1 for product in gemm.products for b in product.b)
    share = max(gemm.granule, 8) if split else 8
    return columns_per_segment(gemm, config) % (share * config.cluster_m) == 0


def offered(launch: Launch) -> tuple[Config, ...]:
    """Every configuration that a launch may be compiled with, best guesses first; empty where the hardware has none.

    A group too wide for the registers that its epilogue leaves is offered what spills a few: slower beats refused. Not so Gemms that
    might as well run apart.
    """
    return row_configs.offered(gemms(launch)[0]) if row_configs.of_rows(launch) else tuple(config for config, _ in budgets(launch))


def fits(launch: Launch) -> bool:
    """Is any configuration offered?"""
    return bool(row_configs.offered(gemms(launch)[0])) if row_configs.of_rows(launch) else any(True for _ in budgets(launch))


def budgets(launch: Launch) -> Iterator[tuple[Config, Budget]]:
    """What is `offered`, with its budget. Not of row kernels, which have none."""
    for limit in (min(map(max_accumulators, gemms(launch))), 160):
        found = None
        for found in _offered(launch, limit):
            yield found
        if found is not None or isinstance(launch, Together):
            return


def _offered(launch: Launch, limit: int) -> Iterator[tuple[Config, Budget]]:
    """What is legal with at most `limit` accumulator registers."""
    unit = lcm(*(gemm.segments * gemm.granule for gemm in gemms(launch)))
    widest = [unit * (most // unit) for most in (256, 208, 128) if most >= unit]
    for pingpong, shapes in ((True, _PINGPONG_TILES), (False, _COOPERATIVE_TILES)):
        fitting = [s for s in shapes if s[1] % unit == 0]
        heights = (128, 64) if pingpong else (256, 128)
        extra = [(m, n) for m in heights for n in widest]
        for tile_m, tile_n in dict.fromkeys(fitting + (extra if len({n for _, n in fitting}) < 3 else [])):
            memory = _legal(launch, Config(tile_m, tile_n, pingpong), limit)
            if memory is None:
                continue
            for cluster_m, cluster_n in _CLUSTERS:
                config = Config(tile_m, tile_n, pingpong, cluster_m, cluster_n)
                if all(_shared(gemm, config) for gemm in gemms(launch)):
                    yield config, memory
    for config in _NARROW if any(gemm.products for gemm in gemms(launch)) else ():
        memory = _legal(launch, config, limit)
        if memory is not None and all(_shared(gemm, config) for gemm in gemms(launch)):
            yield config, memory


def wholes(program: Program | None) -> Wholes:
    """Launches by their products: of the forward that saves, those whose variants with fewer sinks must agree with them."""
    return {g.products: launch for launch in launches(program) for g in gemms(launch) if g.products} if program else {}


def whole_of(launch: Launch, known: Wholes) -> Launch | None:
    """What a launch is a variant of. A variant has all or some of its Gemms, so the first one tells; parts of products are none."""
    first = gemms(launch)[0]
    return None if any(t.part for t in first.tensors) else known.get(first.products or launch.name)


def variants(functions: Iterable[Any]) -> dict[str, Launch | None]:
    """For each launch that these `function.Function`s may have, by name: what it is a variant of, None where of nothing."""
    found: dict[str, Launch | None] = {}
    for fn in functions:
        whole = wholes(fn.saving)
        kernels = [k for program in fn.programs for k in built(program)]
        found |= {k.name: whole_of(k, whole) for k in kernels if isinstance(k, (Gemm, Together))}
    return found


def candidates(launch: Launch, whole: Launch | None = None) -> tuple[Config, ...]:
    """What a launch may be compiled with as a variant of `whole`, the same with more sinks, or with more Gemms.

    Where it reduces, that is what `whole` is offered, with its steps: both then combine in the same order, and give the same bits.
    """
    if whole is None or whole == launch or all(isinstance(s, Store) for gemm in gemms(launch) for s in gemm.sinks):
        return offered(launch)
    return tuple(replace(c, step=found.step_n) for c in offered(whole) if (found := budget(whole, c)) is not None)


def problem(gemm: Gemm, extents: Mapping[str, int]) -> Problem:
    """Rows, columns a segment and depth of a Gemm, each at least 1."""
    shapes = {t.name: mode_shape(t, extents) for t in gemm.tensors if any(t.name == p.a.tensor for p in gemm.products)}
    depth = sum(math.prod(shapes[p.a.tensor][i] for i in p.a.cols) for p in gemm.products)
    return max(product(gemm.rows, extents), 1), max(product(gemm.cols, extents), 1), max(depth, 1)


def problems(launch: Launch, extents: Mapping[str, int]) -> tuple[Problem, ...]:
    """Those of every Gemm of a launch."""
    return tuple(problem(gemm, extents) for gemm in gemms(launch))


def choose(
    launch: Launch, extents: Mapping[str, int], sms: int = MULTIPROCESSORS, among: tuple[str, ...] = (), whole: Launch | None = None
) -> Config:
    """The configuration expected to be fastest at these extents, on `sms` multiprocessors.

    `among` restricts the choice to these keys, those that were built ahead of time; `whole` is the launch that this one is a variant of.
    Raises ValueError where no configuration is offered.
    """
    return _fastest(launch, lambda model: problems(model, extents), sms, among, whole)


def default(
    launch: Launch, m: int, n: int, k: int, sms: int = MULTIPROCESSORS, among: tuple[str, ...] = (), whole: Launch | None = None
) -> Config:
    """The same where every Gemm has `m` rows, `n` columns a segment and depth `k`."""
    return _fastest(launch, lambda model: ((m, n, k),) * len(gemms(model)), sms, among, whole)


def _fastest(
    launch: Launch, sizes: Callable[[Launch], tuple[Problem, ...]], sms: int, among: tuple[str, ...], whole: Launch | None
) -> Config:
    configs = tuple(c for c in candidates(launch, whole) if not among or c.key in among)
    if not configs:
        parts = ", ".join(f"{gemm.segments} segments of {gemm.granule} columns at least" for gemm in gemms(launch))
        raise ValueError(f"no tile configuration fits {launch.name}: {parts}")
    model = whole if whole is not None and configs[0].step else launch
    found = sizes(model)
    return min(configs, key=lambda c: (cycles(model, c, found, sms), configs.index(c)))


def ranked(launch: Launch, problems: Sequence[Problem], sms: int = MULTIPROCESSORS, within: float = math.inf) -> tuple[Config, ...]:
    """What is offered, cheapest first by the model, as far as it costs at most `within` times the cheapest."""
    costs = {c: cycles(launch, c, problems, sms) for c in offered(launch)}
    least = min(costs.values(), default=0.0)
    return tuple(sorted((c for c in costs if costs[c] <= within * least), key=lambda c: costs[c]))


def portfolio(launch: Launch, whole: Launch | None = None, sms: int = MULTIPROCESSORS) -> tuple[Config, ...]:
    """A few configurations that serve small, middle and large shapes: what `default` takes at some of each. For builds ahead of time."""
    if not candidates(launch, whole):
        return ()
    sizes = [(m, n) for m in (64, 512, 2048, 8192) for n in (512, 2048, 8192)]
    return tuple(dict.fromkeys(default(launch, m, n, 4096, sms, whole=whole) for m, n in sizes))


def cycles(launch: Launch, config: Config, problems: Sequence[Problem], sms: int = MULTIPROCESSORS, memory: Budget | None = None) -> float:
    """Estimated time in cycles of a multiprocessor that draws as much power as it would at a middling load.

    A card under a power limit slows its clock until it draws what it may. With power growing as the cube of the clock, the time for
    `busy` cycles in which `energy` is spent goes as busy**(2/3) * energy**(1/3). The constants were fitted to measurements of all
    configurations (docs/decisions/0022). Blocks take tiles in turn, all of one Gemm before the next's.
    Of a row kernel, something to compare by. `memory` is the configuration's budget, where it is known.
    """
    if row_configs.of_rows(launch):
        (gemm,), ((m, n, _),) = gemms(launch), problems
        return row_configs.cost(gemm, config, m, n, sms)
    area, cluster = config.tile_m * config.tile_n, config.cluster_m * config.cluster_n
    found = memory or budget(launch, config)
    late = max(0.0, 1 - found.ab_stages * multiply_cycles(config) / AHEAD) if found is not None and found.ab_stages else 0.0
    multiply = multiply_cycles(config) * (1 + LATE_LOSS * late)
    starts, blocks, mains, epilogues, read, written, energy = [0], [], [], [], 0.0, 0.0, 0.0
    for gemm, (m, n, k) in zip(gemms(launch), problems, strict=True):
        rows, cols = -(-m // (config.tile_m * config.cluster_m)), -(-n // (columns_per_segment(gemm, config) * config.cluster_n))
        tiles, depth = rows * cols * cluster, -(-k // TILE_K) if gemm.products else 0
        few = min(-(-m // FEW_ROWS) * FEW_ROWS, config.tile_m) if config.tile_m == MMA_ROWS and config.cluster_n == 1 else config.tile_m
        bring = TILE_K * 2 * (few / config.cluster_n + config.tile_n / config.cluster_m)  # bytes of a k-block, from the L2 cache
        # Into it come, from memory, all operands, and again in each round what its tiles, side by side, do not share.
        fresh = 2 * k * max(m + n * gemm.segments, 2 * tiles * math.sqrt(area / sms))
        starts.append(starts[-1] + rows * cols)
        blocks.append(depth)
        loads = bring / L2_BYTES + fresh / max(tiles * depth, 1) / MISS_BYTES
        mains.append(depth * max(multiply * (1 + _swizzle_loss(gemm, config)), loads))
        epilogues.append(area * (0.05 + 0.03 * (len(gemm.sinks) + len(gemm.ports) - 1)))
        read, written = read + fresh, written + 2 * m * n * gemm.segments
        energy += tiles * depth * (multiply + 0.01 * bring + SHARED_ENERGY * _operand_bytes(config))
    used = max(sms // cluster, 1)
    if blocks[0] and len(set(blocks)) == 1:  # as `scheduler.grid` has it
        used = -(-starts[-1] // -(-starts[-1] // used))

    def busy(block: int) -> float:
        """A block's time; of ping-pong only the last epilogue shows."""
        counts = [-(-max(end - block, 0) // used) - -(-max(start - block, 0) // used) for start, end in zip(starts, starts[1:])]
        shown = [min(c, 1) if config.pingpong else c for c in counts]
        last = max(c * e for c, e in zip(shown, epilogues)) if config.pingpong else sum(c * e for c, e in zip(shown, epilogues))
        return sum(c * m for c, m in zip(counts, mains)) + last

    longest = START_CYCLES + max(*(busy(block) for block in {start % used for start in starts[:-1]}), read / MEMORY_BYTES)
    energy += 1.5 * longest * min(used, starts[-1]) * cluster + 0.05 * (read + written)
    return longest**0.7 * (energy / sms) ** 0.3


def _operand_bytes(config: Config) -> int:
    """Bytes that the tensor cores read of shared memory for one k-block of a tile: 64 rows of A and all of B for each atom."""
    return config.tile_m // MMA_ROWS * (MMA_ROWS + config.tile_n) * TILE_K * 2


def _swizzle_loss(gemm: Gemm, config: Config) -> float:
    """What the tensor cores lose on B with its columns contiguous, where those of a tile are no multiple of the widest swizzle's 64."""
    records = {t.name: t for t in gemm.tensors}
    contiguous = any(len(records[b.tensor].modes) - 1 in b.rows for product in gemm.products for b in product.b)
    narrow = columns_per_segment(gemm, config)
    return next(loss for size, loss in ((64, 0.0), (32, 0.01), (1, 0.25)) if narrow % size == 0) if contiguous else 0.0


def part_columns(gemm: Gemm, config: Config, n: int) -> int:
    """Columns to a part of a `RowReduce`: those of a tile; of a row kernel those of a panel, or all."""
    if row_configs.of_rows(gemm):
        return row_configs.panel(config) or max(n, 1)
    return columns_per_segment(gemm, config)


def partial_shape(gemm: Gemm, config: Config, sink: Sink, m: int, n: int) -> tuple[int, ...]:
    """Shape of the f32 workspace of a reducing sink at `m` rows and `n` columns a segment."""
    if isinstance(sink, RowReduce):
        parts, length = -(-n // part_columns(gemm, config, n)), m
    elif isinstance(sink, ColReduce):
        parts, length = -(-m // warpgroup_rows(config)), n
    else:
        raise TypeError(f"{type(sink).__name__} has no workspace")
    return (*planes(sink.kind), parts, length)
