"""*Reductions split*: Σ (a + r·b) = Σ a + r·Σ b where r is constant along the axes; and Σ (x − mean x) = 0.

A sum that contains another reduction's result waits for it: another pass over the tensor. Where r is what is late, the sums of a and b are
partial results of the kernel that knows those, and only their combination waits, in a finisher. Applied where it makes the sum known a
kernel earlier, and to no term that does not ask for it. Not applied inside products of two values along the axes: there it would take
apart (x − mean x)·w, and cancel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ... import ops
from ...ir.graph import Atom, Eqn, Lit, Program, Var
from ...ops.builder import EqnBuilder, Value
from ..state import definitions
from .centred import around_mean, axes_of
from .factors import Factor, multiplied
from .law import Law, Use, place
from .levels import Level, level, levels, of


@dataclass(frozen=True)
class Term:
    """A summand: `scales` are constant along the axes, `value` is not; None stands for 1."""

    value: Var | None
    scales: tuple[Factor, ...] = ()
    minus: bool = False


def rewrite(program: Program, late: Iterable[str] = ()) -> tuple[Program, tuple[Use, ...]]:
    """Splits every sum and mean that is then known earlier; inputs in `late` come after all that does not need them."""
    defs, known = definitions(program), levels(program, late)
    taken = set(defs) | {t.name for t in program.inputs} | {o.tensor.name for o in program.outputs}
    b = EqnBuilder(program.axes, taken)
    uses: list[Use] = []
    for e in program.eqns:
        apart = _apart(program, e, defs, known) if e.op in (ops.SUM.name, ops.MEAN.name) else None
        if apart is None:
            known[e.out.name] = level(program, e, known)
            b.eqns.append(e)
            continue
        inner, outer = apart
        start = len(b.eqns)
        value = _combined(b, e, inner, outer)
        if e.op == ops.SUM.name and any(program.extent(a) is None for a in axes_of(e)):  # a sum over nothing is 0 whatever r is
            value = b.where(b.size(axes=tuple(e.attr("axes"))) > 0, value, 0.0)  # type: ignore[arg-type]
        missing = tuple(a for a in e.out.ty.axes if a not in value.ty.axes)
        if missing:
            b.expand(value, axes=missing)
        elif len(b.eqns) == start:
            value * 1.0
        b.eqns[start:] = [replace(made, span=e.span) for made in b.eqns[start:]]
        b.eqns.append(replace(b.eqns.pop(), out=e.out))
        for made in b.eqns[start:]:
            known[made.out.name] = level(program, made, known)
        moved = tuple(str(f) for t in outer for f in t.scales)
        did = f"{', '.join(dict.fromkeys(moved)) or 'a constant'} out of the sum over {', '.join(e.attr('axes'))} at {place(e)}"  # type: ignore[arg-type]
        uses.append(Use(LAW, e, did, moved))
    return replace(program, eqns=tuple(b.eqns)), tuple(uses)


def _apart(program: Program, e: Eqn, defs: dict[str, Eqn], known: dict[str, Level]) -> tuple[list[Term], list[Term]] | None:
    """The terms that stay in one sum, and those that get sums of their own; None where splitting gains nothing."""
    over, arg = axes_of(e), e.args[0]
    if not isinstance(arg, Var) or not known[e.out.name].finished or known[arg.name].kernel == 0 and not known[arg.name].finished:
        return None
    terms = list(_terms(program, Term(arg), over, defs))
    first = max((known[t.value.name].tile for t in terms if t.value is not None), default=0)
    if not terms or first >= known[arg.name].tile:
        return None
    inner = [t for t in terms if t.value is not None and all(of(f.atom, known).tile <= first for f in t.scales)]
    outer = [t for t in terms if t not in inner]
    combined = max((of(f.atom, known).kernel for t in outer for f in t.scales), default=0)
    return (inner, outer) if max(first, combined) < known[arg.name].tile else None


def _terms(program: Program, t: Term, over: frozenset[str], defs: dict[str, Eqn]) -> Iterator[Term]:
    """The summands of a value, through sums, negations and factors that are constant along the axes."""
    assert t.value is not None
    e = defs.get(t.value.name)
    if e is not None and around_mean(program, t.value, over, defs) is not None:
        return
    if e is not None and e.op in (ops.ADD.name, ops.SUB.name):
        for i, a in enumerate(e.args):
            yield from _within(program, a, replace(t, minus=t.minus ^ (i == 1 and e.op == ops.SUB.name)), over, defs)
    elif e is not None and e.op == ops.NEG.name:
        yield from _within(program, e.args[0], replace(t, minus=not t.minus), over, defs)
    elif e is not None and e.op in (ops.MUL.name, ops.DIV.name):
        args = [_bare(a, over, defs) for a in e.args]
        constant = [Factor(a, e.op == ops.DIV.name and i == 1) for i, a in enumerate(args) if _constant(a, over)]
        rest = [a for a in args if not _constant(a, over)]
        if len(rest) == 1 and not (e.op == ops.DIV.name and rest[0] == args[1]):
            yield from _within(program, rest[0], replace(t, scales=(*t.scales, *constant)), over, defs)
        else:
            yield t
    else:
        yield t


def _within(program: Program, a: Atom, t: Term, over: frozenset[str], defs: dict[str, Eqn]) -> Iterator[Term]:
    a = _bare(a, over, defs)
    if _constant(a, over):
        yield replace(t, value=None, scales=(*t.scales, Factor(a)))
    else:
        assert isinstance(a, Var)
        yield from _terms(program, replace(t, value=a), over, defs)


def _bare(a: Atom, over: frozenset[str], defs: dict[str, Eqn]) -> Atom:
    """What is spread along the axes, where the atom is only that."""
    e = defs.get(a.name) if isinstance(a, Var) else None
    return e.args[0] if e is not None and e.op == ops.EXPAND.name and _constant(e.args[0], over) else a


def _constant(a: Atom, over: frozenset[str]) -> bool:
    return isinstance(a, Lit) or not over & set(a.ty.axes)


def _combined(b: EqnBuilder, e: Eqn, inner: list[Term], outer: list[Term]) -> Value:
    """The reduction, term by term."""
    attrs: dict = {"axes": tuple(e.attr("axes"))}  # type: ignore[arg-type]
    parts: list[tuple[bool, Value]] = []
    if inner:
        whole = _sum([(t.minus, multiplied(b, b.value(t.value), t.scales)) for t in inner])
        parts.append((False, b.apply(e.op, (whole,), attrs)))
    for t in outer:
        if t.value is not None:
            value = multiplied(b, b.apply(e.op, (b.value(t.value),), attrs), t.scales)
        else:
            first, *rest = sorted(t.scales, key=lambda f: f.under)
            value = multiplied(b, b.value(first.atom), rest)
            value = value * b.size(**attrs) if e.op == ops.SUM.name else value
        parts.append((t.minus, value))
    return _sum(parts)


def _sum(parts: list[tuple[bool, Value]]) -> Value:
    minus, total = parts[0]
    total = -total if minus else total
    for minus, value in parts[1:]:
        total = total - value if minus else total + value
    return total


LAW = Law(
    name="reductions split",
    statement="Σ (a + r·b) = Σ a + r·Σ b, Σ (x − mean x) = 0",
    condition="r is constant along the axes; the whole is then known a kernel earlier",
    rewrite=rewrite,
)
