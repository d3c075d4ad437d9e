"""Writing scalar bodies on demand: the value of a variable at one position of a kernel, as straight-line equations.

In: a placed program. Out: equations over scalars in a `Scope` (one function: a phase of a Gemm, or a finisher), reading ports. A position
gives each axis of a value a coordinate (`At`); lanes, runs and renames only change coordinates, so they leave no equation behind.
Non-goals: which values are wanted (`partition`), storage.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product as every
from math import prod

from .. import ops
from ..ir.graph import Atom, Eqn, Lit, Program, Tensor, Var
from ..ir.kernels import Access, Along, At, Port, Position, Read, Run, Size
from ..ir.types import BOOL, F32, I32, DType, Ty
from ..ops.builder import EqnBuilder, Value
from ..source import Span
from .state import Placement, definitions, extents, is_temporary

Env = dict[str, At]
Leaf = Callable[["Scope", Eqn, Env], Atom | None]


class Names:
    """Names of scalars within one kernel: each once, the source's where it can be."""

    def __init__(self) -> None:
        self.used: set[str] = {"f"}
        self.fresh = 0

    def take(self, hint: str) -> str:
        name, n = re.sub(r"\W", "_", hint), 2
        if is_temporary(name):
            self.fresh += 1
            name = f"t{self.fresh}"
        while name in self.used:
            name, n = f"{hint}_{n}", n + 1
        self.used.add(name)
        return name


class Ports:
    """The ports of one kernel, made as values are wanted. In a finisher (`tiles` False) all are loads."""

    def __init__(self, program: Program, placement: Placement, names: Names, tiles: bool = True) -> None:
        self.program, self.placement, self.names, self.tiles = program, placement, names, tiles
        self.inputs = {t.name: t for t in program.inputs}
        self.extents = extents(program)
        self.ports: dict[object, Port] = {}

    def read(self, tensor: str, env: Env, hint: str, alias: Callable[[str, int], str | None]) -> Var:
        """An element of an input."""
        stored = self.inputs[tensor]
        at = tuple((axis, env[axis]) for axis in stored.axes)
        pair = self.pair(stored, at)
        key = (tensor, tuple((a, None if a == pair else x) for a, x in at))
        if key not in self.ports:
            tags = "".join(f"_{axis}{x}" for axis, x in at if isinstance(x, int) and axis != pair)
            if pair is None:
                names = [hint + tags if len(at) > 1 or not tags else hint]
                names = [next((n for a, x in at if isinstance(x, int) and (n := alias(a, x))), names[0])]
            else:
                names = [alias(pair, i) or f"{hint}{tags}_{pair}{i}" for i in range(2)]
            vars = tuple(Var(self.names.take(n), Ty(stored.dtype)) for n in names)
            access = Access(tensor, tuple((a, 0 if a == pair else x) for a, x in at), pair)
            self.ports[key] = Read(vars, access, self.tiles and self.is_tile(at, stored.dtype))
        lane = env[pair] if pair else 0
        return self.ports[key].vars[lane if isinstance(lane, int) else 0]

    def pair(self, stored: Tensor, at: tuple[tuple[str, At], ...]) -> str | None:
        """The lane axis whose two 16-bit neighbours travel as one element: innermost in storage, of a tile."""
        if not at or not isinstance(at[-1][1], int) or self.extents[at[-1][0]] != 2 or stored.dtype.bits != 16:
            return None
        return at[-1][0] if self.tiles and self.is_tile(at[:-1], stored.dtype) else None

    def is_tile(self, at: tuple[tuple[str, At], ...], dtype: DType) -> bool:
        """Has the access the geometry of the accumulator: every row and column axis, whole? (A single axis makes no tile.)"""
        along = [x for _, x in at if isinstance(x, Along)]
        anchor = self.placement.anchor
        whole = all(not isinstance(x, Along) or (x.start == 0 and self.extents[a] == self.extents[x.axis]) for a, x in at)
        two = bool(anchor.rows and anchor.cols)
        return dtype.kind == "float" and two and {x.axis for x in along} == {*anchor.rows, *anchor.cols} and whole

    def position(self, at: Along) -> Var:
        """A coordinate."""
        if at not in self.ports:
            self.ports[at] = Position(Var(self.names.take(f"{at.axis}_index"), Ty(I32)), at)
        return self.ports[at].vars[0]

    def size(self, axis: str) -> Var:
        """The extent of a free axis."""
        if ("size", axis) not in self.ports:
            self.ports["size", axis] = Size(Var(self.names.take(f"{axis}_size"), Ty(I32)), axis)
        return self.ports["size", axis].vars[0]

    def all(self) -> tuple[Port, ...]:
        return tuple(self.ports.values())


DEEPEST = 50


