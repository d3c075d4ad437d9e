"""From the parser's reductions to the syntax tree. In: tokens, as Lark's LALR(1) parser reduces them. Out: nodes of `ast`, and the errors
which the grammar is too wide to see. One method a rule of grammar.lark.

Non-goals: names and types; the order of statements in a file (parse.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lark import Transformer
from lark.lexer import Token
from lark.visitors import v_args

from ..diagnostics.model import Diagnostic
from ..source import Span
from . import ast, problems
from .lexer import span_of
from .words import CONSTANTS, DTYPES, FUTURE, KEYWORDS, PYTHON, RESERVED

MAX_DEPTH = 100


@dataclass(frozen=True)
class Group:
    """Comma-separated elements on one side of a line's `=`."""

    elements: tuple[Any, ...]
    span: Span


@dataclass(frozen=True)
class Annotated:
    """`name: bf16`."""

    target: ast.Target
    span: Span


@dataclass(frozen=True)
class Tuple:
    """`(a, b)`, the results of a def."""

    items: tuple[ast.Expr, ...]
    span: Span


@dataclass(frozen=True)
class Line:
    """A line without an `=`: the results of a def, and an error elsewhere."""

    results: tuple[ast.Expr, ...]
    span: Span


class Refused(Exception):
    """A node that cannot be: ends the parse of its item."""

    def __init__(self, problem: Diagnostic) -> None:
        super().__init__(problem.message)
        self.problem = problem


