"""From the kernel IR to the records of `spec`: axes become device modes, coordinates become index maps.

In: an `ir.kernels.Plan`. Out: a `spec.Program`. Raises CodaError (C0601) where no tile configuration can hold the kernel.
Non-goals: the text of scalar functions and references (`emit`), choices of order and storage (the pass `layout` made them).
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm, prod

from .. import ops
from ..diagnostics.model import CodaError, Diagnostic
from ..ir import kernels as k
from ..passes.layout import granule
from ..passes.state import extents, fixed_product, nominal
from . import configs, row_configs
from . import spec as s
from .together import alike, together


def lower(plan: k.Plan, saving: s.Program | None = None) -> s.Program:
    """The records of one program; of one that has a forward that saves, with the same kernels together as that (`saving`, if known)."""
    if plan.derived is None or plan.derived.saving is None:
        return together(records(plan), nominal(plan.program))
    return alike(records(plan), saving or lower_saving(plan))


def lower_saving(plan: k.Plan) -> s.Program:
    """The records of a program's forward that saves."""
    assert plan.derived is not None and plan.derived.saving is not None
    return together(records(plan.derived.saving), nominal(plan.derived.saving.program), [records(plan)])


def lower_backward(plan: k.Plan) -> s.Program:
    """The records of a program's derivative."""
    assert plan.derived is not None
    backward, saved = plan.derived.backward, frozenset(t.name for t in plan.derived.residuals)
    return together(records(backward), nominal(backward.program), saved=saved)


def records(plan: k.Plan) -> s.Program:
    """The records of one program, one Gemm a launch."""
    program = plan.program
    lowered: list[s.Kernel] = []
    roles = {t.name: "in" for t in program.inputs} | {t.name: "temp" for t in plan.temps} | {o.tensor.name: "out" for o in program.outputs}
    for part in plan.parts:
        for kernel in part.launched:
            made = _loosened(_Lowering(part, kernel, roles).kernel())
            if isinstance(made, s.Gemm) and not configs.fits(made):
                raise CodaError([_too_wide(plan, made)])
            lowered.append(made)
    inputs = tuple(s.Argument(t.name, t.dtype.name, t.axes, t.const) for t in program.inputs)
    outputs = tuple(s.Argument(o.tensor.name, o.tensor.dtype.name, o.tensor.axes) for o in program.outputs)
    requires = tuple(s.Require(text, "stated by the program") for text in program.requires)
    renames = [(str(e.attr("axis")), str(e.attr("to"))) for e in program.eqns if e.op == ops.RENAME.name]
    equal = tuple(dict.fromkeys(renames))
    sizes = tuple((a.name, a.extent) for a in program.axes)
    open_pairs = [(a, b) for a, b in equal if None in (dict(sizes)[a], dict(sizes)[b])]
    requires += tuple(s.Require(f"{a} == {b}", f"rename[{a} -> {b}]") for a, b in open_pairs)
    source = program.span.file if program.span else ""
    temps = tuple(s.Argument(t.name, t.dtype.name, t.axes) for t in plan.temps)
    loops = tuple(_loop(plan, loop) for loop in plan.loops)
    return s.Program(
        program.name, inputs, outputs, sizes, tuple(lowered), requires, source, program.nominal, equal, temps, plan.same, loops
    )


def _loosened(kernel: s.Gemm | s.Finish) -> s.Gemm | s.Finish:
    """The kernel with a mark on tensors that it touches element by element."""
    tiles: set[str] = set()
    if isinstance(kernel, s.Gemm):
        matrices = [m for p in kernel.products for m in (p.a, *p.b)]
        matrices += [x.matrix for x in (*kernel.ports, *kernel.sinks) if isinstance(x, (s.Tile, s.Store))]
        tiles = {m.tensor for m in matrices}
        if row_configs.of_rows(kernel):  # which reads vectors along its columns in runs
            tiles |= {p.tensor for p in kernel.ports if isinstance(p, s.Load) and any(i.of == "col" for i in p.index)}
    return replace(kernel, tensors=tuple(replace(t, loose=t.role != "work" and t.name not in tiles) for t in kernel.tensors))


