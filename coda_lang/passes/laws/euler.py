"""*Homogeneous* and *adjoint swap*: where y = f(z) and f(r·z) = rᵏ·f(z), Euler's theorem says Σ z·dz = k · Σ y·dy.

The gradient of a row's scale, z = u ⊙ r, is Σ dz ⊙ u = Σ z·dz / r: what a norm needs where its scale has moved out of a product. Σ y·dy
asks for neither u nor z: a rotation (linear, k = 1), relu, relu2, a gate times an up of such, or nothing at all (y = z) is followed
as far as it is homogeneous in z, and what stands there is often stored anyway. A rotation is no case of its own: ⟨z, Rᵀdy⟩ = ⟨Rz, dy⟩.

*Homogeneous when rounded* follows z through roundings too (as where a program rounds what it rotates); *adjoint swap* through products as
well, Σₖ n·(dz@Wᵀ) = Σₙ (n@W)·dz: the row sum is then known one product earlier. *Homogeneous past a shift* follows z through what is added
to it, and takes that off again. Their sums are taken of rounded values, so a rounding moves; *homogeneous* alone moves none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ... import ops
from ...ir.graph import Atom, Eqn, Var
from ...ops.builder import EqnBuilder, Value
from ..differentiate import Derivative
from ..state import definitions
from . import centred_products, shift
from .degree import degree_of
from .factors import DIVIDE
from .law import DerivativeLaw, DerivativeRewriting, Use, place


@dataclass(frozen=True)
class Site:
    """The sum that is a scale's gradient: `total` is Σ dz ⊙ u, z = u ⊙ r; `kept` are r's axes."""

    total: Eqn
    z: Eqn
    r: Var
    kept: frozenset[str]


def sites(derivative: Derivative) -> list[Site]:
    """Every gradient of a scale that cannot be 0."""
    program, totals = derivative.program, dict(derivative.totals)
    defs = definitions(program)
    held: dict[tuple[Atom, Atom], list[Eqn]] = {}
    for e in program.eqns:
        product = defs.get(e.args[0].name) if e.op == ops.SUM.name and isinstance(e.args[0], Var) else None
        if product is not None and product.op == ops.MUL.name:
            held.setdefault((product.args[0], product.args[1]), []).append(e)
    found = []
    for name, g in totals.items():
        z = defs[name]
        if z.op != ops.MUL.name:
            continue
        for u, r in (z.args, z.args[::-1]):
            if not isinstance(r, Var) or not isinstance(u, Var) or not _never_zero(r, defs):
                continue
            kept = frozenset(r.ty.axes)
            for total in held.get((g, u), []):
                if set(total.attr("axes")) == set(z.out.ty.axes) - kept:  # type: ignore[call-overload]
                    found.append(Site(total, z, r, kept))
    return found


def _never_zero(r: Var, defs: dict[str, Eqn]) -> bool:
    e = defs.get(r.name)
    return e is not None and ops.TABLE[e.op].laws.nonzero


@dataclass(frozen=True)
class Leaf:
    """A value that is homogeneous in z, of this degree, and whose cotangent is made by what is not."""

    value: Var
    degree: float
    shifted: bool = False  # something that z has no part in was added on the way


class Following:
    """How far values of a derivative's forward can be followed."""

    def __init__(self, derivative: Derivative) -> None:
        totals = dict(derivative.totals)
        self.forward = [e for e in derivative.program.eqns if e.out.name in totals]
        self.defs = {e.out.name: e for e in self.forward}
        self.shown = {o.value.name for o in derivative.forward.outputs}
        self.users: dict[str, list[Eqn]] = {}
        for e in self.forward:
            for a in e.args:
                if isinstance(a, Var) and a.name in derivative.carries:
                    self.users.setdefault(a.name, []).append(e)

    def leaves(self, site: Site, through: tuple[str, ...], past: bool = False) -> list[Leaf]:
        """How far z can be followed, `through` casts or products too, and `past` shifts: sums with what z has no part in."""
        degree: dict[str, float] = {site.z.out.name: 1.0}
        shifted: set[str] = set()
        for e in self.forward[self.forward.index(site.z) + 1 :]:
            carrying = [a.name for a in e.args if isinstance(a, Var) and a.name in degree]
            if e.out.name in degree or not carrying:
                continue
            k = degree_of(e, degree, site.kept, through)
            if past and k is None and shift.shifts(e, degree):
                k = 1.0
                shifted.add(e.out.name)
            elif shifted & set(carrying):
                k = k if k == 1 and shift.linear(e) else None
                shifted.add(e.out.name)
            if k is not None:
                degree[e.out.name] = k
        while True:
            whole = {v for v in degree if v not in self.shown and v in self.users and all(e.out.name in degree for e in self.users[v])}
            cut = [v for v in degree if v != site.z.out.name and not _inside(self.defs[v], degree, whole)]
            if not cut:
                break
            for v in cut:
                del degree[v]
        return [Leaf(self.defs[v].out, k, v in shifted) for v, k in degree.items() if v not in whole]


def _inside(e: Eqn, degree: dict[str, float], whole: set[str]) -> bool:
    """Do values that are followed lead to e, and all of them whole?"""
    followed = [a.name for a in e.args if isinstance(a, Var) and a.name in degree]
    return bool(followed) and whole.issuperset(followed)


