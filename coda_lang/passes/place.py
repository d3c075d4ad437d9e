"""Where each value can be known: in a tile, in a later phase of the same tile, or only after the kernel and its finisher.

In: a program and its possible anchors. Out: one `Placement`: the orientation that fits, and a `Place` for each value; or refusals that say
which value, which axis, why no tile can know it, what was tried, and an edit.
Non-goals: reductions (`reductions`), storage order (`layout`), which element a scalar is (`partition`).
"""

from __future__ import annotations

from dataclasses import replace

from .. import ops
from ..diagnostics.model import CodaError
from ..ir.graph import Atom, Eqn, Program, Tensor, Var
from ..ir.kernels import Along
from . import refusals as no
from .anchor import candidates, lane_axes
from .reductions import FINISHED, Reductions
from .state import LANE, MAX_LANES, Anchor, Place, Placement, State


def place(state: State) -> State:
    """The pass. Raises CodaError (C04xx) where no orientation fits."""
    lanes, anchors = lane_axes(state.program), state.anchors
    while True:
        runs = [_attempt(state.program, anchor, lanes) for anchor in anchors]
        more = frozenset(a for run, *_ in runs for a in run.new_lanes) - lanes
        if not more:
            break
        lanes |= more
        anchors = candidates(state.program, lanes)
    fitting = [
        (_columns_first(program, found) - rank / 2, program, found) for rank, (run, program, found) in enumerate(runs) if not run.problems
    ]
    if not fitting:
        raise CodaError(min((run.problems for run, *_ in runs), key=len))
    wanted = {rows for name, rows in state.rows if any(o.tensor.name == name for o in state.program.outputs)}
    _, program, placement = max(fitting, key=lambda f: (frozenset(f[2].anchor.rows) in wanted, f[0]))
    return replace(state, program=program, placement=placement)


def _attempt(program: Program, anchor: Anchor, lanes: frozenset[str]) -> tuple[_Run, Program, Placement]:
    """One orientation, with as many statistics kept in the tile as it takes."""
    groups: frozenset[str] = frozenset()
    while True:
        run = _Run(program, anchor, groups, lanes)
        placed, placement = run.place()
        if not run.problems or run.wanted <= groups:
            return run, placed, placement
        groups |= run.wanted | (run.over_rows() if run.maps else frozenset())


def _columns_first(program: Program, placement: Placement) -> float:
    """How many stored outputs are contiguous along columns, less those along rows."""
    score = 0.0
    for o in program.outputs:
        last = next((a for a in reversed(o.tensor.axes) if placement.axis_at.get(a) != LANE), None)
        at = placement.places[o.value.name].along().get(last or "") or placement.axis_at.get(last or "")
        if isinstance(at, Along) and len(o.tensor.axes) > 1:
            score += 1 if placement.anchor.side(at.axis) == "col" else -1
    return score


def level_parts(late: list[Place]) -> int:
    """How many different sets of axes do finished values along columns have?"""
    return len({frozenset(x.axis for x in p.along().values()) for p in late if p.level == "col"})


