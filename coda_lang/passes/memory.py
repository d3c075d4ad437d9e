"""How much memory a training step holds: what the forward leaves, what stands between kernels, gradients, kernel by kernel.

In: a `Plan` with `derived`. Out: `Moment`s, one a kernel of the backward, at nominal extents. A tensor is held from the kernel that writes
it to the last one that reads it, as the host does (`backend_cute.plans`); a residual from the start, a gradient to the end. Inputs, outputs
and cotangents are the caller's and do not count; nor do partial results, which are small. Non-goals: deciding what is saved (`saving`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..ir.graph import Tensor
from ..ir.kernels import Plan
from .state import nominal


@dataclass(frozen=True)
class Moment:
    """What is held while a kernel runs, in bytes."""

    kernel: str
    residuals: float
    between: float
    gradients: float

    @property
    def total(self) -> float:
        return self.residuals + self.between + self.gradients


def moments(plan: Plan) -> tuple[Moment, ...]:
    """The backward, kernel by kernel."""
    derived = plan.derived
    assert derived is not None
    parts = derived.backward.parts
    size = nominal(plan.program) | nominal(derived.backward.program)
    saved = {t.name for t in derived.residuals}
    results = {o.tensor.name for o in derived.backward.program.outputs}
    first: dict[str, int] = dict.fromkeys(saved, 0)
    last: dict[str, int] = {}
    tensors: dict[str, Tensor] = {t.name: t for t in derived.residuals}
    for i, part in enumerate(parts):
        for o in part.program.outputs:
            tensors[o.tensor.name] = o.tensor
            first[o.tensor.name] = i
            last[o.tensor.name] = len(parts) if o.tensor.name in results else i
        for t in part.program.inputs:
            if t.name in first:
                last[t.name] = max(last.get(t.name, i), i)

    chunk = {name: {loop.axis: min(loop.size, size[loop.axis])} for loop in derived.backward.loops for name in loop.local}

    def bytes_at(i: int, names: set[str]) -> float:
        alive = [tensors[n] for n in names if n in first and first[n] <= i <= last.get(n, 0)]
        return sum(prod((size | chunk.get(t.name, {}))[a] for a in t.axes) * t.dtype.bits / 8 for t in alive)

    between = set(first) - saved - results
    return tuple(Moment(p.launched[0].name, bytes_at(i, saved), bytes_at(i, between), bytes_at(i, results)) for i, p in enumerate(parts))


def peak(plan: Plan) -> Moment | None:
    """The moment that holds most; None where there is no kernel."""
    return max(moments(plan), key=lambda m: m.total, default=None)


__all__ = ["Moment", "moments", "peak"]
