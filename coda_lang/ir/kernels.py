"""The kernel IR: what `passes.partition` makes of a program and `backend_cute.lower` turns into `spec` records.

Kernels are named by axes, never by positions. A `Gemm` is products into accumulators plus a scalar body in phases; a `Finish`
is the second stage over its partial results. Bodies are straight-line equations over scalars (`Ty.axes == ()`), one position
of the kernel at a time: which element of a tensor a scalar is, stands in the port or sink (`At`). Decisions about storage
(`Layout`) are a side table. Non-goals: tile shapes, strides, device details.

Geometry
    A Gemm has a set of row axes and of column axes; a *lane* axis is neither: each lane is an accumulator of its own. `rows` and
    `cols` are ordered outermost first, by the pass `layout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .graph import Atom, Eqn, Program, Tensor, Var


@dataclass(frozen=True)
class Along:
    """The coordinate `position along the kernel's axis - start`: a run of a split axis starts later than its kernel axis."""

    axis: str
    start: int = 0

    def __str__(self) -> str:
        return f"{self.axis} - {self.start}" if self.start > 0 else f"{self.axis} + {-self.start}" if self.start else self.axis


At = Along | int  # an int is a fixed coordinate: a lane


@dataclass(frozen=True)
class Access:
    """One element of a stored tensor: a coordinate for each axis, in storage order. The lanes of the axis `packed` travel together."""

    tensor: str
    at: tuple[tuple[str, At], ...]
    packed: str | None = None

    def __str__(self) -> str:
        inside = [f"{axis}=*" if axis == self.packed else f"{axis}={at}" if str(at) != axis else axis for axis, at in self.at]
        return f"{self.tensor}[{', '.join(inside)}]"


# --- ports -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """A stored element (two where packed). `tile` says that it has the accumulator's geometry and is loaded as a tile."""

    vars: tuple[Var, ...]
    access: Access
    tile: bool = False

    def __str__(self) -> str:
        return f"{', '.join(v.name for v in self.vars)} = {'tile' if self.tile else 'load'} {self.access}"


@dataclass(frozen=True)
class Position:
    """The coordinate itself, as i32."""

    var: Var
    at: Along

    @property
    def vars(self) -> tuple[Var, ...]:
        return (self.var,)

    def __str__(self) -> str:
        return f"{self.var.name} = index {self.at}"


@dataclass(frozen=True)
class Size:
    """The extent of an axis that is free, as i32."""

    var: Var
    axis: str

    @property
    def vars(self) -> tuple[Var, ...]:
        return (self.var,)

    def __str__(self) -> str:
        return f"{self.var.name} = size {self.axis}"


Port = Read | Position | Size


# --- sinks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The part of a kernel axis that a value is about: coordinates [start, start + size)."""

    axis: str
    start: int
    size: int


@dataclass(frozen=True)
class Store:
    """The values (two where packed) become elements of an output; outside `run` nothing is stored."""

    access: Access
    values: tuple[Atom, ...]
    dtype: str
    run: Run | None = None

    def __str__(self) -> str:
        return f"store {self.access}: {self.dtype} <- {', '.join(map(show, self.values))}{_within(self.run)}"


PLANES = {"lse": 2, "moments": 4}  # numbers of a partial result, where it is several


@dataclass(frozen=True)
class Reduce:
    """Partial reductions into the work tensor `work`, one for each position along `kept` ("row" or "col")."""

    kind: str  # "sum" "max" "min" "amax" "lse" "moments"
    kept: str
    work: str
    value: Atom
    run: Run | None = None

    @property
    def values(self) -> tuple[Atom, ...]:
        return (self.value,)

    def __str__(self) -> str:
        return f"partial {self.kind} per {self.kept}: {self.work} <- {show(self.value)}{_within(self.run)}"


@dataclass(frozen=True)
class Point:
    """Where `chosen` holds, `value` becomes the element; at most one position of the kernel may claim an element.

    `once`: the value is the same at every column, `chosen` holds at the first.
    """

    access: Access
    value: Atom
    chosen: Atom
    dtype: str = "f32"
    once: bool = False

    @property
    def values(self) -> tuple[Atom, ...]:
        return (self.value, self.chosen)

    def __str__(self) -> str:
        return f"point {self.access} <- {show(self.value)} if {show(self.chosen)}"


Sink = Store | Reduce | Point


