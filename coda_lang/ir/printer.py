"""Programs as text. In: `graph.Program`. Out: text that `reader.from_text` reads back as an equal program, without spans. Not `.coda`."""

from __future__ import annotations

from .graph import Atom, Eqn, Lit, Program, Tensor
from .types import Axis


def to_text(program: Program) -> str:
    """The whole program; every constant exactly, one equation a line, types on every result."""
    p = program
    outputs = ", ".join(f"{tensor(o.tensor)} = {o.value.name}" for o in p.outputs)
    signature = f"program {p.name}({', '.join(map(tensor, p.inputs))}) -> ({outputs}) {{"
    lines = [f"doc {p.doc!r}"] if p.doc else []
    lines += [f"axes {', '.join(map(axis, p.axes))}"] if p.axes else []
    lines += [f"nominal {name}={value}" for name, value in p.nominal]
    lines += [f"require {condition!r}" for condition in p.requires]
    lines += [f"save {', '.join(p.save)}"] if p.save else []
    lines += [f"recompute {', '.join(p.recompute)}"] if p.recompute else []
    lines += [f"distribute {', '.join(p.distribute)}"] if p.distribute else []
    lines += [f"chunk {name}={value}" for name, value in p.chunk]
    lines += ["forward"] if p.forward_only else []
    lines += [equation(e) for e in p.eqns]
    return "\n".join([signature, *(f"  {line}" for line in lines), "}", ""])


def equation(eqn: Eqn) -> str:
    """`t0: f32[m, f] = contract(x, w) axes=[d] batch=[]`"""
    attrs = "".join(f" {name}={attribute(value)}" for name, value in eqn.attrs)
    return f"{eqn.out.name}: {eqn.out.ty} = {eqn.op}({', '.join(map(atom, eqn.args))}){attrs}"


def atom(a: Atom) -> str:
    """A variable's name, or `1e-05:f32`, `-100:i64`, `true`."""
    if not isinstance(a, Lit):
        return a.name
    return attribute(a.value) if isinstance(a.value, bool) else f"{a.value!r}:{a.dtype}"


def attribute(value: object) -> str:
    """Names bare, other strings quoted, tuples in brackets."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(attribute, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.isidentifier() and value not in ("true", "false", "inf", "nan"):
        return value
    return repr(value)


def tensor(t: Tensor) -> str:
    """`const freq: f32[pair]`"""
    return f"{'const ' * t.const}{t.name}: {t.dtype}[{', '.join(t.axes)}]"


def axis(a: Axis) -> str:
    """`m`, or `lane=2`"""
    return a.name if a.extent is None else f"{a.name}={a.extent}"
