"""Programs of several kernels: cut into stages, the passes over each of them, one plan again.

In: a simplified program. Out: a `State` with a stage for each kernel and its finishers, and, in the end, one `Plan` in launch order.
What stands between kernels is stored in an order that all of them can use as it is; where there is none, in two orders.
Non-goals: where to cut (`stages`), what a stage becomes (`anchor` to `layout`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from .. import ops
from ..diagnostics.model import CodaError, Diagnostic
from ..ir.graph import Atom, Output, Program, Tensor, Var
from ..ir.kernels import Along, Plan, Read, Store
from .anchor import accumulators, anchor
from .batches import position, why
from .layout import granule, layout
from .partition import partition
from .place import place
from .rows import merged
from .simplify import live
from .stages import Stages, named
from .stages import cut as cut_program
from .state import MAX_COLUMNS, State, fixed_product, nominal

Pass = Callable[[State], State]

MOST_ORDERS = 24  # of an intermediate's axes that are tried
MOST_BYTES = 104 * 1024  # of shared memory, for tiles on their way; the rest is the operands'
MOST_HELD = 192  # registers of a thread for elements that a map kernel reads before a statistic and after it; beyond, two passes are faster
MOST_ROWS = 48 * 1024  # the same measure of a row kernel, whose elements are in registers: a dozen tiles of 16 bits


def cut(state: State) -> State:
    """The pass: a program that one kernel computes stays whole, any other becomes stages. Raises CodaError (C04xx)."""
    reasons = why(state.program)  # batched products are launched several times, also alone
    whole = None if reasons else _problem(state.program, state.rows)
    if whole is None and not reasons:
        return state
    found = cut_program(with_nominal(state.program))
    try:
        made = staged(state, found)
    except CodaError as e:
        raise _real(whole or CodaError(list(reasons)), e, len(found.programs)) from None
    if len(found.programs) < 2 and len(made.stages) < 2 and not found.same and whole:
        raise whole
    return replace(made, why=tuple(whole.diagnostics) if whole else reasons)


def _real(whole: CodaError, stages: CodaError, count: int) -> CodaError:
    """What to report: of a program that several kernels would compute, but for one of these, what is wrong with that one."""
    if count < 2:
        return whole
    why = "; ".join(d.message for d in whole.diagnostics)
    return CodaError([replace(d, notes=(*d.notes, f"the program takes {count} kernels: {why}")) for d in stages.diagnostics])


def with_nominal(program: Program) -> Program:
    """The program with an extent for every free axis, so that all its stages count with the same."""
    size = nominal(program)
    return replace(program, nominal=tuple((a.name, size[a.name]) for a in program.axes if a.extent is None))


def staged(state: State, found: Stages) -> State:
    """The state with these stages, each named after what it writes. Raises CodaError where one has no kernel."""
    name = state.program.name
    programs: list[Program] = []
    problems: list[Diagnostic] = []
    for p in merged(found.programs, {o.tensor.name for o in state.program.outputs}, is_row_kernel):
        try:
            programs += fitting(p)
        except CodaError as e:
            problems += e.diagnostics
    if problems:
        raise CodaError(problems)
    programs = [replace(p, name=f"{name}_{p.outputs[0].tensor.name}", doc="") for p in programs]
    return replace(state, stages=tuple(State(p, rows=state.rows) for p in programs), same=found.same)


def fitting(program: Program) -> list[Program]:
    """A stage as it is if one tile can hold it; else several: the accumulators are stored, and map kernels take what did not fit.

    Raises CodaError with what is wrong with the stage as it was, where that does not help.
    """
    problem = _problem(program)
    if problem is None:
        return _relieved(program)
    sums = [var for var, *_ in accumulators(program)]
    taken = {t.name for t in _tensors(program)}
    held = {v.name: Output(Tensor(v.name if v.name not in taken else f"{v.name}_acc", v.ty.dtype, v.ty.axes), v) for v in sums}
    held |= {o.value.name: o for o in program.outputs if o.value.name in held}
    kept = list(held.values())
    if sums and _problem(only(program, kept)) is not None:
        raise problem
    rest: list[Output] = []
    for o in program.outputs:
        if o not in kept:
            (kept if _problem(only(program, [*kept, o])) is None else rest).append(o)
    if not sums:
        return [only(program, kept), *fitting(only(program, rest))] if kept else _first_apart(program, problem)
    loaded = {name: Var(o.tensor.name, o.value.ty) for name, o in held.items()}
    eqns = tuple(
        e.reading(tuple(loaded.get(a.name, a) if isinstance(a, Var) else a for a in e.args))
        for e in program.eqns
        if e.out.name not in held
    )
    inputs = (*program.inputs, *(o.tensor for o in held.values()))
    return [only(program, kept), *fitting(only(replace(program, inputs=inputs, eqns=eqns), rest))]


def _relieved(program: Program) -> list[Program]:
    """A map stage that fits a tile; two, its statistics first, where the tile's elements would be held in more registers than there are."""
    if any(e.op == ops.CONTRACT.name for e in program.eqns) or _held(program) <= MOST_HELD:
        return [program]
    try:
        return _first_apart(program, CodaError([]))
    except CodaError:
        return [program]


