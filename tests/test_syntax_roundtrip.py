"""Random syntax trees, written with few parentheses and random line breaks, parse back to themselves: the precedence table, checked.

In: trees from hypothesis. Out: texts that mean them. Non-goals: texts that are wrong (test_syntax_errors.py).
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coda_lang.source import Source, Span
from coda_lang.syntax import ast
from coda_lang.syntax.parse import parse
from coda_lang.syntax.words import RESERVED

NO = Span("", 1, 1, 1, 1)

# --- trees ---------------------------------------------------------------------------------------------------------------

words = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,6}", fullmatch=True).filter(lambda w: w not in RESERVED)
dtypes = st.sampled_from(["bf16", "f16", "f32", "i32", "T"])
floats = st.floats(min_value=2.0**-126, max_value=3e38, allow_nan=False) | st.just(0.0)
numbers = st.builds(lambda v: ast.Number(v, span=NO), st.integers(0, 2**63 - 1) | floats | st.just(float("inf")))
names = st.builds(lambda w: ast.Name(w, span=NO), words)
specs = st.builds(lambda w, e: ast.AxisSpec(w, e, span=NO), words, st.none() | st.integers(1, 4096))
axes = st.lists(specs, min_size=1, max_size=3).map(tuple)
brackets = st.builds(lambda a, to: ast.Bracket(a, to, span=NO), axes, st.none() | axes)

BINARY = {op: level for level, ops in enumerate(["or", "and", "", "== != < <= > >=", "+ -", "* / %", "", "@", "**"]) for op in ops.split()}
NOT, NEGATE, ATOM = 2, 6, 9


def calls(inner: st.SearchStrategy[ast.Expr]) -> st.SearchStrategy[ast.Expr]:
    keywords = st.lists(st.tuples(names, inner), max_size=2, unique_by=lambda p: p[0].name).map(tuple)
    callees = names | st.sampled_from(["bf16", "f32"]).map(lambda w: ast.Name(w, span=NO))
    return st.builds(
        lambda f, b, a, k: ast.Call(f, b, tuple(a), k, span=NO), callees, st.none() | brackets, st.lists(inner, max_size=2), keywords
    ) | st.builds(lambda f, b: ast.Call(f, b, (), called=False, span=NO), names, brackets)


exprs: st.SearchStrategy[ast.Expr] = st.recursive(
    names | numbers,
    lambda inner: (
        st.builds(lambda op, x, y: ast.Binary(op, x, y, span=NO), st.sampled_from(sorted(BINARY)), inner, inner)
        | st.builds(lambda op, x: ast.Unary(op, x, span=NO), st.sampled_from(["-", "not"]), inner)
        | calls(inner)
    ),
    max_leaves=12,
)
targets = st.builds(lambda w, t: ast.Target(w, t, span=NO), words, st.none() | dtypes)


def values(count: int) -> st.SearchStrategy[list[ast.Expr]]:
    return st.lists(exprs, min_size=count, max_size=count)


assigns = st.lists(targets, min_size=1, max_size=3).flatmap(
    lambda ts: st.builds(lambda vs: ast.Assign(tuple(ts), tuple(vs), span=NO), values(1) | values(len(ts)))
)
signed = numbers.flatmap(lambda n: st.sampled_from([n.value, -n.value]))
statements = (
    assigns
    | st.builds(lambda ns, r: ast.Save(tuple(ns), r, span=NO), st.lists(names, min_size=1, max_size=3), st.booleans())
    | st.builds(lambda ns: ast.Distribute(tuple(ns), span=NO), st.lists(names, min_size=1, max_size=3))
    | st.builds(lambda e: ast.Require(e, span=NO), exprs)
    | st.builds(lambda n, v: ast.Nominal(n, v, span=NO), names, st.integers(1, 10**9))
    | st.builds(lambda n, v: ast.Chunk(n, v, span=NO), names, st.integers(1, 10**9))
    | st.builds(lambda w, v: ast.Param(w, v, span=NO), words, signed)
)
types = st.builds(lambda t, a: ast.TypeExpr(t, tuple(a), span=NO), dtypes, st.lists(specs, max_size=3))
programs = st.builds(
    lambda w, i, o, b, f: ast.Program(w, tuple(i), tuple(o), tuple(b), f, span=NO),
    words,
    st.lists(st.builds(lambda w, t, c: ast.Input(w, t, c, span=NO), words, types, st.booleans()), max_size=3),
    st.lists(st.builds(lambda w, t: ast.Output(w, t, span=NO), words, types), max_size=2),
    st.lists(statements, max_size=4),
    st.booleans(),
)
arguments = st.tuples(st.lists(words, max_size=2), st.lists(st.tuples(words, exprs), max_size=2)).map(
    lambda p: tuple([ast.Argument(w, None, span=NO) for w in p[0]] + [ast.Argument(w, e, span=NO) for w, e in p[1]])
)
defs = st.builds(
    lambda w, a, args, b, r: ast.Def(w, tuple(a), args, tuple(b), tuple(r), span=NO),
    words,
    st.lists(specs, max_size=2),
    arguments,
    st.lists(assigns, max_size=3),
    st.lists(exprs, min_size=1, max_size=2),
)
aliases = st.builds(lambda w, c: ast.TypeAlias(w, tuple(c), span=NO), words, st.lists(dtypes, min_size=1, max_size=3))
modules = st.lists(programs | defs | aliases, min_size=1, max_size=4).map(lambda items: ast.Module(tuple(items), span=NO))


# --- writing -------------------------------------------------------------------------------------------------------------


class Writer:
    """Writes trees; `rng` chooses between spellings that mean the same."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def gap(self) -> str:
        """Where a line may go on: before a binary operator."""
        return self.rng.choice([" ", " ", "", "  ", "\n", "\n      ", "  # why\n\n  "])

    def number(self, value: float) -> str:
        return "inf" if value == float("inf") else "-inf" if value == float("-inf") else repr(value)

    def expr(self, e: ast.Expr, floor: int = 0) -> str:
        """`e` in parentheses if it binds more loosely than `floor`."""
        text, level = self.bare(e)
        return f"({text})" if level < floor or self.rng.random() < 0.05 else text

    def bare(self, e: ast.Expr) -> tuple[str, int]:
        if isinstance(e, ast.Number):
            return self.number(e.value), ATOM
        if isinstance(e, ast.Name):
            return e.name, ATOM
        if isinstance(e, ast.Unary):
            level = NOT if e.op == "not" else NEGATE
            return f"{e.op} {self.expr(e.x, level)}", level
        if isinstance(e, ast.Call):
            bracket = self.bracket(e.bracket) if e.bracket else ""
            values = [self.expr(a) for a in e.args] + [f"{k.name}={self.expr(v)}" for k, v in e.kwargs]
            return e.fn.name + bracket + (f"({', '.join(values)})" if e.called else ""), ATOM
        level = BINARY[e.op]
        sides = {"**": (ATOM, level), "==": (level + 1, level + 1)}
        left, right = sides.get("==" if level == BINARY["=="] else e.op, (level, level + 1))
        negated = e.op in ("@", "**") and isinstance(e.right, ast.Unary) and e.right.op == "-"
        if negated and isinstance(e.right, ast.Unary):  # `a @ -b`, `a ** -b`: the minus takes one operand of that level
            second = "-" + self.expr(e.right.x, BINARY["**"])
        else:
            second = self.expr(e.right, right)
        gap = " " if e.op.isalpha() else self.gap()
        return f"{self.expr(e.left, left)}{gap}{e.op} {second}", level

    def spec(self, a: ast.AxisSpec) -> str:
        return a.name if a.extent is None else f"{a.name}={a.extent}"

    def bracket(self, b: ast.Bracket) -> str:
        arrow = "" if b.to is None else " -> " + ", ".join(map(self.spec, b.to))
        return f"[{', '.join(map(self.spec, b.axes))}{arrow}]"

    def type(self, t: ast.TypeExpr) -> str:
        return f"{t.dtype}[{', '.join(map(self.spec, t.axes))}]"

    def statement(self, s: ast.Stmt) -> str:
        if isinstance(s, ast.Assign):
            left = [t.name + (f": {t.dtype}" if t.dtype else "") for t in s.targets]
            return f"{', '.join(left)} = {', '.join(map(self.expr, s.values))}"
        if isinstance(s, ast.Save):
            return ("recompute " if s.recompute else "save ") + ", ".join(n.name for n in s.names)
        if isinstance(s, ast.Distribute):
            return "distribute " + ", ".join(n.name for n in s.names)
        if isinstance(s, ast.Require):
            return "require " + self.expr(s.condition)
        if isinstance(s, ast.Nominal):
            return f"nominal {s.axis.name} = {s.value}"
        if isinstance(s, ast.Chunk):
            return f"chunk {s.axis.name} by {s.size}"
        return f"param {s.name} = {self.number(s.value)}"

    def item(self, i: ast.Program | ast.Def | ast.TypeAlias | ast.Param) -> str:
        if isinstance(i, ast.TypeAlias):
            return f"type {i.name} = {' | '.join(i.choices)}"
        if isinstance(i, ast.Program):
            inputs = ", ".join(("const " if x.const else "") + f"{x.name}: {self.type(x.type)}" for x in i.inputs)
            outputs = ", ".join(f"{o.name}: {self.type(o.type)}" for o in i.outputs)
            head = f"{'forward ' if i.forward else ''}program {i.name}({inputs}){self.rng.choice([' ', chr(10) + '  '])}-> ({outputs})"
            return "\n".join([head, *map(self.statement, i.body)])
        assert isinstance(i, ast.Def)
        args = ", ".join(a.name + (f"={self.expr(a.default)}" if a.default else "") for a in i.args)
        head = f"def {i.name}{f'[{chr(44).join(map(self.spec, i.axes))}]' if i.axes else ''}({args}) ="
        result = ", ".join(map(self.expr, i.results))
        if result.startswith("-") and (i.body or self.rng.random() < 0.5):
            result = f"({result})" if len(i.results) == 1 else f"({self.expr(i.results[0])}), " + ", ".join(map(self.expr, i.results[1:]))
        if not i.body and not result.startswith("(") and self.rng.random() < 0.5:
            return f"{head} {result}"
        return "\n".join([head, *("    " + self.statement(s) for s in i.body), "    " + result])

    def module(self, m: ast.Module) -> str:
        return "\n".join("\n" * self.rng.randrange(2) + self.item(i) for i in m.items) + self.rng.choice(["", "\n"])


