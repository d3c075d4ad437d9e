"""What the epilogue reads: vectors, scalars and positions straight from global memory, tiles through shared memory.

In: `Port` records, device tensors, an element's row and column. Out: scalars for the phase functions. Coordinates are clamped into the
tensor, so an element outside the matrix reads something harmless and its results are masked where they would count.
Non-goals: the arithmetic on the values.
"""

from __future__ import annotations

from math import prod

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from ..configs import MMA_ROWS
from ..spec import Index, Load, Matrix, Size, Tensor
from . import views
from .ring import Cursor, Fixed, Ring

_KINDS = warpgroup.SmemLayoutAtomKind
_N_KINDS = ((128, _KINDS.K_SW128), (64, _KINDS.K_SW64), (32, _KINDS.K_SW32), (16, _KINDS.K_INTER))
_M_KINDS = ((128, _KINDS.MN_SW128), (64, _KINDS.MN_SW64), (32, _KINDS.MN_SW32), (16, _KINDS.MN_INTER))


def size_of(sizes: tuple[Size, ...], extents: dict[str, Int32]):
    """Product of sizes: a Python int where all are fixed."""
    fixed = prod(s for s in sizes if isinstance(s, int))
    names = [s for s in sizes if isinstance(s, str)]
    if not names:
        return fixed
    value = Int32(fixed)
    for name in names:
        value = value * extents[name]
    return value


def coordinate(index: Index, row, col, extents: dict[str, Int32]):
    """The coordinate that an `Index` makes of an element's position; positions before the offset count as the offset."""
    if index.of == "fixed":
        return Int32(index.offset)
    at = row if index.of == "row" else col
    if index.offset:
        at = cutlass.max(at - index.offset, Int32(0))
    if index.div and index.div != (1,):
        at = at // size_of(index.div, extents)
    if index.mod:
        at = at % size_of(index.mod, extents)
    return at


def uses(indices: tuple[Index, ...], of: str) -> bool:
    return any(i.of == of for i in indices)


def load(port: Load, tensor: cute.Tensor, row, col, extents: dict[str, Int32]):
    """One element of a vector, scalar or subset-of-axes tensor."""
    coords = []
    for mode, index in enumerate(port.index):
        at = coordinate(index, row, col, extents)
        if index.of == "col":  # a column of another run of a split axis would fall outside
            at = cutlass.min(at, Int32(tensor.shape[mode] - 1))
        coords.append(at)
    return views.to_f32_or_int(views.element(tensor, coords)[0], tensor.element_type)


# --- tiles that travel through shared memory ----------------------------------------------------------------------------


class Panel:
    """How a matrix of the accumulator's geometry lies in shared memory, 64 rows × `step_n` columns a stage, and who owns which element.

    A thread's elements are in the order of its accumulators: column pair fastest, then rows r and r + 8, then blocks of 8 columns.
    """

    def __init__(self, record: Tensor, matrix: Matrix, step_n: int, stages: int):
        dtype = views.DTYPES[record.dtype]
        self.half = dtype if matrix.pack == 2 else None
        self.dtype = Int32 if matrix.pack == 2 else dtype
        self.matrix, self.step_n, self.stages = matrix, step_n, stages
        self.n_major = views.columns_contiguous(record, matrix)

    @property
    def stage_bytes(self) -> int:
        return MMA_ROWS * self.step_n * self.dtype.width // 8

    def layout(self, stages: int | None = None):
        line = (self.step_n if self.n_major else MMA_ROWS) * self.dtype.width // 8
        kind = next(k for size, k in (_N_KINDS if self.n_major else _M_KINDS) if line % size == 0)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        order = (0, 1) if self.n_major else (1, 0)
        if stages is None:
            return cute.tile_to_shape(atom, (MMA_ROWS, self.step_n), order=order)
        return cute.tile_to_shape(atom, (MMA_ROWS, self.step_n, stages), order=(*order, 2))

    def smem(self, pointer) -> cute.Tensor:
        return views.swizzled(pointer, self.layout(self.stages), self.dtype)

    def tiled_mma(self):
        """An MMA of one step's shape: used for the ownership of its accumulators only."""
        op = warpgroup.MmaF16BF16Op(
            cutlass.BFloat16,
            Float32,
            (MMA_ROWS, self.step_n, 16),
            warpgroup.OperandSource.SMEM,
            cute.nvgpu.OperandMajorMode.K,
            cute.nvgpu.OperandMajorMode.K,
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))

    def registers(self, dtype):
        """A fragment of a thread's elements of one step, `step_n // 2` of them."""
        shape = self.tiled_mma().partition_shape_C((MMA_ROWS, self.step_n))
        return cute.make_rmem_tensor(shape, dtype)


class TileReader:
    """One `Tile` port of one warpgroup: copies a step's elements from shared memory to registers."""

    def __init__(self, panel: Panel, pointer, thread: Int32):
        self.panel = panel
        bits = 32 if panel.dtype.width == 16 and panel.n_major else panel.dtype.width
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), panel.dtype, num_bits_per_copy=bits)
        self.copy = cute.make_tiled_copy_C(atom, panel.tiled_mma())
        self.slice = self.copy.get_slice(thread)
        self.source = self.slice.partition_S(panel.smem(pointer))

    def read(self, stage):
        """The thread's elements of a stage, as they are."""
        registers = self.panel.registers(self.panel.dtype)
        cute.copy(self.copy, self.source[(None, None, None, stage)], self.slice.retile(registers))
        return registers

    def value(self, registers, i: int) -> tuple:
        """Element `i` in accumulator order, as scalars for a phase function: one, or the two of a packed pair."""
        if self.panel.half is not None:
            pairs = cute.recast_tensor(registers, self.panel.half)
            return pairs[2 * i].to(Float32), pairs[2 * i + 1].to(Float32)
        return (views.to_f32_or_int(registers[i], self.panel.dtype),)


class TileLoader(Fixed):
    """The producer of all `Tile` ports of one warpgroup."""

    def __init__(self, panels: list[Panel], loads, pointers, ring: Ring, order: list[tuple[int, int]], rows: int, nb: int):
        self.ring, self.order, self.atoms, self.steps = ring, order, rows // MMA_ROWS, nb // panels[0].step_n
        self.parts = []
        for panel, (atom, coords), pointer in zip(panels, loads, pointers):
            tiles = cute.local_tile(coords, (MMA_ROWS, panel.step_n), (None, None))
            to, source = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(panel.smem(pointer), 0, 2), cute.group_modes(tiles, 0, 2)
            )
            self.parts.append((atom, to, source))

    def tile(self, row: Int32, col: Int32, cursor: Cursor) -> Cursor:
        """Load the steps of the tile whose rows start at 64 * atoms * `row` and whose columns are the `col`-th nb."""
        for ni, mi in self.order:
            self.ring.acquire(cursor)
            for atom, to, source in self.parts:
                at = (None, row * self.atoms + mi, col * self.steps + ni)
                cute.copy(atom, source[at], to[(None, cursor.stage)], tma_bar_ptr=self.ring.barrier(cursor))
            cursor = cursor.next()
        return cursor
