"""The derivative of a product that has been taken apart, u = A @ B − μ ⊗ (1ᵀB): what keeps its cancellation exact.

The gradient of B is Aᵀ dz − 1 ⊗ Σ μ·dz = (A − μ)ᵀ dz: the first dz is rounded as the operand of a product. If the second is not, the
difference of the two shows |mean| / std times as much. So what takes the term of rank one off reads the rounded cotangent as well; and so
does the gradient of μ, which then is the mean of the gradient of A.

In: a derivative. Out: one of the same meaning over the reals. No choice: it is part of what `distribute` asks for.
"""

from __future__ import annotations

from dataclasses import replace

from ... import ops
from ...ir.graph import Atom, Eqn, Program, Var
from ...ops.builder import EqnBuilder
from ..differentiate import Derivative
from ..state import definitions
from .factors import factors


def products(program: Program) -> dict[str, Eqn]:
    """The product A @ B of every difference A @ B − μ ⊗ Σ B, by the difference's name: columns that are sums of the operand itself."""
    defs = definitions(program)
    found: dict[str, Eqn] = {}
    for e in program.eqns:
        if e.op != ops.SUB.name or not all(isinstance(a, Var) for a in e.args):
            continue
        whole, off = e.args
        product = found.get(whole.name) or defs.get(whole.name)  # type: ignore[union-attr]
        if product is not None and product.op == ops.CONTRACT.name:
            columns = [defs.get(f.atom.name) for f in factors(off, defs) if isinstance(f.atom, Var)]
            if any(_sums(column, product, defs) for column in columns):
                found[e.out.name] = product
    return found


def _sums(e: Eqn | None, product: Eqn, defs: dict[str, Eqn]) -> bool:
    """Is it the sum of an operand over what the product contracts, perhaps scaled?"""
    if e is not None and e.op == ops.NEG.name and isinstance(e.args[0], Var):
        e = defs.get(e.args[0].name)
    if e is None or e.op != ops.SUM.name or set(e.attr("axes")) != set(product.attr("axes")):  # type: ignore[call-overload]
        return False
    return any(f.atom in product.args for f in factors(e.args[0], defs))


def settled(derivative: Derivative) -> Derivative:
    """The derivative; cotangents of such differences are read rounded, as the product's own are."""
    program, totals = derivative.program, dict(derivative.totals)
    defs = definitions(program)
    rounded: dict[str, str] = {}  # a cotangent, and the type it is rounded to
    negated: dict[str, str] = {}  # the equations that read it for the term of rank one
    for name, product in products(derivative.forward).items():
        du = totals.get(name)
        operand = product.args[0]
        assert isinstance(operand, Var)
        for e in program.eqns:
            if isinstance(du, Var) and e.op == ops.NEG.name and e.args[0] == du:
                rounded[du.name] = operand.ty.dtype.name
                negated[e.out.name] = du.name
    if not rounded:
        return derivative
    b = EqnBuilder(program.axes, set(defs) | {t.name for t in program.inputs} | {o.tensor.name for o in program.outputs})
    narrow: dict[str, Atom] = {}

    def narrowed(v: Var) -> None:
        if v.name in rounded:
            narrow[v.name] = b.cast(v, dtype=rounded[v.name]).atom

    for v in (a for e in program.eqns for a in e.args if isinstance(a, Var) and a.name not in defs):
        if v.name not in narrow:  # a cotangent that comes in
            narrowed(v)
    for e in program.eqns:
        b.eqns.append(replace(e, args=(narrow[negated[e.out.name]],)) if e.out.name in negated else e)
        narrowed(e.out)
    return replace(derivative, program=replace(program, eqns=tuple(b.eqns)))


__all__ = ["products", "settled"]
