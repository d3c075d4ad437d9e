"""Why a token could not stand where it stands. In: an item's tokens and the place where the parser stopped. Out: the most specific
diagnostic known.

`RULES` are tried in order; each looks at the place and answers, or passes. Non-goals: errors that tokens alone show (lexer.py), or nodes
(tree.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lark.lexer import Token

from ..diagnostics.model import Diagnostic, Label
from ..diagnostics.suggest import did_you_mean
from ..source import Span
from . import problems
from .lexer import STARTS, span_of
from .words import BY_NAME, FOREIGN, KEYWORDS, LANES, PYTHON, STATEMENTS

OPERATORS = frozenset({"PLUS", "MINUS", "STAR", "SLASH", "PERCENT", "AT", "POWER", "COMPARE", "AND", "OR"})
VALUE_ENDS = frozenset({"NAME", "NUMBER", "INF", "RPAR", "RSQB"})
VALUE_STARTS = frozenset({"NAME", "NUMBER", "INF", "LPAR"})
LAYOUT = frozenset({"_NEWLINE", "_INDENT", "_DEDENT", "$END"})
WORDS = frozenset(word.upper() for word in KEYWORDS)


@dataclass(frozen=True)
class Place:
    """Where the parser stopped: `tokens[at]` is none of `expected`."""

    file: str
    tokens: list[Token]
    at: int
    expected: frozenset[str]

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    @property
    def kind(self) -> str:
        return self.token.type

    @property
    def before(self) -> Token | None:
        return self.tokens[self.at - 1] if self.at else None

    @property
    def span(self) -> Span:
        """Of the token; at a line's end, of the last token on it."""
        return self.of(self.before if self.kind in LAYOUT and self.before is not None else self.token)

    def of(self, token: Token) -> Span:
        return span_of(self.file, token)

    def after(self, distance: int = 1) -> str:
        """The type of a later token, "" past the end."""
        return self.tokens[self.at + distance].type if self.at + distance < len(self.tokens) else ""

    def back(self, distance: int = 1) -> str:
        """The type of an earlier token, "" before the start."""
        return self.tokens[self.at - distance].type if self.at >= distance else ""

    @property
    def line(self) -> int:
        """Where the statement that holds the token starts: 0, or after a line's end in a block."""
        return max((k + 1 for k in range(self.at) if self.tokens[k].type in LAYOUT), default=0)

    @property
    def first(self) -> str:
        return self.tokens[self.line].type

    @property
    def opener(self) -> int | None:
        """The index of the innermost bracket that is open at the token."""
        stack: list[int] = []
        for k in range(self.at):
            if self.tokens[k].value in ("(", "["):
                stack.append(k)
            elif self.tokens[k].value in (")", "]") and stack:
                stack.pop()
        return stack[-1] if stack else None

    @property
    def in_axes(self) -> bool:
        return self.opener is not None and self.tokens[self.opener].type == "LSQB"

    def depth_from(self, start: int) -> list[str]:
        """The types between `start` and the token that are in no bracket opened on the way."""
        depth, found = 0, []
        for token in self.tokens[start : self.at]:
            depth -= token.value in (")", "]")
            if depth == 0 and token.value not in (")", "]"):
                found.append(token.type)
            depth += token.value in ("(", "[")
        return found


def explain(file: str, tokens: list[Token], token: Token, expected: set[str]) -> Diagnostic:
    """The diagnostic for a parse that stopped at `token` of `tokens`, where only `expected` could follow."""
    at = next((k for k, t in enumerate(tokens) if t is token), None)
    if at is None:  # the parser's own end of input
        tokens = [*tokens, token]
        at = len(tokens) - 1
    place = Place(file, tokens, at, frozenset(expected))
    return next(d for rule in RULES if (d := rule(place)) is not None)


# --- one function a mistake --------------------------------------------------------------------------------------------


def _block_statement(p: Place) -> Diagnostic | None:
    if p.tokens[0].type == "DEF" and p.line == p.at > 0 and p.kind in STARTS:
        return problems.def_shape(p.span, f"`{p.token}` cannot stand in a def", "a def's block holds assignments and, last, its result")
    return None


