"""Batched products: a stage whose product has a batch axis, as one kernel for one position of that axis.

In: a stage. Out: the same for one position: tensors with the batch axis are pinned at their one position there, as lanes are, and no other
value has the axis. A loop (`chunks`) launches it for every position. Raises CodaError C0404 where that cannot be. Non-goals: the loop.
"""

from __future__ import annotations

from dataclasses import replace

from .. import ops
from ..diagnostics.model import CodaError, Diagnostic
from ..ir.graph import Atom, Eqn, Lit, Output, Program, Var
from ..ir.types import F32, I32, Axis, Ty
from .stages import named
from .state import listed


def batched(program: Program) -> Eqn | None:
    """A product with a batch axis; None where there is none."""
    return next((e for e in program.eqns if e.op == ops.CONTRACT.name and e.attr("batch")), None)


def why(program: Program) -> tuple[Diagnostic, ...]:
    """What takes several launches, for each batched product."""
    return tuple(_diagnostic(e) for e in program.eqns if e.op == ops.CONTRACT.name and e.attr("batch"))


def batch_axis(program: Program) -> str:
    """The batch axis of a stage's products. Raises CodaError C0404 where they have several."""
    product = batched(program)
    assert product is not None
    found = {a for e in program.eqns if e.op == ops.CONTRACT.name for a in e.attr("batch")}  # type: ignore[attr-defined]
    products = [e for e in program.eqns if e.op == ops.CONTRACT.name]
    if len(found) > 1 or any(not e.attr("batch") for e in products):
        raise CodaError([_diagnostic(product, "products are launched along one batch axis, and all of a kernel along the same one")])
    return found.pop()


def position(program: Program) -> Program:
    """The stage for one position of its batch axis; as it is where it has none."""
    return at_one(program, batch_axis(program)) if batched(program) is not None else program


def at_one(program: Program, axis: str) -> Program:
    """The program where the axis has one position, which only stored tensors know of."""
    taken = {t.name for t in program.inputs} | {e.out.name for e in program.eqns} | {o.tensor.name for o in program.outputs}
    held: dict[str, Atom] = {}
    eqns: list[Eqn] = []

    def fresh(name: str) -> str:
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    def narrow(ty: Ty) -> Ty:
        return replace(ty, axes=tuple(a for a in ty.axes if a != axis))

    def stored(name: str) -> Ty:
        t = next(t for t in program.inputs if t.name == name)
        return Ty(t.dtype, tuple(a.name for a in program.axes if a.name in t.axes))

    for t in program.inputs:
        if axis in t.axes:
            whole = Var(t.name, stored(t.name))
            pinned = Var(fresh(f"{t.name}_at"), narrow(whole.ty))
            eqns.append(Eqn(pinned, ops.LANE.name, (whole,), (("axis", axis), ("index", 0))))
            held[t.name] = pinned
    for e in program.eqns:
        out = replace(e.out, ty=narrow(e.out.ty))
        args = tuple(held.get(a.name, replace(a, ty=narrow(a.ty))) if isinstance(a, Var) else a for a in e.args)
        if e.op == ops.INDEX.name and e.attr("axis") == axis:
            held[e.out.name] = Lit(0, I32)
            continue
        if axis in named(e) and e.op != ops.SIZE.name:
            e = _without(e, axis, args)
        eqns.append(replace(e, out=out, args=args))
    outputs = []
    for o in program.outputs:
        value = held.get(o.value.name, replace(o.value, ty=narrow(o.value.ty)))
        if axis in o.tensor.axes:
            packed = Var(fresh(f"{o.value.name}_in"), o.value.ty)
            eqns.append(Eqn(packed, ops.PACK.name, (value,), (("axis", axis),)))
            value = packed
        assert isinstance(value, Var)
        outputs.append(Output(o.tensor, value))
    axes = tuple(Axis(axis, 1) if a.name == axis else a for a in program.axes)
    sizes = tuple(n for n in program.nominal if n[0] != axis)
    return replace(program, axes=axes, nominal=sizes, eqns=tuple(eqns), outputs=tuple(outputs))


def _without(e: Eqn, axis: str, args: tuple[Atom, ...]) -> Eqn:
    """The equation without an axis that its attributes name."""
    attrs = dict(e.attrs)
    if e.op == ops.CONTRACT.name:
        return replace(e, attrs=tuple((k, tuple(a for a in v if a != axis)) for k, v in e.attrs))  # type: ignore[attr-defined]
    if ops.TABLE[e.op].kind == "reduce" and "axes" in attrs or e.op == ops.EXPAND.name:
        rest = tuple(a for a in attrs["axes"] if a != axis)  # type: ignore[attr-defined]
        if rest:
            return replace(e, attrs=(("axes", rest),))
        value = args[0]
        same = isinstance(value, Var) and value.ty.dtype is F32 or e.op == ops.EXPAND.name
        return replace(e, op=ops.STOP.name, attrs=()) if same else replace(e, op=ops.CAST.name, attrs=(("dtype", F32.name),))
    raise CodaError([_diagnostic(e, f"`{axis}` is taken apart or renamed beside the product")])


def _diagnostic(e: Eqn, note: str = "") -> Diagnostic:
    batch = tuple(e.attr("batch")) if e.op == ops.CONTRACT.name else ()  # type: ignore[arg-type]
    what = f"this product has the batch axis {listed(batch)}" if len(batch) == 1 else "this is a batch of products"
    return Diagnostic(
        "C0404",
        f"{what}: one launch for each of its positions",
        e.span,
        "a batched product",
        notes=(note or "a kernel computes one product, in tiles of rows and columns",),
        help="merge the batch into the rows where the weight is shared; several batch axes that stand side by side can be declared as one",
    )
