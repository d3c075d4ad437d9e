"""Compiles kernels, the only place that does; finds or keeps the objects; loads them.

In: `spec` records and the scalar functions they name. Out: shared objects for one architecture, through the cache on disk, and callables
`(*device_tensors, *ints)` that launch on torch's current stream. Compiling needs cutlass and a C compiler but no GPU, and happens in
worker processes (cutlass is not thread-safe, and a program that only runs kernels should not import it); loading needs tvm_ffi and
`libcute_dsl_runtime.so` only.
An object depends on: the record, its configuration and fixed extents, the source of the functions with the constants they use, this
package's device code, the versions of the compilers, the architecture, the number of multiprocessors. Non-goals: choosing
configurations, checking arguments.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

from . import cache, errors, layout, manifest, spec
from .configs import BYTES, MULTIPROCESSORS, offered
from .functions_source import source_of
from .row_configs import of_rows
from .worker import shared

ARCHITECTURES = ("sm_90a",)
ENTRY = "launch"
RUNTIME = "libcute_dsl_runtime.so"
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")

Functions = Mapping[str, Callable[..., tuple]]


@dataclass(frozen=True)
class Job:
    """One object to compile, as plain data: `text` is a module that defines the scalar functions, `sms` how many multiprocessors blocks
    are spread over."""

    kernel: spec.Kernel
    config: spec.Config | None
    fixed: tuple[tuple[str, int], ...]
    text: str
    arch: str
    sms: int = MULTIPROCESSORS

    @property
    def record(self) -> str:
        """Identifies what is compiled, whatever it is compiled with."""
        return manifest.digest(repr(self.kernel), repr(self.config), repr(self.fixed), self.text)

    @property
    def key(self) -> str:
        """Identifies the object."""
        return manifest.digest(self.record, self.arch, str(self.sms), repr(versions()), device_code())

    def run(self, path: Path) -> None:
        """What a worker does."""
        compile_job(self, path)


def functions_of(kernel: spec.Kernel) -> tuple[str, ...]:
    """The names of the scalar functions a kernel calls."""
    return (kernel.fn,) if isinstance(kernel, spec.Finish) else tuple(dict.fromkeys(p.fn for g in spec.gemms(kernel) for p in g.phases))


def job(
    kernel: spec.Kernel,
    config: spec.Config | None,
    functions: Functions,
    fixed: Mapping[str, int] | None = None,
    arch: str = "sm_90a",
    sms: int = MULTIPROCESSORS,
) -> Job:
    """The compilation of one kernel; `fixed` are the extents that are not free. Raises CallError where it is none.

    Finishers and row kernels are the same for every number of multiprocessors.
    """
    if arch not in ARCHITECTURES:
        raise errors.refuse(errors.ARCHITECTURE, f"kernels are compiled for {', '.join(ARCHITECTURES)}, not for {arch}")
    used = {axis for tensor in kernel.tensors for mode in tensor.modes for axis in mode}
    extents = tuple(sorted((axis, n) for axis, n in (fixed or {}).items() if axis in used))
    text = source_of({name: functions[name] for name in functions_of(kernel)})
    same = isinstance(kernel, spec.Finish) or of_rows(kernel)
    return Job(kernel, config, extents, text, arch, MULTIPROCESSORS if same else sms)


def object_for(
    kernel: spec.Kernel,
    config: spec.Config | None,
    functions: Functions,
    *,
    fixed: Mapping[str, int] | None = None,
    arch: str = "sm_90a",
) -> Path:
    """The shared object of a kernel, from the cache or compiled into it. Raises CallError (tools, cache), ValueError (config)."""
    return objects_for([job(kernel, config, functions, fixed, arch)])[0]


def objects_for(jobs: Iterable[Job], workers: int | None = None, done: Callable[[int], None] = lambda n: None) -> list[Path]:
    """The shared objects of several kernels in order, those not in the cache compiled side by side; `done` hears how many are there."""
    jobs = list(jobs)
    found = {j: cache.find(j.key) for j in jobs}
    missing = [j for j, path in found.items() if path is None]
    if missing:
        count = min(len(missing), workers or cores())
        with shared(count) as pool, ThreadPoolExecutor(count) as threads:
            made = threads.map(lambda j: cache.entry(j.key, lambda path: pool.run(j, path)), missing)
            for n, (j, made_path) in enumerate(zip(missing, made), len(found) - len(missing) + 1):
                found[j] = made_path
                done(n)
    return [path for j in jobs if (path := found[j]) is not None]


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """The versions of the packages that decide what an object is; "none" where one is not installed."""
    return {package: _version(package) for package in PACKAGES}


@once
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@once
def device_code() -> str:
    """A digest of this package's sources that make the kernels."""
    here = Path(__file__).parent
    names = ("spec", "configs", "row_configs", "layout", "device_fns", "device_scalar", "finish", "compile")
    files = [here / f"{name}.py" for name in names]
    return manifest.digest(*(f.read_text(encoding="utf-8") for f in [*files, *sorted((here / "gemm_sm90").glob("*.py"))]))


