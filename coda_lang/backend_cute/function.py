"""A compiled program as a callable on torch tensors.

In: a `spec.Program`, its scalar functions, its reference. Out: `Function`. On CUDA tensors it runs the kernels, on CPU tensors the
reference; which path ran is in `last_path`, and there is no fallback from one to the other. A call with shapes, strides and dtypes seen
before goes straight to its plan.
Gradients: backward kernels are not built yet, so a call whose result autograd would want to differentiate is refused on either
device; `reference` is plain torch and can be differentiated.
Non-goals: planning (`host`), judging shapes (`binding`), compiling (`compile`), reading builds (`load`).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import arguments, configs, errors, host, spec, torch_fns, twin
from .binding import Binding, bind
from .prune import prune
from .selfcheck import main

__all__ = ["Compiled", "Explanation", "Function", "main"]

MAX_PLANS = 512  # kept a function; beyond it the oldest half goes


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
        lines += [f"  {doing} {k}" + (f" with tiles {self.configs[k]}" if k in self.configs else "") for k in self.launches]
        lines += [f"  {c}" for c in self.copies] or ["  no tensor is copied"]
        return "\n".join([*lines, *(f"  {n}" for n in self.notes)])


class Compiled:
    """Executables compiled on demand, through the cache on disk."""

    arch = "sm_90a"

    def __init__(self, program: spec.Program, functions: Mapping[str, Callable[..., tuple]]) -> None:
        self.fixed, self.functions = fixed(program), functions
        self.loaded: dict[tuple[spec.Kernel, spec.Config | None], Callable[..., None]] = {}

    def config(self, gemm: spec.Gemm, m: int, n: int, k: int, device: Any) -> spec.Config:
        """The default configuration for the shape."""
        return configs.default(gemm, m, n, k, host.multiprocessors(device))

    def executables(self, wanted: Sequence[tuple[spec.Kernel, spec.Config | None]]) -> list[Callable[..., None]]:
        """Find the kernels, those not compiled before compiled side by side, and load them."""
        missing = [w for w in wanted if w not in self.loaded]
        if missing:
            from . import compile

            jobs = [compile.job(kernel, config, self.functions, self.fixed, self.arch) for kernel, config in missing]
            for w, path in zip(missing, compile.objects_for(jobs)):
                self.loaded[w] = compile.load(path)
        return [self.loaded[w] for w in wanted]

    def select(self, program: spec.Program, functions: Mapping[str, Callable[..., tuple]]) -> Compiled:
        """The same for a pruned program."""
        return Compiled(program, functions)


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
        self.objects = objects or Compiled(program, self.functions)
        self.last_path: str | None = None
        self.__name__ = self.__qualname__ = program.name
        self.__doc__ = f"{signature(program)}\n\nFrom {program.source or 'a text'}."
        self._plans: dict[tuple, host.Plan] = {}
        self._chosen: dict[Any, Function] = {}
        names = [o.name for o in program.outputs]
        self._pack: Callable[[Sequence[Any]], Any] = (
            (lambda values: values[0]) if len(names) == 1 else _named(program.name, names)
        )

    def __repr__(self) -> str:
        return f"<coda_lang function {signature(self.program)}>"

    def __call__(self, *tensors: Any, outputs: str | Iterable[str] | None = None, **named: Any) -> Any:
        if outputs is not None:
            return self._forward(outputs, "__call__", tensors, named)
        if named or len(tensors) != len(self.program.inputs):
            tensors = tuple(arguments.order(self.program, tensors, named))
        key = arguments.key(tensors)
        plan = self._plans.get(key) if key is not None else None
        if plan is None:
            device = arguments.check(self.program, tensors)
            if device.type == "cpu":
                return self._on_cpu(tensors)
            arguments.check_gradients(self.program, tensors)
            plan = self._decide(key, tensors, device)
        elif arguments.wants_gradients(tensors):
            arguments.check_gradients(self.program, tensors)
        self.last_path = "kernels"
        return self._pack(plan.run(tensors))

    def reference(self, *tensors: Any, outputs: str | Iterable[str] | None = None, exact: bool = False, **named: Any) -> Any:
        """The program as written, in plain torch on any device; `exact` computes in float64 and rounds nothing."""
        if outputs is not None:
            return self._forward(outputs, "reference", tensors, named, exact=exact)
        values, binding = self._declared(tensors, named)
        if self._reference is None:
            raise errors.refuse(errors.BUILD, f"{self.program.name}: this build carries no reference", help="build it from its .coda file")
        results = self._reference(torch_fns.Exact() if exact else torch_fns.Written(), *values)
        return self._returned(results if isinstance(results, (tuple, list)) else (results,), binding)

    def reference_planned(self, *tensors: Any, outputs: str | Iterable[str] | None = None, exact: bool = False, **named: Any) -> Any:
        """What the kernels compute, in plain torch on any device: the emitted functions over the kernels' records, rounding as they do."""
        if outputs is not None:
            return self._forward(outputs, "reference_planned", tensors, named, exact=exact)
        values, binding = self._declared(tensors, named)
        inputs = {a.name: v for a, v in zip(self.program.inputs, values, strict=True)}
        library = torch_fns.Exact() if exact else torch_fns.Written()
        return self._returned(list(twin.run(self.program, self.functions, inputs, f=library).values()), binding)

    def explain(self, *tensors: Any, outputs: str | Iterable[str] | None = None, **named: Any) -> Explanation:
        """What a call with these tensors does: path, kernels and tiles, each copy and why; for CPU tensors, what the kernels would do.

        Nothing is compiled or run.
        """
        if outputs is not None:
            return self._forward(outputs, "explain", tensors, named)
        values = arguments.order(self.program, tensors, named)
        device = arguments.check(self.program, values)
        binding = bind(self.program, arguments.shapes(values))
        if device.type == "cuda":
            arguments.check_gpu(self.program, device, self.objects.arch)
        plan = host.plan(self.program, binding, values, device, _Described(self.objects))
        return Explanation(
            self.program.name,
            "kernels" if device.type == "cuda" else "reference",
            {name: binding.extents[name] for name, _ in self.program.extents},
            {name: config.key for name, config in plan.configs.items()},
            tuple(plan.launches),
            tuple(plan.copies),
            tuple(plan.notes),
        )

    # the slow path

    def _decide(self, key: tuple | None, tensors: Sequence[Any], device: Any) -> host.Plan:
        arguments.check_gpu(self.program, device, self.objects.arch)
        plan = host.plan(self.program, bind(self.program, arguments.shapes(tensors)), tensors, device, self.objects)
        if key is not None:
            if len(self._plans) >= MAX_PLANS:
                for old in list(self._plans)[: MAX_PLANS // 2]:
                    del self._plans[old]
            self._plans[key] = plan
        return plan

    def _on_cpu(self, tensors: Sequence[Any]) -> Any:
        arguments.check_gradients(self.program, tensors)
        result = self.reference(*tensors)
        self.last_path = "reference"
        return result

    def _declared(self, tensors: Sequence[Any], named: Mapping[str, Any]) -> tuple[list[Any], Binding]:
        """The arguments as tensors with one dim per declared axis."""
        values = arguments.order(self.program, tensors, named)
        device = arguments.check(self.program, values)
        binding = bind(self.program, arguments.shapes(values))
        return arguments.declared(self.program, values, binding, device), binding

    def _returned(self, results: Sequence[Any], binding: Binding) -> Any:
        return self._pack([r.reshape(binding.returned(o)) for r, o in zip(results, self.program.outputs, strict=True)])

    def _forward(self, outputs: str | Iterable[str], method: str, tensors: Sequence[Any], named: Mapping[str, Any], **options: Any) -> Any:
        """Call `method` of the function that computes only `outputs`."""
        wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        if wanted not in self._chosen:
            self._chosen[wanted] = self._choose(wanted)
        chosen = self._chosen[wanted]
        result = getattr(chosen, method)(*tensors, **named, **options)
        self.last_path = chosen.last_path
        return result

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

        return Function(program, functions, full and reference, objects=self.objects.select(program, functions))


def _named(name: str, fields: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """What makes a named tuple of values."""
    kind: Any = namedtuple(name, fields, rename=True)  # type: ignore[misc]
    return kind._make


class _Described:
    """Stands in for executables where only the description of a plan is wanted."""

    def __init__(self, objects: Any) -> None:
        self.config = objects.config

    def executables(self, wanted: Sequence[tuple[spec.Kernel, spec.Config | None]]) -> list[Callable[..., None]]:
        """Something to stand in the plan, which is not run."""
        return [lambda *tensors: None for _ in wanted]


def fixed(program: spec.Program) -> dict[str, int]:
    """The axes whose extents are not free."""
    return {name: size for name, size in program.extents if size is not None}


def signature(program: spec.Program) -> str:
    """The program's signature in the language's words."""
    known = fixed(program)

    def argument(a: spec.Argument) -> str:
        axes = ", ".join(f"{x}={known[x]}" if x in known else x for x in a.axes)
        return f"{'const ' if a.const else ''}{a.name}: {a.dtype}[{axes}]"

    inputs, outputs = (", ".join(map(argument, side)) for side in (program.inputs, program.outputs))
    return f"{program.name}({inputs}) -> ({outputs})"