# --- kernels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A matrix in a stored tensor. `outer` (rows of A, columns of the product for B) and `inner` (contracted) pair each of the tensor's
    axes with the program's name for it, in storage order; they differ after `rename`. `at` pins lanes."""

    tensor: str
    outer: tuple[tuple[str, str], ...]
    inner: tuple[tuple[str, str], ...]
    at: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        sides = " | ".join(" ".join(own if own == name else f"{own}={name}" for own, name in side) for side in (self.outer, self.inner))
        return f"{self.tensor}[{sides}{''.join(f', {axis}={i}' for axis, i in self.at)}]"


@dataclass(frozen=True)
class Product:
    """One K-segment: every accumulator s gains a · b[s]. `over` orders the contracted axes, outermost first."""

    a: Operand
    b: tuple[Operand, ...]
    over: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.a} @ {', '.join(map(str, self.b))}"


@dataclass(frozen=True)
class Statistic:
    """A reduction of `value` over the columns of a group (`over`: innermost column axes); later phases see it as `var`."""

    var: Var
    kind: str
    over: tuple[str, ...]
    value: Atom

    def __str__(self) -> str:
        return f"{self.var.name} = {self.kind} of {show(self.value)} over {' '.join(self.over)}"


@dataclass(frozen=True)
class Phase:
    """One scalar function. A phase sees accumulators, ports and the statistics of earlier phases; the last one feeds the sinks."""

    eqns: tuple[Eqn, ...]
    statistics: tuple[Statistic, ...] = ()


@dataclass(frozen=True)
class Gemm:
    """One fused product; a map kernel where there is none (no `products`, no `accumulators`), a row kernel where that has statistics over
    all of its columns, which no tile would hold."""

    name: str
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    accumulators: tuple[Var, ...]
    products: tuple[Product, ...]
    phases: tuple[Phase, ...]
    ports: tuple[Port, ...] = ()
    sinks: tuple[Sink, ...] = ()
    whole_rows: bool = False  # a row kernel


@dataclass(frozen=True)
class Partial:
    """A work tensor reduced over its parts, in fixed order; kind "only" reads it as it is."""

    var: Var
    work: str
    kind: str

    def __str__(self) -> str:
        return f"{self.var.name} = {self.kind} of {self.work}"


@dataclass(frozen=True)
class Result:
    """What a finisher writes, one element a position: an output, or a work tensor that a later finisher reads. `axes` pairs an output's
    axes, in storage order, with the kernel's."""

    tensor: str
    dtype: str
    value: Atom
    axes: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"store {self.tensor}: {self.dtype} <- {show(self.value)}"


@dataclass(frozen=True)
class Finish:
    """The second stage, one position for each element of `axes`: all "row" or all "col" axes (`over`), the innermost of the "col" axes
    ("part"), an output's own axes in storage order ("out"), or "" for a scalar."""

    name: str
    over: str
    axes: tuple[str, ...]
    partials: tuple[Partial, ...]
    eqns: tuple[Eqn, ...]
    results: tuple[Result, ...]
    ports: tuple[Port, ...] = ()


Kernel = Gemm | Finish


@dataclass(frozen=True)
class Loop:
    """Stages that run once for each chunk of `size` positions of an axis, one chunk after the other.

    `local` tensors exist for one chunk; every other tensor along the axis is whole, and a chunk's kernels see their part of it. `carried`
    are (what a chunk adds to, the name of what it leaves): one place in memory, zeros at first. `start` and `whole` are axes that no tensor
    has: their extents are a chunk's first position and the axis's extent.
    """

    axis: str
    size: int
    stages: tuple[str, ...]
    local: tuple[str, ...]
    carried: tuple[tuple[Tensor, str], ...]
    start: str
    whole: str

    def __str__(self) -> str:
        carried = "; adds up " + ", ".join(t for _, t in self.carried) if self.carried else ""
        return f"loop over {self.axis} by {self.size}: {', '.join(self.stages)}; for one chunk: {', '.join(self.local)}{carried}"


@dataclass(frozen=True)
class Layout:
    """How kernels see a stored tensor: its axes merged into modes, last contiguous. `copy` says why the host must rearrange it, "" where it
    need not."""

    tensor: str
    modes: tuple[tuple[str, ...], ...]
    copy: str = ""


