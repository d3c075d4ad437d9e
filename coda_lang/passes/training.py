"""A program with its derivative: forward, forward that saves, backward, each planned; and what is saved, what is computed again.

In: a checked program. Out: its `Plan` with `derived`. Forward and backward are cut as one program, so that a value is stored once for
both; what the forward's stages leave for the backward's are the residuals. Both forwards compute every output by the same equations.
Costs are seconds at nominal extents: bytes and FLOPs at the target's rates. Non-goals: derivative rules (`differentiate`), where a value
can be known (`place`), words for people (`training_report`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod

from .. import ops
from ..diagnostics.model import CodaError, Diagnostic, InternalError
from ..ir.graph import Atom, Eqn, Output, Program, Tensor, Var
from ..ir.kernels import Derived, Gemm, Plan
from .alike import alike
from .differentiate import Derivative, differentiate
from .laws import linear
from .several import MOST_ORDERS, only, with_nominal
from .simplify import live, simplify
from .stages import Stages, cut, named
from .state import State, definitions, nominal

BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.0e12, 7.0e14
ELEMENTWISE = ("map", "lanes", "move")


@dataclass(frozen=True)
class Joint:
    """Forward and backward of a program cut as one. `again`: products and values that the backward computes a second time."""

    forward: Program  # simplified, with the outputs of the program
    derivative: Derivative
    both: Program
    early: tuple[Program, ...]  # stages that outputs of the forward need
    late: tuple[Program, ...]
    same: tuple[tuple[str, str], ...]
    again: tuple[str, ...] = ()

    @property
    def residuals(self) -> tuple[Tensor, ...]:
        """What the forward's stages leave for the backward's besides the program's outputs."""
        outputs = {o.tensor.name for o in self.forward.outputs}
        made = {o.tensor.name: o.tensor for p in self.early for o in p.outputs}
        read = dict.fromkeys(t.name for p in self.late for t in p.inputs)
        return tuple(made[name] for name in read if name in made and name not in outputs)

    def seconds(self) -> float:
        """What one training step costs."""
        return sum(map(seconds, (*self.early, *self.late)))


def derive(plan: Plan, forward: Program) -> Plan:
    """The plan with its derivative. `forward` is the program as it was before it was cut.

    Raises CodaError C05xx where there is no derivative, C04xx where the backward has no kernels.
    """
    found = joint(forward)
    return planned(plan, found)


def differentiable(program: Program) -> bool:
    """Has the program a derivative at all?"""
    inputs = any(t.dtype.kind == "float" and not t.const for t in program.inputs)
    return not program.forward_only and inputs and any(o.tensor.dtype.kind == "float" for o in program.outputs)


# --- what to save ------------------------------------------------------------------------------------------------------


def joint(forward: Program, save: Iterable[str] | None = None, recompute: Iterable[str] | None = None) -> Joint:
    """The cheapest way to cut forward and backward, under what the program (or the caller) says about saving."""
    derivative = differentiate(forward)
    both = _both(forward, derivative)
    wanted = frozenset(forward.save if save is None else save)
    again = all_of(both, frozenset(forward.recompute if recompute is None else recompute), wanted)
    best = attempt(forward, derivative, both, wanted, again)
    while True:
        products = [t.name for t in best.residuals if t.name not in wanted and _is_product(both, t.name)]
        others = [attempt(forward, derivative, both, wanted, again | {name}) for name in products]
        better = min(others, key=Joint.seconds, default=best)
        if better.seconds() >= best.seconds():
            return best
        best, again = better, frozenset(better.again)


def all_of(program: Program, names: frozenset[str], kept: frozenset[str]) -> frozenset[str]:
    """`names`, and what those are made of element by element, as wide as themselves and not stored anyway: up to their products. Stored in
    their place, that would cost what they were not to."""
    stored, defs, found = {o.value.name for o in program.outputs} | kept, definitions(program), set(names)
    pending = [n for n in names if n in defs]
    while pending:
        e = defs[pending.pop()]
        for a in e.args if ops.TABLE[e.op].kind in ELEMENTWISE else ():
            wide = isinstance(a, Var) and a.name in defs and set(e.out.ty.axes) <= set(a.ty.axes)
            if wide and a.name not in stored | found:  # type: ignore[union-attr]
                found.add(a.name)  # type: ignore[union-attr]
                pending.append(a.name)  # type: ignore[union-attr]
    return frozenset(found)