def _misspelt(p: Place) -> Diagnostic | None:
    if p.at == p.line + 1 and p.first == "NAME" and p.kind in ("NAME", "PROGRAM"):
        near = did_you_mean(str(p.before), STATEMENTS)
        return problems.foreign(p.of(p.tokens[p.line]), str(p.before), near) if near else None
    return None


def _keyword_as_name(p: Place) -> Diagnostic | None:
    if p.kind == "EQUAL" and p.at == 1 and p.tokens[0].type in WORDS:
        return problems.reserved(p.of(p.tokens[0]), str(p.tokens[0]), "keyword")
    if p.kind in WORDS - {"AND", "OR", "NOT"} and "NAME" in p.expected:
        if p.kind == "CHUNK" and p.after() == "LPAR":
            return problems.foreign(p.span, "chunk(…)", LANES)
        return problems.reserved(p.span, str(p.token), "keyword")
    if p.kind in ("AND", "OR", "NOT") and p.at == p.line and p.after() in ("EQUAL", "COMMA", "COLON"):
        return problems.reserved(p.span, str(p.token), "keyword")
    return None


def _axes(p: Place) -> Diagnostic | None:
    if not p.in_axes:
        return None
    if p.kind == "COMPARE" and str(p.token) == "==":
        return problems.equals(p.span, "an extent is fixed with one `=`: `lane=2`")
    if p.kind == "COMPARE" and str(p.token) == ">" and "ARROW" in p.expected:
        return problems.outputs(p.span, "`>` where `->` is expected", "write `rename[a -> b](x)`")
    if p.back() == "EQUAL":
        return problems.extent(p.span, str(p.token) if p.kind in VALUE_STARTS or p.kind == "MINUS" else "")
    if p.kind == "RSQB" and p.back() == "LSQB":
        return problems.axes(p.of(p.tokens[p.at - 1]).to(p.span), "empty brackets", "name the axes, or leave the brackets out")
    if p.kind == "NUMBER" and p.first in ("PROGRAM", "FORWARD") and str(p.token).isdigit():
        name = next(n for n in (*"dnkejabc", "axis") if all(str(t) != n for t in p.tokens))
        mend = f"write `{name}={problems.short(str(p.token))}`: an axis has a name, and may have a fixed extent"
        return problems.axes(p.span, f"`{problems.short(str(p.token))}` is not an axis", mend)
    if p.kind in ("NUMBER", "MINUS", "COLON"):
        mend = "axes have names, never positions: `sum[d](x)`, `x: bf16[m, d]`"
        return problems.axes(p.span, f"`{problems.short(str(p.token))}` is not an axis", mend)
    if p.kind in OPERATORS:
        return problems.axes(p.span, f"`{p.token}` between axes", "axes are names, separated by commas; extents are not computed")
    if p.kind == "NAME" and p.back() in ("NAME", "NUMBER"):
        return problems.missing_comma(p.span, str(p.before))
    return None


def _equals(p: Place) -> Diagnostic | None:
    if p.kind == "EQUAL":
        if p.first == "REQUIRE":
            return problems.equals(p.span, "a comparison is `==`")
        if p.first in ("NAME", "LPAR") and p.opener is None and "EQUAL" in p.depth_from(p.line):
            return problems.equals(p.span, "a comparison is `==`; a line assigns once")
        if p.opener is not None and p.tokens[0].type in ("NAME", "DEF", "LPAR") and p.tokens[p.opener].type == "LPAR" and not _formals(p):
            return problems.equals(p.span, "a comparison is `==`")
    if p.kind == "COMPARE" and str(p.token) == "==" and "EQUAL" in p.expected and p.first in ("PARAM", "NOMINAL", "TYPE", "DEF"):
        return problems.equals(p.span, "write one `=` here")
    return None


