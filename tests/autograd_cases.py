"""What the tests of derivatives at run time share: calls on both paths without a GPU, cotangents, autograd's gradients of the reference.

`planned` is the CPU's path, `kernels` the GPU's, with stand-ins for executables and poisoned buffers.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from coda_lang.backend_cute import torch_fns  # noqa: E402
from coda_lang.backend_cute.selfcheck import error  # noqa: E402
from tests import handwritten as hw  # noqa: E402
from tests.standins import StandIns  # noqa: E402

SIZES = {"m": 33, "d": 24, "n": 40, "f": 16}
PATHS = ("planned", "kernels")


class Kernels(StandIns):
    """Stand-ins for every program of a derivative; `calls` has what was launched, in order."""

    def __init__(self, functions, extents, fixed, calls, loops=()):
        super().__init__(functions, extents, fixed, loops)
        self.calls = calls

    def select(self, program, functions):
        return Kernels(functions, self.extents, self.fixed, self.calls, program.loops)


both = pytest.mark.parametrize("path", PATHS, indirect=True)
kernels = pytest.mark.parametrize("path", ["kernels"], indirect=True)
planned = pytest.mark.parametrize("path", ["planned"], indirect=True)


def function(case, path, sizes=SIZES):
    """The callable, and the list that launched kernels are noted in."""
    fn, calls = case.function(), []
    if path == "kernels":
        fixed = {name: size for name, size in case.program.extents if size is not None}
        fn.objects = Kernels(fn.functions, {**{a: sizes.get(a, 5) for a, _ in case.program.extents}, **fixed}, fixed, calls)
    return fn, calls


def leaves(case, sizes=SIZES, needs=None, seed=0):
    """Inputs; those whose gradient is wanted (all that have one) require it."""
    names = [name for name, _ in case.gradients] if needs is None else needs
    made = hw.inputs(case.program, sizes, seed)
    return [t.requires_grad_(a.name in names) for a, t in zip(case.program.inputs, made, strict=True)]


def several(outputs):
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def cotangents(outputs, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(o.shape, generator=gen).to(o.dtype) for o in outputs]


def truth(case, tensors, given, precision=None):
    """Autograd's gradients of the reference; by default in float64."""
    f = precision or torch_fns.Exact()
    copies = [t.detach().to(f.dtype) if t.is_floating_point() and not f.rounds else t.detach().clone() for t in tensors]
    wanted = [c.requires_grad_() for c, t in zip(copies, tensors) if t.requires_grad]
    outs = case.reference(f, *copies)
    used = [(o, g.to(o.dtype)) for o, g in zip(outs, given) if g is not None]
    return torch.autograd.grad([o for o, _ in used], wanted, [g for _, g in used])


def gradients(fn, tensors, given=None, outs=None):
    outs = several(fn(*tensors)) if outs is None else outs
    given = cotangents(outs) if given is None else given
    return torch.autograd.grad(outs, [t for t in tensors if t.requires_grad], given), given


def agree(got, want, eager=None, bound=8e-3):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        limit = bound if eager is None else 2 * error(eager[i], w) + bound
        assert g.shape == w.shape and error(g, w) <= limit, (i, error(g, w), limit)


def saved(fn, *tensors):
    """The outputs, and the data that autograd keeps."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outs = fn(*tensors)
    return several(outs), kept
