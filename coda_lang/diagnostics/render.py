"""Errors as text with the source quoted, and as JSON. In: a `CodaError`. Out: strings.

    error[C0110]: `(` is never closed
     --> specs/swiglu.coda:4:9
      |
    4 | y = silu(gate * up
      |         ^ opened here
      |
      = help: add the missing `)`

Columns are counted in characters; tabs, wide and control characters are quoted so that the carets still stand below what they mean.
Non-goals: where it is printed, and whether that is a terminal (cli).
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..source import Source, Span
from .model import CodaError, Diagnostic

WIDTH = 140  # of quoted source; longer lines are cut around what is marked
TAB = "    "
Paint = Callable[[str, str], str]

_COLOURS = {"error": "1;31", "warning": "1;33", "frame": "1;34", "strong": "1", "second": "1;34", "help": "1;32"}


@dataclass(frozen=True)
class _Mark:
    """An underline in one line: columns (1-based, half-open), whether it is the primary one, and what stands beside it."""

    start: int
    end: int
    primary: bool
    text: str


def render(error: CodaError, color: bool = False) -> str:
    """All diagnostics of `error`, separated by blank lines, and a line that says where to read more. No trailing newline."""
    paint = _paint if color else _plain
    parts = [render_one(d, error.sources, color) for d in error.diagnostics]
    codes = sorted({d.code for d in error.diagnostics})
    counts = {kind: sum(d.severity == kind for d in error.diagnostics) for kind in ("error", "warning")}
    counted = ", ".join(f"{n} {kind}{'s' * (n != 1)}" for kind, n in counts.items() if n) or "no errors"
    parts.append(paint("strong", counted) + f"; `codac explain {codes[0]}` says more" if codes else counted)
    return "\n\n".join(parts)


def render_one(d: Diagnostic, sources: dict[str, Source] | None = None, color: bool = False) -> str:
    """One diagnostic; lines of sources that are not given are not quoted."""
    paint = _paint if color else _plain
    lines = [paint(d.severity, f"{d.severity}[{d.code}]") + paint("strong", f": {_safe(d.message)}")]
    spans = ([(d.span, d.label, True)] if d.span else []) + [(s.span, s.text, False) for s in d.secondary]
    gutter = max((len(str(s.end_line)) for s, _, _ in spans), default=0)
    bar = " " * gutter + " " + paint("frame", "|")
    files = list(dict.fromkeys(s.file for s, _, _ in spans))
    for k, file in enumerate(files):
        here = [entry for entry in spans if entry[0].file == file]
        line, col = here[0][0].line, here[0][0].col
        lines.append(" " * gutter + paint("frame", "--> " if k == 0 else "::: ") + f"{_safe(file)}:{line}:{col}")
        source = (sources or {}).get(file)
        if source is not None:
            lines.append(bar)
            lines += _quote(source, here, gutter, paint)
    if spans and (d.notes or d.help):
        lines.append(bar)
    for kind, text in [("note", n) for n in d.notes] + ([("help", d.help)] if d.help else []):
        head = " " * gutter + " " + paint("frame", "=") + " " + paint("help" if kind == "help" else "strong", kind) + ": "
        first, *rest = _safe(text).split("\n")
        lines.append(head + first)
        lines += [" " * (gutter + 3 + len(kind) + 2) + r for r in rest]
    return "\n".join(lines)


def to_json(error: CodaError) -> str:
    """`{"diagnostics": [...]}`, as `records` has them."""
    return json.dumps({"diagnostics": records(error.diagnostics)}, indent=1, ensure_ascii=False)


def records(diagnostics: Iterable[Diagnostic]) -> list[dict[str, object]]:
    """Each as `{code, severity, message, span, label, secondary: [{span, text}], notes, help}`.

    A span is null or `{file, line, col, end_line, end_col}`: 1-based, half-open, columns in characters.
    """

    def span(s: Span | None) -> dict[str, object] | None:
        return None if s is None else {"file": s.file, "line": s.line, "col": s.col, "end_line": s.end_line, "end_col": s.end_col}

    return [
        {
            "code": d.code,
            "severity": d.severity,
            "message": d.message,
            "span": span(d.span),
            "label": d.label,
            "secondary": [{"span": span(s.span), "text": s.text} for s in d.secondary],
            "notes": list(d.notes),
            "help": d.help,
        }
        for d in diagnostics
    ]


# --- quoting -----------------------------------------------------------------------------------------------------------


def _quote(source: Source, spans: list[tuple[Span, str, bool]], gutter: int, paint: Paint) -> list[str]:
    """The marked lines of one file, in order, `...` where lines are left out."""
    text = source.text.split("\n")
    marks: dict[int, list[_Mark]] = {}
    for span, label, primary in spans:
        last = max(span.line, min(span.end_line, len(text)))
        for number in range(span.line, last + 1):
            if last - span.line > 3 and span.line < number < last:
                continue  # of a long range, the first and the last line
            line = text[number - 1] if number <= len(text) else ""
            start = span.col if number == span.line else len(line) - len(line.lstrip()) + 1
            end = span.end_col if number == span.end_line else len(line.rstrip()) + 1
            marks.setdefault(number, []).append(_Mark(start, max(end, start + 1), primary, label if number == last else ""))
    out: list[str] = []
    previous = 0
    for number in sorted(marks):
        if previous and number == previous + 2:
            out.append(_row(previous + 1, _shown(_window(text[previous], [_Mark(1, 2, False, "")])[0])[0], gutter, paint))
        elif previous and number > previous + 2:
            out.append(paint("frame", "..."))
        previous = number
        out += _line(number, text[number - 1] if number <= len(text) else "", marks[number], gutter, paint)
    return out


def _row(number: int | None, text: str, gutter: int, paint: Paint) -> str:
    head = str(number or "").rjust(gutter) + " |"
    return (paint("frame", head) + " " + text).rstrip()


def _line(number: int, text: str, marks: list[_Mark], gutter: int, paint: Paint) -> list[str]:
    text, marks = _window(text, marks)
    shown, columns = _shown(text)
    last = len(text) + 1
    placed = [_Mark(columns[min(m.start, last) - 1], columns[min(m.end, last) - 1], m.primary, _safe(m.text)) for m in marks]
    placed = [_Mark(m.start, max(m.end, m.start + 1), m.primary, m.text) for m in placed]
    out = [_row(number, shown, gutter, paint)]
    rows: list[list[_Mark]] = []  # marks that overlap go below each other, the primary one first
    for m in sorted(placed, key=lambda m: (not m.primary, m.start)):
        for row in rows:
            if all(m.end < o.start or o.end < m.start for o in row):
                row.append(m)
                break
        else:
            rows.append([m])
    for row in rows:
        row.sort(key=lambda m: m.start)
        under, at = "", 0
        for m in row:
            under += " " * (m.start - at) + paint("error" if m.primary else "second", ("^" if m.primary else "-") * (m.end - m.start))
            at = m.end
        if row[-1].text:
            under += " " + paint("error" if row[-1].primary else "second", row[-1].text)
        out.append(_row(None, under, gutter, paint))
        for k in range(len(row) - 2, -1, -1):  # labels of the marks further left, each on a row of its own
            if row[k].text:
                stems, at = "", 0
                for m in row[:k]:
                    if m.text:
                        stems += " " * (m.start - at) + paint("second", "|")
                        at = m.start + 1
                stems += " " * (row[k].start - at) + paint("error" if row[k].primary else "second", row[k].text)
                out.append(_row(None, stems, gutter, paint))
    return out


def _shown(text: str) -> tuple[str, list[int]]:
    """`text` as it is printed, and for each character (and the end) the cell where it starts."""
    cells, out, at = [], [], 0
    for c in text:
        cells.append(at)
        if c == "\t":
            c = TAB
        elif not c.isprintable():
            c = chr(0x2400 + ord(c)) if ord(c) < 32 else "\u2421" if ord(c) == 127 else "\ufffd"
        out.append(c)
        at += len(c) if len(c) > 1 else 0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
    return "".join(out), [*cells, at]


def _window(text: str, marks: list[_Mark]) -> tuple[str, list[_Mark]]:
    """Cuts a long line to WIDTH characters around its primary mark, or its first."""
    if len(text) <= WIDTH:
        return text, marks
    lead = next((m for m in marks if m.primary), marks[0])
    start = max(0, min(lead.start - 1 - WIDTH // 4, len(text) - WIDTH))
    cut = text[start : start + WIDTH]
    if start:
        cut = "…" + cut[1:]
    if start + WIDTH < len(text):
        cut = cut[:-1] + "…"
    inside = [m for m in marks if m.start <= start + WIDTH and m.end > start]
    return cut, [_Mark(max(m.start - start, 1), min(m.end - start, WIDTH + 1), m.primary, m.text) for m in inside]


def _safe(text: str) -> str:
    """Nothing in it can move the cursor or change colours."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def _plain(kind: str, text: str) -> str:
    return text


def _paint(kind: str, text: str) -> str:
    return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m"
