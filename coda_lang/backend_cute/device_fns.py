"""Scalar functions inside a kernel, twins of `torch_fns`: the same names and arguments.

In: CuTeDSL scalars (Float32, Int32, Int64, Boolean) or Python numbers. Out: CuTeDSL scalars. `call(fn, *values)` runs an emitted
scalar function with this module as its `f`; inside, values are `Scalar`s, whose `+ - *` round each by itself: `a * b + c` is two
roundings on every kernel, whatever stands around it, and one only where `fma` is written. (The compiler would otherwise contract
where it pleases, and two kernels with one formula could differ in the last bit.)

Accuracy. The bounds stand in the operator table (`Op.ulp`, `Op.absolute`; `codac ops` prints them) and `bench/gpu_functions.py`
measures them on the card. Hardware approximations used: ex2, rcp, sqrt, rsqrt, full-range division; each is within 2 f32 ulps.
tanh.approx, sin.approx and lg2.approx are not used: their error is 2^-11, or absolute where a relative one is expected. Results below
2^-118 may be flushed to zero. Everything is branch-free and without local memory, except `pow` with an exponent that is not a
small whole literal (a library routine with a branch).
NaN and infinity: minimum, maximum, clamp and relu propagate NaN; activations do at infinity what torch does.
Non-goals: bf16 arithmetic, vectors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric
from cutlass._mlir.dialects import arith
from cutlass.cutlass_dsl import T

from .device_scalar import Scalar, bits, from_bits, instruction, lifted, numeric, pair, plus, polynomial, select, times, to_float
from .device_scalar import add as add
from .device_scalar import div as div
from .device_scalar import mul as mul
from .device_scalar import neg as neg
from .device_scalar import sub as sub

_math = cute.math


def call(fn: Callable[..., tuple], *values: Any) -> tuple[Numeric, ...]:
    """The results of an emitted scalar function on CuTeDSL scalars, as such scalars (Python numbers among them too)."""
    results = fn(sys.modules[__name__], *[Scalar(v) for v in values])
    return tuple(numeric(r.value if isinstance(r, Scalar) else r) for r in results)


# --- arithmetic --------------------------------------------------------------------------------------------------------


@lifted
def fma(x: Any, y: Any, z: Any) -> Float32:
    """x * y + z, rounded once."""
    return _math.fma(to_float(x), to_float(y), to_float(z))


@lifted
def abs(x: Any) -> Any:
    """|x|."""
    x = numeric(x)
    return _math.abs(x) if isinstance(x, Float32) else select(x < 0, -x, x)


@lifted
def minimum(x: Any, y: Any) -> Any:
    """The smaller; NaN if either is."""
    x, y = pair(x, y)
    return cute.arch.fmin(x, y, nan=True) if isinstance(x, Float32) else select(x < y, x, y)


@lifted
def maximum(x: Any, y: Any) -> Any:
    """The larger; NaN if either is."""
    x, y = pair(x, y)
    return cute.arch.fmax(x, y, nan=True) if isinstance(x, Float32) else select(x > y, x, y)


@lifted
def clamp(x: Any, low: Any, high: Any) -> Any:
    """min(max(x, low), high); NaN if any is."""
    return minimum(maximum(x, low), high)


@lifted
def floor(x: Any) -> Float32:
    """The largest integer not above x, as a float."""
    return _math.floor(to_float(x))


@lifted
def round(x: Any) -> Float32:
    """The nearest integer as a float, halves to even."""
    return _math.roundeven(to_float(x))


@lifted
def square(x: Any) -> Any:
    """x * x."""
    return mul(x, x)


@lifted
def reciprocal(x: Any) -> Float32:
    """1 / x over the full range."""
    return _math.rcp(to_float(x), approx=True)


@lifted
def sqrt(x: Any) -> Float32:
    """The square root; NaN below zero."""
    return _math.sqrt(to_float(x), approx=True)


@lifted
def rsqrt(x: Any) -> Float32:
    """1 / sqrt(x)."""
    return _math.rsqrt(to_float(x), approx=True)


@lifted
def pow(x: Any, y: Any) -> Float32:
    """x to the power y: by multiplication for whole literals up to 8 in magnitude, else by the library."""
    whole = not isinstance(y, Numeric) and float(y).is_integer() and -8 <= y <= 8
    x = to_float(x)
    if not whole:
        return _math.pow(x, to_float(y))
    n = int(-y if y < 0 else y)
    result, base = Float32(1.0) if n == 0 else None, x
    while n:
        if n & 1:
            result = base if result is None else times(result, base)
        n >>= 1
        base = times(base, base) if n else base
    return reciprocal(result) if y < 0 else result


# --- exponentials and their kin ----------------------------------------------------------------------------------------


def _inverse(x: Float32) -> Float32:
    """1 / x for x at least 1: flushes to zero above 2^126."""
    return _math.rcp(x, approx=True, ftz=True)


@lifted
def exp(x: Any) -> Float32:
    """e to the x."""
    return _math.exp(to_float(x))


@lifted
def exp2(x: Any) -> Float32:
    """2 to the x."""
    return _math.exp2(to_float(x), approx=True)


@lifted
def log(x: Any) -> Float32:
    """The natural logarithm; -inf at 0, NaN below."""
    return _math.log(to_float(x))


@lifted
def log1p(x: Any) -> Float32:
    """log(1 + x)."""
    return _math.log1p(to_float(x))


@lifted
def erf(x: Any) -> Float32:
    """The error function."""
    return _math.erf(to_float(x))


@lifted
def tanh(x: Any) -> Float32:
    """The hyperbolic tangent."""
    return _math.tanh(to_float(x))


@lifted
def sigmoid(x: Any) -> Float32:
    """1 / (1 + exp(-x))."""
    return _inverse(plus(exp(-to_float(x)), 1.0))


@lifted
def softplus(x: Any) -> Float32:
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|))."""
    x = to_float(x)
    return plus(maximum(x, 0.0), log1p(exp(-_math.abs(x))))


