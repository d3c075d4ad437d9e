"""Which products share a kernel: sums of products into one accumulator, and accumulators with the same rows that later values combine.

In: a program. Out: `Group`s, and the program with each group's members next to each other. Non-goals: whether the kernel exists (`anchor`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import ops
from ..ir.graph import Eqn, Program, Var
from .anchor import accumulators
from .state import definitions


@dataclass(frozen=True)
class Group:
    """Products of one kernel: `members` are the products and sums that are accumulators, `rows` the axes of the shared operand's side."""

    members: tuple[str, ...]
    axes: frozenset[str]
    rows: frozenset[str]


def groups(program: Program, late: frozenset[str] = frozenset()) -> tuple[Group, ...]:
    """All groups; every product is in exactly one. Values in `late` never share a kernel with others."""
    defs = definitions(program)
    found = [(var, terms, _inside(defs, var, terms)) for var, _, terms in accumulators(program)]
    before = _ancestors(program)
    made: list[list[int]] = []
    for i, (var, terms, _) in enumerate(found):
        for g in made:
            same_time = (found[g[0]][0].name in late) == (var.name in late)
            fits = same_time and all(_beside(found[j][1], terms) for j in g) and _meet(program, [found[j][0] for j in g], var)
            if fits and _free(before, found, [*g, i]):
                g.append(i)
                break
        else:
            made.append([i])
    return tuple(_group(program, [found[i] for i in g]) for g in made)


def reordered(program: Program, found: tuple[Group, ...]) -> Program:
    """The same equations, each group's members behind all that any of them needs."""
    defs = definitions(program)
    group_of = {m: g for g in found for m in g.members}
    done: dict[str, Eqn] = {}

    def emit(name: str) -> None:
        if name in done or name not in defs:
            return
        members = group_of[name].members if name in group_of else (name,)
        for m in members:
            for a in defs[m].args:
                if isinstance(a, Var) and a.name not in members:
                    emit(a.name)
        for m in sorted(members, key=list(defs).index):
            done[m] = defs[m]

    for e in program.eqns:
        emit(e.out.name)
    return replace(program, eqns=tuple(done.values()))


def _inside(defs: dict[str, Eqn], var: Var, terms: list[Eqn]) -> tuple[str, ...]:
    """The accumulator's products and the additions that join them."""
    names = [t.out.name for t in terms]
    todo = [var.name]
    while todo:
        name = todo.pop()
        if name not in names:
            names.append(name)
            todo += [a.name for a in defs[name].args if isinstance(a, Var)]
    return tuple(names)


def _group(program: Program, members: list[tuple[Var, list[Eqn], tuple[str, ...]]]) -> Group:
    first = members[0][1][0]
    shared = [a for a in first.args if isinstance(a, Var) and all(a in terms[0].args for _, terms, _ in members)]
    over = set(first.attr("axes"))  # type: ignore[call-overload]
    rows = frozenset(shared[0].ty.axes) - over if shared else frozenset()
    return Group(tuple(n for *_, names in members for n in names), frozenset(members[0][0].ty.axes), rows)


def _beside(a: list[Eqn], b: list[Eqn]) -> bool:
    """May these two sums fill one tile side by side? Term by term they share an operand and the contracted axes, and have equal axes."""
    if len(a) != len(b) or a[0].out.ty.axes != b[0].out.ty.axes:
        return False
    return all(x.attrs == y.attrs and any(v in y.args for v in x.args) for x, y in zip(a, b))


def _meet(program: Program, first: list[Var], second: Var) -> bool:
    """Does an element-wise value use both?"""
    held: dict[str, int] = {v.name: 1 for v in first} | {second.name: 2}
    for e in program.eqns:
        if ops.TABLE[e.op].kind not in ("contract", "reduce"):
            held[e.out.name] = held.get(e.out.name, 0)
            for a in e.args:
                held[e.out.name] |= held.get(a.name, 0) if isinstance(a, Var) else 0
            if held[e.out.name] == 3:
                return True
    return False


def _ancestors(program: Program) -> dict[str, frozenset[str]]:
    out: dict[str, frozenset[str]] = {}
    for e in program.eqns:
        args = [a.name for a in e.args if isinstance(a, Var)]
        out[e.out.name] = frozenset(args).union(*(out.get(a, frozenset()) for a in args))
    return out


def _free(before: dict[str, frozenset[str]], found: list, chosen: list[int]) -> bool:
    """No member needs another's value, not even by way of something in between."""
    names = [set(found[i][2]) for i in chosen]
    operands = [{a.name for t in found[i][1] for a in t.args if isinstance(a, Var)} for i in chosen]
    for i, own in enumerate(operands):
        needed = own.union(*(before.get(a, frozenset()) for a in own))
        if any(needed & other for j, other in enumerate(names) if j != i):
            return False
    return True