# --- compiling, in a worker --------------------------------------------------------------------------------------------


def dims(
    kernel: spec.Gemm | spec.Finish, tensor: spec.Tensor, fixed: Mapping[str, int]
) -> tuple[tuple[int | None, ...], tuple[int | None, ...], int]:
    """Shape and strides of a device tensor, None where they are known at run time only, and what such strides are multiples of."""
    reduced = {s.work: s.kind for s in getattr(kernel, "sinks", ()) if isinstance(s, (spec.RowReduce, spec.ColReduce))}
    if isinstance(kernel, spec.Finish):
        reduced = {p.work: p.kind for p in kernel.partials}
    if tensor.name in reduced:
        outer = spec.planes(reduced[tensor.name])
        return (*outer, None, None), (*(None for _ in outer), None, 1), 1
    if not tensor.modes:
        return (1,), (1,), 1
    shape: list[int | None] = []
    for i, mode in enumerate(tensor.modes):
        sizes = [None] if tensor.part and tensor.part.mode == i else [fixed.get(axis) for axis in mode]
        extent = 1
        for size in sizes:
            extent *= size or 1
        shape.append(None if None in sizes else extent)
    strides: list[int | None] = [None] * (len(shape) - 1) + [1]
    if tensor.name in layout.packed_tensors(kernel) and len(strides) > 1:
        shape[-1] = strides[-2] = 2
    plain = tensor.role == "work" or (isinstance(kernel, spec.Finish) and tensor.name in kernel.outputs)
    return tuple(shape), tuple(strides), 1 if plain or tensor.loose else max(layout.ALIGNMENT // BYTES[tensor.dtype], 1)


def compile_job(job: Job, path: Path) -> None:
    """Compile in this process, which imports cutlass, and link to `path`. Raises ImportError or CallError where a tool is missing."""
    linker = shutil.which(os.environ.get("CC", "")) or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if linker is None:
        raise errors.refuse(errors.TOOLS, "compiling kernels needs a C compiler to link them", help="install gcc, or set CC")
    os.environ["CUTE_DSL_ARCH"] = job.arch
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from .finish import Finisher
    from .gemm_sm90 import kernel_of
    from .gemm_sm90.views import DTYPES

    fixed = dict(job.fixed)

    def fake(kernel: spec.Gemm | spec.Finish, tensor: spec.Tensor) -> Any:
        shape, strides, divisor = dims(kernel, tensor, fixed)
        return make_fake_tensor(
            DTYPES[tensor.dtype],
            tuple(cute.sym_int() if n is None else n for n in shape),
            stride=tuple(cute.sym_int64(divisibility=divisor) if n is None else n for n in strides),
            assumed_align=layout.alignment(tensor),
        )

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "functions.py"
        source.write_text(job.text, encoding="utf-8")
        found = importlib.util.spec_from_file_location("functions", source)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        arguments = [fake(k, t) for k in spec.members(job.kernel) for t in k.tensors] + [cutlass.Int32(1) for _ in job.kernel.extents]
        if isinstance(job.kernel, spec.Finish):
            kernel: Any = Finisher(job.kernel, module.FUNCTIONS)
        else:
            assert job.config is not None
            kernel = kernel_of(job.kernel, job.config, module.FUNCTIONS, job.sms)
        compiled = cute.compile(kernel, *arguments, make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi")
        binary = Path(folder) / "kernel.o"
        compiled.export_to_c(str(binary), function_name=ENTRY)
        subprocess.run([linker, "-shared", "-o", str(path), str(binary)], check=True, capture_output=True, text=True)


# --- loading -----------------------------------------------------------------------------------------------------------


def runtime_library(beside: Path | None = None) -> Path:
    """`libcute_dsl_runtime.so`: CODA_DSL_RUNTIME, the folder `beside`, or the installed package. Raises CallError where there is none."""
    chosen = os.environ.get("CODA_DSL_RUNTIME")
    candidates = [Path(chosen)] if chosen else []
    if beside is not None and not chosen:
        candidates.append(beside / RUNTIME)
    found = None if chosen else importlib.util.find_spec("nvidia_cutlass_dsl")  # finds the folder, imports nothing
    for root in found.submodule_search_locations or () if found else ():
        candidates += sorted(Path(root).glob(f"*/lib/{RUNTIME}"))
    for path in candidates:
        if path.is_file():
            return path
    what = f"CODA_DSL_RUNTIME names {chosen}, which is no file" if chosen else f"{RUNTIME} is not found"
    raise errors.refuse(
        errors.TOOLS, f"loading kernels needs the runtime of the CuTe DSL: {what}",
        help="install nvidia-cutlass-dsl, put the library beside the kernels, or set CODA_DSL_RUNTIME to its path",
    )  # fmt: skip


@once
def _load_runtime(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def load(path: Path) -> Callable[..., None]:
    """A shared object as a callable of device tensors, then ints. Raises CallError where tvm_ffi or the runtime library is missing."""
    try:
        import tvm_ffi
    except ImportError:
        raise errors.refuse(errors.TOOLS, "loading kernels needs apache-tvm-ffi", help="pip install apache-tvm-ffi") from None
    _load_runtime(runtime_library(Path(path).parent))
    return tvm_ffi.load_module(str(path))[ENTRY]


# --- building ahead of time --------------------------------------------------------------------------------------------


def build(
    programs: Iterable[spec.Program],
    functions: Functions,
    directory: Path,
    *,
    configs: Mapping[str, Iterable[spec.Config]] | None = None,
    module: Path | None = None,
    arch: str = "sm_90a",
    sms: int = MULTIPROCESSORS,
    workers: int | None = None,
    parts: Mapping[str, list[int]] = {},
) -> manifest.Manifest:
    """Compile every kernel of `programs` into `directory`, with a manifest and a copy of `module` (the file that defines them).

    Gemms that run together are there alone as well.

    `configs` maps the name of a Gemm, or of several together, to the configurations to compile; one not named gets all it is offered.
    `parts` says which launches are among the kernels in other schedules too (`schedules.ahead`). Needs no GPU.
    """
    wanted: list[tuple[str, spec.Config | None, Job]] = []
    for program in programs:
        fixed = {axis: n for axis, n in program.extents if n is not None}
        for kernel in spec.built(program):
            chosen: Iterable[spec.Config | None] = (None,)
            if not isinstance(kernel, spec.Finish):
                chosen = (configs or {}).get(kernel.name) or offered(kernel)
            wanted += [(program.name, config, job(kernel, config, functions, fixed, arch, sms)) for config in chosen]
    objects = objects_for([j for _, _, j in wanted], workers)
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    for (program_name, config, j), source in zip(wanted, objects):
        key = config.key if config else None
        file = f"{re.sub(r'[^A-Za-z0-9_.+-]', '_', j.kernel.name)}{'-' + key if key else ''}.so"
        shutil.copyfile(source, directory / file)
        entries.append(manifest.Entry(program_name, j.kernel.name, key, j.record, file, cache.checksum(directory / file)))
    if module is not None:
        shutil.copyfile(module, directory / module.name)
    made = manifest.Manifest(arch, tuple(entries), module.name if module else None, versions(), directory, dict(parts), sms)
    manifest.write(made)
    return made
