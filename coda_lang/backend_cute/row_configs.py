"""Configurations of row kernels: map kernels with a statistic over whole rows, whose blocks own rows and walk their columns in chunks.

In: the records of `spec`. Out: which kernels these are, `Config`s for them, how many threads share a row, what fits in shared memory.
Pure arithmetic. Non-goals: tiles (`configs`, which asks here where a kernel is one of rows).

A `Config` means: `tile_m` rows to a block, `tile_n` columns to a chunk, so `tile_n / VECTOR` threads share a row and the block's others
have rows of their own; `step` chunks of column reductions are kept at a time (0 where there are none): with more columns than those, rows
are walked again for each panel of `step` chunks.
"""

from __future__ import annotations

import math

from .spec import ColReduce, Config, Gemm, Launch, planes

THREADS, VECTOR = 256, 8  # of a block; columns of a thread in a chunk
MOST_KEPT = 160 * 1024  # bytes of column reductions in a block
EASY_KEPT = 64 * 1024  # that leave room for three blocks on a multiprocessor
CHUNKS = (256, 64, 1024, 2048)
KEPT = ((2048, 2), (2048, 4), (1024, 2), (256, 4), (256, 1), (64, 1), (2048, 1))  # chunk and step where columns are reduced
RESIDENT = 3
HEIGHT = 24  # rows of a block that does: each block leaves a part; a quarter or half of that where there are few


def of_rows(launch: Launch) -> bool:
    """Is it a row kernel?"""
    return isinstance(launch, Gemm) and any(group.size == 0 for phase in launch.phases for group in phase.groups)


def sharing(config: Config) -> int:
    """Threads that share a row."""
    return config.tile_n // VECTOR


def together(config: Config) -> int:
    """Rows that a block computes at a time."""
    return THREADS // sharing(config)


def numbers(gemm: Gemm) -> int:
    """f32 numbers that a column's reductions need."""
    return sum((*planes(s.kind), 1)[0] for s in gemm.sinks if isinstance(s, ColReduce))


def kept_bytes(gemm: Gemm, config: Config) -> int:
    """Shared memory for column reductions."""
    return numbers(gemm) * config.step * THREADS * VECTOR * 4


def resident(gemm: Gemm, config: Config) -> int:
    """Blocks of a multiprocessor that hold their column reductions at once, up to what keeps enough loads in flight. With narrow chunks
    there are more walks in code, which need more registers."""
    most = RESIDENT if config.tile_n >= 1024 else RESIDENT - 1
    return max(min(most, 3 * EASY_KEPT // max(kept_bytes(gemm, config), 1)), 1)


def panel(config: Config) -> int:
    """Columns to a panel; 0 for all there are."""
    return config.step * config.tile_n


def offered(gemm: Gemm) -> tuple[Config, ...]:
    """Every configuration, those for middling shapes first."""
    if not numbers(gemm):
        return tuple(Config(THREADS * VECTOR // chunk, chunk) for chunk in CHUNKS)
    found = []
    for chunk, step in KEPT:
        at_once = THREADS * VECTOR // chunk
        found += [Config(max(height, at_once), chunk, step=step) for height in (HEIGHT, max(HEIGHT // 3, 2 * at_once))]
    return tuple(c for c in dict.fromkeys(found) if kept_bytes(gemm, c) <= MOST_KEPT)


def cost(gemm: Gemm, config: Config, m: int, n: int, sms: int) -> float:
    """To compare configurations: work of idle threads, of multiprocessors without a block, and of rows walked again. As few threads share
    a row as that allows; blocks that reduce columns are tall, and their columns fit in one panel."""
    blocks = -(-m // config.tile_m)
    idle = -(-n // config.tile_n) * config.tile_n / max(n, 1)  # columns walked for each there is
    short = max(1.8 * sms / max(blocks, 1), 1.0)
    if not config.step:
        return idle * short + abs(math.log2(config.tile_n / 256)) / 256
    panels = max(-(-n // panel(config)), 1)
    crowded = max(kept_bytes(gemm, config) / EASY_KEPT, 1.0)
    return idle * short * panels * crowded + (1 / config.tile_m + config.step / 256 + config.tile_n / (1 << 20)) / 64
