"""Finishers: the second stage of reductions, level by level (partials, then a body for each row or column, then scalars).

In: a placed program and the last phase of its Gemm. Out: `Finish` kernels, and the sinks that feed them. Work tensors carry partials from
the Gemm to a finisher, and finished values from one finisher to a later one. Non-goals: what the tile does (`partition`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product as every

from .. import ops
from ..ir.graph import Atom, Eqn, Lit, Output, Program, Var
from ..ir.kernels import Access, Along, At, Finish, Partial, Point, Read, Reduce, Result, Sink
from ..ir.types import F32, Ty
from ..ops.builder import Value
from .scalars import Env, Names, Ports, Scope, reduced_name, reduction, run_of
from .state import Place, Placement, extents, is_temporary


@dataclass
class Level:
    """A finisher in the making: all values of one level and stage."""

    name: str
    level: str
    scope: Scope
    ports: Ports
    partials: dict[object, Partial] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    stage: int = 0
    axes: tuple[str, ...] = ()


class Finishers:
    """All finishers of one program. `body` is the Gemm's last phase, `sinks` its sinks, which grow."""

    def __init__(self, program: Program, placement: Placement, body: Scope, sinks: list[Sink]) -> None:
        self.program, self.placement, self.body, self.sinks = program, placement, body, sinks
        self.anchor = placement.anchor
        self.extents = extents(program)
        self.reduced: dict[object, str] = {}
        self.levels: dict[tuple, Level] = {}
        self.works: set[str] = set()

    def kernels(self) -> list[Finish]:
        """The finishers in launch order."""
        return [self._finish(x) for x in sorted(self.levels.values(), key=lambda x: x.stage)]

    def scopes(self) -> Iterator[Scope]:
        return (x.scope for x in self.levels.values())

    def _place(self, var: Var) -> Place:
        return self.placement.places[var.name]

    def axes(self, place: Place) -> tuple[str, ...]:
        """The kernel axes along which a finished value has positions."""
        held = {x.axis for x in place.along().values()}
        return tuple(a for a in (self.anchor.cols if place.level == "col" else self.anchor.rows) if a in held)

    def level(self, level: str, stage: int, axes: tuple[str, ...] = ()) -> Level:
        """The finisher of a level and stage; `axes` where they are not all rows or all columns."""
        axes = axes or {"row": self.anchor.rows, "col": self.anchor.cols, "scalar": ()}[level]
        key = (level, stage, axes)
        if key not in self.levels:
            names = Names()
            ports = Ports(self.program, self.placement, names, tiles=False)
            word = {"row": "rows", "col": "cols", "scalar": "total", "out": "_".join(axes)}[level]
            taken = {x.name for x in self.levels.values()}
            name = f"{self.program.name}_{word}"
            name = next(n for n in (name, f"{name}_{stage}", *(f"{name}_{stage}_{i}" for i in range(99))) if n not in taken)
            made = Level(name, level, None, ports, stage=stage, axes=axes)  # type: ignore[arg-type]
            made.scope = Scope(self.program, ports, lambda scope, e, env: self._finished(made, e, env), names)
            self.levels[key] = made
        return self.levels[key]

    def spread(self, o: Output, value: Var, earlier: Level, positions: list[Env]) -> None:
        """An output with lanes of finished values: one value a lane is left, then a finisher over the output's own axes takes its own."""
        into = self.level("out", earlier.stage + 1, tuple(o.tensor.axes))
        b, f = into.scope.builder, into.scope
        chosen: Value | None = None
        for env in reversed(positions):
            lanes = {a: x for a, x in env.items() if isinstance(x, int)}
            work = self._left(earlier, earlier.scope.value(value, env), earlier.scope.hint(value.name, lanes))
            at = tuple((x.axis, Along(a)) for a in o.tensor.axes if isinstance(x := env[a], Along))
            part = b.value(self._read(into, work, at, f.hint(value.name, lanes)))
            if chosen is None:
                chosen = part
            else:
                here = [b.eq(b.value(f.index(Along(a))), i) for a, i in lanes.items()]
                chosen = b.where(functools.reduce(lambda x, y: x & y, here), part, chosen)
        assert chosen is not None
        into.results.append(Result(o.tensor.name, o.tensor.dtype.name, chosen.atom, tuple((a, a) for a in o.tensor.axes)))

    def _finish(self, x: Level) -> Finish:
        over = "" if x.level == "scalar" else "part" if x.level == "col" and x.axes != self.anchor.cols else x.level
        return Finish(x.name, over, x.axes, tuple(x.partials.values()), x.scope.eqns, tuple(x.results), x.ports.all())

    def _finished(self, into: Level, e: Eqn, env: Env) -> Atom | None:
        """What a finisher receives: partials of the Gemm, values that an earlier finisher left."""
        place = self._place(e.out)
        if place.level not in ("row", "col", "scalar"):
            return None
        if place.level != into.level or place.level == "col" and self.axes(place) != into.axes:  # made by another level: read what it left
            return self._import(into, e, env, place)
        if ops.TABLE[e.op].kind != "reduce":
            return None
        argument = self._place(e.args[0]) if isinstance(e.args[0], Var) else None
        if argument is None or not any(isinstance(argument.along().get(a), Along) for a in _reduced(e)):
            return None  # lanes of finished values
        if argument.level == "tile":
            return self._picked(into, e, env) if e.op == ops.GATHER.name else self._partials(into, e, env)
        return self._second(into, e, env, argument)

    def _work(self, hint: str) -> str:
        name, n = hint, 2
        taken = self.works | {t.name for t in self.program.inputs} | {o.tensor.name for o in self.program.outputs}
        while name in taken:
            name, n = f"{hint}_{n}", n + 1
        self.works.add(name)
        return name

    def _partial(self, into: Level, key: object, work: str, kind: str, hint: str) -> Var:
        if key not in into.partials:
            into.partials[key] = Partial(Var(into.scope.names.take(hint), Ty(F32)), work, kind)
        return into.partials[key].var

    def _partials(self, into: Level, e: Eqn, env: Env) -> Atom:
        """A reduction over all columns, all rows, or both, of a value of the tile."""
        axes = _reduced(e)
        at = dict(self._place(e.args[0]).at)  # type: ignore[arg-type]
        along: Env = {a: x for a, x in at.items() if isinstance(x, Along)}
        lanes = [a for a in axes if a not in along]
        kind, mean = reduction(e)
        kept = "col" if into.level == "col" else "row"
        held = {x.axis for x in along.values() if isinstance(x, Along)}
        missing = [a for a in self.anchor.cols if a not in held] if kept == "row" else []
        scope = self.body
        choices = list(every(*[range(self.extents[a] or 0) for a in lanes]))
        outer = {a: x for a, x in env.items() if isinstance(x, int)}

        def reduced(kind: str, batches: list[list[tuple[int, ...]]], name: str) -> list[Atom]:
            parts: list[Atom] = []
            for batch in batches:
                named = {**outer, **(dict(zip(lanes, batch[0])) if len(batches) > 1 else {})}
                hint = scope.hint(name, named)
                key = (kind, e.args, tuple(sorted(axes)), tuple(sorted(outer.items())), tuple(batch))
                if key not in self.reduced:
                    values = [scope.value(e.args[0], {**along, **outer, **dict(zip(lanes, c))}) for c in batch]
                    value = scope.masked(scope.combine(kind, values, e) if len(values) > 1 else values[0], kind, missing)
                    self.reduced[key] = self._work(f"{hint}_partials")
                    self.sinks.append(Reduce(kind, kept, self.reduced[key], value, run_of(at, self.extents)))
                parts.append(self._partial(into, key, self.reduced[key], kind, hint))
            return parts

        apart = [[c] for c in choices]
        parts = reduced(kind, apart if kind in ("lse", "moments") else [choices], reduced_name(e))
        if kind == "moments":
            return self._deviation(into, e, parts, lambda: reduced("sum", apart, f"sum_{'_'.join(axes)}"), lanes, missing)
        total = into.scope.combine("max" if kind == "amax" else kind, parts, e) if len(parts) > 1 else parts[0]
        return self._averaged(into, total, e, axes, env) if mean else total

    def _deviation(
        self, into: Level, e: Eqn, parts: list[Atom], sums: Callable[[], list[Atom]], lanes: list[str], missing: list[str]
    ) -> Atom:
        """Σ (x − mean)² from the parts of each lane; a value that is the same at several columns was taken as often."""
        scope = into.scope
        often = into.scope.counts(tuple(missing))
        parts = [scope.divide(p, often, e, "") for p in parts]
        count = into.scope.counts(tuple(a for a in _reduced(e) if a not in lanes))
        return scope.pooled(parts, sums(), count, e) if len(parts) > 1 else parts[0]

    def _averaged(self, into: Level, total: Atom, e: Eqn, axes: tuple[str, ...], env: Env) -> Atom:
        return into.scope.divide(total, into.scope.counts(axes), e, into.scope.hint(e.out.name, env))

    def _picked(self, into: Level, e: Eqn, env: Env) -> Atom:
        """gather: the position whose column is the index writes its value; an index outside gives NaN."""
        axis = str(e.attr("axis"))
        at = dict(self._place(e.args[0]).at)  # type: ignore[arg-type]
        here = at[axis]
        assert isinstance(here, Along) and isinstance(e.args[0], Var)
        scope, b = self.body, self.body.builder
        outer = {a: x for a, x in env.items() if isinstance(x, int)}
        key = (e.out.name, tuple(sorted(outer.items())))
        index = e.args[1]
        named = f"{e.args[0].name}_at_{index.name if isinstance(index, Var) else index.value}"
        hint = scope.hint(named if is_temporary(e.out.name) else e.out.name, env)
        if key not in self.reduced:
            along: Env = {a: x for a, x in at.items() if isinstance(x, Along)}
            value = scope.value(e.args[0], {**along, **outer})
            chosen = b.eq(b.value(scope.index(here)), b.value(scope.value(e.args[1], self._index_env(e, outer)))).atom
            self.reduced[key] = self._work(hint)
            kept = self.anchor.rows if into.level == "row" else self.anchor.cols
            self.sinks.append(Point(Access(self.reduced[key], tuple((a, Along(a)) for a in kept)), value, chosen))
        picked = self._partial(into, key, self.reduced[key], "only", hint)
        f = into.scope
        position = f.builder.value(f.value(e.args[1], self._index_env(e, outer)))
        inside = (position >= 0) & (position < f.builder.value(f.size((axis,))))
        return f.builder.where(inside, f.builder.value(picked), Lit(float("nan"), F32)).atom

    def _index_env(self, e: Eqn, outer: dict[str, int]) -> Env:
        index = e.args[1]
        if not isinstance(index, Var):
            return {}
        known = self.placement.axis_at
        return {a: outer.get(a, x) if isinstance(x := known[a], Along) else outer[a] for a in index.ty.axes}

    def _second(self, into: Level, e: Eqn, env: Env, argument: Place) -> Atom:
        """A reduction over finished rows (or columns): those are left in a work tensor, whose elements are the parts."""
        axes = _reduced(e)
        along: Env = dict(argument.along())
        lanes = [a for a in axes if a not in along]
        kind, mean = reduction(e)
        earlier = self.level(argument.level, argument.stage, self.axes(argument) if argument.level == "col" else ())
        parts: list[Atom] = []
        for choice in every(*[range(self.extents[a] or 0) for a in lanes]):
            chosen = {**{a: x for a, x in env.items() if isinstance(x, int)}, **dict(zip(lanes, choice))}
            value = earlier.scope.value(e.args[0], {**along, **chosen})
            key = (kind, e.args, tuple(sorted(chosen.items())))
            work = self._left(earlier, value, earlier.scope.hint(e.args[0].name, chosen))  # type: ignore[union-attr]
            parts.append(self._partial(into, key, work, kind, into.scope.hint(reduced_name(e), chosen)))
        total = into.scope.combine("max" if kind == "amax" else kind, parts, e) if len(parts) > 1 else parts[0]
        return self._averaged(into, total, e, axes, env) if mean else total

    def _left(self, level: Level, value: Atom, hint: str) -> str:
        """The work tensor in which a finisher leaves a value for a later one."""
        for r in level.results:
            if r.value == value and r.tensor in self.works:
                return r.tensor
        work = self._work(f"{hint}_finished")
        level.results.append(Result(work, "f32", value))
        return work

    def _import(self, into: Level, e: Eqn, env: Env, place: Place) -> Var:
        """A scalar that an earlier finisher left, read at every position."""
        assert place.level == "scalar", f"{e.out.name} of level {place.level} is wanted in {into.level}"
        earlier = self.level(place.level, place.stage)
        work = self._left(earlier, earlier.scope.value(e.out, env), earlier.scope.hint(e.out.name, env))
        return self._read(into, work, (), e.out.name)

    @staticmethod
    def _read(into: Level, work: str, at: tuple[tuple[str, At], ...], hint: str) -> Var:
        """An element of a work tensor."""
        key = ("left", work)
        if key not in into.ports.ports:
            into.ports.ports[key] = Read((Var(into.scope.names.take(hint), Ty(F32)),), Access(work, at))
        return into.ports.ports[key].vars[0]


def _reduced(e: Eqn) -> tuple[str, ...]:
    return (str(e.attr("axis")),) if e.op == ops.GATHER.name else tuple(e.attr("axes"))  # type: ignore[arg-type]