class _Deeper(Exception):
    """A value is needed too deep in a chain of them: it is written first, then what asked for it is tried again."""

    def __init__(self, key: object, var: Var, env: Env) -> None:
        super().__init__()
        self.key, self.var, self.env = key, var, env


class _Builder(EqnBuilder):
    """Names scalars as `names` does; equations made for one of the program's have its span."""

    def __init__(self, program: Program, names: Names) -> None:
        super().__init__(program.axes)
        self.names = names
        self.span: Span | None = None

    def fresh(self, hint: str = "") -> str:
        return self.names.take(hint or "t0")

    def _emit(self, name: str, values: list[Value], attrs: dict, ty: Ty, span: Span | None, hint: str) -> Value:
        return super()._emit(name, values, attrs, ty, span or self.span, hint)


class Scope:
    """One scalar function. `leaf` gives the values that the function receives (accumulators, statistics, partials), None for others."""

    def __init__(self, program: Program, ports: Ports, leaf: Leaf, names: Names) -> None:
        self.program, self.ports, self.leaf, self.names = program, ports, leaf, names
        self.defs = definitions(program)
        self.inputs = {t.name for t in program.inputs}
        self.extents = extents(program)
        self.builder = _Builder(program, names)
        self.memo: dict[object, Atom] = {}
        self.depth = 0
        self.called: dict[str, str] = {}  # temporaries that become an output unrounded, by the output's name
        self.lane_names = {
            (e.args[0].name, e.attr("axis"), e.attr("index")): e.out.name
            for e in program.eqns
            if e.op == ops.LANE.name and isinstance(e.args[0], Var) and not is_temporary(e.out.name)
        }

    @property
    def eqns(self) -> tuple[Eqn, ...]:
        return tuple(self.builder.eqns)

    def alias(self, name: str, axis: str | None, index: int) -> str | None:
        """What the source calls a lane of a value."""
        return self.lane_names.get((name, axis, index))

    def hint(self, name: str, env: Mapping[str, At]) -> str:
        """A name for a value at a position: the source's name of the lane, else the value's name and its lanes."""
        name = self.called.get(name, name)
        for axis, at in env.items():
            if isinstance(at, int) and (found := self.alias(name, axis, at)):
                rest = {a: x for a, x in env.items() if a != axis}
                return self.hint(found, rest)
        return name + "".join(f"_{axis}{at}" for axis, at in env.items() if isinstance(at, int))

    def value(self, atom: Atom, env: Env) -> Atom:
        """The scalar that `atom` is at the position `env`."""
        if isinstance(atom, Lit):
            return atom
        env = {a: env[a] for a in atom.ty.axes}
        key = (atom.name, tuple(sorted(env.items(), key=lambda i: i[0])))
        if key not in self.memo:
            if self.depth == 0:
                self._in_order(key, atom, env)
            elif self.depth > DEEPEST:
                raise _Deeper(key, atom, env)
            else:
                self.depth += 1
                self.memo[key] = self._value(atom, env)
                self.depth -= 1
        return self.memo[key]

    def _in_order(self, key: object, var: Var, env: Env) -> None:
        """Writes a value after those that it needs, however long the chain of them is."""
        wanted = [(key, var, env)]
        while wanted:
            key, var, env = wanted[-1]
            self.depth, self.builder.span = 1, None
            try:
                if key not in self.memo:
                    self.memo[key] = self._value(var, env)
                wanted.pop()
            except _Deeper as first:
                wanted.append((first.key, first.var, first.env))
            finally:
                self.depth = 0

    def _value(self, var: Var, env: Env) -> Atom:
        if var.name in self.inputs:
            return self.ports.read(var.name, env, var.name, lambda axis, i: self.alias(var.name, axis, i))
        e = self.defs[var.name]
        before, self.builder.span = self.builder.span, e.span
        found = self._made(e, env)
        self.builder.span = before
        return found

    def _made(self, e: Eqn, env: Env) -> Atom:
        given = self.leaf(self, e, env)
        if given is not None:
            return given
        kind = ops.TABLE[e.op].kind
        if kind == "map":
            return self._map(e, env)
        if kind == "reduce":
            return self._gather(e, env) if e.op == ops.GATHER.name else self.fold(e, env)
        return self._lanes(e, env) if kind == "lanes" else self._move(e, env)

    def _map(self, e: Eqn, env: Env) -> Atom:
        args = tuple(self.value(a, env) for a in e.args)
        if e.op == ops.CAST.name and e.out.ty.dtype is F32 and isinstance(e.args[0], Var) and e.args[0].ty.dtype.kind == "float":
            return args[0]  # a float is read as f32 anyway
        out = Var(self.names.take(self.hint(e.out.name, env)), Ty(e.out.ty.dtype))
        self.builder.eqns.append(replace(e, out=out, args=args))
        return out

    def _move(self, e: Eqn, env: Env) -> Atom:
        if e.op == ops.INDEX.name:
            return self.index(env[str(e.attr("axis"))])
        if e.op == ops.SIZE.name:
            return self.size(tuple(e.attr("axes")))  # type: ignore[arg-type]
        if e.op == ops.RENAME.name:
            env = {**env, str(e.attr("axis")): env[str(e.attr("to"))]}
        return self.value(e.args[0], env)

    def _lanes(self, e: Eqn, env: Env) -> Atom:
        axis = str(e.attr("axis"))
        if e.op == ops.LANE.name:
            return self.value(e.args[0], {**env, axis: int(e.attr("index"))})  # type: ignore[call-overload]
        if e.op == ops.PACK.name:
            at = env[axis]
            assert isinstance(at, int), f"{axis} is packed, so its positions are lanes"
            return self.value(e.args[at], env)
        if e.op == ops.RUN.name:
            at, start = env[str(e.attr("to"))], int(e.attr("start"))  # type: ignore[call-overload]
            return self.value(e.args[0], {**env, axis: at + start if isinstance(at, int) else Along(at.axis, at.start - start)})
        return self._join(e, env, axis)

    def _join(self, e: Eqn, env: Env, axis: str) -> Atom:
        at = env[axis]
        of: tuple[str, ...] = e.attr("of")  # type: ignore[assignment]
        starts = [sum(self.extents[a] or 0 for a in of[:i]) for i in range(len(of))]
        if isinstance(at, int):
            part = max(i for i, s in enumerate(starts) if s <= at)
            return self.value(e.args[part], {**env, of[part]: at - starts[part]})
        b = self.builder
        parts = [self.value(a, {**env, name: Along(at.axis, at.start + s)}) for a, name, s in zip(e.args, of, starts)]
        chosen = b.value(parts[-1])
        for i in range(len(of) - 2, -1, -1):
            before = b.apply(BEFORE, (self.index(at), starts[i + 1]), span=e.span)
            chosen = b.apply(ops.WHERE.name, (before, parts[i], chosen), span=e.span, hint=self.hint(e.out.name, env))
        return chosen.atom

    def index(self, at: At) -> Atom:
        """A coordinate as an i32 scalar."""
        return Lit(at, I32) if isinstance(at, int) else self.ports.position(at)

    def size(self, axes: tuple[str, ...]) -> Atom:
        """A product of extents as an i32 scalar."""
        fixed = prod(n for a in axes if (n := self.extents[a]) is not None)
        free = [self.ports.size(a) for a in axes if self.extents[a] is None]
        if not free:
            return Lit(fixed, I32)
        total = self.builder.value(free[0])
        for factor in [*free[1:], *([fixed] if fixed != 1 else [])]:
            total = self.builder.apply(ops.MUL.name, (total, factor))
        return total.atom

    def counts(self, axes: tuple[str, ...]) -> tuple[int | Atom, ...]:
        """Factors of the number of positions along axes."""
        fixed = prod(n for a in axes if (n := self.extents[a]) is not None)
        return (*(self.size((a,)) for a in axes if self.extents[a] is None), *((fixed,) if fixed != 1 else ()))

    # --- reductions over lanes ------------------------------------------------------------------------------------------

    def lanes_of(self, e: Eqn, axes: tuple[str, ...], env: Env) -> list[Env]:
        """The positions that a reduction over lane axes visits."""
        return [{**env, **dict(zip(axes, choice))} for choice in every(*[range(self.extents[a] or 0) for a in axes])]

    def fold(self, e: Eqn, env: Env) -> Atom:
        """A reduction whose axes are all lanes."""
        axes: tuple[str, ...] = e.attr("axes")  # type: ignore[assignment]
        values = [self.value(e.args[0], at) for at in self.lanes_of(e, axes, env)]
        kind, mean = reduction(e)
        total = self.combine(kind, values, e)
        return self.divide(total, (len(values),), e, self.hint(e.out.name, env)) if mean else total

    def combine(self, kind: str, values: Sequence[Atom], e: Eqn) -> Atom:
        """Scalars reduced to one; kinds as in `spec.RowReduce`."""
        b = self.builder
        given = [b.value(v) for v in values]
        if kind == "amax":
            given = [b.abs(v) for v in given]
        if len(given) == 1 and kind != "moments":
            return given[0].atom
        if kind == "lse":
            return self._logaddexp(given)
        if kind == "moments":
            return self.around(given, self._centre(given)).atom
        total = given[0]
        for v in given[1:]:
            total = b.apply(COMBINE[kind], (total, v), span=e.span)
        return total.atom

    def _logaddexp(self, values: list[Value]) -> Atom:
        b = self.builder
        peak = values[0]
        for v in values[1:]:
            peak = b.maximum(peak, v)
        total = b.exp(values[0] - peak)
        for v in values[1:]:
            total = total + b.exp(v - peak)
        infinite = b.eq(b.abs(peak), Lit(float("inf"), F32))
        return b.where(infinite, peak, peak + b.log(total)).atom

    def _centre(self, values: Sequence[Value]) -> Value:
        return functools.reduce(lambda x, y: x + y, values) * (1.0 / len(values))

    def around(self, values: Sequence[Value], centre: Value) -> Value:
        """The sum of squared distances from a centre."""
        return functools.reduce(lambda x, y: x + y, [self.builder.square(v - centre) for v in values])

    def pooled(self, parts: Sequence[Atom], sums: Sequence[Atom], count: Sequence[int | Atom], e: Eqn) -> Atom:
        """Σ (x − mean)² over lanes of `count` values each, from that of each lane and its sum (Chan's formula)."""
        b = self.builder
        means = [b.value(self.divide(total, tuple(count), e, "")) for total in sums]
        between = self.around(means, self._centre(means))
        for n in count:
            between = between * (float(n) if isinstance(n, int) else b.value(n))
        return (functools.reduce(lambda x, y: x + y, map(b.value, parts)) + between).atom

    def divide(self, total: Atom, counts: tuple[int | Atom, ...], e: Eqn, hint: str) -> Atom:
        """total / count; a power of two multiplies, which is exact."""
        b = self.builder
        value = b.value(total)
        for i, count in enumerate(counts):
            if isinstance(count, Lit):
                count = int(count.value)
            last = hint if i == len(counts) - 1 else ""
            if isinstance(count, int) and count & (count - 1) == 0:
                value = b.apply(ops.MUL.name, (value, 1.0 / count), span=e.span, hint=last)
            else:
                value = b.apply(DIVIDE, (value, float(count) if isinstance(count, int) else count), span=e.span, hint=last)
        return value.atom

    def _gather(self, e: Eqn, env: Env) -> Atom:
        """A lane chosen by an index."""
        axis = str(e.attr("axis"))
        b = self.builder
        index = b.value(self.value(e.args[1], env))
        chosen = b.value(Lit(float("nan"), F32))
        for i in reversed(range(self.extents[axis] or 0)):
            chosen = b.where(b.eq(index, i), b.value(self.value(e.args[0], {**env, axis: i})), chosen)
        return chosen.atom

    def first(self, axes: list[str], run: Run | None = None) -> Atom:
        """Whether the position is the first along kernel axes that a value lacks, and inside its run."""
        b = self.builder
        tests = [b.eq(self.ports.position(Along(axis)), 0) for axis in axes]
        if run is not None:
            here = b.value(self.ports.position(Along(run.axis)))
            tests += [here >= run.start, here < run.start + run.size]
        found = tests[0] if tests else b.value(Lit(True, BOOL))
        for t in tests[1:]:
            found = found & t
        return found.atom

    def masked(self, value: Atom, kind: str, missing: list[str]) -> Atom:
        """A value that is the same at several columns counts once; for a largest or smallest value that does not matter."""
        if not missing or kind in ("max", "min", "amax", "moments"):  # the last is divided by how often
            return value
        return self.builder.apply(ops.WHERE.name, (self.first(missing), value, Lit(IDENTITY[kind], F32))).atom


