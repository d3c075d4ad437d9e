"""Writes docs/errors/ from the catalog: `python -m coda_lang.diagnostics.docs`. In: `catalog.CATALOG`. Out: one page a code and an index.

Non-goals: being part of the installed package's interface; it serves the repository.
"""

from __future__ import annotations

from pathlib import Path

from .catalog import CATALOG, FAMILIES
from .entry import Entry

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "errors"


def page(entry: Entry) -> str:
    """The page of one code; its examples are fenced so that the documentation's tests run them."""
    fences = {"coda": (f"coda error={entry.code}", "coda"), "python": ("python", "python"), "shell": ("sh", "sh")}
    wrong, right = fences.get(entry.kind, ("coda", "coda"))
    before, after = entry.headings
    parts = [f"# {entry.code}: {entry.title}", _flow(entry.why), f"{before}:\n\n```{wrong}\n{entry.wrong.strip(chr(10))}\n```"]
    if entry.right:
        parts.append(f"{after}:\n\n```{right}\n{entry.right.strip(chr(10))}\n```")
    return "\n\n".join([*parts, f"**Remedy:** {_flow(entry.remedy)}"]) + "\n"


def index() -> str:
    """The list of all codes, by family."""
    lines = ["# Errors", "", "Every error has a code that stays the same; `codac explain CODE` prints its page."]
    for family, (title, entries) in FAMILIES.items():
        if entries:
            lines += ["", f"## {family}xx: {title}", ""]
            lines += [f"- [{e.code}]({e.code}.md): {e.title}" for e in sorted(entries, key=lambda e: e.code)]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File name → text of everything in docs/errors/."""
    return {"README.md": index()} | {f"{code}.md": page(entry) for code, entry in CATALOG.items()}


def _flow(text: str) -> str:
    return "\n\n".join(" ".join(p.split()) for p in text.strip().split("\n\n"))


def main() -> None:
    """Write what differs, and remove pages of codes that are gone."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for name, text in wanted.items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    for path in FOLDER.glob("C*.md"):
        if path.name not in wanted:
            path.unlink()
            print(f"removed {path.name}")


if __name__ == "__main__":
    main()
