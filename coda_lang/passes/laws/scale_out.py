"""*Scale moves out*: (A ⊙ r) @ B = r ⊙ (A @ B) where r has no contracted axis.

RMSNorm before a product becomes a product of x ⊙ γ, and one factor a row that is known when the product is: no pass over x between two
products. The operand that is rounded is then A, not A ⊙ r: a rounding point moves; and it is off for f16, whose range A may leave.
A product that is summed with another one keeps its scale, which would part the two: they share one accumulator.
"""

from __future__ import annotations

from dataclasses import replace

from ... import ops
from ...ir.graph import Eqn, Program, Var
from ...ir.types import F16
from ...ops.builder import EqnBuilder, Value
from ..state import definitions
from .factors import Factor, factors, multiplied
from .law import Law, Use, place


def rewrite(program: Program) -> tuple[Program, tuple[Use, ...]]:
    """Moves scales out of every product where that is legal and spares a computed operand a scale."""
    defs = definitions(program)
    taken = set(defs) | {t.name for t in program.inputs} | {o.tensor.name for o in program.outputs}
    b = EqnBuilder(program.axes, taken)
    shown = {o.value.name for o in program.outputs}
    shown |= {a.name for e in program.eqns if e.op != ops.CONTRACT.name for a in e.args if isinstance(a, Var)}
    uses: list[Use] = []
    summed = _summed(program)
    for e in program.eqns:
        use = _scale_out(b, e, defs, shown) if e.op == ops.CONTRACT.name and e.out.name not in summed else None
        if use is None:
            b.eqns.append(e)
        else:
            uses.append(use)
    return replace(program, eqns=tuple(b.eqns)), tuple(uses)


def _summed(program: Program) -> set[str]:
    """The products that are added to another product."""
    sums = {e.out.name for e in program.eqns if e.op == ops.CONTRACT.name}
    found: set[str] = set()
    for e in program.eqns:
        names = {a.name for a in e.args if isinstance(a, Var)}
        if e.op == ops.ADD.name and len(names) == 2 and names <= sums:
            found |= names
            sums.add(e.out.name)
    return found


def _scale_out(b: EqnBuilder, e: Eqn, defs: dict[str, Eqn], shown: set[str]) -> Use | None:
    """Appends e with the scales of its operands moved out; None (and nothing appended) where there are none."""
    over = {*e.attr("axes"), *e.attr("batch")}  # type: ignore[misc]
    operands: list[Value] = []
    scales: list[Factor] = []
    rounds = ""
    for a in e.args:
        assert isinstance(a, Var)
        cast = defs.get(a.name)
        scaled = cast is not None and cast.op == ops.CAST.name and a.name not in shown and a.ty.dtype is not F16
        found = factors(cast.args[0], defs) if scaled and cast is not None else []
        out = [f for f in found if f.beside(over) and f.atom not in [x.atom for x in found if not x.beside(over)]]
        kept = [f for f in found if f not in out]
        if not out or not kept or kept[0].under:
            operands.append(b.value(a))
            continue
        start = len(b.eqns)
        operands.append(_rounded(b, multiplied(b, b.value(kept[0].atom), kept[1:]), a, e))
        b.eqns[start:] = [replace(x, span=e.span) for x in b.eqns[start:]]
        scales += out
        rounds = " · ".join(map(str, kept))
    if not scales:
        return None
    start = len(b.eqns)
    multiplied(b, b.apply(ops.CONTRACT.name, operands, dict(e.attrs)), scales)
    b.eqns[start:] = [replace(x, span=e.span) for x in b.eqns[start:]]
    b.eqns.append(replace(b.eqns.pop(), out=e.out))
    moved = tuple(map(str, scales))
    did = f"{', '.join(moved)} out of the product at {place(e)}, before which {rounds} is rounded now"
    return Use(LAW, e, did, moved, rounds)


def _rounded(b: EqnBuilder, value: Value, operand: Var, e: Eqn) -> Value:
    """The remaining factors as an operand: a stored one is used as it is."""
    if value.ty.dtype is operand.ty.dtype:
        return value
    return b.apply(ops.CAST.name, (value,), {"dtype": operand.ty.dtype.name}, e.span)


LAW = Law(
    name="scale moves out",
    statement="(A ⊙ r) @ B = r ⊙ (A @ B)",
    condition="r has no contracted axis; something is left of the operand; the operand is used by products only and is not f16; "
    "the product is not summed with another",
    rewrite=rewrite,
    rounding="A is rounded as the operand, not A ⊙ r",
)