def _held(program: Program) -> int:
    """Registers of a thread for the elements of a group of columns, which the phase after its statistics reads again."""
    state = _kernel(State(position(program)))
    assert state.plan is not None
    gemm, bits = state.plan.gemm, {t.name: t.dtype.bits for t in _tensors(program)}
    if gemm.whole_rows:
        return 0
    widest = max((fixed_product(program, s.over) or 0 for phase in gemm.phases for s in phase.statistics), default=0)
    sides = (set(gemm.rows), set(gemm.cols))
    read = [p for p in gemm.ports if isinstance(p, Read)]
    both = [p for p in read if all(side & {x.axis for _, x in p.access.at if isinstance(x, Along)} for side in sides)]
    return sum(widest // 2 * (bits[p.access.tensor] * len(p.vars) if p.tile else 32) for p in both) // 32


def _first_apart(program: Program, problem: CodaError) -> list[Program]:
    """Every output of a map stage by itself; of one output, its reductions are stored first, else the runs that it reads."""
    parts = [only(program, [o]) for o in program.outputs]
    if len(parts) > 1:
        return [p for part in parts for p in fitting(part)]
    inside = [e for e in program.eqns if e.out != program.outputs[0].value]
    points = [e.out for e in inside if ops.TABLE[e.op].kind == "reduce" and isinstance(e.args[0], Var)]
    points = points or [e.out for e in inside if e.op == ops.RUN.name] or _half(program)
    if not points:
        raise problem
    made = tuple(Tensor(v.name, v.ty.dtype, v.ty.axes) for v in points)
    first = only(program, [Output(t, v) for t, v in zip(made, points)])
    rest = replace(program, inputs=(*program.inputs, *made), eqns=tuple(e for e in program.eqns if e.out not in points))
    return [*fitting(first), *fitting(only(rest, program.outputs))]


def _half(program: Program) -> list[Var]:
    """The value that reads about half of the tiles that the program's one output reads; none where nothing parts them."""
    (output,) = program.outputs
    read: dict[str, frozenset[str]] = {t.name: frozenset({t.name}) for t in program.inputs if set(output.value.ty.axes) <= set(t.axes)}
    for e in program.eqns:
        behind = frozenset().union(*(read.get(a.name, frozenset()) for a in e.args if isinstance(a, Var)))
        read[e.out.name] = frozenset({e.out.name}) if e.op == ops.LANE.name and behind else behind
    every = read[output.value.name]
    inside = [e.out for e in program.eqns if e.out != output.value and e.out.ty.axes == output.value.ty.axes]
    found = [v for v in inside if 1 < len(read[v.name]) < len(every) - 1 and v.ty.dtype.kind == "float"]
    return sorted(found, key=lambda v: abs(len(read[v.name]) - len(every) / 2))[:1]


def _problem(program: Program, rows: tuple[tuple[str, frozenset[str]], ...] = ()) -> CodaError | None:
    """Why one kernel cannot be this program; None where it can."""
    try:
        _alone(program, rows)
    except CodaError as e:
        return e
    return None


def _alone(program: Program, rows: tuple[tuple[str, frozenset[str]], ...] = ()) -> Plan:
    """The program as one kernel. Raises CodaError with why that cannot be."""
    state = _kernel(State(position(program), rows=rows))
    assert state.plan is not None
    wide = max(len(state.plan.gemm.accumulators), 1) * granule(state.program, state.plan)
    if wide > MAX_COLUMNS:
        text = f"`{program.name}` has {wide} columns in its narrowest tile, of {MAX_COLUMNS}"
        raise CodaError([Diagnostic("C0601", text, program.span, "this program", help="use fewer lanes, or smaller groups of columns")])
    gemm = state.plan.gemm
    held, most = _staged_bytes(state), MOST_ROWS if gemm.whole_rows else MOST_BYTES if gemm.products else 2 * MOST_BYTES
    if held > most:
        text = f"`{program.name}` loads and stores too many tiles at once: {held} bytes of {most}"
        raise CodaError([Diagnostic("C0601", text, program.span, "this program", help="store fewer outputs, or split the program")])
    return state.plan


def is_row_kernel(program: Program) -> bool:
    """Is this stage one kernel that keeps the statistics of its rows?"""
    try:
        return _alone(program).gemm.whole_rows
    except CodaError:
        return False


def _staged_bytes(state: State) -> int:
    """Shared memory for tiles that pass through it, two steps deep, in the narrowest steps."""
    assert state.plan is not None
    gemm = state.plan.gemm
    bits = {t.name: t.dtype.bits for t in _tensors(state.program)}
    tiles = [p.access for p in gemm.ports if isinstance(p, Read) and p.tile] + [s.access for s in gemm.sinks if isinstance(s, Store)]
    step = 8  # the narrowest
    return sum(2 * 128 * step * bits[t.tensor] // 8 * (2 if t.packed else 1) for t in tiles)


def only(program: Program, outputs: Sequence[Output]) -> Program:
    """The part of a program that these outputs need."""
    made = live(replace(program, outputs=tuple(outputs)))
    read = {a.name for e in made.eqns for a in e.args if isinstance(a, Var)} | {o.value.name for o in outputs}
    inputs = tuple(t for t in made.inputs if t.name in read)
    used = {a for t in (*inputs, *(o.tensor for o in outputs)) for a in t.axes} | {
        a for e in made.eqns for a in (*e.out.ty.axes, *named(e))
    }
    axes, sizes = tuple(a for a in made.axes if a.name in used), tuple(n for n in made.nominal if n[0] in used)
    return replace(made, inputs=inputs, axes=axes, nominal=sizes, save=(), recompute=(), distribute=(), chunk=())


def each(step: Pass) -> Pass:
    """The pass over every stage. Raises CodaError with the problems of all of them."""

    @functools.wraps(step)
    def over(state: State) -> State:
        if not state.stages and not state.same:
            return step(state)
        done: list[State] = []
        problems: list[Diagnostic] = []
        for stage in state.stages:
            try:
                done.append(step(stage))
            except CodaError as e:
                problems += e.diagnostics
        if problems:
            raise CodaError(problems)
        return replace(state, stages=tuple(done))

    return over


def join(state: State) -> State:
    """The pass: one plan; intermediates in an order that every kernel can use."""
    if not state.stages and not state.same:
        return state
    stages = list(state.stages)
    own = {o.tensor.name for o in state.program.outputs}
    for name in dict.fromkeys(o.tensor.name for s in stages for o in s.program.outputs):
        _settle(stages, name, name not in own)
    plans = tuple(s.plan for s in stages if s.plan is not None)
    layouts = sorted((x for p in plans for x in p.layouts), key=lambda x: not x.copy)
    kernels = tuple(k for p in plans for k in p.launched)
    notes = tuple(dict.fromkeys(n for n in (*state.notes, *(n for p in plans for n in p.notes))))
    why = tuple(dict.fromkeys(f"{d.code}: {d.message}" for d in state.why))
    plan = Plan(state.program, kernels, tuple(layouts), notes, plans, state.same, why, loops=state.loops)
    return replace(state, stages=tuple(stages), plan=plan)


def _kernel(state: State) -> State:
    """A stage through all passes."""
    return functools.reduce(lambda s, step: step(s), (anchor, place, partition, layout), state)


def _copied(stage: State, name: str) -> bool:
    assert stage.plan is not None
    return any(x.tensor == name and x.copy for x in stage.plan.layouts)


def _settle(stages: list[State], name: str, free: bool) -> None:
    """An order of `name`'s axes for which no kernel needs a copy; else a second tensor for those that do. Changes `stages`."""
    users = [i for i, s in enumerate(stages) if any(t.name == name for t in _tensors(s.program))]
    if not any(_copied(stages[i], name) for i in users[0 if free else 1 :]):
        return
    tensor = next(o.tensor for o in stages[users[0]].program.outputs if o.tensor.name == name)
    for axes in _orders(tensor) if free else ():
        made = _redone([_stored(stages[i].program, name, axes) for i in users], stages[0].rows)
        if made is not None and not any(_copied(s, name) for s in made):
            for i, s in zip(users, made):
                stages[i] = s
            return
    writer, readers = users[0], [i for i in users[1:] if _copied(stages[i], name)]
    second = _unused(stages, f"{name}_again")
    for axes in _orders(tensor):
        twice = _also(stages[writer].program, name, Tensor(second, tensor.dtype, axes))
        renamed = [_stored(stages[i].program, name, axes, second) for i in readers]
        made = _redone([twice, *renamed], stages[0].rows)
        if made is not None and not any(_copied(s, second) for s in made):
            for i, s in zip([writer, *readers], made):
                stages[i] = s
            return


def _orders(tensor: Tensor) -> Iterator[tuple[str, ...]]:
    for i, axes in enumerate(permutations(tensor.axes)):
        if i == MOST_ORDERS:
            return
        yield axes


def _redone(programs: list[Program], rows: tuple[tuple[str, frozenset[str]], ...]) -> list[State] | None:
    try:
        return [_kernel(State(p, rows=rows)) for p in programs]
    except CodaError:
        return None


def _tensors(program: Program) -> Iterator[Tensor]:
    yield from program.inputs
    yield from (o.tensor for o in program.outputs)


def _stored(program: Program, name: str, axes: tuple[str, ...], called: str = "") -> Program:
    """The program with `name` stored in another order, perhaps under another name."""
    called = called or name

    def change(t: Tensor) -> Tensor:
        return replace(t, name=called, axes=axes) if t.name == name else t

    inputs = tuple(map(change, program.inputs))
    outputs = tuple(replace(o, tensor=change(o.tensor)) for o in program.outputs)
    if not any(t.name == name for t in program.inputs):
        return replace(program, outputs=outputs)

    def rename(a: Atom) -> Atom:
        return Var(called, a.ty) if isinstance(a, Var) and a.name == name else a

    eqns = tuple(e.reading(tuple(map(rename, e.args))) for e in program.eqns)
    return replace(program, inputs=inputs, outputs=outputs, eqns=eqns)


def _also(program: Program, name: str, tensor: Tensor) -> Program:
    """The program with an output's value stored a second time."""
    value = next(o.value for o in program.outputs if o.tensor.name == name)
    return replace(program, outputs=(*program.outputs, Output(tensor, value)))


def _unused(stages: list[State], name: str) -> str:
    taken = {t.name for s in stages for t in _tensors(s.program)} | {e.out.name for s in stages for e in s.program.eqns}
    while name in taken:
        name += "_"
    return name