def _formals(p: Place) -> bool:
    """Whether the token stands in the parentheses of a def's header."""
    return p.tokens[0].type == "DEF" and p.line == 0 and "EQUAL" not in p.depth_from(0)


def _signature(p: Place) -> Diagnostic | None:
    if p.kind == "COLON" and p.at == 3 and p.first == "NAME" and p.opener == 1:
        return problems.signature(p.of(p.tokens[0]), "a signature starts with `program`", f"write `program {p.tokens[0]}(…) -> (…)`")
    if p.first not in ("PROGRAM", "FORWARD") or p.in_axes:
        return None
    if "PROGRAM" in p.expected:
        return problems.signature(p.span, "`forward` stands before `program`", "write `forward program name(…) -> (…)`")
    if "NAME" in p.expected and p.back() == "PROGRAM":
        return problems.signature(p.span, "the program has no name", "write `program name(…) -> (…)`")
    if p.expected == {"ARROW"}:
        if p.kind == "MINUS" and p.after() == "COMPARE":
            return problems.outputs(p.span, "an arrow in two pieces", "write `->`, without a space")
        if p.kind in LAYOUT or p.kind == "COLON":
            return problems.outputs(p.span, "the signature has no outputs", "add them: `-> (y: bf16[m, n])`")
        return problems.outputs(p.span, f"`{problems.short(str(p.token))}` where `->` is expected", "write `-> (…)` after the inputs")
    if p.expected == {"LPAR"}:
        if p.back() == "ARROW":
            return problems.outputs(p.span, "the outputs stand in parentheses", "write `-> (y: bf16[m, n])`")
        return problems.signature(p.span, "the inputs stand in parentheses", "write `program name(x: bf16[m, d]) -> (…)`")
    if p.expected == {"COLON"}:
        name = problems.short(str(p.before))
        mend = f"write `{name}: bf16{_axes_for(p)}`, with the axes in storage order"
        return problems.untyped(p.of(p.tokens[p.at - 1]), f"`{name}` has no type", mend)
    if p.expected == {"LSQB"}:
        dtype = problems.short(str(p.before))
        mend = f"write `{dtype}{_axes_for(p)}`; a scalar is `{dtype}[]`"
        return problems.untyped(p.of(p.tokens[p.at - 1]), f"`{dtype}` lacks its axes", mend)
    if p.back() == "COLON":
        return problems.untyped(p.span, "a type starts with its element type", "write `bf16[m, d]`")
    if p.kind == "EQUAL":
        return problems.signature(p.span, "inputs have no defaults", "a constant is a `param`: `param eps = 1e-5` below the signature")
    if p.expected == {"_NEWLINE"}:
        return problems.signature(p.span, "the signature ends before this", "remove it; the statements follow on lines of their own")
    if p.kind in ("NAME", "CONST") and p.back() == "RSQB":
        return problems.missing_comma(p.span, "]")
    return None


def _axes_for(p: Place) -> str:
    """Axes for a tensor that has none yet: those that only one other tensor of the signature has, as a product's; else the last one's."""
    text = [str(t) for t in p.tokens]
    starts = [k for k in range(2, len(text)) if text[k] == "[" and text[k - 2] == ":" and "]" in text[k:]]
    others = [[t for t in text[k + 1 : text.index("]", k)] if t.isidentifier()] for k in starts]
    if not others:
        return "[m, d]"
    every = [a for axes in others[::-1] for a in axes]
    once = [a for a in dict.fromkeys(every) if every.count(a) == 1]
    return f"[{', '.join(once if len(others) > 1 and once else others[-1])}]"


def _definition(p: Place) -> Diagnostic | None:
    if p.tokens[0].type != "DEF" or p.line != 0 or p.in_axes:
        return None
    if _formals(p) and p.opener is not None and p.kind == "COLON":
        return problems.def_shape(p.span, "arguments of a def have no types", "remove the type: a def is inlined where it is called")
    if "EQUAL" in p.depth_from(0):
        return None
    if "EQUAL" in p.expected and p.opener is None:
        where = p.of(p.tokens[p.at - 1]) if p.kind in LAYOUT else p.span
        return problems.def_shape(where, "a def's body follows `=`", "write `def name(x) = …`, or an indented block below the `=`")
    if p.expected == {"LPAR"} or p.expected == {"LPAR", "LSQB"}:
        mend = "write `def name[axes](x) = …`; without arguments, `def name() = …`"
        return problems.def_shape(p.span, "a def's arguments stand in parentheses", mend)
    return None


