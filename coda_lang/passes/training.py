"""A program with its derivative: forward, forward that saves, backward, each planned.

In: a checked program. Out: its `Plan` with `derived`. Forward and backward are cut as one program (`saving`), so that a value is stored
once for both; what the forward's stages leave for the backward's are the residuals. Both forwards compute every output by the same
equations. Non-goals: derivative rules (`differentiate`), what is saved (`saving`), words for people (`training_report`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations

from ..diagnostics.model import CodaError, Diagnostic, InternalError
from ..ir.graph import Atom, Eqn, Output, Program, Tensor, Var
from ..ir.kernels import Derived, Gemm, Plan
from .alike import alike
from .saving import Joint, joint, plain
from .several import MOST_ORDERS, only
from .simplify import live
from .stages import Stages, named
from .state import definitions


def derive(plan: Plan, forward: Program, strict: bool = False) -> Plan:
    """The plan with its derivative. `forward` is the program as it was before it was cut; `strict` forbids laws that move a rounding.

    Raises CodaError C05xx where there is no derivative, C04xx where the backward has no kernels.
    """
    try:
        return planned(plan, joint(forward, strict=strict))
    except CodaError:
        return planned(plan, plain(forward, strict))  # what the costs chose has no kernels; else the refusal is that of the plain way


def derivable(plan: Plan, forward: Program, strict: bool = False) -> Plan:
    """The same, in the first way that has kernels, not the cheapest: enough to know that there is one. Raises CodaError as `derive`."""
    try:
        return planned(plan, plain(forward, strict))
    except CodaError as problem:
        try:
            return planned(plan, joint(forward, strict=strict))
        except CodaError:
            raise problem from None


def differentiable(program: Program) -> bool:
    """Has the program a derivative at all?"""
    inputs = any(t.dtype.kind == "float" and not t.const for t in program.inputs)
    return not program.forward_only and inputs and any(o.tensor.dtype.kind == "float" for o in program.outputs)


# --- plans -------------------------------------------------------------------------------------------------------------


def planned(plan: Plan, found: Joint) -> Plan:
    """Both forwards and the backward as kernels. The forward's plan gives way to that of the saving one where their equations differ."""
    from . import run_stages  # the pipeline

    name, residuals = plan.program.name, found.residuals
    early, late = _same(found, forward=True), _same(found, forward=False)
    best: tuple[bool, int, Plan, Plan, tuple[Tensor, ...]] | None = None
    for stored in _orders(residuals):
        saving = _saving_plan(plan, found, stored, early)
        backward = run_stages(_backward(name, found, stored), Stages(_stored(found.late, stored), late))
        copies = len({x.tensor for p in (saving, backward) for x in p.layouts if x.copy} & {t.name for t in residuals})
        differs = bool(residuals) and not alike(plan, saving)
        if best is None or (differs, copies) < best[:2]:
            best = differs, copies, saving, backward, stored
        if not copies and not differs:
            break
    assert best is not None
    differs, _, saving, backward, stored = best
    if differs:
        saving = run_stages(_saving(plan.program, found, stored), Stages(_stored(found.early, stored), early))
        staged = run_stages(plan.program, Stages(_without(found.early, residuals, plan.program), early), _rows(saving))
        plan = replace(staged, written=plan.written, notes=tuple(dict.fromkeys((*plan.notes, *staged.notes))))
        if not alike(plan, saving):  # then every call runs the kernels that save; what only the backward reads is a tensor between them
            plan = replace(saving, program=plan.program, stages=saving.parts, written=plan.written, notes=plan.notes)
            if not alike(plan, saving):
                raise InternalError(f"{name}: the forward that saves differs from the one that does not")
            if {x.tensor for x in plan.layouts if x.copy} & {t.name for t in residuals}:
                raise CodaError([_no_order(plan.program)])
    pairs = found.derivative.cotangents, found.derivative.gradients
    backward = replace(backward, notes=tuple(dict.fromkeys((*backward.notes, *map(str, found.uses)))))
    return replace(plan, derived=Derived(saving if residuals else None, backward, stored, *pairs))


def _no_order(program: Program) -> Diagnostic:
    return Diagnostic(
        "C0602",
        f"`{program.name}` saves a value for its derivative that is used in ways that no single storage order serves",
        program.span,
        "this program",
        notes=("with gradients and without, a program runs the same kernels, and between those nothing is rearranged",),
        help="compute the results that reduce it over different axes in programs of their own",
    )


def _saving_plan(plan: Plan, found: Joint, stored: tuple[Tensor, ...], same: tuple[tuple[str, str], ...]) -> Plan:
    """The forward with residuals: the same kernels with more stores if they can be had, else the stages of the joint cut."""
    from . import run, run_stages

    program = _saving(plan.program, found, stored)
    if len(plan.parts) == 1 and stored:
        try:
            saving = run(program, _rows(plan))
        except CodaError:
            saving = None
        if saving is not None and alike(plan, saving):
            return saving
    return run_stages(program, Stages(_stored(found.early, stored), same), _rows(plan))


