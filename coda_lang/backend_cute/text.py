"""Python text as a person would write it: expressions from operator templates, records as literals.

In: equations of the IR, dataclasses of `spec`. Out: lines that `ruff format` leaves as they are. Non-goals: what to emit (`emit`).
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass

from .. import ops
from ..ir.graph import Atom, Eqn, Lit, Var
from ..passes.state import is_temporary

WIDTH = 140
INLINE = 88  # a temporary longer than this has a line of its own
LONGEST = 104  # an expression longer than this is taken apart


def safe(name: str) -> str:
    """The name as a Python variable of a function: the function library's `f` is taken. No two names become one."""
    return _apart(name, ("f", "inf", "nan", "size"))


def public(name: str) -> str:
    """A program's name as that of its function in the module."""
    return _apart(name, ("inf", "nan"))


def _apart(name: str, taken: tuple[str, ...]) -> str:
    """Taken names get a `_`, and so does what they would then be taken for: `f` is `f_`, `f_` is `f__`. Python's words are no names."""
    return name + "_" if name.rstrip("_") in taken else name


def constant(lit: Lit) -> ast.expr:
    """A literal; infinities and NaN are names of the module."""
    value = lit.value
    if isinstance(value, float) and not math.isfinite(value):
        name = ast.Name("nan" if math.isnan(value) else "inf")
        return ast.UnaryOp(ast.USub(), name) if value == -math.inf else name
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (value < 0 or math.copysign(1.0, value) < 0):
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)


def call(name: str, *args: ast.expr) -> ast.Call:
    """f.name(args)"""
    return ast.Call(ast.Attribute(ast.Name("f"), name), list(args), [])


def scalar(e: Eqn, args: Sequence[ast.expr]) -> ast.expr:
    """A scalar equation's right side, from the operator's template."""
    op = ops.TABLE[e.op]
    assert op.emit is not None, f"{e.op} has no template"
    template = ast.parse(op.emit.format(**{a.lstrip("*"): a.lstrip("*") for a in op.args}, **dict(e.attrs)), mode="eval").body
    return _Fill(dict(zip(op.args, args))).visit(template)


class _Fill(ast.NodeTransformer):
    def __init__(self, args: Mapping[str, ast.expr]) -> None:
        self.args = args

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.args.get(node.id, node)


@dataclass(frozen=True)
class Line:
    """One assignment and where it comes from."""

    name: str
    value: str
    source: str = ""

    def text(self) -> str:
        return f"    {self.name} = {self.value}" + (f"  # src: {self.source}" if self.source else "")


def body(
    eqns: Iterable[Eqn], results: Iterable[Atom], right: Callable[[Eqn, Sequence[ast.expr]], ast.expr] = scalar
) -> tuple[list[Line], dict[str, ast.expr]]:
    """Assignments, one a named value; temporaries of one use and one source line stand where they are used.

    The mapping gives the expression of every value, for results.
    """
    eqns = list(eqns)
    count: dict[str, int] = {}
    where: dict[str, object] = {}
    for e in eqns:
        for a in e.args:
            if isinstance(a, Var):
                count[a.name] = count.get(a.name, 0) + 1
                where[a.name] = e.span.line if e.span else None
    kept = {a.name for a in results if isinstance(a, Var)}
    known: dict[str, ast.expr] = {}
    lines: list[Line] = []
    source = {e.out.name: str(e.span) if e.span else "" for e in eqns}
    for e in eqns:
        name = e.out.name
        while True:
            value = right(e, [constant(a) if isinstance(a, Lit) else known.get(a.name, ast.Name(safe(a.name))) for a in e.args])
            text = ast.unparse(value)
            inlined = [a.name for a in e.args if isinstance(a, Var) and a.name in known]
            if len(text) <= LONGEST or not inlined:
                break
            longest = max(inlined, key=lambda n: len(ast.unparse(known[n])))
            lines.append(Line(safe(longest), ast.unparse(known.pop(longest)), source[longest]))
        here = e.span.line if e.span else None
        if is_temporary(name) and name not in kept and count.get(name) == 1 and where[name] in (here, None) and len(text) < INLINE:
            known[name] = value
            continue
        if isinstance(value, ast.Name) and value.id == safe(name):
            continue
        lines.append(Line(safe(name), text, source[name]))
    return lines, known


def returns(values: Sequence[str]) -> str:
    """`return (y,)`, `return y, z`, one a line where they are many"""
    flat = f"    return ({values[0]},)" if len(values) == 1 else f"    return {', '.join(values)}" if values else "    return ()"
    return flat if len(flat) <= WIDTH else "    return (\n" + "".join(f"        {v},\n" for v in values) + "    )"


def literal(value: object, indent: int = 0, used: int = 0, alias: str = "s") -> str:
    """A record as Python text; defaults are left out. `used` are the columns before and after it on its line."""
    flat = _flat(value, alias)
    if indent + used + len(flat) <= WIDTH or not isinstance(value, (tuple, dict)) and not is_dataclass(value):
        return flat
    pad, inner = " " * indent, " " * (indent + 4)
    if is_dataclass(value):
        items = [f"{name}{literal(v, indent + 4, len(name) + 1, alias)}" for name, v in _given(value)]
        open, close = f"{alias}.{type(value).__name__}(", ")"
    elif isinstance(value, dict):
        items = [f"{json.dumps(key)}: {literal(v, indent + 4, len(key) + 5, alias)}" for key, v in value.items()]
        open, close = "{", "}"
    else:
        assert isinstance(value, tuple)
        items = [literal(v, indent + 4, 1, alias) for v in value]
        open, close = "(", ")"
    return open + "\n" + "".join(f"{inner}{item},\n" for item in items) + pad + close


class Raw(str):
    """Text that stands in a literal as it is."""


def _given(record: object) -> list[tuple[str, object]]:
    """A record's fields as arguments: leading ones by position, after the first one left out by name."""
    out: list[tuple[str, object]] = []
    named = False
    for f in fields(record):  # type: ignore[arg-type]
        value = getattr(record, f.name)
        if f.default is not MISSING and value == f.default and type(value) is type(f.default):
            named = True
            continue
        named = named or f.name in (
            "ports",
            "sinks",
            "extents",
            "rows",
            "cols",
            "inputs",
            "outputs",
            "kernels",
            "requires",
            "products",
            "phases",
            "tensors",
        )
        out.append((f"{f.name}=" if named and not type(record).__name__ == "Matrix" or named and f.default is not MISSING else "", value))
    return out


def _flat(value: object, alias: str) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if is_dataclass(value):
        return f"{alias}.{type(value).__name__}({', '.join(name + _flat(v, alias) for name, v in _given(value))})"
    if isinstance(value, tuple):
        return f"({', '.join(_flat(v, alias) for v in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_flat(v, alias)}" for key, v in value.items()) + "}"
    return repr(value)
