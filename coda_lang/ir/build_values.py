"""Values under construction and the equations that make them: literal typing, casts, names.

In: operators of the table applied to values. Out: equations of the IR, in order, with their final names.
Non-goals: which applications the language allows (`build_exprs`, `build_axes`).

Names are settled last: while building, a variable is called `%3`; the name under which the user first bound it, if any, is given in
`finish`, then those from inlined defs, then `t1`, `t2`, … for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from .. import ops
from ..ops import builder
from ..ops.spec import Op
from ..source import Span
from .build_axes import AxisTable
from .graph import Atom, Eqn, Lit, Var
from .types import BOOL, F32, I32, DType, Ty

F32_MAX = 3.4028234663852886e38
F32_TINY = 2.0**-150  # this and below rounds to zero
I64_END = 2**63


@final
@dataclass(frozen=True)
class Value:
    """A value of the program.

    product: it descends from a product. weak: a literal or param, which takes the other operand's type. order: the storage order of its
    axes, for a stored tensor. origin: where it was declared or assigned.
    """

    atom: Atom
    product: bool = False
    weak: bool = False
    order: tuple[str, ...] | None = None
    origin: Span | None = None

    @property
    def ty(self) -> Ty:
        return self.atom.ty if isinstance(self.atom, Var) else Ty(self.atom.dtype)

    @property
    def axes(self) -> tuple[str, ...]:
        return self.ty.axes

    @property
    def dtype(self) -> DType:
        return self.ty.dtype


Result = Value | tuple["Value | None", ...] | None  # None is poison: an error was reported, say nothing more


def literal(value: int | float | bool) -> Value:
    """A weak value: the number as written, typed where it meets others."""
    return Value(Lit(value, BOOL if isinstance(value, bool) else I32 if isinstance(value, int) else F32), weak=True)


def typed(value: Value, beside: Iterable[DType] = ()) -> Value:
    """A weak value with the type it has beside operands of these types; others unchanged. Raises TypeProblem."""
    if not value.weak or not isinstance(value.atom, Lit):
        return value
    return replace(value, atom=builder.literal(value.atom.value, beside), weak=False)


class Emitter:
    """The equations of one program as they grow."""

    def __init__(self, axes: AxisTable) -> None:
        self.axes = axes
        self.eqns: list[Eqn] = []
        self._names: dict[str, str] = {}  # %3 → the name it was first bound to
        self._hints: dict[str, str] = {}
        self._casts: dict[tuple[Atom, DType], Var] = {}

    def emit(self, op: Op, args: Iterable[Value], attrs: Mapping[str, object], span: Span, *, product: bool | None = None) -> Value:
        """One equation; literals take their types and integers are converted first. Raises ops.spec.TypeProblem."""
        values = list(args)
        op.check_arity(len(values))
        values = self._literals(op, values)
        wants = op.wants(tuple(v.ty for v in values))
        values = [v if w is None else self.cast(v, w, span) for v, w in zip(values, wants)]
        ty = op.infer(tuple(v.ty for v in values), attrs, self.axes.axes())
        out = Var(f"%{len(self.eqns)}", Ty(ty.dtype, self.axes.ordered(ty.axes)))
        self.eqns.append(Eqn(out, op.name, tuple(v.atom for v in values), tuple(sorted(attrs.items())), span))
        return Value(out, any(v.product for v in values) if product is None else product, origin=span)

    def cast(self, value: Value, dtype: DType, span: Span) -> Value:
        """The value as `dtype`; nothing is emitted where it has that type, or has been cast before."""
        value = typed(value, (dtype,))
        if value.dtype is dtype:
            return value
        key = (value.atom, dtype)
        if key not in self._casts:
            out = self.emit(ops.CAST, (value,), {"dtype": dtype.name}, span).atom
            assert isinstance(out, Var)
            self._casts[key] = out
        return replace(value, atom=self._casts[key], origin=span)

    def _literals(self, op: Op, values: list[Value]) -> list[Value]:
        """Literals in the type of their company: f32 where f32 is read, the other operands' common type where numbers are."""
        reads = [op.read(i) for i in range(len(values))]
        mixed = [(v.weak, v.dtype) for v, read in zip(values, reads) if read in ("number", "any") and v.dtype is not BOOL]
        company = [d for weak, d in mixed if not weak] or [d for _, d in mixed]
        beside = {"f32": [F32], "number": company, "any": company}
        return [typed(v, beside.get(read, ())) for v, read in zip(values, reads)]

    def call(self, value: Value, name: str, *, exact: bool) -> None:
        """`name` is what the user calls this value. Only its first name is kept; `exact` names (the program's own) go before a def's."""
        if isinstance(value.atom, Var) and value.atom.name.startswith("%"):
            names = self._names if exact else self._hints
            names.setdefault(value.atom.name, name)

    def sources(self, atom: Atom, axis: str, *, named: bool = False) -> list[str]:
        """The inputs from which a value has an axis; `named`: or the values nearest to it that the program itself names."""
        made = {e.out.name: e for e in self.eqns}
        found: dict[str, None] = {}
        seen: set[str] = set()
        todo: list[Atom] = [atom]
        while todo:
            top = todo.pop()
            if not isinstance(top, Var) or axis not in top.ty.axes or top.name in seen:
                continue
            seen.add(top.name)
            if top.name not in made:
                found[top.name] = None
            elif named and top.name in self._names:
                found[self._names[top.name]] = None
            else:
                todo += reversed(made[top.name].args)
        return list(found)

    def called(self, atom: Atom) -> str:
        """The program's own name for a value; empty where it has none."""
        if not isinstance(atom, Var):
            return ""
        made = any(e.out.name == atom.name for e in self.eqns)
        return self._names.get(atom.name, "") if made else atom.name

    def finish(self, taken: Iterable[str]) -> dict[str, str]:
        """The final name of every variable made here. `taken` are the names of the program's own values."""
        used = set(taken)
        settled: dict[str, str] = {}
        fresh = 0
        for eqn in self.eqns:
            key = eqn.out.name
            if key in self._names:
                settled[key] = self._names[key]
            elif key in self._hints:
                hint, n = self._hints[key], 1
                while (name := hint if n == 1 else f"{hint}_{n}") in used:
                    n += 1
                settled[key] = name
            else:
                fresh += 1
                while f"t{fresh}" in used:
                    fresh += 1
                settled[key] = f"t{fresh}"
            used.add(settled[key])
        return settled


