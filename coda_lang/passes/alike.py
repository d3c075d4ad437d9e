"""Do two plans compute their common outputs by the same equations, kernel for kernel? Then they give the same bits.

In: two plans. Out: yes or no. Every value gets a number that stands for the expression it is, down to inputs, products with their geometry,
and the kernels' partial reductions. Non-goals: tile configurations, which the launcher must choose alike.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..ir.graph import Atom, Var
from ..ir.kernels import Access, Finish, Gemm, Operand, Plan, Point, Position, Read, Reduce, Store


def alike(first: Plan, second: Plan) -> bool:
    """Are the outputs of `first` the same in `second`?"""
    known: dict[Hashable, int] = {}
    one, two = _Numbers(known).tensors(first), _Numbers(known).tensors(second)
    return all(one[o.tensor.name] == two.get(o.tensor.name) for o in first.program.outputs)


class _Numbers:
    """The numbers of one plan's tensors; `known` is shared by plans that are compared."""

    def __init__(self, known: dict[Hashable, int]) -> None:
        self.known = known
        self.held: dict[str, Any] = {}

    def number(self, *key: Hashable) -> int:
        return self.known.setdefault(key, len(self.known))

    def tensors(self, plan: Plan) -> dict[str, Any]:
        """The expression of every tensor that the plan writes or reads."""
        self.held = {t.name: self.number("input", t.name) for t in plan.program.inputs}
        self.held |= {output: self.held[given] for output, given in plan.same}
        self.held |= {before.name: self.number("sum so far", loop.axis, loop.size) for loop in plan.loops for before, _ in loop.carried}
        for part in plan.parts:
            for kernel in part.launched:
                before = dict(self.held)
                written = self.gemm(kernel) if isinstance(kernel, Gemm) else self.finish(kernel)
                for name, pieces in written.items():
                    self.held[name] = self.number("written", before.get(name), *pieces)
        return self.held

    def access(self, x: Access) -> Hashable:
        return (self.held[x.tensor], tuple((a, str(at)) for a, at in sorted(x.at, key=lambda i: i[0])), x.packed)

    def operand(self, o: Operand) -> Hashable:
        return (self.held[o.tensor], tuple(sorted(o.outer)), tuple(sorted(o.inner)), o.at)

    def ports(self, kernel: Gemm | Finish, values: dict[str, int]) -> None:
        for port in kernel.ports:
            if isinstance(port, Read):
                for i, v in enumerate(port.vars):
                    at = self.access(port.access)
                    values[v.name] = self.number("read", at, i)
            else:
                values[port.vars[0].name] = self.number("position" if isinstance(port, Position) else "size", str(port).split(" = ")[1])

    def body(self, eqns: tuple, values: dict[str, int]) -> None:
        for e in eqns:
            values[e.out.name] = self.number(e.op, e.attrs, *(self.atom(a, values) for a in e.args))

    def atom(self, a: Atom, values: dict[str, int]) -> Hashable:
        return values[a.name] if isinstance(a, Var) else (repr(a.value), a.dtype.name)

    def gemm(self, g: Gemm) -> dict[str, list[Hashable]]:
        """What the sinks write."""
        values: dict[str, int] = {}
        for i, acc in enumerate(g.accumulators):
            terms = tuple((self.operand(p.a), self.operand(p.b[i]), tuple(sorted(p.over))) for p in g.products)
            values[acc.name] = self.number("product", tuple(sorted(g.rows)), tuple(sorted(g.cols)), terms)
        self.ports(g, values)
        for phase in g.phases:
            self.body(phase.eqns, values)
            for s in phase.statistics:
                values[s.var.name] = self.number("statistic", s.kind, s.over, self.atom(s.value, values))
        written: dict[str, list[Hashable]] = {}
        for sink in g.sinks:
            found = tuple(self.atom(v, values) for v in sink.values)
            if isinstance(sink, Reduce):
                # Positions are reduced in the order in which the kernel walks them: outermost axis first.
                written[sink.work] = [("partial", sink.kind, sink.kept, found, str(sink.run), g.rows, g.cols)]
            elif isinstance(sink, (Store, Point)):
                at = tuple((a, str(x)) for a, x in sorted(sink.access.at, key=lambda i: i[0]))
                written.setdefault(sink.access.tensor, []).append(("element", at, sink.access.packed, found, sink.dtype))
        return written

    def finish(self, f: Finish) -> dict[str, list[Hashable]]:
        """What the results are."""
        values = {p.var.name: self.number("reduced", p.kind, self.held[p.work]) for p in f.partials}
        self.ports(f, values)
        self.body(f.eqns, values)
        return {r.tensor: [("result", f.over, tuple(sorted(f.axes)), self.atom(r.value, values), r.dtype)] for r in f.results}