# sin and cos: q = round(x * 2/pi) and r = x * 2/pi - q in [-1/2, 1/2], a fraction of a quarter turn, by two fused steps with 2/pi as a
# sum of two floats (its error is 2^-51). The polynomials were fitted in float64 for the smallest relative error on |r| <= 0.556.

_TURN_HI, _TURN_LO = 0.6366197466850281, 2.5682552973194106e-08
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
_TURN_LIMIT = 2097152.0  # 2^21; beyond it the two floats no longer carry the fraction: NaN
_SIN = (-0.00458274781703949, 0.07967334985733032, -0.6459628939628601, 1.5707963705062866)
_COS = (0.0009004512685351074, -0.020858611911535263, 0.25366902351379395, -1.2337005138397217, 1.0)


def _quarter_turns(x: Float32, ahead: int) -> Float32:
    """sin(x + ahead * pi/2)."""
    rounded = _math.fma(x, Float32(_TURN_HI), Float32(_MAGIC))
    whole = plus(rounded, -_MAGIC)
    r = _math.fma(x, Float32(_TURN_LO), _math.fma(x, Float32(_TURN_HI), -whole))
    r = select(_math.abs(x) <= _TURN_LIMIT, r, Float32(float("nan")))
    s = times(r, r)
    quadrant = bits(rounded) + ahead
    value = select((quadrant & 1) == 0, times(r, polynomial(s, _SIN)), polynomial(s, _COS))
    return from_bits(bits(value) ^ ((quadrant & 2) << 30))


@lifted
def sin(x: Any) -> Float32:
    """The sine of x radians, |x| at most 2^21; NaN beyond."""
    return _quarter_turns(to_float(x), 0)


@lifted
def cos(x: Any) -> Float32:
    """The cosine of x radians, |x| at most 2^21; NaN beyond."""
    return _quarter_turns(to_float(x), 1)


# --- activations -------------------------------------------------------------------------------------------------------


@lifted
def relu(x: Any) -> Any:
    """max(x, 0); NaN stays."""
    return maximum(x, 0.0 if isinstance(numeric(x), Float32) else 0)


@lifted
def relu2(x: Any) -> Any:
    """max(x, 0) squared."""
    return square(relu(x))


@lifted
def silu(x: Any) -> Float32:
    """x * sigmoid(x)."""
    x = to_float(x)
    return times(x, sigmoid(x))


# log2 of the normal distribution's tail, P(Z > a), on 0 <= a <= 6.2; fitted so that gelu's error is least. Beyond, it falls faster
# than the tail, where a * P is under 2^-28 already.
_LOG2_TAIL = (
    -4.418033938691224e-08, 1.158094960374001e-06, -1.3341675185074564e-05, 8.627401984995231e-05, -0.0003020814328920096,
    2.723783654801082e-05, 0.006932560354471207, -0.05244183912873268, -0.45921790599823, -1.1511048078536987, -1.0,
)  # fmt: skip


