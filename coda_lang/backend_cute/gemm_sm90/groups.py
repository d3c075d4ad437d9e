"""Reductions inside a warpgroup: kinds, their identities, and the shuffles that combine lanes in a fixed order.

In: lists of f32 scalars. Out: `State`s, tuples of f32 scalars: one for sum, max, min and amax, (max, sum) for logsumexp, four for moments
(`moments`). A thread begins with `begin`, absorbs values, and closes its state before that meets others. NaN propagates in every kind.
Non-goals: which columns take part (the callers say so) and memory.

A logsumexp state (m, s) stands for m + log(s), or for m where m is infinite: no step subtracts infinities, an empty state (-inf, 0) adds
0 to any other, and s of a state whose m is +inf is infinite. No multiplication is contracted with an addition: what else a kernel does
would decide which, and with it the bits.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from ..device_scalar import plus, times
from ..spec import planes
from . import moments
from .ring import select

INFINITY = float("inf")
LOG2_E = 1.4426950408889634

State = tuple  # of Float32


@dsl_user_op
def settle(values: list, m: Int32, *, loc=None, ip=None) -> None:
    """Have these 32-bit values computed by now, at the price of one instruction each: a store that never happens needs them (m >= 1).

    Without it the compiler moves the work of all steps down to where a tile's reductions are used, and keeps every accumulator
    alive until then.
    """
    if not values:
        return
    letters = ["f" if isinstance(v, Float32) else "r" for v in values]
    stores = "".join(f" @never st.shared.b32 [${len(values)}], ${i};" for i in range(len(values)))
    llvm.inline_asm(
        None, [v.ir_value(loc=loc, ip=ip) for v in (*values, m)],
        f"{{ .reg .pred never; setp.lt.s32 never, ${len(values)}, 1;{stores} }}", ",".join((*letters, "r")),
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


_IDENTITY = {"sum": (0.0,), "max": (-INFINITY,), "min": (INFINITY,), "amax": (0.0,), "lse": (-INFINITY, 0.0)}
_IDENTITY |= {"moments": (0.0, 0.0, 0.0, 0.0)}


def quantities(kind: str) -> int:
    """How many scalars a state has."""
    return next(iter(planes(kind)), 1)


def begin(kind: str) -> State:
    """The state of a thread before its first value."""
    return () if kind == "moments" else identity(kind)


def identity(kind: str) -> State:
    return tuple(Float32(v) for v in _IDENTITY[kind])


def _maximum(a, b):
    return cute.arch.fmax(a, b, nan=True)


def _combine(kind: str, a, b):
    if kind == "sum":
        return a + b
    return cute.arch.fmin(a, b, nan=True) if kind == "min" else _maximum(a, b)


def _absolute(value):
    return cute.arch.fmax(value, -value, nan=True)


def _exp(x):
    return cute.math.exp2(x * LOG2_E, fastmath=True)


def _centre(m):
    return select((m == INFINITY) | (m == -INFINITY), Float32(0.0), m)


def _tree(values: list, combine):
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def absorb(kind: str, state: State, values: list, inside: list | None = None, late: bool = False) -> State:
    """The state after those `values` of which `inside` holds (None: all). `late`: earlier ones may all have been outside."""
    if kind == "moments":
        return moments.absorb(state, values, inside, late)
    if inside is not None:
        values = [select(ok, v, Float32(_IDENTITY[kind][0])) for v, ok in zip(values, inside)]
    if kind == "lse":
        top = _maximum(state[0], _tree(list(values), _maximum))
        centre = _centre(top)
        total = _tree([_exp(v - centre) for v in values], lambda a, b: a + b)
        return top, plus(times(state[1], _exp(state[0] - centre)), total)
    if kind == "amax":
        values = [_absolute(v) for v in values]
    return (_combine(kind, state[0], _tree(list(values), lambda a, b: _combine(kind, a, b))),)


def closed(kind: str, state: State) -> State:
    """A thread's state as one that can meet others."""
    return moments.closed(state) if kind == "moments" else state


def merge(kind: str, a: State, b: State) -> State:
    if kind == "moments":
        return moments.merge(a, b)
    if kind == "lse":
        top = _maximum(a[0], b[0])
        centre = _centre(top)
        return top, plus(times(a[1], _exp(a[0] - centre)), times(b[1], _exp(b[0] - centre)))
    return (_combine(kind, a[0], b[0]),)


def across(kind: str, state: State, distances: tuple[int, ...]) -> State:
    """Butterfly over lanes; all of them end with the same bits."""
    for distance in distances:
        other = tuple(cute.arch.shuffle_sync_bfly(v, distance) for v in state)
        if kind == "moments":  # not symmetric in its rounding
            state, other = moments.ordered(state, other, (cute.arch.lane_idx() & distance) == 0)
        state = merge(kind, state, other)
    return state


def result(kind: str, state: State):
    """The one value of a state."""
    if kind == "lse":
        return plus(_centre(state[0]), cute.math.log(state[1]))
    return state[-1]
