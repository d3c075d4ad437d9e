"""Algebra across products: a row's scale moves from an operand to the result, so that the product does not wait for it.

In: a simplified program. Out: one of the same meaning over the reals, and every use of a law with the value whose rounding it moves.
Laws match on what the operator table says (`mul`, `div`, `neg` scale), never on names such as rmsnorm. Non-goals: cutting into kernels
(`stages`), derivatives (a program is normalised first, then differentiated, so its backward has the moved scales too).

The law, *scale moves out*: (A ⊙ r) @ B = r ⊙ (A @ B) where r has no contracted axis. RMSNorm before a product becomes a product of
x ⊙ γ, and one factor a row that is known when the product is: no pass over x between two products. The operand that is rounded is then
A, not A ⊙ r: a rounding point moves, so `strict` forbids it; and it is off for f16, whose range A may leave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import ops
from ..ir.graph import Atom, Eqn, Lit, Program, Var
from ..ir.types import F16
from ..ops.builder import EqnBuilder, Value
from .simplify import simplify
from .state import State, definitions

SCALE_OUT = "scale moves out"


@dataclass(frozen=True)
class LawUse:
    """One application: the law, the product, what moved, and the rounded value that is another one now."""

    law: str
    product: str
    moved: tuple[str, ...]
    rounds: str
    eqn: Eqn

    def __str__(self) -> str:
        where = f"{self.eqn.span}" if self.eqn.span else self.product
        law = f"{self.law}, (A ⊙ r) @ B = r ⊙ (A @ B)"
        return f"{law}: {', '.join(self.moved)} out of the product at {where}, before which {self.rounds} is rounded now"


@dataclass(frozen=True)
class Factor:
    """One factor of an operand; `under` says that it divides."""

    atom: Atom
    under: bool = False

    def beside(self, over: set[str]) -> bool:
        """Has it none of the contracted axes?"""
        return isinstance(self.atom, Lit) or not over & set(self.atom.ty.axes)


def normalise(state: State) -> State:
    """The pass. A strict program stays as it is."""
    program, uses = (state.program, ()) if state.strict else moved(state.program)
    if not uses:
        return state
    after = simplify(replace(state, program=program))
    return replace(after, written=state.program, notes=(*after.notes, *dict.fromkeys(map(str, uses))))


def moved(program: Program) -> tuple[Program, tuple[LawUse, ...]]:
    """The program with scales moved out of every product where that is legal and spares a computed operand a scale, and the uses."""
    defs = definitions(program)
    taken = set(defs) | {t.name for t in program.inputs} | {o.tensor.name for o in program.outputs}
    b = EqnBuilder(program.axes, taken)
    shown = {o.value.name for o in program.outputs}
    shown |= {a.name for e in program.eqns if e.op != ops.CONTRACT.name for a in e.args if isinstance(a, Var)}
    uses: list[LawUse] = []
    for e in program.eqns:
        use = _scale_out(b, e, defs, shown) if e.op == ops.CONTRACT.name else None
        if use is None:
            b.eqns.append(e)
        else:
            uses.append(use)
    return replace(program, eqns=tuple(b.eqns)), tuple(uses)


def _scale_out(b: EqnBuilder, e: Eqn, defs: dict[str, Eqn], shown: set[str]) -> LawUse | None:
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
        operands.append(_rounded(b, _product(b, kept), a, e))
        b.eqns[start:] = [replace(x, span=e.span) for x in b.eqns[start:]]
        scales += out
        rounds = " · ".join(_name(f) for f in kept)
    if not scales:
        return None
    attrs = dict(e.attrs)
    value = b.apply(ops.CONTRACT.name, operands, attrs, e.span)
    for f in scales:
        value = b.apply(_operator(f), (value, b.value(f.atom)), span=e.span)
    last = b.eqns.pop()
    b.eqns.append(replace(last, out=e.out))
    return LawUse(SCALE_OUT, e.out.name, tuple(_name(f) for f in scales), rounds, e)


def factors(atom: Atom, defs: dict[str, Eqn], under: bool = False) -> list[Factor]:
    """The factors of a value, through products and quotients."""
    e = defs.get(atom.name) if isinstance(atom, Var) else None
    if e is not None and e.op == ops.MUL.name:
        return [f for a in e.args for f in factors(a, defs, under)]
    if e is not None and e.op == ops.TABLE["div"].name:
        return [*factors(e.args[0], defs, under), Factor(e.args[1], not under)]
    return [Factor(atom, under)]


def _operator(f: Factor) -> str:
    return ops.TABLE["div"].name if f.under else ops.MUL.name


def _product(b: EqnBuilder, kept: list[Factor]) -> Value:
    value = b.value(kept[0].atom)
    for f in kept[1:]:
        value = b.apply(_operator(f), (value, b.value(f.atom)))
    return value


def _rounded(b: EqnBuilder, value: Value, operand: Var, e: Eqn) -> Value:
    """The remaining factors as an operand: a stored one is used as it is."""
    if value.ty.dtype is operand.ty.dtype:
        return value
    return b.apply(ops.CAST.name, (value,), {"dtype": operand.ty.dtype.name}, e.span)


def _name(f: Factor) -> str:
    shown = f.atom.name if isinstance(f.atom, Var) else repr(f.atom.value)
    return f"1/{shown}" if f.under else shown


