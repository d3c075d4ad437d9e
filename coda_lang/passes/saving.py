"""What is saved between forward and backward and what is computed again: both cut as one program, in the cheapest way found.

In: a program as it is before it is cut. Out: `Joint`, the stages of both and what the one leaves for the other. Choices: the laws of
derivatives (`laws.OF_DERIVATIVES`), which values the backward computes a second time, and what the program says about saving, which
overrules. Costs are seconds at nominal extents, from bytes and FLOPs at the target's rates. Non-goals: kernels (`training`), where a value
can be known (`place`), words for people (`training_report`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from .. import ops
from ..ir.graph import Atom, Eqn, Program, Tensor, Var
from .differentiate import Derivative, differentiate
from .laws import OF_DERIVATIVES, AnyLaw, DerivativeLaw, Use, centred_products, linear
from .laws.euler import EULER
from .laws.narrow import LAW as NARROW
from .several import only, with_nominal
from .simplify import live, simplify
from .stages import Stages, cut
from .state import State, definitions, nominal

BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.0e12, 7.0e14
ELEMENTWISE = ("map", "lanes", "move")


@dataclass(frozen=True)
class Pair:
    """A forward and its derivative as one program, simplified, its sums split where they are known earlier so."""

    derivative: Derivative
    program: Program
    splits: tuple[Use, ...]  # of the law of sums

    @property
    def forward(self) -> Program:
        """Simplified, with the outputs of the program."""
        return self.derivative.forward


@dataclass(frozen=True)
class Joint:
    """Forward and backward of a program cut as one. `again`: products and values that the backward computes a second time."""

    pair: Pair
    both: Program  # the pair's program, in which what is computed again stands twice
    early: tuple[Program, ...]  # stages that outputs of the forward need
    late: tuple[Program, ...]
    same: tuple[tuple[str, str], ...]
    again: tuple[str, ...] = ()
    uses: tuple[Use, ...] = ()  # of laws of derivatives

    @property
    def forward(self) -> Program:
        """Simplified, with the outputs of the program."""
        return self.pair.forward

    @property
    def derivative(self) -> Derivative:
        """Of the forward, as the laws left it."""
        return self.pair.derivative

    @property
    def residuals(self) -> tuple[Tensor, ...]:
        """What the forward's stages leave for the backward's besides the program's outputs."""
        outputs = {o.tensor.name for o in self.forward.outputs}
        made = {o.tensor.name: o.tensor for p in self.early for o in p.outputs}
        read = dict.fromkeys(t.name for p in self.late for t in p.inputs)
        return tuple(made[name] for name in read if name in made and name not in outputs)

    @property
    def bytes(self) -> float:
        """Of the residuals, at nominal extents."""
        size = nominal(self.both)
        return sum(prod(size[a] for a in t.axes) * t.dtype.bits / 8 for t in self.residuals)

    def seconds(self) -> float:
        """What one training step costs; what is held between forward and backward counts as one pass over it, for the memory it takes."""
        return sum(map(seconds, (*self.early, *self.late))) + self.bytes / BYTES_PER_SECOND


# --- what to save ------------------------------------------------------------------------------------------------------


def joint(forward: Program, save: Iterable[str] | None = None, recompute: Iterable[str] | None = None, strict: bool = False) -> Joint:
    """The cheapest way to cut forward and backward, under what the program (or the caller) says about saving."""
    start, wanted = paired(_derivative(forward, strict)), frozenset(forward.save if save is None else save)
    again = all_of(start.program, frozenset(forward.recompute if recompute is None else recompute), wanted)
    best = _in_chunks(_lawful(start, wanted, again, strict), wanted)
    pair, tried = best.pair, set(wanted)
    defs = definitions(pair.program)
    while names := [t.name for t in best.residuals if t.name not in tried and _again(defs, t.name)]:
        for name in names:
            other = attempt(pair, wanted, frozenset((*best.again, name)))
            best = replace(other, uses=best.uses) if other.seconds() < best.seconds() else best
        tried |= set(names)
    return replace(best, uses=(*best.uses, *pair.splits))


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


def plain(forward: Program, strict: bool = False) -> Joint:
    """The way without laws of derivatives, where nothing is computed again but as the program says."""
    pair, wanted = paired(_derivative(forward, strict)), frozenset(forward.save)
    return _in_chunks(attempt(pair, wanted, all_of(pair.program, frozenset(forward.recompute), wanted)), wanted)


