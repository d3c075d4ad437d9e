"""A call of kernels, decided: straight-line code over slots, made once for every kind of call and run at each.

In: what `host` decided. Out: `Plan`, to be run on arguments of the kind it was made for; `Kept`, those of a function. The steps are data;
for running they become one Python function, in which slots are local variables: a call then costs little more than what it calls.
Non-goal: deciding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from . import spec
from .configs import Problem

Slots = list[Any]
T = TypeVar("T")

_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # the latter asks first whether CUDA is initialised


@dataclass(frozen=True)
class Step:
    """`slots[out] = call(*slots[reads], *constants)`; without `out` nothing is kept. What it writes to counts as read."""

    call: Callable[..., Any]
    reads: tuple[int, ...] = ()
    constants: tuple[Any, ...] = ()
    out: int | None = None

    @property
    def touched(self) -> tuple[int, ...]:
        """Every slot that takes part."""
        return self.reads if self.out is None else (*self.reads, self.out)

    def __call__(self, slots: Slots) -> None:
        """Take this step alone."""
        value = self.call(*[slots[i] for i in self.reads], *self.constants)
        if self.out is not None:
            slots[self.out] = value


@dataclass
class Plan:
    """A call decided: `steps` over slots (first the arguments), `results` the slots of the outputs, notes for people.

    `dead` are the slots that no step after the one at that place reads: a run forgets them there, so that the memory of what stands between
    kernels serves again (launches are in order on one stream, as torch's allocator assumes).
    """

    extents: Mapping[str, int]
    device: torch.device
    steps: list[Step] = field(default_factory=list)
    arguments: int = 0
    slots: int = 0  # besides the arguments
    results: tuple[int, ...] = ()
    configs: dict[str, spec.Config] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)
    kernels: dict[str, spec.Kernel] = field(default_factory=dict)  # that are launched, by name
    places: dict[str, int] = field(default_factory=dict)  # of each launched kernel among the steps
    sizes: dict[str, tuple[Problem, ...]] = field(default_factory=dict)  # of each launch, for each of its Gemms
    copies: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dead: dict[int, tuple[int, ...]] = field(default_factory=dict)
    over: dict[str, str] = field(default_factory=dict)  # what is written in the place of an argument

    def forget(self, owner: Sequence[int]) -> None:
        """Find what is dead where. `owner`: of each slot, whose memory it views."""
        kept = {owner[i] for i in self.results}
        last = {owner[slot]: place for place, step in enumerate(self.steps) for slot in step.touched}
        sharing: dict[int, list[int]] = {}
        for slot, of in enumerate(owner):
            sharing.setdefault(of, []).append(slot)
        for of, place in last.items():
            if of not in kept:
                self.dead[place] = (*self.dead.get(place, ()), *sharing[of])

    def copy_results(self, places: Iterable[int]) -> None:
        """Return copies of these outputs: they are inputs as they are, and a caller may change what he gets."""
        self.steps += [Step(torch.clone, (self.results[i],), out=self.results[i]) for i in places]

    def run(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Make the call; the outputs in order."""
        return self.consume([*arguments])

    @cached_property
    def consume(self) -> Callable[..., list[torch.Tensor]]:
        """Make the call, and drop each argument when no later step reads it; the list of arguments is empty afterwards."""
        text, names = self.written()
        exec(compile(text, "<plan>", "exec"), names)
        return names["run"]

    def start(self, arguments: Sequence[Any]) -> Slots:
        """The slots before the first step, for who takes the steps one by one."""
        return [*arguments, *(None,) * self.slots]

    def written(self) -> tuple[str, dict[str, Any]]:
        """The steps as the text of a function, and what its names mean."""
        lines, names = ["def run(given, here=False):"], dict[str, Any]()
        if self.device.type == "cuda":
            lines.append(f"    if not here and current() != {self.device.index}: return elsewhere(given)")
            names |= {"current": _current_device, "elsewhere": self._elsewhere}
        if self.arguments:
            lines.append(f"    {', '.join(map(_local, range(self.arguments)))}, = given")
        lines.append("    given.clear()")
        for place, step in enumerate(self.steps):
            names[f"c{place}"] = step.call
            passed = [*map(_local, step.reads)]
            for i, value in enumerate(step.constants):
                passed.append(repr(value) if type(value) is int else f"k{place}_{i}")
                names |= {} if type(value) is int else {f"k{place}_{i}": value}
            kept = "" if step.out is None else f"{_local(step.out)} = "
            lines.append(f"    {kept}c{place}({', '.join(passed)})")
            if place in self.dead:
                lines.append(f"    {' = '.join(map(_local, self.dead[place]))} = None")
        lines.append(f"    return [{', '.join(map(_local, self.results))}]")
        return "\n".join(lines), names

    def _elsewhere(self, given: list[Any]) -> list[torch.Tensor]:
        """The call while another device is the current one."""
        with torch.cuda.device(self.device):
            return self.consume(given, True)


def _local(slot: int) -> str:
    return f"s{slot}"


class Kept(dict[Any, T]):
    """What was decided by kind of call, as `arguments.key` tells kinds apart; past `limit` the older half goes."""

    limit = 512

    def keep(self, key: Any, decided: T) -> None:
        """Add one."""
        if len(self) >= self.limit:
            for old in list(self)[: self.limit // 2]:
                self.pop(old, None)
        self[key] = decided
