"""Lane algebra: a lane of a pack is the packed value, sums of packs are packs of sums, adding zero changes nothing, and runs put back
into zeros and added up stand side by side.

In: a program, such as a derivative, whose rules take lanes apart and put them together again. Out: the same meaning (−0 + 0 apart, which is
0) with values where each lane is one. Non-goals: dead code and common subexpressions (`simplify`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import ops
from ..ir.graph import Atom, Eqn, Lit, Program, Var
from ..ir.types import F32, Axis
from ..ops.builder import EqnBuilder

AND, FROM, BEFORE = (op.name for op in (ops.by_symbol("and", 2), ops.by_symbol(">=", 2), ops.by_symbol("<", 2)) if op is not None)


def fold(program: Program) -> Program:
    """The program after one walk in order; every rule looks at equations that were folded before."""
    taken = {e.out.name for e in program.eqns} | {t.name for t in program.inputs} | {o.tensor.name for o in program.outputs}
    b = EqnBuilder(program.axes, taken)
    walk = _Fold(b)
    for e in program.eqns:
        walk.step(e)
    outputs = []
    for o in program.outputs:
        value = walk.settled(o.value)
        assert isinstance(value, Var)
        outputs.append(replace(o, value=value))
    folded = replace(program, axes=b.axes, eqns=tuple(b.eqns), outputs=tuple(outputs))
    return folded.told(lambda name: name if name in walk.defs else computed(walk.renamed.get(name), None))


def computed(now: Atom | None, otherwise: str | None) -> str | None:
    """The name of what a value has become; `otherwise` if it has not changed, None if it is a constant."""
    return otherwise if now is None else now.name if isinstance(now, Var) else None


@dataclass(frozen=True)
class Runs:
    """A sum of runs of one axis, each in its place and zero elsewhere: (start, the run's own axis, its value)."""

    axis: str
    parts: tuple[tuple[int, str, Atom], ...]
    eqn: Eqn


class _Fold:
    def __init__(self, b: EqnBuilder) -> None:
        self.b = b
        self.renamed: dict[str, Atom] = {}
        self.defs: dict[str, Eqn] = {}
        self.runs: dict[str, Runs] = {}  # values that are not written yet

    def now(self, a: Atom) -> Atom:
        return self.renamed.get(a.name, a) if isinstance(a, Var) else a

    def definition(self, a: Atom, op: str) -> Eqn | None:
        e = self.defs.get(a.name) if isinstance(a, Var) else None
        return e if e is not None and e.op == op else None

    def settled(self, a: Atom) -> Atom:
        """What stands for a, written by now."""
        a = self.now(a)
        if isinstance(a, Var) and a.name in self.runs:
            self.renamed[a.name] = self._joined(self.runs.pop(a.name))
        return self.now(a)

    def step(self, e: Eqn) -> None:
        runs = self._run_in_zeros(e) or self._sum_of_runs(e)
        if runs is not None:
            self.runs[e.out.name] = runs
            return
        e = e.reading(tuple(self.settled(a) for a in e.args))
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
        types = {x.ty.dtype for x in lanes if isinstance(x, Var)}
        first = next((i for i, x in enumerate(lanes) if isinstance(x, Var)), None)
        if first is not None and e.out.ty.dtype not in types and not any(isinstance(x, Lit) for x in lanes):  # the sum was f32
            lanes[first] = self.b.apply(ops.CAST.name, (lanes[first],), {"dtype": e.out.ty.dtype.name}, span=e.span).atom
        return replace(e, op=ops.PACK.name, args=tuple(lanes), attrs=packs[0].attrs)

    # --- runs ----------------------------------------------------------------------------------------------------------

    def _run_in_zeros(self, e: Eqn) -> Runs | None:
        """where(0 <= i - start < n, gather[to](g, i - start), 0), i the position along an axis: the derivative of a run."""
        gather = self.definition(self.now(e.args[1]), ops.GATHER.name) if e.op == ops.WHERE.name and _zero(e.args[2]) else None
        if gather is None or not isinstance(gather.args[1], Var) or not isinstance(gather.args[0], Var):
            return None
        value, at, to = gather.args[0], gather.args[1], str(gather.attr("axis"))
        moved = self.definition(at, ops.SUB.name)
        position = self.definition(moved.args[0], ops.INDEX.name) if moved and isinstance(moved.args[1], Lit) else None
        both = self.definition(self.now(e.args[0]), AND)
        if position is None or both is None or moved is None:
            return None
        first, last = self.definition(both.args[0], FROM), self.definition(both.args[1], BEFORE)
        size = self.b.extent(to)
        inside = first and last and first.args[0] == last.args[0] == at and _zero(first.args[1]) and _is(last.args[1], size)
        start = moved.args[1]
        if not inside or not isinstance(start, Lit) or to not in value.ty.axes:
            return None
        return Runs(str(position.attr("axis")), ((int(start.value), to, value),), e)

    def _sum_of_runs(self, e: Eqn) -> Runs | None:
        """The sum of runs that do not overlap."""
        found = [self.runs.get(a.name) if isinstance(a := self.now(x), Var) else None for x in e.args] if e.op == ops.ADD.name else []
        if len(found) != 2 or found[0] is None or found[1] is None or found[0].axis != found[1].axis:
            return None
        parts = sorted((*found[0].parts, *found[1].parts), key=lambda p: p[0])
        ends = [start + (self.b.extent(to) or 0) for start, to, _ in parts]
        names = [to for _, to, _ in parts]
        if any(end > start for end, (start, *_) in zip(ends, parts[1:])) or len(set(names)) < len(names):
            return None
        return Runs(found[0].axis, tuple(parts), e)

    def _joined(self, runs: Runs) -> Atom:
        """The runs side by side, zeros between them."""
        b, at, args, of = self.b, 0, [], []
        whole = b.extent(runs.axis) or 0
        for start, to, value in (*runs.parts, (whole, "", Lit(0.0, F32))):
            if start > at:
                hole = next(n for n in (f"{runs.axis}_{at}{'_' * i}" for i in range(99)) if n not in {a.name for a in b.axes})
                b.axes = (*b.axes, Axis(hole, start - at))
                args.append(b.expand(Lit(0.0, F32), axes=(hole,)).atom)
                of.append(hole)
            if to:
                args.append(value)
                of.append(to)
                at = start + (b.extent(to) or 0)
        made = b.apply(ops.JOIN.name, args, {"axis": runs.axis, "of": tuple(of)}, span=runs.eqn.span)
        if made.ty.dtype is not runs.eqn.out.ty.dtype:
            made = b.apply(ops.CAST.name, (made,), {"dtype": runs.eqn.out.ty.dtype.name}, span=runs.eqn.span)
        return made.atom


def _is(a: Atom, value: int | None) -> bool:
    return isinstance(a, Lit) and not isinstance(a.value, bool) and a.value == value


def _zero(a: Atom) -> bool:
    return isinstance(a, Lit) and not isinstance(a.value, bool) and a.value == 0