@v_args(inline=True)
class Builder(Transformer):
    """Bottom-up construction; `file` names the source of the tokens fed."""

    def __init__(self) -> None:
        super().__init__()
        self.begin("")

    def begin(self, file: str) -> None:
        """Forgets the last item."""
        self.file = file
        self.depths: dict[int, int] = {}  # of expressions, by identity (all live until the item is done)

    # --- helpers ---

    def at(self, token: Token) -> Span:
        return span_of(self.file, token)

    def name_of(self, token: Token) -> str:
        """The token's text, refused where it is reserved."""
        word = str(token)
        if word in RESERVED:
            if word in FUTURE:
                raise Refused(problems.future(self.at(token), word, FUTURE[word]))
            if word in CONSTANTS:
                raise Refused(problems.foreign(self.at(token), word, CONSTANTS[word]))
            kind = "keyword" if word in KEYWORDS else "dtype" if word in DTYPES else "Python word"
            assert kind != "Python word" or word in PYTHON
            raise Refused(problems.reserved(self.at(token), word, kind))
        return word

    def value_of(self, token: Token) -> int | float:
        text = str(token)
        return float("inf") if text == "inf" else int(text) if text.isdigit() else float(text)

    def nest(self, node: Any, *children: Any) -> Any:
        """`node` with its depth noted; deep ones are refused before anything recurses into them."""
        depth = 1 + max((self.depths.get(id(c), 1) for c in children), default=0)
        if depth > MAX_DEPTH:
            raise Refused(problems.too_deep(node.span, MAX_DEPTH))
        self.depths[id(node)] = depth
        return node

    # --- expressions ---

    def name(self, token: Token) -> ast.Name:
        return ast.Name(self.name_of(token), span=self.at(token))

    def literal(self, token: Token) -> ast.Number:
        return ast.Number(self.value_of(token), span=self.at(token))

    def unary(self, op: Token, x: ast.Expr) -> ast.Unary:
        return self.nest(ast.Unary(str(op), x, span=self.at(op).to(x.span)), x)

    def binary(self, left: ast.Expr, op: Token, right: ast.Expr) -> ast.Binary:
        return self.nest(ast.Binary(str(op), left, right, span=left.span.to(right.span)), left, right)

    def paren(self, opener: Token, x: ast.Expr, closer: Token) -> ast.Expr:
        return self.nest(replace(x, span=self.at(opener).to(self.at(closer))), x)

    def callee(self, token: Token) -> ast.Name:
        word = str(token)
        return ast.Name(word if word in DTYPES else self.name_of(token), span=self.at(token))

    def bare(self, fn: Token, bracket: ast.Bracket) -> ast.Call:
        return ast.Call(self.callee(fn), bracket, (), called=False, span=self.at(fn).to(bracket.span))

    def call(self, fn: Token, bracket: ast.Bracket | None, _open: Token, arguments: list[Any] | None, close: Token) -> ast.Call:
        args: list[ast.Expr] = []
        kwargs: list[tuple[ast.Name, ast.Expr]] = []
        named: set[str] = set()
        for a in arguments or ():
            if isinstance(a, tuple):
                if a[0].name in named:
                    raise Refused(problems.arguments(a[0].span, f"`{a[0].name}` is given twice", "remove one"))
                named.add(a[0].name)
                kwargs.append(a)
            elif kwargs:
                mend = "move it to the front, or name it too; a comparison is `==`"
                raise Refused(problems.arguments(a.span, "a positional argument after a named one", mend))
            else:
                args.append(a)
        node = ast.Call(self.callee(fn), bracket, tuple(args), tuple(kwargs), span=self.at(fn).to(self.at(close)))
        return self.nest(node, *args, *(value for _, value in kwargs))

    def arguments(self, *items: Any) -> list[Any]:
        return [a for a in items if a is not None]

    def keyword(self, name: Token, value: ast.Expr) -> tuple[ast.Name, ast.Expr]:
        return ast.Name(self.name_of(name), span=self.at(name)), value

    def bracket(self, opener: Token, axes: tuple[ast.AxisSpec, ...], to: tuple[ast.AxisSpec, ...] | None, closer: Token) -> ast.Bracket:
        return ast.Bracket(axes, to, span=self.at(opener).to(self.at(closer)))

    # --- signatures ---

    def axes(self, *items: ast.AxisSpec | None) -> tuple[ast.AxisSpec, ...]:
        return tuple(a for a in items if a is not None)

    def axis(self, name: Token, extent: Token | None) -> ast.AxisSpec:
        span = self.at(name)
        if extent is None:
            return ast.AxisSpec(self.name_of(name), span=span)
        return ast.AxisSpec(self.name_of(name), self.extent(extent), span=span.to(self.at(extent)))

    def extent(self, token: Token) -> int:
        value = self.value_of(token)
        if not isinstance(value, int) or value < 1:
            raise Refused(problems.extent(self.at(token), str(token)))
        return value

    def stored(self, dtype: Token, axes: tuple[ast.AxisSpec, ...] | None, closer: Token) -> ast.TypeExpr:
        return ast.TypeExpr(str(dtype), axes or (), span=self.at(dtype).to(self.at(closer)))

    def input(self, const: Token | None, name: Token, type: ast.TypeExpr) -> ast.Input:
        return ast.Input(self.name_of(name), type, const is not None, span=self.at(const or name).to(type.span))

    def output(self, name: Token, type: ast.TypeExpr) -> ast.Output:
        return ast.Output(self.name_of(name), type, span=self.at(name).to(type.span))

    def inputs(self, *items: Any) -> tuple[Any, ...]:
        return tuple(i for i in items if i is not None)

    outputs = formals = inputs

    def program(self, forward: Token | None, keyword: Token, name: Token, inputs: Any, outputs: Any, closer: Token) -> ast.Program:
        span = self.at(forward or keyword).to(self.at(closer))
        return ast.Program(self.name_of(name), inputs or (), outputs or (), (), forward is not None, span=span)

    def alias(self, keyword: Token, name: Token, *choices: Token) -> ast.TypeAlias:
        return ast.TypeAlias(self.name_of(name), tuple(map(str, choices)), span=self.at(keyword).to(self.at(choices[-1])))

    # --- statements ---

    def number(self, minus: Token | None, token: Token) -> tuple[int | float, Span]:
        value, span = self.value_of(token), self.at(token)
        return (-value, self.at(minus).to(span)) if minus else (value, span)

    def setting(self, name: Token, number: tuple[int | float, Span]) -> ast.Param:
        return ast.Param(self.name_of(name), number[0], span=self.at(name).to(number[1]))

    def param(self, _keyword: Token, *items: ast.Param) -> tuple[ast.Param, ...]:
        return items

    def size(self, axis: Token, value: Token) -> ast.Nominal:
        span = self.at(axis)
        return ast.Nominal(ast.Name(self.name_of(axis), span=span), self.extent(value), span=span.to(self.at(value)))

    def nominal(self, _keyword: Token, *items: ast.Nominal) -> tuple[ast.Nominal, ...]:
        return items

    def chunk(self, keyword: Token, axis: Token, by: Token, value: Token) -> ast.Chunk:
        if str(by) != "by":
            message = "`by` stands between an axis and the size of its chunks"
            raise Refused(problems.setting(self.at(by), message, "write `chunk v by 4096`"))
        name = ast.Name(self.name_of(axis), span=self.at(axis))
        return ast.Chunk(name, self.extent(value), span=self.at(keyword).to(self.at(value)))

    def save(self, keyword: Token, *names: Token) -> ast.Save:
        found = tuple(ast.Name(self.name_of(n), span=self.at(n)) for n in names)
        return ast.Save(found, keyword.type == "RECOMPUTE", span=self.at(keyword).to(found[-1].span))

    def distribute(self, keyword: Token, *names: Token) -> ast.Distribute:
        found = tuple(ast.Name(self.name_of(n), span=self.at(n)) for n in names)
        return ast.Distribute(found, span=self.at(keyword).to(found[-1].span))

    def require(self, keyword: Token, condition: ast.Expr) -> ast.Require:
        return ast.Require(condition, span=self.at(keyword).to(condition.span))

    def annotated(self, name: Token, dtype: Token) -> Annotated:
        span = self.at(name).to(self.at(dtype))
        return Annotated(ast.Target(self.name_of(name), str(dtype), span=span), span)

    def tupled(self, *parts: Any) -> Tuple:
        items = [p for p in parts[:-1] if p is not None]
        return Tuple(tuple(items), items[0].span.to(self.at(parts[-1])))

    def group(self, *elements: Any) -> Group:
        return Group(elements, elements[0].span.to(elements[-1].span))

    def line(self, left: Group, right: Group | None) -> ast.Assign | Line:
        if right is None:
            return Line(self.results(left), left.span)
        targets = tuple(self.target(e) for e in left.elements)
        values = self.results(right)
        if len(values) not in (1, len(targets)):
            raise Refused(problems.counts(right.span, left.span, len(targets), len(values)))
        return ast.Assign(targets, values, span=left.span.to(right.span))

    def target(self, element: Any) -> ast.Target:
        if isinstance(element, Annotated):
            return element.target
        if isinstance(element, ast.Name):
            return ast.Target(element.name, span=element.span)
        if isinstance(element, ast.Number) and element.value == float("inf"):
            raise Refused(problems.reserved(element.span, "inf", "keyword"))
        raise Refused(problems.target(element.span))

    def results(self, group: Group) -> tuple[ast.Expr, ...]:
        found: list[ast.Expr] = []
        for element in group.elements:
            if isinstance(element, Annotated):
                mend = "an annotation stands left of the `=`: `name: bf16 = …`; a cast is `bf16(…)`"
                raise Refused(problems.annotation(element.span, mend))
            if isinstance(element, Tuple):
                if len(group.elements) > 1:
                    raise Refused(problems.nested_tuple(element.span))
                found += element.items
            else:
                found.append(element)
        return tuple(found)

    # --- functions ---

    def formal(self, name: Token, default: ast.Expr | None) -> ast.Argument:
        span = self.at(name)
        return ast.Argument(self.name_of(name), default, span=span.to(default.span) if default else span)

    def block(self, *lines: ast.Assign | Line) -> tuple[ast.Assign | Line, ...]:
        return lines

    def function(self, keyword: Token, name: Token, bracket: ast.Bracket | None, formals: Any, lines: tuple[Any, ...]) -> ast.Def:
        if bracket is not None and bracket.to is not None:
            raise Refused(problems.def_shape(bracket.span, "a def's brackets hold axes, without an arrow", "write `def f[d](x) = …`"))
        for line in lines[:-1]:
            if isinstance(line, Line):
                raise Refused(problems.unnamed(line.span, lines[-1].span))
        if not isinstance(lines[-1], Line):
            raise Refused(problems.no_result(lines[-1].span, str(name)))
        required = False
        for argument in reversed(formals or ()):
            required |= argument.default is None
            if required and argument.default is not None:
                mend = "move it behind the others"
                raise Refused(problems.arguments(argument.span, "an argument with a default before one without", mend))
        axes = bracket.axes if bracket else ()
        return ast.Def(self.name_of(name), axes, formals or (), lines[:-1], lines[-1].results, span=self.at(keyword).to(lines[-1].span))
