"""*Distributes over rank one*: (A + Σ μ ⊗ v) @ B = A @ B + Σ μ ⊗ (vᵀB), where the program says `distribute`.

A layer norm before a product is r ⊙ (x − μ) ⊙ γ + β: the product of x alone, less two outer products of a vector of rows and a vector of
columns. So the norm's result is never made, neither forward nor for the weight's gradient, and its statistics come from the kernel that
makes x. The operands that are rounded are then x, which has its mean still, and γ ⊙ B. Where x is rounded already, the mean comes off as
exactly as f32 adds up: what is taken off is μ times the sum of the very weights that were multiplied. Else the rounding of x shows
|mean| / std times as much as that of the norm would. Either bound depends on the data; hence the statement in the program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ... import ops
from ...ir.graph import Atom, Eqn, Program, Var
from ...ir.types import F16
from ...ops.builder import EqnBuilder, Value
from ..state import definitions, listed
from .factors import DIVIDE, Factor, multiplied
from .law import ChosenLaw, Use, place

MOST_TERMS = 8
Summand = tuple[bool, tuple[Factor, ...]]  # whether it is subtracted, its factors


@dataclass(frozen=True)
class Term:
    """A summand of an operand: `rows` have no contracted axis, `cols` no other, `core` is what has both (None: of rank one)."""

    minus: bool
    rows: tuple[Factor, ...]
    cols: tuple[Factor, ...]
    core: Var | None = None


@dataclass(frozen=True)
class Site:
    """An operand of products only, as one term with a core and some of rank one; its products all contract the same axes."""

    cast: Eqn
    products: tuple[Eqn, ...]
    over: frozenset[str]
    main: Term
    ranks: tuple[Term, ...]

    @property
    def core(self) -> Var:
        assert self.main.core is not None
        return self.main.core

    @property
    def exact(self) -> bool:
        """Is the core as it is multiplied, without another rounding?"""
        return self.core.ty.dtype is self.cast.out.ty.dtype


def sites(program: Program) -> dict[str, Site | str]:
    """Every operand that is rounded for products, by name: taken apart, or why not."""
    defs = definitions(program)
    users: dict[str, list[Eqn]] = {}
    for e in program.eqns:
        for a in {a.name for a in e.args if isinstance(a, Var)}:
            users.setdefault(a, []).append(e)
    shown = {o.value.name for o in program.outputs}
    reduced = {e.args[0].name for e in program.eqns if ops.TABLE[e.op].kind == "reduce" and isinstance(e.args[0], Var)}
    found: dict[str, Site | str] = {}
    for e in program.eqns:
        products = [p for p in users.get(e.out.name, []) if p.op == ops.CONTRACT.name]
        if e.op == ops.CAST.name and products:
            others = e.out.name in shown or len(products) < len(users[e.out.name])
            found[e.out.name] = "it is stored or read besides" if others else _site(e, products, defs, reduced)
    return found


def asked(program: Program, name: str) -> dict[str, Site | str]:
    """The operands that a value becomes, with what is known of each; why it becomes none, under its own name."""
    found = sites(program)
    if name in found:
        return {name: found[name]}
    users = [e for e in program.eqns if any(isinstance(a, Var) and a.name == name for a in e.args)]
    if any(o.value.name == name for o in program.outputs) or any(e.out.name not in found for e in users):
        return {name: "it is stored or read besides"}
    return {e.out.name: found[e.out.name] for e in users}


def rewrite(program: Program, only: Iterable[str] | None = None) -> tuple[Program, tuple[Use, ...]]:
    """Takes the products of all such operands (or of `only` those, by name) apart."""
    chosen = [s for s in sites(program).values() if isinstance(s, Site) and (only is None or s.cast.out.name in set(only))]
    at = {p.out.name: s for s in chosen for p in s.products}
    if not chosen:
        return program, ()
    defs = definitions(program)
    taken = set(defs) | {t.name for t in program.inputs} | {o.tensor.name for o in program.outputs}
    b = EqnBuilder(program.axes, taken)
    for e in program.eqns:
        if e.out.name not in at:
            b.eqns.append(e)
            continue
        start = len(b.eqns)
        _apart(b, e, at[e.out.name], defs)
        b.eqns[start:] = [replace(x, span=e.span) for x in b.eqns[start:]]
        b.eqns.append(replace(b.eqns.pop(), out=e.out))
    return replace(program, eqns=tuple(b.eqns)), tuple(map(_use, chosen))


# --- taking an operand apart -----------------------------------------------------------------------------------------------


def _site(cast: Eqn, products: list[Eqn], defs: dict[str, Eqn], reduced: set[str]) -> Site | str:
    over = frozenset(products[0].attr("axes"))  # type: ignore[call-overload]
    if any(frozenset(p.attr("axes")) != over or p.attr("batch") for p in products):  # type: ignore[call-overload]
        return "its products contract different axes, or have batch axes"
    if any(a == cast.out for p in products for a in p.args[1:]) and any(p.args[0] == p.args[1] for p in products):
        return "it is multiplied by itself"
    terms = [_parted(minus, factors, over) for minus, factors in _terms(cast.args[0], over, defs, reduced)]
    mains = [t for t in terms if t is not None and t.core is not None]
    if None in terms or len(mains) != 1:
        return f"over {listed(over)} it is no sum of one value and of products of a vector of rows and one of columns"
    if len(terms) < 2:
        return f"no part of it is a product of a vector of rows and one over {listed(over)}"
    main = mains[0]
    assert main is not None and main.core is not None
    if cast.out.ty.dtype is F16 and main.core.ty.dtype is not F16:
        return "f16 may not hold it before its mean is taken off"
    return Site(cast, tuple(products), over, main, tuple(t for t in terms if t is not None and t is not main))


def _terms(a: Atom, over: frozenset[str], defs: dict[str, Eqn], reduced: set[str]) -> list[Summand]:
    """The summands of a value and their factors. A value that has only rows or only columns is one factor, and so are one whose mean or
    square is taken and a sum whose summands are both more than vectors."""
    whole: list[Summand] = [(False, (Factor(a),))]
    e = defs.get(a.name) if isinstance(a, Var) else None
    if e is None or not _mixed(a, over) or isinstance(a, Var) and a.name in reduced:
        return whole

    def parts(x: Atom) -> list[Summand]:
        return _terms(x, over, defs, reduced)

    if e.op in (ops.ADD.name, ops.SUB.name) and not all(_mixed(x, over) and not _vectors(x, over, defs) for x in e.args):
        second = [(minus ^ (e.op == ops.SUB.name), factors) for minus, factors in parts(e.args[1])]
        return _few([*parts(e.args[0]), *second], whole)
    if e.op == ops.NEG.name:
        return [(not minus, factors) for minus, factors in parts(e.args[0])]
    if e.op == ops.EXPAND.name:
        return parts(e.args[0])
    if e.op == ops.MUL.name:
        return _few([(m ^ n, f + g) for m, f in parts(e.args[0]) for n, g in parts(e.args[1])], whole)
    if e.op == DIVIDE and not _mixed(e.args[1], over):
        return [(minus, (*factors, Factor(e.args[1], True))) for minus, factors in parts(e.args[0])]
    return whole


def _few(terms: list[Summand], whole: list[Summand]) -> list[Summand]:
    return terms if len(terms) <= MOST_TERMS else whole


def _mixed(a: Atom, over: frozenset[str]) -> bool:
    """Has it contracted axes and others?"""
    return isinstance(a, Var) and bool(over & set(a.ty.axes)) and not set(a.ty.axes) <= over


def _vectors(a: Atom, over: frozenset[str], defs: dict[str, Eqn]) -> bool:
    """Is it made of products of vectors of rows and of columns alone?"""
    return all(not _mixed(f.atom, over) for _, factors in _terms(a, over, defs, set()) for f in factors)


def _parted(minus: bool, factors: tuple[Factor, ...], over: frozenset[str]) -> Term | None:
    """The factors sorted; None where two of them have both kinds of axes."""
    mixed = [f for f in factors if _mixed(f.atom, over)]
    if len(mixed) > 1 or mixed and mixed[0].under:
        return None
    cols = tuple(f for f in factors if f not in mixed and over & set(f.axes))
    rows = tuple(f for f in factors if f not in mixed and f not in cols)
    core = mixed[0].atom if mixed else None
    assert core is None or isinstance(core, Var)
    return Term(minus, rows, cols, core)


# --- putting a product together --------------------------------------------------------------------------------------------


def _apart(b: EqnBuilder, e: Eqn, s: Site, defs: dict[str, Eqn]) -> Value:
    """The product as one of the core, and terms of rank one: those with the core's scale of rows before it, the others behind."""
    first = e.args[0] == s.cast.out
    other = e.args[1] if first else e.args[0]
    assert isinstance(other, Var)
    dtype = s.cast.out.ty.dtype
    held = defs[other.name].args[0] if other.name in defs and defs[other.name].op == ops.CAST.name else other
    weight = b.value(other)
    if s.main.cols:
        weight = b.cast(_times(b, b.value(held), s.main.cols), dtype=dtype.name)
    core = b.value(s.core) if s.exact else b.cast(b.value(s.core), dtype=dtype.name)
    operands = (core, weight) if first else (weight, core)
    total = b.contract(*operands, axes=tuple(e.attr("axes")), batch=())  # type: ignore[arg-type]
    outside: list[tuple[bool, Value]] = []
    for t in s.ranks:
        ours = _without(t.cols, s.main.cols)
        column = _times(b, b.value(other), t.cols) if ours is None else _times(b, weight, ours)
        column = b.sum(column, axes=tuple(e.attr("axes")))  # type: ignore[arg-type]
        rest = _without(t.rows, s.main.rows)
        value = _times(b, column, t.rows if rest is None else rest)
        if rest is None:
            outside.append((t.minus, value))
        else:
            total = total - (value if t.minus ^ s.main.minus else -value)
    total = _times(b, total, s.main.rows)
    total = -total if s.main.minus else total
    for minus, value in outside:
        total = total - value if minus else total + value
    return total


