"""The reductions over named axes, and `gather`. All are f32, in fixed order; an integer argument needs a cast."""

from __future__ import annotations

from ..ir.types import F32, Ty
from .spec import Attrs, Axes, Domain, Laws, TypeProblem, op, union


def _rule(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    x, over = args[0], tuple(attrs["axes"])
    if not over:
        raise TypeProblem("a reduction needs at least one axis")
    for i, a in enumerate(over):
        if a not in x.axes:
            raise TypeProblem(f"cannot reduce over {a}: the value has {', '.join(x.axes) or 'no axes'}", 0)
        if a in over[:i]:
            raise TypeProblem(f"axis {a} is named twice")
    return Ty(F32, tuple(a for a in x.axes if a not in over))


def _dims(frame, axes):
    return tuple(frame.dim(a) for a in axes)


def _reduce(name: str, torch_ref, vjp, **facets) -> None:
    op(name, "x", kind="reduce", attrs="axes", brackets="axes", rule=_rule, vjp=vjp,
       ref=lambda T, frame, x, axes: torch_ref(T, x, _dims(frame, axes)), **facets)


def _spread(b, g, x, axes):
    """g along the reduced axes again: a cotangent has the axes of its value."""
    return b.expand(g, axes=tuple(axes))


def _ties(b, g, y, value, slope, axes):
    """g shared equally by the elements of `value` that equal the extreme y."""
    hit = b.eq(value, y)
    count = b.sum(b.where(hit, 1.0, 0.0), axes=axes)
    return b.where(hit, slope, 0.0) * (g / count)


def _sign(b, x):
    return b.where(x > 0.0, 1.0, b.where(x < 0.0, -1.0, 0.0))


def _empty_is(T, x, dims, fn, value):
    """A reduction over nothing gives `value`."""
    if any(x.shape[d] == 0 for d in dims):
        return T.full([1 if i in dims else n for i, n in enumerate(x.shape)], value, dtype=x.dtype, device=x.device)
    return fn(x, dims, keepdim=True)


_reduce("sum", lambda T, x, dims: T.sum(x, dims, keepdim=True),
        lambda b, g, y, x, axes: (_spread(b, g, x, axes),),
        doc="The sum over the axes, in f32; 0 over nothing.", derivative="dx = g.",
        laws=Laws(homogeneous=1, linear=(("x",),), zero=True))

_reduce("mean", lambda T, x, dims: T.mean(x, dims, keepdim=True),
        lambda b, g, y, x, axes: (_spread(b, g / b.size(axes=tuple(axes)), x, axes),),
        doc="The sum over the axes divided by their extent, in f32; NaN over nothing.", derivative="dx = g / extent.",
        laws=Laws(homogeneous=1, linear=(("x",),), zero=True))

_reduce("max", lambda T, x, dims: _empty_is(T, x, dims, T.amax, float("-inf")),
        lambda b, g, y, x, axes: (_ties(b, g, y, x, 1.0, axes),),
        doc="The largest value over the axes; NaN if any is; −inf over nothing.",
        derivative="dx = g where x is the largest, shared equally by ties.",
        laws=Laws(homogeneous=1, zero=True), domain=Domain(gap=True))

_reduce("min", lambda T, x, dims: _empty_is(T, x, dims, T.amin, float("inf")),
        lambda b, g, y, x, axes: (_ties(b, g, y, x, 1.0, axes),),
        doc="The smallest value over the axes; NaN if any is; inf over nothing.",
        derivative="dx = g where x is the smallest, shared equally by ties.",
        laws=Laws(homogeneous=1, zero=True), domain=Domain(gap=True))

_reduce("amax", lambda T, x, dims: _empty_is(T, T.abs(x), dims, T.amax, 0.0),
        lambda b, g, y, x, axes: (_ties(b, g, y, b.abs(x), _sign(b, x), axes),),
        doc="The largest |x| over the axes; NaN if any is; 0 over nothing.",
        derivative="dx = g·sign x where |x| is the largest, shared equally by ties.",
        laws=Laws(homogeneous=1, zero=True), flops=2, domain=Domain(kinks=(0.0,), gap=True))

_reduce("logsumexp", lambda T, x, dims: T.logsumexp(x, dims, keepdim=True),
        lambda b, g, y, x, axes: (b.where(b.eq(y, float("-inf")), 0.0, g * b.exp(x - y)),),
        doc="log Σ exp x over the axes, without overflow; −inf where all are −inf, and over nothing.",
        derivative="dx = g·exp(x − y), y the result; 0 where y = −inf.", flops=6, ulp=8)


def _deviation(T, x, dims):
    return T.sum(T.square(x - T.mean(x, dims, keepdim=True)), dims, keepdim=True) if x.numel() else T.sum(x, dims, keepdim=True)


_reduce("deviation", _deviation, lambda b, g, y, x, axes: (2.0 * g * (x - b.mean(x, axes=axes)),), surface=None,
        doc="The sum of squared distances from the mean over the axes, in f32; 0 over nothing. Laws make it of Σ (x − mean x)².",
        derivative="dx = 2g·(x − mean x).", laws=Laws(homogeneous=2, zero=True), flops=4)


def _gather_rule(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    value, index = args
    axis = attrs["axis"]
    if axis not in value.axes:
        raise TypeProblem(f"cannot gather along {axis}: the value has {', '.join(value.axes) or 'no axes'}", 0)
    if axis in index.axes:
        raise TypeProblem(f"the index of gather has the axis {axis} that it indexes", 1, f"rename[{axis} -> …](…) the index")
    return Ty(F32, tuple(a for a in union(args, axes) if a != axis))


def _gather_ref(T, frame, value, index, axis):
    d, n = frame.dim(axis), frame.extent(axis)
    inside = (index >= 0) & (index < n)
    shape = T.broadcast_shapes([s for i, s in enumerate(value.shape) if i != d], [s for i, s in enumerate(index.shape) if i != d])
    shape = (*shape[:d], 1, *shape[d:])
    if n == 0:
        return T.full(shape, float("nan"), dtype=value.dtype, device=value.device)
    picked = T.take_along_dim(value.expand(*shape[:d], n, *shape[d + 1:]), T.where(inside, index, 0).long().expand(shape), d)
    return T.where(inside, picked, float("nan"))


op("gather", "x i", kind="reduce", attrs="axis", brackets="axis", reads="f32 int", rule=_gather_rule,
   doc="The element of x at position i along the axis; NaN where i lies outside.",
   derivative="dx = g at position i, 0 elsewhere; nothing where i lies outside.",
   ref=_gather_ref, vjp=lambda b, g, y, x, i, axis: (b.where(b.eq(b.index(axis=axis), i), g, 0.0), None), flops=0,
   laws=Laws(homogeneous=1, linear=(("x",),)))
