"""The documentation runs: every example in README.md and docs/ does what is printed there.

    ```coda                 a whole source; it must compile
    ```coda error=C0401     a whole source; it must be refused with that code
    ```coda part            a piece of one, shown to explain; not compiled
    ```console              commands after `$ `, each followed by what it prints; `...` stands for any text, a last line
                            `(exit status 1)` for a status other than 0. Blocks of one page run in order in one folder that has specs/
    ```pycon                a Python session, checked by doctest in the same folder

Any other block (```sh, ```text, ```python) is only shown.
`python tests/test_docs.py --update` writes what the commands print now into the pages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```[ \t]*$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the words after it, its text, and the range of the text in the page."""

    page: Path
    language: str
    info: str
    text: str
    start: int
    line: int

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for m in FENCE.finditer(text):
        if m[1] in languages:
            yield Block(page, m[1], m[2].strip(), m[3], m.start(3), text.count("\n", 0, m.start()) + 1)


CODA = [b for page in PAGES for b in blocks(page, "coda")]
RUNNABLE = [page for page in PAGES if any(blocks(page, "console", "pycon"))]


@pytest.mark.parametrize("block", CODA, ids=lambda b: b.id)
def test_coda_block(block: Block) -> None:
    from coda_lang import driver
    from coda_lang.diagnostics.model import CodaError
    from coda_lang.source import Source

    wanted = re.fullmatch(r"error=(C\d{4})", block.info)
    assert wanted or block.info in ("", "part"), f"{block.id}: a coda block is followed by nothing, `part` or `error=CODE`"
    if block.info == "part":
        return
    source = Source(block.id, block.text)
    if not wanted:
        assert driver.emit(source)
        return
    with pytest.raises(CodaError) as raised:
        driver.emit(source)
    assert wanted[1] in [d.code for d in raised.value.diagnostics]


# --- commands ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """`text` is what follows the `$ `, with continuation lines; `expected` the lines up to the next command."""

    text: str
    expected: str


