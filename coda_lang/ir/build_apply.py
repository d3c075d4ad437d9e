"""Operators applied to values under the language's rules: what may broadcast, contract, split, pack and change axes.

In: an operator's meaning, operands with their places in the text, resolved axes. Out: values, their equations emitted; or None, an error
being reported. Non-goals: syntax and names (`build_exprs`), the operators' own type rules (`ops`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .. import ops
from ..diagnostics.model import Label
from ..diagnostics.suggest import did_you_mean
from ..ops.spec import Op, TypeProblem
from ..source import Span
from .build_axes import AxisTable
from .build_guess import Guess, Operand
from .build_report import Report, axes_text, listed
from .build_values import Emitter, Value, folded, literal, typed
from .graph import Var
from .types import DType

MAX_EQNS = 4_000  # far more than a program that anyone writes; defs that call each other twice grow exponentially


class TooLarge(Exception):
    """The program inlines to more equations than a compiler can be asked to look at."""


class Apply:
    """Applications within one program."""

    def __init__(self, report: Report, axes: AxisTable, emitter: Emitter) -> None:
        self.report, self.axes, self.emitter = report, axes, emitter
        self.guess = Guess(report, axes, emitter)

    def emit(
        self, op: Op, operands: Sequence[Operand], span: Span, attrs: Mapping[str, object] = {}, *, product: bool | None = None
    ) -> Value | None:
        """One equation, type problems reported."""
        if len(self.emitter.eqns) >= MAX_EQNS:
            raise TooLarge
        try:
            return self.emitter.emit(op, [o.value for o in operands], attrs, self.report.here(span), product=product)
        except TypeProblem as problem:
            i = problem.arg_index
            at = span if i is None else operands[i].span
            others = [Label(o.span, o.text) for j, o in enumerate(operands) if j != i and len(operands) > 1]
            label = "" if i is None else operands[i].text
            name = "x" if i is None else self.emitter.called(operands[i].value.atom) or "x"
            mend = problem.help.replace("`x ", f"`{name} ") or "change the type of one of the operands"
            self.report.error("C0301", problem.message, at, label, secondary=others, help=mend)
            return None

    def typed(self, operand: Operand, dtype: DType) -> Operand | None:
        """A literal with the type it has beside `dtype`."""
        try:
            return replace(operand, value=typed(operand.value, (dtype,)))
        except TypeProblem as problem:
            self.report.error("C0316", problem.message, operand.span, help=problem.help)
            return None

    def cast(self, operand: Operand, dtype: DType, span: Span) -> Value | None:
        """The operand as `dtype`, rounded or converted if need be."""
        known = self.typed(operand, dtype)
        try:
            return known and self.emitter.cast(known.value, dtype, self.report.here(span))
        except TypeProblem as problem:
            self.report.error("C0301", problem.message, operand.span, operand.text, help=problem.help)
            return None

    # --- element-wise ----------------------------------------------------------------------------------------------------

    def elementwise(self, op: Op, operands: Sequence[Operand], span: Span) -> Value | None:
        """A map op; its operands broadcast by name, within rule 3."""
        if op.symbol and (constant := folded(op.symbol, [o.value for o in operands])):
            return constant
        return self.emit(op, operands, span) if self.lines_up(operands, op.symbol or op.surface or op.name) else None

    def lines_up(self, operands: Sequence[Operand], name: str) -> bool:
        """Rule 3: where an operand descends from a product, one that does has all the axes of the result."""
        made = [o for o in operands if o.value.product]
        union = {a for o in operands for a in o.axes}
        if not made or any(union <= set(o.axes) for o in made):
            return True
        widest = max(made, key=lambda o: len(o.axes))
        culprit = next(o for o in operands if not set(o.axes) <= set(widest.axes))
        extra = [a for a in culprit.axes if a not in widest.axes]
        self.report.error(
            "C0302",
            f"the operands of `{name}` do not line up: {axes_text(widest.axes)} and {axes_text(culprit.axes)}",
            culprit.span,
            f"has {listed(extra)}, which the other lacks",
            secondary=[Label(widest.span, f"descends from a product, with the axes {axes_text(widest.axes)}")],
            notes=[
                *self.guess.origins(culprit, extra),
                "what a product made does not gain axes by broadcasting: a mis-named axis would silently give an outer result",
            ],
            help=self.guess.misnamed(culprit, extra, widest),
        )
        return False

    def has(self, operand: Operand, axes: Sequence[str], span: Span, name: str) -> bool:
        """Does the operand carry the axes that a bracket names?"""
        missing = [a for a in axes if a not in operand.axes]
        if missing:
            own = f"its axes are {axes_text(operand.axes)}" if operand.axes else "it is a scalar"
            self.report.error(
                "C0303",
                f"{self.report.quote(operand.span)} has no axis {listed(missing, 'or')} for `{name}`",
                span,
                "not among the value's axes",
                secondary=[Label(operand.span, own)],
                help=did_you_mean(missing[0], operand.axes)
                or (f"name one of {axes_text(operand.axes)}" if operand.axes else f"drop `{name}`: a scalar has no axes"),
            )
        return not missing

    def reduce(self, op: Op, operand: Operand, axes: tuple[str, ...], at: Span, span: Span) -> Value | None:
        return self.emit(op, [operand], span, {"axes": axes}) if self.has(operand, axes, at, op.surface or op.name) else None

    def gather(self, operand: Operand, index: Operand, axis: str, at: Span, span: Span) -> Value | None:
        if not self.has(operand, (axis,), at, "gather"):
            return None
        ty = replace(operand.value.ty, axes=tuple(a for a in operand.axes if a != axis))
        picked = Operand(replace(operand.value, atom=Var("", ty)), operand.span)
        if axis not in index.axes and not self.lines_up([picked, index], "gather"):
            return None
        return self.emit(ops.GATHER, [operand, index], span, {"axis": axis})

    # --- products --------------------------------------------------------------------------------------------------------

    def contract(self, x: Operand, y: Operand, over: tuple[str, ...] | None, at: Span, span: Span) -> Value | None:
        """Rule 2. `over` None: all axes that both share, as `@` means; else those that `matmul` names, further shared ones being batch."""
        shared = tuple(a for a in x.axes if a in y.axes)
        if not shared:
            self._nothing_shared(x, y, span)
            return None
        if over is None:
            over = self._group(x, y, shared, span)
        elif not (self.has(x, over, at, "matmul") and self.has(y, over, at, "matmul")):
            return None
        if over is None or not self._each_keeps(x, y, shared, over):
            return None
        pair = self._rounded(x, y, span)
        batch = tuple(a for a in shared if a not in over)
        return self.emit(ops.CONTRACT, pair, span, {"axes": over, "batch": batch}, product=True) if pair else None

    def _nothing_shared(self, x: Operand, y: Operand, span: Span) -> None:
        self.report.error(
            "C0304",
            "the two sides of this product share no axis",
            span,
            "nothing to contract",
            secondary=[Label(o.span, f"axes {axes_text(o.axes)}" if o.axes else "a scalar") for o in (x, y)],
            help=self.guess.contracted(x, y) if x.axes and y.axes else "multiply by a scalar with `*`",
        )

    def _group(self, x: Operand, y: Operand, shared: tuple[str, ...], span: Span) -> tuple[str, ...] | None:
        """The contracted axes of `@` in the order that every stored operand has them, adjacently; program order where none is stored."""
        orders = []
        for o in (x, y):
            if o.value.order is None:
                continue
            at = [o.value.order.index(a) for a in shared]
            orders.append((o, tuple(sorted(shared, key=o.value.order.index)), max(at) - min(at) == len(shared) - 1))
        apart = next((o for o, _, adjacent in orders if not adjacent), None)
        if apart is None and len({order for _, order, _ in orders}) <= 1:
            return orders[0][1] if orders else shared
        why = "stored apart" if apart else "stored in two orders"
        named = ", ".join(shared)
        self.report.error(
            "C0306",
            f"`@` would contract {listed(shared)} together, but they are {why}",
            span,
            f"both sides share {listed(shared)}",
            secondary=[Label(o.span, f"stored as {axes_text(o.value.order or ())}") for o, _, _ in orders],
            notes=["a group is contracted by `@` where every stored operand holds it adjacently and in one order"],
            help=f"to contract all of them write `matmul[{named}](…, …)`; with a batch axis, for instance `matmul[{shared[-1]}](…, …)`",
        )
        return None

    def _each_keeps(self, x: Operand, y: Operand, shared: tuple[str, ...], over: tuple[str, ...]) -> bool:
        for o in (x, y):
            if set(o.axes) <= set(shared):
                self.report.error(
                    "C0305",
                    "each side of a product keeps an axis of its own; this side has none",
                    o.span,
                    f"its axes {axes_text(o.axes)} are all on the other side as well",
                    secondary=[Label(p.span, f"axes {axes_text(p.axes)}") for p in (x, y) if p is not o],
                    notes=self.guess.gained("right" if o is x else "left", y if o is x else x, shared),
                    help=f"write it as a sum: `sum[{', '.join(over)}](… * …)`",
                )
                return False
        return True

    def _rounded(self, x: Operand, y: Operand, span: Span) -> list[Operand] | None:
        """Rule 5: an f32 operand is rounded to the other's stored type."""
        for o in (x, y):
            if o.dtype.kind != "float":
                self.report.error(
                    "C0307",
                    f"an operand of a product is {o.dtype}",
                    o.span,
                    "not a float",
                    help=f"convert it: `bf16({self.report.quote(o.span, '…')})`",
                )
                return None
        halves = [o.dtype for o in (x, y) if o.dtype.bits == 16]
        if len({d.name for d in halves}) == 1:
            rounded = [self.cast(o, halves[0], o.span) for o in (x, y)]
            return [Operand(v, o.span) for v, o in zip(rounded, (x, y)) if v]
        both = "both operands of this product are f32" if not halves else f"the operands of this product are {x.dtype} and {y.dtype}"
        to = "bf16" if not halves else halves[0].name
        at = x if not halves else y
        self.report.error(
            "C0307",
            both,
            span,
            "a product multiplies bf16 by bf16, or f16 by f16",
            secondary=[Label(o.span, o.text) for o in (x, y)],
            notes=["an f32 operand is rounded to the other's type, so one of them has to say which"] if not halves else [],
            help=f"round one of them: write `{to}({self.report.quote(at.span, '…')})`",
        )
        return None

    # --- axes ------------------------------------------------------------------------------------------------------------

    def rename(self, operand: Operand, axis: str, to: str, at: Span, span: Span) -> Value | None:
        if not self.has(operand, (axis,), at, "rename") or not self.lacks(operand, to, at, "rename"):
            return None
        mine, other = self.axes.extent(axis), self.axes.extent(to)
        if mine is None and other is not None:
            self.report.error(
                "C0310",
                f"`{axis}` is free, but `{to}` is fixed to {other}",
                at,
                secondary=[Label(self.axes.span(axis), f"`{axis}` appears here"), Label(self.axes.span(to), f"`{to}` appears here")],
                help=f"fix it in the signature: `{axis}={other}`",
            )
            return None
        if not self.axes.declare(to, mine, at):
            return None
        value = self.emit(ops.RENAME, [operand], span, {"axis": axis, "to": to})
        order = operand.value.order
        return value and replace(value, order=order and tuple(to if a == axis else a for a in order))

    def lacks(self, operand: Operand, axis: str, at: Span, name: str) -> bool:
        if axis in operand.axes:
            self.report.error(
                "C0314",
                f"{self.report.quote(operand.span)} already has the axis `{axis}`, which `{name}` would give it",
                at,
                secondary=[Label(operand.span, f"axes {axes_text(operand.axes)}")],
                help="leave it out" if name == "expand" else "choose another name for the new axis",
            )
            return False
        return True

    def expand(self, operand: Operand, axes: tuple[str, ...], at: Span, span: Span) -> Value | None:
        if not all(self.lacks(operand, a, at, "expand") for a in axes):
            return None
        return self.emit(ops.EXPAND, [operand], span, {"axes": axes})

    def size(self, axes: tuple[str, ...], span: Span) -> Value | None:
        """The extent; a literal where all axes are fixed."""
        product = 1
        for a in axes:
            extent = self.axes.extent(a)
            if extent is None:
                return self.emit(ops.SIZE, [], span, {"axes": axes})
            product *= extent
        return literal(product)
