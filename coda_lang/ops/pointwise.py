"""The element-wise operators (kind "map") of the table. See `spec` for the conventions of each facet.

Kinks and ties differentiate as in torch: relu at 0 gives 0, abs at 0 gives 0, clamp at a bound gives 1, min and max share equally at a tie.
Where torch's clamp stops the gradient of a NaN, ours passes it on (NaN propagates, in the gradient too).
"""

from __future__ import annotations

import math
from typing import Any

from ..ir.types import DTYPES, Ty
from .spec import Attrs, Axes, Domain, Laws, TypeProblem, op

POSITIVE = Domain(((0.1, 4.0),))
NONZERO = Domain(((-3.0, 3.0), (0.3, 3.0)))
LN2, SQRT_HALF = math.log(2.0), math.sqrt(0.5)
GELU_C, GELU_A = math.sqrt(2.0 / math.pi), 0.044715
QUICK = 1.702


# --- arithmetic --------------------------------------------------------------------------------------------------------

op("add", "x y", symbol="+", surface=None, reads="number number", gives="same",
   doc="x + y.", derivative="dx = g, dy = g.",
   ref=lambda T, x, y: x + y, vjp=lambda b, g, r, x, y: (g, g), emit="{x} + {y}",
   laws=Laws(homogeneous=1, linear=(("x", "y"),), commutative=True, zero=True))

op("sub", "x y", symbol="-", surface=None, reads="number number", gives="same",
   doc="x − y.", derivative="dx = g, dy = −g.",
   ref=lambda T, x, y: x - y, vjp=lambda b, g, r, x, y: (g, -g), emit="{x} - {y}",
   laws=Laws(homogeneous=1, linear=(("x", "y"),), zero=True))

op("mul", "x y", symbol="*", surface=None, reads="number number", gives="same",
   doc="x · y.", derivative="dx = g·y, dy = g·x.",
   ref=lambda T, x, y: x * y, vjp=lambda b, g, r, x, y: (g * y, g * x), emit="{x} * {y}",
   laws=Laws(homogeneous=2, linear=(("x",), ("y",)), commutative=True, zero=True))

op("div", "x y", symbol="/", surface=None, reads="f32 f32",
   doc="x / y, always f32.", derivative="dx = g / y, dy = −g·(x / y) / y.",
   ref=lambda T, x, y: x / y, vjp=lambda b, g, r, x, y: (g / y, -(g * (r / y))), emit="f.div({x}, {y})",
   laws=Laws(homogeneous=0, linear=(("x",),)), flops=4, ulp=3, domain=NONZERO)

op("pow", "x y", symbol="**", surface=None, reads="f32 f32",
   doc="x to the power y, always f32; NaN for a negative x and a y that is not whole.",
   derivative="dx = g·y·x^(y−1) (0 where y = 0), dy = g·x^y·log x (0 where x = 0 and y ≥ 0).",
   ref=lambda T, x, y: T.pow(x, y),
   vjp=lambda b, g, r, x, y: (b.where(b.eq(y, 0.0), 0.0, g * (y * x ** (y - 1.0))),
                              None if y.is_literal else g * b.where(b.eq(x, 0.0) & (y >= 0.0), 0.0, r * b.log(x))),
   emit="f.pow({x}, {y})", flops=16, ulp=8, domain=Domain(((0.2, 3.0), (-2.0, 2.0))))

op("neg", "x", symbol="-", surface=None, reads="number", gives="same",
   doc="−x.", derivative="dx = −g.",
   ref=lambda T, x: -x, vjp=lambda b, g, r, x: (-g,), emit="-{x}",
   laws=Laws(homogeneous=1, linear=(("x",),), zero=True))

op("fma", "x y z", reads="f32 f32 f32",
   doc="x · y + z, rounded once.", derivative="dx = g·y, dy = g·x, dz = g.",
   ref=lambda T, x, y, z: (x.double() * y.double() + z.double()).to(x.dtype),
   vjp=lambda b, g, r, x, y, z: (g * y, g * x, g), emit="f.fma({x}, {y}, {z})",
   laws=Laws(linear=(("x", "z"), ("y", "z")), zero=True), flops=2)