def parsed(text: str) -> ast.Expr:
    [program] = parse(Source("a.coda", "program f() -> ()\ny = " + text)).items
    assert isinstance(program, ast.Program)
    [statement] = program.body
    assert isinstance(statement, ast.Assign) and len(statement.values) == 1
    return statement.values[0]


def test_every_operator_inside_every_other() -> None:
    """Three levels of every combination: parentheses where the table asks for them, and nowhere else."""
    leaf = ast.Name("x", span=NO)

    def grown(inner: list[ast.Expr]) -> list[ast.Expr]:
        unary = [ast.Unary(op, x, span=NO) for op in ("-", "not") for x in inner]
        sides = [(x, leaf) for x in inner] + [(leaf, x) for x in inner if x is not leaf]
        return unary + [ast.Binary(op, x, y, span=NO) for op in BINARY for x, y in sides]

    writer = Writer(random.Random(0))
    writer.rng.random = lambda: 1.0  # type: ignore[method-assign]  # no parentheses but needed ones
    writer.gap = lambda: " "  # type: ignore[method-assign]
    for e in [*grown(grown([leaf])), *random.Random(1).sample(grown(grown(grown([leaf]))), 1500)]:
        assert parsed(writer.expr(e)) == e, writer.expr(e)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(exprs, st.integers(0, 99))
def test_expressions(e: ast.Expr, seed: int) -> None:
    text = Writer(random.Random(seed)).expr(e)
    assert parsed(text) == e, text


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(modules, st.integers(0, 99))
def test_modules(m: ast.Module, seed: int) -> None:
    text = Writer(random.Random(seed)).module(m)
    assert parse(Source("a.coda", text)) == m, text
