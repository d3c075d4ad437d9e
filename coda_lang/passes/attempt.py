"""What one attempt to place a program knows: an orientation, where axes lie, which reductions are kept in the tile.

In: a program and one of its anchors. Out: `Attempt`, and how values made of stored ones enter the tile. Non-goals: the rules (`place`,
`reductions`).
"""

from __future__ import annotations

from dataclasses import replace

from .. import ops
from ..diagnostics.model import Diagnostic
from ..ir.graph import Eqn, Program, Var
from ..ir.kernels import Along
from .state import LANE, MAX_LANES, Anchor, Place, extents, fixed_product


class Attempt:
    """One attempt: an orientation, and which reductions over all columns are kept in the tile."""

    def __init__(self, program: Program, anchor: Anchor, groups: frozenset[str], lanes: frozenset[str]) -> None:
        self.program, self.anchor, self.groups = program, anchor, groups
        self.extents = extents(program)
        self.lanes = set(lanes)
        self.places: dict[str, Place] = {t.name: Place("input") for t in program.inputs}
        self.eqns: list[Eqn] = []
        self.defs: dict[str, Eqn] = {e.out.name: e for e in program.eqns}
        self.sums = {a.var.name for a in anchor.accumulators}
        self.axis_at: dict[str, Along | str] = {a: Along(a) for a in (*anchor.rows, *anchor.cols)} | {a: LANE for a in self.lanes}
        self.suffixes: set[frozenset[str]] = set()
        self.outermost: str | None = None
        self.problems: list[Diagnostic] = []
        self.poisoned: set[str] = set()
        self.wanted: set[str] = set()
        self.new_lanes: set[str] = set()
        self.whole_rows = False  # a block owns rows, and statistics over all columns stay in it
        self.maps = not anchor.accumulators
        if self.maps:
            self.align()

    def refuse(self, problem: Diagnostic) -> None:
        self.problems.append(problem)

    def align(self) -> None:
        """In a map kernel runs of a column axis lie where they stand in it, and the axis where its runs stand."""
        moves: list[tuple[str, tuple[tuple[str, int], ...]]]
        moves = [(str(e.attr("axis")), ((str(e.attr("to")), int(e.attr("start"))),)) for e in self.program.eqns if e.op == ops.RUN.name]  # type: ignore[call-overload]
        for e in self.program.eqns:
            if e.op == ops.JOIN.name:
                of: tuple[str, ...] = e.attr("of")  # type: ignore[assignment]
                moves.append((str(e.attr("axis")), tuple((a, sum(self.extents[x] or 0 for x in of[:i])) for i, a in enumerate(of))))
        for axis, parts in moves * 2:
            here = self.axis_at.get(axis)
            for part, start in parts if isinstance(here, Along) and self.may_run(here.axis) else ():
                at = here.start + start  # type: ignore[union-attr]
                if part not in self.axis_at and at + (self.extents[part] or 0) <= (self.extents[here.axis] or 0):  # type: ignore[union-attr]
                    self.outermost = here.axis  # type: ignore[union-attr]
                    self.axis_at[part] = Along(here.axis, at)  # type: ignore[union-attr]

    def may_run(self, axis: str) -> bool:
        """Can runs of a kernel axis be told apart? Of one column axis, if all columns inside it are fixed."""
        inside = [a for a in self.anchor.cols if a != axis]
        return axis in self.anchor.cols and self.outermost in (None, axis) and fixed_product(self.program, tuple(inside)) is not None

    def tiled(self, e: Eqn) -> Eqn | None:
        """e with its argument, made of stored values, as a value of the tile; None where that has no place."""
        value = e.args[0]
        assert isinstance(value, Var)
        at: dict[str, Along | str] = {}
        if not all(self.resolve(a, at) for a in value.ty.axes):
            return None
        name = f"{value.name}_tile"
        if name not in self.places:
            alias = Eqn(Var(name, value.ty), ops.STOP.name, (value,), (), e.span)
            self.places[name], self.defs[name] = Place("tile", tuple(at.items())), alias
            self.eqns.append(alias)
        self.defs[e.out.name] = replace(e, args=(Var(name, value.ty), *e.args[1:]))
        return self.defs[e.out.name]

    def resolve(self, axis: str, at: dict[str, Along | str]) -> bool:
        """Where an input's axis lies; an unknown fixed one becomes lanes."""
        few = not self.maps or (self.extents[axis] or 0) <= MAX_LANES
        if axis not in self.axis_at and self.extents[axis] is not None and few:
            self.axis_at[axis] = LANE
        if axis in self.axis_at:
            at[axis] = self.axis_at[axis]
        return axis in at
