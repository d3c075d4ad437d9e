"""The contraction: `@` and `matmul[k]`. Operands are 16-bit floats of one type (rounded by explicit casts), accumulation is f32."""

from __future__ import annotations

from ..ir.types import BF16, F16, F32, Ty
from .spec import Attrs, Axes, Laws, TypeProblem, op, union


def _names(axes) -> str:
    return ", ".join(axes) or "no axes"


def _rule(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
    x, y = args
    over, batch = tuple(attrs["axes"]), tuple(attrs["batch"])
    for i, ty in enumerate(args):
        if ty.dtype not in (BF16, F16):
            raise TypeProblem(f"an operand of `@` must be bf16 or f16, not {ty.dtype}", i, "round it: bf16(…)")
    if x.dtype is not y.dtype:
        raise TypeProblem(f"the operands of `@` differ in type: {x.dtype} and {y.dtype}", 1, f"round one: {x.dtype}(…)")
    shared = [a for a in x.axes if a in y.axes]
    if not over:
        raise TypeProblem(f"`@` needs an axis that both sides have; left has {_names(x.axes)}, right has {_names(y.axes)}")
    for a in (*over, *batch):
        if a not in shared:
            side = 0 if a not in x.axes else 1
            raise TypeProblem(f"axis {a} is not on both sides of the product; {_names(args[side].axes)} here", side)
    for a in shared:
        if (a in over) == (a in batch):
            raise TypeProblem(f"axis {a} must be either contracted or a batch axis of the product")
    for i, ty in enumerate(args):
        if all(a in shared for a in ty.axes):
            raise TypeProblem("each side of a product keeps an axis of its own; this one has none", i, "write sum[…](x * y) instead")
    return Ty(F32, tuple(a for a in union(args, axes) if a not in over))


def _ref(T, frame, x, y, axes, batch):
    """einsum over the dims that are there: a dim of extent 1 because the value lacks the axis broadcasts."""
    letters = [chr(ord("a") + i) for i in range(x.dim())]
    over = {frame.dim(a) for a in axes}
    keep = [i for i in range(x.dim()) if i not in over]
    out = T.einsum(f"{''.join(letters)},{''.join(letters)}->{''.join(letters[i] for i in keep)}", x, y)
    for d in sorted(over):
        out = out.unsqueeze(d)
    return out


def _vjp(b, g, r, x, y, axes, batch):
    def side(mine, other):
        own = tuple(a for a in other.ty.axes if a not in axes and a not in batch)
        return b.contract(b.cast(g, dtype=other.ty.dtype.name), other, axes=own, batch=batch)

    return side(x, y), side(y, x)


op("contract", "x y", kind="contract", surface="matmul", symbol="@", brackets="axes", attrs="axes batch", reads="any any", rule=_rule,
   doc="Sums x·y over the contracted axes, in f32; the other shared axes are batch axes. `@` contracts all shared axes.",
   derivative="dx = g @ y, dy = g @ x, with g rounded to the operands' type.",
   ref=_ref, vjp=_vjp, flops=2, laws=Laws(homogeneous=2, linear=(("x",), ("y",)), commutative=True, zero=True))
