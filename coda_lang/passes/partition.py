"""From placed values to kernels: one Gemm with its ports, phases and sinks, then finishers level by level.

In: a program and its `Placement`. Out: a `Plan` (storage undecided). Outputs are asked for, and everything that they need follows: a value
of the tile becomes a store, a reduction over all columns or rows a partial and a finisher, a statistic a phase. Non-goals: refusing
(`place` has done it), order of axes and storage (`layout`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product as every

from .. import ops
from ..ir.graph import Atom, Eqn, Output, Var
from ..ir.kernels import (
    Access,
    Along,
    Gemm,
    Operand,
    Phase,
    Plan,
    Point,
    Product,
    Result,
    Sink,
    Statistic,
    Store,
)
from ..ir.types import F32, Ty
from .finishers import Finishers
from .scalars import Env, Names, Ports, Scope, reduced_name, reduction, run_of
from .state import LANE, Anchor, Place, State, Stored, extents, is_temporary


def partition(state: State) -> State:
    """The pass."""
    return replace(state, plan=_Partition(state).plan())


class _Partition:
    """The Gemm of a plan; `Finishers` makes the rest."""

    def __init__(self, state: State) -> None:
        assert state.placement is not None
        self.program, self.placement = state.program, state.placement
        self.notes = state.notes
        self.anchor: Anchor = state.placement.anchor
        self.extents = extents(self.program)
        self.accumulators = {a.var.name: a for a in self.anchor.accumulators}
        self.names = Names()
        self.ports = Ports(self.program, self.placement, self.names)
        self.segments: dict[tuple[str, tuple[tuple[str, int], ...]], Var] = {}
        self.scopes: list[Scope] = []
        self.statistics: list[dict[object, Statistic]] = []
        last = max([p.phase for name, p in self.placement.places.items() if p.level == "tile"], default=0)
        for phase in range(last + 1):
            self.scopes.append(Scope(self.program, self.ports, self._leaf(phase), self.names))
            self.statistics.append({})
        self.sinks: list[Sink] = []
        self.finishers = Finishers(self.program, self.placement, self.scopes[-1], self.sinks)

    def plan(self) -> Plan:
        for o in self.program.outputs:
            self._output(o)
        gemm = Gemm(
            self.program.name,
            self.anchor.rows,
            self.anchor.cols,
            tuple(self._segments().values()),
            self._products(),
            self._phases(),
            self.ports.all(),
            tuple(self.sinks),
            self.placement.whole_rows,
        )
        return Plan(self.program, (gemm, *self.finishers.kernels()), notes=self.notes)

    # --- outputs -------------------------------------------------------------------------------------------------------

    def _place(self, var: Var) -> Place:
        return self.placement.places[var.name]

    def _env(self, var: Var) -> dict[str, Along | str]:
        """Where each axis of an output lies."""
        at = dict(self._place(var).at)
        return {a: at.get(a, self.placement.axis_at.get(a, LANE)) for a in var.ty.axes}

    def _positions(self, at: dict[str, Along | str]) -> list[Env]:
        """One position for each choice of lanes."""
        lanes = [a for a, x in at.items() if not isinstance(x, Along)]
        fixed = {a: x for a, x in at.items() if isinstance(x, Along)}
        return [{**fixed, **dict(zip(lanes, choice))} for choice in every(*[range(self.extents[a] or 0) for a in lanes])]

    def _output(self, o: Output) -> None:
        at = self._env(o.value)
        axes = {x.axis for x in at.values() if isinstance(x, Along)}
        place = self._place(o.value)
        rows, cols = axes >= set(self.anchor.rows) and bool(self.anchor.rows), axes >= set(self.anchor.cols)
        if place.level == "tile" or (place.level == "input" and rows and bool(self.anchor.cols) and (cols or axes > set(self.anchor.rows))):
            if cols:
                self._store(o, at)
            else:
                self._points(o, at, axes)
            return
        level = place.level if place.level != "input" else "row" if axes and rows else "col" if axes else "scalar"
        into = self.finishers.level(level, place.stage, self.finishers.axes(place) if place.level == "col" else ())
        value = self._unrounded(o.value, o.tensor.dtype.name)
        along: dict[str, Along] = {a: x for a, x in at.items() if isinstance(x, Along)}
        self._call(value, o)
        if len(along) < len(at):
            self.finishers.spread(o, value, into, self._positions({a: at[a] for a in o.tensor.axes}))
            return
        axes_of = tuple((a, along[a].axis) for a in o.tensor.axes)
        into.results.append(Result(o.tensor.name, o.tensor.dtype.name, into.scope.value(value, dict(along)), axes_of))

    def _unrounded(self, var: Var, dtype: str) -> Var:
        """A value that is rounded for its output only is rounded by the store."""
        e = self.scopes[-1].defs.get(var.name)
        if e is None or e.op != ops.CAST.name or e.attr("dtype") != dtype or not isinstance(e.args[0], Var):
            return var
        used = sum(a == var for d in self.program.eqns for a in d.args)
        return var if used else e.args[0]

    def _call(self, value: Var, o: Output) -> None:
        """A temporary that is stored as an output has the output's name."""
        e = self.scopes[-1].defs.get(value.name)
        names = {value.name: o.value.name} if value != o.value else {}
        if e is not None and e.op == ops.PACK.name:
            names |= {a.name: f"{o.value.name}_{e.attr('axis')}{i}" for i, a in enumerate(e.args) if isinstance(a, Var)}
        for scope in [*self.scopes, *self.finishers.scopes()]:
            for old, new in names.items():
                if is_temporary(old) and old not in self.accumulators:
                    scope.called.setdefault(old, new)

    def _scalar(self, var: Var, env: Env) -> Atom:
        return self.scopes[-1].value(var, env)

    def _store(self, o: Output, at: dict[str, Along | str]) -> None:
        stored = o.tensor
        value = self._unrounded(o.value, stored.dtype.name)
        order = tuple(stored.axes)
        pair = self.ports.pair(stored, tuple((a, x if isinstance(x := at[a], Along) else 0) for a in order))
        run = run_of(at, self.extents)
        groups: dict[tuple, list[Atom]] = {}
        self._call(value, o)
        for env in self._positions({a: at[a] for a in order}):
            key = tuple((a, 0 if a == pair else env[a]) for a in order)
            groups.setdefault(key, []).append(self._scalar(value, env))
        for key, values in groups.items():
            self.sinks.append(Store(Access(stored.name, key, pair), tuple(values), stored.dtype.name, run))

    def _points(self, o: Output, at: dict[str, Along | str], axes: set[str]) -> None:
        """A value that lacks columns: the first position of each group writes it."""
        missing = [a for a in self.anchor.cols if a not in axes]
        value = self._unrounded(o.value, o.tensor.dtype.name)
        for env in self._positions(at):
            first = self.scopes[-1].first(missing, run_of(at, self.extents))
            access = Access(o.tensor.name, tuple((a, env[a]) for a in o.tensor.axes))
            once = len(missing) == len(self.anchor.cols)
            self.sinks.append(Point(access, self._scalar(value, env), first, o.tensor.dtype.name, once))

    # --- the Gemm ------------------------------------------------------------------------------------------------------

    def _leaf(self, phase: int):
        def leaf(scope: Scope, e: Eqn, env: Env) -> Atom | None:
            if e.out.name in self.accumulators:
                return self._accumulator(e, env)
            if ops.TABLE[e.op].kind != "reduce" or e.op == ops.GATHER.name or not isinstance(e.args[0], Var):
                return None
            return self._statistic(scope, e, env, phase)

        return leaf

    def _accumulator(self, e: Eqn, env: Env) -> Var:
        for axis, at in env.items():
            assert at == Along(axis) or isinstance(at, int), f"{e.out.name} is wanted at {axis}={at}"
        key = (e.out.name, tuple((a, x) for a, x in env.items() if isinstance(x, int)))
        if key not in self.segments:
            self.segments[key] = Var(self.names.take(self._accumulator_name(e.out, env)), Ty(F32))
        return self.segments[key]

    def _accumulator_name(self, var: Var, env: Env) -> str:
        """The source's name of the product or of its lane; `acc_gate` if only the rounded value has one."""
        scope = self.scopes[-1]
        named = scope.hint(var.name, env)
        if not is_temporary(var.name) or named != scope.hint("t0", env).replace("t0", var.name):
            return named
        rounded = [e.out.name for e in self.program.eqns if e.op == ops.CAST.name and e.args[0] == var and not is_temporary(e.out.name)]
        return "acc_" + scope.hint(rounded[0], env) if rounded and any(isinstance(x, int) for x in env.values()) else scope.hint("acc", env)

    def _statistic(self, scope: Scope, e: Eqn, env: Env, phase: int) -> Atom | None:
        """A reduction over a group of columns: computed by an earlier phase, received by this one."""
        axes: tuple[str, ...] = e.attr("axes")  # type: ignore[assignment]
        at = dict(self._place(e.args[0]).at)  # type: ignore[arg-type]
        along = {a: at[a] for a in axes if isinstance(at.get(a), Along)}
        if not along:
            return None
        own = self._place(e.out).phase
        assert own <= phase and own > 0, f"{e.out.name} of phase {own} is wanted in phase {phase}"
        kind, mean = reduction(e)
        held = {x.axis for x in at.values() if isinstance(x, Along)}
        missing = [a for a in self.anchor.cols if a not in held]
        over = tuple(a for a in self.anchor.cols if a in {x.axis for x in along.values() if isinstance(x, Along)} or a in missing)
        lanes = [a for a in axes if a not in along]
        before = self.scopes[own - 1]

        def reduced(kind: str, name: str) -> list[Atom]:
            parts: list[Atom] = []
            for choice in every(*[range(self.extents[a] or 0) for a in lanes]):
                here: Env = {**env, **along, **dict(zip(lanes, choice))}  # type: ignore[dict-item]
                key = (kind, e.args, over, tuple(sorted((a, str(x)) for a, x in here.items())))
                if key not in self.statistics[own - 1]:
                    value = before.masked(before.value(e.args[0], here), kind, missing)
                    hint = scope.hint(name, {**env, **dict(zip(lanes, choice))})
                    self.statistics[own - 1][key] = Statistic(Var(self.names.take(hint), Ty(F32)), kind, over, value)
                parts.append(self.statistics[own - 1][key].var)
            return parts

        parts = reduced(kind, reduced_name(e))
        if kind == "moments":
            parts = [scope.divide(p, scope.counts(tuple(missing)), e, "") for p in parts]
            count = scope.counts(tuple(along))
            return scope.pooled(parts, reduced("sum", f"sum_{'_'.join(axes)}"), count, e) if lanes else parts[0]
        total = scope.combine("max" if kind == "amax" else kind, parts, e)
        return scope.divide(total, scope.counts(axes), e, scope.hint(e.out.name, env)) if mean else total

    def _segments(self) -> dict[tuple[str, tuple[tuple[str, int], ...]], Var]:
        """Accumulators in the order of products and lanes, not of first use; at least one where there is a product."""
        order = {a.var.name: i for i, a in enumerate(self.anchor.accumulators)}
        if not self.segments:
            for acc in self.anchor.accumulators[:1]:
                lanes = [(a, 0) for a in acc.var.ty.axes if self.placement.axis_at[a] == LANE]
                self.segments[acc.var.name, tuple(lanes)] = Var(self.names.take(acc.var.name), Ty(F32))
        return dict(sorted(self.segments.items(), key=lambda s: (order[s[0][0]], s[0][1])))

    def _products(self) -> tuple[Product, ...]:
        out = []
        for i, term in enumerate(self.anchor.accumulators[0].terms if self.anchor.accumulators else ()):
            bs = []
            for name, lanes in self._segments():
                t = self.accumulators[name].terms[i]
                bs.append(_operand(t.b, t.over, dict(lanes)))
            out.append(Product(_operand(term.a, term.over, {}), tuple(bs), term.over))
        return tuple(out)

    def _phases(self) -> tuple[Phase, ...]:
        return tuple(Phase(s.eqns, tuple(stats.values())) for s, stats in zip(self.scopes, self.statistics))


def _operand(stored: Stored, over: tuple[str, ...], lanes: dict[str, int]) -> Operand:
    """The matrix of a stored operand; contracted axes in storage order."""
    pinned = dict(stored.at)
    outer, inner = [], []
    for own, name in stored.axes:
        if name in over:
            inner.append((own, name))
        elif name in lanes:
            pinned[own] = lanes[name]
        else:
            outer.append((own, name))
    return Operand(stored.tensor, tuple(outer), tuple(inner), tuple(sorted(pinned.items())))
