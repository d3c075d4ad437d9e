"""The axes of one program: their order, their extents, and what a bracket's names stand for.

In: axis names as sources write them (`m`, `lane=2`). Out: names of program axes, each with one extent.
Non-goals: what an operator does with its axes (`build_brackets`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..diagnostics.model import Label
from ..diagnostics.suggest import suggest
from ..source import Span
from ..syntax import ast
from .build_names import unbound_axis, unknown_axis
from .build_report import Report, axes_text
from .types import Axis

# What a def's bracket names stand for; None in a program, whose brackets name its axes themselves.
Bound = Mapping[str, tuple[str, ...]]


@dataclass
class _Entry:
    extent: int | None
    span: Span  # of its first appearance
    fixed: Span | None  # where the extent was written


class AxisTable:
    """Every axis of a program once, in order of appearance."""

    def __init__(self, report: Report) -> None:
        self._entries: dict[str, _Entry] = {}
        self._report = report

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def axes(self) -> tuple[Axis, ...]:
        return tuple(Axis(n, e.extent) for n, e in self._entries.items())

    def extent(self, name: str) -> int | None:
        return self._entries[name].extent

    def span(self, name: str) -> Span:
        """Where the axis first appears."""
        return self._entries[name].span

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """The names in program order."""
        held = set(names)
        return tuple(n for n in self._entries if n in held)

    def text(self, name: str) -> str:
        """`lane=2`, or `m` where free."""
        extent = self.extent(name)
        return name if extent is None else f"{name}={extent}"

    def likely(self, wrong: Sequence[str], right: Sequence[str]) -> tuple[str, str] | None:
        """Which axis of `wrong` was probably meant to be which of `right`: of one extent, of like names, else the first of each."""
        pairs = [(a, b) for a in wrong for b in right if self.extent(a) == self.extent(b)]
        alike = [(a, b) for a, b in pairs if suggest(a, [b])]
        return next(iter(alike or pairs), None)

    def declare(self, name: str, extent: int | None, span: Span) -> bool:
        """Enter an axis, or say once more what is known of it. False, with an error reported, where the extents differ."""
        entry = self._entries.setdefault(name, _Entry(None, span, None))
        if extent is None or entry.extent == extent:
            return True
        if extent < 1:
            self._report.error("C0310", f"the axis `{name}` cannot have extent {extent}", span, "an extent is 1 or more")
            return False
        if entry.extent is None:
            entry.extent, entry.fixed = extent, span
            return True
        self._report.error(
            "C0310",
            f"the axis `{name}` has two extents, {entry.extent} and {extent}",
            span,
            f"{extent} here",
            secondary=[Label(entry.fixed or entry.span, f"{entry.extent} here")],
            notes=["an axis name means one extent in a program"],
            help=f"give one of the two axes another name, or write `{name}` without an extent here",
        )
        return False

    def resolve(self, specs: Iterable[ast.AxisSpec], bound: Bound | None) -> tuple[str, ...] | None:
        """The program axes which a bracket names, in its order; None, with an error reported, where one is unknown or named twice."""
        found: list[str] = []
        good = True
        for spec in specs:
            names = self.named(spec, bound)
            for name in names or ():
                if name in found:
                    self._report.error(
                        "C0314", f"the axis `{name}` stands twice in these brackets", spec.span, "again here", help="name each axis once"
                    )
                    good = False
                else:
                    found.append(name)
            good = good and names is not None
        return tuple(found) if good else None

    def named(self, spec: ast.AxisSpec, bound: Bound | None) -> tuple[str, ...] | None:
        """What one name in a bracket stands for; an extent written with it is checked."""
        if bound is not None:
            if spec.name not in bound:
                unbound_axis(self._report, spec, bound)
                return None
            names = bound[spec.name]
        elif spec.name not in self._entries and spec.extent is None:
            unknown_axis(self._report, spec, self._entries)
            return None
        else:
            names = (spec.name,)
        if spec.extent is not None:
            if len(names) != 1:
                self._report.error(
                    "C0310",
                    f"`{spec.name}` stands for the axes {axes_text(names)} here, so `{spec.name}={spec.extent}` says nothing",
                    spec.span,
                )
                return None
            if not self.declare(names[0], spec.extent, spec.span):
                return None
        return names
