"""split and pack: positions of a fixed axis as values of their own, consecutive runs of one, and back.

In: operands with resolved axes. Out: values, or None with an error reported. Non-goals: brackets' syntax (`build_calls`).
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import ops
from ..diagnostics.model import Label
from ..source import Span
from .build_apply import Apply, Operand
from .build_report import axes_text, listed
from .build_values import Result, Value

MAX_LANES = 256  # a value each; a longer axis is not meant to be taken apart


class Lanes:
    """Split and pack within one program."""

    def __init__(self, apply: Apply) -> None:
        self.apply, self.report, self.axes = apply, apply.report, apply.axes

    def split(self, operand: Operand, axis: str, at: Span, span: Span) -> Result:
        """All positions of a fixed axis, in order."""
        if not self.apply.has(operand, (axis,), at, "split"):
            return None
        extent = self.axes.extent(axis)
        if extent is None:
            self._free(axis, at)
            return None
        if extent > MAX_LANES:
            self.report.error(
                "C0311",
                f"`{axis}` has {extent} positions, too many to take one by one",
                at,
                f"at most {MAX_LANES}",
                secondary=[Label(self.axes.span(axis), "it appears here")],
                help=f"take runs of it instead: `split[{axis} -> first=…, rest=…](…)`",
            )
            return None
        return tuple(self.apply.emit(ops.LANE, [operand], span, {"axis": axis, "index": i}) for i in range(extent))

    def unpack(self, operand: Operand, count: int, span: Span) -> Result:
        """`a, b = e`: the split where exactly one axis is fixed to that many."""
        fixed = [a for a in operand.axes if self.axes.extent(a) == count]
        if len(fixed) == 1:
            return self.split(operand, fixed[0], span, span)
        own = axes_text(map(self.axes.text, operand.axes))
        why = f"the axes {listed(fixed)} are each fixed to {count}" if fixed else f"none of its axes {own} is fixed to {count}"
        self.report.error(
            "C0311",
            f"one value for {count} names: " + why,
            span,
            f"has the axes {own}",
            notes=["`a, b = e` takes apart the one axis that has as many positions as there are names"],
            help=f"say which: `split[{fixed[0]}](…)`"
            if fixed
            else f"fix an axis to {count} in the signature, as in `lane={count}`, or give {count} values: `a, b = …, …`",
        )
        return None

    def pack(self, operands: Sequence[Operand], axis: str, at: Span, span: Span) -> Value | None:
        """The inverse of split; `axis` is known."""
        extent = self.axes.extent(axis)
        if extent is None:
            self._free(axis, at, len(operands))
            return None
        if extent != len(operands):
            self.report.error(
                "C0312",
                f"`{axis}` has {extent} positions, but {len(operands)} values are packed",
                span,
                f"{len(operands)} values",
                secondary=[Label(self.axes.span(axis), f"`{self.axes.text(axis)}`")],
                help=f"give one value for each position of `{axis}`",
            )
            return None
        if not all(self.apply.lacks(o, axis, o.span, "pack") for o in operands) or not self.apply.lines_up(operands, "pack"):
            return None
        return self.apply.emit(ops.PACK, operands, span, {"axis": axis})

    def runs(self, operand: Operand, axis: str, to: Sequence[str], at: Span, span: Span) -> Result:
        """`split[axis -> to…]`: consecutive runs of a fixed axis, each under a name of its own."""
        if not self.apply.has(operand, (axis,), at, "split") or not self._add_up(axis, to, at):
            return None
        if not all(self.apply.lacks(operand, a, at, "split") for a in to):
            return None
        results: list[Value | None] = []
        start = 0
        for a in to:
            results.append(self.apply.emit(ops.RUN, [operand], span, {"axis": axis, "start": start, "to": a}))
            start += self.axes.extent(a) or 0
        return tuple(results)

    def join(self, operands: Sequence[Operand], of: Sequence[str], axis: str, at: Span, span: Span) -> Value | None:
        """`pack[of… -> axis]`: the inverse of runs."""
        if len(of) != len(operands):
            self.report.error(
                "C0312",
                f"{len(of)} axes are named for {len(operands)} values",
                span,
                secondary=[Label(at, f"names {listed(of)}")],
                help="name one axis for each value, in the order of the values",
            )
            return None
        good = all(self.apply.has(o, (a,), at, "pack") and self.apply.lacks(o, axis, at, "pack") for o, a in zip(operands, of))
        if not good or not self._add_up(axis, of, at):
            return None
        rest = [{x for x in o.axes if x != a} for o, a in zip(operands, of)]
        if odd := next((i for i, r in enumerate(rest) if r != rest[0]), None):
            o = operands[odd]
            self.report.error(
                "C0302",
                "the runs to be joined have different axes",
                o.span,
                f"axes {axes_text(o.axes)}",
                secondary=[Label(operands[0].span, f"axes {axes_text(operands[0].axes)}")],
                help="apart from the joined axis all runs have the same axes: add one with `expand[…](…)`",
            )
            return None
        return self.apply.emit(ops.JOIN, operands, span, {"axis": axis, "of": tuple(of)})

    def _add_up(self, axis: str, parts: Sequence[str], at: Span) -> bool:
        """Are all extents fixed, and the parts together as long as the whole?"""
        for a in (axis, *parts):
            if self.axes.extent(a) is None:
                known = [n for n in map(self.axes.extent, parts) if n]
                self._free(a, at, sum(known) if a == axis and len(known) == len(parts) else None)
                return False
        total, whole = sum(self.axes.extent(a) or 0 for a in parts), self.axes.extent(axis)
        if total != whole:
            self.report.error(
                "C0312",
                f"the runs {listed(map(self.axes.text, parts))} have {total} positions together, `{axis}` has {whole}",
                at,
                f"{total} of {whole}",
                secondary=[Label(self.axes.span(axis), f"`{self.axes.text(axis)}`")],
                help="the runs of an axis cover all of it: correct an extent, or name the rest too",
            )
        return total == whole

    def _free(self, axis: str, at: Span, extent: int | None = None) -> None:
        self.report.error(
            "C0311",
            f"`{axis}` is free at run time, so its positions are not known now",
            at,
            f"`{axis}` has no fixed extent",
            secondary=[Label(self.axes.span(axis), "it appears here")],
            help=f"fix its extent where it appears: `{axis}={extent or '…'}`",
        )
