"""Text back to programs, the inverse of `printer.to_text`. In: that text. Out: an equal `graph.Program`. Non-goal: checking (`verify`)."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from .graph import Atom, Eqn, Lit, Output, Program, Tensor, Var
from .types import BOOL, DTYPES, Axis, DType, Ty

R = TypeVar("R")
TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|(?P<number>-?(?:inf\b|nan\b|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?))"""
    r"""|(?P<name>[^\W\d][\w.']*)|(?P<sign>->|[^\s\w]))"""
)


class IRSyntaxError(ValueError):
    """The text is not a printed program; says where."""


def from_text(text: str) -> Program:
    """The program that `text` prints. Raises IRSyntaxError, with the line, for anything else."""
    return _Reader(text).program()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text.rstrip(), 0
        self.vars: dict[str, Var] = {}
        self.order: dict[str, int] = {}

    # --- tokens

    def fail(self, wanted: str) -> NoReturn:
        rest = self.text[self.at :].lstrip()
        line = self.text.count("\n", 0, len(self.text) - len(rest)) + 1
        found = rest.split("\n")[0][:20] or "the end"
        raise IRSyntaxError(f"line {line}: expected {wanted}, found {found!r}")

    def peek(self) -> tuple[str, str]:
        match = TOKEN.match(self.text, self.at)
        return (match.lastgroup or "", match[match.lastgroup or 0]) if match else ("end", "")

    def next(self, kind: str) -> str:
        match = TOKEN.match(self.text, self.at)
        if not match or match.lastgroup != kind:
            self.fail(f"a {kind}")
        self.at = match.end()
        return match[kind]

    def accept(self, word: str) -> bool:
        if self.peek()[1] != word or self.peek()[0] == "string":
            return False
        match = TOKEN.match(self.text, self.at)
        assert match
        self.at = match.end()
        return True

    def expect(self, word: str) -> None:
        if not self.accept(word):
            self.fail(f"`{word}`")

    def many(self, item: Callable[[], R], close: str) -> tuple[R, ...]:
        """Items with commas between, up to and including `close`."""
        out: list[R] = []
        while not self.accept(close):
            if out:
                self.expect(",")
            out.append(item())
        return tuple(out)

    def line(self, item: Callable[[], R]) -> tuple[R, ...]:
        """One or more items with commas between."""
        out = [item()]
        while self.accept(","):
            out.append(item())
        return tuple(out)

    # --- the grammar

    def program(self) -> Program:
        self.expect("program")
        name = self.next("name")
        self.expect("(")
        inputs = self.many(self.tensor, ")")
        self.expect("->")
        self.expect("(")
        results = self.many(self.result, ")")
        self.expect("{")
        doc = ast.literal_eval(self.next("string")) if self.header("doc") else ""
        axes = self.line(self.axis) if self.header("axes") else ()
        self.order = {a.name: i for i, a in enumerate(axes)}
        for t in inputs:
            self.vars[t.name] = Var(t.name, Ty(t.dtype, self.sorted(t.axes)))
        nominal = self.repeated("nominal", self.nominal)
        requires = self.repeated("require", lambda: ast.literal_eval(self.next("string")))
        save = self.line(self.name) if self.header("save") else ()
        recompute = self.line(self.name) if self.header("recompute") else ()
        distribute = self.line(self.name) if self.header("distribute") else ()
        chunk = self.repeated("chunk", self.nominal)
        forward = self.header("forward")
        eqns: list[Eqn] = []
        while not self.accept("}"):
            eqns.append(self.equation())
        if self.peek()[0] != "end":
            self.fail("the end")
        outputs = tuple(Output(t, self.var(value)) for t, value in results)
        return Program(name, axes, inputs, outputs, tuple(eqns), requires, nominal, save, recompute, distribute, chunk, forward, doc)

    def header(self, word: str) -> bool:
        """Accepts `word` unless it begins an equation (a variable may have that name)."""
        start = self.at
        if self.accept(word) and self.peek()[1] != ":":
            return True
        self.at = start
        return False

    def repeated(self, word: str, item: Callable[[], R]) -> tuple[R, ...]:
        out: list[R] = []
        while self.header(word):
            out.append(item())
        return tuple(out)

    def name(self) -> str:
        return self.next("name")

    def axis(self) -> Axis:
        name = self.name()
        return Axis(name, int(self.next("number")) if self.accept("=") else None)

    def nominal(self) -> tuple[str, int]:
        name = self.name()
        self.expect("=")
        return name, int(self.next("number"))

    def tensor(self) -> Tensor:
        name = self.name()
        const = name == "const" and self.peek()[0] == "name"
        if const:
            name = self.name()
        self.expect(":")
        return Tensor(name, *self.type(), const)

    def result(self) -> tuple[Tensor, str]:
        tensor = self.tensor()
        self.expect("=")
        return tensor, self.name()

    def type(self) -> tuple[DType, tuple[str, ...]]:
        dtype = DTYPES.get(self.peek()[1])
        if dtype is None:
            self.fail("a dtype")
        self.name()
        self.expect("[")
        return dtype, self.many(self.name, "]")

    def equation(self) -> Eqn:
        name = self.name()
        self.expect(":")
        dtype, axes = self.type()
        self.expect("=")
        op = self.name()
        self.expect("(")
        args = self.many(self.atom, ")")
        attrs: list[tuple[str, object]] = []
        while self.is_attribute():
            key = self.name()
            self.expect("=")
            attrs.append((key, self.attribute()))
        out = self.vars[name] = Var(name, Ty(dtype, axes))
        return Eqn(out, op, args, tuple(attrs))

    def is_attribute(self) -> bool:
        start = self.at
        found = self.peek()[0] == "name" and bool(self.name()) and self.peek()[1] == "="
        self.at = start
        return found

    def attribute(self) -> object:
        kind, word = self.peek()
        if self.accept("["):
            return self.many(self.attribute, "]")
        if kind == "name":
            self.name()
            return {"true": True, "false": False}.get(word, word)
        return ast.literal_eval(self.next("string")) if kind == "string" else self.number()

    def number(self) -> int | float:
        text = self.next("number")
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)

    def atom(self) -> Atom:
        kind, word = self.peek()
        if kind == "name":
            self.name()
            return Lit(word == "true", BOOL) if word in ("true", "false") else self.var(word)
        value = self.number()
        self.expect(":")
        dtype = DTYPES.get(self.name())
        if dtype is None:
            self.fail("a dtype")
        return Lit(value, dtype)

    def var(self, name: str) -> Var:
        if name not in self.vars:
            self.fail(f"a defined variable (`{name}` is not)")
        return self.vars[name]

    def sorted(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Axes in program order."""
        for a in axes:
            if a not in self.order:
                self.fail(f"axis {a} in the list of axes")
        return tuple(sorted(axes, key=self.order.__getitem__))