def _setting(p: Place) -> Diagnostic | None:
    if p.first == "CHUNK":
        return problems.setting(p.span, "`chunk` takes an axis and a size", "write `chunk v by 4096`; each chunk takes a line of its own")
    if p.first in ("PARAM", "NOMINAL") and p.kind not in LAYOUT and "EQUAL" in p.depth_from(p.line):
        what = "a param's value is a number" if p.first == "PARAM" else "a nominal extent is a whole number"
        if p.kind in ("NAME", "INF", "LPAR", "MINUS") or p.kind in OPERATORS:
            return problems.setting(p.span, what, "write the number out; several settings are separated by commas")
    return None


def _arrow(p: Place) -> Diagnostic | None:
    if p.kind == "ARROW":
        mend = "`->` stands between inputs and outputs, and in brackets: `rename[a -> b](x)`"
        return problems.outputs(p.span, "an arrow where none belongs", mend)
    return None


def _annotation(p: Place) -> Diagnostic | None:
    if p.kind == "LSQB" and p.back() == "NAME" and p.back(2) == "COLON" and p.opener is None:
        mend = "an annotation is an element type alone: axes follow from the value"
        return problems.annotation(p.of(p.tokens[p.at - 1]).to(p.span), mend)
    if p.back() == "COLON" and p.opener is None:
        return problems.annotation(p.span, "write the element type: `name: bf16 = …`")
    if p.kind == "COLON":
        return problems.annotation(p.span, "a colon stands between a name and its type, and nowhere else")
    return None


def _chain(p: Place) -> Diagnostic | None:
    if p.kind != "COMPARE":
        return None
    start = p.line if p.opener is None else p.opener + 1
    types = p.depth_from(start)
    last = max((k for k, t in enumerate(types) if t in ("COMMA", "EQUAL", "AND", "OR", "NOT", "REQUIRE")), default=-1)
    return problems.chained(p.span) if "COMPARE" in types[last + 1 :] else None


def _line_end(p: Place) -> Diagnostic | None:
    if p.kind not in LAYOUT or p.before is None:
        return None
    if p.before.type in OPERATORS or p.before.type == "NOT":
        mend = f"start the next line with `{p.before}`, or put the expression in parentheses"
    elif p.before.type == "EQUAL":
        mend = "write the value on this line; it can go on over several inside brackets"
    elif p.before.type == "COMMA":
        mend = "remove the comma, or go on after it on this line"
    else:
        mend = f"{expectation(p.expected)} would come next"
    return problems.early_end(p.span, str(p.before), mend)


def _juxtaposed(p: Place) -> Diagnostic | None:
    if p.back() not in VALUE_ENDS or p.kind not in VALUE_STARTS | {"LSQB", "NOT"}:
        return None
    if p.kind == "LSQB":
        rest = [str(t) for t in p.tokens[p.at + 1 :]]
        inside = rest[: rest.index("]")] if "]" in rest else []
        mend = BY_NAME if "None" in inside else "functions work on axes: `sum[d](x)`, `gather[v](z, i)`"
        return problems.missing_operator(p.span, "brackets follow the name of a function", mend)
    if p.kind == "LPAR" and p.back() in ("RPAR", "NUMBER", "INF"):
        return problems.missing_operator(p.span, "only a name can be called", "a product is written with `*`")
    if p.opener is not None and p.kind == "NAME" and p.after() == "EQUAL":
        return problems.missing_comma(p.span, str(p.before))
    if str(p.token) in FOREIGN:
        return problems.foreign(p.span, str(p.token), FOREIGN[str(p.token)])
    for token in p.tokens[p.line : p.at]:
        if str(token) in FOREIGN and str(token) in PYTHON:
            return problems.foreign(p.of(token), str(token), FOREIGN[str(token)])
    words = f"nothing joins `{problems.short(str(p.before))}` and `{problems.short(str(p.token))}`"
    return problems.missing_operator(p.span, words, "write an operator between them" + (", or a comma" if p.opener is not None else ""))


