"""What a row kernel is made of: its static facts, one row as its threads see it, the reductions over rows, 16 bytes of a row at a time.

In: records, device tensors. Out: values for phase functions in registers, states of statistics, memory. Coordinates outside a row are never
touched. Non-goals: in which order rows and phases are walked (`rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..row_configs import VECTOR, sharing
from ..spec import ColReduce, Config, Extent, Gemm, Index, Iota, Load, Matrix, RowReduce, Tensor, Tile
from . import groups, ports, views
from .ring import Fixed

LANES = 32


class Plan:
    """The static facts of one kernel."""

    def __init__(self, gemm: Gemm, config: Config, fns: dict[str, Callable], library):
        self.gemm, self.config, self.fns, self.library = gemm, config, fns, library
        self.records = {t.name: t for t in gemm.tensors}
        self.sharing, self.warps = sharing(config), max(sharing(config) // LANES, 1)
        self.columns = [s for s in gemm.sinks if isinstance(s, ColReduce)]
        self.rows = [s for s in gemm.sinks if isinstance(s, RowReduce)]
        self.meetings = len(gemm.phases) - (0 if self.rows else 1)  # of a row's threads
        kinds = [[g.kind for g in phase.groups] for phase in gemm.phases[:-1]]
        self.kinds = [*kinds, [s.kind for s in self.rows]]  # what each walk reduces
        if any(g.size for phase in gemm.phases for g in phase.groups):
            raise ValueError(f"{gemm.name}: a group narrower than the rows that its blocks own")

    def meeting_floats(self) -> int:
        """f32 numbers that the threads of a row exchange at once."""
        return max(sum(map(groups.quantities, kinds)) for kinds in self.kinds)

    def wide(self, tensor: cute.Tensor, record: Tensor, matrix: Matrix) -> bool:
        """Do `VECTOR` neighbouring columns lie side by side, 16 bytes aligned?"""
        inner = tensor.shape[matrix.cols[-1]]
        unbroken = len(matrix.cols) == 1 or isinstance(inner, int) and inner % VECTOR == 0
        return views.columns_contiguous(record, matrix) and unbroken

    def straight(self, port: Load) -> bool:
        """Is a vector read at neighbouring places by neighbouring columns?"""
        *outer, last = port.index
        plain = last.of == "col" and not last.mod and not last.offset and prod(s if isinstance(s, int) else 2 for s in last.div) == 1
        aligned = not self.records[port.tensor].loose and self.records[port.tensor].role != "work"
        return plain and aligned and not any(i.of == "col" for i in outer)


class Columns(Fixed):
    """Reductions over rows: each thread's states of its own columns, for the rows of its block so far."""

    def __init__(self, plan: Plan, storage: cute.Tensor, thread: Int32):
        self.plan, self.storage, self.thread = plan, storage, thread

    def _at(self, number: int, chunk, j: int, thread):
        return self.storage.layout((number, j, chunk, thread))

    def _cell(self, number: int, chunk, j: int, thread) -> cute.Tensor:
        return cute.make_tensor(self.storage.iterator + self._at(number, chunk, j, thread), cute.make_layout(1))

    def clear(self, chunk) -> None:
        at = 0
        for sink in self.plan.columns:
            for value in groups.identity(sink.kind):
                for j in range(VECTOR):
                    self._cell(at, chunk, j, self.thread)[0] = value
                at += 1

    def state(self, at: int, kind: str, chunk, j: int, thread) -> groups.State:
        return tuple(self._cell(at + i, chunk, j, thread)[0] for i in range(groups.quantities(kind)))

    def absorb(self, chunk, results: list[list], inside: list) -> None:
        """`results[i][j]`: the value of the i-th reduction at the j-th column."""
        at = 0
        for sink, values in zip(self.plan.columns, results):
            for j, value in enumerate(values):
                state = self.state(at, sink.kind, chunk, j, self.thread)
                state = groups.absorb(sink.kind, state, [Float32(value)], [inside[j]], late=True)
                for i, number in enumerate(state):
                    self._cell(at + i, chunk, j, self.thread)[0] = number
            at += groups.quantities(sink.kind)

    def of_rows(self, at: int, kind: str, chunk, j: int, rows) -> groups.State:
        """What the threads with the `rows`-th rows of the block have, of the columns of the calling thread, which has its first rows."""
        return groups.closed(kind, self.state(at, kind, chunk, j, self.thread + rows * self.plan.sharing))


