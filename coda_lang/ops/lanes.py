"""Lanes: one position of a fixed axis (`lane`), several made into one (`pack`), and consecutive runs of a fixed axis (`run`, `join`)."""

from __future__ import annotations

from ..ir.types import DType, Ty
from .spec import Attrs, Axes, Laws, TypeProblem, op, unify, union


def _extent(axis: str, axes: Axes) -> int:
    found = {a.name: a.extent for a in axes}
    if axis not in found:
        raise TypeProblem(f"unknown axis {axis}")
    if found[axis] is None:
        raise TypeProblem(f"axis {axis} has no fixed extent, so it cannot be split or packed", None, f"fix it in the signature: {axis}=2")
    return found[axis]  # type: ignore[return-value]


def _holds(ty: Ty, axis: str, index: int = 0) -> None:
    if axis not in ty.axes:
        raise TypeProblem(f"the value has no axis {axis}; it has {', '.join(ty.axes) or 'none'}", index)


def _order(held: set[str], axes: Axes) -> tuple[str, ...]:
    return tuple(a.name for a in axes if a.name in held)


def _meet(args: tuple[Ty, ...]) -> DType:
    """The stored type where all agree, else f32 (or the wider integer)."""
    dtypes = [a.dtype for a in args]
    odd = next((i for i, d in enumerate(dtypes) if (d.kind == "bool") != (dtypes[0].kind == "bool")), None)
    if odd is not None:
        raise TypeProblem("bools and numbers cannot stand side by side", odd)
    return dtypes[0] if all(d is dtypes[0] for d in dtypes) else unify(dtypes)


def _lane(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    x, axis = args[0], attrs["axis"]
    _holds(x, axis)
    n = _extent(axis, axes)
    if not 0 <= attrs["index"] < n:
        raise TypeProblem(f"lane {attrs['index']} of axis {axis}, which has {n}")
    return Ty(x.dtype, tuple(a for a in x.axes if a != axis))


def _pack(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    axis = attrs["axis"]
    n = _extent(axis, axes)
    if len(args) != n:
        raise TypeProblem(f"axis {axis} has {n} lanes, but {len(args)} are packed")
    for i, ty in enumerate(args):
        if axis in ty.axes:
            raise TypeProblem(f"the value already has the axis {axis}", i)
    return Ty(_meet(args), _order({axis, *union(args, axes)}, axes))


def _run(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    x, axis, to, start = args[0], attrs["axis"], attrs["to"], attrs["start"]
    _holds(x, axis)
    whole, size = _extent(axis, axes), _extent(to, axes)
    if to in x.axes:
        raise TypeProblem(f"the value already has the axis {to}", 0)
    if start < 0 or start + size > whole:
        raise TypeProblem(f"run {start}…{start + size} of axis {axis}, which has {whole}")
    return Ty(x.dtype, _order({to, *x.axes} - {axis}, axes))


def _join(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    axis, of = attrs["axis"], tuple(attrs["of"])
    whole = _extent(axis, axes)
    if len(of) != len(args):
        raise TypeProblem(f"{len(of)} axes are named for {len(args)} values")
    for i, (ty, run) in enumerate(zip(args, of)):
        _holds(ty, run, i)
        if axis in ty.axes:
            raise TypeProblem(f"the value already has the axis {axis}", i)
    if (total := sum(_extent(run, axes) for run in of)) != whole:
        raise TypeProblem(f"axis {axis} has {whole}, but {', '.join(of)} together have {total}")
    rest = {a for ty, run in zip(args, of) for a in ty.axes if a != run}
    return Ty(_meet(args), _order({axis, *rest}, axes))


def _broadcast(T, tensors, dims=()):
    """All tensors at their common shape, except along `dims`."""
    shape = [max((t.shape[d] for t in tensors if t.shape[d] != 1), default=1, key=lambda n: n) for d in range(tensors[0].dim())]
    return [t.expand([t.shape[d] if d in dims else n for d, n in enumerate(shape)]) for t in tensors]


def _pack_ref(T, frame, *xs, axis):
    return T.cat(_broadcast(T, xs), frame.dim(axis))


def _join_ref(T, frame, *xs, axis, of):
    d = frame.dim(axis)
    return T.cat(_broadcast(T, [x.transpose(d, frame.dim(run)) for x, run in zip(xs, of)], (d,)), d)


def _run_ref(T, frame, x, axis, start, to):
    return x.narrow(frame.dim(axis), start, frame.extent(to)).transpose(frame.dim(axis), frame.dim(to))


def _lane_vjp(b, g, y, x, axis, index):
    return (b.pack(*(g if i == index else 0.0 for i in range(b.extent(axis))), axis=axis),)


def _run_vjp(b, g, y, x, axis, start, to):
    at = b.index(axis=axis) - start
    return (b.where((at >= 0) & (at < b.extent(to)), b.gather(g, at, axis=to), 0.0),)


def _join_vjp(b, g, y, *xs, axis, of):
    starts = [sum(b.extent(a) for a in of[:i]) for i in range(len(of))]
    return tuple(b.run(g, axis=axis, start=start, to=run) for start, run in zip(starts, of))


op("lane", "x", kind="lanes", attrs="axis index", surface="split", brackets="axis", reads="any", rule=_lane,
   doc="Position `index` of a fixed axis; `split[lane](x)` is all of them.", derivative="dx = g at that lane, 0 at the others.",
   ref=lambda T, frame, x, axis, index: x.narrow(frame.dim(axis), index, 1), vjp=_lane_vjp, flops=0,
   laws=Laws(homogeneous=1, linear=(("x",),), zero=True))
op("pack", "*x", kind="lanes", attrs="axis", brackets="axis", reads="any", rule=_pack,
   doc="Values side by side along a fixed axis: the inverse of split.", derivative="dx = the lane of g.",
   ref=_pack_ref, vjp=lambda b, g, y, *xs, axis: tuple(b.lane(g, axis=axis, index=i) for i in range(len(xs))), flops=0,
   laws=Laws(homogeneous=1, linear=(("x",),), zero=True))
op("run", "x", kind="lanes", attrs="axis start to", surface="split", brackets="arrow", reads="any", rule=_run,
   doc="A consecutive run of a fixed axis, under a name of its own; `split[a -> b=2, c=3](x)` is several.",
   derivative="dx = g in the run, 0 outside.", ref=_run_ref, vjp=_run_vjp, flops=0,
   laws=Laws(homogeneous=1, linear=(("x",),), zero=True))
op("join", "*x", kind="lanes", attrs="axis of", surface="pack", brackets="arrow", reads="any", rule=_join,
   doc="Runs one after the other along a fixed axis: `pack[b, c -> a](x, y)`, the inverse of split with an arrow.",
   derivative="dx = the run of g.", ref=_join_ref, vjp=_join_vjp, flops=0,
   laws=Laws(homogeneous=1, linear=(("x",),), zero=True))
