"""Algebra across products: every law of `passes.laws`, in order, each on a simplified program.

In: a simplified program. Out: one of the same meaning over the reals, a note for every use, and the program as it was written where laws
have changed it. A strict program is spared the laws that do. Non-goals: the laws themselves, cutting into kernels (`stages`),
derivatives (a program is normalised first, then differentiated, so its backward has what the laws made).
"""

from __future__ import annotations

from dataclasses import replace

from .laws import LAWS
from .simplify import simplify
from .state import State


def normalise(state: State) -> State:
    """The pass."""
    for law in LAWS:
        if state.strict and law.strict_forbids:
            continue
        program, uses = law.rewrite(state.program)
        if uses:
            after = simplify(replace(state, program=program))
            notes = (*after.notes, *dict.fromkeys(map(str, uses)))
            state = replace(after, written=state.written or state.program, notes=notes)
    return state
