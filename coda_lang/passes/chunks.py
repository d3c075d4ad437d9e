"""Loops over stages: chunks of rows or columns, where the program asks for them, and batches of products.

In: the stages of a program, an axis and a size (`chunk v by 4096`). Out: stages and the `Loop` over those of them that run once a chunk, or
None where no temporary carries the axis. A temporary that carries it, with another axis, then exists for one chunk. Tensors of the program
and vectors along the axis stay whole; the loop's kernels see the chunk's part of them. What sums over the axis (a weight's gradient) adds
to an f32 tensor that starts as zeros; the stage after the loop goes on from the whole sum, so it is rounded once. `index` and `size` keep
their meaning: within the loop they are made of a chunk's start and of the whole extent. Raises CodaError C0415 where a kernel of the loop
needs what is only known after it. Non-goals: launching (`backend_cute`), and what of a forward its backward computes again (`training`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .. import ops
from ..diagnostics.model import CodaError, Diagnostic
from ..ir.graph import Eqn, Output, Program, Tensor, Var
from ..ir.kernels import Loop
from ..ir.types import F32, Axis
from ..ops.builder import EqnBuilder
from .batches import batch_axis, batched, position
from .several import fitting, only
from .state import State, definitions, listed, nominal, say

SUMS = (ops.CONTRACT.name, ops.SUM.name)


def chunks(state: State) -> State:
    """The pass: a loop over chunks, where the program asks for it and has stages that hand on something large."""
    if any(batched(s.program) for s in state.stages):
        return _batches(state)
    if not state.program.chunk or not state.stages:
        return state
    (axis, size), *_ = state.program.chunk
    stages = [s.program for s in state.stages]
    parts = local(stages, axis, frozenset(o.tensor.name for o in state.program.outputs))
    if not parts:
        return state
    made, loop = _looped(state, _Chunks(stages, axis, size, parts))
    return replace(state, stages=tuple(State(p, rows=state.rows) for p in made), loops=(loop,))


def _looped(state: State, found: _Chunks) -> tuple[list[Program], Loop]:
    """The stages before, in and after a loop, with names, and the loop."""
    before, inside, after = ([q for p in programs for q in fitting(p)] for programs in found.apart())
    inside = [position(p) for p in inside]
    made = [replace(p, name=f"{state.program.name}_{p.outputs[0].tensor.name}") for p in (*before, *inside, *after)]
    names = tuple(p.name for p in made[len(before) : len(before) + len(inside)])
    return made, Loop(found.axis, found.size, names, found.parts, tuple(found.carried), found.start, found.whole)


def _batches(state: State) -> State:
    """A loop for each stage with a batched product, one position at a time."""
    if state.program.chunk:
        first = next(p for s in state.stages if (p := batched(s.program)))
        message = f"this program has batched products, and chunks of `{state.program.chunk[0][0]}`"
        problem = Diagnostic("C0404", message, first.span, "a batched product", help="leave the chunks out, or make two programs")
        raise CodaError([problem])
    stages: list[Program] = []
    loops: list[Loop] = []
    for s in state.stages:
        if batched(s.program) is None:
            stages.append(s.program)
            continue
        made, loop = _looped(state, _Chunks([s.program], batch_axis(s.program), 1, (), frozenset({0}), _names(state)))
        stages += made
        loops.append(loop)
    return replace(state, stages=tuple(State(p, rows=state.rows) for p in stages), loops=tuple(loops))


def _names(state: State) -> set[str]:
    """Every tensor, value and axis of the stages."""
    programs = [s.program for s in state.stages]
    named = {t.name for p in programs for t in _tensors(p)} | {e.out.name for p in programs for e in p.eqns}
    return named | {a.name for p in programs for a in p.axes}


def local(stages: Iterable[Program], axis: str, kept: frozenset[str]) -> tuple[str, ...]:
    """The tensors that need not be whole: temporaries (not in `kept`) along the axis and another one."""
    made = (o.tensor for p in stages for o in p.outputs)
    return tuple(dict.fromkeys(t.name for t in made if t.name not in kept and axis in t.axes and len(t.axes) > 1))


class _Chunks:
    def __init__(
        self,
        stages: Sequence[Program],
        axis: str,
        size: int,
        parts: tuple[str, ...],
        inside: frozenset[int] | None = None,
        taken: Iterable[str] = (),
    ) -> None:
        self.stages, self.axis, self.size, self.parts, self.inside = stages, axis, size, parts, inside
        names = {a.name for p in stages for a in p.axes}
        self.start, self.whole = (_unused(f"{axis}_{what}", names) for what in ("start", "whole"))
        self.taken = {t.name for p in stages for t in _tensors(p)} | {e.out.name for p in stages for e in p.eqns} | set(taken)
        self.writer = {o.tensor.name: i for i, p in enumerate(stages) for o in p.outputs}
        self.carried: list[tuple[Tensor, str]] = []

    def apart(self) -> tuple[list[Program], list[Program], list[Program]]:
        """Stages before the loop, in it and after it, each in their order."""
        inside = self._inside() if self.inside is None else self.inside
        before, loop, after = list[Program](), list[Program](), list[Program]()
        late: dict[str, Eqn] = {}  # tensors that are known after the loop, and why
        behind = self._descendants(inside)
        for i, p in enumerate(self.stages):
            if i not in inside:
                (after if i in behind else before).append(p)
                continue
            same = [o for o in p.outputs if self._invariant(p, o)]  # for every chunk: made once
            before += [only(p, same)] if same else []
            early, rest = self._apart(only(p, [o for o in p.outputs if o not in same]), late)
            loop += [early] if early.outputs else []
            after += [rest] if rest else []
        return before, loop, after

    def _inside(self) -> frozenset[int]:
        """The stages of the loop: those that touch a part, and what stands between them."""
        inside = {i for i, p in enumerate(self.stages) if any(t.name in self.parts for t in _tensors(p))}
        needed, behind = self._ancestors(inside), self._descendants(inside)
        return frozenset(inside | (needed & behind))

    def _invariant(self, p: Program, o: Output) -> bool:
        """Has no value behind an output the axis?"""
        needed = only(p, [o])
        values = [e.out for e in needed.eqns] + [a for e in needed.eqns for a in e.args if isinstance(a, Var)]
        return self.axis not in o.tensor.axes and not any(self.axis in v.ty.axes for v in values)

    def _ancestors(self, of: Iterable[int]) -> set[int]:
        found: set[int] = set()
        for i in sorted(of, reverse=True):
            pending = [i]
            while pending:
                reads = {self.writer[t.name] for t in self.stages[pending.pop()].inputs if t.name in self.writer} - found
                found |= reads
                pending += reads
        return found

    def _descendants(self, of: Iterable[int]) -> set[int]:
        found = set(of)
        for i, p in enumerate(self.stages):
            if any(self.writer.get(t.name) in found for t in p.inputs):
                found.add(i)
        return found - set(of)

    # --- one stage ---------------------------------------------------------------------------------------------------------

    def _apart(self, p: Program, late: dict[str, Eqn]) -> tuple[Program, Program | None]:
        """The part of a stage that runs once a chunk, and the part that goes on from whole sums. Adds to `late` and `carried`."""
        p = self._means(p)
        sums = {e.out.name: e for e in p.eqns if self._over(e)}
        cause = {t.name: late[t.name] for t in p.inputs if t.name in late} | sums  # of what waits for the end of the loop
        for e in p.eqns:
            found = next((cause[a.name] for a in e.args if isinstance(a, Var) and a.name in cause), None)
            if found is not None and e.out.name not in cause:
                cause[e.out.name] = found
            elif found is not None:  # a sum of what waits for a sum
                raise CodaError([self._refusal(p, found)])
        rest = [o for o in p.outputs if o.value.name in cause]
        outputs = [o for o in p.outputs if o not in rest]
        late |= {o.tensor.name: cause[o.value.name] for o in rest}
        needed = definitions(only(p, rest)) if rest else {}
        inputs, eqns, arrived = list(p.inputs), list(p.eqns), dict[str, Var]()
        for name, e in sums.items():
            if name not in needed:
                continue
            if e.op not in SUMS or e.out.ty.dtype is not F32:
                raise CodaError([self._no_sum(e)])
            called = _unused(f"{self._named(p, name, rest)}_sum", self.taken)
            before = Tensor(_unused(f"{called}_before", self.taken), F32, _order(e.out, rest))
            self.taken |= {called, before.name}
            inputs.append(before)
            eqns.append(Eqn(Var(called, e.out.ty), ops.ADD.name, (Var(before.name, e.out.ty), e.out), (), e.span))
            outputs.append(Output(replace(before, name=called), eqns[-1].out))
            self.carried.append((before, called))
            arrived[name] = Var(called, e.out.ty)
        early = self._placed(only(replace(p, inputs=tuple(inputs), eqns=tuple(eqns)), outputs))
        return early, self._after(p, rest, arrived, cause[rest[0].value.name]) if rest else None

    def _after(self, p: Program, rest: list[Output], arrived: dict[str, Var], why: Eqn) -> Program:
        """The stage that goes on from whole sums."""
        eqns = [
            e.reading(tuple(arrived.get(a.name, a) if isinstance(a, Var) else a for a in e.args))
            for e in p.eqns
            if e.out.name not in arrived
        ]
        stored = {called: t for t, called in self.carried}
        outputs = []
        for o in rest:
            if o.value.name in arrived:  # the sum itself: a copy
                copy = Var(_unused(f"{o.tensor.name}_whole", self.taken), o.value.ty)
                self.taken.add(copy.name)
                eqns.append(Eqn(copy, ops.STOP.name, (arrived[o.value.name],)))
                o = replace(o, value=copy)
            outputs.append(o)
        inputs = (*p.inputs, *(replace(stored[v.name], name=v.name) for v in arrived.values()))
        made = only(replace(p, inputs=inputs, eqns=tuple(eqns)), outputs)
        if any(t.name in self.parts for t in made.inputs):
            raise CodaError([self._refusal(p, why)])
        return made

    def _over(self, e: Eqn) -> bool:
        """Does e reduce over the axis?"""
        reduces = ops.TABLE[e.op].kind in ("contract", "reduce")
        return reduces and any(isinstance(a, Var) and self.axis in a.ty.axes for a in e.args) and self.axis not in e.out.ty.axes

    def _means(self, p: Program) -> Program:
        """A mean over the axis as a sum, divided by the whole extent."""
        if not any(e.op == ops.MEAN.name and self._over(e) for e in p.eqns):
            return p
        b = EqnBuilder(p.axes, set(self.taken))
        for e in p.eqns:
            if e.op == ops.MEAN.name and self._over(e):
                attrs = dict(e.attrs)
                b.apply(ops.SUM.name, e.args, attrs, span=e.span) / b.apply(ops.SIZE.name, (), attrs)
                b.eqns[-1] = replace(b.eqns[-1], out=e.out, span=e.span)
            else:
                b.eqns.append(e)
        self.taken |= b.taken
        return replace(p, eqns=tuple(b.eqns))

    def _placed(self, p: Program) -> Program:
        """A stage of the loop: positions and extents along the axis are those of the whole."""
        b = EqnBuilder((*p.axes, Axis(self.start), Axis(self.whole)), set(self.taken))
        for e in p.eqns:
            if e.op == ops.INDEX.name and e.attr("axis") == self.axis:
                b.apply(ops.ADD.name, (b.apply(e.op, (), dict(e.attrs)), b.apply(ops.SIZE.name, (), {"axes": (self.start,)})))
                b.eqns[-1] = replace(b.eqns[-1], out=e.out, span=e.span)
            elif e.op == ops.SIZE.name:
                axes = tuple(self.whole if a == self.axis else a for a in e.attr("axes"))  # type: ignore[attr-defined]
                b.eqns.append(replace(e, attrs=(("axes", axes),)))
            else:
                b.eqns.append(e)
        self.taken |= b.taken
        sizes = nominal(p)
        known = tuple((a, self.size if a == self.axis else n) for a, n in p.nominal)
        known += ((self.start, self.size), (self.whole, sizes.get(self.axis, self.size)))
        return only(replace(p, axes=b.axes, eqns=tuple(b.eqns), nominal=known), p.outputs)

    def _named(self, p: Program, name: str, rest: list[Output]) -> str:
        """What a sum is called: after the one result that is made of it."""
        users = [o.tensor.name for o in rest if name in definitions(only(p, [o]))]
        return users[0] if len(users) == 1 else name

    # --- refusals ----------------------------------------------------------------------------------------------------------

    def _refusal(self, p: Program, e: Eqn) -> Diagnostic:
        return Diagnostic(
            "C0415",
            f"`{p.name}` cannot run in chunks of `{self.axis}`: it needs {say(e.out, e)} over the whole of it",
            e.span or p.span,
            f"known after all chunks of `{self.axis}`",
            notes=(f"one chunk at a time: {listed(self.parts)}",),
            help="chunk an axis over which nothing is reduced in between, or leave the chunks out",
        )

    def _no_sum(self, e: Eqn) -> Diagnostic:
        return Diagnostic(
            "C0415",
            f"{say(e.out, e)} cannot be put together from chunks of `{self.axis}`: only f32 sums and products can",
            e.span,
            f"reduces over `{self.axis}`",
            notes=(f"one chunk at a time: {listed(self.parts)}",),
            help="chunk another axis, or leave the chunks out",
        )


def _order(v: Var, outputs: list[Output]) -> tuple[str, ...]:
    """The storage order of a sum: that of the result with its axes."""
    return next((o.tensor.axes for o in outputs if set(o.tensor.axes) == set(v.ty.axes)), v.ty.axes)


def _tensors(p: Program) -> tuple[Tensor, ...]:
    return (*p.inputs, *(o.tensor for o in p.outputs))


def _unused(name: str, taken: Iterable[str]) -> str:
    while name in taken:
        name += "_"
    return name
