"""Lane algebra: a lane of a pack is the packed value, sums of packs are packs of sums, adding zero changes nothing.

In: a program, such as a derivative, whose rules take lanes apart and put them together again. Out: the same meaning (−0 + 0 apart, which is
0) with values where each lane is one. Non-goals: dead code and common subexpressions (`simplify`).
"""

from __future__ import annotations

from dataclasses import replace

from .. import ops
from ..ir.graph import Atom, Eqn, Lit, Program, Var
from ..ops.builder import EqnBuilder


def fold(program: Program) -> Program:
    """The program after one walk in order; every rule looks at equations that were folded before."""
    taken = {e.out.name for e in program.eqns} | {t.name for t in program.inputs} | {o.tensor.name for o in program.outputs}
    b = EqnBuilder(program.axes, taken)
    walk = _Fold(b)
    for e in program.eqns:
        walk.step(replace(e, args=tuple(walk.now(a) for a in e.args)))
    outputs = []
    for o in program.outputs:
        value = walk.now(o.value)
        assert isinstance(value, Var)
        outputs.append(replace(o, value=value))
    return replace(program, eqns=tuple(b.eqns), outputs=tuple(outputs))


class _Fold:
    def __init__(self, b: EqnBuilder) -> None:
        self.b = b
        self.renamed: dict[str, Atom] = {}
        self.defs: dict[str, Eqn] = {}

    def now(self, a: Atom) -> Atom:
        return self.renamed.get(a.name, a) if isinstance(a, Var) else a

    def definition(self, a: Atom, op: str) -> Eqn | None:
        e = self.defs.get(a.name) if isinstance(a, Var) else None
        return e if e is not None and e.op == op else None

    def step(self, e: Eqn) -> None:
        same = self._same(e)
        if same is not None:
            self.renamed[e.out.name] = same
            return
        packed = self._sum_of_packs(e)
        self._keep(packed if packed is not None else e)

    def _keep(self, e: Eqn) -> None:
        self.b.eqns.append(e)
        self.defs[e.out.name] = e

    def _same(self, e: Eqn) -> Atom | None:
        """The atom that e's value is, where it is one of its own type."""
        found: Atom | None = None
        if e.op == ops.LANE.name and (pack := self.definition(e.args[0], ops.PACK.name)) and pack.attr("axis") == e.attr("axis"):
            found = pack.args[int(e.attr("index"))]  # type: ignore[call-overload]
        elif e.op == ops.ADD.name and any(_zero(a) for a in e.args):
            found = e.args[1] if _zero(e.args[0]) else e.args[0]
        elif e.op == ops.CAST.name and isinstance(e.args[0], Var) and e.args[0].ty.dtype.name == e.attr("dtype"):
            found = e.args[0]
        return found if isinstance(found, Var) and found.ty == e.out.ty else None

    def _sum_of_packs(self, e: Eqn) -> Eqn | None:
        """add(pack(a, b), pack(c, d)) as pack(a + c, b + d)."""
        packs = [self.definition(a, ops.PACK.name) for a in e.args] if e.op == ops.ADD.name else []
        if len(packs) != 2 or packs[0] is None or packs[1] is None or packs[0].attrs != packs[1].attrs:
            return None
        lanes: list[Atom] = []
        for x, y in zip(packs[0].args, packs[1].args):
            if _zero(x) or _zero(y):
                lanes.append(y if _zero(x) else x)
                continue
            start = len(self.b.eqns)
            lanes.append(self.b.apply(ops.ADD.name, (x, y), span=e.span).atom)
            self.defs.update({made.out.name: made for made in self.b.eqns[start:]})
        return replace(e, op=ops.PACK.name, args=tuple(lanes), attrs=packs[0].attrs)


def _zero(a: Atom) -> bool:
    return isinstance(a, Lit) and not isinstance(a.value, bool) and a.value == 0