def _operand(p: Place) -> Diagnostic | None:
    if p.kind == "LSQB" and p.back() not in VALUE_ENDS:
        return problems.operand(p.span, "there are no lists", "lanes are joined by `pack[lane](a, b)`")
    missing = p.kind in OPERATORS or p.kind in ("COMMA", "RPAR", "EQUAL", "COLON")
    if not missing or p.back() in VALUE_ENDS:
        return None
    if p.kind == "PLUS":
        return problems.operand(p.span, "there is no unary `+`", "remove it")
    if p.kind == "RPAR" and p.back() == "LPAR":
        return problems.operand(p.span, "empty parentheses", "put an expression inside")
    after = f" after `{p.before}`" if p.before is not None and p.before.type not in LAYOUT else ""
    return problems.operand(p.span, f"a value is missing{after}, before `{p.token}`", "write it, or remove what is left over")


def _misplaced_not(p: Place) -> Diagnostic | None:
    if p.kind == "NOT":
        return problems.operand(p.span, "`not` cannot stand here", "put it in parentheses: `(not x)`")
    return None


def _alternatives(p: Place) -> Diagnostic | None:
    if p.kind == "VBAR":
        return Diagnostic("C0103", "`|` is not an operator", p.span, help="write `or`; `|` only separates the choices of a `type`")
    return None


def _otherwise(p: Place) -> Diagnostic:
    found = "the end of the line" if p.kind in LAYOUT else f"`{problems.short(str(p.token))}`"
    label: tuple[Label, ...] = ()
    if p.opener is not None:
        label = (Label(p.of(p.tokens[p.opener]), "inside this bracket"),)
    return Diagnostic("C0101", f"{found} cannot stand here", p.span, "", label, help=f"expected: {expectation(p.expected)}")


_NAMES = {
    "NAME": "a name", "NUMBER": "a number", "COMPARE": "a comparison", "ARROW": "`->`", "POWER": "`**`", "PLUS": "`+`", "MINUS": "`-`",
    "STAR": "`*`", "SLASH": "`/`", "AT": "`@`", "PERCENT": "`%`", "EQUAL": "`=`", "LPAR": "`(`", "RPAR": "`)`", "LSQB": "`[`",
    "RSQB": "`]`", "COMMA": "`,`", "COLON": "`:`", "VBAR": "`|`", "_NEWLINE": "the end of the line", "_INDENT": "an indented block",
    "_DEDENT": "the end of the block", "$END": "the end of the file",
}  # fmt: skip


def expectation(expected: frozenset[str]) -> str:
    """What could follow, in words: "a name, `,` or `)`"."""
    left = set(expected)
    words: list[str] = []
    if {"NAME", "NUMBER", "LPAR"} <= left:
        words.append("an expression")
        left -= {"NAME", "NUMBER", "LPAR", "INF", "NOT", "MINUS"}
    if {"PLUS", "STAR", "AT"} <= left:
        words.append("an operator")
        left -= OPERATORS
    if len(STARTS & left) > 2:
        words.append("a statement")
        left -= STARTS
    words += [_NAMES.get(t, f"`{t.lower()}`") for t in sorted(left)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


RULES: tuple[Callable[[Place], Diagnostic | None], ...] = (
    _block_statement,
    _misspelt,
    _keyword_as_name,
    _axes,
    _equals,
    _signature,
    _definition,
    _setting,
    _arrow,
    _annotation,
    _alternatives,
    _chain,
    _line_end,
    _juxtaposed,
    _operand,
    _misplaced_not,
    _otherwise,
)