def renamed(eqns: Iterable[Eqn], names: Mapping[str, str]) -> tuple[Eqn, ...]:
    """The equations with variables under their final names."""
    return tuple(
        replace(e, out=settled(e.out, names), args=tuple(settled(a, names) if isinstance(a, Var) else a for a in e.args)) for e in eqns
    )


def settled(var: Var, names: Mapping[str, str]) -> Var:
    """A variable under its final name."""
    return replace(var, name=names.get(var.name, var.name))


def folded(symbol: str, args: list[Value]) -> Value | None:
    """An operator over literals, computed now: still a literal. None where it cannot be."""
    numbers = [a.atom.value for a in args if isinstance(a.atom, Lit) and a.weak]
    if len(numbers) != len(args) or (symbol, len(args)) not in _FOLD:
        return None
    if any(isinstance(n, bool) for n in numbers):
        return None
    try:
        value = _FOLD[symbol, len(args)](*numbers)
    except (ArithmeticError, ValueError):
        return None
    if isinstance(value, complex) or isinstance(value, int) and not -I64_END <= value < I64_END:
        return None
    return literal(math.copysign(math.inf, value) if isinstance(value, float) and abs(value) > F32_MAX else value)


def _power(x: float, y: float) -> float:
    if isinstance(x, int) and isinstance(y, int) and (abs(y) > 64 or y < 0):
        return float(x) ** y
    return x**y


_FOLD: dict[tuple[str, int], Any] = {
    ("-", 1): lambda x: -x,
    ("+", 2): lambda x, y: x + y,
    ("-", 2): lambda x, y: x - y,
    ("*", 2): lambda x, y: x * y,
    ("/", 2): lambda x, y: x / y,
    ("**", 2): _power,
    ("==", 2): lambda x, y: x == y,
    ("!=", 2): lambda x, y: x != y,
    ("<", 2): lambda x, y: x < y,
    ("<=", 2): lambda x, y: x <= y,
    (">", 2): lambda x, y: x > y,
    (">=", 2): lambda x, y: x >= y,
}
