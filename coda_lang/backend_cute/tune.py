"""Measures which tile configuration is fastest for every kernel of a function at one shape, and which schedule; keeps what it finds.

In: a `Function`, the extents of its axes, a Hopper GPU. Out: a `Trial` for every kernel and configuration, and for every other schedule of
a launch (unfused, K in parts) in default configurations; the best ones are written where `tuned` finds them. Candidates are pruned by a
model, compiled side by side, run once into buffers of NaN and compared with what the default computes, then timed one kernel at a time,
interleaved. A variant of a kernel (the forward that saves nothing) takes what was found for the whole one, so that both give the same bits.
Non-goals: schedules that are none of one launch; shapes that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import compile, configs, derivative, errors, host, plans, schedules, selfcheck, spec, timing, tuned
from .binding import Binding, bind

MOST = 10  # candidates of a kernel
WORSE = 1.6  # times the model's best cost, beyond which a candidate is not tried
BETTER = 0.99  # of the default's time, which a candidate must beat to take its place: medians differ by less from run to run
SAME = {"bf16": 2.0**-7, "f16": 2.0**-10}  # relative Frobenius distance between configurations; others, f32: sums in another order
SAME_F32 = 1e-4

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


@dataclass(frozen=True)
class Trial:
    """One configuration of one kernel, or another schedule of it: its median milliseconds, or what is wrong with it."""

    program: str
    kernel: str
    config: str
    milliseconds: float | None
    default: bool
    chosen: bool
    problem: str = ""


class Chosen:
    """Executables of a function in default configurations, as planned, but for some kernels given by name, and launches in parts."""

    whole = False

    def __init__(self, objects: Any, given: Mapping[str, spec.Config], split: Mapping[str, int] = {}) -> None:
        self.objects, self.given, self.split = objects, given, split
        self.functions, self.wholes = objects.functions, objects.wholes

    def parts(self, launch: spec.Launch, extents: Mapping[str, int], device: Any) -> int:
        """The schedule given, else the planned one."""
        return self.split.get(launch.name, schedules.PLANNED)

    def extended(self, made: schedules.Applied) -> Chosen:
        """The same for a program whose launches are split."""
        return Chosen(self.objects.extended(made), self.given, self.split)

    def config(self, launch: spec.Launch, extents: Mapping[str, int], device: Any) -> spec.Config:
        """The one given, else the default, tuned or not."""
        return self.given.get(launch.name) or configs.choose(launch, extents, host.multiprocessors(device))

    def executables(self, wanted: Sequence[Any], device: Any) -> Sequence[Callable[..., None]]:
        """Compiled or found."""
        return self.objects.executables(wanted, device)


def tune(
    fn: Any, extents: Mapping[str, int], *, most: int = MOST, seed: int = 0, again: bool = True, progress: Progress | None = None
) -> list[Trial]:
    """Try up to `most` configurations of each kernel of `fn`, forward and backward, at these extents; keep the best.

    Without `again`, kernels that were tuned at such a size before are left out.
    Raises CallError where the function comes from a build, whose kernels are what they are, or no Hopper GPU is there.
    """
    if fn.objects.whole:
        raise errors.refuse(errors.BUILD, f"{fn.program.name} comes from a build", help="tune its source: codac tune FILE --shape …")
    device = gpu()
    tell = progress or (lambda what, done, of: None)
    values: dict[str, Any] = {}
    cases = [_Case(fn, program, _binding(fn, program, extents), device, values, seed) for program in _programs(fn)]
    jobs = [job for case in cases for job in case.jobs(most, again)]
    compile.objects_for(jobs, done=lambda n: tell("compiling", n, len(jobs)))
    kernels = [(case, kernel) for case in cases for kernel in case.candidates]
    trials: list[Trial] = []
    for i, (case, kernel) in enumerate(kernels):
        tell("measuring", i, len(kernels))
        trials += case.measure(kernel)
    tell("measuring", len(kernels), len(kernels))
    return trials


def gpu() -> torch.device:
    """The current GPU. Raises CallError where there is none."""
    if not torch.cuda.is_available():
        help = "run it where the kernels run; `codac plan FILE --shape …` tells bytes and FLOPs without a GPU"
        raise errors.refuse(errors.ARCHITECTURE, "measuring kernels needs a Hopper GPU, and torch finds none", help=help)
    return torch.device("cuda", torch.cuda.current_device())


def once(fn: Any, extents: Mapping[str, int]) -> None:
    """Tune at these extents what has no entry yet; nothing more where this process has met them before."""
    if extents not in fn.tuned:
        fn.tuned.append(dict(extents))
        tune(fn, extents, again=False)


def _programs(fn: Any) -> tuple[spec.Program, ...]:
    """The forward that saves where there is one (the plain one's kernels are its variants), and the backward."""
    return tuple(p for p in (fn.saving or fn.program, fn.backward) if p is not None)


def _binding(fn: Any, program: spec.Program, extents: Mapping[str, int]) -> Binding:
    if program is fn.backward:
        return Binding(dict(derivative.extents(program, extents)))
    return bind(program, [tuple(extents[x] for x in a.axes) for a in program.inputs])


class _Case:
    """One program at one shape. `values` holds tensors by name: what the forward left is what the backward reads."""

    def __init__(self, fn: Any, program: spec.Program, binding: Binding, device: Any, values: dict[str, Any], seed: int) -> None:
        self.fn, self.program, self.binding, self.device = fn, program, binding, device
        made = selfcheck.inputs(program, dict(binding.extents), seed, str(device))
        self.arguments = [values.setdefault(a.name, t) for a, t in zip(program.inputs, made, strict=True)]
        self.plan = self._planned({})
        self.truth = self.plan.run(self.arguments)
        values.update({o.name: t for o, t in zip(program.outputs, self.truth, strict=True)})
        self.launches = {k.name: k for k in spec.launches(program) if k.name in self.plan.places}
        self.candidates: dict[str, list[spec.Config]] = {}
        self.schedules: dict[str, list[schedules.Split]] = {}

    def _planned(self, given: Mapping[str, spec.Config], split: Mapping[str, int] = {}) -> plans.Plan:
        return host.plan(self.program, self.binding, self.arguments, self.device, Chosen(self.fn.objects, given, split))

    def jobs(self, most: int, again: bool) -> list[compile.Job]:
        """What has to be compiled."""
        fixed, jobs, sms = {a: n for a, n in self.program.extents if n is not None}, [], host.multiprocessors(self.device)
        for name, launch in self.launches.items():
            if not again and tuned.find(launch, self.plan.sizes[name], host.device_name(self.device)) is not None:
                continue
            default = self.plan.configs[name]
            best = configs.ranked(launch, self.plan.sizes[name], sms, within=WORSE)
            self.candidates[name] = list(dict.fromkeys([default, *best]))[:most]
            jobs += [compile.job(launch, c, self.fn.functions, fixed, sms=sms) for c in self.candidates[name]]
            self.schedules[name] = self._others(launch)
            for made in self.schedules[name]:
                known = {**self.fn.functions, **(schedules.functions(made, self.fn.functions) or {})}
                chosen = [(k, configs.choose(k, self.plan.extents, sms)) for k in made.kernels]
                jobs += [compile.job(k, config, known, fixed, sms=sms) for k, config in chosen]
        return jobs

    def _others(self, launch: spec.Launch) -> list[schedules.Split]:
        """Schedules of a launch that the model does not rule out."""
        if any(launch.name in loop.kernels for loop in self.program.loops):
            return []
        planned, *found = schedules.estimates(launch, self.plan.extents, host.multiprocessors(self.device))
        tried = [e.parts for e in found if e.microseconds <= WORSE * planned.microseconds]
        made = [m for m in (schedules.split(launch, parts) for parts in tried) if m is not None]
        return [m for m in made if schedules.functions(m, self.fn.functions) is not None]

    def measure(self, kernel: str) -> list[Trial]:
        """Check and time the candidates of one kernel, and keep the best."""
        default, problems, calls = self.plan.configs[kernel], {}, {}
        for config in self.candidates[kernel]:
            problems[config.key], call = self._tried([kernel], {kernel: config}, {})
            if not problems[config.key]:
                calls[config.key] = call
        others = {schedules.name_of(made.count): made for made in self.schedules[kernel]}
        for key, made in others.items():
            problems[key], call = self._tried([k.name for k in made.kernels], {}, {kernel: made.count})
            if not problems[key]:
                calls[key] = call
        times = timing.medians(timing.interleaved(calls)) if calls else {}
        tiles = self._best([c.key for c in self.candidates[kernel]], default.key, times)
        best = self._best([tiles, *others], tiles, times)
        if times:
            parts = others[best].count if best in others else schedules.PLANNED
            facts = {"ms": times[best], "default": default.key, "default ms": times.get(default.key), "parts": parts}
            found = next(c for c in self.candidates[kernel] if c.key == tiles)
            name = host.device_name(self.device)
            tuned.keep(self.launches[kernel], self.plan.sizes[kernel], name, replace(found, step=0), facts)
        return [Trial(self.program.name, kernel, k, times.get(k), k == default.key, k == best, problems[k]) for k in problems]

    @staticmethod
    def _best(keys: Sequence[str], default: str, times: Mapping[str, float]) -> str:
        """The fastest, if it is clearly faster than the default."""
        there = [key for key in keys if key in times]
        fastest = min(there, key=lambda key: times[key], default=default)
        return fastest if there and (default not in times or times[fastest] < BETTER * times[default]) else default

    def _tried(
        self, kernels: Sequence[str], given: Mapping[str, spec.Config], split: Mapping[str, int]
    ) -> tuple[str, Callable[[], None]]:
        """What is wrong with the program's results in this way, "" if nothing is, and a call of some of its kernels."""
        with host.filled(float("nan")):
            plan = self._planned(given, split)
            slots = plan.start(self.arguments)
            for step in plan.steps:
                step(slots)
        steps = [plan.steps[plan.places[name]] for name in kernels]

        def call() -> None:
            for step in steps:
                step(slots)

        return self._problem([slots[i] for i in plan.results]), call

    def _problem(self, found: Sequence[Any]) -> str:
        """What is wrong with results, "" if nothing is."""
        for output, value, truth in zip(self.program.outputs, found, self.truth, strict=True):
            off = selfcheck.error(value, truth)
            if off > SAME.get(output.dtype, SAME_F32):
                return f"{output.name} is off by {off:.2e}"
        return ""
