"""What each schedule of a plan's launches is expected to take at a shape: `codac plan --shape`.

In: a plan, extents of some free axes. Out: text, a paragraph a program. Raises CodaError C0803 for an axis that is not there.
Non-goals: the model and the choice (`schedules`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..diagnostics.model import CodaError, Diagnostic
from ..ir.kernels import Plan
from ..passes.state import nominal
from . import schedules, spec
from .lower import lower, lower_backward


def report(plan: Plan, given: Mapping[str, int], backward: bool = False) -> str:
    """The schedules of a plan, or of its derivative; axes that are not given are nominal."""
    free = sorted(a.name for a in plan.program.axes if a.extent is None)
    for name in sorted(set(given) - set(free)):
        raise CodaError([Diagnostic("C0803", f"there is no free axis {name}", notes=(f"the free axes are {', '.join(free)}",))])
    chosen = plan.derived.backward if backward and plan.derived else plan
    program = lower_backward(plan) if backward else lower(plan)
    extents = {**nominal(chosen.program), **given}
    for one, other in program.equal * 2:  # renames may follow each other
        for known, same in ((one, other), (other, one)):
            if known in given:
                extents[same] = extents[known]
    return _text(program, extents)


def _text(program: spec.Program, extents: Mapping[str, int], sms: int = 132) -> str:
    """What each schedule of each launch is expected to take, for people; "" where nothing multiplies."""
    looping = {name for loop in program.loops for name in loop.kernels}
    lines = []
    for launch in spec.launches(program):
        if launch.name in looping or not schedules.computes(launch, extents):
            continue
        found = schedules.estimates(launch, extents, sms)
        taken = schedules.best(found)
        lines.append(f"  {launch.name}")
        for e in found:
            kernels = ", ".join(f"{name} {tiles}" for name, tiles in e.tiles)
            mark = "taken" if e.parts == schedules.PLANNED and (taken.parts == schedules.PLANNED or not schedules.wanted()) else ""
            if e is taken and e.parts != schedules.PLANNED:
                mark = "taken" if schedules.wanted() else "taken with CODA_SCHEDULES=1"
            lines.append(f"    {schedules.name_of(e.parts):<12} {e.microseconds:8.1f} us   {kernels}{f'   <- {mark}' if mark else ''}")
    shape = ", ".join(f"{a}={extents[a]}" for a, size in program.extents if size is None and a in extents)
    return "\n".join([f"schedules of {program.name} at {shape}, as expected on an H200:", *lines]) if lines else ""
