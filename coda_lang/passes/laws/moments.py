"""*Moments*: Σ (x − mean x)² from the count, the mean and that sum of each tile.

As written, a variance waits for the mean: another pass over x. Its sum of squares is a reduction of its own (`ops.DEVIATION`): each tile
leaves its part around its own mean, and a finisher puts the parts together by Chan's formula, in a fixed order. Never E x² − (E x)², which
cancels. What the sum is divided by (all of it, or one less) stays as it is written. No rounding of the source moves.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ... import ops
from ...ir.graph import Eqn, Program, Var
from ...ops.builder import EqnBuilder
from ..state import definitions
from .centred import around_mean, axes_of, squared
from .law import Law, Use, place
from .levels import Level, levels


def rewrite(program: Program) -> tuple[Program, tuple[Use, ...]]:
    """Every sum or mean of squared distances from the mean, as one reduction."""
    defs, known = definitions(program), levels(program)
    taken = set(defs) | {t.name for t in program.inputs} | {o.tensor.name for o in program.outputs}
    b = EqnBuilder(program.axes, taken)
    sides = _sides(program)
    uses: list[Use] = []
    for e in program.eqns:
        x = _spread(program, e, defs)
        if x is None or known[x.name].finished or _mixed(axes_of(e), x, sides) or _alone(program, e, x, known):
            b.eqns.append(e)
            continue
        start = len(b.eqns)
        total = b.apply(ops.DEVIATION.name, (x,), {"axes": tuple(e.attr("axes"))})  # type: ignore[arg-type]
        if e.op == ops.MEAN.name:
            sizes = [program.extent(a) for a in axes_of(e)]
            count = b.size(axes=tuple(e.attr("axes"))) if None in sizes else float(prod(n for n in sizes if n))  # type: ignore[arg-type]
            total / count
        b.eqns[start:] = [replace(made, span=e.span) for made in b.eqns[start:]]
        b.eqns.append(replace(b.eqns.pop(), out=e.out))
        uses.append(Use(LAW, e, f"of {x.name} over {', '.join(e.attr('axes'))} at {place(e)}"))  # type: ignore[arg-type]
    return replace(program, eqns=tuple(b.eqns)), tuple(uses)


def _spread(program: Program, e: Eqn, defs: dict[str, Eqn]) -> Var | None:
    """x, where e is the sum or the mean of (x − mean x)²."""
    if e.op not in (ops.SUM.name, ops.MEAN.name):
        return None
    c = squared(e.args[0], defs)
    return None if c is None else around_mean(program, c, axes_of(e), defs)


def _sides(program: Program) -> list[tuple[set[str], set[str]]]:
    """Rows and columns of every product, either way round."""
    found = []
    for e in program.eqns:
        if e.op == ops.CONTRACT.name:
            over: tuple[str, ...] = e.attr("axes")  # type: ignore[assignment]
            one, two = ({a for a in x.ty.axes if a not in over} for x in e.args if isinstance(x, Var))
            found.append((one, two))
    return found


def _mixed(over: frozenset[str], x: Var, sides: list[tuple[set[str], set[str]]]) -> bool:
    """Some rows and some columns at once: their parts meet in two steps, which sums can do and this cannot."""
    return any(over & one and over & two and not {*one, *two} <= over for one, two in sides if set(x.ty.axes) <= {*one, *two})


def _alone(program: Program, e: Eqn, x: Var, known: dict[str, Level]) -> bool:
    """Does the tile hold all of it anyway? Then there is no pass to spare, and two phases are as good."""
    return not known[e.out.name].finished


LAW = Law(
    name="moments",
    statement="Σ (x − mean x)² from the count, mean and Σ (x − mean)² of each tile",
    condition="the mean is over the same axes; the parts of a tile meet in one step",
    rewrite=rewrite,
)
