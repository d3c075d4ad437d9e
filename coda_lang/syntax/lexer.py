"""From text to items. In: a `Source`. Out: `Item`s — the tokens of one signature, def (block included), alias or statement each — and the
lexical errors found on the way. Here live brackets, continuation lines and indentation; an item with an error is marked and not parsed.

Non-goals: grammar (grammar.lark), meaning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lark.lexer import Token

from ..diagnostics.model import Diagnostic, Label
from ..source import Source, Span
from . import problems
from .words import KEYWORDS, STATEMENTS

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+)
      | (?P<comment>\#[^\n]*)
      | (?P<newline>\n)
      | (?P<name>[^\W\d]\w*)
      | (?P<number>(?:\.?[0-9])(?:[eE][+-](?=[0-9])|[\w.])*)
      | (?P<op>->|\*\*|==|!=|<=|>=|[-+*/@%<>=(),:|]|\[|\])
      | (?P<junk>=>|&&|\|\||[+\-*/@%]=|:=|//|<-|[^\s\w]+?|.)""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)

# The grammar's names of these texts; a keyword's is the keyword in capitals.
_TYPES = {
    "->": "ARROW", "**": "POWER", "+": "PLUS", "-": "MINUS", "*": "STAR", "/": "SLASH", "@": "AT", "%": "PERCENT", "=": "EQUAL", "(": "LPAR",
    ")": "RPAR", "[": "LSQB", "]": "RSQB", ",": "COMMA", ":": "COLON", "|": "VBAR",
}  # fmt: skip
_TYPES |= {text: "COMPARE" for text in ("==", "!=", "<=", ">=", "<", ">")}
_TYPES |= {word: word.upper() for word in KEYWORDS}

# A line that starts with one of these goes on with the statement of the line before.
CONTINUES = frozenset({"ARROW", "PLUS", "MINUS", "STAR", "SLASH", "AT", "PERCENT", "POWER", "COMPARE", "AND", "OR"})
_CLOSES = {")": "(", "]": "["}
MAX_NAME = 100
MAX_BRACKETS = 100


@dataclass
class Item:
    """Tokens of one item, NEWLINE and block tokens included; `broken` after a lexical error in it; `doc` = the comment lines right above."""

    tokens: list[Token]
    doc: str = ""
    broken: bool = False


@dataclass
class _Line:
    """A logical line: its tokens, and where its first physical line starts."""

    tokens: list[Token]
    indent: int
    tab: bool
    broken: bool = False


@dataclass
class Lexer:
    """One pass over one source; `items()` gives the items, `errors` what was wrong."""

    source: Source
    errors: list[Diagnostic] = field(default_factory=list)
    comments: dict[int, str] = field(default_factory=dict)  # whole-line comments by line number

    def span(self, token: Token) -> Span:
        return span_of(self.source.file, token)

    # --- tokens ---

    def _tokens(self) -> tuple[list[Token], set[int], dict[int, tuple[int, bool]]]:
        """All tokens, the places (start positions) of broken ones, and every line's indentation."""
        text, tokens, broken = self.source.text, [], set()
        indents: dict[int, tuple[int, bool]] = {}
        line, start = 1, 0  # number and position of the current line
        for match in _TOKEN.finditer(text):
            kind, value, pos = match.lastgroup, match.group(), match.start()
            if kind == "newline":
                line, start = line + 1, match.end()
                continue
            if kind == "blank":
                continue
            if kind == "comment":
                if not text[start:pos].strip():
                    self.comments[line] = value.lstrip("#").strip()
                continue
            col = pos - start + 1
            if line not in indents:
                indents[line] = (pos - start, "\t" in text[start:pos])
            token = Token("JUNK", value, pos, line, col, line, col + len(value), match.end())
            problem = None
            if kind == "name":
                token.type = _TYPES.get(value, "NAME")
                if not value.isascii():
                    problem = problems.character(self.span(token), value)
                elif len(value) > MAX_NAME:
                    problem = problems.long_name(self.span(token), value, MAX_NAME)
            elif kind == "number":
                token.type = "NUMBER"
                problem = problems.number(self.span(token), value) if not _NUMBER.fullmatch(value) else problems.range_of(self.span(token), value)
            elif kind == "op":
                token.type = _TYPES[value]
            else:
                problem = problems.character(self.span(token), value)
            if problem:
                broken.add(pos)
                self.errors.append(problem)
            tokens.append(token)
        return tokens, broken, indents

    # --- brackets ---

    def _brackets(self, tokens: list[Token]) -> tuple[set[int], set[int]]:
        """Matches brackets: the positions of openers that nothing closes, and of tokens with an error of this kind."""
        unclosed: set[int] = set()
        broken: set[int] = set()
        stack: list[Token] = []
        for k, token in enumerate(tokens):
            if token.value in "([":
                stack.append(token)
                if len(stack) == MAX_BRACKETS + 1:
                    self.errors.append(problems.brackets_too_deep(self.span(token), MAX_BRACKETS))
                    broken.add(token.start_pos)
            elif token.type in STARTS and stack and tokens[k - 1].line < token.line:
                # a statement cannot start inside brackets: those still open were forgotten
                for opener in stack:
                    self.errors.append(problems.unclosed(self.span(opener), opener.value, self.span(token)))
                    unclosed.add(opener.start_pos)
                stack.clear()
            elif token.value in _CLOSES:
                if stack and stack[-1].value == _CLOSES[token.value]:
                    stack.pop()
                    continue
                broken.add(token.start_pos)
                opener = stack[-1] if stack else None
                self.errors.append(problems.mismatched(self.span(token), token.value, opener and self.span(opener), opener and opener.value))
                if any(o.value == _CLOSES[token.value] for o in stack):
                    while stack.pop().value != _CLOSES[token.value]:
                        pass
        for opener in stack:
            self.errors.append(problems.unclosed(self.span(opener), opener.value, None))
            unclosed.add(opener.start_pos)
        return unclosed, broken | unclosed

    # --- lines ---

    def _lines(self) -> list[_Line]:
        tokens, broken, indents = self._tokens()
        unclosed, more = self._brackets(tokens)
        broken |= more
        lines: list[_Line] = []
        depth, last = 0, 0  # open brackets, and the last token's line
        forgotten = False  # an opener of this line is never closed: the line may end at any line start that looks like a statement
        for k, token in enumerate(tokens):
            fresh = token.line > last
            if not lines or (fresh and token.type not in CONTINUES and (depth == 0 or (forgotten and _begins(tokens, k)))):
                lines.append(_Line([], *indents[token.line]))
                depth, forgotten = 0, False
            lines[-1].tokens.append(token)
            lines[-1].broken |= token.start_pos in broken
            if token.value in "([":
                forgotten |= token.start_pos in unclosed
                depth += 1
            elif token.value in _CLOSES:
                depth = max(0, depth - 1)
            last = token.line
        return lines

    def items(self) -> list[Item]:
        """The items of the source, blocks attached to their def."""
        items: list[Item] = []
        lines = self._lines()
        k = 0
        while k < len(lines):
            line = lines[k]
            k += 1
            first = line.tokens[0]
            item = Item(line.tokens, self._doc(first.line), line.broken)
            items.append(item)
            if line.indent:
                item.broken = True
                self.errors.append(problems.tab(self._margin(line)) if line.tab else problems.indented(self.span(first)))
            item.tokens.append(_mark("_NEWLINE", item.tokens[-1]))
            if first.type == "DEF" and len(line.tokens) > 2 and line.tokens[-2].type == "EQUAL":
                k = self._block(item, lines, k)
        return items

    def _block(self, item: Item, lines: list[_Line], k: int) -> int:
        """Adds the indented lines from `lines[k]` on to the def `item`; returns the next line's index."""
        start = k
        while k < len(lines) and lines[k].indent:
            line = lines[k]
            first = line.tokens[0]
            item.broken |= line.broken
            if line.tab:
                item.broken = True
                self.errors.append(problems.tab(self._margin(line)))
            elif k == start:
                item.tokens.append(_mark("_INDENT", first))
            elif line.indent != lines[start].indent:
                item.broken = True
                self.errors.append(problems.uneven(self.span(first), self._margin(lines[start]), lines[start].indent, line.indent))
            item.tokens += line.tokens
            item.tokens.append(_mark("_NEWLINE", item.tokens[-1]))
            k += 1
        if k == start:
            if not item.broken:
                self.errors.append(problems.no_block(self.span(item.tokens[-2]), str(item.tokens[1])))
            item.broken = True
        else:
            item.tokens.append(_mark("_DEDENT", item.tokens[-1]))
        return k

    def _margin(self, line: _Line) -> Span:
        first = line.tokens[0]
        return Span(self.source.file, first.line, 1, first.line, max(2, first.column))

    def _doc(self, number: int) -> str:
        """The block of comment lines that ends right above line `number`."""
        found: list[str] = []
        while number - 1 in self.comments:
            number -= 1
            found.append(self.comments[number])
        return "\n".join(reversed(found))


STARTS = frozenset(word.upper() for word in STATEMENTS)


def _begins(tokens: list[Token], k: int) -> bool:
    """Whether `tokens[k]`, first of its line, looks like the start of a statement: a keyword, or names up to an `=`."""
    if tokens[k].type in STARTS:
        return True
    line = tokens[k].line
    while k < len(tokens) and tokens[k].line == line and tokens[k].type in ("NAME", "COMMA", "COLON"):
        k += 1
    return k < len(tokens) and tokens[k].type == "EQUAL" and tokens[k].line == line


def _mark(kind: str, near: Token) -> Token:
    """A layout token, right after `near` (right before, for an _INDENT)."""
    if kind == "_INDENT":
        return Token(kind, "", near.start_pos, near.line, near.column, near.line, near.column, near.start_pos)
    return Token(kind, "", near.end_pos, near.end_line, near.end_column, near.end_line, near.end_column, near.end_pos)


def span_of(file: str, token: Token) -> Span:
    """A token's span; tokens from the lexer always know their place."""
    return Span(file, token.line or 1, token.column or 1, token.end_line or 1, token.end_column or 1)


__all__ = ["Item", "Label", "Lexer", "span_of"]
