"""Which tile a cluster computes next: a static, persistent order that keeps operands in the L2 cache.

In: the tile counts of each problem of a launch and the cluster. Out: for each step of a cluster the (row, column) of this block's tile.
Problems follow each other. Inside one, clusters of tiles are visited in groups along the shorter side; inside a group one column of the
group after the other, and every second group runs backwards, so that its first tiles find the operands the last ones used. A group is so
wide that the tiles computed at one time read about as much of A as of B. Non-goals: balancing work of unequal size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, sqrt

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .ring import Fixed, select


def ceil_div(a, b):
    return (a + (b - 1)) // b


@dataclass(frozen=True)
class Shape:
    """Static: the tile in rows, in columns per segment and of all segments; the cluster in tiles; blocks that run at a time."""

    rows: int
    cols: int
    width: int
    cluster: tuple[int, int]
    multiprocessors: int

    @property
    def groups(self) -> tuple[int, int]:
        """Clusters in a group along rows and along columns: the power of two nearest to a square of what runs at a time."""
        side = sqrt(self.multiprocessors * self.rows * self.width)
        sides = self.rows * self.cluster[0], self.width * self.cluster[1]
        rows, cols = (2 ** max(round(log2(side / one)), 0) for one in sides)
        return rows, cols

    def clusters(self, m, n):
        """Rows and columns of clusters that cover (m, n)."""
        return ceil_div(m, self.rows * self.cluster[0]), ceil_div(n, self.cols * self.cluster[1])


def grid(shapes: Sequence[Shape], sizes, blocks):
    """The launch grid: one block per multiprocessor, or fewer where there is less to do.

    Where all tiles multiply equally long, as few as finish in as many rounds: more would idle in the last one, and where the card's power
    is the limit the others run slower for them. `sizes` begin with m and n, `blocks` are the k-blocks of a tile, of each problem.
    """
    clusters, equal = Int32(0), blocks[0] > 0
    for shape, (m, n, *_), depth in zip(shapes, sizes, blocks):
        rows, cols = shape.clusters(m, n)
        clusters, equal = clusters + rows * cols, equal & (depth == blocks[0])
    x, y = shapes[0].cluster
    most = Int32(shapes[0].multiprocessors // (x * y))
    rounds = cutlass.max(ceil_div(clusters, most), Int32(1))
    return x, y, select(equal, ceil_div(clusters, rounds), cutlass.min(clusters, most))


@dataclass(frozen=True)
class Share(Fixed):
    """The tiles of one problem that are this block's: steps `first`, `first + step`, … below `end`.

    `before`: k-blocks that this block's loading warp has brought before the first of them.
    """

    shape: Shape
    rows: Int32
    cols: Int32
    start: Int32
    first: Int32
    end: Int32
    step: Int32
    before: Int32

    def tile(self, work: Int32):
        """(tile row, tile column) of a step."""
        return tile_at(work - self.start, self.rows, self.cols, self.shape)


def shares(shapes: Sequence[Shape], sizes, blocks, turn: Int32 | None = None) -> list[Share]:
    """This block's share of each problem, one after the other; of two warpgroups that alternate the share of the one whose `turn` it is.

    `sizes` begin with m and n, `blocks` are the k-blocks of a tile, of each problem.
    """
    _, _, first = cute.arch.block_idx()
    _, _, step = cute.arch.grid_dim()
    start, passed, before, made = Int32(0), Int32(0), Int32(0), []
    for i, (shape, (m, n, *_), depth) in enumerate(zip(shapes, sizes, blocks)):
        rows, cols = shape.clusters(m, n)
        end = start + rows * cols
        if turn is None:
            made.append(Share(shape, rows, cols, start, first, end, step, before))
        else:  # the block's tiles go to the two in turn, whichever problems they are of
            other = (passed + turn) & 1
            made.append(Share(shape, rows, cols, start, first + other * step, end, step * 2, before + other * depth))
        if i + 1 < len(shapes):
            count = ceil_div(cutlass.max(end - first, Int32(0)), step)
            first, passed, before, start = first + count * step, passed + count, before + count * depth, end
    return made


@cute.jit
def tile_at(work: Int32, rows: Int32, cols: Int32, shape: cutlass.Constexpr):
    """(tile row, tile column) of this block in the `work`-th cluster of tiles, of `rows` × `cols`."""
    by_rows = rows <= cols
    most = select(by_rows, *(Int32(size) for size in shape.groups))
    short = select(by_rows, rows, cols)
    long = select(by_rows, cols, rows)
    group = work // (long * most)
    inside = work - group * (long * most)
    width = cutlass.min(short - group * most, most)
    far = inside // width
    near = group * most + (inside - far * width)
    far = select(group % 2 == 1, long - 1 - far, far)
    row = select(by_rows, near, far)
    col = select(by_rows, far, near)
    x, y, _ = cute.arch.block_idx()
    return row * shape.cluster[0] + x, col * shape.cluster[1] + y
