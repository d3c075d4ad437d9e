"""`RowsSm90`: a map kernel with statistics over whole rows as one kernel, whose blocks own rows.

In: a `Gemm` record without products some of whose groups have size 0 (all columns), a configuration of `row_configs`, the phase functions.
Out: an object that `cute.compile` accepts, called like `GemmSm90`. The threads of a row walk its columns in chunks, once for each phase:
loads of 16 bytes straight to registers, a state for each statistic in each thread; lanes meet by shuffles, warps in shared memory, in a
fixed order. The last walk finds the row in the caches, and feeds the sinks. Reductions over rows gather in shared memory, each thread for
its own columns over all rows of the block, and leave one partial result a block.
Non-goals: checking arguments; groups narrower than a row.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.memory import SmemAllocator

from ..configs import SMEM_BYTES
from ..row_configs import THREADS, VECTOR, kept_bytes, numbers, panel, resident, together
from ..spec import Config, Gemm, Point, RowReduce, Store, Tile
from . import groups, ports, views
from .row import LANES, Columns, Plan, Row, write

IN_FLIGHT = 4  # loads of a thread in a walk that reduces


class RowsSm90:
    """A kernel to be compiled. Raises ValueError where the record has narrower groups."""

    def __init__(self, spec: Gemm, config: Config, fns: dict[str, Callable], library=None):
        if library is None:
            from .. import device_fns as library
        self.spec, self.config, self.plan = spec, config, Plan(spec, config, fns, library)
        self.batch = max(IN_FLIGHT // max(sum(isinstance(p, Tile) for p in spec.ports), 1), 1)

    @cute.jit
    def __call__(self, *args):
        count = len(self.spec.tensors)
        extents = dict(zip(self.spec.extents, args[count:-1]))
        m, n = (Int32(ports.size_of(sizes, extents)) for sizes in (self.spec.rows, self.spec.cols))
        self.kernel(args[:count], args[count:-1], m, n).launch(
            grid=((m + self.config.tile_m - 1) // self.config.tile_m, 1, 1),
            block=(THREADS, 1, 1),
            stream=args[-1],
            **self.residency(),
        )

    def residency(self) -> dict[str, int]:
        """Where columns are reduced: registers for as many blocks as shared memory has room for, and no more of that than those take."""
        if not self.config.step:
            return {}
        blocks = resident(self.spec, self.config)
        share = -(-100 * blocks * (kept_bytes(self.spec, self.config) + 2048) // SMEM_BYTES)
        return {"min_blocks_per_mp": blocks, "preferred_smem_carveout": min(share, 100)}

    @cute.kernel
    def kernel(self, arguments, extents, m: Int32, n: Int32):
        plan, config = self.plan, self.config
        tensors = {record.name: tensor for record, tensor in zip(self.spec.tensors, arguments)}
        named = dict(zip(self.spec.extents, extents))
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        smem = SmemAllocator()
        room = None
        if cutlass.const_expr(plan.warps > 1):
            room = smem.allocate_tensor(Float32, cute.make_layout((2, plan.meeting_floats(), THREADS // LANES)), 16)
        columns = None
        if cutlass.const_expr(config.step > 0):
            shape = (numbers(self.spec), VECTOR, config.step, THREADS)
            storage = cute.make_layout(shape, stride=(VECTOR * config.step * THREADS, THREADS, VECTOR * THREADS, 1))
            columns = Columns(plan, smem.allocate_tensor(Float32, storage, 16), thread)
        place = (block, thread, m, n)
        if cutlass.const_expr(columns is None):
            self.panel(tensors, named, place, room, columns, Int32(0), Int32(0), n)
        else:
            width = panel(config)
            for index in cutlass.range(0, cutlass.max((n + width - 1) // width, Int32(1)), 1, unroll=1):
                self.panel(tensors, named, place, room, columns, index, index * width, cutlass.min((index + 1) * width, n))

    @cute.jit
    def panel(self, tensors, named, place, room, columns: cutlass.Constexpr, index: Int32, start: Int32, stop: Int32):
        """All rows of the block, the last walk over columns [start, stop)."""
        block, thread, m, n = place
        lane = thread % self.plan.sharing
        first = block * self.config.tile_m + thread // self.plan.sharing
        if cutlass.const_expr(columns is not None):
            for chunk in cutlass.range_constexpr(self.config.step):
                columns.clear(chunk)
        for step in cutlass.range(0, self.config.tile_m // together(self.config), 1, unroll=1):
            at = first + step * together(self.config)
            row = Row(self.plan, tensors, named, n, lane, cutlass.min(at, m - 1), at < m)
            self.row(row, room, columns, step * self.plan.meetings, index, start, stop)
        if cutlass.const_expr(columns is not None):
            cute.arch.sync_threads()
            if thread < self.plan.sharing:
                for chunk in cutlass.range(0, (stop - start + self.config.tile_n - 1) // self.config.tile_n, 1, unroll=1):
                    self.leave(tensors, columns, block, chunk, start + (chunk * self.plan.sharing + lane) * VECTOR, n)
            cute.arch.sync_threads()

    @cute.jit
    def row(self, row: cutlass.Constexpr, room, columns: cutlass.Constexpr, met: Int32, index: Int32, start: Int32, stop: Int32):
        """One row: a walk for each phase with statistics, then the one that feeds the sinks. `met`: how often threads have met before."""
        plan = self.plan
        width = self.config.tile_n
        statistics: tuple = ()
        for phase in cutlass.range_constexpr(len(plan.gemm.phases) - 1):
            state = self.begin(phase)
            whole, batch = row.n // width, self.batch
            for first in cutlass.range(0, whole - batch + 1, batch, unroll=1):
                state = self.gather(row, phase, first, batch, statistics, state, False)
            for chunk in cutlass.range(whole // batch * batch, whole, 1, unroll=1):
                state = self.gather(row, phase, chunk, 1, statistics, state, False)
            if whole * width < row.n:
                state = self.gather(row, phase, whole, 1, statistics, state, True)
            statistics = (*statistics, *self.meet(phase, state, room, row.lane, (met + phase) % 2))
        self.once(row, statistics, index)
        last = len(plan.gemm.phases) - 1
        state = self.begin(last)
        before, whole = start // width, stop // width
        for first in cutlass.range(before, whole - 1, 2, unroll=1):
            state = self.emit(row, columns, first, 2, before, statistics, state, False)
        if (whole - before) % 2 == 1:
            state = self.emit(row, columns, whole - 1, 1, before, statistics, state, False)
        if whole * width < stop:
            state = self.emit(row, columns, whole, 1, before, statistics, state, True)
        if cutlass.const_expr(len(plan.rows) > 0):
            self.leave_row(row, self.meet(last, state, room, row.lane, (met + last) % 2, closed=True), index)

    def begin(self, phase: int) -> tuple:
        return tuple(value for kind in self.plan.kinds[phase] for value in groups.identity(kind))

    def gather(self, row: Row, phase: int, first: Int32, count: int, statistics: tuple, state: tuple, ragged: bool) -> tuple:
        """A few chunks of a walk that reduces; their loads are in flight together."""
        chunks = [first + i for i in range(count)]
        for chunk, loaded in [(c, row.arguments(c, ragged)) for c in chunks]:
            results = [row.call(phase, arguments, statistics) for arguments in loaded]
            state = row.absorb(phase, results, state, row.inside_row(chunk) if ragged else None)
        return state

    def emit(
        self, row: Row, columns: Columns | None, first: Int32, count: int, before: Int32, statistics: tuple, state: tuple, ragged: bool
    ) -> tuple:
        """A few chunks of the last walk; gives the state of the row reductions that leave the kernel."""
        chunks = [first + i for i in range(count)]
        for chunk, loaded in [(c, row.arguments(c, ragged)) for c in chunks]:
            state = self._emit(row, columns, chunk, loaded, before, statistics, state, ragged)
        return state

    def _emit(
        self, row: Row, columns: Columns | None, chunk: Int32, loaded: list, before: Int32, statistics: tuple, state: tuple, ragged: bool
    ) -> tuple:
        plan, last = self.plan, len(self.plan.gemm.phases) - 1
        results = [row.call(last, arguments, statistics) for arguments in loaded]
        inside = row.inside_row(chunk) if ragged else [Boolean(True)] * VECTOR
        first, at = row.first(chunk), 0
        of_rows: list[int] = []
        of_columns: list[list] = []
        for sink in plan.gemm.sinks:
            if isinstance(sink, Store):
                self._store(row, sink, first, [r[at : at + sink.matrix.pack] for r in results], ragged)
                at += sink.matrix.pack
            elif isinstance(sink, Point):
                for j in range(VECTOR) if not sink.once else ():
                    self._point(row, sink, first + j, results[j][at], results[j][at + 1], inside[j])
                at += 2
            elif isinstance(sink, RowReduce):
                of_rows.append(at)
                at += 1
            else:
                of_columns.append([r[at] for r in results])
                at += 1
        if columns is not None:
            columns.absorb(chunk - before, of_columns, [ok & row.inside for ok in inside])
        return row.absorb(last, [tuple(r[i] for i in of_rows) for r in results], state, inside if ragged else None)

    # --- statistics

    @cute.jit
    def meet(self, phase: cutlass.Constexpr, state, room, lane: Int32, parity: Int32, closed: cutlass.Constexpr = False):
        """The statistics of a row, in all of its threads; as states where `closed`.

        Two buffers take turns: who writes one again has met, over the other, all who read it.
        """
        states = self._across(phase, state)
        if cutlass.const_expr(self.plan.warps > 1):
            warp = cute.arch.thread_idx()[0] // LANES
            flat = [value for one in states for value in one]
            if lane % LANES == 0:
                for i in cutlass.range_constexpr(len(flat)):
                    room[parity, i, warp] = flat[i]
            cute.arch.sync_threads()
            states = self._together(phase, room, parity, warp - lane // LANES)
        if cutlass.const_expr(closed):
            return states
        return tuple(groups.result(kind, one) for kind, one in zip(self.plan.kinds[phase], states))

    def _across(self, phase: int, state: tuple) -> list[groups.State]:
        """Of each warp's lanes that share the row."""
        found, at = [], 0
        distances = tuple(1 << i for i in range(5) if 1 << i < self.plan.sharing)
        for kind in self.plan.kinds[phase]:
            size = groups.quantities(kind)
            found.append(groups.across(kind, groups.closed(kind, tuple(state[at : at + size])), distances))
            at += size
        return found

    def _together(self, phase: int, room, parity: Int32, first: Int32) -> list[groups.State]:
        """Of the row's warps, from the `first` on, in order."""
        found, at = [], 0
        for kind in self.plan.kinds[phase]:
            size = groups.quantities(kind)
            states = [tuple(room[parity, at + i, first + w] for i in range(size)) for w in range(self.plan.warps)]
            total = states[0]
            for one in states[1:]:
                total = groups.merge(kind, total, one)
            found.append(total)
            at += size
        return found

    # --- memory

    def _store(self, row: Row, sink: Store, first: Int32, values: list[tuple], ragged: bool) -> None:
        record, tensor = self.plan.records[sink.matrix.tensor], row.tensors[sink.matrix.tensor]
        view = views.matrix_view(tensor, sink.matrix)
        dtype = views.DTYPES[record.dtype]
        registers = cute.make_rmem_tensor(VECTOR * sink.matrix.pack, dtype)
        for i, value in enumerate(v for pair in values for v in pair):
            registers[i] = self._as(value, dtype)
        if sink.matrix.pack == 2:
            registers = cute.recast_tensor(registers, Int32)
        write(view, self.plan.wide(tensor, record, sink.matrix), registers, row.row, first, row.n, row.inside, ragged)

    @staticmethod
    def _as(value, dtype):
        return Float32(value).to(dtype) if dtype.is_float else value.to(dtype)

    def _point(self, row: Row, sink: Point, col: Int32, value, chosen, inside) -> None:
        tensor = row.tensors[sink.tensor]
        coords = [ports.coordinate(i, row.row, col, row.extents) for i in sink.index]
        views.store_if(chosen & inside & row.inside, views.element(tensor, coords), self._as(value, tensor.element_type))

    @cute.jit
    def once(self, row: cutlass.Constexpr, statistics, index: Int32):
        """What there is one of for a row, computed at its first column."""
        if cutlass.const_expr(any(isinstance(s, Point) and s.once for s in self.spec.sinks)):
            if (row.lane == 0) & (index == 0):
                self._once(row, statistics)

    def _once(self, row: Row, statistics: tuple) -> None:
        results = row.call(len(self.plan.gemm.phases) - 1, row.arguments(Int32(0), True)[0], statistics)
        at = 0
        for sink in self.plan.gemm.sinks:
            if isinstance(sink, Point) and sink.once:
                self._point(row, sink, Int32(0), results[at], Boolean(True), Boolean(True))
            at += sink.matrix.pack if isinstance(sink, Store) else 2 if isinstance(sink, Point) else 1

    def leave_row(self, row: Row, states: list[groups.State], part: Int32) -> None:
        """The row reductions of a panel."""
        for sink, state in zip(self.plan.rows, states):
            for i, value in enumerate(state):
                at = (part, row.row) if len(state) == 1 else (Int32(i), part, row.row)
                views.store_if(row.inside & (row.lane == 0), views.element(row.tensors[sink.work], at), value)

    @cute.jit
    def of_block(self, columns, at: cutlass.Constexpr, kind: cutlass.Constexpr, chunk: Int32, j: cutlass.Constexpr):
        """A column's state over all rows of the block, in order."""
        state = columns.of_rows(at, kind, chunk, j, Int32(0))
        for rows in cutlass.range(1, together(self.config), 1, unroll=1):
            state = groups.merge(kind, state, columns.of_rows(at, kind, chunk, j, rows))
        return state

    def leave(self, tensors: dict, columns: Columns, part: Int32, chunk: Int32, first: Int32, n: Int32) -> None:
        """The column reductions of a block at a thread's columns of a chunk."""
        at = 0
        for sink in self.plan.columns:
            for j in range(VECTOR):
                state = self.of_block(columns, at, sink.kind, chunk, j)
                for i, value in enumerate(state):
                    place = (part, first + j) if len(state) == 1 else (Int32(i), part, first + j)
                    views.store_if(first + j < n, views.element(tensors[sink.work], place), value)
            at += groups.quantities(sink.kind)


__all__ = ["RowsSm90"]