@lifted
def gelu(x: Any) -> Float32:
    """x * Phi(x), Phi the normal distribution (the erf form): one exponential of a polynomial gives the tail."""
    x = to_float(x)
    tail = _math.exp2(polynomial(_math.abs(x), _LOG2_TAIL), approx=True, ftz=True)
    return times(x, select(x < 0.0, tail, plus(-tail, 1.0)))


_GELU_1, _GELU_3 = -2.302208198144325, -0.10294323972837486  # -2 sqrt(2/pi) log2(e), and that times 0.044715


@lifted
def gelu_tanh(x: Any) -> Float32:
    """The tanh approximation of gelu, as x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))."""
    x = to_float(x)
    y = times(x, _math.fma(times(x, x), Float32(_GELU_3), Float32(_GELU_1)))
    return times(x, _inverse(plus(_math.exp2(y, approx=True, ftz=True), 1.0)))


@lifted
def quick_gelu(x: Any) -> Float32:
    """x * sigmoid(1.702 x)."""
    x = to_float(x)
    return times(x, sigmoid(times(x, 1.702)))


# --- comparisons and choice --------------------------------------------------------------------------------------------


def _comparison(name: str, doc: str, compare: Callable[[Any, Any], Any]) -> Callable:
    def comparison(x: Any, y: Any) -> Any:
        return compare(*pair(x, y))

    comparison.__name__ = comparison.__qualname__ = name
    comparison.__doc__ = doc
    return lifted(comparison)


eq = _comparison("eq", "x == y.", lambda x, y: x == y)
ne = _comparison("ne", "x != y; true for NaN.", lambda x, y: x != y)
lt = _comparison("lt", "x < y.", lambda x, y: x < y)
le = _comparison("le", "x <= y.", lambda x, y: x <= y)
gt = _comparison("gt", "x > y.", lambda x, y: x > y)
ge = _comparison("ge", "x >= y.", lambda x, y: x >= y)


def _bool(x: Any) -> Boolean:
    return x if isinstance(x, Boolean) else Boolean(x)


@lifted
def logical_and(x: Any, y: Any) -> Boolean:
    """x and y, on bools."""
    return Boolean(arith.andi(_bool(x).ir_value(), _bool(y).ir_value()))


@lifted
def logical_or(x: Any, y: Any) -> Boolean:
    """x or y, on bools."""
    return Boolean(arith.ori(_bool(x).ir_value(), _bool(y).ir_value()))


@lifted
def logical_not(x: Any) -> Boolean:
    """not x, on bools."""
    return Boolean(arith.xori(_bool(x).ir_value(), Boolean(True).ir_value()))


@lifted
def where(c: Any, x: Any, y: Any) -> Any:
    """x where c holds, else y; the other one does not matter, NaN or not."""
    x, y = pair(x, y)
    return select(_bool(c), x, y)


# --- casts -------------------------------------------------------------------------------------------------------------


@lifted
def bf16(x: Any) -> Float32:
    """x rounded to bf16, held as f32: packed beside a zero, the rounded half is the upper half of the f32."""
    return from_bits(Int32(instruction(T.i32(), "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", to_float(x), Float32(0.0))))


@lifted
def f16(x: Any) -> Float32:
    """x rounded to f16 (overflow is infinite), held as f32."""
    return to_float(x).to(cutlass.Float16).to(Float32)


@lifted
def f32(x: Any) -> Float32:
    """x as f32, integers and bools too."""
    return to_float(x)


def _integer(x: Any, kind: Any, ptx: str, register: str) -> Any:
    x = numeric(x)
    if isinstance(x, Float32):
        whole = kind(instruction(kind.mlir_type, f"cvt.rzi.{ptx}.f32 $0, $1;", f"={register},f", x))
        return select(x == x, whole, kind(0))
    return select(x, kind(1), kind(0)) if isinstance(x, Boolean) else x.to(kind)


@lifted
def i32(x: Any) -> Int32:
    """x as i32: floats truncate and saturate, NaN is 0; i64 keeps its low bits."""
    return _integer(x, Int32, "s32", "r")


@lifted
def i64(x: Any) -> Int64:
    """x as i64: floats truncate and saturate, NaN is 0."""
    return _integer(x, Int64, "s64", "l")
