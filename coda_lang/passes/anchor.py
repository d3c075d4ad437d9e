"""Which product the kernel computes: accumulators (sums of products), their operands, and which axes may be its rows and columns.

In: a simplified program. Out: one or two `Anchor`s (either operand may give the rows), those of a map kernel where there is no product
(`maps`), or refusals: an operand that is computed, products that cannot share one kernel. Non-goals: whether the rest of the program
fits (`place`), storage (`layout`).
"""

from __future__ import annotations

from dataclasses import replace

from .. import ops
from ..diagnostics.model import CodaError, Diagnostic, Label
from ..ir.graph import Eqn, Program, Var
from .maps import maps
from .state import Accumulator, Anchor, State, Stored, Term, definitions, is_temporary, listed, say, uses


def anchor(state: State) -> State:
    """The pass. Raises CodaError (C0401 to C0405)."""
    return replace(state, anchors=candidates(state.program, lane_axes(state.program)))


def candidates(program: Program, lanes: frozenset[str]) -> tuple[Anchor, ...]:
    """The anchors with these axes as lanes. Raises CodaError where there is none."""
    products = [e for e in program.eqns if e.op == ops.CONTRACT.name]
    if not products:
        return maps(program, lanes)
    problems: list[Diagnostic] = []
    sums = accumulators(program)
    factors = {e.out.name: _factors(program, e, problems) for e in products}
    if problems:
        raise CodaError(problems)
    first = sums[0][2][0]
    found: list[Anchor] = []
    why: list[Diagnostic] = []
    for operand in factors[first.out.name]:
        rows = tuple(name for _, name in operand.axes if name not in _over(first))
        result = _orient(rows, sums, factors, lanes)
        if isinstance(result, Anchor):
            found.append(result)
        else:
            why.append(result)
    if not found:
        raise CodaError([why[0]])
    return tuple(found)


def lane_axes(program: Program) -> frozenset[str]:
    """Axes that are split into lanes or packed from lanes anywhere, under any of their names."""
    lanes = {str(e.attr("axis")) for e in program.eqns if e.op in (ops.LANE.name, ops.PACK.name)}
    moves = [(str(e.attr("axis")), str(e.attr("to"))) for e in program.eqns if e.op in (ops.RENAME.name, ops.RUN.name)]
    moves += [(str(e.attr("axis")), to) for e in program.eqns if e.op == ops.JOIN.name for to in e.attr("of")]  # type: ignore[attr-defined]
    while more := {b for pair in moves for a, b in (pair, pair[::-1]) if a in lanes} - lanes:
        lanes |= more
    return frozenset(lanes)


def _over(e: Eqn) -> tuple[str, ...]:
    return tuple(e.attr("axes"))  # type: ignore[arg-type]


def accumulators(program: Program) -> list[tuple[Var, Eqn, list[Eqn]]]:
    """Sums of products that have the same axes on each side, which one accumulator can hold: (the sum, its equation, the products)."""
    defs, count = definitions(program), uses(program)

    sums: dict[str, list[Eqn]] = {}
    for e in program.eqns:
        if e.op == ops.CONTRACT.name:
            sums[e.out.name] = [e]
        elif e.op == ops.ADD.name:
            parts = [a.name for a in e.args if isinstance(a, Var) and a.ty.axes == e.out.ty.axes and count[a.name] == 1]
            if len(parts) == len(e.args) and all(p in sums for p in parts):
                terms = [t for p in parts for t in sums[p]]
                if len({_sides(t) for t in terms}) == 1:
                    sums[e.out.name] = terms
    inner = {a.name for name, found in sums.items() if len(found) > 1 for a in defs[name].args if isinstance(a, Var)}
    return [(defs[name].out, defs[name], found) for name, found in sums.items() if name not in inner]


def _sides(product: Eqn) -> frozenset[frozenset[str]]:
    """The axes that each operand keeps."""
    over = frozenset(product.attr("axes"))  # type: ignore[call-overload]
    return frozenset(frozenset(a.ty.axes) - over for a in product.args if isinstance(a, Var))


def _factors(program: Program, e: Eqn, problems: list[Diagnostic]) -> tuple[Stored, ...]:
    """The stored operands of one product."""
    if e.attr("batch"):
        batch = listed(tuple(e.attr("batch")))  # type: ignore[arg-type]
        problems.append(
            Diagnostic(
                "C0404",
                f"this product has the batch axis {batch}: one product for each of its positions",
                e.span,
                "a batched product",
                notes=("version 1 compiles products whose operands share only contracted axes",),
                help=f"rename {batch} on one side if every pair is wanted, or contract it too",
            )
        )
        return ()
    return tuple(f for a in e.args if isinstance(a, Var) and (f := _stored(program, a, e, problems)))


