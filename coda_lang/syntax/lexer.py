"""From text to items. In: a `Source`. Out: `Item`s — the tokens of one signature, def (block included), alias or statement each — and the
lexical errors found on the way. Here live brackets, continuation lines and indentation; an item with an error is marked and not parsed.

Non-goals: grammar (grammar.lark), meaning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lark.lexer import Token

from ..diagnostics.model import CodaError, Diagnostic
from ..source import Source, Span
from . import problems, spelling
from .words import KEYWORDS, STATEMENTS

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+)
      | (?P<comment>\#[^\n]*)
      | (?P<newline>\n)
      | (?P<name>[^\W\d]\w*)
      | (?P<number>(?:\.?[0-9])(?:[eE][+-](?=[0-9])|[\w.])*)
      | (?P<foreign>=>|=<|<>|&&|\|\||\*\*=(?!=)|[-+*/@%]=(?!=)|:=|//|"[^"\n]*"?|'[^'\n]*'?)
      | (?P<op>->|\*\*|==|!=|<=|>=|[-+*/@%<>=(),:|]|\[|\])
      | (?P<junk>.)""",
    re.VERBOSE,
)

# The grammar's names of these texts; a keyword's is the keyword in capitals.
_TYPES = {
    "->": "ARROW", "**": "POWER", "+": "PLUS", "-": "MINUS", "*": "STAR", "/": "SLASH", "@": "AT", "%": "PERCENT", "=": "EQUAL",
    "(": "LPAR", ")": "RPAR", "[": "LSQB", "]": "RSQB", ",": "COMMA", ":": "COLON", "|": "VBAR",
}  # fmt: skip
_TYPES |= {text: "COMPARE" for text in ("==", "!=", "<=", ">=", "<", ">")}
_TYPES |= {word: word.upper() for word in KEYWORDS}

# A line that starts with one of these goes on with the statement of the line before.
CONTINUES = frozenset({"ARROW", "PLUS", "MINUS", "STAR", "SLASH", "AT", "PERCENT", "POWER", "COMPARE", "AND", "OR"})
_CLOSES = {")": "(", "]": "["}
MAX_NAME = 100
MAX_BRACKETS = 100
MAX_ERRORS = 20
MAX_TOKENS = 100_000