def _rows(plan: Plan) -> tuple[tuple[str, frozenset[str]], ...]:
    """The rows of the kernel behind each output."""
    parts = [(p, next((k for k in p.kernels if isinstance(k, Gemm)), None)) for p in plan.parts]
    return tuple((o.tensor.name, frozenset(k.rows)) for p, k in parts if k is not None for o in p.program.outputs)


def _orders(residuals: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, ...]]:
    """The residuals in storage orders: as they are, then each one in its other orders."""
    yield residuals
    for i, t in enumerate(residuals):
        for axes in list(permutations(t.axes))[1:MOST_ORDERS]:
            yield (*residuals[:i], replace(t, axes=axes), *residuals[i + 1 :])


def _saving(program: Program, found: Joint, residuals: tuple[Tensor, ...]) -> Program:
    """The program with its residuals as further outputs."""
    wanted = {t.name: t for t in residuals}
    values = {o.tensor.name: o.value for p in found.early for o in p.outputs if o.tensor.name in wanted}
    outputs = (*found.forward.outputs, *(Output(t, values[t.name]) for t in residuals))
    eqns = {e.out.name: e for p in found.early for e in p.eqns}
    held = {e.out.name: e for e in found.both.eqns}
    made = live(replace(found.both, name=f"{program.name}_saving", inputs=program.inputs, outputs=outputs, eqns=tuple(held.values())))
    assert set(values) <= set(eqns) | {t.name for t in program.inputs}
    return _tidy(replace(made, save=(), recompute=(), distribute=()))


def _backward(name: str, found: Joint, residuals: tuple[Tensor, ...]) -> Program:
    """The backward as one program, whose inputs are what it reads."""
    gradients = {g for _, g in found.derivative.gradients}
    outputs = tuple(o for o in found.both.outputs if o.tensor.name in gradients)
    eqns = tuple({e.out.name: e for p in found.late for e in p.eqns}.values())
    available = [*found.both.inputs, *(o.tensor for o in found.forward.outputs), *residuals]
    read = {t.name for p in found.late for t in p.inputs} | {o.value.name for o in outputs}
    last = [c for _, c in found.derivative.cotangents]
    inputs = sorted((t for t in available if t.name in read), key=lambda t: t.name in last)
    made = replace(found.both, name=f"{name}_backward", inputs=tuple(inputs), outputs=outputs, eqns=eqns, doc="")
    made = replace(made, save=(), recompute=(), distribute=())
    values = {o.tensor.name: o.value for p in found.late for o in p.outputs}

    def value(a: Atom) -> Atom:
        return values.get(a.name, a) if isinstance(a, Var) else a

    made = replace(made, eqns=tuple(e.reading(tuple(map(value, e.args))) for e in eqns))
    return _tidy(live(_in_order(made)))


def _in_order(program: Program) -> Program:
    """The same equations, each after those it needs."""
    defs, done = definitions(program), dict[str, Eqn]()
    for e in program.eqns:
        pending = [e.out.name]
        while pending:
            name = pending[-1]
            missing = [a.name for a in defs[name].args if isinstance(a, Var) and a.name in defs and a.name not in done]
            if missing:
                pending += missing
            else:
                done[name] = defs[name]
                pending.pop()
    return replace(program, eqns=tuple(done.values()))


def _tidy(program: Program) -> Program:
    """Without axes that nothing has."""
    used = {a for t in (*program.inputs, *(o.tensor for o in program.outputs)) for a in t.axes}
    used |= {a for e in program.eqns for a in (*e.out.ty.axes, *named(e))}
    axes, sizes = tuple(a for a in program.axes if a.name in used), tuple(n for n in program.nominal if n[0] in used)
    return replace(program, axes=axes, nominal=sizes, chunk=tuple(c for c in program.chunk if c[0] in used))


def _same(found: Joint, forward: bool) -> tuple[tuple[str, str], ...]:
    """Outputs that are an input as it is: of the forward, or of the backward."""
    gradients = {g for _, g in found.derivative.gradients}
    return tuple(pair for pair in found.same if (pair[0] not in gradients) == forward)


def _stored(programs: Iterable[Program], tensors: Iterable[Tensor]) -> tuple[Program, ...]:
    """The stages with these tensors stored so."""
    known = {t.name: t for t in tensors}
    made = []
    for p in programs:
        inputs = tuple(known.get(t.name, t) for t in p.inputs)
        made.append(replace(p, inputs=inputs, outputs=tuple(replace(o, tensor=known.get(o.tensor.name, o.tensor)) for o in p.outputs)))
    return tuple(made)


def _without(early: tuple[Program, ...], residuals: Iterable[Tensor], program: Program) -> tuple[Program, ...]:
    """The forward's stages, storing only what outputs need."""
    own = {o.tensor.name for o in program.outputs} | {t.name for p in early for t in p.inputs}
    kept = [[o for o in p.outputs if o.tensor.name in own] for p in early]
    return tuple(only(p, outputs) for p, outputs in zip(early, kept) if outputs)


def refused(program: Program, problem: CodaError) -> CodaError:
    """A refusal of the derivative, said as such."""
    help = f"write `forward program {program.name}` if no gradient is needed"
    return CodaError([replace(d, notes=(*d.notes, f"in the derivative of `{program.name}`: {help}")) for d in problem.diagnostics])
