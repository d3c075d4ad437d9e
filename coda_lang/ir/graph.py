"""The tensor IR: a program in A-normal form over named axes.

Semantics
    Values are tensors over sets of named axes. Arithmetic is f32 (floats) or exact (integers); a bf16/f16 operand is read as its f32 value.
    `contract` accumulates in f32; its operands were rounded where the program says so (explicit casts in the IR). Rounding
    happens only at a cast. Reductions run in fixed order. NaN and infinity propagate through min, max, relu and clamp; `where`
    takes the chosen branch only. `gather` outside the axis is NaN. `logsumexp` of all -inf is -inf.
    The IR broadcasts freely by name (the stricter rule for sources is checked by `build`).

Kinds of op: contract, map, reduce, lanes, move. The operator table (`coda_lang.ops`) defines every op that may stand in `Eqn.op`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..source import Span
from .types import Axis, DType, Ty


@dataclass(frozen=True)
class Var:
    """A value with its type."""

    name: str
    ty: Ty


@dataclass(frozen=True)
class Lit:
    """A constant scalar: f32 floats, i32/i64 ints, bools. Prints and reads back exactly."""

    value: float | int | bool
    dtype: DType


Atom = Var | Lit


@dataclass(frozen=True)
class Eqn:
    """out = op(args) with static `attrs`, a sorted tuple of (name, value); axis attributes hold axis names."""

    out: Var
    op: str
    args: tuple[Atom, ...]
    attrs: tuple[tuple[str, object], ...] = ()
    span: Span | None = field(default=None, compare=False)

    def attr(self, name: str) -> object:
        """The attribute `name`; KeyError where absent."""
        return dict(self.attrs)[name]

    def reading(self, args: tuple[Atom, ...]) -> Eqn:
        """The same of other arguments; itself where they are its own."""
        return self if args == self.args else Eqn(self.out, self.op, args, self.attrs, self.span)


@dataclass(frozen=True)
class Tensor:
    """A stored tensor of the signature: axes in storage order, last contiguous."""

    name: str
    dtype: DType
    axes: tuple[str, ...]
    const: bool = False
    span: Span | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Output:
    """A stored result: the tensor and the variable that holds its (already rounded) value."""

    tensor: Tensor
    value: Var


@dataclass(frozen=True)
class Program:
    """One program. `axes` lists every axis once, in program order. `requires` are shape conditions: Python expressions over axis names.

    `save`, `recompute`: values that are kept, or not, for the derivative; `distribute`: operands whose products are taken apart into a
    product and terms of rank one. `chunk`: (axis, size): what stands between kernels and carries the axis exists for so many of its
    positions at a time; at most one.
    """

    name: str
    axes: tuple[Axis, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Output, ...]
    eqns: tuple[Eqn, ...]
    requires: tuple[str, ...] = ()
    nominal: tuple[tuple[str, int], ...] = ()
    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    distribute: tuple[str, ...] = ()
    chunk: tuple[tuple[str, int], ...] = ()
    forward_only: bool = False
    doc: str = ""
    span: Span | None = field(default=None, compare=False)

    def told(self, now: Callable[[str], str | None]) -> Program:
        """What is said of values, said of those that they are `now`; of none where one is no more."""
        save, recompute, distribute = (
            tuple(dict.fromkeys(n for n in map(now, names) if n is not None)) for names in (self.save, self.recompute, self.distribute)
        )
        return replace(self, save=save, recompute=recompute, distribute=distribute)

    def extent(self, axis: str) -> int | None:
        """The fixed extent of an axis, None where free."""
        return {a.name: a.extent for a in self.axes}[axis]
