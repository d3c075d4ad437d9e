"""`Finisher`: one `Finish` record as a kernel, the second stage of every reduction.

In: the record and its scalar function. Out: an object that `cute.compile` accepts: called with the device tensors in the order of
`Finish.tensors`, one Int32 per name in `Finish.extents`, and the stream. A partial is [parts, length] f32 ([planes, parts, length] for
several planes), an output anything contiguous of `length` elements, other tensors have one dim per mode (one element where they have none).

A block of `THREADS` holds `width` neighbouring positions, read coalesced, times `THREADS / width` slices of the parts. A slice adds
its parts in order, every slice-count apart; the slices meet in shared memory in a fixed tree. The width follows from the shape alone, so
the same call gives the same bits every time; nothing is atomic. Nothing to reduce (parts 0) gives the identity of the kind.
Non-goals: checking arguments (the host does that) and laying out positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from . import device_fns
from .gemm_sm90 import groups, ports, views
from .spec import Extent, Finish, Iota, Load, Partial, planes

THREADS = 512
WIDE, NARROW = 32, 8  # positions in a block: a full line of memory each, a sector each, or (for a few positions) one
BATCH = 4  # loads in flight in a thread
FILLED = 65536  # threads that keep the GPU busy


def _parts(work: cute.Tensor) -> Any:
    return work.shape[len(work.shape) - 2]


def _absorb(kind: str, state: groups.State, work: cute.Tensor, parts: list, limit: Int32, position: Int32) -> groups.State:
    """The state after a batch of partials, all loaded before the first is used; parts at or past `limit` do not count."""
    rows = [Int32(i) for i in range(*planes(kind))] if planes(kind) else [None]
    batch = []
    for part in parts:
        at = (cutlass.min(part, limit - 1), position)
        values = [views.element(work, at if row is None else (row, *at))[0] for row in rows]
        batch.append([Float32(cutlass.select_(part < limit, v, i)) for v, i in zip(values, groups.identity(kind))])
    if not planes(kind):
        return groups.absorb(kind, state, [value for (value,) in batch])
    for part in batch:
        state = groups.merge(kind, state, tuple(part))
    return state


def _result(kind: str, state: groups.State) -> Float32:
    """The one value of a state; an infinite maximum is the logsumexp, whatever the sum counts beside it, unless that is NaN."""
    if kind != "lse":
        return groups.result(kind, state)
    top, total = state
    infinite = device_fns.logical_and(device_fns.eq(device_fns.abs(top), groups.INFINITY), device_fns.eq(total, total))
    return device_fns.where(infinite, top, device_fns.add(top, device_fns.log(total)))


class Finisher:
    """A kernel to be compiled. `fns` maps the record's function name to the scalar function."""

    def __init__(self, spec: Finish, fns: dict[str, Callable[..., tuple]]) -> None:
        self.spec, self.fn = spec, fns[spec.fn]
        self.dtypes = {t.name: views.DTYPES[t.dtype] for t in spec.tensors}
        self.reduced = tuple(p for p in spec.partials if p.kind != "only")

    @cute.jit
    def __call__(self, *args):
        count = len(self.spec.tensors)
        tensors = {record.name: tensor for record, tensor in zip(self.spec.tensors, args)}
        length = Int32(cute.size(tensors[self.spec.outputs[0]]))
        width = Int32(THREADS)
        if cutlass.const_expr(len(self.reduced) > 0):
            parts = Int32(0)
            for partial in self.reduced:
                parts = cutlass.max(parts, Int32(_parts(tensors[partial.work])))
            slices = THREADS // WIDE
            width = cutlass.select_(length >= NARROW, Int32(NARROW), Int32(1))
            width = Int32(cutlass.select_((length >= WIDE) & ((length * slices >= FILLED) | (parts <= 4 * slices)), Int32(WIDE), width))
        self.kernel(args[:count], args[count:-1], length, width).launch(
            grid=((length + width - 1) // width, 1, 1), block=(THREADS, 1, 1), stream=args[-1]
        )

    @cute.kernel
    def kernel(self, arguments, extents, length: Int32, width: Int32):
        tensors = {record.name: tensor for record, tensor in zip(self.spec.tensors, arguments)}
        named = dict(zip(self.spec.extents, extents))
        thread = cute.arch.thread_idx()[0]
        position = cute.arch.block_idx()[0] * width + thread % width
        states = {}
        if cutlass.const_expr(len(self.reduced) > 0):
            smem = SmemAllocator()
            for partial in self.reduced:
                state = self.slice(partial, tensors[partial.work], position, length, thread // width, THREADS // width)
                room = [smem.allocate_tensor(Float32, cute.make_layout(THREADS), 16) for _ in range(len(state))]
                states[partial.work] = self.meet(partial.kind, state, room, thread, width)
        if thread < width:
            if position < length:
                self.store(tensors, named, states, position)

    @cute.jit
    def slice(self, partial: cutlass.Constexpr, work, position: Int32, length: Int32, first: Int32, step: Int32):
        """The state of parts first, first + step, …"""
        state = groups.identity(partial.kind)
        column = cutlass.min(position, length - 1)
        limit = Int32(_parts(work))
        for part in cutlass.range(first, limit, BATCH * step):
            state = _absorb(partial.kind, state, work, [part + i * step for i in range(BATCH)], limit, column)
        return state

    @cute.jit
    def meet(self, kind: cutlass.Constexpr, state, room, thread: Int32, width: Int32):
        """The state of all slices, in the threads of the first."""
        for i in cutlass.range_constexpr(len(state)):
            room[i][thread] = state[i]
        cute.arch.sync_threads()
        for step in cutlass.range_constexpr(9):  # 256, 128, … 1 threads apart
            distance = THREADS >> (step + 1)
            if distance >= width:
                if thread < distance:
                    state = groups.merge(kind, state, tuple(r[thread + distance] for r in room))
                    for i in cutlass.range_constexpr(len(state)):
                        room[i][thread] = state[i]
                cute.arch.sync_threads()
        return state

    def store(self, tensors: dict, extents: dict, states: dict, position: Int32) -> None:
        """Apply the scalar function at one position."""
        values = [self.partial(p, tensors, states, position) for p in self.spec.partials]
        for port in self.spec.ports:
            if isinstance(port, Extent):
                values.append(Int32(ports.size_of(port.sizes, extents)))
            elif isinstance(port, Iota):
                values.append(ports.coordinate(port.index, position, None, extents))
            elif isinstance(port, Load):
                values.append(ports.load(port, tensors[port.tensor], position, None, extents))
        for name, value in zip(self.spec.outputs, device_fns.call(self.fn, *values), strict=True):
            target = tensors[name].iterator + cutlass.Int64(position)
            cute.make_tensor(target, cute.make_layout(1))[0] = value.to(self.dtypes[name])

    @staticmethod
    def partial(partial: Partial, tensors: dict, states: dict, position: Int32) -> Float32:
        if partial.kind == "only":
            return views.element(tensors[partial.work], (Int32(0), position))[0]
        return _result(partial.kind, states[partial.work])
