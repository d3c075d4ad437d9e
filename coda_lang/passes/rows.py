"""Map stages whose rows' statistics re-enter the same rows, as one: a row kernel in place of two or three passes over memory.

In: stages in launch order, and what must be stored for others. Out: the same with such stages merged, where one kernel can be the merged
one. Non-goals: when a statistic can stay with its rows (`reductions`), the kernel (`backend_cute.gemm_sm90.rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from .. import ops
from ..ir.graph import Atom, Output, Program, Tensor, Var

Fits = Callable[[Program], bool]


def merged(programs: Sequence[Program], wanted: Iterable[str], fits: Fits) -> list[Program]:
    """The stages, merged two by two as long as that `fits`. `wanted` tensors are stored in any case."""
    stages, kept = list(programs), frozenset(wanted)
    while True:
        found = next((s for i, j in _pairs(stages) if (s := _together(stages, i, j, kept, fits)) is not None), None)
        if found is None:
            return stages
        stages = found


def _pairs(stages: list[Program]) -> list[tuple[int, int]]:
    """Map stages, the second of which reads what the first has reduced."""
    return [(i, j) for j, b in enumerate(stages) for i, a in enumerate(stages[:j]) if _maps(a) and _maps(b) and _reenters(a, b)]


def _maps(p: Program) -> bool:
    return not any(e.op == ops.CONTRACT.name for e in p.eqns)


def _reenters(a: Program, b: Program) -> bool:
    """Does b spread over whole tensors what a has made smaller?"""
    read = {t.name for t in b.inputs}
    widest = max((len(t.axes) for t in (*b.inputs, *(o.tensor for o in b.outputs))), default=0)
    return any(o.tensor.name in read and len(o.tensor.axes) < widest for o in a.outputs)


def _together(stages: list[Program], i: int, j: int, wanted: frozenset[str], fits: Fits) -> list[Program] | None:
    """The stages with i and j as one, after all that it reads and before all that reads it; None if it does not fit."""
    a, b, between = stages[i], stages[j], stages[i + 1 : j]
    made = {o.tensor.name for o in a.outputs}
    late = made & {t.name for p in between for t in p.inputs}
    early = {o.tensor.name for p in between for o in p.outputs} & {t.name for t in b.inputs}
    if late and early:
        return None
    others = [p for k, p in enumerate(stages) if k not in (i, j)]
    read = {t.name for p in others for t in p.inputs}
    one = _one(a, b, [o for o in a.outputs if o.tensor.name in read | wanted])
    if not fits(one):
        return None
    at = j - 1 if early or not late else i
    return [*others[:at], one, *others[at:]]


def _one(a: Program, b: Program, kept: list[Output]) -> Program:
    """Both stages: b's equations on a's values."""
    values = {o.tensor.name: o.value for o in a.outputs}

    def value(x: Atom) -> Atom:
        return values.get(x.name, x) if isinstance(x, Var) else x

    known = {e.out.name for e in a.eqns}
    more = tuple(e.reading(tuple(map(value, e.args))) for e in b.eqns if e.out.name not in known)
    inputs: dict[str, Tensor] = {t.name: t for t in (*a.inputs, *b.inputs) if t.name not in values}
    outputs = [replace(o, value=value(o.value)) for o in b.outputs]  # type: ignore[arg-type]
    axes = {x.name: x for x in (*b.axes, *a.axes)}
    sizes = dict((*b.nominal, *a.nominal))
    b = replace(b, axes=tuple(axes.values()), nominal=tuple(sizes.items()))
    return replace(b, inputs=tuple(inputs.values()), outputs=(*outputs, *kept), eqns=(*a.eqns, *more))
