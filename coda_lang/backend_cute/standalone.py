"""A kernel.py that carries its runtime: it needs torch, nvidia-cutlass-dsl and apache-tvm-ffi, and not this package.

In: the text of an emitted module. Out: the same module, the runtime's sources packed into comments at its end and unpacked into the
user's cache folder when it is imported (the DSL traces functions of real files only). Non-goals: making the text smaller or faster.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
FRONT = ("lower", "together", "forecast", "emit", "text", "standalone")  # modules of this folder that make text, not needed to run it
SHARED = ("source.py", "diagnostics/model.py")
WIDTH = 128
MARK = "# runtime: "

BOOTSTRAP = '''

def _runtime() -> str:
    """Unpack the runtime, which stands in comments at this file's end, into the user's cache folder; the name of its package."""
    name, *lines = Path(__file__).read_text(encoding="utf-8").rpartition("\\n# runtime: ")[2].split("\\n")
    files = json.loads(zlib.decompress(base64.b64decode("".join(line.removeprefix("# ") for line in lines))))
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = Path(os.environ.get("CODA_CACHE_DIR") or Path(home) / "coda_lang") / "runtime"
        _unpack(files, root / name)
    except (OSError, RuntimeError):  # no such folder can be made: one for this process alone
        root = Path(tempfile.mkdtemp(prefix="coda_lang-"))
        _unpack(files, root / name)
    sys.path.insert(0, str(root))
    return name


def _unpack(files: dict, folder: Path) -> None:
    for path, text in files.items():
        target = folder / path
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, fresh = tempfile.mkstemp(dir=target.parent)
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(fresh, target)


_package = _runtime()
'''
IMPORTS = ("base64", "importlib", "json", "os", "sys", "tempfile", "zlib")


def inline(text: str) -> str:
    """The module with its runtime inside. `text` is what `emit` gave."""
    names: list[tuple[str, str]] = []

    def take(match: re.Match[str]) -> str:
        module, _, alias = match[1].partition(" as ")
        names.append((module, alias or module))
        return ""

    rest = re.sub(r"^from coda_lang\.backend_cute import (.+)\n", take, text, flags=re.MULTILINE)
    head, _, body = rest.partition('\n"""\n')
    files = sources()
    packed = base64.b64encode(zlib.compress(json.dumps(files, sort_keys=True).encode(), 9)).decode()
    name = "coda_runtime_" + hashlib.sha256(packed.encode()).hexdigest()[:12]
    others = "".join(f"{line}\n" for line in body.split("\n\n#")[0].strip().split("\n") if line.startswith("from math"))
    body = body.removeprefix("\n").removeprefix(others)
    imports = "".join(f"import {m}\n" for m in IMPORTS) + others + "from pathlib import Path\n"
    bound = "".join(f'{alias} = importlib.import_module(f"{{_package}}.backend_cute.{module}")\n' for module, alias in names)
    lines = "".join(f"# {packed[i : i + WIDTH]}\n" for i in range(0, len(packed), WIDTH)).rstrip("\n")
    return f'{head}\n"""\n\n{imports}{BOOTSTRAP}{bound}\n\n{body.strip()}\n\n{MARK}{name}\n{lines}\n'


def sources() -> dict[str, str]:
    """The runtime's files by path: everything in this folder but what makes text, and the two modules that it shares with the front end."""
    here = Path(__file__).resolve().parent
    found = {p.relative_to(PACKAGE).as_posix(): p for p in here.rglob("*.py") if p.parent != here or p.stem not in FRONT}
    found |= {path: PACKAGE / path for path in SHARED}
    texts = {path: file.read_text(encoding="utf-8") for path, file in sorted(found.items())}
    packages = {"", *(path.rpartition("/")[0] for path in texts)}
    return texts | {f"{p}/__init__.py".lstrip("/"): "" for p in packages if f"{p}/__init__.py".lstrip("/") not in texts}
