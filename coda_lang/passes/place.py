"""Where each value can be known: in a tile, in a later phase of the same tile, or only after the kernel and its finisher.

In: a program and its possible anchors. Out: one `Placement`: the orientation that fits, and a `Place` for each value; or refusals that say
which value, which axis, why no tile can know it, what was tried, and an edit. A total over rows and columns is split into two reductions.
Non-goals: storage order (`layout`), which element a scalar is (`partition`).
"""

from __future__ import annotations

from dataclasses import replace

from .. import ops
from ..diagnostics.model import CodaError, Diagnostic
from ..ir.graph import Atom, Eqn, Lit, Program, Tensor, Var
from ..ir.kernels import Along
from ..ir.types import Ty
from . import refusals as no
from .anchor import candidates, lane_axes
from .state import LANE, MAX_COLUMNS, MAX_LANES, Anchor, Place, Placement, State, extents, fixed_product

FINISHED = ("row", "col", "scalar")
LATE = "logsumexp"  # its partials are pairs: a total is reduced from the tiles' partials at once


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
    _, program, placement = max(fitting, key=lambda f: f[0])
    return replace(state, program=program, placement=placement)


def _attempt(program: Program, anchor: Anchor, lanes: frozenset[str]) -> tuple[_Run, Program, Placement]:
    """One orientation, with as many statistics kept in the tile as it takes."""
    groups: frozenset[str] = frozenset()
    while True:
        run = _Run(program, anchor, groups, lanes)
        placed, placement = run.place()
        if not run.problems or run.wanted <= groups:
            return run, placed, placement
        groups |= run.wanted


def _columns_first(program: Program, placement: Placement) -> float:
    """How many stored outputs are contiguous along columns, less those along rows."""
    score = 0.0
    for o in program.outputs:
        last = next((a for a in reversed(o.tensor.axes) if placement.axis_at.get(a) != LANE), None)
        at = placement.places[o.value.name].along().get(last or "") or placement.axis_at.get(last or "")
        if isinstance(at, Along) and len(o.tensor.axes) > 1:
            score += 1 if placement.anchor.side(at.axis) == "col" else -1
    return score