# --- comparisons and choice --------------------------------------------------------------------------------------------

COMPARE: dict[str, Any] = dict(kind="map", reads="number number", gives="bool", surface=None, derivative="none: the result is bool.",
               domain=Domain(((-2.0, 2.0),)))

op("eq", "x y", symbol="==", doc="x = y; false for NaN.", ref=lambda T, x, y: x == y, emit="f.eq({x}, {y})",
   laws=Laws(commutative=True), **COMPARE)
op("ne", "x y", symbol="!=", doc="x ≠ y; true for NaN.", ref=lambda T, x, y: x != y, emit="f.ne({x}, {y})",
   laws=Laws(commutative=True), **COMPARE)
op("lt", "x y", symbol="<", doc="x < y; false for NaN.", ref=lambda T, x, y: x < y, emit="f.lt({x}, {y})", **COMPARE)
op("le", "x y", symbol="<=", doc="x ≤ y; false for NaN.", ref=lambda T, x, y: x <= y, emit="f.le({x}, {y})", **COMPARE)
op("gt", "x y", symbol=">", doc="x > y; false for NaN.", ref=lambda T, x, y: x > y, emit="f.gt({x}, {y})", **COMPARE)
op("ge", "x y", symbol=">=", doc="x ≥ y; false for NaN.", ref=lambda T, x, y: x >= y, emit="f.ge({x}, {y})", **COMPARE)

op("and", "x y", symbol="and", surface=None, reads="bool bool", gives="bool",
   doc="Both hold.", derivative="none: the result is bool.",
   ref=lambda T, x, y: x & y, emit="f.logical_and({x}, {y})", laws=Laws(commutative=True))
op("or", "x y", symbol="or", surface=None, reads="bool bool", gives="bool",
   doc="At least one holds.", derivative="none: the result is bool.",
   ref=lambda T, x, y: x | y, emit="f.logical_or({x}, {y})", laws=Laws(commutative=True))
op("not", "x", symbol="not", surface=None, reads="bool", gives="bool",
   doc="Does not hold.", derivative="none: the result is bool.",
   ref=lambda T, x: ~x, emit="f.logical_not({x})")

op("where", "c x y", reads="bool number number", gives="same",
   doc="x where c holds, else y; the other branch does not matter, even if NaN.",
   derivative="dx = g where c, else exactly 0; dy = g where not c, else exactly 0.",
   ref=lambda T, c, x, y: T.where(c, x, y),
   vjp=lambda b, g, r, c, x, y: (None, b.where(c, g, 0.0), b.where(c, 0.0, g)), emit="f.where({c}, {x}, {y})",
   laws=Laws(homogeneous=1, linear=(("x", "y"),), zero=True))


def _share(b, g, x, y, beaten):
    """The cotangent of min's or max's x: none where y wins, half at a tie; against a literal as clamp does, all at the tie."""
    if y.is_literal:
        return b.where(beaten, 0.0, g)
    return b.where(beaten, 0.0, b.where(b.eq(x, y), g * 0.5, g))


op("minimum", "x y", surface="min", reads="number number", gives="same",
   doc="The smaller of x and y; NaN if either is.",
   derivative="dx = g where x < y, g/2 at a tie; against a literal as clamp: g up to the bound, included.",
   ref=lambda T, x, y: T.minimum(x, y), vjp=lambda b, g, r, x, y: (_share(b, g, x, y, x > y), _share(b, g, y, x, y > x)),
   emit="f.minimum({x}, {y})", laws=Laws(homogeneous=1, commutative=True, zero=True), domain=Domain(gap=True))

