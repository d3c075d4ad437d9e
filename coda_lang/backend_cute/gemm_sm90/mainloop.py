"""The fixed mainloop: acc += A @ Bᵀ over K-segments, B in blocks of one N-segment each.

In: TMA atoms and coordinate tensors of the operands, a tile position. Out: the accumulator registers. One warp loads (`Loader`), one or
two warpgroups multiply (`Multiplier`); they share only a `Ring`. The B tile in shared memory is `segments` blocks of `nb` rows, each
loaded from its own view: to the tensor cores it is one operand of `tile_n` rows, so accumulator columns j, j + nb, … of the segments
lie in one thread, whatever the weights look like in memory.
Non-goals: which tile (scheduler), what becomes of the sums (epilogue).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..configs import FEW_ROWS, MMA_ROWS, TILE_K, columns_per_segment, warpgroup_rows
from ..spec import Config, Gemm
from . import views
from .ring import Cursor, Fixed, Ring

_KINDS = warpgroup.SmemLayoutAtomKind
_MN_KINDS = ((64, _KINDS.MN_SW128), (32, _KINDS.MN_SW64), (16, _KINDS.MN_SW32), (8, _KINDS.MN_INTER))


@dataclass(frozen=True)
class Operand:
    """How A or B of one K-segment lies in shared memory: `rows` × 64, in `blocks` loaded one by one."""

    rows: int
    blocks: int
    k_major: bool
    dtype: type

    @property
    def block_rows(self) -> int:
        return self.rows // self.blocks

    def layout(self, rows: int, stages: int | None = None):
        """Swizzled layout of `rows` of the operand; that of one block is the same as that of the whole, cut."""
        if self.k_major:
            kind = _KINDS.K_SW128
        else:
            kind = next(kind for size, kind in _MN_KINDS if self.block_rows % size == 0)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        order = (0, 1) if self.k_major else (1, 0)
        if stages is None:
            return cute.tile_to_shape(atom, (rows, TILE_K), order=order)
        return cute.tile_to_shape(atom, (rows, TILE_K, stages), order=(*order, 2))


class Mainloop:
    """The static facts of one kernel's mainloop. Holds no device values, so host and kernel code share it."""

    def __init__(self, gemm: Gemm, config: Config, stages: int):
        self.gemm, self.config, self.stages = gemm, config, stages
        self.nb = columns_per_segment(gemm, config)
        self.rows = warpgroup_rows(config)
        self.atoms = self.rows // MMA_ROWS
        records = {t.name: t for t in gemm.tensors}
        self.products: list[tuple[Operand, Operand]] = []
        for product in gemm.products:
            record = records[product.a.tensor]
            dtype = views.DTYPES[record.dtype]
            contiguous = views.columns_contiguous(record, product.a)
            few = contiguous and config.tile_m == MMA_ROWS and config.cluster_n == 1
            a = Operand(config.tile_m, MMA_ROWS // FEW_ROWS if few else 1, contiguous, dtype)
            majors = {views.columns_contiguous(records[b.tensor], b) for b in product.b}
            dtypes = {records[b.tensor].dtype for b in product.b} | {record.dtype}
            if len(majors) != 1 or len(dtypes) != 1 or dtype.width != 16 or len(product.b) != gemm.segments:
                raise ValueError(f"{gemm.name}: the operands of a product must agree in dtype (bf16 or f16), B also in its major order")
            self.products.append((a, Operand(config.tile_n, gemm.segments, majors.pop(), dtype)))

    @property
    def stage_bytes(self) -> int:
        return (self.config.tile_m + self.config.tile_n) * TILE_K * 2

    def atoms_for(self, tensors: dict[str, cute.Tensor]):
        """Host: (views, loads). loads[p] = ((atom, coords) of blocks of A, then of each segment of B)."""
        config, loads, shapes = self.config, [], []
        for product, (a, b) in zip(self.gemm.products, self.products):
            view = views.matrix_view(tensors[product.a.tensor], product.a)
            rows = [views.load_atom(view, a.layout(a.block_rows), (a.block_rows, TILE_K), config.cluster_n, product.a.tensor)]
            shapes.append(view)
            for matrix in product.b:
                view = views.matrix_view(tensors[matrix.tensor], matrix)
                rows.append(views.load_atom(view, b.layout(b.block_rows), (b.block_rows, TILE_K), config.cluster_m, matrix.tensor))
            shapes.append(view)
            loads.append(tuple(rows))
        return shapes, tuple(loads)

    def tiled_mma(self, product: int):
        a, b = self.products[product]
        majors = [OperandMajorMode.K if o.k_major else OperandMajorMode.MN for o in (a, b)]
        op = warpgroup.MmaF16BF16Op(a.dtype, Float32, (MMA_ROWS, self.config.tile_n, 16), warpgroup.OperandSource.SMEM, *majors)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))

    def smem(self, a_pointer, b_pointer, product: int):
        """The stages of A and B as this product sees them."""
        a, b = self.products[product]
        return (
            views.swizzled(a_pointer, a.layout(a.rows, self.stages), a.dtype),
            views.swizzled(b_pointer, b.layout(b.rows, self.stages), b.dtype),
        )

    def blocks(self, k):
        """Device: k-blocks of one K-segment of depth `k`."""
        return (k + (TILE_K - 1)) // TILE_K


