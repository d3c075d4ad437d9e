"""Plans what kernels need beside the program's tensors: partial results, single elements, zeros for contractions over nothing.

In: the planner of a call (`host`), records of Gemms and finishers. Out: slots, and steps that fill them. Non-goals: the program's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import configs, layout, spec
from .spec import mode_shape
from .torch_fns import DTYPES
from .twin import IDENTITY


class Working:
    """The part of a planner that is about work tensors; `host` has the rest of it."""

    plan: Any
    extents: Mapping[str, int]
    meta: list[Any]
    work: dict[str, int]
    _new: Callable[..., int]
    _contiguous: Callable[..., int]
    _view: Callable[..., int]
    _fill: Callable[[int, float], None]
    _do: Callable[..., None]
    _target: Callable[..., int]

    def _zeros(self, kernel: spec.Gemm, records: Mapping[str, spec.Tensor], depths: Sequence[int]) -> dict[str, int]:
        """Operands of an empty contraction, eight zeros deep: a tile load cannot describe a tensor of no elements."""
        made: dict[str, int] = {}
        for p, depth in zip(kernel.products, depths, strict=True):
            if depth:
                continue
            for matrix in (p.a, *p.b):
                record = records[matrix.tensor]
                shape = [8 if i in matrix.cols and size == 0 else size for i, size in enumerate(mode_shape(record, self.extents))]
                if record.name not in made:
                    made[record.name] = self._new(shape, layout.pitched(record, False, tuple(shape)), DTYPES[record.dtype])
                    self._fill(made[record.name], 0)
            self.plan.notes.append(f"{kernel.name}: {p.a.tensor!r} has nothing to contract: the product is 0")
        return made

    def _eight(self, kernel: spec.Gemm, record: spec.Tensor, empty: int) -> int:
        """In place of a tensor without columns: eight zeros deep, which a row kernel does not touch."""
        shape = tuple(size or 8 for size in self.meta[empty].shape)
        pitched = layout.pitched(record, record.name in layout.packed_tensors(kernel), shape)
        slot = self._new(shape, layout.contiguous(shape) if record.role == "work" else pitched, DTYPES[record.dtype])
        self._fill(slot, 0)
        return slot

    def _point(self, kernel: spec.Gemm, record: spec.Tensor) -> int:
        """Where no column claims the element it stays NaN."""
        if record.role == "work":
            slot = self.work[record.name] = self._contiguous(mode_shape(record, self.extents) or (1,), DTYPES[record.dtype])
        else:
            slot = self._target(kernel, record)
        self._fill(slot, math.nan)
        return slot

    def _partials(self, kernel: spec.Gemm, sink: spec.RowReduce | spec.ColReduce, config: spec.Config, m: int, n: int) -> int:
        shape = configs.partial_shape(kernel, config, sink, max(m, 1), max(n, 1))
        kept = m if isinstance(sink, spec.RowReduce) else n
        slot = self.work[sink.work] = self._contiguous((*shape[:-1], kept), torch.float32)
        if m == 0 or n == 0:
            self._identity(slot, sink.kind)
        return slot

    def _identity(self, slot: int, kind: str) -> None:
        self._fill(slot, IDENTITY[kind])
        if kind == "lse":
            self._do(lambda made: made[1].zero_(), slot)

    def _parts(self, partial: spec.Partial, length: int) -> int:
        """A work tensor as [parts, length]; one part of the identity where a reduction was over nothing."""
        leading = spec.planes(partial.kind)
        source = self.work[partial.work]
        size = self.meta[source].numel()
        if size:
            shape = (*leading, size // (math.prod(leading) * length), length)
            return self._view(source, shape, layout.contiguous(shape))
        slot = self._contiguous((*leading, 1, length), torch.float32)
        self._identity(slot, partial.kind)
        return slot