op("maximum", "x y", surface="max", reads="number number", gives="same",
   doc="The larger of x and y; NaN if either is.",
   derivative="dx = g where x > y, g/2 at a tie; against a literal as clamp: g down to the bound, included.",
   ref=lambda T, x, y: T.maximum(x, y), vjp=lambda b, g, r, x, y: (_share(b, g, x, y, x < y), _share(b, g, y, x, y < x)),
   emit="f.maximum({x}, {y})", laws=Laws(homogeneous=1, commutative=True, zero=True), domain=Domain(gap=True))

op("clamp", "x lo hi", reads="number number number", gives="same",
   doc="min(max(x, lo), hi): x held between lo and hi; NaN if any is.",
   derivative="dx = g where lo ≤ x ≤ hi; dlo = g where x < lo < hi; dhi = g where x > hi or hi < lo.",
   ref=lambda T, x, lo, hi: T.minimum(T.maximum(x, lo), hi),
   vjp=lambda b, g, r, x, lo, hi: (b.where((x < lo) | (x > hi), 0.0, g),
                                   None if lo.is_literal else b.where((x < lo) & (lo < hi), g, 0.0),
                                   None if hi.is_literal else b.where((x > hi) | (hi < lo), g, 0.0)),
   emit="f.clamp({x}, {lo}, {hi})", laws=Laws(homogeneous=1, zero=True), flops=2,
   domain=Domain(((-3.0, 3.0), (-1.5, -0.5), (0.5, 1.5)), gap=True))