def _both(forward: Program, derivative: Derivative) -> Program:
    """Forward and backward as one program, simplified, its sums split where they are known earlier so."""
    return _split(forward, derivative)[0]


def _split(forward: Program, derivative: Derivative) -> tuple[Program, tuple[str, ...]]:
    """The joint program, and the laws used on it, in words."""
    both = simplify(State(replace(derivative.program, outputs=(*forward.outputs, *derivative.program.outputs)))).program
    both, uses = linear.rewrite(both, {c for _, c in derivative.cotangents})
    return with_nominal(simplify(State(both)).program if uses else both), tuple(dict.fromkeys(map(str, uses)))


def attempt(forward: Program, derivative: Derivative, both: Program, save: frozenset[str], recompute: frozenset[str]) -> Joint:
    """One way: `save` is stored, `recompute` is not."""
    cotangents = frozenset(c for _, c in derivative.cotangents)
    program, clones = computed_again(both, cotangents, recompute)
    stages = cut(program, cotangents | clones, save & {e.out.name for e in both.eqns})
    early, late = _apart(stages, forward, derivative, program)
    return Joint(forward, derivative, program, early, late, stages.same, tuple(sorted(recompute)))


def computed_again(program: Program, late: frozenset[str], names: frozenset[str]) -> tuple[Program, frozenset[str]]:
    """The program whose late part has values of its own for `names` and what is element-wise of them; those values' names."""
    behind, defs = set(late), definitions(program)
    outputs = {o.value.name for o in program.outputs}
    pending = [n for n in names if _is_product(program, n)]
    while pending:  # a sum of products with all of them
        more = [a.name for a in defs[pending.pop()].args if isinstance(a, Var) and _is_product(program, a.name)]
        names, pending = names | set(more), pending + more
    chosen: dict[str, Eqn] = {}
    clones: dict[str, Var] = {}
    taken = {e.out.name for e in program.eqns} | {t.name for t in program.inputs}
    eqns: list[Eqn] = []
    for e in program.eqns:
        args = {a.name for a in e.args if isinstance(a, Var)}
        if args & behind:
            behind.add(e.out.name)
        elif e.out.name in names or args & set(chosen) and e.out.name not in outputs and ops.TABLE[e.op].kind in ELEMENTWISE:
            chosen[e.out.name] = e

    def clone(a: Atom) -> Atom:
        if not isinstance(a, Var) or a.name not in chosen:
            return a
        if a.name not in clones:
            e = chosen[a.name]
            args = tuple(map(clone, e.args))
            clones[a.name] = Var(next(n for n in (f"{a.name}_again{'_' * i}" for i in range(99)) if n not in taken), a.ty)
            eqns.append(replace(e, out=clones[a.name], args=args))
        return clones[a.name]

    for e in program.eqns:
        eqns.append(replace(e, args=tuple(map(clone, e.args))) if e.out.name in behind else e)
    made = live(replace(program, eqns=tuple(eqns)))
    return made, frozenset(v.name for v in clones.values())


def _apart(stages: Stages, forward: Program, derivative: Derivative, both: Program) -> tuple[tuple[Program, ...], tuple[Program, ...]]:
    """The stages that the forward's outputs need, and the others."""
    wanted = {o.tensor.name for o in forward.outputs}
    early: list[Program] = []
    late: list[Program] = []
    for p in reversed(stages.programs):
        if any(o.tensor.name in wanted for o in p.outputs):
            early.insert(0, p)
            wanted |= {t.name for t in p.inputs}
        else:
            late.insert(0, p)
    gradients = {g for _, g in derivative.gradients}
    misplaced = [o for p in early for o in p.outputs if o.tensor.name in gradients]  # gradients that no cotangent reaches
    early = [replace(p, outputs=tuple(o for o in p.outputs if o not in misplaced)) for p in early]
    extra = [only(both, [o for o in both.outputs if o.tensor == m.tensor]) for m in misplaced]
    return tuple(only(p, p.outputs) for p in early), (*extra, *late)


