"""Which tile a cluster computes next: a static, persistent order that keeps operands in the L2 cache.

In: the tile counts and the cluster. Out: for each step of a cluster the (row, column) of this block's tile. Clusters of tiles are visited
in groups of eight along the shorter side; inside a group one column of eight after the other, and every second group runs backwards,
so that its first tiles find the operands the last ones used. Non-goals: balancing work of unequal size.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .ring import select

GROUP = 8


def ceil_div(a, b):
    return (a + (b - 1)) // b


@dataclass(frozen=True)
class Shape:
    """Static: the tile in rows and columns per segment, the cluster in tiles."""

    rows: int
    cols: int
    cluster: tuple[int, int]

    def clusters(self, m, n):
        """Rows and columns of clusters that cover (m, n)."""
        return ceil_div(m, self.rows * self.cluster[0]), ceil_div(n, self.cols * self.cluster[1])

    def grid(self, m, n, multiprocessors: int):
        """The launch grid: one block per multiprocessor, or fewer where there is less to do."""
        rows, cols = self.clusters(m, n)
        size = self.cluster[0] * self.cluster[1]
        return (self.cluster[0], self.cluster[1], cutlass.min(rows * cols, Int32(multiprocessors // size)))


@cute.jit
def tile_at(work: Int32, rows: Int32, cols: Int32, cluster: cutlass.Constexpr):
    """(tile row, tile column) of this block in the `work`-th cluster of tiles, of `rows` × `cols`."""
    by_rows = rows <= cols
    short = select(by_rows, rows, cols)
    long = select(by_rows, cols, rows)
    group = work // (long * GROUP)
    inside = work - group * (long * GROUP)
    width = cutlass.min(short - group * GROUP, Int32(GROUP))
    far = inside // width
    near = group * GROUP + (inside - far * width)
    far = select(group % 2 == 1, long - 1 - far, far)
    row = select(by_rows, near, far)
    col = select(by_rows, far, near)
    x, y, _ = cute.arch.block_idx()
    return row * cluster[0] + x, col * cluster[1] + y
