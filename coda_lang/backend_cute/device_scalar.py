"""A value inside a kernel, as the scalar functions see it: what `device_fns` is made of.

In: CuTeDSL scalars and Python numbers. Out: `Scalar`; the arithmetic its operators stand for, which the compiler never contracts into fused
multiply-adds; conversions between types, selects, bit casts. Non-goals: all other functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T

_math = cute.math
_RN = _math.RoundingMode.NEAREST_EVEN


def lifted(fn: Callable) -> Callable:
    """`fn` on CuTeDSL scalars as a function on `Scalar`s too: then so is its result."""

    @functools.wraps(fn)
    def lifted(*args: Any) -> Any:
        result = fn(*[a.value if isinstance(a, Scalar) else a for a in args])
        return Scalar(result) if any(isinstance(a, Scalar) for a in args) else result

    return lifted


def numeric(x: Any) -> Numeric:
    """A CuTeDSL scalar: Python numbers become Boolean, Int32 (Int64 where it must be) or Float32."""
    if isinstance(x, bool):
        return Boolean(x)
    if isinstance(x, int):
        return Int32(x) if -(2**31) <= x < 2**31 else Int64(x)
    if isinstance(x, float):
        return Float32(x)
    return x


def to_float(x: Any) -> Float32:
    """x as f32."""
    x = numeric(x)
    if isinstance(x, Float32):
        return x
    if isinstance(x, Boolean):
        return select(x, Float32(1.0), Float32(0.0))
    return x.to(Float32)


def pair(x: Any, y: Any) -> tuple[Any, Any]:
    """Two operands of one type: f32 if either is a float, else the wider integer; bools among themselves."""
    x, y = numeric(x), numeric(y)
    if type(x) is type(y):
        return x, y
    if isinstance(x, Float32) or isinstance(y, Float32):
        return to_float(x), to_float(y)
    return x.to(Int64), y.to(Int64)


def select(c: Boolean, x: Any, y: Any) -> Any:
    """x where c holds, else y; one type."""
    return type(x)(arith.select(c.ir_value(), x.ir_value(), y.ir_value()))


def bits(x: Float32) -> Int32:
    return Int32(llvm.bitcast(T.i32(), x.ir_value()))


def from_bits(x: Int32) -> Float32:
    return Float32(llvm.bitcast(T.f32(), x.ir_value()))


def instruction(result: Any, text: str, constraints: str, *args: Any) -> Any:
    """One PTX instruction without side effects."""
    values, dialect = [a.ir_value() for a in args], llvm.AsmDialect.AD_ATT
    return llvm.inline_asm(result, values, text, constraints, has_side_effects=False, is_align_stack=False, asm_dialect=dialect)


def times(x: Float32, y: float | Float32) -> Float32:
    """x * y, never part of a fused multiply-add."""
    return _math.mul(x, numeric(y), rounding=_RN)


def plus(x: Float32, y: float | Float32) -> Float32:
    """x + y, never part of a fused multiply-add."""
    return _math.add(x, numeric(y), rounding=_RN)


def polynomial(x: Float32, coefficients: tuple[float, ...]) -> Float32:
    """Horner's rule, highest power first."""
    value = Float32(coefficients[0])
    for c in coefficients[1:]:
        value = _math.fma(value, x, Float32(c))
    return value


@lifted
def add(x: Any, y: Any) -> Any:
    """x + y."""
    x, y = pair(x, y)
    return plus(x, y) if isinstance(x, Float32) else x + y


@lifted
def sub(x: Any, y: Any) -> Any:
    """x - y."""
    x, y = pair(x, y)
    return plus(x, -y) if isinstance(x, Float32) else x - y


@lifted
def mul(x: Any, y: Any) -> Any:
    """x * y."""
    x, y = pair(x, y)
    return times(x, y) if isinstance(x, Float32) else x * y


@lifted
def neg(x: Any) -> Any:
    """-x."""
    return -numeric(x)


@lifted
def div(x: Any, y: Any) -> Float32:
    """x / y over the full range of y; integers as f32."""
    return _math.div(to_float(x), to_float(y), full=True)


class Scalar:
    """A CuTeDSL scalar whose float arithmetic is never contracted."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __add__(self, other: Any) -> Scalar:
        return add(self, other)

    def __radd__(self, other: Any) -> Scalar:
        return add(other, self)

    def __sub__(self, other: Any) -> Scalar:
        return sub(self, other)

    def __rsub__(self, other: Any) -> Scalar:
        return sub(other, self)

    def __mul__(self, other: Any) -> Scalar:
        return mul(self, other)

    def __rmul__(self, other: Any) -> Scalar:
        return mul(other, self)

    def __truediv__(self, other: Any) -> Scalar:
        return div(self, other)

    def __rtruediv__(self, other: Any) -> Scalar:
        return div(other, self)

    def __neg__(self) -> Scalar:
        return neg(self)

    def __bool__(self) -> bool:
        raise TypeError("a value of the kernel is not known while it is traced; choose with f.where")
