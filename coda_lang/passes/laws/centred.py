"""What laws recognise as x − mean x, and as its square: by structure alone.

In: an atom and the equations of its program. Out: x, where the atom is its distance from its own mean over the given axes.
"""

from __future__ import annotations

from math import prod

from ... import ops
from ...ir.graph import Atom, Eqn, Lit, Program, Var


def axes_of(e: Eqn) -> frozenset[str]:
    """The axes of a reduction."""
    return frozenset(e.attr("axes"))  # type: ignore[call-overload]


def around_mean(program: Program, atom: Atom, over: frozenset[str], defs: dict[str, Eqn]) -> Var | None:
    """x, where the atom is x − mean[over](x) or the negative of that."""
    e = defs.get(atom.name) if isinstance(atom, Var) else None
    if e is None or e.op != ops.SUB.name:
        return None
    for x, mean in (e.args, e.args[::-1]):
        if isinstance(x, Var) and over <= set(x.ty.axes) and _is_mean(program, mean, x, over, defs):
            return x
    return None


def squared(atom: Atom, defs: dict[str, Eqn]) -> Atom | None:
    """c, where the atom is c · c, however written."""
    e = defs.get(atom.name) if isinstance(atom, Var) else None
    if e is None:
        return None
    if e.op == ops.MUL.name and e.args[0] == e.args[1]:
        return e.args[0]
    twice = e.op == ops.POWER.name and isinstance(e.args[1], Lit) and e.args[1].value == 2
    return e.args[0] if e.op == ops.SQUARE.name or twice else None


def _is_mean(program: Program, atom: Atom, x: Var, over: frozenset[str], defs: dict[str, Eqn]) -> bool:
    e = defs.get(atom.name) if isinstance(atom, Var) else None
    while e is not None and e.op == ops.EXPAND.name and isinstance(e.args[0], Var):
        e = defs.get(e.args[0].name)
    if e is None:
        return False
    if e.op == ops.MEAN.name:
        return e.args == (x,) and axes_of(e) == over
    if e.op != ops.DIV.name or not isinstance(e.args[0], Var):
        return False
    total = defs.get(e.args[0].name)
    summed = total is not None and total.op == ops.SUM.name and total.args == (x,) and axes_of(total) == over
    return summed and _is_size(program, e.args[1], over, defs)


def _is_size(program: Program, atom: Atom, over: frozenset[str], defs: dict[str, Eqn]) -> bool:
    """Is the atom the number of positions along these axes?"""
    if isinstance(atom, Lit):
        sizes = [program.extent(a) for a in over]
        return None not in sizes and atom.value == prod(n for n in sizes if n is not None)
    e = defs.get(atom.name)
    while e is not None and e.op == ops.CAST.name and isinstance(e.args[0], Var) and e.out.ty.dtype.name == "f32":
        e = defs.get(e.args[0].name)
    return e is not None and e.op == ops.SIZE.name and axes_of(e) == over


__all__ = ["around_mean", "axes_of", "squared"]