@dataclass
class Item:
    """Tokens of one item, layout tokens included; `doc` is the comment right above it; `broken` after a lexical error."""

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
    """One pass over one source; `items()` gives the items, `errors` what was wrong. Raises CodaError after MAX_ERRORS."""

    source: Source
    errors: list[Diagnostic] = field(default_factory=list)
    comments: dict[int, str] = field(default_factory=dict)  # whole-line comments by line number

    def span(self, token: Token) -> Span:
        return span_of(self.source.file, token)

    def _error(self, problem: Diagnostic) -> None:
        self.errors.append(problem)
        if len(self.errors) == MAX_ERRORS:  # hardly a program: the rest of it means nothing
            raise CodaError(in_order(self.errors), (self.source,))

    # --- tokens ---

    def _tokens(self) -> tuple[list[Token], set[int], dict[int, tuple[int, bool]]]:
        """All tokens, the places (start positions) of broken ones, and every line's indentation."""
        text = self.source.text
        tokens: list[Token] = []
        broken: set[int] = set()
        indents: dict[int, tuple[int, bool]] = {}
        spoilt: set[int] = set()  # where junk has just ended
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
            if kind == "junk" and pos in spoilt:
                kind = "more junk"  # of characters side by side, the first speaks for all
            if kind == "name":
                token.type = _TYPES.get(value, "NAME")
                if not value.isascii():
                    problem = spelling.character(self.span(token), value)
                elif len(value) > MAX_NAME:
                    problem = problems.long_name(self.span(token), value, MAX_NAME)
            elif kind == "number":
                token.type = "NUMBER"
                problem = spelling.number(self.span(token), value)
            elif kind == "op":
                token.type = _TYPES[value]
            elif kind != "more junk":
                problem = spelling.character(self.span(token), value)
            if len(tokens) == MAX_TOKENS:
                raise CodaError([*self.errors, problems.too_long(self.span(token), MAX_TOKENS)], (self.source,))
            if problem:
                self._error(problem)
                broken.add(pos)
            if kind in ("junk", "more junk"):
                spoilt.add(match.end())
            tokens.append(token)
        return tokens, broken, indents

    # --- brackets ---

    def _brackets(self, tokens: list[Token]) -> tuple[dict[int, int], set[int], set[int]]:
        """Matches brackets, known by their positions: closer → opener, the openers that nothing closes, and those with an error."""
        partner: dict[int, int] = {}
        unclosed: set[int] = set()
        broken: set[int] = set()
        stack: list[Token] = []
        mistaken: set[int] = set()  # openers that a wrong bracket tried to close: reported there
        for k, token in enumerate(tokens):
            if token.value in ("(", "["):
                stack.append(token)
                if len(stack) > MAX_BRACKETS:  # the one error worth telling; it also bounds the work below
                    raise CodaError([problems.brackets_too_deep(self.span(token), MAX_BRACKETS)], (self.source,))
            elif token.type in STARTS and stack and tokens[k - 1].line < token.line:
                # a statement cannot start inside brackets: those still open were forgotten
                self._forgotten(stack, mistaken, self.span(token))
                unclosed |= {opener.start_pos for opener in stack}
                stack.clear()
            elif token.value in _CLOSES:
                wanted = _CLOSES[token.value]
                if not stack:
                    self._error(problems.mismatched(self.span(token), token.value))
                    broken.add(token.start_pos)
                elif stack[-1].value != wanted:
                    if stack[-1].start_pos not in mistaken:
                        self._error(problems.mismatched(self.span(token), token.value, self.span(stack[-1]), stack[-1].value))
                    mistaken.add(stack[-1].start_pos)
                    broken.add(token.start_pos)
                if any(opener.value == wanted for opener in stack):
                    while stack[-1].value != wanted:
                        stack.pop()
                    partner[token.start_pos] = stack.pop().start_pos
        self._forgotten(stack, mistaken, None)
        unclosed |= {opener.start_pos for opener in stack}
        return partner, unclosed, broken | unclosed

    def _forgotten(self, openers: list[Token], reported: set[int], before: Span | None) -> None:
        """Reports the innermost of `openers`; those around it are likely to be closed by the same mend."""
        left = [o for o in openers if o.start_pos not in reported]
        if left:
            self._error(problems.unclosed(self.span(left[-1]), left[-1].value, before))

    # --- lines ---

    def _lines(self) -> list[_Line]:
        tokens, broken, indents = self._tokens()
        partner, unclosed, more = self._brackets(tokens)
        broken |= more
        lines: list[_Line] = []
        stack: list[int] = []  # the openers that are open, by position
        last = 0  # the last token's line
        for k, token in enumerate(tokens):
            if not lines or (token.line > last and token.type not in CONTINUES):
                # where an opener is never closed, the line ends before the next one that looks like a statement
                if not stack or (not unclosed.isdisjoint(stack) and _begins(tokens, k)):
                    lines.append(_Line([], *indents[token.line]))
                    stack.clear()
            lines[-1].tokens.append(token)
            lines[-1].broken |= token.start_pos in broken
            if token.value in ("(", "["):
                stack.append(token.start_pos)
            elif partner.get(token.start_pos) in stack:
                del stack[stack.index(partner[token.start_pos]) :]
            last = token.line
        return lines

    def items(self) -> list[Item]:
        """The items of the source, blocks attached to their def."""
        items: list[Item] = []
        lines = self._lines()
        k = 0
        inside = False  # a run of indented lines, one error for all
        while k < len(lines):
            line = lines[k]
            k += 1
            first = line.tokens[0]
            item = Item(line.tokens, self._doc(first.line), line.broken)
            items.append(item)
            if line.indent and not inside and not _dangles(lines[k - 2] if k > 1 else None):
                self._error(problems.tab(self._margin(line)) if line.tab else problems.indented(self.span(first)))
            inside = line.indent > 0
            item.broken |= inside
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
                self._error(problems.tab(self._margin(line)))
            elif k == start:
                item.tokens.append(_mark("_INDENT", first))
            elif line.indent != lines[start].indent:
                item.broken = True
                self._error(problems.uneven(self.span(first), self._margin(lines[start]), lines[start].indent, line.indent))
            item.tokens += line.tokens
            item.tokens.append(_mark("_NEWLINE", item.tokens[-1]))
            k += 1
        if k == start:
            if not item.broken:
                self._error(problems.no_block(self.span(item.tokens[-2]), str(item.tokens[1])))
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


def in_order(errors: list[Diagnostic]) -> list[Diagnostic]:
    """The errors in the order of the text, the first MAX_ERRORS of them."""
    return sorted(errors, key=lambda e: (e.span.line, e.span.col) if e.span else (0, 0))[:MAX_ERRORS]


def _begins(tokens: list[Token], k: int) -> bool:
    """Whether `tokens[k]`, first of its line, looks like the start of a statement: a keyword, or names up to an `=`."""
    if tokens[k].type in STARTS:
        return True
    line = tokens[k].line
    while k < len(tokens) and tokens[k].line == line and tokens[k].type in ("NAME", "COMMA", "COLON"):
        k += 1
    return k < len(tokens) and tokens[k].type == "EQUAL" and tokens[k].line == line


def _dangles(line: _Line | None) -> bool:
    """Whether a line stops so early that its own error explains why the next one is indented."""
    if line is None:
        return False
    last = line.tokens[-2].type  # before its _NEWLINE
    return last in CONTINUES or last in ("EQUAL", "COMMA") or (line.tokens[0].type == "DEF" and last == "COLON")


def _mark(kind: str, near: Token) -> Token:
    """A layout token, right after `near` (right before, for an _INDENT)."""
    if kind == "_INDENT":
        return Token(kind, "", near.start_pos, near.line, near.column, near.line, near.column, near.start_pos)
    return Token(kind, "", near.end_pos, near.end_line, near.end_column, near.end_line, near.end_column, near.end_pos)


def span_of(file: str, token: Token) -> Span:
    """A token's span; tokens from the lexer always know their place."""
    return Span(file, token.line or 1, token.column or 1, token.end_line or 1, token.end_column or 1)

