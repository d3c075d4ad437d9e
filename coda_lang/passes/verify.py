"""What holds of every plan. In: a plan. Out: nothing, or ValueError that names the kernel and the broken rule. Non-goal: fixing."""

from __future__ import annotations

from ..ir.graph import Atom, Eqn, Var
from ..ir.kernels import Finish, Gemm, Plan, Reduce, Run
from ..ops import TABLE


def verify_plan(plan: Plan) -> None:
    """Scalars are defined once, before use; work tensors have a writer before a reader; outputs are written. Raises ValueError."""
    written: list[str] = [output for output, _ in plan.same] + [before.name for loop in plan.loops for before, _ in loop.carried]
    for part in plan.stages:
        unwritten = [t.name for t in part.program.inputs if t not in plan.program.inputs and t.name not in written]
        if unwritten:
            raise ValueError(f"{part.program.name}: {', '.join(unwritten)} is read before it is written")
        verify_plan(part)
        written += [o.tensor.name for o in part.program.outputs]
    for kernel in () if plan.stages else plan.kernels:
        if isinstance(kernel, Gemm):
            _gemm(kernel, written)
        else:
            _finish(kernel, plan, written)
    pieces = {(o.tensor.name) for o in plan.program.outputs}
    missing = pieces - set(written)
    if missing:
        raise ValueError(f"outputs never written: {', '.join(sorted(missing))}")


def _body(name: str, given: list[Var], eqns: tuple[Eqn, ...], wanted: list[Atom]) -> None:
    known: set[str] = set()
    for var in given:
        _define(name, var, known)
    for e in eqns:
        if e.op not in TABLE or TABLE[e.op].emit is None:
            raise ValueError(f"{name}: {e.op} cannot stand in a scalar body")
        for a in e.args:
            _use(name, a, known)
        if e.out.ty.axes:
            raise ValueError(f"{name}: {e.out.name} is no scalar")
        _define(name, e.out, known)
    for atom in wanted:
        _use(name, atom, known)


def _define(name: str, var: Var, known: set[str]) -> None:
    if var.name in known:
        raise ValueError(f"{name}: {var.name} is defined twice")
    known.add(var.name)


def _use(name: str, atom: Atom, known: set[str]) -> None:
    if isinstance(atom, Var) and atom.name not in known:
        raise ValueError(f"{name}: {atom.name} is used before it is defined")


def _gemm(kernel: Gemm, written: list[str]) -> None:
    given = [*kernel.accumulators, *(v for p in kernel.ports for v in p.vars)]
    for i, phase in enumerate(kernel.phases):
        last = i == len(kernel.phases) - 1
        if last and phase.statistics:
            raise ValueError(f"{kernel.name}: the last phase has statistics")
        wanted = [v for s in kernel.sinks for v in s.values] if last else [s.value for s in phase.statistics]
        _body(kernel.name, given, phase.eqns, wanted)
        given += [s.var for s in phase.statistics]
    for product in kernel.products:
        if len(product.b) != len(kernel.accumulators):
            raise ValueError(f"{kernel.name}: {len(product.b)} operands for {len(kernel.accumulators)} accumulators")
    for sink in kernel.sinks:
        run = getattr(sink, "run", None)
        if isinstance(run, Run) and run.axis not in kernel.cols:
            raise ValueError(f"{kernel.name}: a run along {run.axis}, which is no column axis")
        written.append(sink.work if isinstance(sink, Reduce) else sink.access.tensor)


def _finish(kernel: Finish, plan: Plan, written: list[str]) -> None:
    _body(
        kernel.name,
        [p.var for p in kernel.partials] + [v for p in kernel.ports for v in p.vars],
        kernel.eqns,
        [r.value for r in kernel.results],
    )
    inputs = {t.name for t in plan.program.inputs}
    for work in [p.work for p in kernel.partials] + [a.tensor for p in kernel.ports if (a := getattr(p, "access", None))]:
        if work not in written and work not in inputs:
            raise ValueError(f"{kernel.name}: {work} is read before it is written")
    for r in kernel.results:
        if r.tensor in written:
            raise ValueError(f"{kernel.name}: {r.tensor} is written twice")
        written.append(r.tensor)
