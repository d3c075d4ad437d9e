"""A compiled program as a callable on torch tensors.

In: a `spec.Program`, its scalar functions, its reference. Out: `Function`. On CUDA tensors it runs the kernels, on CPU tensors the
reference; which path ran is in `last_path`, and there is no fallback from one to the other. A call with shapes, strides and dtypes seen
before goes straight to its plan.
Gradients: calls are differentiable by the derived backward on either device (`autograd`); `last_backward` says what ran it: "kernels", or
"planned" on the CPU, the twin of the backward's kernels. While something traces (torch.compile, fake tensors, a dispatch mode) a call
is one registered operator (`torch_ops`), with the same results.
Non-goals: planning (`host`), judging shapes (`binding`), compiling (`compile`), reading builds (`load`).
"""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import (
    accumulate,
    arguments,
    autograd,
    configs,
    derivative,
    errors,
    explain,
    host,
    plans,
    schedules,
    spec,
    torch_fns,
    torch_ops,
    tuned,
    twin,
)
from .binding import Binding, bind, check_conditions
from .explain import Explanation
from .prune import prune
from .selfcheck import main

__all__ = ["Compiled", "Explanation", "Function", "main"]


class Compiled:
    """Executables compiled on demand, through the cache on disk."""

    arch = "sm_90a"
    whole = False

    def __init__(self, program: spec.Program, functions: Mapping[str, Callable[..., tuple]], saving: spec.Program | None = None) -> None:
        self.fixed, self.functions = fixed(program), functions
        self.wholes: configs.Wholes = configs.wholes(saving)
        self.loaded: dict[tuple[int, spec.Kernel, spec.Config | None], Callable[..., None]] = {}

    def config(self, launch: spec.Launch, extents: Mapping[str, int], device: Any) -> spec.Config:
        """The configuration for the extents: the tuned one, else the default."""
        whole, name = configs.whole_of(launch, self.wholes), host.device_name(device)
        model = whole or launch
        if name and (best := tuned.find(model, configs.problems(model, extents), name)) is not None:
            for config in configs.candidates(launch, whole):
                if replace(config, step=0) == best:
                    return config
        return configs.choose(launch, extents, host.multiprocessors(device), whole=whole)

    def executables(self, wanted: Sequence[tuple[spec.Kernel, spec.Config | None]], device: Any) -> list[Callable[..., None]]:
        """Find the kernels, those not compiled before compiled side by side, and load them."""
        sms = host.multiprocessors(device)
        keys = [(sms, kernel, config) for kernel, config in wanted]
        missing = [key for key in keys if key not in self.loaded]
        if missing:
            from . import compile

            jobs = [compile.job(kernel, config, self.functions, self.fixed, self.arch, sms) for _, kernel, config in missing]
            for key, path in zip(missing, compile.objects_for(jobs)):
                self.loaded[key] = compile.load(path)
        return [self.loaded[key] for key in keys]

    def parts(self, launch: spec.Launch, extents: Mapping[str, int], device: Any) -> int:
        """The schedule for the extents: the one that was measured to be best, or by the model, where the user wants that; else as planned.

        What a launch is a variant of decides, so that outputs have the same bits with and without gradients.
        """
        whole, name = configs.whole_of(launch, self.wholes) or launch, host.device_name(device)
        measured = tuned.schedule(whole, configs.problems(whole, extents), name) if name else None
        if measured is not None or not schedules.wanted():
            return measured or schedules.PLANNED
        return schedules.best(schedules.estimates(whole, extents, host.multiprocessors(device))).parts

    def extended(self, made: schedules.Applied) -> Compiled:
        """The same for a program whose launches are split."""
        more = copy.copy(self)
        more.functions, more.wholes = {**self.functions, **made.functions}, {**self.wholes, **made.wholes}
        return more

    def select(self, program: spec.Program, functions: Mapping[str, Callable[..., tuple]]) -> Compiled:
        """The same for a pruned program."""
        chosen = Compiled(program, functions)
        chosen.wholes = self.wholes
        return chosen


