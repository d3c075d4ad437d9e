"""Kernels built ahead of time as callables: what `codac build` wrote, run without the compiler.

In: the directory of a build (manifest, objects, the emitted module). Out: the module's `Function`s, which take their kernels from the
build. cutlass is never imported; launching needs torch, apache-tvm-ffi and the DSL's runtime library. A build is code: loading it
executes its module. Non-goals: building (`compile`), the format (`manifest`).
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import compile, configs, errors, host, manifest, schedules, spec
from .function import Function, fixed


class Built:
    """Executables from a build, of whole kernels only.

    `among` restricts the configurations further than the build does, for tests and measurements.
    """

    whole, told = True, False

    def __init__(
        self,
        build: manifest.Manifest,
        program: spec.Program,
        functions: Mapping[str, Callable[..., tuple]],
        saving: spec.Program | None = None,
    ) -> None:
        self.build, self.arch, self.functions, self.fixed = build, build.arch, functions, fixed(program)
        self.wholes: configs.Wholes = configs.wholes(saving)
        self.among: tuple[str, ...] = ()
        self.loaded: dict[tuple[spec.Kernel, spec.Config | None], Callable[..., None]] = {}

    def config(self, launch: spec.Launch, extents: Mapping[str, int], device: Any) -> spec.Config:
        """The best configuration for the extents among those built. Raises CallError where there is none."""
        built, sms = self.build.configs(launch), host.multiprocessors(device)
        if sms != self.build.sms and not self.told:
            self.told = True
            warnings.warn(f"coda_lang: {uneven(self.build, sms)}", RuntimeWarning, stacklevel=2)
        keys = tuple(key for key in built if key in self.among) or built or ("none",)
        try:
            return configs.choose(launch, extents, sms, keys, configs.whole_of(launch, self.wholes))
        except ValueError:
            raise errors.refuse(
                errors.BUILD,
                f"the build in {self.build.directory} has no object for {launch.name}",
                help="build the program with these outputs: outputs= needs a kernel of its own",
            ) from None

    def executables(self, wanted: Sequence[tuple[spec.Kernel, spec.Config | None]], device: Any) -> list[Callable[..., None]]:
        """Load the objects; each must be compiled from the very record and functions that the module holds."""
        for kernel, config in wanted:
            if (kernel, config) not in self.loaded:
                record = compile.job(kernel, config, self.functions, self.fixed, self.arch).record
                self.loaded[kernel, config] = compile.load(self.build.find(kernel, config, record))
        return [self.loaded[w] for w in wanted]

    def parts(self, launch: spec.Launch, extents: Mapping[str, int], device: Any) -> int:
        """The schedule for the extents, by the model, among those built; decided as `function.Compiled` does."""
        built = tuple(self.build.parts.get(launch.name, ()))
        if not built:
            return schedules.PLANNED
        whole = configs.whole_of(launch, self.wholes) or launch
        return schedules.best(schedules.estimates(whole, extents, host.multiprocessors(device), built)).parts

    def extended(self, made: schedules.Applied) -> Built:
        """The same for a program whose launches are split."""
        more = copy.copy(self)
        more.functions, more.wholes = {**self.functions, **made.functions}, {**self.wholes, **made.wholes}
        return more

    def select(self, program: spec.Program, functions: Mapping[str, Callable[..., tuple]]) -> Built:
        """The same for a pruned program."""
        chosen = Built(self.build, program, functions)
        chosen.wholes = self.wholes
        return chosen


def load(directory: str | os.PathLike[str]) -> tuple[Function, ...]:
    """The functions of a build, in the order of its module.

    Raises CallError: C0712 where the directory is no build, is damaged or was built by another version; C0705 for another architecture.
    """
    build = manifest.read(Path(directory))
    check(build)
    module = import_file(build.directory / build.module) if build.module else None
    functions = functions_of(module) if module else ()
    if not functions:
        raise errors.refuse(errors.BUILD, f"the build in {directory} holds no programs", help="build it again: codac build FILE -o DIR")
    for fn in functions:
        fn.objects = Built(build, fn.program, fn.functions, fn.saving)
    return functions


def check(build: manifest.Manifest) -> None:
    """Raise CallError where this installation cannot run the objects of a build."""
    if build.arch not in compile.ARCHITECTURES:
        raise errors.refuse(
            errors.ARCHITECTURE,
            f"the build in {build.directory} is for {build.arch}; this version runs {', '.join(compile.ARCHITECTURES)}",
            help="build it for the GPU at hand: codac build FILE --arch sm_90a -o DIR",
        )
    here = compile.versions()
    for package, built in build.versions.items():
        found = here.get(package, "none")
        if "none" not in (found, built) and _series(package, found) != _series(package, built):
            raise errors.refuse(
                errors.BUILD,
                f"the build in {build.directory} was made with {package} {built}; {found} is installed",
                help=f"build it again, or install {package}=={built}",
            )


def uneven(build: manifest.Manifest, sms: int) -> str:
    """What it means that a device has another number of multiprocessors than a build is for: each of a launch's blocks takes its share of
    the tiles, whenever it runs, so results are the same."""
    what = "blocks wait for others to end" if sms < build.sms else f"{sms - build.sms} of them get no block"
    said = f"the build in {build.directory} spreads kernels over {build.sms} multiprocessors, and this device has {sms}"
    return f"{said}: results are right, but {what}, which takes time; build for it: codac build FILE --sms {sms} -o DIR"


def _series(package: str, version: str) -> tuple[str, ...]:
    """What must agree: the DSL's objects and its runtime are of one release, tvm_ffi keeps its ABI within a minor one."""
    parts = tuple(version.split("."))
    return parts[:2] if package == "apache-tvm-ffi" else parts


def import_file(path: Path) -> ModuleType:
    """Import an emitted module from where it is. Raises CallError C0712 where it is not there or does not run."""
    name = f"coda_lang_build_{manifest.digest(str(path.resolve()))[:16]}"
    found = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or found is None or found.loader is None:
        raise errors.refuse(errors.BUILD, f"the module {path} is missing", help="build it again: codac build FILE -o DIR")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as problem:
        del sys.modules[name]
        raise errors.refuse(
            errors.BUILD,
            f"the module {path} does not run: {type(problem).__name__}: {problem}",
            help="was it written by another version? build it again: codac build FILE -o DIR",
        ) from problem
    return module


def functions_of(module: ModuleType) -> tuple[Function, ...]:
    """The callables that a module defines, in order."""
    return tuple(value for value in vars(module).values() if isinstance(value, Function))
