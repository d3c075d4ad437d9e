"""The one place that strings the layers together: text → syntax → IR → passes → kernel records → Python text → shared libraries.

In: a path, a text or a `Source`. Out: checked programs, plans, the emitted module, a folder of built kernels.
Each function imports only the layers that it runs, so checking and emitting load neither torch nor cutlass.
Non-goals: parsing command lines, printing (`cli`), running on tensors (`torch_api`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .diagnostics.model import CodaError, Diagnostic, InternalError
from .source import Source

if TYPE_CHECKING:
    from .backend_cute.function import Function
    from .backend_cute.manifest import Manifest
    from .ir.graph import Program
    from .ir.kernels import Plan

T = TypeVar("T")
MAX_BYTES = 4 << 20  # a source file larger than this is a mistake, not a program


@dataclass(frozen=True)
class Options:
    """What the user chose: values of `param`s, choices of generic types, extents of axes, no laws that move a rounding point."""

    params: Mapping[str, float] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    extents: Mapping[str, int] = field(default_factory=dict)


def read(text_or_path: str | os.PathLike[str] | Source) -> Source:
    """The source that a user means: a `Source`, a path, a string that ends in `.coda`, or else the text itself.

    Raises CodaError (C0801) for a file that cannot be read as text.
    """
    if isinstance(text_or_path, Source):
        return text_or_path
    if isinstance(text_or_path, str) and ("\n" in text_or_path or not text_or_path.endswith(".coda")):
        return Source("<text>", _normal(text_or_path))
    return read_file(os.fspath(text_or_path))


def read_file(name: str) -> Source:
    """The source in the file `name`, or on standard input for `-`; line ends become LF, a byte order mark is dropped.

    Raises CodaError (C0801) where it cannot be read as text.
    """
    if name == "-":
        return Source("<stdin>", _decode("<stdin>", sys.stdin.buffer.read(MAX_BYTES + 1)))
    try:
        with open(name, "rb") as file:
            return Source(_shown(name), _decode(name, file.read(MAX_BYTES + 1)))
    except FileNotFoundError:
        raise _unreadable(name, "there is no such file", _neighbours(name)) from None
    except IsADirectoryError:
        raise _unreadable(name, "it is a folder", _neighbours(os.path.join(name, ""))) from None
    except (OSError, ValueError) as e:
        raise _unreadable(name, getattr(e, "strerror", None) or str(e)) from None


def _shown(name: str) -> str:
    """A file's name as it can stand in messages and in the docstring and comments of Python text."""
    return "".join(c if c.isprintable() else "?" for c in name).replace("\\", "/").replace('"', "'")


