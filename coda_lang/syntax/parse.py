"""From text to the syntax tree. In: a `Source`. Out: `ast.Module`, or a `CodaError` with every syntax error found (C01xx).

Each item (a signature, a def, an alias, a statement) is parsed by itself, so an error in one hides none in the next. The parser is Lark's
LALR(1), built from grammar.lark on first use (about 60 ms; no cache file to go stale).
Non-goals: names, types and axes (ir/build).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lark import Lark
from lark.exceptions import UnexpectedToken
from lark.lexer import Lexer as LarkLexer
from lark.lexer import Token

from ..diagnostics.model import CodaError, Diagnostic
from ..diagnostics.suggest import suggest
from ..source import Source, Span
from . import ast, problems
from .explain import explain
from .lexer import MAX_ERRORS, Item, Lexer, in_order, span_of
from .tree import Builder, Line, Refused
from .words import BY_NAME, CONSTANTS, FOREIGN, KEPT, PYTHON, STATEMENTS

_LOCK = threading.Lock()

class _Ready(LarkLexer):
    """The tokens are ready: `lexer.Lexer` made them."""

    def __init__(self, conf: object) -> None:
        pass

    def lex(self, data: list[Token]) -> Iterator[Token]:
        return iter(data)


@lru_cache(maxsize=1)
def _machine() -> tuple[Lark, Builder]:
    grammar = (Path(__file__).parent.parent / "grammar.lark").read_text(encoding="utf-8")
    builder = Builder()
    return Lark(grammar, parser="lalr", lexer=_Ready, transformer=builder), builder


def parse(source: Source) -> ast.Module:
    """The module in `source`. Raises `CodaError` (C01xx) with up to 20 errors, in the order of the text."""
    lexer = Lexer(source)
    items = lexer.items()
    errors: list[Diagnostic] = list(lexer.errors)
    nodes: list[tuple[Item, Any]] = []
    with _LOCK:
        lark, builder = _machine()
        for item in items:
            if len(errors) >= MAX_ERRORS:
                raise CodaError(in_order(errors), (source,))
            nodes.append((item, _parse_item(lark, builder, source, item, errors)))
    module = _assemble(source, nodes, errors)
    if errors:
        raise CodaError(in_order(errors), (source,))
    return module


def _parse_item(lark: Lark, builder: Builder, source: Source, item: Item, errors: list[Diagnostic]) -> Any:
    if item.broken:
        return None
    builder.begin(source.file)
    try:
        _refuse_foreign(source.file, item.tokens)
        return lark.parse(item.tokens)
    except UnexpectedToken as error:
        errors.append(explain(source.file, item.tokens, error.token, error.expected))
    except Refused as error:
        errors.append(error.problem)
    return None


def _refuse_foreign(file: str, tokens: list[Token]) -> None:
    """A line that starts with another language's statement says so, rather than what its second word breaks; so does `keepdim=True`."""
    for k, token in enumerate(tokens[:-1]):
        if token in KEPT and [str(t) for t in tokens[k + 1 : k + 3]] in (["=", "True"], ["=", "False"]):
            raise Refused(problems.foreign(span_of(file, token), str(token), BY_NAME))
        if token in CONSTANTS and tokens[k + 1].type == "EQUAL":
            raise Refused(problems.reserved(span_of(file, token), str(token), "Python word"))
        if token in FOREIGN and (k == 0 or tokens[k - 1].type in ("_NEWLINE", "_INDENT")):
            after = tokens[k + 1].type
            if after == "NAME" or (token in PYTHON and after not in ("EQUAL", "COMMA")) or (after == "_NEWLINE" and len(tokens) == 2):
                raise Refused(problems.foreign(span_of(file, token), str(token), FOREIGN[str(token)]))


def _assemble(source: Source, nodes: list[tuple[Item, Any]], errors: list[Diagnostic]) -> ast.Module:
    """Statements go to the program above them; an item with errors still says which kind it was."""
    found: list[Any] = []
    body: list[Any] | None = None  # of the program whose statements are being read
    lost = False  # whether statements belong to a signature that could not be read
    for item, node in nodes:
        kind = _kind(item, node)
        if kind in ("PROGRAM", "FORWARD"):
            body, lost = [], node is None
            if node is not None:
                found.append((node, item.doc, body))
        elif kind in ("DEF", "TYPE"):
            body, lost = None, False
            if node is not None:
                found.append((node, item.doc, None))
        elif node is None or lost:
            continue
        elif isinstance(node, Line):
            errors.append(problems.unnamed(node.span))
        elif body is not None:
            body.extend(node if isinstance(node, tuple) else [node])
        elif kind == "PARAM":
            found.extend((param, "", None) for param in node)
        else:
            errors.append(problems.homeless((node[0] if isinstance(node, tuple) else node).span))
    if not nodes and not errors:
        errors.append(problems.empty(Span(source.file, 1, 1, 1, 1)))
    out = tuple(_finish(*f) for f in found)
    return ast.Module(out, span=out[0].span.to(out[-1].span) if out else Span(source.file, 1, 1, 1, 1))


def _kind(item: Item, node: Any) -> str:
    """What an item is by its first word, also where that is misspelt or missing."""
    first = next((t for t in item.tokens if t.type != "JUNK"), item.tokens[0])
    types = [t.type for t in item.tokens[:4]]
    if node is None and types == ["NAME", "LPAR", "NAME", "COLON"]:
        return "PROGRAM"
    if node is None and types[0] == "NAME" and types[1] in ("NAME", "PROGRAM"):
        return next((word.upper() for word in suggest(first, STATEMENTS)), first.type)
    return first.type


def _finish(node: Any, doc: str, body: list[Any] | None) -> Any:
    if isinstance(node, ast.Program):
        return replace(node, doc=doc, body=tuple(body or ()))
    return replace(node, doc=doc) if isinstance(node, ast.Def) else node
