"""How many kernels must have ended before a value can be known: what laws about reductions compare.

In: a program, and inputs that arrive late. Out: a `Level` for each value. An estimate of what `stages` will do, for choosing between two
forms of one value; nothing depends on it for being right. Non-goals: which products share a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ... import ops
from ...ir.graph import Atom, Eqn, Program, Var
from ..state import MAX_COLUMNS, fixed_product

LATE = 1 << 20  # after all that does not wait for a late input


@dataclass(frozen=True)
class Level:
    """The kernel in whose tiles a value is known, counted from the inputs; `finished`: after it, when the tiles' results have met."""

    kernel: int = 0
    finished: bool = False

    @property
    def tile(self) -> int:
        """The first kernel whose tiles can use it."""
        return self.kernel + self.finished


def levels(program: Program, late: Iterable[str] = ()) -> dict[str, Level]:
    """The level of every value; those in `late` come after everything else."""
    found = {t.name: Level(LATE if t.name in set(late) else 0) for t in program.inputs}
    for e in program.eqns:
        found[e.out.name] = level(program, e, found)
    return found


def level(program: Program, e: Eqn, known: dict[str, Level]) -> Level:
    """The level of one value, those of its operands being known."""
    args = [a for a in e.args if isinstance(a, Var)]
    if e.op == ops.CONTRACT.name:
        return Level(1 + max((known[a.name].tile for a in args), default=0))
    if leaves(program, e):
        return Level(max(known[a.name].kernel for a in args), True)
    finished = [a for a in args if known[a.name].finished]
    if finished and all(a in finished or known[a.name].kernel == 0 for a in args) and stays(e, finished):
        return Level(max(known[a.name].kernel for a in finished), True)
    return Level(max((known[a.name].tile for a in args), default=0))


def stays(e: Eqn, finished: Iterable[Var]) -> bool:
    """Has a value made of finished ones no more positions than one of those, so that the finisher makes it too?"""
    return any(set(e.out.ty.axes) <= set(a.ty.axes) for a in finished)


def leaves(program: Program, e: Eqn) -> bool:
    """Is e a reduction whose result only all tiles together know?"""
    if ops.TABLE[e.op].kind != "reduce" or not isinstance(e.args[0], Var):
        return False
    if e.op == ops.GATHER.name:
        return True
    size = fixed_product(program, tuple(e.attr("axes")))  # type: ignore[arg-type]
    return size is None or size > MAX_COLUMNS


def of(atom: Atom, known: dict[str, Level]) -> Level:
    """The level of an operand."""
    return known[atom.name] if isinstance(atom, Var) else Level()


__all__ = ["Level", "leaves", "level", "levels", "of"]
