"""Algebra across products: every law of `passes.laws`, in order, each on a simplified program.

In: a simplified program. Out: one of the same meaning over the reals, a note for every use, and the program as it was written where laws
have changed it. Laws that are a choice are used where that pays (`worth`). A strict program is spared the laws that move a rounding.
Non-goals: the laws themselves, cutting into kernels (`stages`), derivatives (a program is normalised first, then differentiated, so its
backward has what the laws made).
"""

from __future__ import annotations

from dataclasses import replace

from ..diagnostics.model import CodaError, Diagnostic
from ..ir.graph import Program
from .laws import CHOSEN, LAWS, ChosenLaw, Use, rank_one
from .simplify import simplify
from .state import State, definitions
from .training import differentiable
from .worth import cost


def normalise(state: State) -> State:
    """The pass. Raises CodaError C0416 where the program asks for what no law gives."""
    state = _distributed(state)
    for law in LAWS:
        if not (state.strict and law.strict_forbids):
            state = _applied(state, *law.rewrite(state.program))
    for chosen in CHOSEN:
        if not (state.strict and chosen.strict_forbids):
            state = _applied(state, *chosen.rewrite(state.program, paying(chosen, state.program)))
    return state


def _distributed(state: State) -> State:
    """The products that the program says are to be taken apart, and no law says that of more."""
    names, program = state.program.distribute, replace(state.program, distribute=())
    if not names:
        return state
    if state.strict:
        note = f"`distribute {', '.join(names)}` is not followed: it moves roundings, which --strict forbids"
        return replace(state, program=program, notes=(*state.notes, note))
    found = {name: rank_one.asked(state.program, name) for name in names}
    problems = [_refused(state.program, name, why) for name in names for why in found[name].values() if isinstance(why, str)]
    if problems:
        raise CodaError(problems)
    return _applied(replace(state, program=program), *rank_one.rewrite(program, rank_one.places(state.program)))


def _refused(program: Program, name: str, why: str) -> Diagnostic:
    e = definitions(program).get(name)
    help = f"drop `distribute {name}`: the operand is then stored as it is"
    message = f"the products of `{name}` cannot be distributed: {why}"
    note = "to distribute is to multiply each term of a sum by itself: what is a vector of rows there becomes a scale of the product"
    return Diagnostic("C0416", message, e.span if e else program.span, "made here", notes=(note,), help=help)


def paying(law: ChosenLaw, program: Program) -> frozenset[str]:
    """The places at which using the law makes the forward or the training step cheaper, and neither dearer; one after the other."""
    found: frozenset[str] = frozenset()
    places = law.places(program)
    best = cost(program, differentiable(program)) if places else None
    for place in places:
        after, _ = law.rewrite(program, found | {place})
        other = cost(simplify(State(after)).program, differentiable(program))
        if best is not None and other.better(best):
            found, best = found | {place}, other
    return found


def _applied(state: State, program: Program, uses: tuple[Use, ...]) -> State:
    """The state with a rewritten program; as it is where a law has no use."""
    if not uses:
        return state
    after = simplify(replace(state, program=program))
    notes = (*after.notes, *dict.fromkeys(map(str, uses)))
    return replace(after, written=state.written or state.program, notes=notes)