class _Run:
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
        return program, Placement(self.anchor, self.places, self.axis_at, tuple(self.suffixes), self.outermost)

    def refuse(self, problem: Diagnostic) -> None:
        self.problems.append(problem)

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

    def resolve(self, axis: str, at: dict[str, Along | str]) -> bool:
        """Where an input's axis lies; an unknown fixed one becomes lanes."""
        if axis not in self.axis_at and self.extents[axis] is not None:
            self.axis_at[axis] = LANE
        if axis in self.axis_at:
            at[axis] = self.axis_at[axis]
        return axis in at

    def finished(self, e: Eqn, at: dict[str, Along | str], late: list[Place]) -> Place | None:
        """Values after the kernel: all along rows, all along columns, or scalars."""
        sides = {self.anchor.side(x.axis) for x in at.values() if isinstance(x, Along)}
        if len(sides) > 1:
            return self.refuse(no.outer(e, late, self.defs))
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
            if p.level != "input":
                here = at.pop(part)
                wanted = Along(here.axis, here.start - start) if isinstance(here, Along) else here
                if base is not None and wanted != base:
                    return self.refuse(no.join_moves(e, part))
                base = wanted
            moved.append(at)
            start += self.extents[part] or 0
        if base is None:
            return Place("input")
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

    # --- reductions ----------------------------------------------------------------------------------------------------

    def reduce(self, e: Eqn, axes: tuple[str, ...]) -> Place | None:
        value = e.args[0]
        if isinstance(value, Lit):
            return Place("input")
        p = self.places[value.name]
        at = dict(p.at)
        if p.level == "input":
            if all(self.axis_at.get(a) == LANE or (a not in self.axis_at and (self.extents[a] or 99) <= 8) for a in axes):
                self.axis_at.update({a: LANE for a in axes})
                return p
            return self.refuse(no.input_reduction(e, axes))
        kept = {a: x for a, x in at.items() if a not in axes}
        along = {a: x for a, x in at.items() if a in axes and isinstance(x, Along)}
        if not along:
            return replace(p, at=tuple(kept.items()))
        sides = {self.anchor.side(x.axis) for x in along.values()}
        left = {self.anchor.side(x.axis) for x in kept.values() if isinstance(x, Along)}
        if p.level in FINISHED:
            if left or e.op == LATE:
                return self.refuse(no.partial(e, axes, kept, self.anchor) if left else no.late(e))
            return Place("scalar", tuple(kept.items()), stage=p.stage + 1, because=e)
        if sides == {"col"} and (e.out.name in self.groups or "col" in left):
            return self.group(e, p, kept, along)
        if sides & left:
            return self.refuse(no.partial(e, axes, kept, self.anchor))
        if len(sides) == 2:
            return self.total(e, axes, kept, along)
        level = "row" if sides == {"col"} else "col"
        held = {x.axis for x in at.values() if isinstance(x, Along)}
        need = self.anchor.rows if level == "row" else self.anchor.cols
        if not set(need) <= held or any(isinstance(x, Along) and x.start for x in kept.values()):
            return self.refuse(no.partial(e, axes, kept, self.anchor))
        if level == "col" and any(self.extents[a] != self.extents[x.axis] for a, x in dict(p.at).items() if isinstance(x, Along)):
            return self.refuse(no.partial_run(e, self.defs))
        return Place(level, tuple(kept.items()), because=e)

    def keepable(self, e: Eqn) -> bool:
        """Could this reduction over all columns be a statistic within one tile?"""
        if e.op == ops.GATHER.name or not isinstance(e.args[0], Var) or self.places[e.args[0].name].level != "tile":
            return False
        columns = [x for a, x in self.places[e.args[0].name].along().items() if a in e.attr("axes")]  # type: ignore[operator]
        size = fixed_product(self.program, tuple(x.axis for x in columns))
        return all(self.anchor.side(x.axis) == "col" and not x.start for x in columns) and size is not None and size <= MAX_COLUMNS

    def group(self, e: Eqn, p: Place, kept: dict[str, Along | str], along: dict[str, Along]) -> Place | None:
        """A statistic over inner columns that one tile holds: known in the next phase."""
        axes = tuple(x.axis for x in along.values())
        size = fixed_product(self.program, axes)
        outer = [x.axis for x in kept.values() if isinstance(x, Along) and self.anchor.side(x.axis) == "col"]
        if size is None and self.lanes_instead(outer):
            return None
        if size is None and max(map(self.anchor.cols.index, outer)) > min(map(self.anchor.cols.index, axes)):
            return self.refuse(no.partial(e, tuple(along), kept, self.anchor))
        if size is None:
            return self.refuse(no.free_group(e, tuple(along), kept, self.extents))
        if size > MAX_COLUMNS or size % 8 and size not in (1, 2, 4):
            return self.refuse(no.wide_group(e, tuple(along), size, MAX_COLUMNS))
        if self.outermost in axes or any(x.start or self.extents[a] != self.extents[x.axis] for a, x in along.items()):
            return self.refuse(no.partial_run(e, self.defs))
        missing = [a for a in self.anchor.cols if a not in {x.axis for x in dict(p.at).values() if isinstance(x, Along)}]
        group = frozenset((*axes, *missing))
        if any(not (group <= s or s <= group) for s in self.suffixes):
            return self.refuse(no.crossing_groups(e, tuple(along)))
        if set(missing) - set(axes) and not any(frozenset(missing) == s for s in self.suffixes):
            return self.refuse(no.partial(e, tuple(along), kept, self.anchor))
        self.suffixes.add(group)
        return Place("tile", tuple(kept.items()), p.phase + 1, because=e)

    def lanes_instead(self, kept: list[str]) -> bool:
        """A few fixed columns beside a reduction over the free ones are better lanes: try again so."""
        size = fixed_product(self.program, tuple(kept))
        if size is None or size > MAX_LANES or len(kept) == len(self.anchor.cols):
            return False
        self.new_lanes |= set(kept)
        return True

    def total(self, e: Eqn, axes: tuple[str, ...], kept: dict[str, Along | str], along: dict[str, Along]) -> Place | None:
        """Over rows and columns: rows' results first, then their reduction. logsumexp takes all partials at once."""
        if e.op == LATE:
            return Place("scalar", tuple(kept.items()), stage=0, because=e)
        value = e.args[0]
        assert isinstance(value, Var)
        columns = tuple(a for a in axes if a not in along or self.anchor.side(along[a].axis) == "col")
        rows = tuple(a for a in axes if a not in columns)
        taken = set(self.defs) | {t.name for t in self.program.inputs}
        name = next(n for n in (f"{e.out.name}_{'_'.join(rows)}{'_' * i}" for i in range(99)) if n not in taken)
        out = Var(name, Ty(e.out.ty.dtype, tuple(a for a in value.ty.axes if a not in columns)))
        first = next((d for d in self.eqns if d.op == e.op and d.args == e.args and set(d.attr("axes")) == set(columns)), None)  # type: ignore[call-overload]
        if first is None:
            first = Eqn(out, e.op, e.args, (("axes", columns),), e.span)
            found = self.reduce(first, columns)
            if found is None:
                return None
            self.places[name] = found
            self.defs[name] = first
            self.eqns.append(first)
        second = replace(e, args=(first.out,), attrs=(("axes", rows),))
        self.defs[e.out.name] = second
        return self.reduce(second, rows)

    def gather(self, e: Eqn) -> Place | None:
        value, index = e.args
        axis = str(e.attr("axis"))
        p = self.places[value.name] if isinstance(value, Var) else Place("input")
        if p.level == "input":
            return self.refuse(no.input_gather(e, axis))
        here = dict(p.at)[axis]
        if here == LANE:
            met = self.met(e)
            return met if met is None else replace(met, at=tuple((a, x) for a, x in met.at if a != axis))
        assert isinstance(here, Along)
        side = self.anchor.side(here.axis)
        mine, other = (self.anchor.cols, self.anchor.rows) if side == "col" else (self.anchor.rows, self.anchor.cols)
        held = {x.axis for x in p.along().values()}
        if (
            p.level != "tile"
            or mine != (here.axis,)
            or here.start
            or self.extents[axis] != self.extents[here.axis]
            or not set(other) <= held
        ):
            return self.refuse(no.partial_gather(e, axis))
        at: dict[str, Along | str] = {}
        if isinstance(index, Var):
            if self.places[index.name].level != "input":
                return self.refuse(no.computed_index(e, self.defs))
            for a in index.ty.axes:
                if not self.resolve(a, at):
                    return self.refuse(no.unknown_axis(e, a, self.anchor))
            if any(isinstance(x, Along) and self.anchor.side(x.axis) == side for x in at.values()):
                return self.refuse(no.partial_gather(e, axis))
        kept = {a: x for a, x in p.at if a != axis}
        return Place("row" if side == "col" else "col", tuple((kept | at).items()), because=e)

    # --- outputs -------------------------------------------------------------------------------------------------------

    def output(self, tensor: Tensor, value: Var) -> None:
        p = self.places[value.name]
        at = dict(p.at)
        for axis in value.ty.axes:
            if axis not in at and not self.resolve(axis, at):
                return self.refuse(no.output_axis(tensor, axis, self.anchor))
        lanes = [a for a in value.ty.axes if at[a] == LANE]
        sides = {
            side: {x.axis for a in value.ty.axes if isinstance(x := at[a], Along) and self.anchor.side(x.axis) == side}
            for side in ("row", "col")
        }
        if p.level in FINISHED:
            need = {"row": set(self.anchor.rows), "col": set(self.anchor.cols), "scalar": set()}[p.level]
            if lanes or sides["row"] | sides["col"] != need:
                return self.refuse(no.finished_output(tensor, lanes, need))
        elif p.level == "tile" or sides["col"] and sides["row"]:
            if sides["row"] != set(self.anchor.rows):
                return self.refuse(no.output_rows(tensor, self.anchor))
        elif lanes or (sides["row"] or sides["col"]) not in (set(), set(self.anchor.rows), set(self.anchor.cols)):
            return self.refuse(no.finished_output(tensor, lanes, set(self.anchor.rows if sides["row"] else self.anchor.cols)))
