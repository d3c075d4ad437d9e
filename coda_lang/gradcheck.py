"""`codac test`: is the derived backward the derivative of the program?

In: a program. Out: one line a gradient and save plan: its error against torch's autograd of the program itself in float64, by the oracle
(the backward as a program), by the kernels' twin in float64 and with the kernels' rounding; and whether both forwards give equal bits.
Runs on the CPU. Non-goals: kernels on a GPU (`kernel.py` as a script checks those).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import passes
from .backend_cute import torch_fns, twin
from .backend_cute.emit import emit
from .diagnostics.model import CodaError
from .ir import interp
from .ir.graph import Program
from .ir.kernels import Plan
from .ops import RENAME
from .passes import saving, training

EXACT, ROUNDED = 1e-6, 0.04  # relative Frobenius norms; constants of derivative rules are f32, operands of products bf16
SIZES = (5, 7, 24, 3)  # of free axes, in turn


@dataclass(frozen=True)
class Finding:
    """One gradient under one save plan. `how`: "oracle", "twin" (float64) or "rounded". Errors are relative; NaN counts as infinite."""

    program: str
    way: str
    gradient: str
    how: str
    error: float

    @property
    def good(self) -> bool:
        return self.error <= (ROUNDED if self.how == "rounded" else EXACT)

    def __str__(self) -> str:
        return f"{'ok  ' if self.good else 'FAIL'} {self.program}, {self.way}: {self.gradient} by {self.how} is off by {self.error:.1e}"


def check(
    program: Program,
    extents: Mapping[str, int] | None = None,
    seed: int = 0,
    given: Mapping[str, torch.Tensor] | None = None,
    most: int | None = None,
    strict: bool = False,
) -> Iterator[Finding]:
    """All findings for a program that has a derivative, under every save plan (`most`: the first so many). `given` are inputs, else random.

    Raises CodaError where the backward has no kernels. Other ways to save may need more of a tile than there is (C06xx), or the whole
    of what runs in chunks (C0415): nobody chose those, and a program that asks for one is refused.
    """
    size = default_extents(program, extents or {})
    given = given or inputs(program, size, seed)
    plan, forward = passes.run(program, strict=strict), passes.prepared(program, strict)
    for way, found in saving.ways(forward, strict)[:most]:
        try:
            made = list(compare(program, training.planned(plan, found), way, given, size))
        except CodaError as e:
            if way == saving.PLANNED or any(not d.code.startswith(("C06", "C0415")) for d in e.diagnostics):
                raise
            continue
        yield from made


def lines(program: Program, seed: int = 0, strict: bool = False, extents: Mapping[str, int] = {}) -> Iterator[tuple[bool, str]]:
    """For people: a line for each save plan and gradient, and whether it is good. Of `extents` those of the program's free axes count."""
    found: dict[tuple[str, str], list[Finding]] = {}
    size = {a.name: extents[a.name] for a in program.axes if a.extent is None and a.name in extents}
    for f in check(program, size, seed, strict=strict):
        found.setdefault((f.way, f.gradient), []).append(f)
    for (way, gradient), results in found.items():
        good = all(f.good for f in results)
        exact = max((f.error for f in results if f.how != "rounded"), default=0.0)
        rounded = [f.error for f in results if f.how == "rounded"]
        text = f"{'ok  ' if good else 'FAIL'} {program.name}, {way}: {gradient} "
        bits = "equal bits" if good else "other bits"
        yield good, text + (f"is off by {exact:.1e} in float64, {rounded[0]:.1e} rounded" if rounded else f"gives {bits}")


