"""Scalar functions on torch tensors, twins of `device_fns`: the same names and arguments.

In: tensors (any broadcastable shapes) or Python numbers. Out: tensors. `Written` computes in float32 and rounds at casts, as the
kernels do; `Exact` computes in float64 and its float casts round nothing, so it gives the real-number meaning of a program.
`NAMES` lists every scalar function an emitted epilogue may call; `+ - *` and unary minus stay Python operators.

The reference methods (`load` and below) work on *aligned* tensors: one dim per axis of the program, in program order, size 1
where a value lacks the axis; dims are given as indices. Not here: derivatives, devices, anything about kernels.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Value = Any  # a torch tensor or a Python number

DTYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32,
    "i32": torch.int32, "i64": torch.int64, "bool": torch.bool,
}  # fmt: skip


class Functions:
    """The scalar functions, computing in `dtype`; `rounds` says whether bf16, f16 and f32 casts round."""

    dtype = torch.float32
    rounds = True

    def _value(self, x: Value) -> torch.Tensor:
        """x as a tensor: floats in the computing dtype, integers and bools as they are."""
        if not isinstance(x, torch.Tensor):
            dtype = torch.bool if isinstance(x, bool) else torch.int32 if isinstance(x, int) and -(2**31) <= x < 2**31 else None
            return torch.tensor(x, dtype=self.dtype if isinstance(x, float) else dtype)
        return x.to(self.dtype) if x.is_floating_point() else x

    def _float(self, x: Value) -> torch.Tensor:
        """x as a tensor of the computing dtype."""
        return self._value(x).to(self.dtype)

    def _pair(self, x: Value, y: Value) -> tuple[torch.Tensor, torch.Tensor]:
        """Two operands of one dtype: a literal takes the other's type, else integers widen and integer with float is float."""
        a, b = self._value(x), self._value(y)
        if a.dtype == b.dtype:
            return a, b
        if a.is_floating_point() or b.is_floating_point():
            return a.to(self.dtype), b.to(self.dtype)
        wide = torch.promote_types(a.dtype, b.dtype)
        return a.to(wide), b.to(wide)

    # arithmetic

    def add(self, x: Value, y: Value) -> torch.Tensor:
        """x + y."""
        a, b = self._pair(x, y)
        return a + b

    def sub(self, x: Value, y: Value) -> torch.Tensor:
        """x - y."""
        a, b = self._pair(x, y)
        return a - b

    def mul(self, x: Value, y: Value) -> torch.Tensor:
        """x * y."""
        a, b = self._pair(x, y)
        return a * b

    def neg(self, x: Value) -> torch.Tensor:
        """-x."""
        return -self._value(x)

    def div(self, x: Value, y: Value) -> torch.Tensor:
        """x / y in floating point, integers too."""
        return self._float(x) / self._float(y)

    def pow(self, x: Value, y: Value) -> torch.Tensor:
        """x to the power y in floating point."""
        return torch.pow(self._float(x), self._float(y))

    def fma(self, x: Value, y: Value, z: Value) -> torch.Tensor:
        """x * y + z, rounded once."""
        a, b, c = (self._float(v).to(torch.float64) for v in (x, y, z))
        return (a * b + c).to(self.dtype)  # a float32 product is exact in float64

    def abs(self, x: Value) -> torch.Tensor:
        """|x|."""
        return torch.abs(self._value(x))

    def minimum(self, x: Value, y: Value) -> torch.Tensor:
        """The smaller; NaN if either is."""
        return torch.minimum(*self._pair(x, y))

    def maximum(self, x: Value, y: Value) -> torch.Tensor:
        """The larger; NaN if either is."""
        return torch.maximum(*self._pair(x, y))

    def clamp(self, x: Value, low: Value, high: Value) -> torch.Tensor:
        """min(max(x, low), high); NaN if any is."""
        return self.minimum(self.maximum(x, low), high)

    def floor(self, x: Value) -> torch.Tensor:
        """The largest integer not above x, as a float."""
        return torch.floor(self._float(x))

    def round(self, x: Value) -> torch.Tensor:
        """The nearest integer as a float, halves to even."""
        return torch.round(self._float(x))

    def square(self, x: Value) -> torch.Tensor:
        """x * x."""
        a = self._value(x)
        return a * a

    def reciprocal(self, x: Value) -> torch.Tensor:
        """1 / x."""
        return torch.reciprocal(self._float(x))

    def sqrt(self, x: Value) -> torch.Tensor:
        """The square root; NaN below zero."""
        return torch.sqrt(self._float(x))

    def rsqrt(self, x: Value) -> torch.Tensor:
        """1 / sqrt(x)."""
        return torch.rsqrt(self._float(x))

    # exponentials and their kin

    def exp(self, x: Value) -> torch.Tensor:
        """e to the x."""
        return torch.exp(self._float(x))

    def exp2(self, x: Value) -> torch.Tensor:
        """2 to the x."""
        return torch.exp2(self._float(x))

    def log(self, x: Value) -> torch.Tensor:
        """The natural logarithm; -inf at 0, NaN below."""
        return torch.log(self._float(x))

    def log1p(self, x: Value) -> torch.Tensor:
        """log(1 + x)."""
        return torch.log1p(self._float(x))

    def erf(self, x: Value) -> torch.Tensor:
        """The error function."""
        return torch.erf(self._float(x))

    def tanh(self, x: Value) -> torch.Tensor:
        """The hyperbolic tangent."""
        return torch.tanh(self._float(x))

    def sigmoid(self, x: Value) -> torch.Tensor:
        """1 / (1 + exp(-x))."""
        return torch.sigmoid(self._float(x))

    def softplus(self, x: Value) -> torch.Tensor:
        """log(1 + exp(x))."""
        a = self._float(x)
        return torch.logaddexp(a, torch.zeros_like(a))

    def sin(self, x: Value) -> torch.Tensor:
        """The sine of x radians."""
        return torch.sin(self._float(x))

    def cos(self, x: Value) -> torch.Tensor:
        """The cosine of x radians."""
        return torch.cos(self._float(x))

    # activations

    def relu(self, x: Value) -> torch.Tensor:
        """max(x, 0)."""
        return torch.relu(self._value(x))

    def relu2(self, x: Value) -> torch.Tensor:
        """max(x, 0) squared."""
        return self.square(self.relu(x))

    def silu(self, x: Value) -> torch.Tensor:
        """x * sigmoid(x)."""
        a = self._float(x)
        return a * torch.sigmoid(a)

    def gelu(self, x: Value) -> torch.Tensor:
        """x * Phi(x), by the error function."""
        a = self._float(x)
        return 0.5 * a * torch.special.erfc(-a * math.sqrt(0.5))

    def gelu_tanh(self, x: Value) -> torch.Tensor:
        """The tanh approximation of gelu: x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))."""
        a = self._float(x)
        return a * torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (a + 0.044715 * a * a * a))

    def quick_gelu(self, x: Value) -> torch.Tensor:
        """x * sigmoid(1.702 x)."""
        a = self._float(x)
        return a * torch.sigmoid(1.702 * a)

    # comparisons and choice

    def eq(self, x: Value, y: Value) -> torch.Tensor:
        """x == y."""
        return torch.eq(*self._pair(x, y))

    def ne(self, x: Value, y: Value) -> torch.Tensor:
        """x != y; true for NaN."""
        return torch.ne(*self._pair(x, y))

    def lt(self, x: Value, y: Value) -> torch.Tensor:
        """x < y."""
        return torch.lt(*self._pair(x, y))

    def le(self, x: Value, y: Value) -> torch.Tensor:
        """x <= y."""
        return torch.le(*self._pair(x, y))

    def gt(self, x: Value, y: Value) -> torch.Tensor:
        """x > y."""
        return torch.gt(*self._pair(x, y))

    def ge(self, x: Value, y: Value) -> torch.Tensor:
        """x >= y."""
        return torch.ge(*self._pair(x, y))

    def logical_and(self, x: Value, y: Value) -> torch.Tensor:
        """x and y, on bools."""
        return torch.logical_and(self._value(x), self._value(y))

    def logical_or(self, x: Value, y: Value) -> torch.Tensor:
        """x or y, on bools."""
        return torch.logical_or(self._value(x), self._value(y))

    def logical_not(self, x: Value) -> torch.Tensor:
        """not x, on bools."""
        return torch.logical_not(self._value(x))

    def where(self, c: Value, x: Value, y: Value) -> torch.Tensor:
        """x where c holds, else y; the other branch contributes nothing, NaN or not."""
        return torch.where(self._value(c).to(torch.bool), *self._pair(x, y))

    # casts

    def _rounded(self, x: Value, dtype: torch.dtype) -> torch.Tensor:
        a = self._float(x)
        return a.to(dtype).to(self.dtype) if self.rounds else a

    def bf16(self, x: Value) -> torch.Tensor:
        """x rounded to bf16, held as a float."""
        return self._rounded(x, torch.bfloat16)

    def f16(self, x: Value) -> torch.Tensor:
        """x rounded to f16 (overflow is infinite), held as a float."""
        return self._rounded(x, torch.float16)

    def f32(self, x: Value) -> torch.Tensor:
        """x as f32, integers and bools too."""
        return self._float(x)

    def _integer(self, x: Value, dtype: torch.dtype) -> torch.Tensor:
        a = self._value(x)
        if not a.is_floating_point():
            return a.to(dtype)
        info = torch.iinfo(dtype)
        bound = float(info.max) + 1.0 if dtype == torch.int32 else 2.0**63
        inside = (a > -bound - 1.0 if dtype == torch.int32 else a >= -bound) & (a < bound)
        whole = torch.where(inside, a, torch.zeros_like(a)).to(dtype)
        whole = torch.where(a >= bound, torch.full_like(whole, info.max), whole)
        return torch.where(~inside & (a < 0), torch.full_like(whole, info.min), whole)

    def i32(self, x: Value) -> torch.Tensor:
        """x as i32: floats truncate and saturate, NaN is 0; i64 keeps its low bits."""
        return self._integer(x, torch.int32)

    def i64(self, x: Value) -> torch.Tensor:
        """x as i64: floats truncate and saturate, NaN is 0."""
        return self._integer(x, torch.int64)


