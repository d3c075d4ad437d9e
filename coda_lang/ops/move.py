"""What changes axes and not values: `rename`, `expand`, `index`, `size`; and `stop_gradient`."""

from __future__ import annotations

import math

from ..ir.types import I32, Ty
from .spec import Attrs, Axes, Laws, TypeProblem, op


def _known(names, axes: Axes) -> None:
    for name in names:
        if name not in {a.name for a in axes}:
            raise TypeProblem(f"unknown axis {name}")


def _rename(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    x, old, new = args[0], attrs["axis"], attrs["to"]
    _known((old, new), axes)
    if old not in x.axes:
        raise TypeProblem(f"the value has no axis {old}; it has {', '.join(x.axes) or 'none'}", 0)
    if new in x.axes:
        raise TypeProblem(f"the value already has the axis {new}", 0)
    extents = {a.name: a.extent for a in axes}
    if extents[old] != extents[new]:
        raise TypeProblem(f"{old} and {new} differ in extent: {extents[old] or 'free'} and {extents[new] or 'free'}")
    return Ty(x.dtype, tuple(a.name for a in axes if a.name in {new, *x.axes} - {old}))


def _expand(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    x, new = args[0], tuple(attrs["axes"])
    _known(new, axes)
    for a in new:
        if a in x.axes:
            raise TypeProblem(f"the value already has the axis {a}", 0)
    return Ty(x.dtype, tuple(a.name for a in axes if a.name in {*new, *x.axes}))


def _index(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    _known((attrs["axis"],), axes)
    return Ty(I32, (attrs["axis"],))


def _size(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    _known(attrs["axes"], axes)
    return Ty(I32)


def _expand_ref(T, frame, x, axes):
    at = {frame.dim(a): frame.extent(a) for a in axes}
    return x.expand([at.get(d, n) for d, n in enumerate(x.shape)])


def _index_ref(T, frame, axis):
    d, n = frame.dim(axis), frame.extent(axis)
    return T.arange(n, dtype=T.int32, device=frame.device).reshape([n if i == d else 1 for i in range(frame.rank)])


def _size_ref(T, frame, axes):
    return T.full([1] * frame.rank, math.prod(frame.extent(a) for a in axes), dtype=T.int32, device=frame.device)


op("rename", "x", kind="move", attrs="axis to", brackets="arrow", reads="any", rule=_rename,
   doc="The same value with one axis under another name of the same extent.", derivative="dx = g, named back.",
   ref=lambda T, frame, x, axis, to: x.transpose(frame.dim(axis), frame.dim(to)),
   vjp=lambda b, g, y, x, axis, to: (b.rename(g, axis=to, to=axis),), emit="{x}", flops=0,
   laws=Laws(homogeneous=1, linear=(("x",),), zero=True))
op("expand", "x", kind="move", attrs="axes", brackets="axes", reads="any", rule=_expand,
   doc="The same value at every position of further axes.", derivative="dx = g summed over those axes.",
   ref=_expand_ref, vjp=lambda b, g, y, x, axes: (g,), emit="{x}", flops=0,
   laws=Laws(homogeneous=1, linear=(("x",),), zero=True))
op("index", "", kind="move", attrs="axis", brackets="axis", rule=_index,
   doc="The position along an axis, 0, 1, 2, …, as i32.", derivative="none: an integer.", ref=_index_ref, flops=0)
op("size", "", kind="move", attrs="axes", brackets="axes", rule=_size,
   doc="The extent of an axis (of several: their product), as i32.", derivative="none: an integer.", ref=_size_ref, flops=0)
op("stop_gradient", "x", kind="move", reads="any", rule=lambda args, attrs, axes: args[0],
   doc="x, taken as a constant by derivatives.", derivative="dx = 0.", ref=lambda T, frame, x: x.detach(), emit="{x}", flops=0,
   laws=Laws(homogeneous=1, linear=(("x",),), zero=True))
