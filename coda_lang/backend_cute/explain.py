"""What a call does, for people: path, kernels with their tiles, copies and why, what a differentiable call keeps.

In: a `Function` and the tensors of a call. Out: `Explanation`, made from the plan of the call; nothing is compiled or run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import arguments, autograd, host, schedules, spec, torch_fns
from .binding import bind
from .derivative import extents


@dataclass(frozen=True)
class Explanation:
    """What a call with certain tensors does. `path` is "kernels" or "reference"; copies say which and why; `str` is for people."""

    program: str
    path: str
    extents: Mapping[str, int]
    configs: Mapping[str, str]
    launches: tuple[str, ...]
    copies: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.program}: path {self.path}", "  " + ", ".join(f"{a}={n}" for a, n in self.extents.items())]
        doing = "launches" if self.path == "kernels" else "on a GPU it would launch"
        times = {k: self.launches.count(k) for k in self.launches}
        tiles = {k: f" with tiles {self.configs[k]}" for k in times if k in self.configs}
        lines += [f"  {doing} {k}{tiles.get(k, '')}{f', {n} times' if n > 1 else ''}" for k, n in times.items()]
        lines += [f"  {c}" for c in self.copies] or ["  no tensor is copied"]
        return "\n".join([*lines, *(f"  {n}" for n in self.notes)])


def explained(fn: Any, values: Sequence[Any]) -> Explanation:
    """What a call with these arguments, in signature order, does; for CPU tensors, what the kernels would do."""
    device = arguments.check(fn.program, values)
    binding = bind(fn.program, arguments.shapes(values))
    if device.type == "cuda":
        arguments.check_gpu(fn.program, device, fn.objects.arch)
    plan = host.plan(fn.program, binding, values, device, _Described(fn.objects))
    return Explanation(
        fn.program.name,
        "kernels" if device.type == "cuda" else "reference",
        {name: binding.extents[name] for name, _ in fn.program.extents},
        {name: config.key for name, config in plan.configs.items()},
        tuple(plan.launches),
        tuple(plan.copies),
        (*plan.notes, *(described(fn, values, binding.extents) if fn.backward is not None else ())),
    )


class _Described:
    """Stands in for executables where only the description of a plan is wanted."""

    whole = False

    def __init__(self, objects: Any) -> None:
        self.config = objects.config
        if hasattr(objects, "parts"):
            self.parts, self.functions, self.wholes = objects.parts, objects.functions, objects.wholes

    def extended(self, made: schedules.Applied) -> _Described:
        """Itself: nothing is compiled."""
        return self

    def executables(self, wanted: Sequence[tuple[spec.Kernel, spec.Config | None]], device: Any) -> list[Callable[..., None]]:
        """Something to stand in the plan, which is not run."""
        return [lambda *tensors: None for _ in wanted]


def described(fn: Any, tensors: Sequence[Any], known: Mapping[str, int]) -> tuple[str, ...]:
    """What a differentiable call with these tensors keeps, and what its backward runs; nothing where none is wanted."""
    derivative = fn.training(autograd.Eager(fn)).derivative
    needs = [isinstance(t, torch.Tensor) and t.requires_grad for t in tensors]
    saving = derivative.saving(needs)
    if not any(saving.asked):
        return ()
    step = derivative.step(saving.asked, [True] * len(derivative.outputs))
    by_name = {a.name: a for a in (*derivative.program.inputs, *derivative.forward.outputs)}
    kept = [by_name[name] for name in saving.kept]
    own = [a for a in kept if a.name not in derivative.inputs]
    size = sum(spec.product(a.axes, known) * torch_fns.DTYPES[a.dtype].itemsize for a in own if a.name not in derivative.outputs)
    device = arguments.device_of(tensors)
    made = schedules.scheduled(step.program, extents(step.program, known), device, fn.objects, step.functions)
    wanted = ", ".join(name for name, a in zip(derivative.inputs, saving.asked) if a)
    return (
        f"for the gradients of {wanted} it keeps {', '.join(a.name for a in kept) or 'nothing'}: {size} bytes besides inputs and outputs",
        f"the backward {'launches' if arguments.runs_kernels(device) else 'on a GPU would launch'} "
        f"{', '.join(k.name for k in made.program.kernels) or 'nothing'}",
    )
