"""Does a law of programs pay? Seconds at nominal extents, of the forward alone and of a whole training step.

In: a program before it is cut, and one of the same meaning. Out: which is cheaper. Counted are the bytes and FLOPs of the kernels that each
would be cut into (`saving.seconds`), and a launch each. Non-goals: which laws there are, laws of derivatives (`saving` weighs those).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Program
from .saving import plain, seconds
from .several import with_nominal
from .stages import cut

LAUNCH = 2e-6  # from the last tile of one kernel to the first of the next


@dataclass(frozen=True)
class Cost:
    """Seconds of the forward, and of both with what is held between them; the forward's again where there is no backward."""

    forward: float
    step: float

    def better(self, other: Cost) -> bool:
        """Is one of them less, and neither more?"""
        return self != other and self.forward <= other.forward and self.step <= other.step


def cost(program: Program, differentiable: bool) -> Cost:
    """Of the kernels that the program is cut into, before laws of derivatives."""
    stages = cut(with_nominal(program)).programs
    forward = sum(map(seconds, stages)) + LAUNCH * len(stages)
    if not differentiable:
        return Cost(forward, forward)
    both = plain(program)
    return Cost(forward, both.seconds() + LAUNCH * (len(both.early) + len(both.late)))