def commands(text: str) -> list[Command]:
    found: list[tuple[list[str], list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append(([line[2:]], []))
        elif line.startswith("> ") and found and not found[-1][1]:
            found[-1][0].append(line[2:])
        elif found:
            found[-1][1].append(line)
        else:
            raise AssertionError("a console block starts with a command: `$ …`")
    return [Command("\n".join(c), "\n".join(e)) for c, e in found]


def workplace(folder: Path) -> dict[str, str]:
    """Make `folder` look like a checkout to the commands; returns their environment."""
    for name in ("specs", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    env = {k: v for k, v in os.environ.items() if not k.startswith("CODA_")}
    env["PATH"] = str(Path(sys.executable).parent) + os.pathsep + env["PATH"]
    env |= {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8", "HOME": str(folder)}
    return env


def run(command: str, folder: Path, env: dict[str, str]) -> str:
    """What a command prints, both streams together, trailing space cut."""
    done = _run(["bash", "-c", command], folder, env)
    text = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())
    return text + (f"\n(exit status {done.returncode})" if done.returncode else "")


def _run(argv: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(argv, cwd=folder, env=env, text=True, timeout=300, **streams)


def matches(expected: str, got: str) -> bool:
    """Whether `got` is what the page shows: `...` alone on a line stands for any lines, within a line for any characters."""
    pattern = ""
    for line in expected.rstrip().splitlines():
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*"
        else:
            pattern += r"[^\n]*?".join(re.escape(piece) for piece in line.rstrip().split("...")) + r"\n"
    return re.fullmatch(pattern, got.rstrip() + "\n" if got.strip() else "") is not None


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands(page: Path, tmp_path: Path) -> None:
    env = workplace(tmp_path)
    session = ""
    for block in blocks(page, "console", "pycon"):
        if block.language == "console":
            for command in commands(block.text):
                got = run(command.text, tmp_path, env)
                assert matches(command.expected, got), f"{block.id}: `{command.text}` prints\n{got}\n--- the page shows\n{command.expected}"
        else:
            session += block.text + "\n"  # a page's blocks are one session
            got = pycon(session, tmp_path, env)
            assert not got, f"{block.id}:\n{got}"


def pycon(session: str, folder: Path, env: dict[str, str]) -> str:
    """Run a Python session as doctest in a process of its own; what differs, or ""."""
    script = folder / "_session.py"
    check = "import doctest, sys\nsys.exit(doctest.testmod(optionflags=doctest.ELLIPSIS).failed)\n"
    script.write_text(f"__doc__ = {session!r}\n\n{check}")
    done = _run([sys.executable, str(script)], folder, env)
    return done.stdout if done.returncode else ""


def test_matching_knows_a_difference() -> None:
    assert matches("a ... c\n...\nend", "a b c\nx\ny\nend")
    assert matches("...\nend", "end")
    assert not matches("a ... c\nend", "a b d\nend")
    assert not matches("end", "end\nmore")
    assert matches("", "")
    assert not matches("", "surprise")


def test_every_error_code_has_a_page_and_an_example() -> None:
    """`codac explain CODE` and docs/errors/CODE.md speak of the same codes."""
    from coda_lang.diagnostics import catalog

    pages = {p.stem for p in (ROOT / "docs" / "errors").glob("C*.md")}
    assert pages == set(catalog.CATALOG)


def test_ci_runs_the_command_that_the_readme_gives() -> None:
    """README.md has two commands to set up and go; the tests' one is CI's."""
    lines = [b.text.strip() for b in blocks(ROOT / "README.md", "sh") if "-m venv" in b.text]
    job, tests = lines
    assert "\n" not in job + tests
    assert job.endswith(".venv/bin/codac specs/swiglu.coda -o kernel.py && .venv/bin/python kernel.py")
    last = (ROOT / ".ci" / "run").read_text(encoding="utf-8").strip().splitlines()[-1]
    assert last.replace('"$venv/bin/python"', ".venv/bin/python") == tests.split(" && ")[-1]


def test_every_decision_is_listed() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in (ROOT / "docs" / "decisions").glob("0*.md") if f"({p.name})" not in index] == []


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
        for target in re.findall(r"\]\(([^)#\s]+)", prose):
            if "://" not in target and not (page.parent / target).exists():
                wrong.append(f"{page.relative_to(ROOT)} links to {target}")
    assert not wrong, "\n".join(wrong)


def update() -> None:
    """Rewrite what the pages show wherever it is not what the commands print."""
    import tempfile

    for page in RUNNABLE:
        with tempfile.TemporaryDirectory() as name:
            folder, text, shift = Path(name), page.read_text(encoding="utf-8"), 0
            env = workplace(folder)
            for block in blocks(page, "console"):
                shown = []
                for command in commands(block.text):
                    got = run(command.text, folder, env)
                    if "this is a bug in codac" in got or "Traceback" in got:
                        sys.exit(f"{block.id}: `{command.text}` prints\n{got}")
                    kept = command.expected if matches(command.expected, got) else got
                    shown.append("$ " + command.text.replace("\n", "\n> ") + "\n" + (kept.rstrip() + "\n" if kept.strip() else ""))
                new = "".join(shown)
                if new != block.text:
                    print(f"{block.id} updated")
                text = text[: block.start + shift] + new + text[block.start + shift + len(block.text) :]
                shift += len(new) - len(block.text)
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__" and "--update" in sys.argv:
    update()


def test_every_environment_variable_has_its_line() -> None:
    read = {n for p in (ROOT / "coda_lang").rglob("*.py") for n in re.findall(r'environ\.get\("(CODA_\w+)"', p.read_text("utf-8"))}
    table = (ROOT / "docs" / "cli.md").read_text("utf-8").split("## Environment variables")[1].split("\n## ")[0]
    assert read and {n for n in re.findall(r"^\| `(CODA_\w+)", table, re.M)} == read
