"""The fixed epilogue driver: walks a tile's accumulators step by step, calls the phase functions, feeds the sinks.

In: the `Gemm` record, the phase functions, accumulator registers of one warpgroup. Out: memory, through `sinks`. Each warpgroup works
for itself, on its own stages of shared memory, so ping-pong and cooperative kernels run the same code. Values are made when first asked
for and remembered for the tile (`Elements`): a row vector is read once per row, a group's statistic is computed once.
Non-goals: the mainloop; knowing any operator.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..configs import MMA_ROWS, Budget, columns_per_segment, tile_stores, warpgroup_rows
from ..spec import ColReduce, Config, Extent, Gemm, Iota, Load, Matrix, Point, RowReduce, Store, Tile
from . import groups, ports, sinks, views
from .ports import Panel, TileReader
from .ring import Cursor, Fixed, Ring

THREADS = 128


class Plan:
    """The static facts of one kernel's epilogue. Holds no device values, so host and kernel code share it."""

    def __init__(self, gemm: Gemm, config: Config, budget: Budget, fns: dict[str, Callable], library):
        self.gemm, self.config, self.budget, self.fns, self.library = gemm, config, budget, fns, library
        self.nb, self.rows = columns_per_segment(gemm, config), warpgroup_rows(config)
        self.atoms = self.rows // MMA_ROWS
        records = {t.name: t for t in gemm.tensors}
        step_n = budget.step_n

        def panel(matrix: Matrix, stages: int) -> Panel:
            return Panel(records[matrix.tensor], matrix, step_n, stages)

        through_tma = tile_stores(gemm)
        self.stores = {i: panel(s.matrix, budget.store_stages) for i, s in enumerate(gemm.sinks) if s in through_tma}  # by sink
        self.windows = {i: s.window for i, s in enumerate(gemm.sinks) if isinstance(s, Store)}
        self.tiles = [(p, panel(p.matrix, budget.tile_stages)) for p in gemm.ports if isinstance(p, Tile)]
        # Columns are walked in blocks that hold whole groups; inside a block the 64-row atoms come first, so that column
        # reductions are short-lived.
        block = lcm(step_n, *(g.size for phase in gemm.phases for g in phase.groups))
        self.order = [
            (ni, mi)
            for first in range(0, self.nb, block)
            for mi in range(self.atoms)
            for ni in range(first // step_n, (first + block) // step_n)
        ]
        self.column_reduces = {i: s for i, s in enumerate(gemm.sinks) if isinstance(s, ColReduce)}
        self.synchronises = bool(self.stores or self.column_reduces)

    def scratch_floats(self) -> int:
        """f32 elements of one warpgroup's scratch for column reductions."""
        return sum(2 * groups.quantities(s.kind) * 4 * self.budget.step_n for s in self.column_reduces.values())

    def store_atoms(self, tensors: dict[str, cute.Tensor]):
        tile = (MMA_ROWS, self.budget.step_n)
        return tuple(
            views.store_atom(views.matrix_view(tensors[panel.matrix.tensor], panel.matrix), panel.layout(), tile, panel.matrix.tensor)
            for panel in self.stores.values()
        )

    def tile_atoms(self, tensors: dict[str, cute.Tensor]):
        tile = (MMA_ROWS, self.budget.step_n)
        return tuple(
            views.load_atom(views.matrix_view(tensors[p.matrix.tensor], p.matrix), panel.layout(), tile, 1, p.matrix.tensor)
            for p, panel in self.tiles
        )


class Elements:
    """The scalars of one tile in one thread, made on demand.

    Indices: 64-row atom `mi`, row half `r`, block of 8 columns `j`, column `c` of the pair.
    """

    def __init__(self, epilogue: Epilogue, accumulator, wg_row: Int32, tile_col: Int32, cursor: Cursor):
        self.epilogue, self.plan, self.cursor = epilogue, epilogue.plan, cursor
        self.wg_row, self.tile_col = wg_row, tile_col
        if accumulator is not None:  # of a map kernel it is
            accumulator = cute.make_tensor(accumulator.iterator, cute.make_layout(cute.size(accumulator)))
        self.accumulator = accumulator
        self.row0 = wg_row * self.plan.rows + epilogue.warp * 16 + epilogue.lane // 4
        self.col0 = tile_col * self.plan.nb + 2 * (epilogue.lane % 4)
        self.memo: dict[tuple, object] = {}
        self.pending = list(self.plan.order)
        self.fetched: dict[tuple[int, int], list] = {}

    def _once(self, key: tuple, make):
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def row(self, mi: int, r: int):
        return self._once(("row", mi, r), lambda: self.row0 + (MMA_ROWS * mi + 8 * r))

    def col(self, j: int, c: int):
        return self._once(("col", j, c), lambda: self.col0 + (8 * j + c))

    def _clamped(self, axis: str, a: int, b: int):
        at, limit = (self.row(a, b), self.epilogue.m) if axis == "row" else (self.col(a, b), self.epilogue.n)
        return self._once((axis + "!", a, b), lambda: cutlass.min(at, limit - 1))

    def row_inside(self, mi: int, r: int):
        return self._once(("inside", mi, r), lambda: self.row(mi, r) < self.epilogue.m)

    def column_inside(self, j: int, c: int, window=None):
        return self._once(("window", j, c, window), lambda: sinks.in_window(self.col(j, c), self.epilogue.n, window))

    def accumulators(self, mi: int, r: int, j: int, c: int) -> list:
        plan = self.plan
        if self.accumulator is None:
            return []
        base = c + 2 * r + 4 * j + mi * (plan.config.tile_n // 2)
        return [self.accumulator[base + s * (plan.nb // 2)] for s in range(plan.gemm.segments)]

    def ports(self, mi: int, r: int, j: int, c: int) -> list:
        values: list = []
        reader = 0
        for i, port in enumerate(self.plan.gemm.ports):
            if isinstance(port, Tile):
                values.extend(self._tile(reader, mi, r, j, c))
                reader += 1
            else:
                values.append(self._vector(i, port, mi, r, j, c))
        return values

    def _vector(self, i: int, port, mi: int, r: int, j: int, c: int):
        extents = self.epilogue.extents
        if isinstance(port, Extent):
            return self._once(("port", i), lambda: Int32(ports.size_of(port.sizes, extents)))
        indices = (port.index,) if isinstance(port, Iota) else port.index
        at = ((mi, r) if ports.uses(indices, "row") else (), (j, c) if ports.uses(indices, "col") else ())

        def make():
            if isinstance(port, Iota):
                return ports.coordinate(port.index, self.row(mi, r), self.col(j, c), extents)
            row = self._clamped("row", mi, r) if at[0] else None
            col = self._clamped("col", j, c) if at[1] else None
            return ports.load(port, self.epilogue.tensors[port.tensor], row, col, extents)

        return self._once(("port", i, *at), make)

    def prefetch(self, ni: int, rows: bool = False) -> None:
        """Issue the loads of a step's column vectors, and of the tile's row vectors, ahead of their use."""
        blocks = range(ni * self.plan.budget.step_n // 8, (ni + 1) * self.plan.budget.step_n // 8)
        for i, port in enumerate(self.plan.gemm.ports):
            if not isinstance(port, Load):
                continue
            by_row, by_col = ports.uses(port.index, "row"), ports.uses(port.index, "col")
            if rows and by_row and not by_col:
                for mi in range(self.plan.atoms):
                    for r in range(2):
                        self._vector(i, port, mi, r, 0, 0)
            elif by_col and not by_row:
                for j in blocks:
                    for c in range(2):
                        self._vector(i, port, 0, 0, j, c)

    def _tile(self, reader: int, mi: int, r: int, j: int, c: int) -> tuple:
        blocks = self.plan.budget.step_n // 8
        registers = self.fetch(j // blocks, mi)[reader]
        return self.epilogue.readers[reader].value(registers, c + 2 * r + 4 * (j % blocks))

    def fetch(self, ni: int, mi: int) -> list:
        """The tile ports of a step, taken from shared memory in the order in which they were loaded."""
        while (ni, mi) not in self.fetched:
            step = self.pending.pop(0)
            assert self.epilogue.tile_ring is not None
            self.epilogue.tile_ring.wait(self.cursor)
            self.fetched[step] = [reader.read(self.cursor.stage) for reader in self.epilogue.readers]
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            self.epilogue.tile_ring.release(self.cursor)
            self.cursor = self.cursor.next()
        return self.fetched[ni, mi]

    def call(self, phase: int, mi: int, r: int, j: int, c: int) -> tuple:
        """The results of a phase at one element."""
        plan = self.plan
        statistics = [value for earlier in range(phase) for value in self.statistics(earlier, mi, r, j, c)]
        arguments = [*self.accumulators(mi, r, j, c), *self.ports(mi, r, j, c), *statistics]
        return plan.library.call(plan.fns[plan.gemm.phases[phase].fn], *arguments)

    def statistics(self, phase: int, mi: int, r: int, j: int, c: int) -> list:
        return [
            self._once(("stat", phase, g, mi, r, *self._group_key(group.size, j, c)), lambda g=g: self._statistic(phase, g, mi, r, j, c))
            for g, group in enumerate(self.plan.gemm.phases[phase].groups)
        ]

    @staticmethod
    def _group_key(size: int, j: int, c: int) -> tuple:
        """What tells apart the groups that one thread sees: narrow groups are told apart by lane, except single columns."""
        return (j * 8 // size,) if size >= 8 else (j, c if size == 1 else 0)

    def _statistic(self, phase: int, g: int, mi: int, r: int, j: int, c: int):
        group = self.plan.gemm.phases[phase].groups[g]
        if group.size >= 8:
            first = j * 8 // group.size * group.size // 8
            columns = [(jj, cc) for jj in range(first, first + group.size // 8) for cc in range(2)]
        else:
            columns = [(j, cc) for cc in range(2)] if group.size > 1 else [(j, c)]
        values = [Float32(self._phase(phase, mi, r, jj, cc)[g]) for jj, cc in columns]
        state = groups.closed(group.kind, groups.absorb(group.kind, groups.begin(group.kind), values))
        distances = {1: (), 2: (), 4: (1,)}.get(group.size, (1, 2))
        return groups.result(group.kind, groups.across(group.kind, state, distances))

    def _phase(self, phase: int, mi: int, r: int, j: int, c: int) -> tuple:
        return self._once(("phase", phase, mi, r, j, c), lambda: self.call(phase, mi, r, j, c))


class Epilogue(Fixed):
    """One warpgroup's epilogue, made once per kernel."""

    def __init__(
        self, plan: Plan, tensors, extents, m: Int32, n: Int32, group: Int32, thread: Int32, stores, pointers, tile_ring: Ring | None
    ):
        """`pointers`: where the stages of each store, of each tile port and the scratch of this warpgroup lie."""
        self.plan, self.tensors, self.extents, self.m, self.n, self.tile_ring = plan, tensors, extents, m, n, tile_ring
        self.thread, self.group = thread, group
        self.warp, self.lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        store_pointers, tile_pointers, scratch = pointers
        self.writers = {
            i: sinks.StoreWriter(plan.windows[i], panel, pointer, atom, thread)
            for (i, panel), pointer, atom in zip(plan.stores.items(), store_pointers, stores)
        }
        self.readers = [TileReader(panel, pointer, thread) for (_, panel), pointer in zip(plan.tiles, tile_pointers)]
        self.scratch = scratch

    def begin(self, accumulator, wg_row: Int32, tile_col: Int32, cursor: Cursor) -> Elements:
        """The elements of the tile whose rows start at `wg_row * rows` and columns at `tile_col * nb`. What can be read before the sums
        are there is on its way afterwards.
        """
        elements = Elements(self, accumulator, wg_row, tile_col, cursor)
        elements.prefetch(self.plan.order[0][0], rows=True)
        return elements

    def tile(self, elements: Elements) -> Cursor:
        """The whole epilogue of one tile."""
        plan = self.plan
        reducers = self._reducers()
        if plan.synchronises:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self._barrier()
        for count, (ni, mi) in enumerate(plan.order):
            self._step(elements, reducers, count, ni, mi)
        for i, sink in enumerate(plan.gemm.sinks):
            if isinstance(sink, RowReduce):
                reducers[i].flush(elements.row, self.m, self.n, elements.tile_col, plan.nb, self.lane)
            elif isinstance(sink, Point):
                reducers[i].flush(elements.row, self.m)
        return elements.cursor

    def drain(self) -> None:
        """Before the kernel ends: shared memory may go once every store has read it."""
        if self.plan.stores:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _barrier(self) -> None:
        cute.arch.barrier(barrier_id=self.group + 1, number_of_threads=THREADS)

    def _reducers(self) -> dict:
        made: dict = {}
        used = 0
        for i, sink in enumerate(self.plan.gemm.sinks):
            if isinstance(sink, RowReduce):
                made[i] = sinks.RowReducer(sink, self.tensors[sink.work])
            elif isinstance(sink, Point):
                made[i] = sinks.PointWriter(sink, self.tensors[sink.tensor], self.extents)
            elif isinstance(sink, ColReduce):
                step_n, quantities = self.plan.budget.step_n, groups.quantities(sink.kind)
                layout = cute.make_layout((2, quantities, 4, step_n), stride=(quantities * 4 * step_n, 4 * step_n, step_n, 1))
                made[i] = sinks.ColReducer(sink, self.tensors[sink.work], cute.make_tensor(self.scratch + used, layout), step_n)
                used += 2 * quantities * 4 * step_n
        return made

    def _step(self, elements: Elements, reducers: dict, count: int, ni: int, mi: int) -> None:
        plan, step_n, wg_row, tile_col = self.plan, self.plan.budget.step_n, elements.wg_row, elements.tile_col
        blocks = range(ni * step_n // 8, (ni + 1) * step_n // 8)
        last = len(plan.gemm.phases) - 1
        results = {(j, r, c): elements.call(last, mi, r, j, c) for j in blocks for r in range(2) for c in range(2)}
        finished = mi == plan.atoms - 1
        slot = count % max(plan.budget.store_stages, 1)
        at = 0
        for i, sink in enumerate(plan.gemm.sinks):
            if isinstance(sink, Store):
                values = {key: result[at : at + sink.matrix.pack] for key, result in results.items()}
                if i in self.writers:
                    self.writers[i].write(list(values.values()), slot)
                else:
                    writer = sinks.ElementWriter(sink, self.tensors[sink.matrix.tensor])
                    for (j, r, c), value in values.items():
                        within = elements.row_inside(mi, r), elements.column_inside(j, c, sink.window)
                        writer.put(elements.row(mi, r), elements.col(j, c), value, *within)
                at += sink.matrix.pack
            elif isinstance(sink, RowReduce):
                for r in range(2):
                    columns = [(j, c) for j in blocks for c in range(2)]
                    inside = [elements.column_inside(j, c, sink.window) for j, c in columns]
                    reducers[i].absorb(mi, r, [Float32(results[j, r, c][at]) for j, c in columns], inside)
                at += 1
            elif isinstance(sink, ColReduce):
                for j in blocks:
                    for c in range(2):
                        column = [Float32(results[j, r, c][at]) for r in range(2)]
                        reducers[i].absorb(j, c, column, [elements.row_inside(mi, r) for r in range(2)])
                if finished:
                    reducers[i].meet(ni % 2, ni, self.warp, self.lane)
                at += 1
            else:
                for (j, r, c), result in results.items():
                    place = elements.row(mi, r), elements.col(j, c)
                    within = elements.row_inside(mi, r), elements.column_inside(j, c)
                    reducers[i].put(mi, r, *place, result[at], result[at + 1], *within)
                at += 2
        groups.settle([value for reducer in reducers.values() for value in reducer.live(mi)], self.m)
        if count + 1 < len(plan.order):
            elements.prefetch(plan.order[count + 1][0])
        if plan.stores:
            cute.arch.fence_proxy("async.shared", space="cta")
            # The stage that the next step writes must have been read: at most stages - 2 younger stores may be in flight.
            cute.arch.cp_async_bulk_wait_group(max(plan.budget.store_stages - 2, 0), read=True)
        if plan.stores or (plan.column_reduces and finished):
            self._barrier()
        if plan.stores:
            self._send(slot, wg_row * plan.atoms + mi, tile_col * (plan.nb // step_n) + ni)
        if finished:
            for i in plan.column_reduces:
                col0 = tile_col * plan.nb + ni * step_n
                reducers[i].write(ni % 2, wg_row, wg_row * plan.rows < self.m, col0, self.n, self.thread)

    @cute.jit
    def _send(self, slot: cutlass.Constexpr, row: Int32, step: Int32):
        if self.warp == 0:
            self._send_all(slot, row, step)
            cute.arch.cp_async_bulk_commit_group()

    def _send_all(self, slot: int, row: Int32, step: Int32) -> None:
        for writer in self.writers.values():
            writer.send(slot, row, step)