@dataclass(frozen=True)
class Plan:
    """A program's kernels in launch order, the storage they need, and what the compiler did, in words."""

    program: Program
    kernels: tuple[Kernel, ...]
    layouts: tuple[Layout, ...] = ()
    notes: tuple[str, ...] = field(default=())
    stages: tuple[Plan, ...] = ()  # of a program of several: each with its own program; `kernels` has those of all
    same: tuple[tuple[str, str], ...] = ()  # outputs that are an input as it is: (output, input)
    why: tuple[str, ...] = ()  # what keeps the program from being one kernel: code and words
    derived: Derived | None = None
    loops: tuple[Loop, ...] = ()  # over stages
    written: Program | None = None  # the program as it is written, where laws have changed it: what references compute

    @property
    def gemm(self) -> Gemm:
        """The one Gemm of a plan without stages."""
        return next(k for k in self.kernels if isinstance(k, Gemm))

    @property
    def parts(self) -> tuple[Plan, ...]:
        """The stages, or the plan itself where it is one."""
        return self.stages or (self,)

    @property
    def launched(self) -> tuple[Kernel, ...]:
        """The kernels without map kernels that write nothing (only finishers do)."""
        return tuple(k for k in self.kernels if not isinstance(k, Gemm) or k.products or k.sinks)

    @property
    def temps(self) -> tuple[Tensor, ...]:
        """Tensors between stages, in storage order."""
        own = {o.tensor.name for o in self.program.outputs}
        made = [o.tensor for p in self.stages for o in p.program.outputs if o.tensor.name not in own]
        return (*made, *(before for loop in self.loops for before, _ in loop.carried))

    def layout(self, tensor: str) -> Layout:
        """The layout of a tensor; KeyError where no kernel uses it."""
        return {x.tensor: x for x in self.layouts}[tensor]


@dataclass(frozen=True)
class Derived:
    """A program's derivative, planned.

    `saving` is the program with its outputs and, after them, the `residuals`, None where there are none; each output comes of the same
    equations as without. `backward` reads, by name, inputs and outputs of the program, residuals and cotangents. Pairs are (the
    program's tensor, the backward's). `notes` say what is saved, what is computed again and why.
    """

    saving: Plan | None
    backward: Plan
    residuals: tuple[Tensor, ...]
    cotangents: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


# --- text --------------------------------------------------------------------------------------------------------------


def show(atom: Atom) -> str:
    """An atom in IR text."""
    return atom.name if isinstance(atom, Var) else repr(atom.value)


def _within(run: Run | None) -> str:
    return f" within {run.axis}[{run.start}:{run.start + run.size}]" if run else ""


def _eqn(e: Eqn) -> str:
    attrs = "{" + ", ".join(f"{k}={getattr(v, 'name', v)}" for k, v in e.attrs) + "}" if e.attrs else ""
    src = f"  # {e.span}" if e.span else ""
    return f"{e.out.name}: {e.out.ty.dtype} = {e.op}{attrs}({', '.join(map(show, e.args))}){src}"


def _lines(kernel: Kernel) -> Iterator[str]:
    if isinstance(kernel, Gemm):
        yield f"{'gemm' if kernel.products else 'map'} {kernel.name} rows ({' '.join(kernel.rows)}) cols ({' '.join(kernel.cols)})"
        if kernel.products:
            yield f"  {', '.join(a.name for a in kernel.accumulators)} = " + " + ".join(map(str, kernel.products))
        yield from (f"  {p}" for p in kernel.ports)
        for i, phase in enumerate(kernel.phases):
            yield f"  phase {i}"
            yield from (f"    {_eqn(e)}" for e in phase.eqns)
            yield from (f"    {s}" for s in phase.statistics)
        yield from (f"  {s}" for s in kernel.sinks)
    else:
        yield f"finish {kernel.name} over ({' '.join(kernel.axes)})"
        yield from (f"  {p}" for p in (*kernel.partials, *kernel.ports))
        yield from (f"    {_eqn(e)}" for e in kernel.eqns)
        yield from (f"  {r}" for r in kernel.results)


def to_text(plan: Plan) -> str:
    """The plan as one reads it: a line each for products, ports, equations, sinks, storage."""
    if plan.stages:
        same = [f"same: {output} is {given}" for output, given in plan.same]
        loops = list(map(str, plan.loops))
        return "\n".join([f"program {plan.program.name} in {len(plan.stages)} stages", *same, *loops, "", *map(to_text, plan.stages)])
    out = [f"plan {plan.program.name}"]
    for kernel in plan.launched:
        out += ["", *_lines(kernel)]
    if plan.layouts:
        out += ["", "storage"]
        out += [
            f"  {x.tensor} " + "".join(f"({' '.join(m)})" for m in x.modes) + (f"  copied: {x.copy}" if x.copy else "")
            for x in plan.layouts
        ]
    out += [f"note: {n}" for n in plan.notes]
    return "\n".join(out) + "\n"
