"""A value as a product of factors, through multiplications and divisions: what the laws about scales match on.

In: an atom and the equations of its program. Out: `Factor`s, and values made of them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ... import ops
from ...ir.graph import Atom, Eqn, Var
from ...ops.builder import EqnBuilder, Value

DIVIDE = ops.TABLE["div"].name


@dataclass(frozen=True)
class Factor:
    """One factor of a value; `under` says that it divides."""

    atom: Atom
    under: bool = False

    @property
    def operator(self) -> str:
        return DIVIDE if self.under else ops.MUL.name

    @property
    def axes(self) -> tuple[str, ...]:
        return self.atom.ty.axes if isinstance(self.atom, Var) else ()

    def beside(self, over: set[str]) -> bool:
        """Has it none of these axes?"""
        return not over & set(self.axes)

    def __str__(self) -> str:
        shown = self.atom.name if isinstance(self.atom, Var) else repr(self.atom.value)
        return f"1/{shown}" if self.under else shown


def factors(atom: Atom, defs: dict[str, Eqn], under: bool = False) -> list[Factor]:
    """The factors of a value, in order."""
    e = defs.get(atom.name) if isinstance(atom, Var) else None
    if e is not None and e.op == ops.MUL.name:
        return [f for a in e.args for f in factors(a, defs, under)]
    if e is not None and e.op == DIVIDE:
        return [*factors(e.args[0], defs, under), Factor(e.args[1], not under)]
    return [Factor(atom, under)]


def multiplied(b: EqnBuilder, value: Value, scales: Iterable[Factor]) -> Value:
    """The value times all of these."""
    for f in scales:
        value = b.apply(f.operator, (value, b.value(f.atom)))
    return value


__all__ = ["Factor", "factors", "multiplied"]