class Row(Fixed):
    """One row as the threads that share it see it; `lane` is the thread's place among them."""

    def __init__(self, plan: Plan, tensors: dict, extents: dict, n: Int32, lane: Int32, row: Int32, inside: Boolean):
        self.plan, self.tensors, self.extents = plan, tensors, extents
        self.n, self.lane, self.row, self.inside = n, lane, row, inside
        self.memo: dict[int, object] = {}
        for i, port in enumerate(self.plan.gemm.ports):  # what does not depend on the column, once
            if isinstance(port, Extent):
                self.memo[i] = Int32(ports.size_of(port.sizes, extents))
            elif isinstance(port, (Load, Iota)) and not ports.uses(_indices(port), "col"):
                self.memo[i] = self._one(port, Int32(0))

    def _one(self, port, col: Int32):
        if isinstance(port, Iota):
            return ports.coordinate(port.index, self.row, col, self.extents)
        return ports.load(port, self.tensors[port.tensor], self.row, col, self.extents)

    def arguments(self, chunk: Int32, ragged: bool) -> list[list]:
        """The ports' values at each of the thread's columns of a chunk; of columns outside, something harmless."""
        columns: list[list] = [[] for _ in range(VECTOR)]
        first = self.first(chunk)
        for i, port in enumerate(self.plan.gemm.ports):
            if i in self.memo:
                found = [(self.memo[i],)] * VECTOR
            elif isinstance(port, Tile):
                found = self._tile(port, first, ragged)
            elif isinstance(port, Load) and self.plan.straight(port):
                found = [(v,) for v in self._vector(port, first, ragged)]
            else:
                last = cutlass.max(self.n - 1, Int32(0))
                found = [(self._one(port, cutlass.min(first + j, last) if ragged else first + j),) for j in range(VECTOR)]
            for column, values in zip(columns, found):
                column.extend(values)
        return columns

    def first(self, chunk: Int32) -> Int32:
        return (chunk * self.plan.sharing + self.lane) * VECTOR

    def inside_row(self, chunk: Int32) -> list:
        return [self.first(chunk) + j < self.n for j in range(VECTOR)]

    def _tile(self, port: Tile, first: Int32, ragged: bool) -> list[tuple]:
        record, tensor = self.plan.records[port.matrix.tensor], self.tensors[port.matrix.tensor]
        view = views.matrix_view(tensor, port.matrix)
        registers = fetch(view, self.plan.wide(tensor, record, port.matrix), self.row, first, self.n, ragged)
        if port.matrix.pack == 2:
            halves = cute.recast_tensor(registers, views.DTYPES[record.dtype])
            return [(halves[2 * j].to(Float32), halves[2 * j + 1].to(Float32)) for j in range(VECTOR)]
        return [(views.to_f32_or_int(registers[j], registers.element_type),) for j in range(VECTOR)]

    def _vector(self, port: Load, first: Int32, ragged: bool) -> list:
        tensor = self.tensors[port.tensor]
        coords = [ports.coordinate(i, self.row, None, self.extents) for i in port.index[:-1]]
        pointer = tensor.iterator + views.element_offset(tensor, [*coords, Int32(0)])
        line = cute.make_tensor(pointer.align(16), cute.make_layout((1, self.n), stride=(1, 1)))
        registers = fetch(line, True, Int32(0), first, self.n, ragged)
        return [views.to_f32_or_int(registers[j], tensor.element_type) for j in range(VECTOR)]

    def call(self, phase: int, arguments: list, statistics: tuple) -> tuple:
        return self.plan.library.call(self.plan.fns[self.plan.gemm.phases[phase].fn], *arguments, *statistics)

    def absorb(self, phase: int, results: list[tuple], state: tuple, inside: list | None) -> tuple:
        """The flat state of a walk after a chunk; `results[j]` are the reduced values at the j-th column."""
        out: list = []
        for i, kind in enumerate(self.plan.kinds[phase]):
            size = groups.quantities(kind)
            own = state[len(out) : len(out) + size]
            out += groups.absorb(kind, tuple(own), [Float32(r[i]) for r in results], inside, late=True)
        return tuple(out)


def _indices(port) -> tuple[Index, ...]:
    return (port.index,) if isinstance(port, Iota) else port.index


# --- memory


@cute.jit
def fetch(view, wide: cutlass.Constexpr, row: Int32, first: Int32, n: Int32, ragged: cutlass.Constexpr):
    """The elements at `VECTOR` columns of a matrix's row, in registers; 0 for columns outside."""
    registers = cute.make_rmem_tensor(VECTOR, view.element_type)
    if cutlass.const_expr(wide and not ragged):
        cute.autovec_copy(_run(view, row, first), registers)
    else:
        for j in cutlass.range_constexpr(VECTOR):
            registers[j] = view.element_type(0)
        if cutlass.const_expr(wide):
            if first + VECTOR <= n:
                cute.autovec_copy(_run(view, row, first), registers)
            else:
                _each(view, row, first, n, registers)
        else:
            _each(view, row, first, n, registers)
    return registers


@cute.jit
def _each(view, row: Int32, first: Int32, n: Int32, registers):
    for j in cutlass.range_constexpr(VECTOR):
        if first + j < n:
            registers[j] = views.matrix_element(view, row, first + j)[0]


def _run(view, row: Int32, first: Int32) -> cute.Tensor:
    pointer = view.iterator + view.layout((Int64(row), Int64(first)))
    return cute.make_tensor(pointer.align(16), cute.make_layout(VECTOR))


@cute.jit
def write(view, wide: cutlass.Constexpr, registers, row: Int32, first: Int32, n: Int32, inside, ragged: cutlass.Constexpr):
    """Registers to `VECTOR` columns of a matrix's row, where those are inside."""
    if inside:
        if cutlass.const_expr(wide and not ragged):
            cute.autovec_copy(registers, _run(view, row, first))
        elif cutlass.const_expr(wide):
            if first + VECTOR <= n:
                cute.autovec_copy(registers, _run(view, row, first))
            else:
                _write_each(view, registers, row, first, n)
        else:
            _write_each(view, registers, row, first, n)


@cute.jit
def _write_each(view, registers, row: Int32, first: Int32, n: Int32):
    for j in cutlass.range_constexpr(VECTOR):
        if first + j < n:
            views.matrix_element(view, row, first + j)[0] = registers[j]
