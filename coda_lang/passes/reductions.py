"""Where reductions can be known: in the tile, in a later phase of it, or after the kernel in a finisher, perhaps in two steps.

In: an attempt and a reduction. Out: its `Place`, or a refusal. A total over rows and columns is split into two reductions, and so is
one over rows and the outer of the columns. Non-goals: everything that is no reduction (`place`).
"""

from __future__ import annotations

from dataclasses import replace

from .. import ops
from ..ir.graph import Atom, Eqn, Lit, Var
from ..ir.kernels import Along
from ..ir.types import Ty
from . import refusals as no
from .attempt import Attempt
from .state import LANE, MAX_COLUMNS, MAX_LANES, Place, fixed_product

FINISHED = ("row", "col", "scalar")
LATE = ("logsumexp", ops.DEVIATION.name)  # partials of several numbers: a total is reduced from the tiles' partials at once


class Reductions(Attempt):
    """The rules for reductions."""

    def met(self, e: Eqn, args: tuple[Atom, ...] | None = None) -> Place | None:
        """Values that meet at one position."""
        raise NotImplementedError

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
            tiled = self.tiled(e)
            if tiled is None:
                return self.refuse(no.input_reduction(e, axes))
            return self.reduce(tiled, axes)
        kept = {a: x for a, x in at.items() if a not in axes}
        along = {a: x for a, x in at.items() if a in axes and isinstance(x, Along)}
        if not along:
            return replace(p, at=tuple(kept.items()))
        sides = {self.anchor.side(x.axis) for x in along.values()}
        left = {self.anchor.side(x.axis) for x in kept.values() if isinstance(x, Along)}
        if p.level in FINISHED:
            if p.level == "col" and left == {"col"} and e.op not in LATE:
                return self.part(e, p, kept)
            if left or e.op in LATE:
                return self.refuse(no.partial(e, axes, kept, self.anchor) if left else no.late(e))
            return Place("scalar", tuple(kept.items()), stage=p.stage + 1, because=e)
        if "row" in sides and not set(self.anchor.rows) <= {x.axis for x in p.along().values()}:
            return self.refuse(no.partial(e, axes, kept, self.anchor))
        if sides == {"col"} and (e.out.name in self.groups or "col" in left):
            return self.group(e, p, kept, along)
        if sides == {"row", "col"} and left == {"col"} and e.op not in LATE:
            return self.halves(e, tuple(a for a in axes if a not in along or self.anchor.side(along[a].axis) == "row"), axes)
        if sides & left:
            return self.refuse(no.partial(e, axes, kept, self.anchor))
        if len(sides) == 2:
            return self.total(e, axes, kept, along)
        level = "col" if sides == {"row"} else "row" if self.anchor.rows else "scalar"
        held = {x.axis for x in at.values() if isinstance(x, Along)}
        need = self.anchor.cols if level == "col" else self.anchor.rows
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
        if self.takes_rows(frozenset(x.axis for x in columns)):
            return True
        size = fixed_product(self.program, tuple(x.axis for x in columns))
        return all(self.anchor.side(x.axis) == "col" and not x.start for x in columns) and size is not None and size <= MAX_COLUMNS

    def over_rows(self) -> frozenset[str]:
        """The reductions over whole rows that a row kernel keeps: all of them, once it keeps one."""
        kept = [self.defs[n] for n in self.wanted if self.takes_rows(self.reduced_columns(self.defs[n]))]
        return frozenset(e.out.name for e in self.eqns if kept and self.keepable_here(e))

    def keepable_here(self, e: Eqn) -> bool:
        return ops.TABLE[e.op].kind == "reduce" and self.keepable(e) and self.takes_rows(self.reduced_columns(e))

    def reduced_columns(self, e: Eqn) -> frozenset[str]:
        """The columns that a reduction runs over."""
        at = self.places[e.args[0].name].along() if isinstance(e.args[0], Var) else {}
        return frozenset(at[a].axis for a in at if a in e.attr("axes"))  # type: ignore[operator]

    def takes_rows(self, columns: frozenset[str]) -> bool:
        """Could a row kernel keep a statistic over these columns? Over all, if no tile holds them and tensors are stored by rows."""
        size = fixed_product(self.program, self.anchor.cols)
        if not self.maps or not self.anchor.rows or columns != set(self.anchor.cols) or size is not None and size <= MAX_COLUMNS:
            return False
        wide = {*self.anchor.rows, *self.anchor.cols}
        stored = [t.axes for t in self.program.inputs] + [o.tensor.axes for o in self.program.outputs]
        inner = [[x.axis for a in axes if isinstance(x := self.axis_at.get(a), Along)] for axes in stored]
        return all(axes[-1] in self.anchor.cols for axes in inner if wide <= set(axes))

    def group(self, e: Eqn, p: Place, kept: dict[str, Along | str], along: dict[str, Along]) -> Place | None:
        """A statistic over inner columns that one tile holds: known in the next phase."""
        axes = tuple(x.axis for x in along.values())
        if self.takes_rows(frozenset(axes)):
            return self.of_rows(e, p, kept)
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
        if any(not (group <= s or s <= group) for s in self.suffixes) or self.whole_rows:
            return self.refuse(no.crossing_groups(e, tuple(along)))
        if set(missing) - set(axes) and not any(frozenset(missing) == s for s in self.suffixes):
            return self.refuse(no.partial(e, tuple(along), kept, self.anchor))
        self.suffixes.add(group)
        return Place("tile", tuple(kept.items()), p.phase + 1, because=e)

    def of_rows(self, e: Eqn, p: Place, kept: dict[str, Along | str]) -> Place | None:
        """A statistic over whole rows, which the block that owns them knows once it has walked them."""
        group = frozenset(self.anchor.cols)
        if any(s != group for s in self.suffixes):
            return self.refuse(no.crossing_groups(e, tuple(e.attr("axes"))))  # type: ignore[arg-type]
        if self.outermost is not None:
            return self.refuse(no.partial_run(e, self.defs))
        self.suffixes.add(group)
        self.whole_rows = True
        return Place("tile", tuple(kept.items()), p.phase + 1, because=e)

    def lanes_instead(self, kept: list[str]) -> bool:
        """A few fixed columns beside a reduction over the free ones are better lanes: try again so."""
        size = fixed_product(self.program, tuple(kept))
        if size is None or size > MAX_LANES or len(kept) == len(self.anchor.cols):
            return False
        self.new_lanes |= set(kept)
        return True

    def total(self, e: Eqn, axes: tuple[str, ...], kept: dict[str, Along | str], along: dict[str, Along]) -> Place | None:
        """Over rows and columns: rows' results first, then their reduction. What is LATE takes all partials at once."""
        if e.op in LATE:
            return Place("scalar", tuple(kept.items()), stage=0, because=e)
        return self.halves(e, tuple(a for a in axes if a not in along or self.anchor.side(along[a].axis) == "col"), axes)

    def halves(self, e: Eqn, inner: tuple[str, ...], axes: tuple[str, ...]) -> Place | None:
        """A reduction as two: over `inner` first, then over the rest of `axes`."""
        value = e.args[0]
        assert isinstance(value, Var)
        outer = tuple(a for a in axes if a not in inner)
        taken = set(self.defs) | {t.name for t in self.program.inputs}
        name = next(n for n in (f"{e.out.name}_{'_'.join(outer)}{'_' * i}" for i in range(99)) if n not in taken)
        out = Var(name, Ty(e.out.ty.dtype, tuple(a for a in value.ty.axes if a not in inner)))
        first = next((d for d in self.eqns if d.op == e.op and d.args == e.args and set(d.attr("axes")) == set(inner)), None)  # type: ignore[call-overload]
        if first is None:
            first = Eqn(out, e.op, e.args, (("axes", inner),), e.span)
            found = self.reduce(first, inner)
            if found is None:
                return None
            self.places[name] = found
            self.defs[name] = first
            self.eqns.append(first)
        second = replace(e, args=(first.out,), attrs=(("axes", outer),))
        self.defs[e.out.name] = second
        return self.reduce(second, outer)

    def part(self, e: Eqn, p: Place, kept: dict[str, Along | str]) -> Place | None:
        """A reduction of finished columns over the outer of their axes: the innermost are left."""
        group = frozenset(x.axis for x in kept.values() if isinstance(x, Along))
        if any(not (group <= s or s <= group) for s in self.suffixes):
            return self.refuse(no.crossing_groups(e, tuple(e.attr("axes"))))  # type: ignore[arg-type]
        if self.outermost in group:
            return self.refuse(no.partial_run(e, self.defs))
        self.suffixes.add(group)
        return Place("col", tuple(kept.items()), stage=p.stage + 1, because=e)

    def gather(self, e: Eqn) -> Place | None:
        value, index = e.args
        axis = str(e.attr("axis"))
        p = self.places[value.name] if isinstance(value, Var) else Place("input")
        if p.level == "input":
            tiled = self.tiled(e) if isinstance(value, Var) else None
            return self.refuse(no.input_gather(e, axis)) if tiled is None else self.gather(tiled)
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