class Loader(Fixed):
    """The producer: copies the operands of a tile, k-block by k-block, into the ring."""

    def __init__(self, mainloop: Mainloop, ring: Ring, loads, a_pointer, b_pointer, m: Int32):
        self.mainloop, self.ring, self.m = mainloop, ring, m
        config = mainloop.config
        x, y, _ = cute.arch.block_idx()
        self.a_mask = self.b_mask = None
        # Block (x, y) of a cluster has rank x + y * cluster_m. A is shared along y, B along x.
        if config.cluster_n > 1:
            self.a_mask = cutlass.Int16(sum(1 << (config.cluster_m * j) for j in range(config.cluster_n)) << x)
        if config.cluster_m > 1:
            self.b_mask = cutlass.Int16(((1 << config.cluster_m) - 1) << (y * config.cluster_m))
        self.parts = []
        for p, group in enumerate(loads):
            a, b = mainloop.products[p]
            sa, sb = mainloop.smem(a_pointer, b_pointer, p)
            rows = [self._partition(group[0], self._block(sa, a, i), a.block_rows, y, config.cluster_n) for i in range(a.blocks)]
            cols = [self._partition(group[1 + s], self._block(sb, b, s), b.block_rows, x, config.cluster_m) for s in range(b.blocks)]
            self.parts.append((rows, cols))

    def _block(self, smem, operand: Operand, index: int):
        """The stages of one block of an operand."""
        return cute.local_tile(smem, (operand.block_rows, TILE_K, self.mainloop.stages), (index, 0, 0))

    @staticmethod
    def _partition(load, smem, rows: int, share, peers: int):
        atom, coords = load
        tiles = cute.local_tile(coords, (rows, TILE_K), (None, None))
        to, source = cpasync.tma_partition(
            atom, share, cute.make_layout(peers), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return atom, to, source

    @cute.jit
    def tile(self, row: Int32, col: Int32, depths: tuple, cursor: Cursor) -> Cursor:
        """Load all k-blocks of the tile at (row, col)."""
        for p in cutlass.range_constexpr(len(self.parts)):
            within = self.m - row * self.mainloop.config.tile_m
            outside = self.outside(p, within)
            for k in cutlass.range(self.mainloop.blocks(depths[p]), unroll=1):
                self.ring.acquire(cursor, outside)
                self.load_rows(p, row, k, within, cursor)
                self.load_columns(p, col, k, cursor)
                cursor = cursor.next()
        return cursor

    def outside(self, p: int, within: Int32):
        """Bytes of a stage that are not loaded: blocks of A's rows beyond the first `within`."""
        a = self.mainloop.products[p][0]
        if a.blocks == 1:
            return 0
        loaded = (cutlass.min(cutlass.max(within, Int32(0)), a.rows) + (a.block_rows - 1)) // a.block_rows
        return (a.blocks - loaded) * (a.block_rows * TILE_K * 2)

    @cute.jit
    def load_rows(self, p: cutlass.Constexpr, row: Int32, k: Int32, within: Int32, cursor: Cursor):
        rows, blocks = self.mainloop.products[p][0].block_rows, self.mainloop.products[p][0].blocks
        for i in cutlass.range_constexpr(blocks):
            if cutlass.const_expr(blocks == 1):
                self.copy(self.parts[p][0][i], row, k, self.a_mask, cursor)
            else:
                if i * rows < within:
                    self.copy(self.parts[p][0][i], row * blocks + i, k, self.a_mask, cursor)

    def load_columns(self, p: int, col: Int32, k: Int32, cursor: Cursor) -> None:
        for part in self.parts[p][1]:
            self.copy(part, col, k, self.b_mask, cursor)

    def copy(self, part, index, k, mask, cursor: Cursor) -> None:
        atom, to, source = part
        extra = {} if mask is None else {"mcast_mask": mask}
        cute.copy(atom, source[(None, index, k)], to[(None, cursor.stage)], tma_bar_ptr=self.ring.barrier(cursor), **extra)


class Multiplier(Fixed):
    """One warpgroup: multiplies `rows` of the tile that start at row `offset_tiles * rows`."""

    def __init__(self, mainloop: Mainloop, ring: Ring, a_pointer, b_pointer, offset_tiles):
        self.mainloop, self.ring = mainloop, ring
        self.operands = []
        for p in range(len(mainloop.products)):
            sa, sb = mainloop.smem(a_pointer, b_pointer, p)
            sa = cute.local_tile(sa, (mainloop.rows, TILE_K, mainloop.stages), (offset_tiles, 0, 0))
            mma = mainloop.tiled_mma(p)
            thread = mma.get_slice(0)
            self.operands.append((mma.make_fragment_A(thread.partition_A(sa)), mma.make_fragment_B(thread.partition_B(sb))))
        shape = mainloop.tiled_mma(0).partition_shape_C((mainloop.rows, mainloop.config.tile_n))
        self.accumulator = cute.make_rmem_tensor(shape, Float32)

    @cute.jit
    def tile(self, depths: tuple, cursor: Cursor):
        """Issue all products of a tile, leaving the last group in flight; returns (cursor, last stage)."""
        done = Int32(0)
        last = cursor
        for p in cutlass.range_constexpr(len(self.operands)):
            for _ in cutlass.range(self.mainloop.blocks(depths[p]), unroll=1):
                self.ring.wait(cursor)
                self.issue(p, cursor, done > 0)
                # The group before this one has finished reading its stage.
                warpgroup.wait_group(1)
                self.ring.release(last, done > 0)
                last = cursor
                cursor = cursor.next()
                done += 1
        return cursor, last

    def issue(self, p: int, cursor: Cursor, accumulate: Boolean) -> None:
        a, b = self.operands[p]
        warpgroup.fence()
        for kb in range(TILE_K // 16):
            mma = self.mainloop.tiled_mma(p)
            mma.set(warpgroup.Field.ACCUMULATE, accumulate if kb == 0 else True)
            cute.gemm(mma, self.accumulator, a[(None, None, kb, cursor.stage)], b[(None, None, kb, cursor.stage)], self.accumulator)
        warpgroup.commit_group()

    def finish(self, last: Cursor) -> None:
        """Wait for the sums."""
        warpgroup.wait_group(0)
        self.ring.release(last)
