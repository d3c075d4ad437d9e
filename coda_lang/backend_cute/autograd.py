"""Calls whose results autograd can differentiate, by the program's derived backward.

In: a `Function` and the tensors of a call. Out: its outputs with a backward, the same bits as without. On CUDA tensors forward and
backward run kernels. On CPU tensors the forward is the reference and the backward is the derived backward program too, executed by the
twin: what trains on a CPU is what trains on a GPU; torch's derivative of the reference is never used.

Only what is needed runs: a gradient that no input needs, or that no cotangent reaches, costs neither kernels nor stores nor saved
tensors. What is saved goes through `save_for_backward`, so changing it in place is noticed, and hooks (checkpointing, offloading) work.
Nothing given is written to, but the buffers of `accumulate_into`.
`Eager` runs things at once; `torch_ops` has another way, through registered operators, for compilers and tracers.
Non-goals: what to run (`derivative`), planning a launch (`host`), second derivatives (refused where they are asked for).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from . import accumulate, arguments, donate, errors, host, plans, schedules, spec, torch_fns, twin
from .binding import Binding
from .derivative import NO, YES, Derivative, Saving, Step, extents
from .nodes import Backward, Extents, Gradient, Kind, Place, giver, picker
from .prune import prune


class Way(Protocol):
    """How a forward and a backward are run."""

    def forward(self, saving: Saving, tensors: Sequence[Any]) -> tuple[list[torch.Tensor], Extents]:
        """The caller's outputs and `saving.extra`, and the extent of every axis."""

    def backward(self, step: Step, given: Sequence[Any], known: Extents) -> list[torch.Tensor]:
        """The results of `step.program`, with one dim per axis; `given` in the order of its inputs."""

    def plan(self, saving: Saving, key: tuple | None) -> plans.Plan | None:
        """What `forward` runs for calls of this kind and nothing besides; None where it is more than a plan."""

    def plan_backward(self, step: Step, given: Sequence[Any], known: Extents, owned: Collection[str] = ()) -> plans.Plan | None:
        """The same of `backward`; arguments in `owned` may be overwritten."""


