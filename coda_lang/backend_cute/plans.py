"""A call of kernels, decided: steps over slots, made once for every kind of call and run at each.

In: what `host` decided. Out: `Plan`, to be run on arguments of the kind it was made for; `Kept`, those of a function. Non-goal: deciding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from . import spec

Slots = list[Any]
Step = Callable[[Slots], None]
T = TypeVar("T")


@dataclass
class Plan:
    """A call decided: `steps` over slots (first the arguments), `results` the slots of the outputs, notes for people."""

    extents: Mapping[str, int]
    device: torch.device
    steps: list[Step] = field(default_factory=list)
    slots: int = 0
    results: tuple[int, ...] = ()
    configs: dict[str, spec.Config] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)  # of each launched kernel among the steps
    sizes: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # rows, columns a segment and depth of each Gemm
    copies: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def copy_results(self, places: Iterable[int]) -> None:
        """Return copies of these outputs: they are inputs as they are, and a caller may change what he gets."""
        for place in [self.results[i] for i in places]:
            self.steps.append(lambda slots, place=place: slots.__setitem__(place, slots[place].clone()))  # type: ignore[misc]

    def run(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Make the call; the outputs in order."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self._run(arguments)
        return self._run(arguments)

    def start(self, arguments: Sequence[Any]) -> Slots:
        """The slots before the first step."""
        return [*arguments, *(None,) * self.slots]

    def _run(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        slots = self.start(arguments)
        for step in self.steps:
            step(slots)
        return [slots[i] for i in self.results]


class Kept(dict[Any, T]):
    """What was decided by kind of call, as `arguments.key` tells kinds apart; past `limit` the older half goes."""

    limit = 512

    def keep(self, key: Any, decided: T) -> None:
        """Add one."""
        if len(self) >= self.limit:
            for old in list(self)[: self.limit // 2]:
                self.pop(old, None)
        self[key] = decided