def compare(program: Program, plan: Plan, way: str, given: Mapping[str, torch.Tensor], size: Mapping[str, int]) -> Iterator[Finding]:
    """The findings for one way of saving."""
    derived = plan.derived
    assert derived is not None
    fn = function_of(plan)
    cotangents, wanted = autograd(program, given, dict(derived.cotangents), dict(derived.gradients), size)
    exact = _doubles({**given, **cotangents})
    held = {**exact, **interp.run((derived.saving or plan).program, _pick((derived.saving or plan).program, exact), torch, "exact", size)}
    oracle = interp.run(derived.backward.program, _pick(derived.backward.program, held), torch, "exact", size)
    results = {"oracle": oracle}
    start = {**given, **cotangents}
    held = {**start, **interp.run((derived.saving or plan).program, _pick((derived.saving or plan).program, start), torch, "written", size)}
    written = interp.run(derived.backward.program, _pick(derived.backward.program, held), torch, "written", size)
    for how, library in (("twin", torch_fns.Exact()), ("rounded", torch_fns.Written())):
        start = exact if how == "twin" else {**given, **cotangents}
        forward = fn.saving or fn.program
        outputs = twin.run(forward, fn.functions, {a.name: start[a.name] for a in forward.inputs}, f=library, extents=size)
        if fn.saving is not None and how == "rounded":
            plain = twin.run(fn.program, fn.functions, {a.name: start[a.name] for a in fn.program.inputs}, f=library, extents=size)
            for name, value in plain.items():
                same = torch.equal(value.nan_to_num(3.0), outputs[name].nan_to_num(3.0))
                yield Finding(program.name, way, f"{name} with and without saving", "bits", 0.0 if same else float("inf"))
        pool = {**start, **outputs}
        results[how] = twin.run(fn.backward, fn.functions, {a.name: pool[a.name] for a in fn.backward.inputs}, f=library, extents=size)
    for name, truth in wanted.items():
        for how, found in results.items():
            off = relative(found[name], truth)
            if how == "rounded" and off > ROUNDED:  # where terms cancel, rounding shows: then it must be the program's own
                off = min(off, relative(found[name], written[name].double()))
            yield Finding(program.name, way, name, how, off)


def autograd(
    program: Program, given: Mapping[str, Any], cotangents: Mapping[str, str], gradients: Mapping[str, str], size: Mapping[str, int]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random cotangents, of their outputs' dtypes, and the gradients by torch's autograd in float64 of the program as written."""
    leaves = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in _doubles(given).items()}
    out = interp.run(program, leaves, torch, "exact", size)
    seeded = torch.Generator().manual_seed(1)
    dtype = {o.tensor.name: torch_fns.DTYPES[o.tensor.dtype.name] for o in program.outputs}
    chosen = {c: torch.randn(out[o].shape, generator=seeded).to(dtype[o]) for o, c in cotangents.items()}
    loss = sum((out[o] * chosen[c].double()).sum() for o, c in cotangents.items())
    assert isinstance(loss, torch.Tensor)
    sources = [leaves[i] for i in gradients]
    found = torch.autograd.grad(loss, sources, allow_unused=True) if loss.requires_grad else [None] * len(sources)
    return chosen, {g: torch.zeros_like(s) if f is None else f for g, s, f in zip(gradients.values(), sources, found)}


def relative(value: torch.Tensor, truth: torch.Tensor) -> float:
    """The relative Frobenius error; infinite for another shape or where NaN stands in different places."""
    value = value.double()
    if value.shape != truth.shape or not torch.equal(value.isnan(), truth.isnan()):
        return float("inf")
    off = (value - truth).nan_to_num(0.0).norm()
    return float(off / truth.nan_to_num(0.0).norm().clamp(min=1e-9))


def function_of(plan: Plan) -> Any:
    """The emitted function."""
    space: dict[str, Any] = {"__name__": "kernel"}
    exec(compile(emit([plan]), "kernel.py", "exec"), space)
    return next(v for v in space.values() if getattr(v, "program", None) is not None and v.program.name == plan.program.name)


def default_extents(program: Program, given: Mapping[str, int] = {}) -> dict[str, int]:
    """Small extents for free axes that are not given; those that a rename makes one are equal."""
    free = iter(SIZES * len(program.axes))
    size = {a.name: a.extent or given.get(a.name) or next(free) for a in program.axes}
    for e in program.eqns * 2:
        if e.op == RENAME.name:
            axis, to = str(e.attr("axis")), str(e.attr("to"))
            axis, to = (to, axis) if to in given and axis not in given else (axis, to)
            size[to] = size[axis]
    return size


def inputs(program: Program, size: Mapping[str, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs away from kinks: floats in [-1, 1], integers positions along the shortest axis."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for t in program.inputs:
        shape = [size[a] for a in t.axes]
        if t.dtype.kind == "float":
            x = torch.rand(shape, generator=generator) * 2 - 1
        else:
            x = torch.randint(0, max(1, min(n for n in size.values())), shape, generator=generator)
        made[t.name] = x.to(torch_fns.DTYPES[t.dtype.name])
    return made


def _doubles(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.detach().double() if v.is_floating_point() else v for k, v in tensors.items()}


def _pick(program: Program, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {t.name: tensors[t.name] for t in program.inputs}
