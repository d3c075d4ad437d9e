"""What flows through the pipeline: the program, what the analyses found about it, and in the end the plan. Each field is set by one pass.

In: a checked `Program`. Out: `State`, its text for `codac ir --after NAME`, and small look-ups shared by the passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .. import ops
from ..diagnostics.model import Diagnostic
from ..ir.graph import Eqn, Lit, Program, Tensor, Var
from ..ir.kernels import Along, Loop, Plan, to_text
from ..ir.printer import to_text as program_text

MAX_COLUMNS = 256  # of all accumulators together: the widest tile of the target
MAX_LANES = 8  # accumulators side by side
NOMINAL = 4096  # of a free axis that has no `nominal`


@dataclass(frozen=True)
class Stored:
    """A matrix operand: an input tensor, the program's name for each of its axes (they differ after `rename`), lanes pinned."""

    tensor: str
    axes: tuple[tuple[str, str], ...]  # (the tensor's own name, the name in the product), storage order, without pinned lanes
    at: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Term:
    """One product of an accumulator: rows operand, columns operand, contracted axes."""

    a: Stored
    b: Stored
    over: tuple[str, ...]


@dataclass(frozen=True)
class Accumulator:
    """A sum of products that one accumulator (or one a lane) holds; `var` is the sum."""

    var: Var
    terms: tuple[Term, ...]
    eqn: Eqn


@dataclass(frozen=True)
class Anchor:
    """The kernel's product in one orientation. All accumulators share the row operands and, lanes apart, the column axes."""

    rows: tuple[str, ...]
    cols: tuple[str, ...]
    accumulators: tuple[Accumulator, ...]

    def side(self, axis: str) -> str:
        return "row" if axis in self.rows else "col"

    def __str__(self) -> str:
        lines = [f"rows ({' '.join(self.rows)}) cols ({' '.join(self.cols)})"]
        for acc in self.accumulators:
            terms = " + ".join(f"{t.a.tensor} @[{' '.join(t.over)}] {t.b.tensor}" for t in acc.terms)
            lines.append(f"  {acc.var.name}: {acc.var.ty} = {terms}")
        return "\n".join(lines)


LANE = "lane"


@dataclass(frozen=True)
class Place:
    """Where a value can be known.

    level: "input" (computed from inputs, anywhere), "tile" (within the kernel), "row", "col", "scalar" (only after the kernel and its
    finisher). at: for each axis the kernel axis it runs along, or LANE. phase: of the kernel's body. stage: of the finishers.
    because: the reduction that takes it out of the tile, or into a later phase.
    """

    level: str
    at: tuple[tuple[str, Along | str], ...] = ()
    phase: int = 0
    stage: int = 0
    because: Eqn | None = None

    def along(self) -> dict[str, Along]:
        """The axes that run along a kernel axis."""
        return {a: at for a, at in self.at if isinstance(at, Along)}

    def __str__(self) -> str:
        axes = ", ".join(f"{a}={at}" if str(at) != a else a for a, at in self.at)
        return f"{self.level}({axes})" + (f" phase {self.phase}" if self.phase else "") + (f" stage {self.stage}" if self.stage else "")


@dataclass(frozen=True)
class Placement:
    """Every value's place in one orientation, and the facts that the next passes need."""

    anchor: Anchor
    places: dict[str, Place]
    axis_at: dict[str, Along | str]  # where an axis of an input lies
    suffixes: tuple[frozenset[str], ...] = ()  # column axes that must be innermost together: groups with statistics
    outermost: str | None = None  # the column axis that is split into runs
    whole_rows: bool = False  # statistics over all columns, which no tile holds: a row kernel


