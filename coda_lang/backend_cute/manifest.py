"""What a directory of kernels compiled ahead of time holds, as `manifest.json`.

In: the objects `compile.build` made. Out: `Manifest`, which finds the object of a kernel and refuses a directory that is damaged, of
another format or compiled from other records. Needs neither torch nor cutlass. Non-goals: compiling, loading.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import errors, spec
from .cache import checksum
from .configs import MULTIPROCESSORS

FORMAT = 1
FILE = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """One object: the kernel it is compiled from (`record` identifies it and its functions), for a Gemm the configuration's key."""

    program: str
    kernel: str
    config: str | None
    record: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A build. `module` is the file with the programs, beside the objects, if there is one; `versions` are those of the compilers.

    `parts`: of launches that were built in several schedules, the parts along K that they can be in beside the planned one. `sms`: how many
    multiprocessors the kernels' blocks are spread over.
    """

    arch: str
    entries: tuple[Entry, ...]
    module: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    directory: Path = Path()
    parts: dict[str, list[int]] = field(default_factory=dict)
    sms: int = MULTIPROCESSORS

    def configs(self, kernel: spec.Kernel) -> tuple[str, ...]:
        """The keys of the configurations a Gemm was compiled with; empty for a Finish or an unknown kernel."""
        return tuple(e.config for e in self.entries if e.kernel == kernel.name and e.config)

    def find(self, kernel: spec.Kernel, config: spec.Config | None, record: str | None = None) -> Path:
        """The object of a kernel; `record` (from `compile.record_of`) makes sure that it is the one meant.

        Raises CallError C0712 where it is missing, stale or damaged.
        """
        key = config.key if config else None
        what = f"{kernel.name} with tiles {key}" if key else kernel.name
        entry = next((e for e in self.entries if e.kernel == kernel.name and e.config == key), None)
        if entry is None:
            others = ", ".join(self.configs(kernel))
            raise _refuse(self.directory, f"has no object for {what}", *((f"it has {others}",) if others else ()))
        if record is not None and entry.record != record:
            raise _refuse(self.directory, f"is stale: its object for {what} was compiled from another program or other functions")
        path = self.directory / entry.file
        try:
            good = checksum(path) == entry.sha256
        except OSError as problem:
            raise _refuse(self.directory, f"lacks {entry.file}: {problem.strerror}") from None
        if not good:
            raise _refuse(self.directory, f"is damaged: {entry.file} does not have the checksum that {FILE} states")
        return path


def write(manifest: Manifest) -> None:
    """Write `manifest.json` into its directory."""
    content: dict[str, Any] = {"format": FORMAT, **asdict(manifest)}
    del content["directory"]
    (manifest.directory / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(directory: Path) -> Manifest:
    """The manifest of a build. Raises CallError C0712 where the directory is no build this version can read."""
    directory = Path(directory)
    try:
        content = json.loads((directory / FILE).read_text(encoding="utf-8"))
        found = content.pop("format")
        if found != FORMAT:
            raise _refuse(directory, f"has format {found}; this version reads {FORMAT}")
        return Manifest(**{**content, "entries": tuple(Entry(**e) for e in content["entries"]), "directory": directory})
    except OSError as problem:
        raise _refuse(directory, f"cannot be read: {FILE}: {problem.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _refuse(directory, f"has a {FILE} that is none") from None


def _refuse(directory: Path, what: str, *notes: str) -> errors.CallError:
    return errors.refuse(errors.BUILD, f"the build in {directory} {what}", *notes, help="build it again: codac build FILE -o DIR")


def digest(*texts: str) -> str:
    """One SHA-256 of several texts, in hexadecimal."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
