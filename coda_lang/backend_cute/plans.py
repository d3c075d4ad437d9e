"""A call of kernels, decided: steps over slots, made once for every kind of call and run at each.

In: what `host` decided. Out: `Plan`, to be run on arguments of the kind it was made for; `Kept`, those of a function. Non-goal: deciding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from . import spec
from .configs import Problem

Slots = list[Any]
Step = Callable[[Slots], None]
T = TypeVar("T")


@dataclass
class Plan:
    """A call decided: `steps` over slots (first the arguments), `results` the slots of the outputs, notes for people.

    `dead` are the slots that no step after the one at that place reads: a run forgets them there, so that the memory of what stands between
    kernels serves again (launches are in order on one stream, as torch's allocator assumes).
    """

    extents: Mapping[str, int]
    device: torch.device
    steps: list[Step] = field(default_factory=list)
    slots: int = 0
    results: tuple[int, ...] = ()
    configs: dict[str, spec.Config] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)  # of each launched kernel among the steps
    sizes: dict[str, tuple[Problem, ...]] = field(default_factory=dict)  # of each launch, for each of its Gemms
    copies: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dead: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _running: list[Step] = field(default_factory=list)  # the steps with what they forget

    def forget(self, touched: Sequence[Sequence[int]], owner: Sequence[int]) -> None:
        """Find what is dead where. `touched`: the slots of each step; `owner`: of each slot, whose memory it views."""
        kept = {owner[i] for i in self.results}
        last = {owner[slot]: place for place, slots in enumerate(touched) for slot in slots}
        sharing: dict[int, list[int]] = {}
        for slot, of in enumerate(owner):
            sharing.setdefault(of, []).append(slot)
        for of, place in last.items():
            if of not in kept:
                self.dead[place] = (*self.dead.get(place, ()), *sharing[of])

    def copy_results(self, places: Iterable[int]) -> None:
        """Return copies of these outputs: they are inputs as they are, and a caller may change what he gets."""
        for place in [self.results[i] for i in places]:
            self.steps.append(lambda slots, place=place: slots.__setitem__(place, slots[place].clone()))  # type: ignore[misc]

    def run(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Make the call; the outputs in order."""
        return self.consume([*arguments])

    def consume(self, arguments: list[Any]) -> list[torch.Tensor]:
        """Make the call, and drop each argument when no later step reads it; `arguments` is empty afterwards."""
        slots = self.start(arguments)
        arguments.clear()
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self._run(slots)
        return self._run(slots)

    def start(self, arguments: Sequence[Any]) -> Slots:
        """The slots before the first step."""
        return [*arguments, *(None,) * self.slots]

    def _run(self, slots: Slots) -> list[torch.Tensor]:
        for step in self._running or self._ready():
            step(slots)
        return [slots[i] for i in self.results]

    def _ready(self) -> list[Step]:
        for place, step in enumerate(self.steps):
            self._running.append(step)
            if place in self.dead:
                self._running.append(_forgetting(self.dead[place]))
        return self._running


def _forgetting(dead: tuple[int, ...]) -> Step:
    def step(slots: Slots) -> None:
        for slot in dead:
            slots[slot] = None

    return step


class Kept(dict[Any, T]):
    """What was decided by kind of call, as `arguments.key` tells kinds apart; past `limit` the older half goes."""

    limit = 512

    def keep(self, key: Any, decided: T) -> None:
        """Add one."""
        if len(self) >= self.limit:
            for old in list(self)[: self.limit // 2]:
                self.pop(old, None)
        self[key] = decided