def _loop(plan: k.Plan, loop: k.Loop) -> s.Loop:
    kernels = tuple(kernel.name for part in plan.parts if part.program.name in loop.stages for kernel in part.launched)
    carried = tuple((before.name, after) for before, after in loop.carried)
    return s.Loop(loop.axis, loop.size, kernels, loop.local, carried, loop.start, loop.whole)


def phase_name(plan: k.Plan, kernel: k.Kernel, phase: int = 0) -> str:
    """The name of a scalar function in the emitted module."""
    return f"{kernel.name}_phase{phase}" if isinstance(kernel, k.Gemm) else kernel.name


def _too_wide(plan: k.Plan, gemm: s.Gemm) -> Diagnostic:
    return Diagnostic(
        "C0601",
        f"no tile holds `{gemm.name}`: {gemm.segments} accumulators side by side, each in steps of {gemm.granule} columns, "
        f"with {len(gemm.sinks)} results",
        plan.program.span,
        "this program",
        notes=("a tile has at most 256 columns in all, and its operands, tile loads and stores share 227 KiB",),
        help="use smaller groups of columns or fewer lanes, or store fewer outputs",
    )


class _Lowering:
    """One kernel."""

    def __init__(self, plan: k.Plan, kernel: k.Kernel, roles: dict[str, str]) -> None:
        self.plan, self.source, self.gemm, self.roles = plan, kernel, plan.gemm, roles
        self.extents = extents(plan.program)
        self.inputs = {t.name: t.dtype.name for t in plan.program.inputs}
        self.outputs = {o.tensor.name: o.tensor.dtype.name for o in plan.program.outputs}
        self.tensors: dict[str, s.Tensor] = {}
        self.free: dict[str, None] = {}

    def kernel(self) -> s.Gemm | s.Finish:
        return self.lower_gemm(self.source) if isinstance(self.source, k.Gemm) else self.lower_finish(self.source)

    def lower_gemm(self, g: k.Gemm) -> s.Gemm:
        products = tuple(
            s.Product(self.operand(p.a, "row", p.over), tuple(self.operand(b, "col", p.over) for b in p.b)) for p in g.products
        )
        ports = tuple(map(self.port, g.ports))
        phases = tuple(
            s.Phase(
                phase_name(self.plan, g, i),
                tuple(s.Group(x.kind, 0 if g.whole_rows else fixed_product(self.plan.program, x.over) or 1) for x in phase.statistics),
            )
            for i, phase in enumerate(g.phases)
        )
        sinks = tuple(map(self.sink, g.sinks))
        if not products:  # nothing else tells a map kernel its size
            self.read_sizes(g.rows + g.cols)
        steps = lcm(granule(self.plan.program, self.plan), *(group.size or 1 for phase in phases for group in phase.groups))
        return s.Gemm(
            g.name,
            tuple(self.tensors.values()),
            products,
            phases,
            ports,
            sinks,
            tuple(self.free),
            self.sizes(g.rows),
            self.sizes(g.cols),
            steps,
        )

    def lower_finish(self, f: k.Finish) -> s.Finish:
        for p in f.partials:
            self.work(p.work, self.length_of(p.work))
        ports = tuple(map(self.port, f.ports))
        for r in f.results:
            if r.tensor in self.outputs:
                self.tensor(r.tensor)
            else:
                self.work(r.tensor, f.axes)
        partials = tuple(s.Partial(p.work, p.kind) for p in f.partials)
        outputs = tuple(r.tensor for r in f.results)
        return s.Finish(
            f.name, tuple(self.tensors.values()), partials, phase_name(self.plan, f), outputs, self.sizes(f.axes), ports, tuple(self.free)
        )

    # --- tensors and extents ---------------------------------------------------------------------------------------------

    def size(self, axis: str) -> s.Size:
        """A fixed extent, or the name of a free axis."""
        fixed = self.extents[axis]
        return axis if fixed is None else fixed

    def sizes(self, axes: tuple[str, ...]) -> tuple[s.Size, ...]:
        """Sizes with the fixed ones multiplied together (none: empty)."""
        free = tuple(a for a in axes if self.extents[a] is None)
        fixed = prod(self.extents[a] or 1 for a in axes if a not in free)
        return (*free, fixed) if fixed != 1 or (axes and not free) else free

    def read_sizes(self, axes: tuple[str, ...]) -> tuple[s.Size, ...]:
        """Sizes that device code reads."""
        self.free.update(dict.fromkeys(a for a in axes if self.extents[a] is None))
        return self.sizes(axes)

    def tensor(self, name: str) -> tuple[tuple[str, ...], ...]:
        """Registers a tensor of the signature; its modes."""
        modes = self.plan.layout(name).modes
        self.tensors.setdefault(name, s.Tensor(name, (self.inputs | self.outputs)[name], modes, self.roles[name]))
        return modes

    def work(self, name: str, axes: tuple[str, ...]) -> None:
        """Registers a work tensor; it has one mode, the positions it keeps."""
        if name in self.outputs:
            self.tensor(name)
        else:
            self.tensors.setdefault(name, s.Tensor(name, "f32", (axes,) if axes else (), "work"))

    def length_of(self, work: str) -> tuple[str, ...]:
        """The axes along which a work tensor keeps positions."""
        for kernel in self.plan.kernels:
            if isinstance(kernel, k.Finish):
                if any(r.tensor == work for r in kernel.results):
                    return kernel.axes
                continue
            for sink in kernel.sinks:
                if isinstance(sink, k.Reduce) and sink.work == work:
                    return self.gemm.rows if sink.kept == "row" else self.gemm.cols
                if isinstance(sink, k.Point) and sink.access.tensor == work:
                    kept = [a for a, _ in sink.access.at]  # none of a single axis
                    return () if not kept else self.gemm.rows if kept[0] in self.gemm.rows else self.gemm.cols
        raise AssertionError(f"nothing writes {work}")

    # --- matrices and coordinates ------------------------------------------------------------------------------------------

    def operand(self, o: k.Operand, side: str, over: tuple[str, ...]) -> s.Matrix:
        modes = self.tensor(o.tensor)
        order = {"row": self.gemm.rows, "col": self.gemm.cols}[side]
        outer, inner, pinned = dict(o.outer), dict(o.inner), dict(o.at)
        return s.Matrix(
            o.tensor,
            self.in_order(modes, outer, order),
            self.in_order(modes, inner, over),
            tuple((i, pinned[mode[0]]) for i, mode in enumerate(modes) if mode[0] in pinned),
        )

    @staticmethod
    def in_order(modes: tuple[tuple[str, ...], ...], names: dict[str, str], order: tuple[str, ...]) -> tuple[int, ...]:
        """The modes whose axes are in `names`, outermost first in the kernel's order."""
        mine = [i for i, mode in enumerate(modes) if mode[0] in names]
        return tuple(sorted(mine, key=lambda i: order.index(names[modes[i][0]])))

    def matrix(self, access: k.Access) -> s.Matrix:
        """A tile of the accumulator's geometry."""
        modes = self.tensor(access.tensor)
        at = dict(access.at)
        along = {a: x.axis for a, x in at.items() if isinstance(x, k.Along)}
        rows = {a: x for a, x in along.items() if x in self.gemm.rows}
        cols = {a: x for a, x in along.items() if x in self.gemm.cols}
        pinned = tuple((i, x) for i, m in enumerate(modes) if isinstance(x := at[m[0]], int) and m[0] != access.packed)
        pack = 2 if access.packed else 1
        return s.Matrix(access.tensor, self.in_order(modes, rows, self.gemm.rows), self.in_order(modes, cols, self.gemm.cols), pinned, pack)

    def index(self, axes: tuple[str, ...], at: dict[str, k.At]) -> s.Index:
        """The coordinate of a mode made of `axes`."""
        first = at[axes[0]]
        if isinstance(first, int):
            return s.Index("fixed", offset=first)
        of = "row" if isinstance(self.source, k.Finish) or first.axis in self.gemm.rows else "col"
        order = self.source.axes if isinstance(self.source, k.Finish) else self.gemm.rows if of == "row" else self.gemm.cols
        last = at[axes[-1]]
        assert isinstance(last, k.Along)
        inside, below = order[order.index(last.axis) + 1 :], order[order.index(first.axis) + 1 :]
        mod = () if order[0] == first.axis else self.read_sizes(order[order.index(first.axis) : order.index(last.axis) + 1])
        offset = 0
        if first.start:
            step = fixed_product(self.plan.program, below)
            assert step is not None, f"{axes[0]} starts at a column that is not fixed"
            offset = first.start * step
        return s.Index(of, self.read_sizes(inside), mod, offset)

    # --- ports and sinks -----------------------------------------------------------------------------------------------------

    def port(self, port: k.Port) -> s.Port:
        if isinstance(port, k.Position):
            return s.Iota(port.var.name, self.index((port.at.axis,), {port.at.axis: port.at}))
        if isinstance(port, k.Size):
            return s.Extent(port.var.name, self.read_sizes((port.axis,)))
        name = "_".join(v.name for v in port.vars)
        if port.access.tensor not in self.inputs:
            return self.left(name, port.access.tensor, dict(port.access.at))
        if port.tile:
            return s.Tile(name, self.matrix(port.access))
        at = dict(port.access.at)
        return s.Load(name, port.access.tensor, tuple(self.index(mode, at) for mode in self.tensor(port.access.tensor)))

    def left(self, name: str, work: str, at: dict[str, k.At]) -> s.Load:
        """What an earlier finisher left, in the order of that one's axes: one mode where this kernel walks them alike, else one an axis."""
        kept = tuple(a for a in self.length_of(work) if a in at) if at else ()
        here = [self.source.axes.index(x.axis) for a in kept if isinstance(self.source, k.Finish) and isinstance(x := at[a], k.Along)]
        alike = here == list(range(here[0], here[0] + len(here))) if here else True
        modes = ((kept,) if alike else tuple((a,) for a in kept)) if kept else ()
        self.tensors.setdefault(work, s.Tensor(work, "f32", modes, "work"))
        return s.Load(name, work, tuple(self.index(mode, at) for mode in modes))

    def sink(self, sink: k.Sink) -> s.Sink:
        if isinstance(sink, k.Store):
            return s.Store(self.matrix(sink.access), self.window(sink.run))
        if isinstance(sink, k.Reduce):
            self.work(sink.work, self.length_of(sink.work))
            return s.RowReduce(sink.kind, sink.work, self.window(sink.run)) if sink.kept == "row" else s.ColReduce(sink.kind, sink.work)
        at = dict(sink.access.at)
        if sink.access.tensor in self.outputs:
            modes = self.tensor(sink.access.tensor)
        else:
            axes = self.length_of(sink.access.tensor)
            self.work(sink.access.tensor, axes)
            modes = (axes,) if axes else ()
        return s.Point(sink.access.tensor, tuple(self.index(mode, at) for mode in modes), sink.once and self.gemm.whole_rows)

    def window(self, run: k.Run | None) -> s.Window | None:
        if run is None:
            return None
        step = fixed_product(self.plan.program, self.gemm.cols[self.gemm.cols.index(run.axis) + 1 :])
        assert step is not None, f"a run of {run.axis} needs fixed columns inside it"
        return s.Window(run.start * step, run.size * step)
