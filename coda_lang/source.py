"""Source text and places in it. In: a path or text. Out: `Source` and `Span`, used by every later layer. Non-goal: parsing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """A half-open range of one source: 1-based lines and columns, columns counted in characters."""

    file: str
    line: int
    col: int
    end_line: int
    end_col: int

    def to(self, other: Span) -> Span:
        """The smallest span that holds both (same file)."""
        a, b = min((self.line, self.col), (other.line, other.col)), max((self.end_line, self.end_col), (other.end_line, other.end_col))
        return Span(self.file, *a, *b)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Source:
    """A file's name, as the user wrote it, and its text (no BOM, LF line ends)."""

    file: str
    text: str

    def line(self, number: int) -> str:
        """Line `number` (1-based), without its line end; "" past the end."""
        lines = self.text.split("\n")
        return lines[number - 1] if 0 < number <= len(lines) else ""
