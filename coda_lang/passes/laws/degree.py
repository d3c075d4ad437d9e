"""Of what degree is an equation homogeneous in some of its arguments? By the laws of the operator table.

In: an equation, the degrees of its arguments. Out: its degree, or None. Choices and elements picked by an index have none: a branch that
is not taken, or an element that is not there, may be NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

from ... import ops
from ...ir.graph import Atom, Eqn, Lit, Var


def degree_of(e: Eqn, degree: Mapping[str, float], kept: frozenset[str] = frozenset(), through: tuple[str, ...] = ()) -> float | None:
    """The degree of e's value in what `degree` is relative to, all else held fixed; None where there is none, or where it mixes positions
    along `kept`. Roundings and products have a degree only where `through` names them."""
    op = ops.TABLE[e.op]
    if not kept <= set(e.out.ty.axes) or e.out.ty.dtype.kind != "float":
        return None
    degree_at = {i: degree[a.name] for i, a in enumerate(e.args) if isinstance(a, Var) and a.name in degree}
    carrying, degrees = list(degree_at), set(degree_at.values())
    if e.op == ops.CAST.name:
        return degrees.pop() if e.op in through or e.out.ty.dtype.bits == 32 else None
    if e.op in (ops.WHERE.name, ops.GATHER.name, ops.RENAME.name):
        return None
    if op.kind == "contract":
        over = {*e.attr("axes")}  # type: ignore[misc]
        return sum(degree_at.values()) if e.op in through and not over & kept else None
    if op.kind == "reduce" and not op.laws.linear:
        return None
    groups = [[i for i in range(len(e.args)) if op.arg(i) in group] for group in op.laws.linear]
    alone = {g[0] for g in groups if len(g) == 1}
    if set(carrying) <= alone:
        return sum(degree_at.values())
    scaled = [i for i, a in enumerate(e.args) if not zero(a)]
    together = any(set(scaled) <= set(g) for g in groups)
    if len(degrees) != 1 or set(scaled) != set(carrying) or not together and op.laws.homogeneous is None:
        return None
    return degrees.pop() * (1.0 if together else op.laws.homogeneous or 0.0)


def zero(a: Atom) -> bool:
    return isinstance(a, Lit) and not isinstance(a.value, bool) and a.value == 0


__all__ = ["degree_of", "zero"]
