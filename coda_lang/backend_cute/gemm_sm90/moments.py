"""Sums of squared distances from the mean, gathered in one pass: states and how two of them become one (Chan, Golub, LeVeque).

In: f32 scalars of a thread, masks, states. Out: `State`s (count, anchor, offset, M2): `count` values with the mean anchor + offset and
Σ (x − mean)² = M2; all zeros for none. An *open* state, one a thread still adds to, is (count, anchor, Σ (x − anchor), Σ (x − anchor)²).

The anchor is a value of the data, so distances from it are as small as the data spread, however far from zero the data lie: with n values
in a thread (at most a few dozen) Σ (x − anchor)² is at most 1 + n times M2, and on average twice. The mean is never rounded to one
number: the difference of two anchors is exact where it matters. Empty states cost selects, not branches. As in `groups`, no multiplication
is contracted with an addition. Non-goals: which values take part, memory.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from ..device_scalar import plus, times
from .ring import select

State = tuple  # of Float32


def _inverse(count: Float32) -> Float32:
    return cute.math.rcp(cute.arch.fmax(count, Float32(1.0)), approx=True)


def _tree(values: list[Float32]) -> Float32:
    while len(values) > 1:
        pairs = [plus(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def _first(values: list[Float32], inside: list | None) -> Float32:
    """The first value that takes part (any where none does)."""
    found = values[0]
    for value, ok in reversed(list(zip(values, inside or ()))):
        found = select(ok, value, found)
    return found


def absorb(state: State, values: list[Float32], inside: list | None = None, late: bool = False) -> State:
    """The open state after `values`, those of which `inside` says so; () is one before any. `late`: earlier values may all have been
    outside, so that the anchor is still to be found."""
    if not state:
        state = (Float32(0.0), _first(values, inside), Float32(0.0), Float32(0.0))
    elif late:
        state = (state[0], select(state[0] == 0.0, _first(values, inside), state[1]), *state[2:])
    count, anchor, total, squares = state
    apart = [plus(v, -anchor) for v in values]
    ones = [Float32(1.0) for _ in values]
    if inside is not None:
        apart = [select(ok, d, Float32(0.0)) for d, ok in zip(apart, inside)]
        ones = [select(ok, one, Float32(0.0)) for one, ok in zip(ones, inside)]
    more = _tree(ones) if inside is not None else Float32(float(len(values)))
    return plus(count, more), anchor, plus(total, _tree(apart)), plus(squares, _tree([times(d, d) for d in apart]))


def closed(state: State) -> State:
    """An open state as one that can meet others."""
    if not state:
        return tuple(Float32(0.0) for _ in range(4))
    count, anchor, total, squares = state
    offset = times(total, _inverse(count))
    rest = cute.arch.fmax(plus(squares, -times(total, offset)), Float32(0.0), nan=True)
    empty = count == 0.0
    return (count, *(select(empty, Float32(0.0), v) for v in (anchor, offset, rest)))


def merge(a: State, b: State) -> State:
    """The state of both, in this order, with the anchor that is nearer to its mean: one outlier as an anchor is soon left."""
    count = plus(a[0], b[0])
    inverse = _inverse(count)
    apart = plus(plus(b[1], -a[1]), plus(b[2], -a[2]))
    first, second = times(a[0], inverse), times(b[0], inverse)
    between = times(times(apart, apart), times(a[0], second))
    near = (a[0] > 0.0) & (_distance(a[2]) <= _distance(b[2]))
    keep = near | (b[0] == 0.0)
    anchor = select(keep, a[1], b[1])
    offset = select(keep, plus(a[2], times(apart, second)), plus(b[2], -times(apart, first)))
    return count, anchor, offset, plus(plus(a[3], b[3]), between)


def _distance(x: Float32) -> Float32:
    return cute.arch.fmax(x, -x)


def ordered(mine: State, other: State, first: Any) -> tuple[State, State]:
    """Both states, the first lane's first: what two lanes merge in the same order has the same bits."""
    return tuple(select(first, x, y) for x, y in zip(mine, other)), tuple(select(first, y, x) for x, y in zip(mine, other))
