"""Dead equations go, equal ones become one, casts that change nothing vanish, and products added up are put side by side.

In: a program. Out: a program of the same meaning; f32 additions may be reassociated where products sit between other summands, so
that one accumulator can hold their sum. Non-goals: rounding points (never moved here), laws across products.
"""

from __future__ import annotations

from dataclasses import replace

from .. import ops
from ..ir.graph import Atom, Eqn, Lit, Program, Var
from .fold import computed, fold
from .state import State, definitions, uses


def simplify(state: State) -> State:
    """The pass."""
    program, moved = side_by_side(live(common(fold(common(state.program)))))
    notes = tuple(f"sum of products{where}: products are added first, in one accumulator (f32, another order)" for where in moved)
    return replace(state, program=live(program), notes=state.notes + notes)


def common(program: Program) -> Program:
    """Equal equations once (common subexpressions); a cast to the type a value has already is that value."""
    known: dict[object, Var] = {}
    renamed: dict[str, Atom] = {}
    kept: list[Eqn] = []
    for e in program.eqns:
        args = tuple(renamed.get(a.name, a) if isinstance(a, Var) else a for a in e.args)
        if e.op == ops.CAST.name and isinstance(args[0], Var) and args[0].ty.dtype.name == e.attr("dtype"):
            renamed[e.out.name] = args[0]
            continue
        read = tuple((a.value, a.dtype.name, str(a.value)) if isinstance(a, Lit) else a.name for a in args)
        key = (e.op, read, e.attrs, e.out.ty.dtype.name, e.out.ty.axes)
        if key in known:
            renamed[e.out.name] = known[key]
            continue
        known[key] = e.out
        kept.append(e.reading(args))
    outputs = tuple(replace(o, value=renamed.get(o.value.name, o.value)) for o in program.outputs)  # type: ignore[arg-type]
    return replace(program, eqns=tuple(kept), outputs=outputs).told(lambda name: computed(renamed.get(name), name))


def live(program: Program) -> Program:
    """Without equations that no output needs."""
    needed = {o.value.name for o in program.outputs}
    kept: list[Eqn] = []
    for e in reversed(program.eqns):
        if e.out.name in needed:
            needed |= {a.name for a in e.args if isinstance(a, Var)}
            kept.append(e)
    return replace(program, eqns=tuple(reversed(kept))).told(lambda name: name if name in needed else None)


def side_by_side(program: Program) -> tuple[Program, tuple[str, ...]]:
    """In a sum with several products of equal axes, those come first: ((x@w + b) + t@v) becomes ((x@w + t@v) + b). Also where."""
    defs, count = definitions(program), uses(program)

    def summands(root: Eqn) -> list[Atom]:
        found: list[Atom] = []
        pending = list(reversed(root.args))
        while pending:
            atom = pending.pop()
            e = defs.get(atom.name) if isinstance(atom, Var) and count[atom.name] == 1 else None
            if e is not None and e.op == ops.ADD.name:
                pending += reversed(e.args)
            else:
                found.append(atom)
        return found

    inner = {a.name for e in program.eqns if e.op == ops.ADD.name for a in e.args if isinstance(a, Var) and count[a.name] == 1}
    taken = {e.out.name for e in program.eqns} | {t.name for t in program.inputs}
    out: list[Eqn] = []
    moved: list[str] = []
    for e in program.eqns:
        terms = summands(e) if e.op == ops.ADD.name and e.out.name not in inner else []
        products = [
            t for t in terms if isinstance(t, Var) and count[t.name] == 1 and t.name in defs and defs[t.name].op == ops.CONTRACT.name
        ]
        axes = {t.ty.axes for t in products}
        if len(products) < 2 or len(axes) > 1 or terms[: len(products)] == products and len(e.args) == len(terms):
            out.append(e)
            continue
        builder = ops.builder.EqnBuilder(program.axes, taken)
        rest = [t for t in terms if t not in products]
        total = builder.value(products[0])
        for i, t in enumerate([*products[1:], *rest]):
            last = i == len(terms) - 2
            total = builder.apply(ops.ADD.name, (total, t), span=e.span, hint="" if last else "acc")
        builder.eqns[-1] = replace(builder.eqns[-1], out=e.out)
        out += builder.eqns
        taken |= builder.taken
        moved.append(f" in {e.span}" if e.span else "")
    return replace(program, eqns=tuple(out)), tuple(moved)
