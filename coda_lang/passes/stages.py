"""Cutting a program into stages, one kernel with its finishers each, by what has to be stored in between.

In: a program with any number of products, simplified. Out: stages in launch order, each a `Program` of its own whose inputs are
tensors of the signature or intermediates, and whose outputs are results or intermediates. Every stage has one group of products that share
a kernel, or none (a map kernel). Running the stages one after the other is the program. Non-goals: whether a stage fits a tile
(`place`), storage (`layout`).

Each value has a *home*. A product lives in its own stage, element-wise values with their latest operand, so they run in its epilogue.
A reduction over all rows or columns is known only after its stage, so what meets it again needs a later stage; so does whatever reads a
cotangent, which no stage of the forward may wait for. A value made from stored tensors alone has no home: it is computed where it is
used. Where a stage needs a value of an earlier one, it is rebuilt from what is stored anyway if that is possible, else stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from .. import ops
from ..diagnostics.model import InternalError
from ..ir.graph import Atom, Eqn, Output, Program, Tensor, Var
from .groups import Group, groups, reordered
from .state import MAX_COLUMNS, definitions, fixed_product, nominal

VIEWS = (ops.RENAME.name, ops.LANE.name, ops.STOP.name)


@dataclass(frozen=True)
class Home:
    """In which stage a value lives (None: in none, it is computed where used), within the tile or after it.

    Stages with a greater number than `since` can know it.
    """

    stage: int | None
    since: int = -1
    finished: bool = False


@dataclass
class _Stage:
    """A stage in the making; `number` orders stages. `over` is every axis of its kernel."""

    number: int
    over: frozenset[str]
    group: Group | None = None
    stored: list[Var] = field(default_factory=list)


@dataclass(frozen=True)
class Stages:
    """Programs in launch order, and outputs that are an input as it is: (output, input)."""

    programs: tuple[Program, ...]
    same: tuple[tuple[str, str], ...] = ()


def cut(program: Program, late: frozenset[str] = frozenset(), stored: frozenset[str] = frozenset()) -> Stages:
    """The stages. `late`: inputs that arrive only after all of the forward (cotangents). `stored`: values to be kept in any case."""
    program = _permuted(program)
    after = _after(program, late)
    program = replace(program, eqns=tuple(sorted(program.eqns, key=lambda e: e.out.name in after)))
    found = groups(program, after)
    program = reordered(program, found)
    return _Cut(program, found, late, after, stored).stages()


def _permuted(program: Program) -> Program:
    """Outputs that are an input in another storage order are values of their own: a kernel rearranges them."""
    stored = {t.name: t.axes for t in program.inputs}
    taken = set(stored) | {e.out.name for e in program.eqns} | {o.tensor.name for o in program.outputs}
    eqns, outputs = list(program.eqns), []
    for o in program.outputs:
        if o.value.name in stored and stored[o.value.name] != o.tensor.axes:
            name = next(n for n in (f"{o.value.name}_as_{o.tensor.name}{'_' * i}" for i in range(99)) if n not in taken)
            eqns.append(Eqn(Var(name, o.value.ty), ops.STOP.name, (o.value,)))
            o = replace(o, value=eqns[-1].out)
        outputs.append(o)
    return replace(program, eqns=tuple(eqns), outputs=tuple(outputs))


def _after(program: Program, late: frozenset[str]) -> frozenset[str]:
    """The values that depend on a late input."""
    found = set(late)
    for e in program.eqns:
        if any(isinstance(a, Var) and a.name in found for a in e.args):
            found.add(e.out.name)
    return frozenset(found)


class _Cut:
    def __init__(
        self, program: Program, found: tuple[Group, ...], late: frozenset[str], after: frozenset[str], stored: frozenset[str]
    ) -> None:
        self.program = program
        self.inputs = {t.name: t for t in program.inputs}
        self.defs = definitions(program)
        self.at = {e.out.name: i for i, e in enumerate(program.eqns)}
        self.products = [e for e in program.eqns if e.op == ops.CONTRACT.name]
        self.results: dict[str, list[Output]] = {}
        for o in program.outputs:
            self.results.setdefault(o.value.name, []).append(o)
        self.size = nominal(program)
        self.group_of = {name: g for g in found for name in g.members}
        self.stages_by_number: dict[int, _Stage] = {}
        self.tensors: dict[str, Tensor] = {}  # the stored forms that were asked for
        self.after = after
        self.barrier = barrier = max([self.at[e.out.name] for e in program.eqns if e.out.name not in after], default=-1)
        self.home: dict[str, Home] = {t.name: Home(None, barrier if t.name in late else -1) for t in program.inputs}
        self.again = late & set(self.defs)
        self.kept = {o.value.name for o in program.outputs} | stored
        for e in program.eqns:
            self.home[e.out.name] = self._home(e)

    # --- homes ---------------------------------------------------------------------------------------------------------

    def _home(self, e: Eqn) -> Home:
        if e.out.name in self.group_of:
            return self._product(e)
        homes = [self.home[a.name] for a in e.args if isinstance(a, Var)]
        since = max((h.since for h in homes), default=-1)
        if e.out.name in self.again and not self._finishes(e) and all(h.stage is None or h.stage <= self.barrier for h in homes):
            return Home(None, max(since, self.barrier))
        tiles = sorted({h.stage for h in homes if h.stage is not None and not h.finished}, reverse=True)
        if not tiles:
            return self._from_stored(e, homes, since)
        stage = self.stages_by_number[tiles[0]]
        if since < stage.number and self._fits(e, stage):
            return self._leaving(e, stage)
        return self._from_stored(e, [], max(since, stage.number))

    def _from_stored(self, e: Eqn, homes: list[Home], since: int) -> Home:
        """A value made of stored and finished values only."""
        if self._finishes(e):
            return self._leaving(e, self._map_stage(e, since))
        finished = [h for h in homes if h.finished]
        known = [a.ty.axes for a in e.args if isinstance(a, Var) and self.home[a.name].finished]
        along = any(set(e.out.ty.axes) <= set(axes) for axes in known)
        here = (since > self.barrier) == (e.out.name in self.after)  # the last stage before the barrier is no place for what is late
        if finished and along and since == max(h.since for h in finished) and here:  # it runs in the finisher
            return Home(max(h.stage for h in finished if h.stage is not None), since, True)
        return Home(None, since)

    def _leaving(self, e: Eqn, stage: _Stage) -> Home:
        return Home(stage.number, stage.number, True) if self._finishes(e, stage) else Home(stage.number, -1)

    def _finishes(self, e: Eqn, stage: _Stage | None = None) -> bool:
        """Is e a reduction that leaves the tile? One over lanes or a small group of fixed columns stays."""
        if ops.TABLE[e.op].kind != "reduce" or not isinstance(e.args[0], Var):
            return False
        if e.op == ops.GATHER.name:
            return True
        over: tuple[str, ...] = tuple(e.attr("axes"))  # type: ignore[arg-type]
        inside = fixed_product(self.program, over)
        if inside is None or inside > MAX_COLUMNS:
            return True
        return stage is not None and stage.group is not None and bool(set(over) & stage.group.rows)

    def _fits(self, e: Eqn, stage: _Stage) -> bool:
        """May e run over the positions of this stage? New axes may only be fixed ones (lanes)."""
        axes = set(e.out.ty.axes) | {a for x in e.args if isinstance(x, Var) for a in x.ty.axes}
        return all(a in stage.over or self.program.extent(a) is not None for a in axes) and e.op != ops.JOIN.name

    def _map_stage(self, e: Eqn, since: int) -> _Stage:
        """A map kernel over the axes that e touches: one that is there already, if it is late enough."""
        over = frozenset(e.out.ty.axes).union(*(a.ty.axes for a in e.args if isinstance(a, Var)))
        late = e.out.name in self.after
        for s in self.stages_by_number.values():
            if s.group is None and s.number > since and over <= s.over and (s.number > self.barrier) == late:
                return s
        return self._new(self.at[e.out.name], over, None)

    def _new(self, number: int, over: frozenset[str], group: Group | None) -> _Stage:
        while number in self.stages_by_number:
            raise InternalError(f"two stages at equation {number} of {self.program.name}")
        self.stages_by_number[number] = _Stage(number, over, group)
        return self.stages_by_number[number]

    def _product(self, e: Eqn) -> Home:
        group = self.group_of[e.out.name]
        number = max(self.at[m] for m in group.members)
        if number not in self.stages_by_number:
            self._new(number, group.axes, group)
        for a in e.args if e.op == ops.CONTRACT.name else ():
            assert isinstance(a, Var)
            self._operand(a, number)
        return Home(number, -1)

    def _operand(self, a: Var, before: int) -> None:
        """An operand must be stored: what is no view of a stored tensor is kept. What has no home is stored by an earlier kernel that
        computes with the same values, else by a map kernel of its own."""
        while a.name in self.defs and self.defs[a.name].op in VIEWS and a.name not in self.kept:
            a = self.defs[a.name].args[0]  # type: ignore[assignment]
        if a.name in self.inputs or a.name in self.kept and self.home[a.name].stage is not None:
            return
        home = self.home[a.name]
        if home.stage is None:
            stage = self._beside(a, home.since, before) or self._map_stage(self.defs[a.name], home.since)
            self.home[a.name] = Home(stage.number, -1)
        self.kept.add(a.name)

    def _beside(self, a: Var, since: int, before: int) -> _Stage | None:
        """A stage between these two that computes with what `a` is computed from, tile by tile."""
        late = a.name in self.after
        behind = {x.name for v in self._behind(a) for x in (v, *self.defs[v.name].args) if isinstance(x, Var) and x.ty.axes == a.ty.axes}
        maps = [{x.name for x in e.args if isinstance(x, Var)} for e in self.program.eqns if ops.TABLE[e.op].kind == "map"]
        beside = set().union(*(args for args in maps if args & behind))
        homes = [self.home[x] for x in beside if x in self.home]
        here = {home.stage for home in homes if not home.finished}
        for number, stage in sorted(self.stages_by_number.items()):
            if since < number < before and set(a.ty.axes) <= stage.over and (number > self.barrier) == late and number in here:
                return stage
        return None

    # --- what is stored ------------------------------------------------------------------------------------------------

    def stages(self) -> Stages:
        """All of it."""
        self._place_outputs()
        self._keep_compared()
        self._choose()
        order = sorted(self.stages_by_number)
        stored = {n: [v for v in values if v.name in self.kept] for n, values in self._by_stage().items()}
        same = tuple((o.tensor.name, o.value.name) for o in self.program.outputs if o.value.name in self.inputs)
        return Stages(tuple(self._program(n, stored[n]) for n in order if stored[n]), same)

    def _place_outputs(self) -> None:
        """An output that has no home is written by a map kernel."""
        for o in self.program.outputs:
            home = self.home[o.value.name]
            if home.stage is None and o.value.name in self.defs:
                late = o.value.name in self.after
                last = max((n for n in self.stages_by_number if (n > self.barrier) == late), default=-1)
                if last > max(home.since, -1) and set(o.value.ty.axes) <= self.stages_by_number[last].over:
                    self.home[o.value.name] = Home(last, -1)
                else:
                    self.home[o.value.name] = Home(self._map_stage(self.defs[o.value.name], home.since).number, -1)

    def _keep_compared(self) -> None:
        """What is compared with a whole reduction of itself (which element is the largest?) must have the very bits that were reduced. If a
        statistic is behind it, whose order is its kernel's own, it is stored."""
        for e in self.program.eqns:
            if e.out.ty.dtype.kind != "bool":
                continue
            reduced = [self.defs[a.name] for a in e.args if isinstance(a, Var) and a.name in self.defs and self.home[a.name].finished]
            behind = {v.name for a in e.args if isinstance(a, Var) and not self.home[a.name].finished for v in self._behind(a)}
            for x in [a for r in reduced for a in r.args if isinstance(a, Var) and a.name in behind]:
                if any(ops.TABLE[self.defs[v.name].op].kind == "reduce" for v in self._behind(x)) and self.home[x.name].stage is not None:
                    self.kept.add(x.name)

    def _by_stage(self) -> dict[int, list[Var]]:
        """The values that live in each stage."""
        out: dict[int, list[Var]] = {n: [] for n in self.stages_by_number}
        for e in self.program.eqns:
            stage = self.home[e.out.name].stage
            if stage is not None:
                out[stage].append(e.out)
        return out

    def _choose(self) -> None:
        """Keeps what later stages need: values at the frontier, or the accumulators that they come from, if those are fewer bytes."""
        values_of = self._by_stage()
        for number in sorted(self.stages_by_number, reverse=True):
            missing: dict[int, dict[str, Var]] = {}
            for v in values_of[number]:
                if v.name in self.kept:  # a stage computes it in any case
                    self._missing(v, number, missing, set())
            for source, values in missing.items():
                self.kept |= set(self._cheaper(source, list(values.values())))

    def _missing(self, root: Var, number: int, out: dict[int, dict[str, Var]], seen: set[str]) -> None:
        """Collects what computing `root` in stage `number` needs of other stages and cannot be rebuilt from what is stored."""
        pending = [root]
        while pending:
            v = pending.pop()
            if v.name in seen or v.name in self.inputs:
                continue
            seen.add(v.name)
            e, home = self.defs[v.name], self.home[v.name]
            if self._before(v.name, number):
                if v.name in self.kept or self._rebuilt(v):
                    continue
                if not self._cheap(v):
                    assert home.stage is not None
                    out.setdefault(home.stage, {})[v.name] = v
                    continue
            if v.name in self.group_of and home.stage == number:
                continue
            pending += [a for a in reversed(e.args) if isinstance(a, Var)]

    def _cheap(self, v: Var) -> bool:
        """Is v always computed again? Conditions are no tensors; a map kernel's values need no more than what that kernel loads."""
        stage = self.home[v.name].stage
        assert stage is not None
        mapped = self.stages_by_number[stage].group is None and not self.home[v.name].finished
        return v.ty.dtype.kind == "bool" or (mapped and ops.TABLE[self.defs[v.name].op].kind != "reduce")

    def _rebuilt(self, root: Var) -> bool:
        """Can it be computed from stored tensors in any tile of its axes, without a product or a reduction that leaves the tile?"""
        for v in self._behind(root):
            if v.name in self.group_of or self.home[v.name].finished or ops.TABLE[self.defs[v.name].op].kind == "contract":
                return False
        return True

    def _behind(self, root: Var) -> Iterator[Var]:
        """The value and all those that it is computed from, each once, back to what is stored."""
        pending, seen = [root], set(self.inputs) | self.kept
        while pending:
            v = pending.pop()
            if v.name not in seen:
                seen.add(v.name)
                yield v
                pending += [a for a in reversed(self.defs[v.name].args) if isinstance(a, Var)]

    def _bytes(self, values: Iterable[Var]) -> int:
        return sum(prod(self.size[a] for a in v.ty.axes) * v.ty.dtype.bits // 8 for v in values)

    def _cheaper(self, source: int, values: list[Var]) -> list[str]:
        finished = [v for v in values if self.home[v.name].finished]
        tiles = [v for v in values if v not in finished]
        ways: list[list[Var]] = [tiles]
        for rounded in (False, True):
            leaves: dict[str, Var] = {}
            self._leaves(tiles, source, leaves, rounded)
            ways.insert(0, list(leaves.values()))
        return [v.name for v in (*finished, *min(ways, key=self._bytes))]

    def _leaves(self, tiles: list[Var], source: int, out: dict[str, Var], rounded: bool) -> None:
        """Collects what the values are element-wise functions of: accumulators of stage `source`, and values of other stages; with
        `rounded` also values of 16 bits on the way."""
        pending, seen = tiles[::-1], set(self.inputs) | self.kept
        while pending:
            v = pending.pop()
            if v.name in seen:
                continue
            seen.add(v.name)
            home = self.home[v.name]
            elsewhere = home.finished or home.stage not in (None, source)
            narrow = rounded and v.ty.dtype.kind == "float" and v.ty.dtype.bits == 16
            if v.name in self.group_of or narrow or (elsewhere and v.ty.dtype.kind != "bool"):
                out[v.name] = v
                continue
            pending += [a for a in reversed(self.defs[v.name].args) if isinstance(a, Var)]

    # --- programs ------------------------------------------------------------------------------------------------------

    def _program(self, number: int, stored: list[Var]) -> Program:
        """One stage as a program: its equations, and those that are rebuilt in it."""
        wanted: dict[str, Eqn] = {}
        tensors: dict[str, Tensor] = {}
        held: dict[str, Var] = {}  # values that arrive in the tensor of an output, under its name

        pending: list[Atom] = [*stored]
        while pending:
            a = pending.pop()
            if not isinstance(a, Var) or a.name in wanted or a.name in tensors:
                continue
            if a.name in self.inputs:
                tensors[a.name] = self.inputs[a.name]
            elif a.name in self.kept and self._before(a.name, number):
                tensors[a.name] = self._tensor(a)
                held[a.name] = Var(tensors[a.name].name, a.ty)
            else:
                wanted[a.name] = self.defs[a.name]
                pending += self.defs[a.name].args

        for name in list(tensors):  # a statistic of what is computed here is computed here too: from the same bits, in the same order
            e = self.defs.get(name)
            if e is not None and ops.TABLE[e.op].kind == "reduce" and not self.home[name].finished:
                if all(a.name in wanted for a in e.args if isinstance(a, Var)):
                    wanted[name] = e
                    del tensors[name], held[name]
        outputs = [o for v in stored for o in self.results.get(v.name) or [Output(self._tensor(v), v)]]
        used = {a for t in [*tensors.values(), *(o.tensor for o in outputs)] for a in t.axes}
        used |= {a for e in wanted.values() for a in (*e.out.ty.axes, *named(e))}
        return replace(
            self.program,
            axes=tuple(a for a in self.program.axes if a.name in used),
            nominal=tuple((a, n) for a, n in self.program.nominal if a in used),
            inputs=tuple(tensors[n] for n in [*self.inputs, *self.defs] if n in tensors),
            outputs=tuple(outputs),
            eqns=tuple(_with(e, held) for e in sorted(wanted.values(), key=lambda e: self.at[e.out.name])),
            save=(),
            recompute=(),
            distribute=(),
            chunk=(),
        )

    def _before(self, name: str, number: int) -> bool:
        """Is the value stored by an earlier stage? (One that is made from inputs may be stored later than it is used.)"""
        stage = self.home[name].stage
        return stage is not None and stage < number

    def _tensor(self, v: Var) -> Tensor:
        """The stored form of an intermediate: an output's tensor, else one whose axes follow what it is multiplied with."""
        if v.name not in self.tensors:
            shown = self.results.get(v.name)
            self.tensors[v.name] = shown[0].tensor if shown else Tensor(v.name, v.ty.dtype, self._order(v))
        return self.tensors[v.name]

    def _order(self, v: Var) -> tuple[str, ...]:
        """Contracted axes last and as the other operand stores them; else as in a tensor of the signature, or program order."""
        tensors = [*(o.tensor for o in self.program.outputs), *self.program.inputs]
        order = next((t.axes for t in tensors if set(t.axes) == set(v.ty.axes)), v.ty.axes)
        for e in self.products:
            for a, other in (e.args, e.args[::-1]):
                if isinstance(a, Var) and a.name == v.name and isinstance(other, Var) and other.name in self.inputs:
                    over = set(e.attr("axes"))  # type: ignore[call-overload]
                    inner = tuple(x for x in self.inputs[other.name].axes if x in over)
                    if len(inner) > 1:
                        order = tuple(x for x in order if x not in over) + inner
        return order


def _with(e: Eqn, held: dict[str, Var]) -> Eqn:
    return e.reading(tuple(held.get(a.name, a) if isinstance(a, Var) else a for a in e.args))


def named(e: Eqn) -> set[str]:
    """The axes that an equation's attributes name."""
    found: set[str] = set()
    for key, value in e.attrs:
        if key in ("axis", "to"):
            found.add(str(value))
        elif key in ("axes", "batch", "of"):
            found |= set(value)  # type: ignore[call-overload]
    return found
