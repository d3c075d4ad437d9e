"""What a plan's kernels take at a shape at least, and what each schedule of its launches is expected to take: `codac plan --shape`.

In: a plan, extents of some free axes. Out: text, a paragraph a program.
Non-goals: the model and the choice (`schedules`), counting (`roofline`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.kernels import Plan
from ..passes.state import nominal
from . import roofline, schedules, spec
from .lower import lower, lower_backward

PEAK = next(p for p in roofline.PEAKS if p.name == "NVIDIA H200")  # the card whose times `schedules` knows


def report(plan: Plan, given: Mapping[str, int], backward: bool = False) -> str:
    """The roofline and the schedules of a plan, or of its derivative; axes that are not given are nominal, those it has not left out."""
    free = {a.name for a in plan.program.axes if a.extent is None}
    given = {name: size for name, size in given.items() if name in free}
    chosen = plan.derived.backward if backward and plan.derived else plan
    program = lower_backward(plan) if backward else lower(plan)
    extents = {**nominal(chosen.program), **given}
    for one, other in program.equal * 2:  # renames may follow each other
        for known, same in ((one, other), (other, one)):
            if known in given:
                extents[same] = extents[known]
    return "\n\n".join(text for text in (_roofs(program, extents), _text(program, extents)) if text)


def _roofs(program: spec.Program, extents: Mapping[str, int]) -> str:
    """What each kernel moves and multiplies, and the time that takes at least."""
    counts = roofline.of_program(program, extents)
    head = ("", "tiles", "MB", "GFLOP", "at least", "bound by")
    rows = [
        (f"{c.kernel} x{c.times}" if c.times > 1 else c.kernel, c.config, f"{c.bytes / 1e6:.1f}", f"{c.flops / 1e9:.1f}",
         f"{PEAK.floor_ms(c.bytes, c.flops) * 1e3:.1f} us", PEAK.bound(c.bytes, c.flops))
        for c in counts
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (head, *rows)]
    total = sum(PEAK.floor_ms(c.bytes, c.flops) for c in counts) * 1e3
    return "\n".join([f"roofline of {program.name}, {PEAK.name} by its data sheet: {total:.1f} us at least", *lines]) if rows else ""


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
