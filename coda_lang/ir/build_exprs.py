"""Expressions: names, numbers, operators, calls. In: syntax and a scope. Out: values, their equations emitted; None after an error.

A call is a cast, a def (inlined in a scope of its own) or a primitive of the operator table.
Non-goals: what the operators accept (`build_apply`, `build_lanes`), statements of a program (`build_program`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .. import ops
from ..diagnostics.model import Label
from ..source import Span
from ..syntax import ast
from .build_apply import MAX_EQNS, Apply, Operand, TooLarge
from .build_calls import Brackets, matched
from .build_names import taken, unknown_function, unknown_type, unknown_value
from .build_report import listed
from .build_scope import Library, Scope
from .build_values import Result, Value, literal
from .types import BOOL, DTYPES, DType

# How a name gets its value: the target, the operand (None: poisoned), the scope.
Bind = Callable[[ast.Target, Operand | None, Scope], Value | None]


class Evaluator:
    """Evaluates the expressions of one program."""

    def __init__(self, apply: Apply) -> None:
        self.apply, self.report, self.axes, self.emitter = apply, apply.report, apply.axes, apply.emitter
        self.brackets = Brackets(apply)
        self._inlining: list[str] = []
        self._calls = 0

    def one(self, e: ast.Expr, scope: Scope) -> Value | None:
        """The single value of an expression."""
        result = self.results(e, scope)
        if isinstance(result, tuple):
            names = ", ".join("abcdefgh"[: len(result)])
            self.report.error(
                "C0313",
                f"{self.report.quote(e.span, 'this')} is {len(result)} values where one is needed",
                e.span,
                f"{len(result)} values",
                help=f"give each a name first: `{names} = …`",
            )
            return None
        return result

    def operand(self, e: ast.Expr, scope: Scope) -> Operand | None:
        value = self.one(e, scope)
        return value and Operand(value, e.span)

    def results(self, e: ast.Expr, scope: Scope) -> Result:
        """The value of an expression, or its values."""
        if isinstance(e, ast.Number):
            return literal(e.value)
        if isinstance(e, ast.Name):
            return self.name(e, scope)
        if isinstance(e, ast.Unary):
            return self.operator(e.op, e.span, self.operand(e.x, scope))
        if isinstance(e, ast.Binary):
            return self.binary(e, scope)
        return self.call(e, scope)

    def name(self, e: ast.Name, scope: Scope) -> Result:
        if e.name not in scope.values:
            axes = self.axes.names() if scope.bound is None else tuple(scope.bound)
            later = {n: s for n, s in scope.later.items() if n not in scope.values}
            unknown_value(self.report, e, scope.values, later=later, axes=axes, functions=self.functions(scope))
            return None
        return scope.values[e.name]

    def binary(self, e: ast.Binary, scope: Scope) -> Value | None:
        x, y = self.operand(e.left, scope), self.operand(e.right, scope)
        if e.op != "@":
            return self.operator(e.op, e.span, x, y)
        return self.apply.contract(x, y, None, e.span, e.span) if x and y else None

    def operator(self, symbol: str, span: Span, *operands: Operand | None) -> Value | None:
        op = ops.by_symbol(symbol, len(operands))
        if op is None:
            help = "the remainder of values is `x - floor(x / y) * y`"
            self.report.error("C0320", f"`{symbol}` is for extents, in a `require`; values have no such operator", span, help=help)
            return None
        known = [o for o in operands if o]
        return self.apply.elementwise(op, known, span) if len(known) == len(operands) else None

    def functions(self, scope: Scope) -> set[str]:
        """Everything that can be called."""
        return {*ops.names(), *scope.types, *scope.library.names()}

    # --- calls -----------------------------------------------------------------------------------------------------------

    def call(self, e: ast.Call, scope: Scope) -> Result:
        if e.fn.name in scope.types:
            return self.cast(e, scope)
        if known := scope.library.find(e.fn.name):
            return self.inline(e, *known, scope)
        brackets = "none" if e.bracket is None else "axes" if e.bracket.to is None else "arrow"
        op = ops.find(e.fn.name, brackets)
        given = [self.operand(a, scope) for a in e.args]
        named = {k.name: self.operand(v, scope) for k, v in e.kwargs}
        if op is None:
            self._no_primitive(e, brackets, scope)
            return None
        if e.called != bool(op.args):
            self._parentheses(e, bool(op.args))
            return None
        if op.variadic and not e.kwargs:
            arguments: list[Operand | None] = given
        else:
            formals = [op.arg(i) for i in range(len(op.args))]
            found = matched(self.report, e, formals, (), given, named, self._variants(e, scope.library))
            if found is None:
                return None
            arguments = [found[f] for f in formals]  # type: ignore[misc]
        operands = [o for o in arguments if o]
        complete = len(operands) == len(arguments)
        if e.bracket is not None:
            return self.brackets.call(op, operands if complete else None, e, e.bracket, scope.bound)
        if not complete:
            return None
        return self.apply.elementwise(op, operands, e.span) if op.kind == "map" else self.apply.emit(op, operands, e.span)

    def _no_primitive(self, e: ast.Call, brackets: str, scope: Scope) -> None:
        name = e.fn.name
        ways = {"none": f"{name}(…)", "axes": f"{name}[axis](…)", "arrow": f"{name}[a -> b](…)"}
        known = [way for b, way in ways.items() if ops.find(name, b)]
        if not known:
            unknown_function(self.report, e.fn, self.functions(scope), scope.values)
            return
        how = {"none": "without axes in brackets", "axes": "with axes in brackets", "arrow": "with an arrow in brackets"}[brackets]
        if brackets == "axes" and ways["none"] in known:
            how = "with axes in brackets: it works on each element"
        self.report.error("C0212", f"`{name}` is not called {how}", e.span, help=f"write {listed(known, 'or')}")

    def _parentheses(self, e: ast.Call, takes: bool) -> None:
        name, axis = e.fn.name, e.bracket.axes[0].name if e.bracket else "axis"
        if takes:
            self.report.error("C0208", f"`{name}` is called without arguments", e.span, "no parentheses", help=f"write `{name}[{axis}](…)`")
        else:
            help = f"write `{name}[{axis}]`, without parentheses"
            self.report.error("C0208", f"`{name}` depends on its axes alone", e.span, "takes no arguments", help=help)

    # --- conversions -----------------------------------------------------------------------------------------------------

    def cast(self, e: ast.Call, scope: Scope) -> Value | None:
        """`bf16(x)`: converts whatever it is given, except to bool."""
        dtype = scope.types[e.fn.name]
        if e.bracket is not None or not e.called:
            self.report.error(
                "C0212", f"the cast `{e.fn.name}` takes no brackets", e.span, help=f"write `{e.fn.name}(…)`: a cast keeps the axes"
            )
            return None
        found = matched(
            self.report, e, ["x"], (), [self.operand(a, scope) for a in e.args], {k.name: self.operand(v, scope) for k, v in e.kwargs}
        )
        x = found and found["x"]
        if not isinstance(x, Operand):
            return None
        if dtype is BOOL and x.dtype is not BOOL:
            self.report.error("C0308", f"a number of type {x.dtype} is not converted to bool", e.span, help="compare it: `x != 0`")
            return None
        return self.apply.cast(x, dtype, e.span)

    def convert(self, x: Operand, dtype: DType) -> Value | None:
        """What a signature or an annotation does: floats are rounded, integers widened or made floats; the rest has to be written."""
        typed = self.apply.typed(x, dtype)
        if typed is None:
            return None
        have = typed.dtype
        widens = have.kind == "int" and (dtype.kind == "float" or dtype.kind == "int" and have.bits <= dtype.bits)
        if have is dtype or widens or have.kind == dtype.kind == "float":
            return self.apply.cast(typed, dtype, x.span)
        quoted = self.report.quote(x.span, "…")
        help = f"keep it {have}"
        if x.value.weak and dtype.kind == "int":
            help = "write a whole number"
        elif have.kind == "float" and dtype.kind == "int":
            help = "keep it a float: `floor` and `round` give whole numbers as floats"
        elif have is BOOL:
            help = f"choose numbers: `where({quoted}, 1.0, 0.0)`"
        elif dtype is BOOL:
            help = f"compare it: `{quoted} != 0`"
        self.report.error("C0308", f"{have} is not converted to {dtype}", x.span, f"this is {have}", help=help)
        return None

    def dtype(self, name: str, span: Span, scope: Scope) -> DType | None:
        """A type by name, or a generic type's choice."""
        if name not in scope.types:
            unknown_type(self.report, name, span, set(scope.types) - set(DTYPES), scope.types_below)
            return None
        return scope.types[name]

    # --- defs ------------------------------------------------------------------------------------------------------------

    def inline(self, e: ast.Call, d: ast.Def, library: Library, scope: Scope) -> Result:
        """The results of a def, computed in a scope of its own: its arguments and its axes."""
        given = [self.operand(a, scope) for a in e.args]
        named = {k.name: self.operand(v, scope) for k, v in e.kwargs}
        key = f"{d.name}@{d.span}"
        if key in self._inlining:
            return None  # reported where the defs were checked
        self._calls += 1
        if self._calls > MAX_EQNS:  # calls that emit nothing multiply just as well
            raise TooLarge
        bound = self._bind_axes(e, d, scope)
        if bound is None:
            return None  # what is wrong with the arguments is better said of a call with its axes
        if not e.called:
            self.report.error("C0208", f"`{d.name}` is called without arguments", e.span, "no parentheses", help=f"write `{d.name}[…](…)`")
            return None
        optional = [a.name for a in d.args if a.default is not None]
        found = matched(self.report, e, [a.name for a in d.args], optional, given, named, self._variants(e, library))
        if found is None:
            return None
        inner = Scope(library, scope.types, bound, types_below=scope.types_below)
        self._inlining.append(key)
        try:
            with self.report.inlining(d.name, e.span):
                for argument in d.args:
                    if argument.name in found or argument.default is None:
                        operand = found[argument.name]
                        inner.values[argument.name] = operand.value if isinstance(operand, Operand) else None
                    else:
                        inner.values[argument.name] = self.one(argument.default, inner)
                    inner.spans[argument.name] = argument.span
                inner.later = {t.name: t.span for s in d.body for t in s.targets}
                for statement in d.body:
                    self.assign(statement, inner, self._local)
                values = [self.one(r, inner) if len(d.results) > 1 else self.results(r, inner) for r in d.results]
        finally:
            self._inlining.pop()
        return values[0] if len(values) == 1 else tuple(v if isinstance(v, Value) else None for v in values)

    def _bind_axes(self, e: ast.Call, d: ast.Def, scope: Scope) -> dict[str, tuple[str, ...]] | None:
        """What the def's bracket names stand for in this call."""
        if e.bracket is not None and (e.bracket.to is not None or not d.axes):
            why = "has no brackets" if not d.axes else "takes axes without an arrow"
            self.report.error(
                "C0212", f"the def `{d.name}` {why}", e.bracket.span, secondary=[Label(d.span, "defined here")], help=f"write `{_shape(d)}`"
            )
            return None
        if not d.axes:
            return {}
        if e.bracket is None:
            self.report.error(
                "C0212",
                f"`{d.name}` needs axes in brackets",
                e.span,
                secondary=[Label(d.span, "defined here")],
                help=f"write `{_shape(d)}`",
            )
            return None
        axes = self.axes.resolve(e.bracket.axes, scope.bound)
        if axes is None:
            return None
        if len(d.axes) > 1 and len(axes) != len(d.axes):
            names = listed(a.name for a in d.axes)
            self.report.error(
                "C0212",
                f"`{d.name}` binds {names} in its brackets, but {len(axes)} axes are given",
                e.bracket.span,
                secondary=[Label(d.span, "defined here")],
                help=f"write `{_shape(d)}`",
            )
            return None
        groups = [axes] if len(d.axes) == 1 else [(a,) for a in axes]
        bound: dict[str, tuple[str, ...]] = {spec.name: group for spec, group in zip(d.axes, groups)}
        for spec in d.axes:
            if spec.extent is not None and any(self.axes.extent(a) != spec.extent for a in bound[spec.name]):
                self.report.error(
                    "C0310",
                    f"`{d.name}` wants `{spec.name}={spec.extent}`, but here it is {listed(map(self.axes.text, bound[spec.name]))}",
                    e.bracket.span,
                    secondary=[Label(spec.span, "wanted here")],
                    help=self._of_extent(spec.name, spec.extent, bound[spec.name]),
                )
                return None
        return bound

    def _variants(self, e: ast.Call, library: Library) -> list[str]:
        """Functions named after this one, first those that have an argument like one that this one lacks."""
        name = e.fn.name
        defs = {n: found[0] for n in library.names() if n != name and (found := library.find(n))}
        lacking = {word for k, _ in e.kwargs for word in k.name.split("_")}
        near = sorted(n for n in (*defs, *ops.names()) if n != name and name in n.split("_") or name + "_" in n or "_" + name in n)
        having = [n for n in near if n in defs and any(a.name in lacking for a in defs[n].args)]
        return having or near

    def _of_extent(self, name: str, extent: int, axes: tuple[str, ...]) -> str:
        """How to come by an axis of `extent` positions where `axes` were given for it."""
        have = self.axes.extent(axes[0])
        if len(axes) == 1 and have is None:
            return f"if it has {extent} positions, write `{axes[0]}={extent}` in the signature"
        if len(axes) > 1 or have is None or have % extent or have <= extent:
            return f"give an axis with {extent} positions"
        rest = f"{'pair' if extent == 2 else 'rest'}={have // extent}"
        orders = f"`{name}={extent}, {rest}` (half-split, as Hugging Face stores it) or `{rest}, {name}={extent}` (neighbours)"
        if extent != 2:
            orders = f"`{name}={extent}, {rest}` or `{rest}, {name}={extent}`"
        return f"declare `{self.axes.text(axes[0])}` as {orders}, and name `{name}` here"

    def _local(self, target: ast.Target, operand: Operand | None, scope: Scope) -> Value | None:
        """Binds a name inside a def."""
        value = operand and operand.value
        if operand and target.dtype:
            dtype = self.dtype(target.dtype, target.span, scope)
            value = self.convert(operand, dtype) if dtype else None
        if value:
            self.emitter.call(value, target.name, exact=False)
        return value

    # --- assignments -----------------------------------------------------------------------------------------------------

    def assign(self, statement: ast.Assign, scope: Scope, bind: Bind) -> None:
        """`a = e`, `a, b = e` (several values, or a split) or `a, b = e1, e2`; `bind(target, operand, scope)` gives each name its value."""
        targets, values = statement.targets, statement.values
        found: list[Operand | None] = [None] * len(targets)
        if len(values) == len(targets) and len(values) > 1:
            for target, value in zip(targets, values):
                self._name(target, self.operand(value, scope), scope, bind)
            return
        if len(targets) == 1:
            found = [self.operand(values[0], scope)]
        else:
            result = self.results(values[0], scope)
            at = values[0].span
            if isinstance(result, Value):
                result = self.brackets.lanes.unpack(Operand(result, at), len(targets), at)
            if isinstance(result, tuple) and len(result) != len(targets):
                self._count(statement, len(result))
            elif isinstance(result, tuple):
                found = [v and Operand(v, at) for v in result]
        for target, operand in zip(targets, found):
            self._name(target, operand, scope, bind)

    def _name(self, target: ast.Target, operand: Operand | None, scope: Scope, bind: Bind) -> None:
        if target.name in scope.spans:
            help = "a name is assigned once: give the second value a name of its own"
            taken(self.report, "a value", target.name, target.span, scope.spans[target.name], help)
            return
        value = bind(target, operand, scope)
        scope.values[target.name] = value and replace(value, origin=target.span)
        scope.spans[target.name] = target.span

    def _count(self, statement: ast.Assign, have: int) -> None:
        names = len(statement.targets)
        self.report.error(
            "C0313",
            f"{have} values for {names} name{'s' * (names != 1)}",
            statement.span,
            secondary=[Label(statement.values[0].span, f"{have} values")],
            help="give as many names as there are values",
        )


def _shape(d: ast.Def) -> str:
    """`rmsnorm[d](x, g, eps)`, as a def is called."""
    axes = f"[{', '.join(a.name for a in d.axes)}]" if d.axes else ""
    return f"{d.name}{axes}({', '.join(a.name for a in d.args)})"