def _rewriting(law: str, through: tuple[str, ...] = (), but: tuple[str, ...] = (), past: bool = False) -> DerivativeRewriting:
    """The rewriting of a law that follows values `through` these operators, where that leads further than `but` through those.

    `past` shifts where z is a product that was taken apart (`centred_products`): errors grow with them, as was asked for there.
    """

    def rewrite(derivative: Derivative, only: frozenset[str] | None = None) -> tuple[Derivative, tuple[Use, ...]]:
        """Every such gradient (or `only` those, by name) as a sum over the leaves."""
        totals, program = dict(derivative.totals), derivative.program
        chosen: dict[str, tuple[Site, list[Leaf]]] = {}
        following = Following(derivative)
        apart = centred_products.products(derivative.forward) if past else {}
        for site in sites(derivative):
            if past and not any(isinstance(a, Var) and a.name in apart for a in site.z.args):
                continue
            if site.total.out.name not in chosen and (only is None or site.total.out.name in only):
                found = following.leaves(site, through, past)
                if not through or found != following.leaves(site, but):
                    chosen[site.total.out.name] = site, found
        if not chosen:
            return derivative, ()
        taken = set(definitions(program)) | {t.name for t in program.inputs} | {o.tensor.name for o in program.outputs}
        b = EqnBuilder(program.axes, taken)
        uses = []
        for e in program.eqns:
            if e.out.name not in chosen:
                b.eqns.append(e)
                continue
            site, found = chosen[e.out.name]
            start = len(b.eqns)
            b.apply(DIVIDE, (_summed(b, derivative, site, found, totals), site.r))
            b.eqns[start:] = [replace(x, span=e.span) for x in b.eqns[start:]]
            b.eqns.append(replace(b.eqns.pop(), out=e.out))
            names = " and ".join(f"{leaf.value.name}{f' (degree {leaf.degree:g})' * (leaf.degree != 1)}" for leaf in found)
            did = f"the gradient of the scale {site.r.name} at {place(site.z)} is a sum over {names or 'nothing'}"
            uses.append(Use(BY_NAME[law], e, did, (site.z.out.name,), names if through else ""))
        return replace(derivative, program=replace(program, eqns=tuple(b.eqns))), tuple(uses)

    return rewrite


def _chosen_from(derivative: Derivative, value: Var) -> bool:
    """Does a choice read it, however far on? Where it is not chosen it may be NaN, and its cotangent is 0."""
    behind = {value.name}
    for e in derivative.forward.eqns:
        if behind & {a.name for a in e.args if isinstance(a, Var)}:
            if e.op == ops.WHERE.name:
                return True
            behind.add(e.out.name)
    return False


def _summed(b: EqnBuilder, derivative: Derivative, site: Site, found: list[Leaf], totals: dict[str, Atom]) -> Value:
    total: Value | None = None
    offsets = shift.Offsets(b, derivative.forward, site.z.out)
    for leaf in found:
        if leaf.degree == 0:
            continue
        cotangent = b.value(totals[leaf.value.name])
        own = offsets.without(leaf.value) if leaf.shifted else b.value(leaf.value)
        value = cotangent * own
        if _chosen_from(derivative, leaf.value):
            value = b.where(b.eq(cotangent, 0.0), 0.0, value)
        over = tuple(a for a in value.ty.axes if a not in site.kept)
        value = b.sum(value, axes=over) if over else value
        value = value if leaf.degree == 1 else value * leaf.degree
        total = value if total is None else total + value
    return b.value(0.0) if total is None else total


CAST, PRODUCT = ops.CAST.name, ops.CONTRACT.name
EULER = DerivativeLaw(
    name="homogeneous",
    statement="f(r·z) = rᵏ·f(z) ⇒ Σ z·dz = k · Σ y·dy",
    condition="y is made of z by linear and homogeneous operators within one product's epilogue; the scale r in z = u ⊙ r is never 0",
    rewrite=_rewriting("homogeneous"),
)
ROUNDED = DerivativeLaw(
    name="homogeneous when rounded",
    statement="the same, y of the rounded z",
    condition="as before, with roundings on the way from z to y",
    rewrite=_rewriting("homogeneous when rounded", (CAST,)),
    rounding="the sum is taken of what the rounded z gives",
)
ADJOINT = DerivativeLaw(
    name="adjoint swap",
    statement="Σₖ n·(dz@Wᵀ) = Σₙ (n@W)·dz",
    condition="as before, with products on the way too: n is an operand, homogeneous in what its scale multiplies",
    rewrite=_rewriting("adjoint swap", (CAST, PRODUCT), but=(CAST,)),
    rounding="the sum is taken of what the rounded n gives",
)
SHIFTED = DerivativeLaw(
    name="homogeneous past a shift",
    statement="y = z + e ⇒ Σ z·dz = Σ (y − e)·dy",
    condition="z is a product that was taken apart; e has no part of z; linear operators, roundings and further shifts follow",
    rewrite=_rewriting("homogeneous past a shift", (CAST,), but=(CAST,), past=True),
    rounding="the sum is taken of what the rounded y gives",
)
BY_NAME = {law.name: law for law in (EULER, ROUNDED, ADJOINT, SHIFTED)}
