"""`python kernel.py`: does the emitted text compute what its program says?

In: `Function`s and a command line (`--shape m=…,d=…`). Out: a line per output and an exit status, 0 only if every comparison holds.
Compared with the program as written in float64: the planned computation in float64 (a wrong line or record shows at once), the
planned computation with the kernels' rounding, and, where there is a Hopper GPU, the kernels. Errors are relative Frobenius norms;
rounded outputs may be off by twice what the program as written is off in the same precision, plus 1e-6; where they are a few numbers, by
twice what it is off at most in several draws.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import autograd, derivative, eager, spec, torch_fns
from .binding import bind, extents_in
from .errors import CallError
from .torch_fns import DTYPES

EXACT = 1e-9  # for float64 against float64
EXACT_GRADIENT = 1e-6  # constants of derivatives are f32

# Extents to try for the free axes, in turn: ragged, regular, tiny.
NUMBERS, DRAWS = 16, 12  # of an output with fewer numbers than this, eager PyTorch's error is the most of so many draws
MOST = 16384  # positions of a chunk for which more than one are tried
SHAPES = ((133, 72, 95, 40, 21, 9), (256, 192, 320, 64, 128, 48), (1, 8, 3, 16, 5, 24))


def main(functions: Sequence[Any], argv: Sequence[str] | None = None) -> int:
    """Check every function at several shapes; the process's exit status."""
    parser = argparse.ArgumentParser(description="Check the emitted functions against their programs in float64.")
    parser.add_argument("--shape", metavar="m=…,d=…", type=_shape, help="extents of the free axes; those left out are chosen")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "cpu"
    print(f"checking on the {'GPU, kernels included' if device == 'cuda' else 'CPU; the kernels need a Hopper GPU'}")
    good = True
    if unknown := set(options.shape or ()) - {a for fn in functions for a in _free(fn.program)}:
        known = sorted({a for fn in functions for a in _free(fn.program)})
        raise SystemExit(f"there is no free axis {min(unknown)!r}; the free axes are {', '.join(known)}")
    for fn in functions:
        try:
            shapes = list(_shapes(fn.program, options.shape, [loop for p in fn.programs for loop in p.loops]))
        except CallError as problem:
            print(problem, file=sys.stderr)
            free = ",".join(f"{name}=…" for name, size in fn.program.extents if size is None)
            if options.shape is None:
                print(f"  help: no extents tried here satisfy that: choose some, --shape {free}", file=sys.stderr)
            return 2
        for extents in shapes:
            good &= check(fn, extents, options.seed, device)
            good &= fn.backward is None or check_gradients(fn, extents, options.seed, device)
    print("all outputs agree" if good else "SOME OUTPUTS ARE WRONG")
    return 0 if good else 1


def check(fn: Any, extents: dict[str, int], seed: int, device: str) -> bool:
    """Compare one function at one shape; prints a line per output."""
    tensors = inputs(fn.program, extents, seed, device)
    with torch.no_grad():
        exact, baseline = _tuple(fn.reference(*tensors, exact=True)), _tuple(fn.reference(*tensors, library=eager.Eager()))
        results = [("plan in float64", _tuple(fn.reference_planned(*tensors, exact=True)))]
        results.append(("plan", _tuple(fn.reference_planned(*tensors))))
        if device == "cuda":
            results.append(("kernels", _tuple(fn(*tensors))))
        unavoidable = _unavoidable(fn, extents, seed, device, [error(b, e) for b, e in zip(baseline, exact)], exact)
    shape = ", ".join(f"{a}={n}" for a, n in extents.items())
    good = True
    for i, output in enumerate(fn.program.outputs):
        for label, values in results:
            bound = EXACT if values[i].dtype == torch.float64 else eager.bound(unavoidable[i], fn.program, extents, device)
            found = error(values[i], exact[i])
            fits = found <= bound and values[i].shape == exact[i].shape
            where = f"{fn.program.name}({shape}) {output.name}"
            print(f"{'ok  ' if fits else 'FAIL'} {where}: {label} is off by {found:.2e}, may be by {bound:.2e}")
            good &= fits
    return good


def _unavoidable(
    fn: Any, extents: dict[str, int], seed: int, device: str, found: list[float], exact: tuple[torch.Tensor, ...]
) -> list[float]:
    """What eager PyTorch is off by in each output: as `found`, but where an output is a few numbers the most of several draws, since one
    draw may be lucky."""
    few = [i for i, e in enumerate(exact) if 0 < e.numel() < NUMBERS]
    for other in range(seed + 1, seed + DRAWS) if few else ():
        tensors = inputs(fn.program, extents, other, device)
        exact, drawn = _tuple(fn.reference(*tensors, exact=True)), _tuple(fn.reference(*tensors, library=eager.Eager()))
        for i in few:
            off = error(drawn[i], exact[i])
            found[i] = max(found[i], off) if math.isfinite(off) else found[i]
    return found


