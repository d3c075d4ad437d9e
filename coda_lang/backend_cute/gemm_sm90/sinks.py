"""Where the epilogue's values go: tile stores through shared memory and TMA, row and column partials, single elements.

In: per step of 64 rows × `step_n` columns, this thread's values in accumulator order (column pair fastest, then rows r and r + 8,
then blocks of 8 columns). Out: memory. Everything has one writer and a fixed order, so two runs give the same bits.
Partials and elements outside the matrix are never written; stores are clipped by TMA. Non-goals: computing the values.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ..configs import MMA_ROWS
from ..spec import ColReduce, Point, RowReduce, Store, Window
from . import groups, ports, views
from .ports import Panel
from .ring import Fixed, select


def in_window(col, n, window: Window | None):
    """Whether a column takes part."""
    inside = col < n
    if window is not None:
        inside = inside & (col >= window.start) & (col < window.start + window.size)
    return inside


class StoreWriter(Fixed):
    """One `Store` of one warpgroup. TMA writes whole units of 16 bytes: the padding between rows may be written, nothing else is."""

    def __init__(self, window: Window | None, panel: Panel, pointer, load, thread: Int32):
        self.window, self.panel = window, panel
        atom, coords = load
        if panel.dtype.width == 16:
            matrices = 4 if panel.step_n % 16 == 0 else 2
            self.atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(not panel.n_major, matrices), panel.dtype)
        else:
            bits = 2 * panel.dtype.width if panel.n_major else panel.dtype.width
            self.atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), panel.dtype, num_bits_per_copy=bits)
        self.copy = cute.make_tiled_copy_C(self.atom, panel.tiled_mma())
        self.slice = self.copy.get_slice(thread)
        smem = panel.smem(pointer)
        self.target = self.slice.partition_D(smem)
        self.shift = window.start // panel.step_n if window is not None else 0
        tiles = cute.local_tile(coords, (MMA_ROWS, panel.step_n), (None, None))
        self.store_atom = atom
        self.from_smem, self.to_gmem = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    def write(self, values: list[tuple], slot: int) -> None:
        """Convert this thread's values and put them into stage `slot`."""
        panel, pack = self.panel, len(values[0])
        floats = cute.make_rmem_tensor(len(values) * pack, Float32)
        for i, group in enumerate(values):
            for j, value in enumerate(group):
                floats[i * pack + j] = Float32(value)
        out = panel.registers(panel.dtype)
        flat = cute.make_tensor(out.iterator, cute.make_layout(len(values)))
        if panel.half is not None:
            halves = cute.recast_tensor(flat, panel.half)
            halves.store(floats.load().to(panel.half))
        else:
            flat.store(floats.load().to(panel.dtype))
        cute.copy(self.copy, self.slice.retile(out), self.target[(None, None, None, slot)])

    def send(self, slot: int, row: Int32, step: Int32) -> None:
        """Issue the TMA store of stage `slot` to the `row`-th 64 rows and the `step`-th columns."""
        first = step * self.panel.step_n
        if self.window is None:
            self._issue(slot, row, step, None)
        else:
            start, size = self.window.start, self.window.size
            self._issue(slot, row, step - self.shift, (first + self.panel.step_n > start) & (first < start + size))

    @cute.jit
    def _issue(self, slot: cutlass.Constexpr, row: Int32, step: Int32, visible):
        if cutlass.const_expr(visible is None):
            cute.copy(self.store_atom, self.from_smem[(None, slot)], self.to_gmem[(None, row, step)])
        else:
            if visible:
                cute.copy(self.store_atom, self.from_smem[(None, slot)], self.to_gmem[(None, row, step)])


class ElementWriter:
    """One `Store` with a window that starts where no step does: written element by element."""

    def __init__(self, sink: Store, tensor: cute.Tensor):
        self.sink, matrix = sink, sink.matrix
        width = tensor.element_type.width // 8
        if matrix.pack == 1:
            self.views = [views.matrix_view(tensor, matrix, width)]
        else:
            lane = len(tensor.shape) - 1
            lanes = [replace(matrix, pack=1, at=(*matrix.at, (lane, i))) for i in range(matrix.pack)]
            self.views = [views.matrix_view(tensor, one, width) for one in lanes]

    def put(self, row, col, values: tuple, row_inside, column_inside) -> None:
        assert self.sink.window is not None
        for view, value in zip(self.views, values):
            target = views.matrix_element(view, row, col - self.sink.window.start)
            views.store_if(row_inside & column_inside, target, Float32(value).to(view.element_type))


