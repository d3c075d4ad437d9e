"""Stand-ins for a model's programs: the twin of their kernels, forward and derived backward, in float64 or rounding where kernels do.

In: a model of `coda_lang.nn`. Out: the same model, whose calls run what the kernels compute. Its own derivative is used, never torch's.
"""

from __future__ import annotations

import torch

from coda_lang.backend_cute import arguments, autograd


class Planned:
    """A model's programs by name, each run by its twin."""

    def __init__(self, programs, exact):
        self.programs, self.exact = programs, exact

    def __getattr__(self, name):
        return PlannedFunction(getattr(self.programs, name), self.exact)


class PlannedFunction:
    """A differentiable call that takes tensors of any float type."""

    def __init__(self, fn, exact):
        self.fn, self.exact = fn, exact

    def __call__(self, *tensors, outputs=None):
        names = [o.name for o in self.fn.program.outputs]
        results = Call.apply(self.fn, self.exact, *tensors)
        chosen = [r for n, r in zip(names, results, strict=True) if outputs in (None, n)]
        return chosen[0] if len(chosen) == 1 else chosen


class Call(torch.autograd.Function):
    """The planned forward, and the derived backward's plan."""

    @staticmethod
    def forward(ctx, fn, exact, *tensors):
        ctx.fn, ctx.exact, ctx.binding = fn, exact, fn.bind(tensors)
        ctx.save_for_backward(*tensors)
        values = arguments.declared(fn.program, tensors, ctx.binding, torch.device("cpu"))
        made = autograd.run_twin(fn.program, fn.functions, values, ctx.binding.extents, exact=exact)
        return tuple(r.reshape(ctx.binding.returned(o)) for r, o in zip(made, fn.program.outputs, strict=True))

    @staticmethod
    def backward(ctx, *grads):
        outputs = ctx.fn.program.outputs
        given = {o.name: g.reshape(ctx.binding.declared(o)) for o, g in zip(outputs, grads, strict=True)}
        found = autograd.gradients_planned(ctx.fn, ctx.saved_tensors, given, exact=ctx.exact)
        names = [a.name for a in ctx.fn.program.inputs]
        return None, None, *(found[n].reshape(t.shape) if n in found else None for n, t in zip(names, ctx.saved_tensors, strict=True))


def planned(model, exact):
    """Let a model run by twins; float64 where `exact`."""
    for part in model.modules():
        if "programs" in vars(part):
            part.programs = Planned(part.programs, exact)
    return model.double() if exact else model


def on_stand_ins(model, rows):
    """Let a model of `coda_lang.nn` run the way that CUDA tensors go, with stand-ins for kernels (needs the fixture `path`)."""
    from bench.gpu_models import calls_of

    made = {fn.program.name.split("_")[-1]: by_stand_ins(fn, extents) for fn, extents in calls_of(model, rows)}
    for part in model.modules():
        if "programs" in vars(part):
            part.programs = Named(made)
    return model


def by_stand_ins(fn, extents):
    """A function like `fn` for calls of these extents, whose kernels are stand-ins."""
    from coda_lang.backend_cute import derivative
    from coda_lang.backend_cute.function import fixed
    from tests.autograd_cases import Kernels

    known = {**derivative.extents(fn.backward, extents), **extents}
    objects = Kernels(fn.functions, known, fixed(fn.program), [], fn.program.loops)
    return type(fn)(
        fn.program, fn.functions, fn._reference, saving=fn.saving, backward=fn.backward, residuals=fn.residuals,
        cotangents=fn.cotangents, gradients=fn.gradients, objects=objects,
    )  # fmt: skip


class Named:
    """Functions by name."""

    def __init__(self, functions):
        vars(self).update(functions)

    def last_path(self):
        return " and ".join(sorted({fn.last_path for fn in vars(self).values()}))