class Training:
    """Differentiable calls of one function, run in one way; `buffers` are added to instead of giving gradients."""

    def __init__(self, fn: Any, derivative: Derivative, way: Way, buffers: Mapping[int, torch.Tensor] = {}) -> None:
        self.fn, self.derivative, self.way, self.buffers = fn, derivative, way, dict(buffers)
        self.count, self.smooth = len(derivative.outputs), all(derivative.smooth)
        self.kinds: plans.Kept = plans.Kept()
        self.argument = {a.name: a for a in derivative.program.inputs + derivative.program.outputs}

    def __call__(self, tensors: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The outputs. The tensors are those of the signature, some of which need a gradient."""
        if torch._C._are_functorch_transforms_active():
            raise errors.refuse(
                errors.TRANSFORM,
                f"{self.fn.program.name} cannot be differentiated inside a torch.func transform (grad, vmap, jvp)",
                help="use torch.autograd.grad, or transform the plain torch program, "
                f"{self.fn.program.name}.reference(...), which follows torch's rules of differentiation",
            )
        return Gradient.apply(self, *tensors)

    def forward(self, ctx: Any, tensors: tuple) -> tuple[torch.Tensor, ...]:
        """`Kind.forward`, for calls of a kind not met before, or of no kind."""
        needs, key = ctx.needs_input_grad[1:], arguments.key(tensors)
        kind = self.kinds.get(key) if key is not None else None
        if kind is not None:
            return kind.forward(ctx, tensors)
        saving = self.derivative.saving(needs)
        results, extent = self.way.forward(saving, tensors)
        available = (*tensors, *results)
        kept = [available[i] for i in saving.places]
        places = [i for i, t in enumerate(tensors) if isinstance(t, torch.Tensor)]
        edges = tuple((i, edge) for edge, i in enumerate(places) if saving.asked[i])
        kind = Kind(self, saving, extent, [t.shape if isinstance(t, torch.Tensor) else None for t in tensors], edges)
        plan = self.way.plan(saving, key)
        if plan is not None and not any(isinstance(v, (float, int)) for v in kept):
            kind.plan, kind.keep = plan, picker(saving.places)
            self.kinds.keep(key, kind)
        ctx.kind = kind
        ctx.numbers = [v if isinstance(v, (float, int)) else None for v in kept]
        ctx.save_for_backward(*[None if isinstance(v, (float, int)) else v for v in kept])
        return self.outputs(ctx, results)

    def outputs(self, ctx: Any, results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The caller's outputs, as a node gives them."""
        ctx.set_materialize_grads(False)
        outputs = tuple(results[: self.count])
        if not self.smooth:
            ctx.mark_non_differentiable(*[o for o, smooth in zip(outputs, self.derivative.smooth) if not smooth])
        return outputs

    def learn(self, kind: Kind, key: tuple, saved: tuple, cotangents: tuple) -> Backward | None:
        """How backwards of a kind are made, where one is nothing but a plan over saved tensors and cotangents as they come."""
        asked, saved_key, cotangents_key = key
        if kind.plan is None or saved_key is None or cotangents_key is None or max(asked) > YES:
            return None
        step = self.derivative.step(asked, [g is not None for g in cotangents])
        if not (step.program.inputs and step.program.outputs) or any(isinstance(place, tuple) for place in step.gives):
            return None
        reads = []
        for source, argument in zip(step.reads, step.program.inputs):
            if isinstance(source, str):
                reads.append(kind.saving.kept.index(source))
            elif source >= 0 and getattr(cotangents[source], "dtype", None) is torch_fns.DTYPES[argument.dtype]:
                reads.append(len(kind.saving.kept) + source)
            else:
                return None
        pick = picker(reads)
        given = pick((*saved, *cotangents))
        plan = self.way.plan_backward(step, given, kind.extents)
        if plan is None:
            return None
        sizes = extents(step.program, kind.extents)
        declared = [tuple(sizes[a] for a in o.axes) for o in step.program.outputs]
        places: list[Place | None] = []
        for place, shape in zip(step.gives, kind.shapes, strict=True):
            there = isinstance(place, int)  # dims that arrived merged or split come back so
            places.append((place, None if declared[place] == tuple(shape) else shape) if there else None)  # type: ignore[arg-type, index]
        kind.steps[key] = Backward(plan, pick, giver(places), *self._donating(kind, step, given))
        return kind.steps[key]

    def _donating(self, kind: Kind, step: Step, given: Sequence[Any]) -> tuple[plans.Plan | None, tuple[int, ...]]:
        """The plan that overwrites what it may, and which of its arguments; only what the saving forward made for the backward alone."""
        names = [a.name for a in step.program.inputs]
        owned = [name for name, source in zip(names, step.reads) if source in kind.saving.extra]
        if not donate.pairs(step.program, owned, donate.wanted()):
            return None, ()
        plan = self.way.plan_backward(step, given, kind.extents, owned)
        donors = tuple(names.index(name) for name in plan.over.values()) if plan is not None else ()
        return (plan, donors) if donors else (None, ())

    def backward(self, ctx: Any, cotangents: tuple, asked: tuple[int, ...], saved: tuple) -> tuple[torch.Tensor | None, ...]:
        """`Kind.backward`, where it is none of its steps: a gradient an input, None where none is asked for."""
        known = ctx.kind.extents
        kept = {n: t if t is not None else v for n, t, v in zip(ctx.kind.saving.kept, saved, ctx.numbers or saved)}
        step = self.derivative.step(asked, [g is not None for g in cotangents])
        kept |= {n: self.buffers[i].view([known[x] for x in self._axes(step, n)]) for n, i in step.buffers.items()}
        given = [
            kept[source] if isinstance(source, str) else _cotangent(cotangents, source, a, known)
            for source, a in zip(step.reads, step.program.inputs)
        ]
        if step.program.inputs:
            results = self.way.backward(step, given, known) if step.program.outputs else []
        else:  # gradients that depend on nothing, not even on a cotangent, are zero
            sizes = extents(step.program, known)
            device = next((g.device for g in cotangents if g is not None), None)
            made = [([sizes[a] for a in o.axes], torch_fns.DTYPES[o.dtype]) for o in step.program.outputs]
            results = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in made]
        gradients: list[torch.Tensor | None] = []
        for i, place in enumerate(step.gives):
            if place is None:
                gradients.append(None)
                continue
            if isinstance(place, int):
                g = results[place]
            elif isinstance(place[0], str):
                g = kept[place[0]].clone()
            else:
                g = _cotangent(cotangents, place[0], self.argument[self.derivative.inputs[i]], known)
            if asked[i] > YES:
                accumulate.settle(self.buffers[i], g, i in step.buffers.values())
                gradients.append(None)
            else:
                gradients.append(g if g.shape == ctx.kind.shapes[i] else g.reshape(ctx.kind.shapes[i]))
        return None, *gradients

    def _axes(self, step: Step, name: str) -> tuple[str, ...]:
        return next(a.axes for a in step.program.inputs if a.name == name)


