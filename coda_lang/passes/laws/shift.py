"""What is added to a value on its way, and how much of another value that makes: y = f(z) + e, f linear.

In: equations, the value z that is followed. Out: y without e, by applying to what was added what was applied to z. Non-goals: how far a
value is followed (`euler`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ... import ops
from ...ir.graph import Eqn, Program, Var
from ...ops.builder import EqnBuilder, Value
from ..state import definitions


def shifts(e: Eqn, degree: Mapping[str, float]) -> bool:
    """Is it a sum or difference of a value that is followed, and one that is not?"""
    carrying = [isinstance(a, Var) and a.name in degree for a in e.args]
    followed = [degree[a.name] for a in e.args if isinstance(a, Var) and a.name in degree]
    return e.op in (ops.ADD.name, ops.SUB.name) and sum(carrying) == 1 and followed == [1.0]


def linear(e: Eqn) -> bool:
    """May what was added be taken through it by itself?"""
    return ops.TABLE[e.op].kind in ("lanes", "move") or e.op == ops.CAST.name or bool(ops.TABLE[e.op].laws.linear)


class Offsets:
    """What has been added to z in the values that follow from it; equations are appended to `b`."""

    def __init__(self, b: EqnBuilder, program: Program, z: Var) -> None:
        self.b, self.z, self.defs = b, z, definitions(program)
        self.behind = {z.name}
        for e in program.eqns:
            if any(isinstance(a, Var) and a.name in self.behind for a in e.args):
                self.behind.add(e.out.name)
        self.known: dict[str, Value | None] = {z.name: None}

    def without(self, y: Var) -> Value:
        """y less all that was added."""
        off = self.of(y)
        return self.b.value(y) if off is None else self.b.value(y) - off

    def of(self, v: Var) -> Value | None:
        """What was added to z in v; None for nothing."""
        if v.name not in self.known:
            self.known[v.name] = self._made(self.defs[v.name])
        return self.known[v.name]

    def _made(self, e: Eqn) -> Value | None:
        b, sides = self.b, [isinstance(a, Var) and a.name in self.behind for a in e.args]
        offsets = [self.of(a) if side and isinstance(a, Var) else None for a, side in zip(e.args, sides)]
        if e.op in (ops.ADD.name, ops.SUB.name):
            one, two = (off if side else b.value(a) for a, side, off in zip(e.args, sides, offsets))
            if two is None or one is None:
                return one if two is None else -two if e.op == ops.SUB.name else two
            return b.apply(e.op, (one, two))
        if all(off is None for off in offsets):
            return None
        if e.op == ops.CAST.name:
            return offsets[0]
        args = [(off if off is not None else b.value(0.0)) if side else b.value(a) for a, side, off in zip(e.args, sides, offsets)]
        attrs = dict(e.attrs)
        if ops.TABLE[e.op].kind in ("lanes", "move"):
            missing = [tuple(x for x in a.ty.axes if x not in v.ty.axes) for a, v in zip(e.args, args) if isinstance(a, Var)]
            args = [b.expand(v, axes=axes) if axes else v for v, axes in zip(args, missing)]
        return b.apply(e.op, args, attrs)


__all__ = ["Offsets", "linear", "shifts"]
