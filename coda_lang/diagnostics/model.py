"""Errors as data. A pass collects `Diagnostic`s and raises one `CodaError` with all of them; rendering lives in `render`.

Codes are stable: C01xx syntax, C02xx names, C03xx types and axes, C04xx fusibility, C05xx derivative, C06xx target limits, C07xx calling a
compiled function, C08xx files and command line. The catalog (`catalog.py`) has one entry a code: title, explanation, an example that
provokes it, its remedy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..source import Source, Span


@dataclass(frozen=True)
class Label:
    """A secondary place and what it has to do with the error."""

    span: Span
    text: str


@dataclass(frozen=True)
class Diagnostic:
    """One error or warning: `message` says what is wrong in the user's words, `label` stands under the span, `help` is a mending edit."""

    code: str
    message: str
    span: Span | None = None
    label: str = ""
    secondary: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    help: str = ""
    severity: str = "error"  # "error" | "warning"


class CodaError(Exception):
    """What the user's program or call does wrong; holds at least one diagnostic and the sources to quote from."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...] | list[Diagnostic], sources: tuple[Source, ...] = ()) -> None:
        self.diagnostics = tuple(diagnostics)
        self.sources = {s.file: s for s in sources}
        super().__init__("\n".join(f"{d.code}: {d.message}" for d in self.diagnostics))


class InternalError(Exception):
    """A bug of the compiler, never the user's fault: the message asks for a report and names the saved IR."""