NAMES = tuple(name for name in vars(Functions) if not name.startswith("_") and callable(getattr(Functions, name)))


class Reference(Functions):
    """What a straight-line reference needs besides the scalar functions; every tensor is aligned to the program's axes."""

    def load(self, t: torch.Tensor, dims: tuple[int, ...], rank: int) -> torch.Tensor:
        """A stored tensor whose i-th dim is the program's axis `dims[i]`, aligned to `rank` axes; floats in the computing dtype."""
        order = sorted(range(len(dims)), key=dims.__getitem__)
        shape = [1] * rank
        for i, d in enumerate(dims):
            shape[d] = t.shape[i]
        return self._value(t.permute(order).reshape(shape))

    def scalar(self, x: Value, rank: int, device: torch.device | str) -> torch.Tensor:
        """A number, or what scalar functions made of numbers, aligned to `rank` axes."""
        return self._value(x).to(device).reshape([1] * rank)

    def store(self, x: Value, dims: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """The inverse of `load`: a contiguous tensor of `shape`, dims in storage order; Exact keeps floats in float64."""
        a = self._value(x)
        full = [1] * a.dim()
        for d, n in zip(dims, shape, strict=True):
            full[d] = n
        order = [d for d in sorted(dims)]
        a = a.expand(full).reshape([full[d] for d in order]).permute([order.index(d) for d in dims])
        exact = not self.rounds and a.is_floating_point()
        return a.to(self.dtype if exact else DTYPES[dtype]).contiguous()

    def expand(self, x: Value, dim: int, n: int) -> torch.Tensor:
        """x given the axis `dim` of extent n."""
        a = self._value(x)
        return a.expand([n if i == dim else -1 for i in range(a.dim())])

    def index(self, dim: int, n: int, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The position along axis `dim`, i32."""
        return torch.arange(n, dtype=torch.int32, device=device).reshape([n if i == dim else 1 for i in range(rank)])

    def contract(self, x: Value, y: Value, dims: tuple[int, ...]) -> torch.Tensor:
        """Sum of x * y over `dims`, every other axis broadcast; accumulates in the computing dtype."""
        a, b = self._float(x), self._float(y)
        axes = list(range(a.dim()))
        out = torch.einsum(a, axes, b, axes, [d for d in axes if d not in dims])
        for d in sorted(dims):
            out = out.unsqueeze(d)
        return out

    def sum(self, x: Value, dims: tuple[int, ...]) -> torch.Tensor:
        """Sum over `dims`; 0 over nothing."""
        a = self._value(x)
        return torch.sum(a, dims, keepdim=True, dtype=a.dtype) if dims else a

    def mean(self, x: Value, dims: tuple[int, ...]) -> torch.Tensor:
        """Mean over `dims`; NaN over nothing."""
        a = self._float(x)
        return torch.mean(a, dims, keepdim=True) if dims else a

    def _extreme(self, a: torch.Tensor, dims: tuple[int, ...], fn: Any, empty: float) -> torch.Tensor:
        if not dims:
            return a
        if any(a.shape[d] == 0 for d in dims):
            return torch.full([1 if i in dims else n for i, n in enumerate(a.shape)], empty, dtype=a.dtype, device=a.device)
        return fn(a, dims, keepdim=True)

    def max(self, x: Value, dims: tuple[int, ...]) -> torch.Tensor:
        """Maximum over `dims`, NaN if any is; -inf over nothing."""
        return self._extreme(self._value(x), dims, torch.amax, -math.inf)

    def min(self, x: Value, dims: tuple[int, ...]) -> torch.Tensor:
        """Minimum over `dims`, NaN if any is; inf over nothing."""
        return self._extreme(self._value(x), dims, torch.amin, math.inf)

    def amax(self, x: Value, dims: tuple[int, ...]) -> torch.Tensor:
        """Maximum of |x| over `dims`; 0 over nothing."""
        return self._extreme(torch.abs(self._value(x)), dims, torch.amax, 0.0)

    def logsumexp(self, x: Value, dims: tuple[int, ...]) -> torch.Tensor:
        """log of the sum of exp over `dims`; -inf where all are -inf, or over nothing."""
        a = self._float(x)
        return torch.logsumexp(a, dims, keepdim=True) if dims else a

    def deviation(self, x: Value, dims: tuple[int, ...]) -> torch.Tensor:
        """Sum of squared distances from the mean over `dims`; 0 over nothing."""
        a = self._float(x)
        if not dims or not a.numel():
            return self.sum(a * 0.0, dims)
        return torch.sum(torch.square(a - torch.mean(a, dims, keepdim=True)), dims, keepdim=True)

    def gather(self, x: Value, i: Value, dim: int) -> torch.Tensor:
        """x at position i along `dim` (i has size 1 there); NaN where i is outside the axis."""
        a, at = self._value(x), self._value(i).to(torch.int64)
        n = a.shape[dim]
        shape = torch.broadcast_shapes([1 if d == dim else s for d, s in enumerate(a.shape)], at.shape)
        inside = (at >= 0) & (at < n)
        if n == 0:
            return torch.full(shape, math.nan, dtype=a.dtype, device=a.device)
        a = a.expand([n if d == dim else s for d, s in enumerate(shape)])
        taken = torch.gather(a, dim, torch.where(inside, at, torch.zeros_like(at)).expand(shape))
        return torch.where(inside, taken, torch.full_like(taken, math.nan))

    def lane(self, x: Value, dim: int, index: int) -> torch.Tensor:
        """Position `index` of a fixed axis; size 1 there."""
        a = self._value(x)
        return a if a.shape[dim] == 1 else a.narrow(dim, index, 1)

    def pack(self, dim: int, *xs: Value) -> torch.Tensor:
        """Values side by side along the new axis `dim`."""
        return torch.cat(torch.broadcast_tensors(*self._common(xs)), dim)

    def run(self, x: Value, dim: int, start: int, size: int, to: int) -> torch.Tensor:
        """Positions [start, start + size) of axis `dim`, as axis `to`."""
        return self._value(x).narrow(dim, start, size).transpose(dim, to)

    def join(self, dim: int, froms: tuple[int, ...], *xs: Value) -> torch.Tensor:
        """The inverse of `run`: axis `froms[i]` of each value becomes a consecutive run of axis `dim`."""
        parts = [a.transpose(d, dim) for a, d in zip(self._common(xs), froms, strict=True)]
        rest = torch.broadcast_shapes(*[[1 if d == dim else n for d, n in enumerate(a.shape)] for a in parts])
        return torch.cat([a.expand([a.shape[d] if d == dim else n for d, n in enumerate(rest)]) for a in parts], dim)

    def rename(self, x: Value, dim: int, to: int) -> torch.Tensor:
        """Axis `dim` under another name."""
        return self._value(x).transpose(dim, to)

    def _common(self, xs: tuple[Value, ...]) -> list[torch.Tensor]:
        values = [self._value(x) for x in xs]
        if any(v.is_floating_point() for v in values):
            values = [v.to(self.dtype) for v in values]
        return values


class Written(Reference):
    """The program as written: float32 arithmetic, casts round."""


class Exact(Reference):
    """The program over the reals: float64 arithmetic, float casts are the identity."""

    dtype = torch.float64
    rounds = False


_written = Written()


def __getattr__(name: str) -> Any:
    """The scalar functions of `Written` as functions of this module, so that the module itself can stand for `f`."""
    if name in NAMES:
        return getattr(_written, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