def _cast(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    to, source = DTYPES.get(attrs["dtype"]), args[0].dtype
    if to is None or to.kind == "bool":
        raise TypeProblem(f"cannot convert to {attrs['dtype']}", None, "convert to bf16, f16, f32, i32 or i64; a comparison makes a bool")
    if to.kind == "int" and source.kind == "float":
        raise TypeProblem(f"a {source} value cannot become {to}: version 1 has no rounding to integers", 0,
                          "keep it f32; floor and round give whole f32 values")
    if to.kind == "int" and source.kind == "int" and to.bits < source.bits:
        raise TypeProblem(f"an {source} value may not fit {to}", 0, f"keep it {source}")
    return Ty(to, args[0].axes)


op("cast", "x", attrs="dtype", reads="any", surface=None, rule=_cast,
   doc="Rounds (or converts) x to dtype: bf16(x), f16(x), f32(x), i32(x), i64(x). A bool becomes 0 or 1. Rounds to nearest even.",
   derivative="dx = g, not rounded (a gradient is rounded once, after summing).",
   ref=lambda T, x, dtype: x, vjp=lambda b, g, r, x, dtype: (g,), emit="f.{dtype}({x})", flops=1)

# --- rounding to whole numbers, sign -----------------------------------------------------------------------------------


def _sign(b, x):
    """-1, 0 or 1; 0 for NaN, as in torch."""
    return b.where(x > 0.0, 1.0, b.where(x < 0.0, -1.0, 0.0))


op("abs", "x",
   doc="|x|.", derivative="dx = g·sign x, 0 at 0.",
   ref=lambda T, x: T.abs(x), vjp=lambda b, g, r, x: (g * _sign(b, x),), emit="f.abs({x})",
   laws=Laws(homogeneous=1, zero=True), domain=Domain(kinks=(0.0,)))
op("floor", "x",
   doc="The largest whole number not above x, as f32.", derivative="dx = 0.",
   ref=lambda T, x: T.floor(x), emit="f.floor({x})", laws=Laws(zero=True), domain=Domain(kinks=tuple(range(-3, 4))))
op("round", "x",
   doc="The nearest whole number, halves to even, as f32.", derivative="dx = 0.",
   ref=lambda T, x: T.round(x), emit="f.round({x})", laws=Laws(zero=True), domain=Domain(kinks=tuple(i + 0.5 for i in range(-4, 4))))

# --- exponentials, logarithms, roots -----------------------------------------------------------------------------------

op("exp", "x",
   doc="e to the power x.", derivative="dx = g·eˣ.",
   ref=lambda T, x: T.exp(x), vjp=lambda b, g, r, x: (g * r,), emit="f.exp({x})", flops=4, ulp=2)
op("exp2", "x",
   doc="2 to the power x.", derivative="dx = g·2ˣ·ln 2.",
   ref=lambda T, x: T.exp2(x), vjp=lambda b, g, r, x: (g * (r * LN2),), emit="f.exp2({x})", flops=4, ulp=3)
op("log", "x",
   doc="The natural logarithm; −inf at 0, NaN below.", derivative="dx = g / x.",
   ref=lambda T, x: T.log(x), vjp=lambda b, g, r, x: (g / x,), emit="f.log({x})", flops=4, ulp=2, domain=POSITIVE)
op("log1p", "x",
   doc="log(1 + x), accurate near 0.", derivative="dx = g / (1 + x).",
   ref=lambda T, x: T.log1p(x), vjp=lambda b, g, r, x: (g / (1.0 + x),), emit="f.log1p({x})", flops=6, ulp=2,
   laws=Laws(zero=True), domain=Domain(((-0.9, 3.0),)))
op("sqrt", "x",
   doc="The square root; NaN below 0.", derivative="dx = g / (2·√x).",
   ref=lambda T, x: T.sqrt(x), vjp=lambda b, g, r, x: (g / (2.0 * r),), emit="f.sqrt({x})", flops=4, ulp=1,
   laws=Laws(homogeneous=0.5, zero=True), domain=POSITIVE)
op("rsqrt", "x",
   doc="1 / √x; inf at 0, NaN below.", derivative="dx = −g·x^(−3/2) / 2.",
   ref=lambda T, x: T.rsqrt(x), vjp=lambda b, g, r, x: (-0.5 * g * (r * r * r),), emit="f.rsqrt({x})", flops=4, ulp=2,
   laws=Laws(homogeneous=-0.5, nonzero=True), domain=POSITIVE)
op("square", "x",
   doc="x².", derivative="dx = 2·g·x.",
   ref=lambda T, x: T.square(x), vjp=lambda b, g, r, x: (g * (2.0 * x),), emit="f.square({x})",
   laws=Laws(homogeneous=2, zero=True))
op("reciprocal", "x",
   doc="1 / x.", derivative="dx = −g / x².",
   ref=lambda T, x: T.reciprocal(x), vjp=lambda b, g, r, x: (-g * (r * r),), emit="f.reciprocal({x})", flops=4, ulp=2,
   laws=Laws(homogeneous=-1), domain=POSITIVE)

# --- trigonometry, erf -------------------------------------------------------------------------------------------------

op("sin", "x",
   doc="The sine of x in radians; on the GPU |x| ≤ 2²¹, NaN beyond.", derivative="dx = g·cos x.",
   ref=lambda T, x: T.sin(x), vjp=lambda b, g, r, x: (g * b.cos(x),), emit="f.sin({x})",
   flops=20, ulp=4, absolute=2.0**-22, laws=Laws(zero=True))
op("cos", "x",
   doc="The cosine of x in radians; on the GPU |x| ≤ 2²¹, NaN beyond.", derivative="dx = −g·sin x.",
   ref=lambda T, x: T.cos(x), vjp=lambda b, g, r, x: (-g * b.sin(x),), emit="f.cos({x})",
   flops=20, ulp=4, absolute=2.0**-22)
op("erf", "x",
   doc="The error function.", derivative="dx = g·2/√π·exp(−x²).",
   ref=lambda T, x: T.erf(x), vjp=lambda b, g, r, x: (g * (2.0 / math.sqrt(math.pi) * b.exp(-(x * x))),), emit="f.erf({x})",
   flops=12, ulp=4, laws=Laws(zero=True))

# --- activations -------------------------------------------------------------------------------------------------------


def _silu_slope(b, x):
    s = b.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _gelu_slope(b, x):
    return 0.5 * (1.0 + b.erf(x * SQRT_HALF)) + x * (b.exp(-0.5 * (x * x)) * (1.0 / math.sqrt(2.0 * math.pi)))


def _gelu_tanh_slope(b, x):
    t = b.tanh(GELU_C * (x + GELU_A * (x * x * x)))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * (GELU_C * (1.0 + 3.0 * GELU_A * (x * x)))


def _quick_gelu_slope(b, x):
    s = b.sigmoid(QUICK * x)
    return s + QUICK * x * s * (1.0 - s)


op("tanh", "x",
   doc="The hyperbolic tangent.", derivative="dx = g·(1 − tanh² x).",
   ref=lambda T, x: T.tanh(x), vjp=lambda b, g, r, x: (g * (1.0 - r * r),), emit="f.tanh({x})", flops=8, ulp=4, laws=Laws(zero=True))
op("sigmoid", "x",
   doc="1 / (1 + e⁻ˣ).", derivative="dx = g·s·(1 − s), s = sigmoid x.",
   ref=lambda T, x: T.sigmoid(x), vjp=lambda b, g, r, x: (g * (r * (1.0 - r)),), emit="f.sigmoid({x})", flops=8, ulp=4)
op("softplus", "x",
   doc="log(1 + eˣ), without overflow.", derivative="dx = g·sigmoid x.",
   ref=lambda T, x: T.logaddexp(x, T.zeros_like(x)), vjp=lambda b, g, r, x: (g * b.sigmoid(x),), emit="f.softplus({x})", flops=12, ulp=4)
op("relu", "x",
   doc="max(x, 0).", derivative="dx = g where the result is > 0, 0 at 0.",
   ref=lambda T, x: T.relu(x), vjp=lambda b, g, r, x: (b.where(r <= 0.0, 0.0, g),), emit="f.relu({x})",
   laws=Laws(homogeneous=1, zero=True), domain=Domain(kinks=(0.0,)))
op("relu2", "x",
   doc="max(x, 0)², the squared ReLU.", derivative="dx = g·2·√(the result), which is g·2·max(x, 0).",
   ref=lambda T, x: T.relu(x).square(), vjp=lambda b, g, r, x: (g * (2.0 * b.sqrt(r)),), emit="f.relu2({x})",
   laws=Laws(homogeneous=2, zero=True), flops=2, domain=Domain(kinks=(0.0,)))
op("silu", "x",
   doc="x·sigmoid x, also called swish.", derivative="dx = g·s·(1 + x·(1 − s)), s = sigmoid x.",
   ref=lambda T, x: T.nn.functional.silu(x), vjp=lambda b, g, r, x: (g * _silu_slope(b, x),), emit="f.silu({x})",
   laws=Laws(zero=True), flops=8, ulp=4)
op("gelu", "x",
   doc="x·Φ(x), Φ the normal distribution function: the erf form, torch's default.", derivative="dx = g·(Φ(x) + x·φ(x)).",
   ref=lambda T, x: 0.5 * x * T.special.erfc(-x * SQRT_HALF), vjp=lambda b, g, r, x: (g * _gelu_slope(b, x),), emit="f.gelu({x})",
   laws=Laws(zero=True), flops=16, ulp=8, absolute=2.0**-28)
op("gelu_tanh", "x",
   doc="x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2: torch's gelu with approximate=\"tanh\".",
   derivative="dx = g·((1 + t)/2 + x·(1 − t²)/2·√(2/π)·(1 + 3·0.044715·x²)), t the tanh above.",
   ref=lambda T, x: T.nn.functional.gelu(x, approximate="tanh"), vjp=lambda b, g, r, x: (g * _gelu_tanh_slope(b, x),),
   emit="f.gelu_tanh({x})", laws=Laws(zero=True), flops=16, ulp=8, absolute=2.0**-28)
op("quick_gelu", "x",
   doc="x·sigmoid(1.702·x), the approximation of CLIP.", derivative="dx = g·(s + 1.702·x·s·(1 − s)), s = sigmoid(1.702·x).",
   ref=lambda T, x: x * T.sigmoid(QUICK * x), vjp=lambda b, g, r, x: (g * _quick_gelu_slope(b, x),), emit="f.quick_gelu({x})",
   laws=Laws(zero=True), flops=8, ulp=8, absolute=2.0**-28)
