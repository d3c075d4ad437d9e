"""What each error code means. In: the entries beside, one file a class of codes. Out: `CATALOG` (code → entry) and `explain`.

To add a code, add one `Entry` to its file in `entries/` and run `python -m coda_lang.diagnostics.docs`, which writes docs/errors/. Tests
hold that the examples do what they say, and that the compiler and the catalog know the same codes.
Non-goals: finding errors; rendering one that happened (render.py).
"""

from __future__ import annotations

import textwrap

from .entries import calls, derivative, files, fusion, names, syntax, target, types
from .entry import Entry
from .suggest import did_you_mean

FAMILIES = {
    "C01": ("Syntax", syntax.ENTRIES),
    "C02": ("Names", names.ENTRIES),
    "C03": ("Types and axes", types.ENTRIES),
    "C04": ("Fusibility", fusion.ENTRIES),
    "C05": ("Derivatives", derivative.ENTRIES),
    "C06": ("Limits of the target", target.ENTRIES),
    "C07": ("Calling a compiled function", calls.ENTRIES),
    "C08": ("Files and the command line", files.ENTRIES),
}

CATALOG: dict[str, Entry] = {e.code: e for _, entries in FAMILIES.values() for e in entries}


def explain(code: str) -> str | None:
    """The entry of `code` ("C0301", "c301" and "301" too) as text for a terminal; None where there is none."""
    entry = CATALOG.get(normal(code))
    if entry is None:
        return None
    before, after = entry.headings
    parts = [f"{entry.code}: {entry.title}", _wrap(entry.why), f"{before}:\n\n" + textwrap.indent(entry.wrong.strip("\n"), "    ")]
    if entry.right:
        parts.append(f"{after}:\n\n" + textwrap.indent(entry.right.strip("\n"), "    "))
    return "\n\n".join([*parts, _wrap("Remedy: " + entry.remedy)]) + "\n"


def normal(code: str) -> str:
    """`c301` → `C0301`."""
    digits = code.strip().upper().removeprefix("C")
    return f"C{digits.zfill(4)}" if digits.isdigit() else code


def near(code: str) -> str:
    """A remedy for a code that does not exist."""
    return did_you_mean(normal(code), CATALOG) or "codes are C0101 to C0899; docs/errors lists them"


def _wrap(text: str) -> str:
    return "\n\n".join(textwrap.fill(" ".join(p.split()), 96) for p in text.strip().split("\n\n"))
