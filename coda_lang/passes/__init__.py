"""From a tensor program to kernels: a tuple of pure functions, each verified afterwards and observable by its name.

In: a checked `ir.graph.Program`. Out: an `ir.kernels.Plan`, or CodaError with C04xx (what cannot be fused, and why) or C06xx.
Non-goals: device details (`backend_cute`), the meaning of operators (`ops`).
"""

from __future__ import annotations

from collections.abc import Callable

from ..diagnostics.model import InternalError
from ..ir.graph import Program
from ..ir.kernels import Plan
from ..ir.verify import verify as verify_program
from .anchor import anchor
from .layout import layout
from .partition import partition
from .place import place
from .report import report
from .simplify import simplify
from .state import State
from .verify import verify_plan

Pass = Callable[[State], State]

PIPELINE: tuple[Pass, ...] = (
    simplify,  # dead code, common subexpressions, sums of products side by side
    anchor,  # the product, its operands, its possible orientations
    place,  # where each value can be known: tile, phase, finisher; refusals
    partition,  # ports, phases, sinks, finishers
    layout,  # order of axes, storage
)


def names() -> tuple[str, ...]:
    """The passes by name, in order."""
    return tuple(p.__name__ for p in PIPELINE)


def states(program: Program, until: str | None = None) -> State:
    """The state after the pass `until` (None: after all). Raises CodaError for what cannot be fused, ValueError for an unknown pass."""
    if until is not None and until not in names():
        raise ValueError(f"there is no pass {until}; the passes are {', '.join(names())}")
    state = State(program)
    for step in PIPELINE:
        state = step(state)
        _verify(state, step.__name__)
        if step.__name__ == until:
            break
    return state


def run(program: Program) -> Plan:
    """The kernels of a program. Raises CodaError (C04xx, C06xx) for what cannot be fused."""
    plan = states(program).plan
    assert plan is not None
    return plan


def after(program: Program, name: str) -> str:
    """The text of the state after a pass: what `codac ir FILE --after NAME` prints."""
    return states(program, name).text()


def _verify(state: State, name: str) -> None:
    try:
        verify_program(state.program)
        if state.plan is not None:
            verify_plan(state.plan)
    except (ValueError, AssertionError) as e:
        raise InternalError(f"after the pass {name}: {e}") from e


__all__ = ["PIPELINE", "after", "names", "report", "run", "states"]
