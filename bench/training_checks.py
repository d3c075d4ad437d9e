"""Checks of one program's derivative on a device: values against float64, repeatability, and what autograd may do with it.

In: a `Function`, a job of bench/gpu_training.py. Out: what was found, as data for a line of JSON, `ok` among it. On the CPU the twin
stands for the kernels. Non-goals: choosing shapes (`training_cases`), surviving hangs (`gpu_training`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bench.gpu_specs import _bits as bits
from bench.protocol import several
from bench.training_cases import Eager, cotangents, forced, gradients, leaves, truth
from coda_lang.backend_cute import autograd, selfcheck, torch_fns
from coda_lang.backend_cute.derivative import NO, YES
from coda_lang.backend_cute.errors import CallError

RUNS = 20
PATHS = {"cuda": ("kernels", "kernels"), "cpu": ("reference", "planned")}


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """The same bits, tensor by tensor."""
    return all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def tells(fn: Any, got: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]) -> dict[str, Any]:
    """The error of every gradient against float64, beside that of eager bf16 (which bounds it) and of the program as written."""
    exact = truth(fn, torch_fns.Exact(), tensors, given)
    eager = truth(fn, Eager(), tensors, given)
    written = truth(fn, torch_fns.Written(), tensors, given)
    names = [a.name for a, t in zip(fn.program.inputs, tensors, strict=True) if t.requires_grad]
    found = {}
    for name, g, e, by_op, w in zip(names, got, exact, eager, written, strict=True):
        error, bound = selfcheck.error(g, e), 2 * selfcheck.error(by_op, e) + 1e-6
        found[name] = {"error": error, "bound": bound, "written": selfcheck.error(w, e), "ok": error <= bound}
    return found


def check(fn: Any, job: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Forward and backward at one shape, with the default configurations or those that the job forces."""
    fn.objects.forced.clear()
    fn.objects.forced.update(forced(fn, job.get("configs", {})))
    fn.forget()
    tensors = leaves(fn, job["shape"], device)
    before = [t.detach().clone() for t in tensors]
    with torch.no_grad():
        plain = several(fn(*tensors))
    outputs = several(fn(*tensors))
    given = cotangents(outputs)
    kept = [None if g is None else g.clone() for g in given]
    got = gradients(outputs, tensors, given)
    path = (fn.last_path, fn.last_backward)
    repeats = 0
    for _ in range(job.get("runs", RUNS) - 1):
        again = several(fn(*tensors))
        repeats += same([*again, *gradients(again, tensors, given)], [*outputs, *got])
    found: dict[str, Any] = {"gradients": tells(fn, got, tensors, given), "path": path}
    found["repeatable"] = repeats == job.get("runs", RUNS) - 1
    found["outputs_same"] = same(plain, [o.detach() for o in outputs])
    pairs = [(g, k) for g, k in zip(given, kept) if g is not None and k is not None]
    found["unwritten"] = same([t.detach() for t in tensors], before) and same([g for g, _ in pairs], [k for _, k in pairs])
    flags = all(found[k] for k in ("repeatable", "outputs_same", "unwritten"))
    return {"ok": flags and path == PATHS[device] and all(g["ok"] for g in found["gradients"].values()), **found}


# --- what autograd may do -------------------------------------------------------------------------------------------------