def _times(b: EqnBuilder, value: Value, factors: Iterable[Factor]) -> Value:
    return multiplied(b, value, sorted(factors, key=lambda f: f.under))


def _without(factors: tuple[Factor, ...], some: tuple[Factor, ...]) -> tuple[Factor, ...] | None:
    """The factors but for `some`; None where those are not among them."""
    left = list(factors)
    for f in some:
        if f not in left:
            return None
        left.remove(f)
    return tuple(left)


# --- in words --------------------------------------------------------------------------------------------------------------


def _use(s: Site) -> Use:
    core, cols = s.core.name, [str(f) for f in s.main.cols]
    moved = tuple(" · ".join(map(str, (*t.rows, *t.cols))) for t in s.ranks)
    others = dict.fromkeys(a.name for p in s.products for a in p.args if isinstance(a, Var) and a != s.cast.out)
    rounds = [] if s.exact else [core]
    rounds += [" · ".join((o, *cols)) for o in others] if cols else []
    where = ", ".join(dict.fromkeys(map(place, s.products)))
    now = f", before which {' and '.join(rounds)} {'are' if len(rounds) > 1 else 'is'} rounded now" if rounds else ""
    return Use(LAW, s.cast, f"{', '.join(moved)} off the product of {core} at {where}{now}; {bound(s)}", moved, ", ".join(rounds) or core)


def bound(s: Site) -> str:
    """What the error grows by, in words: ρ is |mean| / std where a norm takes its mean off."""
    if s.exact:
        return f"{s.core.name} has 16 bits: only the error of f32 sums grows by ρ = |taken off| / |what stays|"
    return f"the error of rounding {s.core.name} grows by ρ = |taken off| / |what stays|: at ρ = 5 to 5 times that of an operand"


def places(program: Program) -> tuple[str, ...]:
    """The operands of the values that the program names."""
    return tuple(operand for name in program.distribute for operand, s in asked(program, name).items() if isinstance(s, Site))


LAW = ChosenLaw(
    name="distributes over rank one",
    statement="(A + μ ⊗ v) @ B = A @ B + μ ⊗ (vᵀB)",
    condition="the program says `distribute`; the operand is used by products only",
    rewrite=rewrite,
    places=places,
    rounding="A and v ⊙ B are rounded as operands, not A + μ ⊗ v; what cancels is bounded, not small",
)

__all__ = ["LAW", "Site", "asked", "bound", "places", "rewrite", "sites"]
