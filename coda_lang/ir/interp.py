"""The oracle: runs a program with torch, one op after the other, as its meaning in `graph` says. In: a program, tensors, the torch module.
Out: its outputs. Non-goals: speed, the planner's view of rounding (the references of generated modules have it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ops import RENAME
from ..ops.builder import Frame, apply_op, constant
from .graph import Lit, Program, Tensor


def run(program: Program, inputs: Mapping[str, Any], T: Any, precision: str = "written", extents: Mapping[str, int] = {}) -> dict[str, Any]:
    """The outputs, by name, axes in declared order.

    `inputs` holds one tensor a name, dimensions in declared order; `extents` gives those of axes that no input has.
    precision "written": floats are f32, casts round, inputs are rounded to their declared dtype, outputs have theirs.
    precision "exact": floats are float64, nothing rounds, float outputs are float64, and a float64 input is taken as it is.
    Differentiable by torch. Raises ValueError where names or shapes do not fit.
    """
    env = values(program, inputs, T, precision, extents)
    frame = frame_of(program, inputs, extents)
    return {o.tensor.name: _store(frame.take(env[o.value.name], o.tensor.axes), o.tensor, T, precision == "exact") for o in program.outputs}


def values(
    program: Program, inputs: Mapping[str, Any], T: Any, precision: str = "written", extents: Mapping[str, int] = {}
) -> dict[str, Any]:
    """Every value of the program, by name, laid out in `frame_of(program, inputs, extents)`."""
    if precision not in ("written", "exact"):
        raise ValueError(f"precision is written or exact, not {precision}")
    exact, frame = precision == "exact", frame_of(program, inputs, extents)
    env = {t.name: frame.lay(_load(inputs[t.name], t, T, exact), t.axes) for t in program.inputs}
    for e in program.eqns:
        args = [constant(a, frame, T, exact) if isinstance(a, Lit) else env[a.name] for a in e.args]
        env[e.out.name] = apply_op(e.op, args, dict(e.attrs), frame, T, exact)
    return env


def frame_of(program: Program, inputs: Mapping[str, Any], known: Mapping[str, int] = {}) -> Frame:
    """The extents that the inputs' shapes give. Raises ValueError where they disagree or leave an axis open."""
    if set(inputs) != {t.name for t in program.inputs}:
        raise ValueError(f"{program.name} takes {', '.join(t.name for t in program.inputs)}; given {', '.join(inputs)}")
    extents = {a.name: a.extent or known.get(a.name) for a in program.axes}
    for t in program.inputs:
        shape = tuple(inputs[t.name].shape)
        if len(shape) != len(t.axes):
            raise ValueError(f"{t.name} has axes {t.axes}, given shape {shape}")
        for axis, n in zip(t.axes, shape):
            if extents[axis] not in (None, n):
                raise ValueError(f"{t.name}: axis {axis} is {extents[axis]}, given {n}")
            extents[axis] = n
    _renamed(program, extents)
    open_axes = [a for a, n in extents.items() if n is None]
    if open_axes:
        raise ValueError(f"no input gives the extent of {', '.join(open_axes)}")
    device = next((x.device for x in inputs.values()), "cpu")
    return Frame(tuple(extents), {a: n for a, n in extents.items() if n is not None}, device)


def _renamed(program: Program, extents: dict[str, int | None]) -> None:
    """An axis that only a rename introduces has the extent of the axis it renames. Raises ValueError where two such axes differ."""
    pairs = [(str(e.attr("axis")), str(e.attr("to"))) for e in program.eqns if e.op == RENAME.name]
    for _ in pairs:
        for old, new in pairs:
            if extents[new] is None:
                extents[new] = extents[old]
    for old, new in pairs:
        if extents[old] != extents[new]:
            raise ValueError(f"axes {old} and {new} are one by a rename, their extents are {extents[old]} and {extents[new]}")


def _load(x: Any, tensor: Tensor, T: Any, exact: bool) -> Any:
    stored = {"bf16": T.bfloat16, "f16": T.float16, "f32": T.float32, "i32": T.int32, "i64": T.int64, "bool": T.bool}[tensor.dtype.name]
    if tensor.dtype.kind != "float":
        return x.to(stored)
    return x.to(T.float64) if exact else x.to(stored).to(T.float32)


def _store(x: Any, tensor: Tensor, T: Any, exact: bool) -> Any:
    if exact or tensor.dtype.kind != "float":
        return x
    return x.to({"bf16": T.bfloat16, "f16": T.float16, "f32": T.float32}[tensor.dtype.name])
