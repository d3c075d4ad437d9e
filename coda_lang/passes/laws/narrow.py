"""*Narrow residual*: the backward reads a value rounded to 16 bits where the forward has that too, not its f32 value beside it.

A value of the forward: only where the forward uses the rounded one (an output, an operand, a cast), no rebuilding from stored values gives
the f32 one without a product, and the rounding stays relative: what the backward makes of it is homogeneous in it until it meets a
cotangent, or is a comparison with 0. So relu's mask may come of its rounded result; 1 − tanh² may not, for there the rounding grows. f16
loses small values altogether: of those only linear uses are allowed.

A cotangent: one of a value that has 16 bits has that value's type, and is rounded once. Where the rounded one is stored as the operand of a
product, what is launched after that product reads it too.
"""

from __future__ import annotations

from dataclasses import replace

from ... import ops
from ...ir.graph import Eqn, Program, Var
from ...ir.types import F16
from ..differentiate import Derivative
from ..state import definitions
from .degree import degree_of, zero
from .law import DerivativeLaw, Use, place


def rewrite(derivative: Derivative, only: frozenset[str] | None = None) -> tuple[Derivative, tuple[Use, ...]]:
    """All such values (or `only` those, by the name of the rounding) read rounded by the backward."""
    graph = _Graph(derivative)
    swapped: dict[tuple[str, str], Var] = {}  # (equation, argument) → what it reads now
    uses = []
    for w in derivative.program.eqns:
        v = w.args[0] if w.op == ops.CAST.name else None
        if not isinstance(v, Var) or v.ty.dtype.bits != 32 or w.out.ty.dtype.bits != 16 or only is not None and w.out.name not in only:
            continue
        readers = graph.early(v, w) if v.name not in graph.late else graph.behind(v, w)
        if readers and not any((e.out.name, v.name) in swapped for e in readers):
            swapped |= {(e.out.name, v.name): w.out for e in readers}
            uses.append(Use(LAW, w, f"the backward reads {w.out.name} for {v.name} ({place(w)})", (v.name,), w.out.name))
    if not uses:
        return derivative, ()

    def changed(e: Eqn) -> Eqn:
        return e.reading(tuple(swapped.get((e.out.name, a.name), a) if isinstance(a, Var) else a for a in e.args))

    eqns = _settled(tuple(map(changed, derivative.program.eqns)), {w.name for w in swapped.values()})
    return replace(derivative, program=replace(derivative.program, eqns=eqns)), tuple(uses)


def _settled(eqns: tuple[Eqn, ...], moved: set[str]) -> tuple[Eqn, ...]:
    """The same equations; the roundings stand right behind what they round."""
    of = {e.args[0].name: e for e in eqns if e.out.name in moved and isinstance(e.args[0], Var)}
    out: list[Eqn] = []
    for e in eqns:
        if e.out.name not in moved:
            out.append(e)
            if e.out.name in of:
                out.append(of[e.out.name])
    return tuple(out)


class _Graph:
    """Look-ups in a derivative."""

    def __init__(self, derivative: Derivative) -> None:
        self.program: Program = derivative.program
        self.defs = definitions(self.program)
        self.forward = {e.out.name for e in derivative.forward.eqns}
        self.outputs = {o.value.name for o in derivative.forward.outputs}
        self.users: dict[str, list[Eqn]] = {}
        self.late = {c for _, c in derivative.cotangents}
        for e in self.program.eqns:
            for a in {a.name for a in e.args if isinstance(a, Var)}:
                self.users.setdefault(a, []).append(e)
                if a in self.late:
                    self.late.add(e.out.name)
        self.operands = {a.name for e in self.program.eqns if e.op == ops.CONTRACT.name for a in e.args if isinstance(a, Var)}
        narrow = {e.out.name for e in self.program.eqns if e.out.ty.dtype.kind == "float" and e.out.ty.dtype.bits == 16}
        self.typed = {g.name for v, g in derivative.totals if v in narrow and isinstance(g, Var)}  # cotangents of 16-bit values

    def early(self, v: Var, w: Eqn) -> list[Eqn]:
        """The backward's equations that may read w for a value of the forward: all that read v, or none."""
        if w.out.name not in self.forward or v.name in self.outputs or not self._made_by_product(v):
            return []
        readers = [e for e in self.users.get(v.name, []) if e.out.name not in self.forward and e is not w]
        return readers if all(self._relative(e, {v.name: 1.0}, w.out.ty.dtype is F16) for e in readers) else []

    def _relative(self, e: Eqn, degree: dict[str, float], linear: bool) -> bool:
        """Does a relative error of the values in `degree` stay one until a cotangent comes in?"""
        if e.out.ty.dtype.kind == "bool":
            return not linear and len(e.args) == 2 and any(zero(a) for a in e.args)
        k = degree_of(e, degree)
        if k is None or linear and k != 1:
            return False
        behind = [x for x in self.users.get(e.out.name, []) if x.out.name not in self.forward] if e.out.name not in self.late else []
        return all(self._relative(x, {**degree, e.out.name: k}, linear) for x in behind)

    def _made_by_product(self, v: Var) -> bool:
        """Is there a product behind v, before any operand or output?"""
        pending, seen = [v.name], set[str]()
        while pending:
            e = self.defs.get(pending.pop())
            if e is None or e.out.name in seen:
                continue
            seen.add(e.out.name)
            if e.op == ops.CONTRACT.name:
                return True
            pending += [a.name for a in e.args if isinstance(a, Var) and a.name not in self.operands | self.outputs]
        return False

    def behind(self, v: Var, w: Eqn) -> list[Eqn]:
        """The equations that read a cotangent, and that no kernel can compute before a product of its rounding."""
        if v.name not in self.typed or w.out.name not in self.operands:
            return []
        after: set[str] = {e.out.name for e in self.users.get(w.out.name, []) if e.op == ops.CONTRACT.name}
        for e in self.program.eqns:
            if any(isinstance(a, Var) and a.name in after for a in e.args):
                after.add(e.out.name)
        return [e for e in self.users.get(v.name, []) if e.out.name in after]


LAW = DerivativeLaw(
    name="narrow residual",
    statement="what the forward has rounded is read rounded",
    condition="the forward uses the rounded value, whose rounding stays relative; or it is a stored cotangent of a value of 16 bits",
    rewrite=rewrite,
    rounding="the backward uses the rounded value",
)
