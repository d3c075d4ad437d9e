"""From a tensor program to kernels: a tuple of pure functions, each verified afterwards and observable by its name.

In: a checked `ir.graph.Program`. Out: an `ir.kernels.Plan`, or CodaError with C04xx (what cannot be fused, and why) or C06xx.
Non-goals: device details (`backend_cute`), the meaning of operators (`ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..diagnostics.model import CodaError, InternalError
from ..ir.graph import Program
from ..ir.kernels import Plan
from ..ir.verify import verify as verify_program
from . import training, training_report
from .anchor import anchor
from .chunks import chunks
from .layout import layout
from .normalise import normalise
from .partition import partition
from .place import place
from .report import report
from .several import cut, each, join, staged
from .simplify import simplify
from .stages import Stages
from .state import State
from .verify import verify_plan

Pass = Callable[[State], State]
Rows = tuple[tuple[str, frozenset[str]], ...]  # the rows of the kernel that writes an output

PIPELINE: tuple[Pass, ...] = (
    simplify,  # dead code, common subexpressions, lane algebra, sums of products side by side
    normalise,  # laws: scales move out of products
    cut,  # a stage for each kernel, where one kernel does not do
    chunks,  # stages that hand on something large run chunk by chunk, where the program says so
    each(anchor),  # the product, its operands, its possible orientations; a map kernel has none
    each(place),  # where each value can be known: tile, phase, finisher; refusals
    each(partition),  # ports, phases, sinks, finishers
    each(layout),  # order of axes, storage
    join,  # one plan; the storage of what stands between kernels
)


def names() -> tuple[str, ...]:
    """The passes by name, in order."""
    return tuple(p.__name__ for p in PIPELINE)


def states(program: Program, until: str | None = None, rows: Rows = (), strict: bool = False) -> State:
    """The state after the pass `until` (None: after all). Raises CodaError for what cannot be fused, ValueError for an unknown pass."""
    if until is not None and until not in names():
        raise ValueError(f"there is no pass {until}; the passes are {', '.join(names())}")
    return _through(State(program, rows=rows, strict=strict), PIPELINE, until)


def run(program: Program, rows: Rows = (), strict: bool = False) -> Plan:
    """The kernels of a program, oriented as `rows` says; `strict` forbids laws that move a rounding.

    Raises CodaError (C04xx, C06xx) for what cannot be fused.
    """
    return _plan(states(program, rows=rows, strict=strict))


def trained(program: Program, strict: bool = False) -> Plan:
    """The kernels of a program and, where it has a derivative, of that. Raises CodaError (C04xx, C05xx, C06xx)."""
    return _with_derivative(program, strict, training.derive)


def checked(program: Program, strict: bool = False) -> Plan:
    """Kernels of a program and of its derivative, found sooner than by `trained` and not the cheapest. Raises CodaError as `trained`."""
    return _with_derivative(program, strict, training.derivable)


def _with_derivative(program: Program, strict: bool, derive: Callable[[Plan, Program, bool], Plan]) -> Plan:
    plan = run(program, strict=strict)
    if not training.differentiable(program):
        return plan
    try:
        return derive(plan, prepared(program, strict), strict)
    except CodaError as e:
        raise training.refused(program, e) from None


def prepared(program: Program, strict: bool = False) -> Program:
    """The program as it is before it is cut into kernels."""
    state = State(program, strict=strict)
    for step in PIPELINE[: PIPELINE.index(cut)]:
        state = step(state)
    return state.program


def run_stages(program: Program, stages: Stages, rows: Rows = ()) -> Plan:
    """The kernels of a program that is cut already. Raises CodaError (C04xx, C06xx)."""
    return _plan(_through(staged(State(program, rows=rows), stages), PIPELINE[PIPELINE.index(cut) + 1 :]))


def _plan(state: State) -> Plan:
    if state.plan is None:
        raise InternalError(f"{state.program.name} has no plan")
    return replace(state.plan, written=state.written)


def after(program: Program, name: str, strict: bool = False) -> str:
    """The text of the state after a pass: what `codac ir FILE --after NAME` prints."""
    return states(program, name, strict=strict).text()


def _through(state: State, passes: Iterable[Pass], until: str | None = None) -> State:
    """The state after these passes, verified after each."""
    sound: dict[int, Program] = {}  # what was verified, by identity: most passes leave most programs as they are
    for step in passes:
        state = step(state)
        _verify(state, step.__name__, sound)
        if step.__name__ == until:
            break
    return state


def _verify(state: State, name: str, sound: dict[int, Program]) -> None:
    try:
        for program in (state.program, *(s.program for s in state.stages)):
            if id(program) not in sound:
                sound[id(program)] = verify_program(program)
        if state.plan is not None:
            verify_plan(state.plan)
    except (ValueError, AssertionError) as e:
        raise InternalError(f"after the pass {name}: {e}") from e


__all__ = ["PIPELINE", "after", "checked", "names", "prepared", "report", "run", "run_stages", "states", "trained", "training_report"]
