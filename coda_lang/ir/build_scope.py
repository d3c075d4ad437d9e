"""What names mean: the defs of a module and of the prelude, and the scope an expression is read in.

In: syntax trees. Out: `Library` (defs by name) and `Scope`. Non-goals: axes (`build_axes`), checks of defs (`build_defs`), inlining.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path

from ..source import Source, Span
from ..syntax import ast
from ..syntax.parse import parse
from .build_axes import Bound
from .build_values import Result
from .types import DType

PRELUDE = "coda_lang/prelude.coda"


@dataclass(frozen=True)
class Library:
    """Defs by name; those it lacks are looked up in `outer`."""

    defs: Mapping[str, ast.Def]
    outer: Library | None = None

    def find(self, name: str) -> tuple[ast.Def, Library] | None:
        """A def, and the library whose names its body sees."""
        if name in self.defs:
            return self.defs[name], self
        return self.outer.find(name) if self.outer else None

    def names(self) -> set[str]:
        return set(self.defs) | (self.outer.names() if self.outer else set())


@cache
def prelude() -> tuple[Source, Library]:
    """The prelude's text and defs; parsed once."""
    source = Source(PRELUDE, (Path(__file__).parent.parent / "prelude.coda").read_text(encoding="utf-8"))
    return source, Library({d.name: d for d in parse(source).items if isinstance(d, ast.Def)})


@dataclass
class Scope:
    """Where an expression stands: a program (`bound` is None) or the body of a def. `later`: where names not yet assigned will be."""

    library: Library
    types: Mapping[str, DType]
    bound: Bound | None = None
    values: dict[str, Result] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)
    later: Mapping[str, Span] = field(default_factory=dict)
    types_below: Mapping[str, Span] = field(default_factory=dict)  # generic types declared further down


def children(node: object) -> Iterator[object]:
    """The syntax nodes right below a node."""
    if isinstance(node, tuple):
        yield from node
    elif is_dataclass(node):
        yield from (getattr(node, f.name) for f in fields(node) if f.name != "span")


def walk(node: object) -> Iterator[object]:
    """A node and all below it, in the order of the text."""
    stack = [node]
    while stack:
        top = stack.pop()
        if is_dataclass(top):
            yield top
        stack += reversed(list(children(top)))


def reads(node: object) -> Iterator[ast.Name]:
    """The names a node reads as values, not those it calls."""
    stack = [node]
    while stack:
        top = stack.pop()
        if isinstance(top, ast.Name):
            yield top
        elif isinstance(top, ast.Call):
            stack += reversed([*top.args, *(value for _, value in top.kwargs)])
        else:
            stack += reversed(list(children(top)))


def calls(node: object) -> Iterator[ast.Call]:
    """The calls in a node."""
    return (n for n in walk(node) if isinstance(n, ast.Call))


def types_in(node: object, library: Library) -> set[str]:
    """The names that a node, and the defs it reaches, could use as types."""
    found: set[str] = set()
    todo, seen = [node], set()
    while todo:
        for n in walk(todo.pop()):
            if isinstance(n, ast.TypeExpr):
                found.add(n.dtype)
            elif isinstance(n, ast.Target) and n.dtype:
                found.add(n.dtype)
            elif isinstance(n, ast.Call):
                found.add(n.fn.name)
                if n.fn.name not in seen and (known := library.find(n.fn.name)):
                    todo.append(known[0])
                seen.add(n.fn.name)
    return found
