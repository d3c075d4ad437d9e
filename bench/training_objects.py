"""The objects of bench/gpu_training.py: compiled side by side into a folder, or carried to a machine without the compiler in it.

In: compilations, a folder. Out: the folder as a cache of objects, with the versions that made them and the DSL's runtime library beside
them, so that a machine without the DSL can run what is there. Non-goals: what to compile (`training_cases`).
"""

from __future__ import annotations

import json
import lzma
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.gpu_specs import RUNTIME
from coda_lang.backend_cute import compile


def use(directory: Path) -> None:
    """Take objects from the folder; where the DSL is not installed, those that it made elsewhere and its runtime library."""
    os.environ["CODA_CACHE_DIR"] = str((directory / "objects").resolve())
    noted = directory / "versions.json"
    if compile.versions()[compile.PACKAGES[0]] != "none" or not noted.is_file():
        return
    made = json.loads(noted.read_text())
    compile.versions = lambda: made
    library = (directory / RUNTIME).resolve()
    if not library.exists():
        library.write_bytes(lzma.decompress((directory / f"{RUNTIME}.xz").read_bytes()))
    os.environ["CODA_DSL_RUNTIME"] = str(library)


def pack(directory: Path) -> None:
    """Put beside the objects what a machine without the DSL needs to run them."""
    (directory / "versions.json").write_text(json.dumps(compile.versions()))
    packed = directory / f"{RUNTIME}.xz"
    if not packed.exists():
        packed.write_bytes(lzma.compress(compile.runtime_library().read_bytes(), preset=6))


def compile_all(objects: Sequence[Any], workers: int, deadline: float) -> dict[str, str]:
    """Compile what the cache lacks, side by side, until `deadline`; why, for each key that failed."""
    from coda_lang.backend_cute import cache
    from coda_lang.backend_cute.worker import Pool

    missing = [o for o in objects if cache.find(o.key) is None]
    failed: dict[str, str] = {}
    count = max(min(workers, len(missing)), 1)

    def make(job: Any) -> None:
        if time.time() > deadline:
            failed[job.key] = f"{job.kernel.name}: no time was left to compile it"
            return
        try:
            cache.entry(job.key, lambda path: pool.run(job, path))
        except Exception as problem:
            key = job.config.key if job.config else "no configuration"
            failed[job.key] = f"{job.kernel.name} with {key} does not compile: {str(problem).strip().splitlines()[-1][:300]}"

    with Pool(count) as pool, ThreadPoolExecutor(count) as threads:
        list(threads.map(make, missing))
    return failed
