"""What bench/gpu_training.py runs and what it is compared with: programs, shapes, oracles, and the objects that calls need.

Oracles of gradients: torch's autograd of the program in float64; of the program as an eager bf16 model computes it (`Eager`); of the
program as written (f32 inside). Everything here works without a GPU. Non-goals: launching, measuring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu_specs import LLAMA, VOCABULARY, extents_of
from coda_lang.backend_cute import autograd, compile, configs, host, selfcheck, spec, torch_fns
from coda_lang.backend_cute.binding import Binding
from coda_lang.backend_cute.derivative import NO, SUM, YES, extents
from coda_lang.backend_cute.errors import CallError
from coda_lang.backend_cute.function import Compiled

ROOT = Path(__file__).resolve().parent.parent
RAGGED = (1000, 1003, 264)
SHAPES = ((1, 200, 136), (7, 1000, 515), RAGGED, (4096, 1000, 1000))  # rows, columns, depth
SMALL = (40, 72, 48)
WRITTEN = torch_fns.Written()
SAMPLES = 3  # configurations of each kernel of a backward
USED = ("linear_bf16", "swiglu", "linear_bias_gelu", "geglu", "lm_head_logits")  # programs whose uses by autograd are checked
SANITIZED = ("linear_bf16", "swiglu", "linear_bias_gelu", "geglu", "lm_head")  # programs that run under compute-sanitizer


def sources() -> list[Path]:
    """The files whose programs are run."""
    return [*sorted((ROOT / "specs").glob("*.coda")), ROOT / "bench" / "training.coda"]


# --- shapes and inputs ----------------------------------------------------------------------------------------------------


def shapes_of(fn: Any) -> list[dict[str, int]]:
    """The distinct shapes a program's gradients are checked at, one of LLaMA-3-8B last."""
    wide = VOCABULARY if any(a in ("v", "vocab") for a, _ in fn.program.extents) else LLAMA["n"]
    found: list[dict[str, int]] = []
    for sizes in (*SHAPES, (LLAMA["m"], wide, LLAMA["k"])):
        shape = shape_of(fn, sizes)
        if shape is not None and shape not in found:
            found.append(shape)
    return found


