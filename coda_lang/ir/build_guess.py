"""What a program that does not line up probably means: which axis was mis-named, and which input brought it.

In: the operands of a refused application, the axes of the outputs. Out: sentences for notes and help, whose edits name real values.
Non-goals: what is refused (`build_apply`); certainty: where several readings remain, all of them are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from ..diagnostics.suggest import suggest
from ..source import Span
from .build_axes import AxisTable
from .build_report import Report, axes_text, listed
from .build_values import Emitter, Value
from .types import DType


@final
@dataclass(frozen=True)
class Operand:
    """A value and where it is written."""

    value: Value
    span: Span

    @property
    def axes(self) -> tuple[str, ...]:
        return self.value.axes

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def text(self) -> str:
        """Its type, axes in storage order where it is stored."""
        axes = self.value.order or self.axes
        return f"{self.dtype}{axes_text(axes)}" if axes else f"a scalar, {self.dtype}"


class Guess:
    """Guesses within one program. `results` are the axes of its outputs, in storage order."""

    def __init__(self, report: Report, axes: AxisTable, emitter: Emitter) -> None:
        self.report, self.axes, self.emitter = report, axes, emitter
        self.results: tuple[tuple[str, ...], ...] = ()

    def misnamed(self, culprit: Operand, extra: Sequence[str], widest: Operand) -> str:
        """The remedy where `culprit` has the axes `extra`, which the product `widest` lacks: columns are the likeliest, as of a bias."""
        hidden = bool(self.report.frames)  # a def's locals are no remedy: its brackets bind none of the program's axes
        sources = self.emitter.sources(culprit.value.atom, extra[0], named=True) if hidden else [self.report.quote(culprit.span, "…")]
        lacking = [
            a for a in self._stored(widest.axes)[::-1] if a not in culprit.axes and self.axes.extent(a) == self.axes.extent(extra[0])
        ]
        lacking.sort(key=lambda a: not suggest(extra[0], [a]))
        ways = []
        if lacking and sources:
            named = "this value" if sources[0] == "…" else f"`{sources[0]}`"
            edit = f"rename[{extra[0]} -> {lacking[0]}]({sources[0]})"
            ways.append(f"if {named} is meant to carry {listed(lacking, 'or')}, declare it so, or write `{edit}`")
        if not hidden and any(set(extra) <= set(r) for r in self.results):
            ways.append(f"for an outer result write `expand[{', '.join(extra)}]({self.report.quote(widest.span, '…')})`")
        return "; ".join(ways) or f"use axes of {axes_text(widest.axes)} alone"

    def origins(self, culprit: Operand, extra: Iterable[str]) -> list[str]:
        """Whose axes these are, where the culprit is a local of a def."""
        if not self.report.frames:
            return []
        found = {a: self.emitter.sources(culprit.value.atom, a, named=True) for a in extra}
        return [f"`{a}` comes from {listed(names)}" for a, names in found.items() if names]

    def gained(self, side: str, operand: Operand, shared: Iterable[str]) -> list[str]:
        """Which inputs gave a computed side of a product an axis that the result should have kept for the other side."""
        if operand.value.order is not None:
            return []
        wanted = [a for a in shared if any(a in r for r in self.results)]
        found = {a: self.emitter.sources(operand.value.atom, a) for a in wanted}
        return [f"the {side} side has `{a}` from {listed(names)}" for a, names in found.items() if names]

    def contracted(self, x: Operand, y: Operand) -> str:
        """How to give a product a shared axis: one of the right side under a name of the left, first those that no output has."""
        mine, other = ((o.value.order or o.axes)[::-1] for o in (x, y))
        pairs = [(b, a) for b in other for a in mine if self.axes.extent(a) == self.axes.extent(b)]
        for likely in (self._gone, lambda pair: bool(suggest(pair[0], [pair[1]]))):
            pairs = [p for p in pairs if likely(p)] or pairs
        if not pairs:
            return "`@` contracts the axes that both sides share: give the contracted axis one name"
        what = self.report.quote(y.span, "…")
        edits = listed((f"rename[{b} -> {a}]({what})" for b, a in pairs), "or")
        return f"name the contracted axis alike in the signature, or write {edits}"

    def _gone(self, pair: tuple[str, str]) -> bool:
        """Whether no output has either axis, as after a contraction."""
        return not any(a in r for a in pair for r in self.results)

    def _stored(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes in the order of the output that has them all; else in the program's."""
        return next((tuple(a for a in r if a in axes) for r in self.results if set(axes) <= set(r)), axes)