@dataclass(frozen=True)
class State:
    """The pipeline's value between two passes."""

    program: Program
    anchors: tuple[Anchor, ...] = ()
    placement: Placement | None = None
    plan: Plan | None = None
    notes: tuple[str, ...] = ()  # what the compiler took the liberty to do
    rows: tuple[tuple[str, frozenset[str]], ...] = ()  # the kernel's rows, by an output it writes: as another plan has them
    why: tuple[Diagnostic, ...] = ()  # what keeps the program from being one kernel
    stages: tuple[State, ...] = ()  # one a kernel, where the program needs several
    same: tuple[tuple[str, str], ...] = ()  # outputs that are an input as it is: (output, input)
    loops: tuple[Loop, ...] = ()  # over stages
    strict: bool = False  # no law that moves a rounding
    written: Program | None = None  # the program as it is written, where laws have changed it

    def text(self) -> str:
        """What `codac ir --after NAME` prints."""
        if self.plan is not None:
            return to_text(self.plan)
        if self.stages:
            return "\n".join([*map(str, self.loops), *(stage.text() for stage in self.stages)])
        out = program_text(self.program)
        if self.placement is not None:
            out += "\n" + str(self.placement.anchor) + "\n"
            out += "".join(f"  {name}: {place}\n" for name, place in self.placement.places.items())
        else:
            out += "".join(f"\n{anchor}\n" for anchor in self.anchors)
        return out


def definitions(program: Program) -> dict[str, Eqn]:
    """The equation of each value."""
    return {e.out.name: e for e in program.eqns}


def uses(program: Program) -> dict[str, int]:
    """How often each value is used, outputs included."""
    count: dict[str, int] = {}
    for name in [a.name for e in program.eqns for a in e.args if isinstance(a, Var)] + [o.value.name for o in program.outputs]:
        count[name] = count.get(name, 0) + 1
    return count


def extents(program: Program) -> dict[str, int | None]:
    return {a.name: a.extent for a in program.axes}


def nominal(program: Program) -> dict[str, int]:
    """An extent for every axis, to compare costs with: as given, else so that each side of a product has NOMINAL (a batch of 8 outside)."""
    sizes = {a.name: a.extent for a in program.axes} | dict(program.nominal)
    for e in program.eqns if None in sizes.values() else ():
        if e.op != ops.CONTRACT.name:
            continue
        over: tuple[str, ...] = e.attr("axes")  # type: ignore[assignment]
        outer = [tuple(x for x in a.ty.axes if x not in over) for a in e.args if isinstance(a, Var)]
        for group in (*outer, over):
            fixed, free = prod(sizes[a] or 1 for a in group), [a for a in group if sizes[a] is None]
            sizes |= {a: 8 for a in free[:-1]} | {a: max(NOMINAL // fixed, 1) for a in free[-1:]}
    return {a: n or NOMINAL for a, n in sizes.items()}


def signature(program: Program) -> str:
    """The program's first line, extents included."""
    size = extents(program)

    def tensor(t: Tensor) -> str:
        axes = ", ".join(a if size[a] is None else f"{a}={size[a]}" for a in t.axes)
        return f"{'const ' * t.const}{t.name}: {t.dtype}[{axes}]"

    inputs, outputs = map(tensor, program.inputs), (tensor(o.tensor) for o in program.outputs)
    return f"{program.name}({', '.join(inputs)}) -> ({', '.join(outputs)})"


def fixed_product(program: Program, axes: tuple[str, ...] | frozenset[str]) -> int | None:
    """The product of extents, None where one is free."""
    sizes = [extents(program)[a] for a in axes]
    return None if None in sizes else prod(s for s in sizes if s is not None)


def is_temporary(name: str) -> bool:
    """Was the name made by the compiler (`t1`) for a value that the source gives none?"""
    return name[:1] == "t" and name[1:].isdigit()


def say(atom: Var | Lit, eqn: Eqn | None = None) -> str:
    """A value as messages call it."""
    if isinstance(atom, Lit):
        return str(atom.value)
    if is_temporary(atom.name) and eqn is not None:
        over = eqn.attr("axes") if any(k == "axes" for k, _ in eqn.attrs) else ()
        return f"the {eqn.op} over {listed(over)}" if over else "this expression"  # type: ignore[arg-type]
    return f"`{atom.name}`"


def listed(names: tuple[str, ...] | list[str] | frozenset[str]) -> str:
    """`m`, `n` and `k`."""
    quoted = [f"`{n}`" for n in (sorted(names) if isinstance(names, frozenset) else names)]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1] if quoted else "no axis"
