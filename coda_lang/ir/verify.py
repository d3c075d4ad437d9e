"""What every program must satisfy, after `build` and after every pass. In: a program. Out: it, or an InternalError with all problems.

Checks: axes named once and with positive extents; single assignment before use; the types of uses agree with definitions; every op
known, its attributes sorted and complete, its type re-inferred equal (so integers are cast where they meet f32, contractions are legal,
reductions reduce axes that are there); constants exact in their type; outputs defined, of the declared type and axes; `save` and
`recompute` name values.
Non-goal: what a user may do wrong (`build` reports that; here it is a bug of the compiler).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..diagnostics.model import InternalError
from ..ops import TABLE, TypeProblem
from ..ops.builder import literal
from .graph import Atom, Eqn, Lit, Program, Var
from .printer import to_text
from .types import DTYPES, Ty


def verify(program: Program, after: str = "") -> Program:
    """The program itself. Raises InternalError, naming the pass `after` which it was found broken."""
    found = list(problems(program))
    if found:
        where = f" after {after}" if after else ""
        raise InternalError(
            f"The compiler built a program it must not build{where}; please report this.\n"
            + "".join(f"- {line}\n" for line in found)
            + to_text(program)
        )
    return program


def problems(program: Program) -> Iterator[str]:
    """Every violation, in words."""
    names = [a.name for a in program.axes]
    for a in program.axes:
        if names.count(a.name) > 1:
            yield f"axis {a.name} is listed twice"
        if a.extent is not None and a.extent < 1:
            yield f"axis {a.name} has extent {a.extent}"
    known: dict[str, Ty] = {}
    for t in program.inputs:
        yield from _axes(f"input {t.name}", t.axes, names)
        if t.name in known:
            yield f"input {t.name} is declared twice"
        known[t.name] = Ty(t.dtype, tuple(a for a in names if a in t.axes))
    for e in program.eqns:
        for arg in e.args:
            yield from _use(e.out.name, arg, known)
        yield from _equation(e, program, names)
        if e.out.name in known:
            yield f"{e.out.name} is assigned twice"
        known[e.out.name] = e.out.ty
    yield from _results(program, known, names)


def _results(program: Program, known: dict[str, Ty], names: list[str]) -> Iterator[str]:
    seen: set[str] = set()
    for o in program.outputs:
        what = f"output {o.tensor.name}"
        if o.tensor.name in seen:
            yield f"{what} is declared twice"
        seen.add(o.tensor.name)
        yield from _axes(what, o.tensor.axes, names)
        yield from _use(what, o.value, known)
        declared = Ty(o.tensor.dtype, tuple(a for a in names if a in o.tensor.axes))
        if o.value.ty != declared:
            yield f"{what} is declared {declared}, its value {o.value.name} is {o.value.ty}"
    if not program.outputs:
        yield "there is no output"
    for name in (*program.save, *program.recompute, *program.distribute):
        if name not in known:
            yield f"save, recompute or distribute names {name}, which is no value"
    for what in ("nominal", "chunk"):
        for axis, value in getattr(program, what):
            if axis not in names or value < 1:
                yield f"{what} {axis}={value} is not an extent"


def _axes(what: str, axes: tuple[str, ...], names: list[str]) -> Iterator[str]:
    for a in axes:
        if a not in names:
            yield f"{what} has the unknown axis {a}"
        if axes.count(a) > 1:
            yield f"{what} has the axis {a} twice"


def _use(where: str, a: Atom, known: dict[str, Ty]) -> Iterator[str]:
    if isinstance(a, Lit):
        yield from _constant(where, a)
    elif a.name not in known:
        yield f"{where} uses {a.name} before it is assigned"
    elif known[a.name] != a.ty:
        yield f"{where} uses {a.name} as {a.ty}, it is {known[a.name]}"


def _constant(where: str, lit: Lit) -> Iterator[str]:
    try:
        exact: Any = literal(lit.value, [lit.dtype])
    except TypeProblem as problem:
        exact = problem.message
    if lit.value == lit.value and (exact != lit or type(lit.value) is not type(exact.value)):
        yield f"{where} holds the constant {lit.value!r}:{lit.dtype}, which is not exactly of that type (builder.literal makes one that is)"


def _equation(e: Eqn, program: Program, names: list[str]) -> Iterator[str]:
    what = f"{e.out.name} = {e.op}(…)"
    if e.op not in TABLE:
        yield f"{what}: there is no op {e.op}"
        return
    yield from _axes(what, e.out.ty.axes, names)
    if tuple(sorted(e.attrs)) != e.attrs or len(dict(e.attrs)) != len(e.attrs):
        yield f"{what}: attributes are not sorted by name, or one is there twice"
    if e.out.ty.dtype is not DTYPES.get(e.out.ty.dtype.name):
        yield f"{what}: {e.out.ty.dtype} is not one of the dtypes"
    try:
        ty = TABLE[e.op].infer(tuple(a.ty if isinstance(a, Var) else Ty(a.dtype) for a in e.args), dict(e.attrs), program.axes)
    except TypeProblem as problem:
        yield f"{what}: {problem.message}"
        return
    if ty != e.out.ty:
        yield f"{what} has the type {e.out.ty}, inferred is {ty}"
