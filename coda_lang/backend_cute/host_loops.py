"""Plans the launches of a loop: once for each chunk of an axis, over parts of the whole tensors and buffers that all chunks share.

In: the planner of a call (`host`), a loop with its kernels. Out: the planner's steps. Everything is decided beforehand, as for any call.
A chunk's buffers are those of the chunk before, so a loop takes the memory of one chunk, whole results, and one f32 tensor for each sum
over the axis. Non-goals: which kernels are in a loop (`loops`), how one is launched (`host`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import loops, spec
from .binding import Binding
from .layout import alignment
from .plans import Step
from .prune import written

Shape = tuple[int, ...]
Buffer = tuple[int, Shape, Shape, Any]  # slot, shape, strides, dtype


@dataclass
class Pool:
    """The buffers of a loop: what one chunk has `taken` is `free` for the next."""

    taken: list[Buffer] = field(default_factory=list)
    free: list[Buffer] = field(default_factory=list)

    def turn(self, kept: set[int]) -> None:
        """The next chunk begins; slots in `kept` are not given away."""
        self.free = [b for b in (*self.free, *self.taken) if b[0] not in kept]
        self.taken = []

    def find(self, shape: Shape, strides: Shape, dtype: Any) -> int | None:
        """A free buffer of this form, else one of the dtype that is large enough; None where there is none."""
        fits = [b for b in self.free if b[3] == dtype and span(*b[1:3]) >= span(shape, strides)]
        if not fits:
            return None
        found = min(fits, key=lambda b: (b[1:3] != (shape, strides), span(*b[1:3])))
        self.free.remove(found)
        self.taken.append(found)
        return found[0]


def span(shape: Shape, strides: Shape) -> int:
    """How many elements lie between the first and the last, both included."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))


class Looping:
    """The part of a planner that is about loops; `host` has the rest of it.

    Within a loop `extents` and `binding` are those of a chunk, `places` are the parts that its kernels write to.
    """

    program: spec.Program
    plan: Any
    extents: Mapping[str, int]
    binding: Binding
    declared: dict[str, spec.Argument]
    temps: set[str]
    home: dict[str, int]
    returns: dict[str, int]
    operands: dict[tuple, int]
    after: list[Step]
    meta: list[Any]
    places: dict[str, int]
    pool: Pool | None
    _kernel: Callable[[spec.Kernel], None]
    _slot: Callable[..., int]
    _do: Callable[..., None]
    _view: Callable[..., int]
    _usable: Callable[..., int]
    _judged: Callable[..., Any]
    _as_modes: Callable[..., Any]
    _own: Callable[..., Any]
    _fill: Callable[[int, float], None]
    _fresh: Callable[[spec.Argument], int]
    _temporary: Callable[..., int]
    address: list[int]

    def _loop(self, item: loops.Round) -> None:
        """Add the loop's steps."""
        loop, extents, binding = item.loop, self.extents, self.binding
        writes = set().union(*map(written, item.kernels))
        used = {t.name for k in item.kernels for t in k.tensors}
        along = {name: dim for name, dim in loops.along(self.program, loop).items() if name in used}
        wholes = {name: self._whole(name, name in writes) for name in along}
        sums = {after: self._sum(before, after) for before, after in loop.carried}
        pairs = {before: sums[after] for before, after in loop.carried}
        changing = {*along, *loop.local, *sums, *pairs}
        self.pool, chunks = Pool(), list(loops.chunks(loop, extents))
        for start, length in chunks:
            self.extents = loops.inside(loop, extents, start, length)
            self.binding = Binding(dict(self.extents))
            parts = {name: self._part(wholes[name], dim, start, length) for name, dim in along.items()}
            self.home |= parts | pairs
            self.places = {name: slot for name, slot in parts.items() if name in writes} | sums
            self.operands = {key: slot for key, slot in self.operands.items() if key[0] not in changing}
            self.pool.turn(set(self.operands.values()))
            later, self.after = self.after, []
            for kernel in item.kernels:
                self._kernel(kernel)
            self.plan.steps += self.after
            self.after = later
        self.extents, self.binding, self.pool, self.places = extents, binding, None, {}
        self.home |= wholes | sums
        self.operands = {key: slot for key, slot in self.operands.items() if key[0] not in changing}
        self.plan.copies[:] = dict.fromkeys(self.plan.copies)
        self.plan.notes[:] = dict.fromkeys(self.plan.notes)
        each = f"chunks of {loop.axis!r}, {loop.size} at a time" if loop.size > 1 else f"positions of {loop.axis!r}"
        self.plan.notes.append(f"{', '.join(loop.kernels)}: once for each of {len(chunks)} {each}")

    def _whole(self, name: str, made: bool) -> int:
        """The slot of a tensor that chunks see parts of, in declared dims; allocated where the loop writes it."""
        argument = self.declared[name]
        if made and name not in self.home:
            self.home[name] = self._temporary(name) if name in self.temps else self._fresh(argument)
        source, shape = self.home[name], self.binding.declared(argument)
        if tuple(self.meta[source].shape) == shape:
            return source
        like = self.meta[source].reshape(shape)
        slot = self._slot(shape, like.stride(), like.dtype, self.address[source], of=source)
        self._do(lambda t: t.reshape(shape), source, out=slot)
        return slot

    def _sum(self, before: str, after: str) -> int:
        """The slot of what chunks add up, zeros."""
        slot = self._temporary(before, after)
        self._fill(slot, 0)
        return slot

    def _part(self, whole: int, dim: int, start: int, length: int) -> int:
        """A slot for a part of a tensor."""
        meta = self.meta[whole]
        offset = start * meta.stride(dim) * meta.element_size()
        shape = tuple(length if i == dim else n for i, n in enumerate(meta.shape))
        slot = self._slot(shape, meta.stride(), meta.dtype, self.address[whole] + offset, of=whole)
        self._do(lambda t: t.narrow(dim, start, length), whole, out=slot)
        return slot

    def _into(self, kernel: spec.Kernel, record: spec.Tensor, packed: bool) -> int:
        """Where a kernel writes its part of a tensor: the part itself, or a buffer that is copied there before the next chunk."""
        place = self.home[record.name] = self.places[record.name]
        view = self._as_modes(place, record)
        if isinstance(kernel, spec.Finish) and view is not None and self.address[place] % alignment(record) == 0:
            return self._view(place, tuple(view.shape) or (1,), view.stride() or (1,))
        if not isinstance(kernel, spec.Finish) and not self._judged(place, record, packed).reason:
            return self._usable(place, record, packed)
        buffer, unmerged, back = self._own(record, packed)
        declared = self.binding.declared(self.declared[record.name])
        self.after.append(Step(lambda part, made: part.view(declared).copy_(made.view(unmerged).permute(back)), (place, buffer)))
        return buffer