def shape_of(fn: Any, sizes: tuple[int, int, int]) -> dict[str, int] | None:
    """Extents near (rows, columns, depth) that forward and backward take; None where there are none."""
    for unit in (1, 8, 64):
        m, n, k = sizes
        shape = extents_of(fn.program, m, -(-n // unit) * unit, -(-k // unit) * unit)
        if shape is None:
            continue
        try:
            fn.bind(blanks(fn.program.inputs, shape))
        except CallError:
            continue
        return shape
    return None


def blanks(arguments: Sequence[spec.Argument], shape: Mapping[str, int]) -> list[torch.Tensor]:
    """Tensors without memory."""
    return [torch.empty([shape[x] for x in a.axes], dtype=torch_fns.DTYPES[a.dtype], device="meta") for a in arguments]


def leaves(fn: Any, shape: Mapping[str, int], device: str, needs: Sequence[str] | None = None, seed: int = 0) -> list[torch.Tensor]:
    """Random inputs; those named (all that have a gradient) require one."""
    names = [name for name, _ in fn.gradients] if needs is None else needs
    made = selfcheck.inputs(fn.program, dict(shape), seed, device)
    return [t.requires_grad_(a.name in names) for a, t in zip(fn.program.inputs, made, strict=True)]


def cotangents(outputs: Sequence[torch.Tensor], seed: int = 1) -> list[torch.Tensor | None]:
    """Random incoming gradients, None for outputs without a derivative."""
    gen = torch.Generator(outputs[0].device).manual_seed(seed)
    return [torch.randn(o.shape, generator=gen, device=o.device).to(o.dtype) if o.requires_grad else None for o in outputs]


def gradients(outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Autograd's gradients of the tensors that require one; zeros where nothing reaches them."""
    pairs = [(o, g.to(o.dtype).reshape(o.shape)) for o, g in zip(outputs, given, strict=True) if g is not None and o.requires_grad]
    wanted = [t for t in tensors if t.requires_grad]
    found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


# --- oracles --------------------------------------------------------------------------------------------------------------


class Eager:
    """A program as an eager bf16 model runs it, operation by operation: each computes inside in f32, as torch's kernels do, and rounds its
    result to its operands' type; literals promote nothing; products of two types round the wider operand, as autocast does."""

    rounds = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        inside = getattr(WRITTEN, name)

        def call(*args: Any, **options: Any) -> Any:
            result = inside(*args, **options)
            kinds = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
            return result.to(functools.reduce(torch.promote_types, kinds)) if kinds and result.is_floating_point() else result

        return call

    def contract(self, x: torch.Tensor, y: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        narrow = min((x.dtype, y.dtype), key=lambda t: t.itemsize)
        return WRITTEN.contract(x.to(narrow), y.to(narrow), dims).to(narrow)

    def scalar(self, x: Any, rank: int, device: Any) -> torch.Tensor:
        value = WRITTEN.scalar(x, rank, device)
        return value.bfloat16() if value.is_floating_point() else value

    def bf16(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16)

    def f16(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float16)

    def f32(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32)

    def store(self, x: torch.Tensor, *where: Any) -> torch.Tensor:
        return WRITTEN.store(x, *where)


def truth(fn: Any, library: Any, tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Gradients of the reference by torch's autograd, computed by `library` (`Exact` in float64)."""
    exact = not library.rounds
    copies = [t.detach().double() if exact and t.is_floating_point() else t.detach().clone() for t in tensors]
    for copy, t in zip(copies, tensors):
        copy.requires_grad_(t.requires_grad)
    return gradients(fn._reference(library, *copies), copies, given)


# --- objects --------------------------------------------------------------------------------------------------------------


class Chosen(Compiled):
    """Executables compiled on demand; `forced` says which configuration a kernel gets instead of its default."""

    def __init__(self, program: spec.Program, functions: Any, forced: dict[str, spec.Config], saving: spec.Program | None = None) -> None:
        super().__init__(program, functions, saving)
        self.forced = forced

    def config(self, launch: spec.Launch, extents: Mapping[str, int], device: Any) -> spec.Config:
        return self.forced.get(launch.name) or super().config(launch, extents, device)

    def select(self, program: spec.Program, functions: Any) -> Chosen:
        found = type(self)(program, functions, self.forced)
        found.wholes = self.wholes
        return found


class Recorder(Chosen):
    """Compiles nothing and notes what would have to be compiled, in `jobs`."""

    jobs: list[compile.Job] = []

    def executables(self, wanted: Sequence[tuple[spec.Kernel, spec.Config | None]], device: Any) -> list[Callable[..., None]]:
        for kernel, config in wanted:
            self.jobs.append(compile.job(kernel, config, self.functions, self.fixed, self.arch))
        return [lambda *tensors: None for _ in wanted]


def forced(fn: Any, names: Mapping[str, str]) -> dict[str, spec.Config]:
    """The configurations that a job names by kernel."""
    kernels = {launch.name: launch for p in (fn.program, fn.saving, fn.backward) if p for launch in spec.launches(p)}
    return {name: next(c for c in configs.offered(kernels[name]) if c.key == key) for name, key in names.items()}


def samples(fn: Any, compiled: Sequence[compile.Job]) -> list[dict[str, str]]:
    """`SAMPLES` choices of a configuration for every launch of the backward: those in `compiled` first, then others of the offer."""
    chosen: list[dict[str, str]] = [{} for _ in range(SAMPLES)]
    for gemm in spec.launches(fn.backward):
        offered = [c.key for c in configs.offered(gemm)]
        first = [j.config.key for j in compiled if j.kernel == gemm and j.config]
        keys = list(dict.fromkeys([*first, *offered[:: -max(len(offered) // SAMPLES, 1)]]))
        for i, choice in enumerate(chosen):
            if keys:
                choice[gemm.name] = keys[i % len(keys)]
    return [c for i, c in enumerate(chosen) if c and c not in chosen[:i]]


def masks(fn: Any, kind: str) -> Iterator[tuple[int, ...]]:
    """The gradients that the calls of one kind of job ask for."""
    names = [a.name for a in fn.program.inputs]
    has = [name for name, _ in fn.gradients]
    yield tuple(YES if name in has else NO for name in names)
    if kind == "uses":
        for one in has:
            yield tuple(YES if name == one else NO for name in names)
            yield tuple(SUM if name == one else YES if name in has else NO for name in names)


def needed(fn: Any, job: Mapping[str, Any], recorder: type[Recorder] = Recorder) -> list[compile.Job]:
    """The objects that the calls of a job launch; plans them without data, for executables of this kind."""
    Recorder.jobs = []
    choice = forced(fn, job.get("configs", {}))
    device, tensors = torch.device("cpu"), blanks(fn.program.inputs, job["shape"])
    binding = fn.bind(tensors)

    def plan(program: spec.Program, functions: Any, known: Binding) -> None:
        host.plan(program, known, blanks(program.inputs, known.extents), device, recorder(program, functions, choice, fn.saving))

    if job["kind"] != "training":  # a forward without gradients
        plan(fn.program, fn.functions, binding)
    if fn.backward is not None and job["kind"] != "forward":
        derivative = fn.training(autograd.Eager(fn)).derivative
        for asked in masks(fn, job["kind"]):
            saving, step = derivative.saving([bool(a) for a in asked]), derivative.step(asked, derivative.smooth)
            if saving.program is not None or job["kind"] == "training":
                plan(saving.program or fn.program, saving.functions, binding)
            plan(step.program, step.functions, Binding(extents(step.program, binding.extents)))
    return list(dict.fromkeys(Recorder.jobs))
