"""The Python interface: `compile` a source, `load` a build, call the result on torch tensors.

In: the text or path of a .coda source, or the directory of a build. Out: a `Function`, or a namespace of them where there are several
programs. Importing this module imports torch; cutlass is imported by no process but the workers that compile.
Non-goals: what a call does (`backend_cute.function`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from .backend_cute import cache, errors, manifest
from .backend_cute.function import Function
from .backend_cute.load import functions_of, import_file
from .backend_cute.load import load as load_build
from .diagnostics.model import CodaError, Diagnostic
from .source import Source


class ProgramError(CodaError):
    """A source that is refused: as text what `codac` prints, with places, reasons and edits."""

    def __str__(self) -> str:
        from .diagnostics.render import render

        return render(self)


def compile(
    text_or_path: str | os.PathLike[str] | Source,
    *,
    types: Mapping[str, str] | None = None,
    extents: Mapping[str, int] | None = None,
    strict: bool = False,
    **params: float,
) -> Function | SimpleNamespace:
    """The program in a source as a callable on torch tensors; several programs give a namespace with one attribute a program.

    `text_or_path` is a path, or the text itself where it has several lines or does not end in `.coda`. `params` give values to the
    program's `param`s, `types` choices to its generic types, `extents` sizes to its axes, {"qh": 16}: those that the text fixes are
    defaults; `strict` forbids laws that move a rounding point. Kernels are compiled when tensors of their shape are first met, and kept
    on disk. Raises ProgramError, a CodaError, with all errors of the source.
    """
    for name, value, kind, example in (
        ("types", types or {}, Mapping, '{"T": "f16"}'),
        ("extents", extents or {}, Mapping, '{"qh": 16}'),
        ("strict", strict, bool, "True"),
    ):
        if not isinstance(value, kind):
            help = f"write {name}={example}; a param called {name} gets another value by `codac --param {name}=…` alone"
            raise CodaError([Diagnostic("C0210", f"{name}={value!r} is no option of compile", help=help)])
    from . import driver  # a build is loaded without the front end

    try:
        text = driver.emit(text_or_path, driver.Options(params, types or {}, strict, extents or {}))
    except CodaError as e:
        raise ProgramError(e.diagnostics, tuple(e.sources.values())) from None
    return _result(functions_of(import_file(_written(text))))


def load(directory: str | os.PathLike[str]) -> Function | SimpleNamespace:
    """The programs of a directory that `codac build` wrote, as `compile` gives them; runs the module in it, never compiles.

    Raises CodaError: C0712 where the directory is no build or damaged, C0705 where it is for another architecture.
    """
    return _result(load_build(directory))


def _result(functions: Sequence[Function]) -> Function | SimpleNamespace:
    return functions[0] if len(functions) == 1 else SimpleNamespace(**{fn.program.name: fn for fn in functions})


def _written(text: str) -> Path:
    """The emitted module as a file beside the cached objects: the device compiler reads functions from their source file."""
    folder = cache.directory() / "modules"
    path = folder / f"{manifest.digest(text)}.py"
    try:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            folder.mkdir(parents=True, exist_ok=True)
            handle, fresh = tempfile.mkstemp(dir=folder, suffix=".py")
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(fresh, path)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise errors.refuse(
            errors.CACHE, f"emitted modules cannot be kept in {folder}: {reason}", help="set CODA_CACHE_DIR to a folder that can be written"
        ) from None
    return path