def check_gradients(fn: Any, extents: dict[str, int], seed: int, device: str) -> bool:
    """Compare the derived backward at one shape with torch's derivative of the program in float64; prints a line per gradient."""
    tensors = inputs(fn.program, extents, seed, device)
    leaves = [t.double() if t.is_floating_point() else t for t in tensors]
    names = [a.name for a in fn.program.inputs]
    wanted = {name: leaves[names.index(name)].requires_grad_() for name, _ in fn.gradients}
    outs = dict(zip([o.name for o in fn.program.outputs], fn.written(leaves, fn.bind(tensors), torch_fns.Exact()), strict=True))
    gen = torch.Generator(device).manual_seed(seed + 1)
    given = {o: torch.randn(outs[o].shape, generator=gen, device=device) for o, _ in fn.cotangents if outs[o].requires_grad}
    given = {o.name: given[o.name].to(DTYPES[o.dtype]) for o in fn.program.outputs if o.name in given}
    pairs = [(outs[o], g.double()) for o, g in given.items()]
    found = torch.autograd.grad([o for o, _ in pairs], list(wanted.values()), [g for _, g in pairs], allow_unused=True)
    exact = {n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(wanted.items(), found, strict=True)}
    results = [("plan in float64", autograd.gradients_planned(fn, tensors, given), dict.fromkeys(exact, EXACT_GRADIENT))]
    if device == "cuda":
        rounded = autograd.gradients_planned(fn, tensors, given, exact=False)
        known = derivative.extents(fn.backward, fn.bind(tensors).extents)
        bounds = {n: eager.bound(error(rounded[n].reshape(e.shape), e), fn.backward, known, device) for n, e in exact.items()}
        results.append(("kernels", _by_kernels(fn, tensors, given), bounds))
    shape = ", ".join(f"{a}={n}" for a, n in extents.items())
    good = True
    for n, truth in exact.items():
        for label, values, bounds in results:
            off = error(values[n].reshape(truth.shape), truth)
            print(f"{'ok  ' if off <= bounds[n] else 'FAIL'} {fn.program.name}({shape}) gradient of {n}: ", end="")
            print(f"{label} is off by {off:.2e}, may be by {bounds[n]:.2e}")
            good &= off <= bounds[n]
    return good


def _by_kernels(fn: Any, tensors: Sequence[torch.Tensor], given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients that a call and its backward give."""
    gradient = {name for name, _ in fn.gradients}
    leaves = {a.name: t.detach().requires_grad_(a.name in gradient) for a, t in zip(fn.program.inputs, tensors, strict=True)}
    outs = dict(zip([o.name for o in fn.program.outputs], _tuple(fn(**leaves)), strict=True))
    wanted = [leaves[name] for name, _ in fn.gradients]
    found = torch.autograd.grad([outs[o] for o in given], wanted, list(given.values()), allow_unused=True)
    return {n: torch.zeros_like(w) if g is None else g for (n, _), w, g in zip(fn.gradients, wanted, found, strict=True)}


def error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """The relative Frobenius error; infinite where NaN or infinity stand in different places."""
    a, b = value.double(), truth.double()
    if a.shape != b.shape:
        return float("inf")
    odd = ~torch.isfinite(b)
    if bool((torch.isfinite(a) == odd).any()) or not torch.equal(a[odd].nan_to_num(3.0), b[odd].nan_to_num(3.0)):
        return float("inf")
    a, b = a[~odd], b[~odd]
    return float((a - b).norm() / b.norm().clamp_min(1e-30)) if a.numel() else 0.0


def inputs(program: spec.Program, extents: dict[str, int], seed: int, device: str) -> list[torch.Tensor]:
    """Random inputs of declared shape, scaled so that products stay near 1; integers lie inside every axis."""
    gen = torch.Generator(device).manual_seed(seed)
    made = []
    for a in program.inputs:
        shape = [extents[x] for x in a.axes]
        if a.dtype in ("i32", "i64"):
            t = torch.randint(0, max(min(extents.values(), default=1), 1), shape, generator=gen, device=device)
        elif a.dtype == "bool":
            t = torch.randint(0, 2, shape, generator=gen, device=device)
        else:
            t = torch.randn(shape, generator=gen, device=device)
            t = t * max(shape[-1], 1) ** -0.25 if len(shape) > 1 else t
        made.append(t.to(DTYPES[a.dtype]))
    return made


def _shapes(program: spec.Program, wanted: dict[str, int] | None, loops: Sequence[spec.Loop] = ()) -> Iterator[dict[str, int]]:
    """Extents to check at: those given, or several that satisfy the shape contract, the first with more than one chunk in each of `loops`.

    Raises CallError where none does.
    """
    free = _free(program)
    fixed = {name: size for name, size in program.extents if size is not None}
    wanted = wanted or {}
    inner = {a: min(_beside(a, program.inputs, fixed), _beside(a, program.outputs, fixed)) for a in free}
    found: list[dict[str, int]] = []
    problem: CallError | None = None
    for sizes in SHAPES:
        for unit in (1, 8, 64, 128):
            sizes_now = itertools.cycle(-(-n // unit) * unit for n in sizes)
            chosen = {a: _outer(n, inner[a], unit) for a, n in zip(free, sizes_now)}
            chosen |= {} if found else {loop.axis: loop.size * 3 // 2 + 1 for loop in loops if loop.size <= MOST}
            extents = {**fixed, **{a: wanted.get(a, n) for a, n in chosen.items()}}
            try:
                bind(program, [tuple(extents[x] for x in a.axes) for a in program.inputs])
            except CallError as e:
                problem = e
                continue
            if extents not in found:
                found.append(extents)
            break
    if not found and problem:
        raise problem
    yield from found


def _free(program: spec.Program) -> list[str]:
    """The axes whose extents a call may choose."""
    return [name for name, size in program.extents if size is None]


def _beside(axis: str, tensors: Sequence[spec.Argument], fixed: dict[str, int]) -> int:
    """The product of the fixed extents that stand with an axis in a tensor, at most."""
    return max([math.prod(fixed.get(x, 1) for x in t.axes) for t in tensors if axis in t.axes], default=1)


def _outer(size: int, inner: int, unit: int) -> int:
    """The extent of an axis that stands beside `inner` fixed ones: fewer, but not one, for a quick check."""
    return size if inner == 1 or size == 1 else max(size // inner, 3 * unit)


def _shape(text: str) -> dict[str, int]:
    try:
        return extents_in(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
