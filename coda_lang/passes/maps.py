"""Kernels without a product: which axes of a map stage are its rows and which its columns.

In: a stage without products. Out: `Anchor`s without accumulators, to be tried in order. Values come from stored tensors in place of an
accumulator, and the same rules place what is computed of them. Non-goals: whether a body fits (`place`), storage (`layout`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from .. import ops
from ..ir.graph import Eqn, Program, Var
from .state import Anchor, nominal


def maps(program: Program, lanes: frozenset[str]) -> tuple[Anchor, ...]:
    """The ways to take the widest value's axes apart, in the order in which tensors store them; a single axis makes columns."""
    found = [anchor for wide in _positions(program) for anchor in _splits(program, wide - lanes)]
    return tuple(dict.fromkeys(found))


def _splits(program: Program, wide: frozenset[str]) -> Iterator[Anchor]:
    stored = [*(o.tensor.axes for o in program.outputs), *(t.axes for t in program.inputs)]
    orders = [tuple(a for a in axes if a in wide) for axes in stored if wide <= set(axes)]
    orders = list(dict.fromkeys(orders or [tuple(a.name for a in program.axes if a.name in wide)]))
    if len(wide) < 2:
        yield Anchor((), orders[0], ())
        return
    for i in range(1, len(wide)):
        yield from (Anchor(order[:i], order[i:], ()) for order in orders)
    for e in program.eqns:  # a reduction that leaves a mix of rows and columns: what it keeps are rows
        over = tuple(a for a in orders[0] if ops.TABLE[e.op].kind == "reduce" and a in _reduced(e))
        if over and len(over) < len(wide):
            yield Anchor(tuple(a for a in orders[0] if a not in over), over, ())


def _positions(program: Program) -> tuple[frozenset[str], ...]:
    """The axes of the widest value that is stored or reduced, the larger at nominal extents where several are as wide.

    Several runs of one axis lie side by side along it; where that does not do, along the longest of them.
    """
    size = nominal(program)
    reduced = [e.args[0] for e in program.eqns if ops.TABLE[e.op].kind == "reduce"]
    values = [o.value.ty.axes for o in program.outputs] + [v.ty.axes for v in reduced if isinstance(v, Var)]
    runs = [(str(e.attr("to")), str(e.attr("axis"))) for e in program.eqns if e.op == ops.RUN.name]
    whole = [tuple(axis if a == to else a for a in axes) for to, axis in runs for axes in values if to in axes]

    def widest(values: list[tuple[str, ...]]) -> frozenset[str]:
        return frozenset(max(values, key=lambda axes: prod(size[a] for a in axes), default=()))

    return tuple(dict.fromkeys((widest(values + whole), widest(values))))


def _reduced(e: Eqn) -> tuple[str, ...]:
    attrs = dict(e.attrs)
    return (str(attrs["axis"]),) if "axis" in attrs else tuple(attrs["axes"])  # type: ignore[arg-type]
