"""Shape conditions, nominal extents, chunks. In: `require`, `nominal` and `chunk` statements. Out: Python expressions over axis names;
extents by axis.

Non-goals: the conditions that kernels add (backend_cute).
"""

from __future__ import annotations

from collections.abc import Iterable

from .. import ops
from ..diagnostics.model import Label
from ..syntax import ast
from .build_axes import AxisTable
from .build_names import unknown_axis
from .build_report import Report
from .build_scope import reads
from .graph import Eqn

CHUNK = 8  # positions: 16 bytes of the narrowest tensors that kernels read in tiles

_ARITHMETIC = ("+", "-", "*", "/", "%")
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


def _named(e: Eqn) -> tuple[str, ...]:
    """The axes that a `rename` is about."""
    return (str(e.attr("axis")), str(e.attr("to"))) if e.op == ops.RENAME.name else ()


class _Not(Exception):
    """An expression that has no place in a condition: the node, why, and a remedy."""


class Conditions:
    """The conditions of one program."""

    def __init__(self, report: Report, axes: AxisTable) -> None:
        self.report, self.axes = report, axes
        self.requires: list[str] = []
        self.nominals: dict[str, int] = {}
        self.chunks: dict[str, int] = {}

    def require(self, statement: ast.Require) -> None:
        """Adds the condition; one over fixed extents alone is decided now."""
        e = statement.condition
        try:
            text = self._condition(e)
        except _Not as problem:
            node, message, help = problem.args
            if message:
                self.report.error("C0317", message, node.span, secondary=[Label(statement.span, "in this condition")], help=help)
            return
        extents = {n.name: self.axes.extent(n.name) for n in reads(e)}
        if None in extents.values():
            self.requires.append(text)
            return
        try:
            holds = bool(eval(text, {"__builtins__": {}}, extents))  # the text was made here, of names, integers and operators
        except (ArithmeticError, ValueError):
            holds = False
        if not holds:
            known = ", ".join(self.axes.text(n) for n in extents)
            self.report.error(
                "C0317",
                "this condition never holds",
                e.span,
                f"with {known}" if known else "",
                help="change a fixed extent, or the condition",
            )

    def nominal(self, statement: ast.Nominal) -> None:
        """Enters an extent that costs are reckoned with."""
        axis, span = statement.axis.name, statement.axis.span
        if axis not in self.axes:
            unknown_axis(self.report, ast.AxisSpec(axis, span=span), self.axes.names())
        elif (extent := self.axes.extent(axis)) is not None:
            self.report.error(
                "C0318",
                f"`{axis}` is fixed to {extent}, so it needs no nominal extent",
                span,
                secondary=[Label(self.axes.span(axis), "fixed here")],
                help="remove the `nominal`",
            )
        elif axis in self.nominals:
            self.report.error("C0318", f"`{axis}` has a nominal extent already, {self.nominals[axis]}", span, help="keep one of the two")
        elif statement.value < 1:
            self.report.error("C0318", f"an extent cannot be {statement.value}", statement.span, help="give an extent of 1 or more")
        else:
            self.nominals[axis] = statement.value

    def chunk(self, statement: ast.Chunk, eqns: Iterable[Eqn]) -> None:
        """Enters the axis along which temporaries exist chunk by chunk."""
        axis, span = statement.axis.name, statement.axis.span
        named = [e for e in eqns if axis in _named(e)]
        if axis not in self.axes:
            unknown_axis(self.report, ast.AxisSpec(axis, span=span), self.axes.names())
        elif self.chunks:
            first = next(iter(self.chunks))
            message = f"this program runs in chunks of `{first}` already"
            self.report.error("C0321", message, statement.span, help="keep one: the axis whose values are largest")
        elif (extent := self.axes.extent(axis)) is not None:
            self.report.error(
                "C0321",
                f"`{axis}` is fixed to {extent}, and only free axes are taken chunk by chunk",
                span,
                secondary=[Label(self.axes.span(axis), "fixed here")],
                help=f"leave `{axis}` free where it is declared; `require {axis} == {extent}` states its extent",
            )
        elif statement.size % CHUNK:
            self.report.error(
                "C0321",
                f"a chunk of {statement.size} positions is no multiple of {CHUNK}",
                statement.span,
                notes=["the parts of a tensor begin at addresses that tile loads can use"],
                help=f"write `chunk {axis} by {-(-statement.size // CHUNK) * CHUNK}`",
            )
        elif named:
            self.report.error(
                "C0321",
                f"`{axis}` has another name in this program, so a chunk of it has no one place",
                span,
                secondary=[Label(named[0].span, "renamed here")] if named[0].span else [],
                help="chunk an axis that is not renamed",
            )
        else:
            self.chunks[axis] = statement.size

    def _condition(self, e: ast.Expr) -> str:
        """A comparison, or several joined by and, or, not."""
        if isinstance(e, ast.Binary) and e.op in ("and", "or"):
            return f"({self._condition(e.left)} {e.op} {self._condition(e.right)})"
        if isinstance(e, ast.Unary) and e.op == "not":
            return f"(not {self._condition(e.x)})"
        if isinstance(e, ast.Binary) and e.op in _COMPARISONS:
            return f"{self._extent(e.left)} {e.op} {self._extent(e.right)}"
        raise _Not(e, "a `require` needs a comparison", "compare extents: `require d % 8 == 0`")

    def _zero(self, e: ast.Expr) -> bool:
        """Is the expression, of fixed extents and numbers, 0?"""
        extents = {n.name: self.axes.extent(n.name) for n in reads(e)} if all(n.name in self.axes for n in reads(e)) else {"": None}
        if None in extents.values():
            return False
        try:
            return bool(eval(self._extent(e), {"__builtins__": {}}, extents) == 0)  # the text was made here
        except ArithmeticError:
            return True

    def _extent(self, e: ast.Expr) -> str:
        """An expression over extents and integers."""
        if isinstance(e, ast.Number) and isinstance(e.value, int):
            return str(e.value)
        if isinstance(e, ast.Name):
            if e.name not in self.axes:
                unknown_axis(self.report, ast.AxisSpec(e.name, span=e.span), self.axes.names())
                raise _Not(e, "", "")
            return e.name
        if isinstance(e, ast.Unary) and e.op == "-":
            return f"-{self._extent(e.x)}"
        if isinstance(e, ast.Binary) and e.op in ("/", "%") and self._zero(e.right):
            what = "a remainder" if e.op == "%" else "a quotient"
            message = f"{what} by 0 has no value, so this condition never holds"
            raise _Not(e.right, message, "divide by a number above 0: `require d % 8 == 0`")
        if isinstance(e, ast.Binary) and e.op in _ARITHMETIC:
            return f"({self._extent(e.left)} {e.op} {self._extent(e.right)})"
        what = (
            "the operator `" + e.op + "`"
            if isinstance(e, (ast.Binary, ast.Unary))
            else "a call"
            if isinstance(e, ast.Call)
            else "a number that is not whole"
        )
        raise _Not(e, f"{what} has no place in a condition on extents", "use extents, whole numbers, `+ - * / %` and comparisons")