class RowReducer:
    """One `RowReduce`: a state per row of the thread, across all steps of a tile."""

    def __init__(self, sink: RowReduce, work: cute.Tensor):
        self.sink, self.work = sink, work
        self.states: dict[tuple[int, int], groups.State] = {}

    def absorb(self, mi: int, r: int, values: list, inside: list) -> None:
        kind, late = self.sink.kind, self.sink.window is not None
        self.states[mi, r] = groups.absorb(kind, self.states.get((mi, r)) or groups.begin(kind), values, inside, late)

    def live(self, mi: int) -> list:
        """What this step left to later ones."""
        return [value for r in range(2) for value in self.states[mi, r]]

    def flush(self, row_of, m: Int32, n: Int32, tile_col: Int32, nb: int, lane: Int32) -> None:
        for (mi, r), state in self.states.items():
            state = groups.across(self.sink.kind, groups.closed(self.sink.kind, state), (1, 2))
            row = row_of(mi, r)
            mine = (lane % 4 == 0) & (row < m) & (tile_col * nb < n)
            for i, value in enumerate(state):
                at = (tile_col, row) if len(state) == 1 else (Int32(i), tile_col, row)
                views.store_if(mine, views.element(self.work, at), value)


class ColReducer(Fixed):
    """One `ColReduce`: a state per column of the thread, across the 64-row atoms; then lanes, then warps through shared memory.

    scratch: f32 [2 slots, quantities of the state, 4 warps, step_n] in shared memory.
    """

    def __init__(self, sink: ColReduce, work: cute.Tensor, scratch: cute.Tensor, step_n: int):
        self.sink, self.work, self.scratch, self.step_n = sink, work, scratch, step_n
        self.states: dict[tuple[int, int], groups.State] = {}

    def absorb(self, j: int, c: int, values: list, inside: list) -> None:
        kind = self.sink.kind
        self.states[j, c] = groups.absorb(kind, self.states.get((j, c)) or groups.begin(kind), values, inside)

    def live(self, mi: int) -> list:
        """What this step left to later ones."""
        return [value for state in self.states.values() for value in state]

    def meet(self, slot: int, ni: int, warp: Int32, lane: Int32) -> None:
        """Before the barrier: leave this warp's states of step `ni` in shared memory."""
        first = ni * self.step_n // 8
        for j in range(self.step_n // 8):
            for c in range(2):
                state = groups.closed(self.sink.kind, self.states.pop((first + j, c)))
                state = groups.across(self.sink.kind, state, (4, 8, 16))
                for i, value in enumerate(state):
                    at = (slot, i, warp, j * 8 + 2 * (lane % 4) + c)
                    target = cute.make_tensor(self.scratch.iterator + self.scratch.layout(at), cute.make_layout(1))
                    views.store_if(lane < 4, target, value)

    @cute.jit
    def write(self, slot: cutlass.Constexpr, part: Int32, part_valid: Boolean, col0: Int32, n: Int32, thread: Int32):
        """After the barrier: combine the warps' states, in order, and write the partial of each column from `col0`."""
        if thread < self.step_n:
            col = col0 + thread
            state = self._collect(slot, thread)
            for i in cutlass.range_constexpr(len(state)):
                at = (part, col) if cutlass.const_expr(len(state) == 1) else (Int32(i), part, col)
                views.store_if(part_valid & (col < n), views.element(self.work, at), state[i])

    def _collect(self, slot: int, column: Int32) -> groups.State:
        count = groups.quantities(self.sink.kind)
        states = [tuple(self.scratch[slot, i, w, column] for i in range(count)) for w in range(4)]
        total = states[0]
        for state in states[1:]:
            total = groups.merge(self.sink.kind, total, state)
        return total


class PointWriter:
    """One `Point`. Where the element depends on the row alone, hits are collected over the columns and written once."""

    def __init__(self, sink: Point, tensor: cute.Tensor, extents: dict[str, Int32]):
        self.sink, self.tensor, self.extents = sink, tensor, extents
        self.by_row = not ports.uses(sink.index, "col")
        self.hits: dict[tuple[int, int], tuple] = {}

    def put(self, mi: int, r: int, row, col, value, hit, row_inside, column_inside) -> None:
        hit = hit & column_inside
        if not self.by_row:
            self._write(row, col, value, hit & row_inside)
            return
        found, hits = self.hits.get((mi, r), (Float32(0.0), Int32(0)))
        self.hits[mi, r] = (select(hit, Float32(value), found), select(hit, Int32(1), hits))

    def live(self, mi: int) -> list:
        """What this step left to later ones."""
        return [value for r in range(2) for value in self.hits.get((mi, r), ())]

    def flush(self, row_of, m: Int32) -> None:
        for (mi, r), (value, hit) in self.hits.items():
            row = row_of(mi, r)
            self._write(row, Int32(0), value, (hit != 0) & (row < m))

    def _write(self, row, col, value, hit) -> None:
        coords = [ports.coordinate(i, row, col, self.extents) for i in self.sink.index]
        views.store_if(hit, views.element(self.tensor, coords), Float32(value).to(self.tensor.element_type))