def _derivative(forward: Program, strict: bool) -> Derivative:
    """The derivative; of products that were taken apart, one that cancels as well as they do."""
    return differentiate(forward) if strict else centred_products.settled(differentiate(forward))


def _in_chunks(found: Joint, save: frozenset[str]) -> Joint:
    """The same without residuals that `chunk` says should exist for one chunk only: those are computed again."""
    axes, pair = {axis for axis, _ in found.forward.chunk}, found.pair
    while wide := {t.name for t in found.residuals if len(t.axes) > 1 and axes & set(t.axes)} - save - set(found.again):
        again = frozenset(found.again) | all_of(pair.program, frozenset(wide), save)
        found = replace(attempt(pair, save, again), uses=found.uses)
    return found


Choice = Mapping[str, AnyLaw]  # at which places which law is used


def _lawful(start: Pair, save: frozenset[str], again: frozenset[str], strict: bool) -> Joint:
    """The cheapest use of the laws of derivatives, of those that say something of the same place one. First each kind everywhere, then
    place by place another one, then without each use that gains nothing."""
    laws = tuple(law for law in OF_DERIVATIVES if not (strict and law.strict_forbids))
    known: dict[tuple[tuple[str, str], ...], Joint] = {}  # by the uses: several choices come to the same ones

    def tried(choice: Choice) -> Joint:
        derivative, uses = _rewritten(start.derivative, laws, choice)
        key = tuple((u.law.name, u.place) for u in uses)
        if key not in known:
            known[key] = replace(attempt(paired(derivative) if uses else start, save, again), uses=uses)
        return known[key]

    sums = {law: {u.place: law for u in law.rewrite(start.derivative, None)[1]} for law in laws if law is not NARROW}
    ways: list[Choice] = [{}, *({**sums.get(EULER, {}), **places} for places in sums.values())]
    best = tried({})
    if NARROW in laws:
        ways = [{**way, **_narrowed(start.derivative, laws, way)} for way in ways]
    for way in ways:
        other = tried(way)
        best = other if other.seconds() < best.seconds() else best
    for place, law in [(place, law) for law, places in sums.items() for place in places]:
        choice = {**{u.place: u.law for u in best.uses}, place: law}
        if not best.uses or choice == {u.place: u.law for u in best.uses}:
            continue
        if NARROW in laws:
            choice |= _narrowed(start.derivative, laws, choice)
        other = tried(choice)
        best = other if other.seconds() < best.seconds() else best
    for use in best.uses:
        other = tried({u.place: u.law for u in best.uses if u is not use})
        best = other if len(other.uses) < len(best.uses) and other.seconds() <= best.seconds() else best
    return best


def _rewritten(derivative: Derivative, laws: Iterable[DerivativeLaw], choice: Choice) -> tuple[Derivative, tuple[Use, ...]]:
    """The derivative with each law used where it is chosen, in order."""
    uses: list[Use] = []
    for law in laws:
        if places := frozenset(place for place, chosen in choice.items() if chosen is law):
            derivative, more = law.rewrite(derivative, places)
            uses += more
    return derivative, tuple(uses)


def _narrowed(start: Derivative, laws: tuple[DerivativeLaw, ...], choice: Choice) -> Choice:
    """Where values could be read rounded, after the other laws."""
    derivative, _ = _rewritten(start, laws[: laws.index(NARROW)], choice)
    return {u.place: NARROW for u in NARROW.rewrite(derivative, None)[1]}


def paired(derivative: Derivative) -> Pair:
    """The joint program of a derivative and its forward."""
    program = replace(derivative.program, outputs=(*derivative.forward.outputs, *derivative.program.outputs))
    program, splits = linear.rewrite(simplify(State(program)).program, {c for _, c in derivative.cotangents})
    return Pair(derivative, with_nominal(simplify(State(program)).program if splits else program), splits)


def attempt(pair: Pair, save: frozenset[str], recompute: frozenset[str]) -> Joint:
    """One way: `save` is stored, `recompute` is not."""
    cotangents = frozenset(c for _, c in pair.derivative.cotangents)
    program, clones = computed_again(pair.program, cotangents, recompute)
    stages = cut(program, cotangents | clones, save & {e.out.name for e in pair.program.eqns})
    early, late = _apart(stages, pair, program)
    return Joint(pair, program, early, late, stages.same, tuple(sorted(recompute)))


