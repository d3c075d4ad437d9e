"""The house's rules, read off the source files: layers import downwards only, third-party packages stay at named edges, and so on.

In: every Python file of the repository, parsed, never imported. Out: one test a rule, whose message names file, line and remedy.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "coda_lang"
FILES = sorted(PACKAGE.rglob("*.py"))

# Lowest first. A module belongs to the first entry that fits: a module's name, or a package's with everything in it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("source",),
    ("diagnostics",),
    ("syntax",),
    ("ir.types", "ir.graph", "ir.printer", "ir.reader"),
    ("ops",),
    ("ir",),
    ("passes",),
    ("backend_cute",),
    ("driver", "torch_api", "listing", "gradcheck", "benchmark", "tables"),
    ("nn",),
    ("cli", "__main__"),
    ("",),  # coda_lang/__init__.py, which offers the layers below lazily
)

# The rest of backend_cute is the runtime that `--standalone` inlines, together with the class of the user's errors.
NOT_RUNTIME = tuple(f"backend_cute.{m}" for m in ("lower", "together", "forecast", "emit", "text", "standalone"))
INLINED_TOO = ("diagnostics.model", "source")

TORCH = ("torch_fns", "eager", "arguments", "host", "host_work", "twin", "selfcheck", "autograd")
TORCH += ("torch_ops", "explain", "plans", "accumulate", "timing", "tune", "nodes")

# Which modules may import which third-party package. An entry that ends with a dot is a folder.
EDGES: dict[str, tuple[str, ...]] = {
    "lark": ("syntax.",),
    "click": ("cli", "tables"),
    "filelock": ("backend_cute.cache",),
    "torch": tuple(f"backend_cute.{m}" for m in TORCH) + ("torch_api", "gradcheck", "benchmark", "nn."),
    "cutlass": tuple(f"backend_cute.{m}" for m in ("device_fns", "device_scalar", "gemm_sm90.", "finish", "compile")),
    "cuda": ("backend_cute.compile", "backend_cute.gemm_sm90."),
    "tvm_ffi": ("backend_cute.compile", "backend_cute.load"),
}

# Words that are an operator's name and something else as well, where they mean the other thing.
HOMONYMS = {
    ("backend_cute.twin", "floor"): "torch's name of a rounding mode",
    ("nn.config", "silu"): "a checkpoint's name of its activation",
}

MAX_LINES = 440


@dataclass(frozen=True)
class Import:
    """One import in one file: the module named (dotted, from the package's top without `coda_lang.` where it is ours)."""

    file: Path
    line: int
    target: str
    ours: bool
    relative: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def module_name(path: Path) -> str:
    """`backend_cute.spec` for coda_lang/backend_cute/spec.py; "" for the package itself."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for p in FILES}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _typing_only(path: Path) -> set[int]:
    """Lines under `if TYPE_CHECKING:`, which never run."""
    lines: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for inner in node.body:
                lines.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    return lines


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """All imports of a file, those inside functions too."""
    found: list[Import] = []
    name = module_name(path)
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [p for p in package if p]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                ours = (alias.name + ".").startswith("coda_lang.")
                target = alias.name.removeprefix("coda_lang").lstrip(".") if ours else alias.name
                found.append(Import(path, node.lineno, target, ours, False))
        elif isinstance(node, ast.ImportFrom):
            written = node.module or ""
            if node.level:
                base = package[: len(package) - (node.level - 1)]
                stem = ".".join(base + ([written] if written else []))
                ours = True
            else:
                ours = (written + ".").startswith("coda_lang.")
                stem = written.removeprefix("coda_lang").lstrip(".") if ours else written
            for alias in node.names:
                longer = f"{stem}.{alias.name}" if stem else alias.name
                target = longer if ours and longer in MODULES else stem
                found.append(Import(path, node.lineno, target, ours, bool(node.level)))
    return tuple(found)


def layer(module: str) -> int:
    """The height of one of our modules in LAYERS."""
    for height, names in enumerate(LAYERS):
        if any(module == n or (n and module.startswith(n + ".")) for n in names):
            return height
    raise AssertionError(f"{module} is in no layer: give it a place in LAYERS of tests/test_architecture.py")


def test_every_module_has_a_layer() -> None:
    assert FILES
    for module in MODULES:
        layer(module)


def test_layers_import_downwards_only() -> None:
    wrong = [
        f"{i} imports {i.target or 'coda_lang'}, of a higher layer than its own"
        for path in FILES
        for i in imports(path)
        if i.ours and layer(i.target) > layer(module_name(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    graph = {m: {i.target for i in imports(p) if i.ours and i.target in MODULES} - {m} for m, p in MODULES.items()}
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "import cycle: " + " -> ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for target in sorted(graph[module]):
            if not module.startswith(target + "."):  # `from . import sibling` names its own package
                walk(target, (*trail, module))
        done.add(module)

    for module in MODULES:
        walk(module, ())


def test_third_party_packages_stay_at_their_edges() -> None:
    wrong = []
    for path in FILES:
        module, typing_only = module_name(path), _typing_only(path)
        for i in imports(path):
            top = i.target.split(".")[0]
            if i.ours or top in sys.stdlib_module_names or i.line in typing_only:
                continue
            allowed = EDGES.get(top, ())
            if not any((module + ".").startswith(a) if a.endswith(".") else module == a for a in allowed):
                wrong.append(f"{i} imports {top}, which belongs in {', '.join(allowed) or 'no file'}")
    assert not wrong, "\n".join(wrong)


def test_runtime_imports_only_siblings() -> None:
    """What `--standalone` inlines must find everything it needs beside itself."""
    wrong = []
    for module, path in MODULES.items():
        if not module.startswith("backend_cute") or module in NOT_RUNTIME:
            continue
        for i in imports(path):
            if i.ours and not i.relative:
                wrong.append(f"{i} imports {i.target} absolutely; write `from .{i.target.split('.')[-1]} import …`")
            elif i.ours and not i.target.startswith("backend_cute") and i.target not in INLINED_TOO:
                wrong.append(f"{i} imports {i.target} from outside backend_cute")
            elif i.ours and i.target in NOT_RUNTIME:
                wrong.append(f"{i} imports {i.target}, which is not part of the runtime")
    assert not wrong, "\n".join(wrong)


def _operators() -> set[str]:
    """The names of the operators that the passes must not know: element-wise functions (signs and words of the grammar are not names)."""
    from coda_lang.ops import TABLE

    return {name for name, op in TABLE.items() if op.kind == "map" and not op.symbol}


def _docstrings(path: Path) -> set[int]:
    ids: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body and isinstance(node.body[0], ast.Expr):
            ids.add(id(node.body[0].value))
    return ids


def test_operators_are_named_only_in_the_table() -> None:
    """`"silu"` in a pass would be a special case; what an operator is stands in its entry of the table."""
    operators = _operators()
    calls = re.compile(r"\bf\.(" + "|".join(sorted(operators)) + r")\(")
    wrong = []
    for module, path in MODULES.items():
        if module == "ops" or module.startswith("ops."):
            continue
        docs = _docstrings(path)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                if (node.value in operators and (module, node.value) not in HOMONYMS) or calls.search(node.value):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} names the operator {node.value!r}")
    assert not wrong, "\n".join(wrong)


def _texts() -> list[Path]:
    """Everything that is under version control and is text."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [p for p in paths if p.is_file() and b"\0" not in p.read_bytes()[:4096]]


def test_files_stay_short() -> None:
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in _texts() if p.suffix in (".py", ".lark", ".coda")}
    wrong = [f"{p.relative_to(ROOT)} has {n} lines: split it" for p, n in lengths.items() if n > MAX_LINES]
    assert not wrong, "\n".join(wrong)


def test_nothing_names_a_machine() -> None:
    """Paths of one machine and addresses of package registries belong in no file."""
    hosts = (r"pypi\.org", r"pytorch\.org/whl", r"pythonhosted\.org")
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home)/|" + "|".join(hosts))
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in _texts()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_say_what_they_are_for() -> None:
    wrong = [str(p.relative_to(ROOT)) for p in FILES if p.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree(p))]
    assert not wrong, "no module docstring (purpose, in, out, non-goals): " + ", ".join(wrong)


@pytest.mark.parametrize("module", ["coda_lang", "coda_lang.driver", "coda_lang.cli"])
def test_import_needs_neither_torch_nor_cutlass(module: str) -> None:
    """Checking and emitting work on a laptop: the heavy packages are not even looked for."""
    code = f"import sys, {module}; bad = {{'torch', 'cutlass', 'tvm_ffi', 'numpy'}} & set(sys.modules); sys.exit(', '.join(bad) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
