"""What a program that is accepted probably does not mean. In: a program as built. Out: diagnostics of severity "warning".

Non-goals: what is refused (the other files of this stage).
"""

from __future__ import annotations

from ..diagnostics.model import Diagnostic
from .graph import Program, Tensor, Var


def warnings(program: Program) -> tuple[Diagnostic, ...]:
    """Inputs that nothing reads, such as a bias that was forgotten; one that alone says how long an axis is counts as read."""
    read = {a.name for e in program.eqns for a in e.args if isinstance(a, Var)} | {o.value.name for o in program.outputs}
    kept, found = list(program.inputs), []
    for tensor in program.inputs:
        rest = [t for t in kept if t is not tensor]
        if tensor.name not in read and not _sizes(program, tensor, rest):
            kept = rest  # so that following all the advice leaves every axis with an input
            found.append(_unread(program, tensor))
    return tuple(found)


def _sizes(program: Program, tensor: Tensor, rest: list[Tensor]) -> bool:
    """Whether the program uses a free axis of this input that the rest of them lack."""
    own = {a for a in tensor.axes if program.extent(a) is None} - {a for t in rest for a in t.axes}
    used = {a for e in program.eqns for a in e.out.ty.axes} | {a for o in program.outputs for a in o.tensor.axes}
    for e in program.eqns:
        for name, value in e.attrs:
            used |= set(value if isinstance(value, tuple) else (value,)) if name in ("axis", "axes", "to") else set()
    return bool(own & used)


def _unread(program: Program, tensor: Tensor) -> Diagnostic:
    name = f"`{tensor.name}`"
    return Diagnostic(
        "C0215",
        f"the input {name} is never read",
        tensor.span,
        f"no value of `{program.name}` depends on it",
        help=f"use {name}, or take it out of the signature",
        severity="warning",
    )