class Function:
    """Callable on torch tensors, by position in signature order or by name.

    One output gives a tensor, several a named tuple. `outputs=` (a name or several) drops the others and their stores. Shapes: as
    declared; adjacent axes may be merged if at most one is free, and a leading free axis may be several dims, which outputs return.
    Raises `CallError` (a CodaError, C07xx) before anything is launched.

    What an emitted module gives for the derivative (`functions` holds the scalar functions of all three programs):
    `saving`    the program with its outputs in the same order and, after them, the `residuals`; None where the backward reads no
                residual, so that the program itself serves. Its kernels give the same bits in the outputs.
    `backward`  a program like any other. Its inputs, in any order, are by name inputs of the program, outputs of the program as
                stored, residuals and cotangents (of their output's dtype and axes); its axes are the program's, by the same
                names, or tied to one by `equal`, so it may use an axis that none of its inputs has. Its outputs are gradients.
                An output in `same` is an input as it is. None: the program has no derivative, and asking for one is refused (C0501).
    `residuals` names of the outputs that `saving` adds.
    `cotangents` (output, input of `backward`) for each float output; one that no gradient reads may be missing.
    `gradients`  (input, output of `backward`) for each input that has a gradient, of the input's dtype and axes; the last rounding is
                the store's, or a cast in the returned expression, so that a gradient can also be had in f32.
    """

    def __init__(
        self,
        program: spec.Program,
        functions: Mapping[str, Callable[..., tuple]],
        reference: Callable[..., Any] | None,
        *,
        saving: spec.Program | None = None,
        backward: spec.Program | None = None,
        residuals: Sequence[str] = (),
        cotangents: Sequence[tuple[str, str]] = (),
        gradients: Sequence[tuple[str, str]] = (),
        objects: Any = None,
    ) -> None:
        self.program, self.functions, self._reference = program, dict(functions), reference
        self.saving, self.backward = saving, backward
        self.residuals, self.cotangents, self.gradients = tuple(residuals), tuple(cotangents), tuple(gradients)
        self.objects = objects or Compiled(program, self.functions, saving)
        self.last_path: str | None = None
        self.__name__ = self.__qualname__ = program.name
        self.__doc__ = f"{signature(program)}\n\nFrom {program.source or 'a text'}."
        self.last_backward: str | None = None
        self.operator: Any = None
        self.tuned: list[Mapping[str, int]] = []  # the extents at which this process has tuned it
        self._count = len(program.inputs)
        self._plans: plans.Kept[plans.Plan] = plans.Kept()
        self._known: plans.Kept[Callable[[Sequence[Any]], Any]] = plans.Kept()  # how to make a call, by `arguments.kind`
        self._whole: spec.Program | None = None  # of a function that computes chosen outputs: the program with all
        self._derivative: derivative.Derivative | None = None
        self._training: autograd.Training | None = None
        self._chosen: dict[Any, Function] = {}
        names = [o.name for o in program.outputs]
        self._pack: Callable[[Sequence[Any]], Any] = (
            (lambda values: values[0]) if len(names) == 1 else _named(program.name, names)
        )

    def __repr__(self) -> str:
        return f"<coda_lang function {signature(self.program)}>"

    def __deepcopy__(self, memo: Any) -> Function:
        return self  # nothing about it changes, so that copies of a model share it

    def __call__(
        self,
        *tensors: Any,
        outputs: str | Iterable[str] | None = None,
        accumulate_into: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> Any:
        if arguments.is_compiling():
            return self._traced(tensors, outputs, accumulate_into, named)
        if outputs is not None:
            return self._forward(outputs, "__call__", tensors, named, accumulate_into=accumulate_into)
        if named or len(tensors) != self._count:
            tensors = tuple(arguments.order(self.program, tensors, named))
        kind = arguments.kind(tensors) if accumulate_into is None else None
        known = self._known.get(kind)
        return self._pack(self._met_first(kind, tensors, accumulate_into)) if known is None else known(tensors)

    def reference(
        self, *tensors: Any, outputs: str | Iterable[str] | None = None, exact: bool = False, library: Any = None, **named: Any
    ) -> Any:
        """The program as written, in plain torch on any device; `exact` computes in float64 and rounds nothing, `library` otherwise."""
        if outputs is not None:
            return self._forward(outputs, "reference", tensors, named, exact=exact, library=library)
        values, binding = self._declared(tensors, named)
        with arguments.as_written():
            return self._pack(self.written(values, binding, library or (torch_fns.Exact() if exact else torch_fns.Written())))

    def reference_planned(self, *tensors: Any, outputs: str | Iterable[str] | None = None, exact: bool = False, **named: Any) -> Any:
        """What the kernels compute, in plain torch on any device: the emitted functions over the kernels' records, rounding as they do."""
        if outputs is not None:
            return self._forward(outputs, "reference_planned", tensors, named, exact=exact)
        values, binding = self._declared(tensors, named)
        inputs = {a.name: v for a, v in zip(self.program.inputs, values, strict=True)}
        library = torch_fns.Exact() if exact else torch_fns.Written()
        made = schedules.scheduled(self.program, binding.extents, arguments.device_of(values), self.objects, self.functions)
        with arguments.as_written():
            results = twin.run(made.program, {**self.functions, **made.functions}, inputs, f=library)
        return self._pack(self._returned(list(results.values()), binding))

    def explain(self, *tensors: Any, outputs: str | Iterable[str] | None = None, **named: Any) -> Explanation:
        """What a call with these tensors does: path, kernels and tiles, each copy and why; for CPU tensors, what the kernels would do.

        Nothing is compiled or run.
        """
        if outputs is not None:
            return self._forward(outputs, "explain", tensors, named)
        return explain.explained(self, arguments.order(self.program, tensors, named))

    # for the derivative and for registered operators

    @property
    def programs(self) -> tuple[spec.Program, ...]:
        """Everything with kernels: the program, and where it has a derivative the saving forward and the backward."""
        return tuple(p for p in (self.program, self.saving, self.backward) if p is not None)

    def bind(self, tensors: Sequence[Any]) -> Binding:
        """The extents of a call. Raises CallError where the shapes do not fit, or the shape contract of forward or backward fails."""
        binding = bind(self.program, arguments.shapes(tensors))
        if self.backward is not None and self.backward.requires:
            check_conditions(self.backward, derivative.extents(self.backward, binding.extents))
        return binding

    def run(self, tensors: Sequence[Any]) -> tuple[list[Any], Mapping[str, int]]:
        """All outputs, unpacked and without a backward, and the extent of every axis. The arguments are in signature order."""
        key = arguments.key(tensors)
        plan = self._plans.get(key) if key is not None else None
        return self._slowly(key, tensors) if plan is None else (self._by(plan, tensors), plan.extents)

    def kept_plan(self, key: tuple) -> plans.Plan | None:
        """The plan of calls of a kind, where one was made."""
        return self._plans.get(key)

    def training(self, way: autograd.Way, buffers: Mapping[int, Any] = {}) -> autograd.Training:
        """Differentiable calls, run in one way. Raises CallError where the program has no derivative."""
        if self._derivative is None:
            if self.backward is None:
                raise errors.refuse(errors.BACKWARD, f"{self.program.name} has no derivative", help="declare it without the word `forward`")
            self._derivative = derivative.Derivative(
                self._whole or self.program, self.saving, self.backward, self.functions, self.cotangents, self.gradients,
                [o.name for o in self.program.outputs], whole=self.objects.whole,
            )  # fmt: skip
        return autograd.Training(self, self._derivative, way, buffers)

    @arguments.constant
    def prepare(self, outputs: tuple[str, ...] = ()) -> None:
        """Register the operator of the function that computes only `outputs`, which cannot be done while tracing."""
        chosen = self._chosen_for(outputs) if outputs else self
        if chosen.operator is None:
            chosen.operator = torch_ops.register(chosen)

    def _traced(self, tensors: tuple, outputs: Any, accumulate_into: Any, named: Mapping[str, Any]) -> Any:
        """A call while torch.compile traces it: one operator."""
        wanted = () if outputs is None else arguments.wanted(self.program, outputs)
        self.prepare(wanted)
        fn = self._chosen[wanted] if wanted else self
        if named or len(tensors) != len(self.program.inputs):
            tensors = tuple(arguments.order(self.program, tensors, named))
        return fn._pack(torch_ops.traced(fn, tensors, accumulate_into))

    def _met_first(self, kind: tuple | None, tensors: Sequence[Any], accumulate_into: Mapping[str, Any] | None) -> Sequence[Any]:
        """A call of a kind not met before, or of none; how to make others of the kind is kept, where there is nothing left to decide."""
        if arguments.is_special():
            return self._in_a_mode(tensors, accumulate_into)
        key = arguments.key(tensors)
        known: Callable[[Sequence[Any]], Any] | None = None
        if accumulate_into is not None or arguments.wants_gradients(tensors):
            results = self._with_gradients(tensors, accumulate_into)
            known = self._training.kinds.get(key) if self._training is not None else None
        else:
            plan = self._plans.get(key) if key is not None else None
            results = self._slowly(key, tensors)[0] if plan is None else self._by(plan, tensors)
            known = self._planned(self._plans.get(key))
        if kind is not None and known is not None:
            self._known.keep(kind, known)
        return results

    def _planned(self, plan: plans.Plan | None) -> Callable[[Sequence[Any]], Any] | None:
        return None if plan is None else lambda tensors: self._pack(self._by(plan, tensors))

    def _by(self, plan: plans.Plan, tensors: Sequence[Any]) -> list[Any]:
        self.last_path = "kernels"
        return plan.consume([*tensors])

    def forget(self) -> None:
        """Decide every call anew, with whatever `objects` gives now."""
        self._plans.clear()
        self._known.clear()
        self._training = None

    def _in_a_mode(self, tensors: Sequence[Any], accumulate_into: Any) -> Sequence[Any]:
        """A call that a dispatch mode or a forward-mode derivative watches."""
        arguments.check_tangents(self.program, tensors)
        self.prepare()
        return torch_ops.traced(self, tensors, accumulate_into)

    def _with_gradients(self, tensors: Sequence[Any], accumulate_into: Mapping[str, Any] | None) -> Sequence[Any]:
        if self._training is not None and accumulate_into is None and arguments.are_ordinary(tensors):
            training = self._training
            return training(tensors) if arguments.wants_gradients(tensors, training.derivative.differentiable) else self._detached(tensors)
        tensors = arguments.cast(self.program, tensors)
        if any(arguments.is_traced(t) for t in tensors):
            return self._in_a_mode(tensors, accumulate_into)
        if self.backward is None:
            arguments.check_gradients(self.program, tensors)
            if accumulate_into is None:
                return self._detached(tensors)
        training = self._training or self.training(autograd.Eager(self))
        self._training = training
        if accumulate_into is not None:
            arguments.check(self.program, tensors)
            buffers = accumulate.buffers(self, tensors, accumulate_into, training.derivative)
            training = self.training(training.way, buffers)
        if not arguments.wants_gradients(tensors, training.derivative.differentiable):
            return self._detached(tensors)
        return training(tensors)

    def _detached(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The outputs where only constants require a gradient."""
        with arguments.no_grad():
            return self.run(tensors)[0]

    # the slow path

    def _slowly(self, key: tuple | None, tensors: Sequence[Any]) -> tuple[list[Any], Mapping[str, int]]:
        tensors = arguments.cast(self.program, tensors)
        if any(arguments.is_traced(t) for t in tensors):
            return list(self._in_a_mode(tensors, None)), {}
        device = arguments.check(self.program, tensors)
        if not arguments.runs_kernels(device):
            binding = self.bind(tensors)
            values = arguments.declared(self.program, tensors, binding, device)
            with arguments.no_grad(), arguments.as_written():
                results = arguments.apart(self.written(values, binding), tensors)
            self.last_path = "reference"
            return results, binding.extents
        plan = self._decide(arguments.key(tensors), tensors, device)
        return self._by(plan, tensors), plan.extents

    def _decide(self, key: tuple | None, tensors: Sequence[Any], device: Any) -> plans.Plan:
        arguments.check_gpu(self.program, device, self.objects.arch)
        binding = self.bind(tensors)
        if not self.objects.whole and self._whole is None and tuned.wanted():
            from . import tune  # it measures, and loads what that needs

            tune.once(self, binding.extents)
        plan = host.plan(self.program, binding, tensors, device, self.objects)
        if self.program.same:
            plan.copy_results([o.name for o in self.program.outputs].index(output) for output, _ in self.program.same)
        if key is not None:
            self._plans.keep(key, plan)
        return plan

    def _declared(self, tensors: Sequence[Any], named: Mapping[str, Any]) -> tuple[list[Any], Binding]:
        """The arguments as tensors with one dim per declared axis."""
        values = arguments.order(self.program, tensors, named)
        device = arguments.check(self.program, values)
        binding = bind(self.program, arguments.shapes(values))
        return arguments.declared(self.program, values, binding, device), binding

    def written(self, values: Sequence[Any], binding: Binding, library: Any = None) -> list[Any]:
        """The reference's results, from arguments in declared dims; `library` computes them."""
        if self._reference is None:
            raise errors.refuse(errors.BUILD, f"{self.program.name}: this build carries no reference", help="build it from its .coda file")
        results = self._reference(library or torch_fns.Written(), *values)
        return self._returned(results if isinstance(results, (tuple, list)) else (results,), binding)

    def _returned(self, results: Sequence[Any], binding: Binding) -> list[Any]:
        return [r.reshape(binding.returned(o)) for r, o in zip(results, self.program.outputs, strict=True)]

    def _forward(self, outputs: str | Iterable[str], method: str, tensors: Sequence[Any], named: Mapping[str, Any], **options: Any) -> Any:
        """Call `method` of the function that computes only `outputs`."""
        chosen = self._chosen_for(arguments.wanted(self.program, outputs))
        result = getattr(chosen, method)(*tensors, **named, **options)
        self.last_path = chosen.last_path
        return result

    def _chosen_for(self, wanted: tuple[str, ...]) -> Function:
        if wanted not in self._chosen:
            self._chosen[wanted] = self._choose(wanted)
        return self._chosen[wanted]

    def _choose(self, wanted: tuple[str, ...]) -> Function:
        names = [o.name for o in self.program.outputs]
        unknown = [w for w in wanted if w not in names]
        if unknown or not wanted:
            what = f"has no output {unknown[0]!r}" if unknown else "was asked for no output"
            raise errors.refuse(errors.OUTPUTS, f"{self.program.name}: {what}", help=f"its outputs are {', '.join(names)}")
        program, functions = prune(self.program, self.functions, wanted)
        places = [names.index(o.name) for o in program.outputs]
        full = self._reference

        def reference(f: Any, *tensors: Any) -> tuple:
            results = full(f, *tensors)  # type: ignore[misc]
            return tuple(results[i] for i in places) if isinstance(results, (tuple, list)) else (results,)

        chosen = Function(
            program, {**self.functions, **functions}, full and reference,
            saving=self.saving, backward=self.backward, residuals=self.residuals, cotangents=self.cotangents, gradients=self.gradients,
            objects=self.objects.select(program, functions),
        )  # fmt: skip
        chosen._whole = self._whole or self.program
        return chosen


def _named(name: str, fields: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """What makes a named tuple of values."""
    kind: Any = namedtuple(name, fields, rename=True)  # type: ignore[misc]
    return kind._make


def fixed(program: spec.Program) -> dict[str, int]:
    """The axes whose extents are not free, for every kernel."""
    parts = {loop.axis for loop in program.loops}
    return {name: size for name, size in program.extents if size is not None and name not in parts}


def signature(program: spec.Program) -> str:
    """The program's signature in the language's words."""
    known = {name: size for name, size in program.extents if size is not None}

    def argument(a: spec.Argument) -> str:
        axes = ", ".join(f"{x}={known[x]}" if x in known else x for x in a.axes)
        return f"{'const ' if a.const else ''}{a.name}: {a.dtype}[{axes}]"

    inputs, outputs = (", ".join(map(argument, side)) for side in (program.inputs, program.outputs))
    return f"{program.name}({inputs}) -> ({outputs})"
