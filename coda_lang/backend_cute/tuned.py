"""Configurations that were measured to be the fastest, kept on disk beside the compiled objects.

In: a kernel's record and its size. Out: the configuration that a tuner found best there, or None. An entry is a small JSON file whose name
is the digest of all that the measurement depends on: the record, the bucket of the size, the device, the versions of the compilers and
this package's device code; what cannot be read is no entry. Non-goals: measuring (`tune`), what is offered (`configs`).
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import cache, manifest, spec
from .configs import Problem

STEPS = 4  # buckets to a doubling of an extent


def wanted() -> bool:
    """Does the user want calls to be tuned when a new shape is met (CODA_TUNE=1)?"""
    return os.environ.get("CODA_TUNE") == "1"


def bucket(size: int) -> int:
    """The size rounded up to one of four steps between powers of two, so that a tuned shape serves its neighbours."""
    unit = 1 << max(max(size, 1).bit_length() - STEPS.bit_length(), 0)
    return -(-size // unit) * unit


def path(launch: spec.Launch, problems: Sequence[Problem], device: str) -> Path:
    """Where the entry of a kernel at a size would be; names do not matter, what it computes does. A problem for each of its Gemms."""
    from . import compile

    record = repr([replace(gemm, name="") for gemm in spec.gemms(launch)])
    sizes = " ".join(str(bucket(size)) for problem in problems for size in problem)
    return cache.directory() / "tuned" / f"{manifest.digest(record, sizes, device, repr(compile.versions()), compile.device_code())}.json"


def find(launch: spec.Launch, problems: Sequence[Problem], device: str) -> spec.Config | None:
    """The tuned configuration, None where there is none or the entry is damaged."""
    if not (cache.directory() / "tuned").is_dir():
        return None
    try:
        entry = json.loads(path(launch, problems, device).read_text(encoding="utf-8"))
        return spec.Config(**entry["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def schedule(launch: spec.Launch, problems: Sequence[Problem], device: str) -> int | None:
    """The parts that a launch was measured to be fastest in (0: as planned), None where nobody measured it."""
    if not (cache.directory() / "tuned").is_dir():
        return None
    try:
        found = json.loads(path(launch, problems, device).read_text(encoding="utf-8"))["parts"]
        return found if isinstance(found, int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(launch: spec.Launch, problems: Sequence[Problem], device: str, config: spec.Config, facts: Mapping[str, Any]) -> None:
    """Write an entry, whole or not at all; `facts` are for people."""
    target = path(launch, problems, device)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, fresh = tempfile.mkstemp(dir=target.parent, suffix=".new")
    with open(handle, "w", encoding="utf-8") as file:
        json.dump({"config": asdict(config), "kernel": launch.name, "problems": list(problems), "device": device, **facts}, file)
    with contextlib.suppress(OSError):
        os.chmod(fresh, 0o644)
    os.replace(fresh, target)