def _cotangent(cotangents: Sequence[torch.Tensor | None], place: int, argument: spec.Argument, known: Extents) -> torch.Tensor:
    """The cotangent at a place in its declared type; zeros where there is none."""
    g = cotangents[place] if place >= 0 else None
    dtype = torch_fns.DTYPES[argument.dtype]
    if g is None:
        device = next(t for t in cotangents if t is not None).device
        return torch.zeros([known[a] for a in argument.axes], dtype=dtype, device=device)
    return (g if g.dtype is dtype else g.to(dtype)).resolve_neg()


class Eager:
    """Runs at once: kernels on CUDA tensors; on CPU tensors the reference forward, the twin for residuals and for the backward."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.axes = [axis for axis, _ in fn.program.extents]
        self.runners: dict[int, Runner] = {}  # by the identity of what they run, which the derivative keeps for good
        self.residual: dict[int, tuple[spec.Program, Mapping[str, Any]]] = {}

    def runner(self, of: Saving | Step) -> Runner:
        """What runs a program of the derivative."""
        if id(of) not in self.runners:
            assert of.program is not None
            self.runners[id(of)] = Runner(of.program, of.functions, self.fn.objects.select(of.program, of.functions))
        return self.runners[id(of)]

    def forward(self, saving: Saving, tensors: Sequence[Any]) -> tuple[list[torch.Tensor], Extents]:
        """The plain forward where that is all; else the saving one."""
        fn = self.fn
        if saving.program is None:
            return fn.run(tensors)
        runner = self.runner(saving)
        key = arguments.key(tensors)
        plan = runner.plans.get(key) if key is not None else None
        if plan is None:
            device = arguments.check(fn.program, tensors)
            if not arguments.runs_kernels(device):
                results, known = fn.run(tensors)
                return results + self._residuals(saving, tensors, known), known
            plan = runner.plan(key, tensors, fn.bind(tensors), device)
        fn.last_path = "kernels"
        return plan.run(tensors), plan.extents

    def _residuals(self, saving: Saving, tensors: Sequence[Any], known: Extents) -> list[torch.Tensor]:
        if id(saving) not in self.residual:
            assert saving.program is not None
            self.residual[id(saving)] = prune(saving.program, saving.functions, saving.extra)
        program, functions = self.residual[id(saving)]
        values = arguments.declared(program, tensors, Binding(dict(known)), arguments.device_of(tensors))
        return run_twin(program, functions, values, known, objects=self.fn.objects)

    def backward(self, step: Step, given: Sequence[Any], known: Extents) -> list[torch.Tensor]:
        """The gradients with one dim per axis."""
        plan = self.plan_backward(step, given, known)
        if plan is not None:
            self.fn.last_backward = "kernels"
            return plan.run(given)
        self.fn.last_backward, binding = "planned", Binding(extents(step.program, known))
        values = arguments.declared(step.program, given, binding, arguments.device_of(given))
        return run_twin(step.program, step.functions, values, binding.extents, objects=self.runner(step).objects)

    def _key(self, key: tuple | None, known: Extents) -> tuple | None:
        """Of a backward, whose arguments may not tell every extent."""
        return None if key is None else (key, *[known[a] for a in self.axes])

    def plan(self, saving: Saving, key: tuple | None) -> plans.Plan | None:
        """A kept plan of the forward."""
        if key is None:
            return None
        return self.fn.kept_plan(key) if saving.program is None else self.runner(saving).plans.get(key)

    def plan_backward(self, step: Step, given: Sequence[Any], known: Extents, owned: Collection[str] = ()) -> plans.Plan | None:
        """What a backward's kernels do; None where it runs none. Those that overwrite are not kept here."""
        runner, key = self.runner(step), None if owned else self._key(arguments.key(given), known)
        plan = runner.plans.get(key) if key is not None else None
        if plan is None:
            device = arguments.check(step.program, given)
            if arguments.runs_kernels(device):
                plan = runner.plan(key, given, Binding(extents(step.program, known)), device, owned)
        return plan