def _is_product(program: Program, name: str) -> bool:
    """Is the value a product, or a sum of products?"""
    e = definitions(program).get(name)
    if e is None or e.op not in (ops.CONTRACT.name, ops.ADD.name):
        return False
    return e.op == ops.CONTRACT.name or all(isinstance(a, Var) and _is_product(program, a.name) for a in e.args)


def seconds(stage: Program) -> float:
    """Memory traffic and multiplications of one stage, the slower of the two."""
    size = nominal(stage)
    tensors = [*stage.inputs, *(o.tensor for o in stage.outputs)]
    moved = sum(prod(size[a] for a in t.axes) * t.dtype.bits / 8 for t in tensors)
    return max(moved / BYTES_PER_SECOND, flops(stage) / FLOPS_PER_SECOND)


def flops(stage: Program) -> float:
    """Of its products."""
    size = nominal(stage)
    products = [e for e in stage.eqns if e.op == ops.CONTRACT.name]
    return sum(2.0 * prod(size[a] for a in (*e.out.ty.axes, *e.attr("axes"))) for e in products)  # type: ignore[misc]


def saved_by_autograd(forward: Program) -> tuple[Var, ...]:
    """The values that PyTorch's autograd keeps for the program written op by op: those that some derivative rule reads, inputs apart."""
    backward = differentiate(forward).program
    made = definitions(forward)
    new = [e for e in backward.eqns if e.out.name not in made]
    read = {a.name for e in new for a in e.args if isinstance(a, Var)}
    return tuple(e.out for e in forward.eqns if e.out.name in read)


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
    laws = _split(found.forward, found.derivative)[1]
    backward = replace(backward, notes=tuple(dict.fromkeys((*backward.notes, *laws))))
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
    return _tidy(replace(made, save=(), recompute=()))


def _backward(name: str, found: Joint, residuals: tuple[Tensor, ...]) -> Program:
    """The backward as one program, whose inputs are what it reads."""
    gradients = {g for _, g in found.derivative.gradients}
    outputs = tuple(o for o in found.both.outputs if o.tensor.name in gradients)
    eqns = tuple({e.out.name: e for p in found.late for e in p.eqns}.values())
    available = [*found.both.inputs, *(o.tensor for o in found.forward.outputs), *residuals]
    read = {t.name for p in found.late for t in p.inputs} | {o.value.name for o in outputs}
    last = [c for _, c in found.derivative.cotangents]
    inputs = sorted((t for t in available if t.name in read), key=lambda t: t.name in last)
    made = replace(found.both, name=f"{name}_backward", inputs=tuple(inputs), outputs=outputs, eqns=eqns, save=(), recompute=(), doc="")
    values = {o.tensor.name: o.value for p in found.late for o in p.outputs}

    def value(a: Atom) -> Atom:
        return values.get(a.name, a) if isinstance(a, Var) else a

    made = replace(made, eqns=tuple(replace(e, args=tuple(map(value, e.args))) for e in eqns))
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
    return replace(program, axes=axes, nominal=sizes)


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


# --- other ways to save ------------------------------------------------------------------------------------------------

MOST_WAYS = 12


def ways(forward: Program) -> tuple[tuple[str, Joint], ...]:
    """Save plans to be tested, by name: the chosen one, then each residual product computed again, then each value that autograd keeps
    saved, all of them, and none that can be computed again."""
    chosen = joint(forward)
    derivative, both = chosen.derivative, _both(forward, chosen.derivative)
    products = [t.name for t in chosen.residuals if _is_product(both, t.name)]
    kept = [v.name for v in saved_by_autograd(forward) if v.name in definitions(both)]
    told: list[tuple[str, list[str], list[str]]] = [(f"recompute {name}", [], [name]) for name in products]
    told += [(f"save {name}", [name], []) for name in kept]
    told += [("save all", kept, []), ("recompute all", [], [t.name for t in chosen.residuals])]
    found = [("as planned", chosen)]
    for what, save, again in told[:MOST_WAYS]:
        found.append((what, attempt(forward, derivative, both, frozenset(save), frozenset(again))))
    return tuple(found)