def uses(fn: Any, job: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Every use of `USES` at one shape: the name of each with what was wrong, "" where nothing."""
    fn.objects.forced.clear()
    fn._training = None
    found = {}
    for use in USES if device == "cuda" else [u for u in USES if u is not in_a_graph]:
        try:
            found[use.__name__] = use(fn, job["shape"], device) or ""
        except AssertionError as problem:
            found[use.__name__] = f"failed: {problem}"
    return {"ok": not any(found.values()), "uses": found}


def only_what_is_needed(fn: Any, shape: Mapping[str, int], device: str) -> None:
    """Each gradient alone: as when all are asked for, nothing for the others, and fewer kernels."""
    everything = leaves(fn, shape, device)
    given = cotangents(several(fn(*everything)))
    full = dict(zip([n for n, _ in _asked(fn)], gradients(several(fn(*everything)), everything, given)))
    derivative = fn.training(autograd.Eager(fn)).derivative
    counts = []
    for name, _ in _asked(fn):
        tensors = leaves(fn, shape, device, [name])
        outputs = several(fn(*tensors))
        torch.autograd.backward([o for o, g in zip(outputs, given) if g is not None], [g for g in given if g is not None])
        one = {a.name: t.grad for a, t in zip(fn.program.inputs, tensors, strict=True) if t.grad is not None}
        assert list(one) == [name], f"gradients of {list(one)} where only {name} requires one"
        assert selfcheck.error(one[name], full[name]) < 2e-3, f"{name} alone differs by {selfcheck.error(one[name], full[name])}"
        step = derivative.step([YES if a.name == name else NO for a in fn.program.inputs], derivative.smooth)
        counts.append(len(step.program.kernels))
    assert min(counts) < len(fn.backward.kernels), f"{counts} kernels for one gradient, {len(fn.backward.kernels)} for all"


def accumulated(fn: Any, shape: Mapping[str, int], device: str) -> None:
    """Gradients added into buffers of f32 and bf16, as exact as eager ones, and not returned."""
    for dtype, slack in ((torch.float32, 0.0), (torch.bfloat16, 2.0**-8)):
        for name, _ in _asked(fn):
            tensors = leaves(fn, shape, device)
            i = [a.name for a in fn.program.inputs].index(name)
            buffer = torch.randn(tensors[i].shape, device=device).to(dtype)
            start = buffer.clone()
            outputs = several(fn(*tensors, accumulate_into={name: buffer}))
            given = cotangents(outputs)
            torch.autograd.backward([o for o, g in zip(outputs, given) if g is not None], [g for g in given if g is not None])
            assert tensors[i].grad is None, f"the gradient of {name} was returned too"
            place = [n for n, _ in _asked(fn)].index(name)
            exact = truth(fn, torch_fns.Exact(), tensors, given)[place]
            bound = 2 * selfcheck.error(truth(fn, Eager(), tensors, given)[place], exact) + 1e-6 + slack
            error = float((buffer.double() - start.double() - exact).norm() / exact.norm().clamp_min(1e-30))
            if dtype != torch.float32:
                error = selfcheck.error(buffer, start.double() + exact)
            assert error <= bound, f"{name} in {dtype}: off by {error}, may be by {bound}"


def any_cotangents(fn: Any, shape: Mapping[str, int], device: str) -> None:
    """Incoming gradients that are expanded, transposed or strided give the bits that contiguous ones do."""
    tensors = leaves(fn, shape, device)
    outputs = several(fn(*tensors))
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda g: g.flatten()[:1].reshape([1] * g.dim()).expand(g.shape),
        lambda g: g.transpose(0, -1).contiguous().transpose(0, -1),
        lambda g: torch.stack([g, g], -1).select(-1, 1),
    ]
    for i, layout in enumerate(layouts):
        given = [None if g is None else layout(g) for g in cotangents(outputs)]
        dense = [None if g is None else g.contiguous() for g in given]
        one, other = (gradients(several(fn(*tensors)), tensors, g) for g in (given, dense))
        assert same(one, other), f"layout {i} gives other bits"


def in_a_graph(fn: Any, shape: Mapping[str, int], device: str) -> None:
    """Forward and backward captured in a CUDA graph; replays with other data give the bits of an eager call."""
    tensors = leaves(fn, shape, device)
    given = cotangents(several(fn(*tensors)))

    def step() -> list[torch.Tensor]:
        outputs = several(fn(*tensors))
        return [*(o.detach() for o in outputs), *gradients(outputs, tensors, given)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for seed in (5, 6):
        with torch.no_grad():
            for t, fresh in zip(tensors, leaves(fn, shape, device, seed=seed), strict=True):
                t.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        assert same(held, step()), f"replay with seed {seed} differs"


def refuses_twice(fn: Any, shape: Mapping[str, int], device: str) -> None:
    """The gradient of a gradient is an error that names the program."""
    tensors = leaves(fn, shape, device)
    outputs = [o for o in several(fn(*tensors)) if o.requires_grad]
    wanted = [t for t in tensors if t.requires_grad]
    first = torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs], create_graph=True)
    try:
        sum(g.float().square().sum() for g in first).backward()
    except CallError as problem:
        assert fn.program.name in str(problem), problem
    else:
        raise AssertionError("a second derivative was given")


USES = (only_what_is_needed, accumulated, any_cotangents, in_a_graph, refuses_twice)


def _asked(fn: Any) -> list[tuple[str, str]]:
    """Inputs with a gradient, in signature order."""
    has = dict(fn.gradients)
    return [(a.name, has[a.name]) for a in fn.program.inputs if a.name in has]
