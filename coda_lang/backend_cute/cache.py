"""The cache of compiled objects on disk, shared by all processes of a user.

In: a key made of everything an object depends on, and a function that makes the object. Out: the path of the object. An entry is
`KEY.so` beside `KEY.sha256`, its checksum; an entry whose checksum does not fit is a miss and is made again. Entries are written under
a lock for the key and renamed into place, so readers never see half of one and two processes never make the same one twice.
Folder: CODA_CACHE_DIR, else the user's cache folder. Non-goals: eviction (objects are 50 kB each) and what goes into a key.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from . import errors


def directory() -> Path:
    """Where entries lie: CODA_CACHE_DIR, or `coda_lang` in XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("CODA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coda_lang"


def checksum(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find(key: str) -> Path | None:
    """The entry's object, None where there is none or it is corrupt."""
    path = directory() / f"{key}.so"
    try:
        expected = path.with_suffix(".sha256").read_text(encoding="ascii")
        return path if checksum(path) == expected else None
    except (OSError, UnicodeDecodeError):
        return None


def entry(key: str, make: Callable[[Path], None]) -> Path:
    """The entry's object; where there is none, `make` writes it to the path it is given. Raises CallError where the folder is of no use."""
    found = find(key)
    if found is not None:
        return found
    root = directory()
    try:
        root.mkdir(parents=True, exist_ok=True)
        import filelock  # only who compiles waits for others; loading a build is to be quick

        with filelock.FileLock(root / f"{key}.lock"):
            return find(key) or _write(root, key, make)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise errors.refuse(
            errors.CACHE, f"compiled kernels cannot be kept in {root}: {reason}", help="set CODA_CACHE_DIR to a folder that can be written"
        ) from None


def _write(root: Path, key: str, make: Callable[[Path], None]) -> Path:
    """Make the object in a folder of its own, then put it and its checksum in place; the lock is held."""
    path = root / f"{key}.so"
    with tempfile.TemporaryDirectory(prefix=".new-", dir=root) as folder:
        fresh = Path(folder) / "object.so"
        make(fresh)
        note = Path(folder) / "checksum"
        note.write_text(checksum(fresh), encoding="ascii")
        os.replace(fresh, path)
        os.replace(note, path.with_suffix(".sha256"))
    return path
