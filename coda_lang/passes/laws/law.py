"""What a law is: a record with its name, what it says, when it holds, what rounding it moves, and the rewriting itself.

In: nothing but programs. Out: `Law` of programs, `ChosenLaw` of places in them, `DerivativeLaw` of a program with its backward, `Use`.
Non-goals: which laws there are (the tuples of `laws`), when they are applied (`passes.normalise`, `passes.saving`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...ir.graph import Eqn, Program
from ..differentiate import Derivative


@dataclass(frozen=True)
class Use:
    """One application of a law: `at` is the equation it changed, `did` says in words what was done there and what is rounded now."""

    law: AnyLaw
    at: Eqn
    did: str
    moved: tuple[str, ...] = ()  # the values that are used elsewhere now
    rounds: str = ""  # the value that is rounded instead of another; "" where no rounding moved

    @property
    def place(self) -> str:
        """What tells it from other uses."""
        return self.at.out.name

    def __str__(self) -> str:
        return f"{self.law.name}, {self.law.statement}: {self.did}"


Rewriting = Callable[[Program], tuple[Program, tuple[Use, ...]]]


@dataclass(frozen=True)
class Law:
    """One algebraic law and the pass that uses it.

    `rewrite` takes a simplified program and gives one of the same meaning over the reals, with every use; without uses it gives the
    program back as it is. It matches on what the operator table says, never on names of functions, and only where the law pays.
    """

    name: str
    statement: str
    condition: str
    rewrite: Rewriting
    rounding: str = ""  # which rounding point it moves; "" for none

    @property
    def strict_forbids(self) -> bool:
        """`--strict` forbids what moves a rounding."""
        return bool(self.rounding)


ChosenRewriting = Callable[[Program, "frozenset[str] | None"], tuple[Program, tuple[Use, ...]]]


@dataclass(frozen=True)
class ChosenLaw:
    """One law of programs that is used at chosen places: those where it pays, or those that the program asks for.

    `rewrite(program, only)` uses it everywhere, or `only` at these places (the names of `Use.at`'s results). `places` are those that are
    worth weighing: a cheap estimate that leaves out no place where it pays.
    """

    name: str
    statement: str
    condition: str
    rewrite: ChosenRewriting
    places: Callable[[Program], tuple[str, ...]]
    rounding: str = ""

    @property
    def strict_forbids(self) -> bool:
        """`--strict` forbids what moves a rounding."""
        return bool(self.rounding)


DerivativeRewriting = Callable[[Derivative, "frozenset[str] | None"], tuple[Derivative, tuple[Use, ...]]]


@dataclass(frozen=True)
class DerivativeLaw:
    """One law of what stands between a forward and its backward: a choice with a cost, not a normal form.

    `rewrite(derivative, only)` uses it everywhere, or `only` at these places (the names of `Use.at`'s results).
    """

    name: str
    statement: str
    condition: str
    rewrite: DerivativeRewriting
    rounding: str = ""

    @property
    def strict_forbids(self) -> bool:
        """`--strict` forbids what moves a rounding."""
        return bool(self.rounding)


AnyLaw = Law | ChosenLaw | DerivativeLaw


def place(e: Eqn) -> str:
    """Where an equation stands, for `Use.did`."""
    return f"{e.span}" if e.span else e.out.name


__all__ = ["AnyLaw", "ChosenLaw", "DerivativeLaw", "Law", "Rewriting", "Use", "place"]
