"""Collecting what is wrong with a module: all errors of the stage, each once, at the place where the user can mend it.

In: diagnostics as they are found, and the calls being inlined at that moment. Out: one CodaError, or none.
A diagnostic inside an inlined def names the calls that led there; inside the prelude it is moved to the user's own call.
Non-goals: rendering.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..diagnostics.model import CodaError, Diagnostic, Label
from ..source import Source, Span


@dataclass(frozen=True)
class Frame:
    """One inlined call: the def's name and where it is called."""

    name: str
    span: Span


class Report:
    """The errors of one module. `library` is the file whose text the user did not write."""

    def __init__(self, sources: Iterable[Source], library: str) -> None:
        self.sources = tuple(sources)
        self.library = library
        self.diagnostics: list[Diagnostic] = []
        self.frames: list[Frame] = []
        self.program = ""  # the one being built
        self._seen: set[tuple[object, ...]] = set()

    @contextmanager
    def inlining(self, name: str, span: Span) -> Iterator[None]:
        """Errors reported within happened in the body of the def `name`, called at `span`."""
        self.frames.append(Frame(name, span))
        try:
            yield
        finally:
            self.frames.pop()

    def here(self, span: Span) -> Span:
        """`span`, or, if it lies in the library, the innermost call in the user's text that led there."""
        if span.file == self.library:
            for frame in reversed(self.frames):
                if frame.span.file != self.library:
                    return frame.span
        return span

    def quote(self, span: Span, default: str = "this value") -> str:
        """What is written there, if it is short enough to repeat in a sentence: in backticks, or, with a default of its own, bare."""
        source = next((s for s in self.sources if s.file == span.file), None)
        if source is None or span.line != span.end_line or span.end_col - span.col > 24:
            return default
        text = source.line(span.line)[span.col - 1 : span.end_col - 1]
        return f"`{text}`" if default == "this value" else _bare(text)

    def error(
        self,
        code: str,
        message: str,
        span: Span | None,
        label: str = "",
        *,
        secondary: Iterable[Label] = (),
        notes: Iterable[str] = (),
        help: str = "",
        once: bool = False,
    ) -> None:
        """Report an error, unless one with this code was reported at this place already; `once`: or this very message in this program."""
        labels = [s for s in secondary if s.span != span]
        place = self.here(span) if span else None
        if span and place != span:
            labels.append(Label(span, label or "here"))
            label = f"in this call of `{next(f.name for f in reversed(self.frames) if f.span == place)}`"
        labels += [
            Label(f.span, f"in this call of `{f.name}`") for f in reversed(self.frames) if f.span != place and f.span.file != self.library
        ]
        keys = {(code, place)} | ({(code, message, self.program)} if once else set())
        if not keys.isdisjoint(self._seen):
            return
        self._seen |= keys
        self.diagnostics.append(Diagnostic(code, message, place, label, tuple(labels), tuple(notes), help))

    def finish(self) -> None:
        """Raises CodaError where anything was reported; diagnostics come in source order."""
        if self.diagnostics:
            order = {s.file: i for i, s in enumerate(self.sources)}
            first = lambda d: (order.get(d.span.file, 99), d.span.line, d.span.col) if d.span else (-1, 0, 0)  # noqa: E731
            raise CodaError(sorted(self.diagnostics, key=first), self.sources)


def _bare(text: str) -> str:
    """`(a + b)` without its parentheses, since it goes between others."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1]


def listed(names: Iterable[str], joint: str = "and") -> str:
    """`a`, `b` and `c`."""
    quoted = [f"`{n}`" for n in names]
    return f" {joint} ".join([", ".join(quoted[:-1]), quoted[-1]]) if len(quoted) > 1 else "".join(quoted)


def axes_text(axes: Iterable[str]) -> str:
    """`[m, n]`, as a type writes them."""
    return "[" + ", ".join(axes) + "]"
