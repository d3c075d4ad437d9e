"""Calls: matching arguments to names, and what the brackets of a primitive say.

In: call syntax, evaluated operands. Out: operands in order; values. Non-goals: evaluation of the arguments and of defs (`build_exprs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .. import ops
from ..diagnostics.model import Label
from ..ops.spec import Op
from ..syntax import ast
from .build_apply import Apply, Operand
from .build_axes import Bound
from .build_lanes import Lanes
from .build_report import Report, listed
from .build_values import Result

POSITIONAL = ("dim", "axis", "axes")  # arguments of libraries whose axes are positions


def matched(
    report: Report,
    e: ast.Call,
    formals: Sequence[str],
    optional: Sequence[str],
    given: Sequence[Result | Operand],
    named: Mapping[str, object],
    variants: Sequence[str] = (),
) -> dict[str, object] | None:
    """The call's arguments by formal name; None, with an error reported, where they do not fit. `variants`: what else may be meant."""
    name = e.fn.name
    shown = f"{name}{'[…]' if e.bracket else ''}({', '.join(formals)})"
    if len(given) > len(formals):
        wanted = f"{len(formals)} argument{'s' * (len(formals) != 1)}" if formals else "no arguments"
        report.error(
            "C0208", f"`{name}` takes {wanted}, not {len(given)}", e.args[len(formals)].span, "one too many", help=f"write `{shown}`"
        )
        return None
    found: dict[str, object] = dict(zip(formals, given))
    spans = {f: a.span for f, a in zip(formals, e.args)}
    for keyword, _ in e.kwargs:
        if keyword.name not in formals:
            help = f"write `{shown}`" + (f"; there is also {listed(variants)}" if variants else "")
            if keyword.name in POSITIONAL and e.bracket:
                help = f"leave it out: the brackets name the axis, `{shown}`"
            report.error("C0208", f"`{name}` has no argument `{keyword.name}`", keyword.span, "not one of its arguments", help=help)
            return None
        if keyword.name in spans:
            first = [Label(spans[keyword.name], "first given here")]
            report.error(
                "C0208",
                f"`{name}` is given `{keyword.name}` twice",
                keyword.span,
                "again here",
                secondary=first,
                help="give each argument once",
            )
            return None
        spans[keyword.name] = keyword.span
        found[keyword.name] = named[keyword.name]
    missing = [f for f in formals if f not in found and f not in optional]
    if missing:
        label = "an argument is missing" if len(missing) == 1 else "arguments are missing"
        report.error("C0208", f"`{name}` needs {listed(missing)}", e.span, label, help=f"write `{shown}`")
        return None
    return found


class Brackets:
    """Primitives with axes in brackets, within one program."""

    def __init__(self, apply: Apply) -> None:
        self.apply, self.report, self.axes = apply, apply.report, apply.axes
        self.lanes = Lanes(apply)

    def call(self, op: Op, operands: Sequence[Operand] | None, e: ast.Call, bracket: ast.Bracket, bound: Bound | None) -> Result:
        """`op[…](operands)`; `operands` is None where one is poisoned: the brackets are checked all the same."""
        if bound is None:
            self._introduce(op, len(e.args), bracket)
        axes = self.axes.resolve(bracket.axes, bound)
        to = self.axes.resolve(bracket.to or (), bound)
        if axes is None or to is None or operands is None:
            return None
        if problem := self._shape(op, len(axes), len(to)):
            message, help = problem
            self.report.error("C0212", f"`{e.fn.name}` takes {message} in its brackets", bracket.span, help=help)
            return None
        at, span, apply, lanes = bracket.span, e.span, self.apply, self.lanes
        actions: dict[str, Callable[[], Result]] = {
            ops.CONTRACT.name: lambda: apply.contract(operands[0], operands[1], axes, at, span),
            ops.GATHER.name: lambda: apply.gather(operands[0], operands[1], axes[0], at, span),
            ops.LANE.name: lambda: lanes.split(operands[0], axes[0], at, span),
            ops.PACK.name: lambda: lanes.pack(operands, axes[0], at, span),
            ops.RUN.name: lambda: lanes.runs(operands[0], axes[0], to, at, span),
            ops.JOIN.name: lambda: lanes.join(operands, axes, to[0], at, span),
            ops.RENAME.name: lambda: apply.rename(operands[0], axes[0], to[0], at, span),
            ops.EXPAND.name: lambda: apply.expand(operands[0], axes, at, span),
            ops.SIZE.name: lambda: apply.size(axes, span),
            ops.INDEX.name: lambda: apply.emit(op, [], span, {"axis": axes[0]}),
        }
        return actions[op.name]() if op.name in actions else apply.reduce(op, operands[0], axes, at, span)

    def _shape(self, op: Op, left: int, right: int) -> tuple[str, str] | None:
        """What is wrong with the number of axes in the brackets, and the remedy."""
        name = op.surface or op.name
        if op is ops.RENAME and (left, right) != (1, 1):
            return "one axis on each side of its arrow", "rename one axis at a time: `rename[a -> b](rename[c -> d](x))`"
        if op is ops.RUN and left != 1:
            return "one axis before its arrow", "the runs stand after the arrow: `split[axis -> a=2, b=3](x)`"
        if op is ops.JOIN and right != 1:
            return "one axis after its arrow", "the runs stand before the arrow: `pack[a, b -> axis](x, y)`"
        if op.brackets == "axis" and left != 1:
            return "one axis", f"name a single axis: `{name}[axis]`"
        return None

    def _introduce(self, op: Op, count: int, bracket: ast.Bracket) -> None:
        """The axes which a program's bracket may make: a new name (`rename`), runs with extents (`split`), `count` packed values."""
        if op is ops.RUN:
            for spec in bracket.to or ():
                if spec.extent is not None and spec.name not in self.axes:
                    self.axes.declare(spec.name, spec.extent, spec.span)
        made = bracket.axes if op is ops.PACK else bracket.to if op in (ops.JOIN, ops.RENAME) else None
        if made is None or len(made) != 1 or made[0].name in self.axes:
            return
        sources = [a.name for a in bracket.axes]
        if op is ops.PACK:
            extent: int | None = count
        elif not all(a in self.axes for a in sources):
            return
        else:
            extents = [self.axes.extent(a) for a in sources]
            extent = None if None in extents else sum(n or 0 for n in extents)
        self.axes.declare(made[0].name, made[0].extent or extent, made[0].span)