class _Run(Reductions):
    """One attempt: an orientation, and which reductions over all columns are kept in the tile."""

    def place(self) -> tuple[Program, Placement]:
        for e in self.program.eqns:
            if any(isinstance(a, Var) and a.name in self.poisoned for a in e.args):
                self.poisoned.add(e.out.name)
                continue
            found = self.of(e)
            if found is None:
                self.poisoned.add(e.out.name)
            else:
                self.places[e.out.name] = found
                self.eqns.append(self.defs[e.out.name])
        for o in self.program.outputs:
            if o.value.name not in self.poisoned:
                self.output(o.tensor, o.value)
        program = replace(self.program, eqns=tuple(self.eqns))
        return program, Placement(self.anchor, self.places, self.axis_at, tuple(self.suffixes), self.outermost, self.whole_rows)

    # --- rules ---------------------------------------------------------------------------------------------------------

    def of(self, e: Eqn) -> Place | None:
        """The place of e's value, None where it was refused."""
        if e.op == ops.CONTRACT.name or e.out.name in self.sums:
            return Place("tile", tuple((a, LANE if a in self.lanes else Along(a)) for a in e.out.ty.axes))
        kind = ops.TABLE[e.op].kind
        if kind == "reduce":
            return self.gather(e) if e.op == ops.GATHER.name else self.reduce(e, tuple(e.attr("axes")))  # type: ignore[arg-type]
        if kind == "lanes":
            return self.moved(e)
        if kind == "move" and e.op == ops.RENAME.name:
            return self.renamed(e)
        return self.met(e)

    def met(self, e: Eqn, args: tuple[Atom, ...] | None = None) -> Place | None:
        """Values that meet at one position."""
        places = [self.places[a.name] for a in args or e.args if isinstance(a, Var)]
        if not places or all(p.level == "input" for p in places):
            return Place("input")
        late = [p for p in places if p.level in FINISHED]
        tiles = [p for p in places if p.level == "tile"]
        if late and tiles:
            because = late[0].because
            if because is not None and self.keepable(because):
                self.wanted.add(because.out.name)
            return self.refuse(no.stuck(e, late[0], self.anchor, self.program, self.defs))
        at: dict[str, Along | str] = {}
        for p in places:
            for axis, here in p.at:
                if at.setdefault(axis, here) != here:
                    return self.refuse(no.elsewhere(e, axis, at[axis], here, self.defs))
        for a in args or e.args:
            for axis in a.ty.axes if isinstance(a, Var) and self.places[a.name].level == "input" else ():
                if axis not in at and not self.resolve(axis, at):
                    return self.refuse(no.unknown_axis(e, axis, self.anchor))
        if not late:
            return Place(
                "tile", tuple(at.items()), max(p.phase for p in tiles), because=next((p.because for p in tiles if p.because), None)
            )
        return self.finished(e, at, late)

    def finished(self, e: Eqn, at: dict[str, Along | str], late: list[Place]) -> Place | None:
        """Values after the kernel: all along rows, all along columns, or scalars."""
        sides = {self.anchor.side(x.axis) for x in at.values() if isinstance(x, Along)}
        if len(sides) > 1:
            because = late[0].because
            if because is not None and self.keepable(because):
                self.wanted.add(because.out.name)
            return self.refuse(no.outer(e, late, self.defs))
        if level_parts(late) > 1:
            return self.refuse(no.partial_run(e, self.defs))
        level = sides.pop() if sides else "scalar"
        along = [x for x in at.values() if isinstance(x, Along)]
        kept = self.anchor.rows if level == "row" else self.anchor.cols if level == "col" else ()
        if any(x.start for x in along) or not {x.axis for x in along} <= set(kept):
            return self.refuse(no.partial_run(e, self.defs))
        stage = max(p.stage if p.level == level else p.stage + 1 for p in late)
        return Place(level, tuple(at.items()), stage=stage, because=late[0].because)

    def renamed(self, e: Eqn) -> Place | None:
        p = self.places[e.args[0].name]  # type: ignore[union-attr]
        axis, to = str(e.attr("axis")), str(e.attr("to"))
        if p.level == "input":
            return p
        at = dict(p.at)
        at[to] = at.pop(axis)
        self.axis_at.setdefault(to, at[to])
        return replace(p, at=tuple(at.items()))

    def moved(self, e: Eqn) -> Place | None:
        """Lanes and runs."""
        axis = str(e.attr("axis"))
        if e.op == ops.LANE.name:
            p = self.places[e.args[0].name]  # type: ignore[union-attr]
            return replace(p, at=tuple((a, x) for a, x in p.at if a != axis))
        if e.op == ops.PACK.name:
            met = self.met(e)
            return met if met is None or met.level == "input" else replace(met, at=(*met.at, (axis, LANE)))
        if e.op == ops.RUN.name:
            return self.run(e, axis, str(e.attr("to")), int(e.attr("start")))  # type: ignore[call-overload]
        return self.join(e, axis, tuple(e.attr("of")))  # type: ignore[arg-type]

    def run(self, e: Eqn, axis: str, to: str, start: int) -> Place | None:
        p = self.places[e.args[0].name]  # type: ignore[union-attr]
        if p.level == "input":
            there = self.axis_at.get(to)
            if start and there == Along(to) and self.anchor.rows != (to,):  # read at another coordinate than the kernel's
                if not self.may_run(to):
                    return self.refuse(no.run_not_columns(e, axis))
                self.outermost = to
            return p
        at = dict(p.at)
        here = at.pop(axis)
        if isinstance(here, Along):
            if p.level != "tile" or self.anchor.side(here.axis) == "row" or self.outermost not in (None, here.axis):
                return self.refuse(no.run_not_columns(e, axis))
            if free := tuple(a for a in self.anchor.cols if a != here.axis and self.extents[a] is None):
                return self.refuse(no.free_run(e, axis, free))
            self.outermost = here.axis
            here = Along(here.axis, here.start + start)
        at[to] = here
        self.axis_at.setdefault(to, here)
        return replace(p, at=tuple(at.items()))

    def join(self, e: Eqn, axis: str, of: tuple[str, ...]) -> Place | None:
        """Runs side by side again: each must already lie where the joined axis wants it."""
        moved: list[dict[str, Along | str]] = []
        start, base = 0, None
        for a, part in zip(e.args, of):
            p = self.places[a.name]  # type: ignore[union-attr]
            at = dict(p.at)
            if part in at:  # else the value is the same all along its run
                here = at.pop(part)
                wanted = Along(here.axis, here.start - start) if isinstance(here, Along) else here
                if base is not None and wanted != base:
                    return self.refuse(no.join_moves(e, part))
                base = wanted
            moved.append(at)
            start += self.extents[part] or 0
        if base is None and all(self.places[a.name].level == "input" for a in e.args):  # type: ignore[union-attr]
            return self.stored_runs(e, axis)
        if base is None and (base := self.axis_at.get(axis)) is None:
            return self.refuse(no.join_moves(e, of[0]))
        merged: dict[str, Along | str] = {}
        for at in moved:
            for other, x in at.items():
                if merged.setdefault(other, x) != x:
                    return self.refuse(no.elsewhere(e, other, merged[other], x, self.defs))
        places = [self.places[a.name] for a in e.args]  # type: ignore[union-attr]
        if any(p.level in FINISHED for p in places):
            return self.refuse(no.partial_run(e, self.defs))
        self.axis_at.setdefault(axis, base)
        return Place(
            "tile",
            (*merged.items(), (axis, base)),
            max(p.phase for p in places),
            because=next((p.because for p in places if p.because), None),
        )

    def stored_runs(self, e: Eqn, axis: str) -> Place | None:
        """Stored runs side by side: each begins where a column is known when compiling, or is lanes."""
        there = self.axis_at.get(axis)
        if isinstance(there, Along) and self.anchor.rows != (there.axis,) and not self.may_run(there.axis):
            if (self.extents[axis] or 0) <= MAX_LANES and self.maps:
                self.new_lanes.add(axis)
            free = tuple(a for a in self.anchor.cols if a != there.axis and self.extents[a] is None)
            return self.refuse(no.free_run(e, axis, free) if free else no.run_not_columns(e, axis))
        return Place("input")

    # --- outputs -------------------------------------------------------------------------------------------------------

    def output(self, tensor: Tensor, value: Var) -> None:
        p = self.places[value.name]
        at = dict(p.at)
        for axis in value.ty.axes:
            if axis not in at and not self.resolve(axis, at):
                return self.refuse(no.output_axis(tensor, axis, self.anchor))
        sides = {
            side: {x.axis for a in value.ty.axes if isinstance(x := at[a], Along) and self.anchor.side(x.axis) == side}
            for side in ("row", "col")
        }
        if p.level in FINISHED:
            need = {"row": set(self.anchor.rows), "col": {x.axis for x in p.along().values()}, "scalar": set()}[p.level]
            if sides["row"] | sides["col"] != need:
                return self.refuse(no.finished_output(tensor, need))
        elif p.level == "tile" or sides["col"] and sides["row"]:
            if sides["row"] != set(self.anchor.rows):
                return self.refuse(no.output_rows(tensor, self.anchor))
        elif (sides["row"] or sides["col"]) not in (set(), set(self.anchor.rows), set(self.anchor.cols)):
            return self.refuse(no.finished_output(tensor, set(self.anchor.rows if sides["row"] else self.anchor.cols)))