def _normal(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _decode(name: str, data: bytes) -> str:
    if len(data) > MAX_BYTES:
        raise _unreadable(name, f"it is larger than {MAX_BYTES >> 20} MiB", "a .coda file holds a few programs; is this the right file?")
    if b"\0" in data:
        raise _unreadable(name, "it holds binary data", "a .coda file is UTF-8 text")
    try:
        return _normal(data.decode("utf-8"))
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise _unreadable(name, f"line {line} is not UTF-8 text", "save the file as UTF-8") from None


def _unreadable(name: str, why: str, help: str = "") -> CodaError:
    return CodaError([Diagnostic("C0801", f"cannot read {name}: {why}", help=help)])


def _neighbours(name: str) -> str:
    """A remedy for a missing file: a near name in its folder, or the programs that the folder has."""
    import difflib

    folder, wanted = os.path.split(name)
    try:
        found = sorted(f for f in os.listdir(folder or ".") if f.endswith(".coda"))
    except OSError:
        return f"the folder {folder} does not exist" if folder else ""
    near = difflib.get_close_matches(wanted, found, 1)
    if near:
        return f"did you mean {os.path.join(folder, near[0])}?"
    return f"{folder or 'this folder'} has " + (", ".join(found[:8]) + (", …" if len(found) > 8 else "") if found else "no .coda files")


def check(text_or_path: str | os.PathLike[str] | Source, options: Options = Options()) -> tuple[Plan, ...]:
    """Everything that can be wrong with a source, short of emitting it: a plan of each program, with its derivative. What the derivative
    saves is not weighed as for `plan`: that there is a way says enough.

    Raises CodaError with all errors of the first stage that has any.
    """
    from . import passes
    from .backend_cute.lower import records

    def checked(program: Program) -> Plan:
        found = passes.checked(program, options.strict)
        for plan in (found, *((found.derived.saving, found.derived.backward) if found.derived else ())):
            if plan is not None:
                records(plan)
        return found

    return tuple(_each(read(text_or_path), options, checked))


def programs(text_or_path: str | os.PathLike[str] | Source, options: Options = Options()) -> tuple[Program, ...]:
    """The source's programs as tensor IR, names and types resolved; a generic program once a choice of its types.

    Raises CodaError; C0128 for a source that holds no program, which would compile to nothing.
    """
    from .ir.build import build as build_ir
    from .syntax.parse import parse
    from .syntax.problems import empty

    source = read(text_or_path)
    with _bug_net("the front end", lambda: source.text):
        module = parse(source)
        found = build_ir(module, (source,), params=options.params, types=options.types, extents=options.extents)
    if not found:
        raise CodaError([empty(module.span)], (source,))
    return found


def warnings(text_or_path: str | os.PathLike[str] | Source, options: Options = Options()) -> tuple[Diagnostic, ...]:
    """What in a source is accepted, but hardly meant, each once. Raises CodaError as `programs` does."""
    from .ir.build_warnings import warnings as found

    return tuple({(d.code, d.span): d for program in programs(text_or_path, options) for d in found(program)}.values())


def plan(text_or_path: str | os.PathLike[str] | Source, options: Options = Options()) -> tuple[Plan, ...]:
    """The kernels of each program and of its derivative, in order. Raises CodaError with the errors of all programs."""
    from . import passes

    return tuple(_each(read(text_or_path), options, lambda program: passes.trained(program, options.strict)))


def launches(plan: Plan, backward: bool = False) -> str:
    """Which kernels of a plan, or of its derivative, run together, and what that saves; "" where each has a launch of its own."""
    from .backend_cute.lower import lower, lower_backward
    from .backend_cute.together import report
    from .passes.state import nominal

    chosen = plan.derived.backward if backward and plan.derived else plan
    saved = frozenset(t.name for t in plan.derived.residuals) if backward and plan.derived else frozenset()
    return "\n".join(report(lower_backward(plan) if backward else lower(plan), nominal(chosen.program), saved))


def check_axes(given: Iterable[str], free: Collection[str]) -> None:
    """Raises CodaError C0803 for an axis that is none of the free ones."""
    for name in sorted(set(given) - set(free)):
        raise CodaError([Diagnostic("C0803", f"there is no free axis {name}", notes=(f"the free axes are {', '.join(sorted(free))}",))])


def schedules(plan: Plan, given: Mapping[str, int], backward: bool = False) -> str:
    """What each schedule of each launch of a plan, or of its derivative, takes by the model; axes that are not `given` are nominal."""
    from .backend_cute.forecast import report

    return report(plan, given, backward)


def stages() -> tuple[str, ...]:
    """Where `ir_text` can stop: after `build`, or after a pass."""
    from . import passes

    return ("build", *passes.names())


def ir_text(text_or_path: str | os.PathLike[str] | Source, after: str, options: Options = Options()) -> str:
    """The programs in the text form of the IR, after one of `stages()`."""
    from . import passes
    from .ir.printer import to_text

    def text(program: Program) -> str:
        return to_text(program) if after == "build" else passes.after(program, after, options.strict)

    return "\n".join(_each(read(text_or_path), options, text))


def _each(source: Source, options: Options, step: Callable[[Program], T]) -> list[T]:
    """`step` of every program, or the errors of all of them."""
    from .ir.printer import to_text

    done: list[T] = []
    problems: list[Diagnostic] = []
    sources: list[Source] = []
    for program in programs(source, options):
        with _bug_net(f"the passes over {program.name}", lambda program=program: to_text(program)):  # type: ignore[misc]
            try:
                done.append(step(program))
            except CodaError as e:
                problems += e.diagnostics
                sources += e.sources.values()
    if problems:
        raise CodaError(problems, (source, *sources))
    return done


def emit(text_or_path: str | os.PathLike[str] | Source, options: Options = Options(), *, standalone: bool = False) -> str:
    """The text of kernel.py: readable kernels, wrappers and references of every program; `standalone` inlines the runtime."""
    from .backend_cute.emit import emit as emit_text

    source = read(text_or_path)
    plans = plan(source, options)
    with _bug_net("emission", lambda: source.text):
        text = emit_text(plans)
        if standalone:
            from .backend_cute.standalone import inline

            text = inline(text)
    return text


def build(
    text_or_path: str | os.PathLike[str] | Source,
    directory: str | os.PathLike[str],
    options: Options = Options(),
    *,
    arch: str = "sm_90a",
    configs: Iterable[str] = (),
    parts: Iterable[int] = (),
    sms: int | None = None,
) -> Manifest:
    """Compile the kernels to shared libraries in `directory`, with a manifest and the emitted module, for `load`. Needs no GPU.

    `configs` are keys of tile configurations, or "all"; without any, a few that serve small and large shapes. `parts`: build launches
    with K in so many parts as well (1: unfused); a loaded function then takes what the model expects to be fastest. `sms`: the
    multiprocessors that launches are spread over, by default an H200's.
    Raises CodaError for errors of the source, a missing package, an unknown configuration, a folder that cannot be written.
    """
    from .backend_cute import compile, schedules
    from .backend_cute.configs import MULTIPROCESSORS, candidates, portfolio, variants, wholes
    from .backend_cute.spec import Finish, built

    text = emit(text_or_path, options)
    _need("compiling kernels", "torch,cute", torch="torch", cutlass="nvidia-cutlass-dsl", tvm_ffi="apache-tvm-ffi")
    name, wanted, count = os.fspath(directory), tuple(configs), sms or MULTIPROCESSORS
    try:
        os.makedirs(name, exist_ok=True)
        with _imported(text) as (path, found):
            programs = [program for fn in found for program in fn.programs]
            named = {k.name: k for program in programs for k in built(program) if not isinstance(k, Finish)}
            whole = variants(found)
            offers = {name: candidates(launch, whole[name]) for name, launch in named.items()}
            known = {c.key for offer in offers.values() for c in offer}
            for key in set(wanted) - known - {"all"}:
                raise CodaError([Diagnostic("C0803", f"there is no configuration {key}", notes=(f"there are {', '.join(sorted(known))}",))])
            chosen = {
                name: tuple(c for c in offers[name] if "all" in wanted or c.key in wanted) or portfolio(launch, whole[name], count)
                for name, launch in named.items()
            }
            functions = {n: f for fn in found for n, f in fn.functions.items()}
            more = schedules.ahead([(p, wholes(fn.saving)) for fn in found for p in fn.programs], functions, parts)
            programs, functions, chosen = programs + more.programs, functions | more.functions, chosen | more.configs
            return compile.build(programs, functions, Path(name), configs=chosen, module=path, arch=arch, sms=count, parts=more.parts)
    except FileExistsError:
        raise _unwritable(name, "it is a file, and a folder is wanted") from None
    except OSError as e:
        raise _unwritable(name, e.strerror or str(e)) from None


def self_check(text_or_path: str | os.PathLike[str] | Source, options: Options = Options(), arguments: Iterable[str] = ()) -> int:
    """What `python kernel.py` does, without keeping kernel.py: compare with float64, print, and return the exit status."""
    text = emit(text_or_path, options)
    _need("checking numbers", "torch", torch="torch")
    from .backend_cute.selfcheck import main

    with _imported(text) as (_, found):
        return main(found, list(arguments))


def tune(
    text_or_path: str | os.PathLike[str] | Source,
    options: Options,
    extents: Mapping[str, int],
    *,
    most: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Any]:
    """Find the fastest configuration of every kernel at a shape, on the GPU at hand: `backend_cute.tune.Trial`s; later calls use the best.

    Raises CodaError where the shape does not fit a program or there is no Hopper GPU.
    """
    from .backend_cute import tune as tuning

    with _measurable(text_or_path, options, extents) as found:
        return [trial for fn, sizes in found for trial in tuning.tune(fn, sizes, most=most or tuning.MOST, progress=progress)]


def bench(text_or_path: str | os.PathLike[str] | Source, options: Options, extents: Mapping[str, int]) -> list[Any]:
    """Measure every program at a shape, on the GPU at hand: `benchmark.Report`s. Raises CodaError as `tune` does."""
    with _measurable(text_or_path, options, extents) as found:
        from . import benchmark

        return [report for fn, sizes in found for report in benchmark.reports(fn, sizes)]


@contextlib.contextmanager
def _measurable(
    text_or_path: str | os.PathLike[str] | Source, options: Options, extents: Mapping[str, int]
) -> Iterator[list[tuple[Function, dict[str, int]]]]:
    """The functions of a source with the extents of all axes: those given, else nominal. Raises CodaError where one is unknown."""
    source = read(text_or_path)
    text = emit(source, options)
    _need("measuring kernels", "torch,cute", torch="torch")
    from .backend_cute import tune as tuning

    with _imported(text) as (_, functions):
        check_axes(extents, {name for fn in functions for name, size in fn.program.extents if size is None})
        found = []
        for fn in functions:
            sizes = {a: n if n is not None else extents.get(a, dict(fn.program.nominal).get(a)) for a, n in fn.program.extents}
            missing = [a for a, n in sizes.items() if n is None]
            if missing:
                help = f"give --shape {','.join(a + '=…' for a in missing)}"
                raise CodaError([Diagnostic("C0803", f"{fn.program.name}: nothing says how large {missing[0]} is", help=help)])
            found.append((fn, {a: n for a, n in sizes.items() if n is not None}))
        tuning.gpu()  # said first: without one, no package helps
        _need("measuring kernels", "torch,cute", cutlass="nvidia-cutlass-dsl", tvm_ffi="apache-tvm-ffi")
        yield found


def gradient_check(
    text_or_path: str | os.PathLike[str] | Source, options: Options = Options(), seed: int = 0, extents: Mapping[str, int] = {}
) -> Iterator[tuple[bool, str]]:
    """The derived backward against float64, under every way to save: a line for each gradient, and whether it is good.

    `extents` of free axes; those left out are small."""
    _need("checking numbers", "torch", torch="torch")
    from . import gradcheck
    from .passes.training import differentiable

    for program in filter(differentiable, programs(text_or_path, options)):
        yield from gradcheck.lines(program, seed, options.strict, extents)


def _need(what: str, extra: str, **packages: str) -> None:
    """Raises CallError for the first module (name = package) that is not installed; `extra` has them all."""
    from .backend_cute import errors

    for module, package in packages.items():
        if importlib.util.find_spec(module) is None:
            raise errors.refuse(errors.TOOLS, f"{what} needs {package}", help=f"in the clone: pip install -e '.[{extra}]'")


@contextlib.contextmanager
def _imported(text: str) -> Iterator[tuple[Path, Sequence[Function]]]:
    """An emitted module in a temporary folder, and its functions."""
    from .backend_cute.load import functions_of, import_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(text, encoding="utf-8")
        yield path, functions_of(import_file(path))


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file whole or not at all. Raises CodaError (C0802) where it cannot be written."""
    name = os.fspath(path)
    target = os.path.realpath(name)
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            if os.path.isdir(target):
                raise IsADirectoryError(0, "it is a folder")
            with open(target, "w", encoding="utf-8") as device:  # a terminal, a pipe
                device.write(text)
            return
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=os.path.basename(target) + ".")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except FileNotFoundError:
        raise _unwritable(name, f"the folder {os.path.dirname(name)} does not exist") from None
    except BrokenPipeError:
        raise
    except OSError as e:
        raise _unwritable(name, e.strerror or str(e)) from None


def _unwritable(name: str, why: str) -> CodaError:
    return CodaError([Diagnostic("C0802", f"cannot write {name}: {why}")])


@contextlib.contextmanager
def _bug_net(stage: str, dump: Callable[[], str]) -> Iterator[None]:
    """Whatever escapes a stage and is not the user's error is a bug of ours: save what it worked on and say so."""
    try:
        yield
    except CodaError:
        raise
    except Exception as e:
        said = str(e) if isinstance(e, InternalError) else f"{type(e).__name__}: {e}"
        raise InternalError(f"{stage} failed: {said}\nwhat it worked on is saved in {save_bug(dump)}") from e


def save_bug(dump: Callable[[], str]) -> str:
    """Write what was being worked on and the current exception's traceback to a new temporary file; returns its path."""
    handle, name = tempfile.mkstemp(prefix="codac-bug-", suffix=".txt")
    with open(handle, "w", encoding="utf-8", errors="replace") as file:
        try:
            file.write(dump())
        except Exception:  # the printer may be what is broken
            file.write("(it cannot be printed)\n")
        file.write("\n\n" + traceback.format_exc())
    return name
