"""*Scale moves across*: (A ⊙ g) @ B = A @ (g ⊙ B) where all of g's axes are contracted.

The weight γ of a norm may be multiplied into the activation or into the rows of what that is multiplied by. Where the activation is stored
without γ anyway, moving it spares an activation's store and costs a pass over the weight; where a weight is scaled before its product and
the activation is computed, its kernel multiplies at no cost. So it is a choice (`passes.worth`), for an operand with all its products.
The operand that is rounded is then g ⊙ B, not A ⊙ g: a rounding point moves; and it is off for f16, whose range either may leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from ... import ops
from ...ir.graph import Eqn, Program, Var
from ...ir.types import F16
from ...ops.builder import EqnBuilder, Value
from ..state import definitions, nominal
from .factors import Factor, factors, multiplied
from .law import ChosenLaw, Use, place

LAUNCH_BYTES = 8e6  # what memory moves while a kernel is launched


@dataclass(frozen=True)
class Site:
    """An operand whose scales could move: `cast` rounds kept · moved, `products` are all that read it."""

    cast: Eqn
    kept: tuple[Factor, ...]
    moved: tuple[Factor, ...]
    products: tuple[Eqn, ...]

    @property
    def operand(self) -> Var:
        return self.cast.out

    def others(self) -> tuple[Var, ...]:
        """What the operand is multiplied by, each once."""
        found = (a for e in self.products for a in e.args if isinstance(a, Var) and a != self.operand)
        return tuple(dict.fromkeys(found))


def sites(program: Program) -> tuple[Site, ...]:
    """Every operand that has such a scale and is read by products only, and not twice by one."""
    defs = definitions(program)
    users: dict[str, list[Eqn]] = {}
    for e in program.eqns:
        for a in e.args:
            if isinstance(a, Var):
                users.setdefault(a.name, []).append(e)
    shown = {o.value.name for o in program.outputs}
    found = []
    for e in program.eqns:
        products = users.get(e.out.name, []) if e.op == ops.CAST.name and e.out.name not in shown and e.out.ty.dtype is not F16 else []
        if not products or any(p.op != ops.CONTRACT.name for p in products) or len(set(map(id, products))) < len(products):
            continue
        over = frozenset.intersection(*(frozenset(p.attr("axes")) for p in products))  # type: ignore[call-overload]
        every = factors(e.args[0], defs)
        moved = [f for f in every if isinstance(f.atom, Var) and f.atom.ty.axes and set(f.atom.ty.axes) <= over]
        kept = sorted((f for f in every if f not in moved), key=lambda f: f.under)
        if moved and kept and not kept[0].under and {a for f in kept for a in f.axes} == set(e.out.ty.axes):
            found.append(Site(e, tuple(kept), tuple(moved), tuple(products)))
    return tuple(found)


def places(program: Program) -> tuple[str, ...]:
    """The operands whose bytes, or the kernels that write them, might be more than what their other operands cost."""
    size, defs = nominal(program), definitions(program)
    inputs = {t.name for t in program.inputs}

    def bytes_of(v: Var) -> float:
        return prod(size[a] for a in v.ty.axes) * v.ty.dtype.bits / 8

    def stored(v: Var) -> bool:
        while v.name in defs and ops.TABLE[defs[v.name].op].kind in ("move", "lanes") and isinstance(defs[v.name].args[0], Var):
            v = defs[v.name].args[0]  # type: ignore[assignment]
        return v.name in inputs

    def hopeful(s: Site) -> bool:
        passes = 2 if all(stored(f.atom) for f in s.kept if isinstance(f.atom, Var)) else 1  # else a product's kernel writes it
        paid = [2 * bytes_of(o) + LAUNCH_BYTES for o in s.others() if stored(o)]
        return sum(paid) < passes * bytes_of(s.operand) + LAUNCH_BYTES

    return tuple(s.operand.name for s in sites(program) if hopeful(s))


def rewrite(program: Program, only: Iterable[str] | None = None) -> tuple[Program, tuple[Use, ...]]:
    """Moves the scales of every such operand (or of `only` those, by name) into the other operands of its products."""
    chosen = [s for s in sites(program) if only is None or s.operand.name in set(only)]
    if not chosen:
        return program, ()
    defs = definitions(program)
    taken = set(defs) | {t.name for t in program.inputs} | {o.tensor.name for o in program.outputs}
    b = EqnBuilder(program.axes, taken)
    for e in program.eqns:
        here = [s for s in chosen if e in s.products]
        if not here:
            b.eqns.append(e)
            continue
        start = len(b.eqns)
        operands = [_operand(b, a, here, defs) for a in e.args if isinstance(a, Var)]
        b.apply(ops.CONTRACT.name, operands, dict(e.attrs))
        b.eqns[start:] = [replace(x, span=e.span) for x in b.eqns[start:]]
        b.eqns.append(replace(b.eqns.pop(), out=e.out))
    return replace(program, eqns=tuple(b.eqns)), tuple(map(_use, chosen))


def _operand(b: EqnBuilder, a: Var, here: list[Site], defs: dict[str, Eqn]) -> Value:
    """An operand of a product: without what leaves it, with what comes from the other one."""
    own = next((s for s in here if s.operand == a), None)
    come = [f for s in here if s is not own for f in s.moved]
    if own is None and not come:
        return b.value(a)
    held = a.name in defs and defs[a.name].op == ops.CAST.name  # scaled before it is rounded
    kept = own.kept if own else (Factor(defs[a.name].args[0] if held else a),)
    value = multiplied(b, b.value(kept[0].atom), (*kept[1:], *come))
    return value if value.ty.dtype is a.ty.dtype else b.cast(value, dtype=a.ty.dtype.name)


def _use(s: Site) -> Use:
    moved = tuple(map(str, s.moved))
    rounds = ", ".join(f"{' · '.join((o.name, *moved))}" for o in s.others())
    where = ", ".join(dict.fromkeys(map(place, s.products)))
    did = f"{', '.join(moved)} from {' · '.join(map(str, s.kept))} across the product at {where}, before which {rounds} is rounded now"
    return Use(LAW, s.cast, did, moved, rounds)


LAW = ChosenLaw(
    name="scale moves across",
    statement="(A ⊙ g) @ B = A @ (g ⊙ B)",
    condition="all axes of g are contracted; the operand is used by products only and is not f16; the forward or the training step is "
    "cheaper and neither dearer",
    rewrite=rewrite,
    places=places,
    rounding="g ⊙ B is rounded as the operand, not A ⊙ g",
)