def computed_again(program: Program, late: frozenset[str], names: frozenset[str]) -> tuple[Program, frozenset[str]]:
    """The program whose late part has values of its own for `names` and what is element-wise of them; those values' names."""
    behind, defs = set(late), definitions(program)
    outputs = {o.value.name for o in program.outputs}
    pending = [n for n in names if _is_product(defs, n)]
    while pending:  # a sum of products with all of them
        more = [a.name for a in defs[pending.pop()].args if isinstance(a, Var) and _is_product(defs, a.name)]
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
        eqns.append(e.reading(tuple(map(clone, e.args))) if e.out.name in behind else e)
    made = live(replace(program, eqns=tuple(eqns)))
    return made, frozenset(v.name for v in clones.values())


def _apart(stages: Stages, pair: Pair, both: Program) -> tuple[tuple[Program, ...], tuple[Program, ...]]:
    """The stages that the forward's outputs need, and the others."""
    wanted = {o.tensor.name for o in pair.forward.outputs}
    early: list[Program] = []
    late: list[Program] = []
    for p in reversed(stages.programs):
        if any(o.tensor.name in wanted for o in p.outputs):
            early.insert(0, p)
            wanted |= {t.name for t in p.inputs}
        else:
            late.insert(0, p)
    gradients = {g for _, g in pair.derivative.gradients}
    misplaced = [o for p in early for o in p.outputs if o.tensor.name in gradients]  # gradients that no cotangent reaches
    early = [replace(p, outputs=tuple(o for o in p.outputs if o not in misplaced)) for p in early]
    extra = [only(both, [o for o in both.outputs if o.tensor == m.tensor]) for m in misplaced]
    return tuple(only(p, p.outputs) for p in early), (*extra, *late)


def _again(defs: Mapping[str, Eqn], name: str) -> bool:
    """May the backward compute it a second time? A reduction never: that would be a pass over memory."""
    e = defs.get(name)
    return e is not None and (_is_product(defs, name) or ops.TABLE[e.op].kind in ELEMENTWISE)


def _is_product(defs: Mapping[str, Eqn], name: str) -> bool:
    """Is the value a product, or a sum of products?"""
    e = defs.get(name)
    if e is None or e.op not in (ops.CONTRACT.name, ops.ADD.name):
        return False
    return e.op == ops.CONTRACT.name or all(isinstance(a, Var) and _is_product(defs, a.name) for a in e.args)


def seconds(stage: Program) -> float:
    """Memory traffic and multiplications of one stage: the slower of the two, and an eighth of the other, which hides behind it."""
    size = nominal(stage)
    tensors = [*stage.inputs, *(o.tensor for o in stage.outputs)]
    moved = sum(prod(size[a] for a in t.axes) * t.dtype.bits / 8 for t in tensors)
    fast, slow = sorted((moved / BYTES_PER_SECOND, flops(stage) / FLOPS_PER_SECOND))
    return slow + fast / 8


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


# --- other ways to save ------------------------------------------------------------------------------------------------

PLANNED = "as planned"  # the name of the way that is taken
MOST_WAYS = 12


def ways(forward: Program, strict: bool = False) -> tuple[tuple[str, Joint], ...]:
    """Save plans to be tested, by name: the chosen one, the one without laws of derivatives, then each residual product computed again,
    then each value that autograd keeps saved, all of them, and none that can be computed again."""
    chosen = joint(forward, strict=strict)
    defs = definitions(chosen.pair.program)
    products = [t.name for t in chosen.residuals if _is_product(defs, t.name)]
    kept = [v.name for v in saved_by_autograd(forward) if v.name in defs]
    told: list[tuple[str, list[str], list[str]]] = [(f"recompute {name}", [], [name]) for name in products]
    told += [(f"save {name}", [name], []) for name in kept]
    told += [("save all", kept, []), ("recompute all", [], [t.name for t in chosen.residuals])]
    found = [(PLANNED, chosen)]
    if any(u.law in OF_DERIVATIVES for u in chosen.uses):
        found.append(("no laws", plain(forward, strict)))
    for what, save, again in told[:MOST_WAYS]:
        found.append((what, attempt(chosen.pair, frozenset(save), frozenset(again))))
    return tuple(found)