def _stored(program: Program, var: Var, product: Eqn, problems: list[Diagnostic]) -> Stored | None:
    """The input tensor behind an operand: renamed axes and pinned lanes are views of it, anything else is computed."""
    defs, inputs = definitions(program), {t.name: t for t in program.inputs}
    names: dict[str, str] = {a: a for a in var.ty.axes}  # name here → name in the product
    at: dict[str, int] = {}
    operand = var
    while var.name not in inputs:
        e = defs[var.name]
        if e.op == ops.RENAME.name:
            held: dict = names if e.attr("to") in names else at
            held[str(e.attr("axis"))] = held.pop(str(e.attr("to")))
        elif e.op == ops.LANE.name:
            at[str(e.attr("axis"))] = int(e.attr("index"))  # type: ignore[call-overload]
        elif e.op != ops.STOP.name:
            problems.append(_computed(operand, e, product, defs))
            return None
        var = e.args[0]  # type: ignore[assignment]
    stored = inputs[var.name].axes
    return Stored(var.name, tuple((a, names[a]) for a in stored if a in names), tuple((a, at[a]) for a in stored if a in at))


def _orient(rows: tuple[str, ...], accumulators: list, factors: dict, lanes: frozenset[str]) -> Anchor | Diagnostic:
    """The anchor whose row operands have the axes `rows`, or why there is none."""
    found: list[Accumulator] = []
    for var, eqn, products in accumulators:
        terms = []
        for p in products:
            over = _over(p)
            sides = {frozenset(own for _, own in f.axes if own not in over): f for f in factors[p.out.name]}
            a = sides.pop(frozenset(rows), None)
            if a is None or len(sides) != 1:
                return _apart(accumulators[0][1], p, f"this one has no operand over {listed(rows)} alone")
            terms.append(Term(a, next(iter(sides.values())), over))
        found.append(Accumulator(var, tuple(terms), eqn))
    first = found[0]
    cols = tuple(a for a in first.var.ty.axes if a not in rows and a not in lanes)
    shared = {(t.a, frozenset(t.over)) for t in first.terms}
    for acc in found:
        if set(rows) & lanes:
            where = tuple(sorted(set(rows) & lanes))
            return Diagnostic(
                "C0403",
                f"lanes of {listed(where)} are wanted on both sides of the product",
                acc.eqn.span,
                "this product",
                help="split one side only",
            )
        if {(t.a, frozenset(t.over)) for t in acc.terms} != shared or len(acc.terms) != len(first.terms):
            return _apart(first.eqn, acc.eqn, "it does not multiply the same stored rows")
        if tuple(a for a in acc.var.ty.axes if a not in rows and a not in lanes) != cols:
            return _apart(
                first.eqn, acc.eqn, f"its columns are {listed(tuple(a for a in acc.var.ty.axes if a not in rows))}, not {listed(cols)}"
            )
    if not cols:
        return Diagnostic(
            "C0403",
            "every column axis of this product is split into lanes, so no columns are left",
            first.eqn.span,
            "this product",
            help="give the weight a column axis that is not split",
        )
    order = {(t.a, frozenset(t.over)): i for i, t in enumerate(first.terms)}
    sorted_accs = tuple(replace(a, terms=tuple(sorted(a.terms, key=lambda t: order[t.a, frozenset(t.over)]))) for a in found)
    return Anchor(rows, cols, sorted_accs)


# --- refusals ----------------------------------------------------------------------------------------------------------


def _computed(operand: Var, e: Eqn, product: Eqn, defs: dict[str, Eqn]) -> Diagnostic:
    first = _product_behind(operand, defs)
    if first is not None:
        return Diagnostic(
            "C0401",
            "an operand of this product is computed from another product, so they need a kernel each",
            product.span,
            "this product",
            (Label(first.span, "needs the rows of this one whole"),) if first.span else (),
            notes=("a tile of the second product needs whole rows of the first",),
            help="nothing need be done: the first product's result is stored between the two",
        )
    source = e.args[0] if e.args else None
    if e.op == ops.CAST.name and isinstance(source, Var) and source.name not in defs:
        what = f"`{source.name}` is {source.ty.dtype}, and would be rounded to {operand.ty.dtype} before this product"
        mend = f"declare {source.name} as {operand.ty.dtype}, and round it when it is made"
    else:
        what = (
            f"{say(operand, None)}, an operand of this product, is computed"
            if not is_temporary(operand.name)
            else "an operand of this product is computed"
        )
        mend = (
            "move the computation behind the product if it carries no contracted axis, or store its result first and declare it as an input"
        )
    return Diagnostic(
        "C0405",
        what,
        product.span,
        "this product",
        (Label(e.span, "computed here"),) if e.span else (),
        notes=("a kernel loads operands as they are stored",),
        help=mend,
    )


def _product_behind(var: Var, defs: dict[str, Eqn]) -> Eqn | None:
    """The product from which the value is computed, None where there is none."""
    pending, seen = [var.name], {var.name}
    while pending:
        e = defs.get(pending.pop())
        if e is not None and e.op == ops.CONTRACT.name:
            return e
        more = {a.name for a in e.args if isinstance(a, Var)} - seen if e is not None else set()
        seen |= more
        pending += sorted(more)
    return None


def _apart(first: Eqn, other: Eqn, why: str) -> Diagnostic:
    return Diagnostic(
        "C0403",
        "these products cannot share one kernel",
        other.span,
        why,
        (Label(first.span, "the first product"),) if first.span else (),
        notes=(
            "products share a kernel if they are summed unscaled into one accumulator (`x @ w + t @ b`), "
            "or have the same left side and the same columns (`x @ wg` beside `x @ wu`)",
            "any others are kernels of their own",
        ),
        help="make one product an input of this program, computed by another program",
    )