def _name(op: ops.Op | None) -> str:
    assert op is not None
    return op.name


DIVIDE, BEFORE = _name(ops.by_symbol("/", 2)), _name(ops.by_symbol("<", 2))
_LARGER, _SMALLER = _name(ops.find("max")), _name(ops.find("min"))  # the element-wise ones
COMBINE = {"sum": ops.ADD.name, "max": _LARGER, "min": _SMALLER, "amax": _LARGER}
KINDS = {"logsumexp": "lse", ops.DEVIATION.name: "moments"}
IDENTITY = {"sum": 0.0, "max": float("-inf"), "min": float("inf"), "amax": 0.0, "lse": float("-inf")}


def run_of(at: Mapping[str, Along | str], sizes: Mapping[str, int | None]) -> Run | None:
    """The run of a kernel axis that these coordinates are about, None where all are whole."""
    for axis, x in at.items():
        if isinstance(x, Along) and sizes[axis] != sizes[x.axis]:
            return Run(x.axis, x.start, sizes[axis] or 0)
    return None


def reduced_name(e: Eqn) -> str:
    """What a reduction's total is called: the source's name of the result, else `sum_n`."""
    kind, mean = reduction(e)
    return f"{kind}_{'_'.join(e.attr('axes'))}" if mean or is_temporary(e.out.name) else e.out.name  # type: ignore[arg-type]


def reduction(e: Eqn) -> tuple[str, bool]:
    """How partials of a reduction combine, and whether it is a mean (a sum, divided at the end)."""
    return ("sum", True) if e.op == "mean" else (KINDS.get(e.op, e.op), False)