class Runner:
    """The plans of one program, by kind of call."""

    def __init__(self, program: spec.Program, functions: Mapping[str, Any], objects: Any) -> None:
        self.program, self.functions, self.objects = program, functions, objects
        self.plans: plans.Kept = plans.Kept()

    def plan(
        self, key: tuple | None, tensors: Sequence[Any], binding: Binding, device: torch.device, owned: Collection[str] = ()
    ) -> plans.Plan:
        """Decide calls of this kind."""
        arguments.check_gpu(self.program, device, self.objects.arch)
        plan = host.plan(self.program, binding, tensors, device, self.objects, owned)
        if key is not None:
            self.plans.keep(key, plan)
        return plan


def run_twin(
    program: spec.Program,
    functions: Mapping[str, Any],
    values: Sequence[torch.Tensor],
    known: Extents,
    *,
    exact: bool = False,
    objects: Any = None,
) -> list[torch.Tensor]:
    """The results of a program's twin, contiguous; `values` have one dim per axis. `objects` may split launches (`schedules`)."""
    library = torch_fns.Exact() if exact else torch_fns.Written()
    made = schedules.scheduled(program, known, arguments.device_of(values), objects, functions)
    program, functions = made.program, {**functions, **made.functions}
    inputs = {a.name: v for a, v in zip(program.inputs, values, strict=True)}
    with torch.no_grad(), arguments.as_written():
        return [t.contiguous() for t in twin.run(program, functions, inputs, f=library, extents=known).values()]


def gradients_planned(
    fn: Any, tensors: Sequence[Any], cotangents: Mapping[str, torch.Tensor], *, exact: bool = True
) -> dict[str, torch.Tensor]:
    """What the kernels of forward and backward compute for these cotangents, in plain torch: every input's gradient by name.

    Residuals and stored outputs come from the planned forward. `exact` computes in float64 and rounds nothing.
    """
    derivative: Derivative = fn.training(Eager(fn)).derivative
    step = derivative.step([YES if d else NO for d in derivative.differentiable], [o in cotangents for o in derivative.outputs])
    binding = fn.bind(tensors)
    device = arguments.device_of(tensors)
    given = dict(zip(derivative.inputs, arguments.declared(fn.program, tensors, binding, device)))
    names = [o.name for o in derivative.forward.outputs]

    def run(program: spec.Program, functions: Mapping[str, Any], values: list[torch.Tensor], known: Extents) -> list[torch.Tensor]:
        return run_twin(program, functions, values, known, exact=exact, objects=fn.objects)

    given |= dict(zip(names, run(derivative.forward, derivative.functions, list(given.values()), binding.extents)))
    extent = extents(step.program, binding.extents)

    def read(source: str | int, argument: spec.Argument) -> torch.Tensor:
        shape = [extent[a] for a in argument.axes]
        if isinstance(source, str):
            return given[source]
        found = cotangents.get(derivative.outputs[source]) if source >= 0 else None
        return torch.zeros(shape, device=device) if found is None else found.reshape(shape)

    values = [read(source, a) for source, a in zip(step.reads, step.program.inputs, strict=True)]
    results = run(step.program, step.functions, values, extent)
    found: dict[str, torch.Tensor] = {}
    for argument, place in zip(fn.program.inputs, step.gives, strict=True):
        if place is not None:
            found[argument.name] = read(place[0], argument) if isinstance(place, tuple) else results[place]
    return found
