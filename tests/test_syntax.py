"""What the parser makes of right programs, and that no text whatever gets more out of it than a tree or a CodaError, in bounded time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coda_lang import driver
from coda_lang.diagnostics.model import CodaError
from coda_lang.diagnostics.render import render, to_json
from coda_lang.source import Source, Span
from coda_lang.syntax import ast, lexer
from coda_lang.syntax.parse import _machine, parse
from coda_lang.syntax.words import DTYPES, FOREIGN, FUTURE, KEYWORDS, RESERVED, STATEMENTS

ROOT = Path(__file__).resolve().parent.parent
NO = Span("", 1, 1, 1, 1)  # spans do not take part in equality


def module(text: str) -> ast.Module:
    return parse(Source("a.coda", text))


def body(text: str) -> tuple[ast.Stmt, ...]:
    """The statements of a program."""
    [program] = module("program f(x: bf16[m]) -> (y: bf16[m])\n" + text).items
    assert isinstance(program, ast.Program)
    return program.body


def expr(text: str) -> ast.Expr:
    [statement] = body("y = " + text)
    assert isinstance(statement, ast.Assign) and len(statement.values) == 1
    return statement.values[0]


def n(name: str) -> ast.Name:
    return ast.Name(name, span=NO)


def num(value: int | float) -> ast.Number:
    return ast.Number(value, span=NO)


def bin(left: ast.Expr, op: str, right: ast.Expr) -> ast.Binary:
    return ast.Binary(op, left, right, span=NO)


def neg(x: ast.Expr) -> ast.Unary:
    return ast.Unary("-", x, span=NO)


def axes(*names: str | tuple[str, int]) -> tuple[ast.AxisSpec, ...]:
    return tuple(ast.AxisSpec(*((a,) if isinstance(a, str) else a), span=NO) for a in names)


a, b, c, d = map(n, "abcd")

# --- expressions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a + b * c", bin(a, "+", bin(b, "*", c))),
        ("a - b - c", bin(bin(a, "-", b), "-", c)),
        ("a * b @ c", bin(a, "*", bin(b, "@", c))),
        ("a / b / c", bin(bin(a, "/", b), "/", c)),
        ("a @ b @ c", bin(bin(a, "@", b), "@", c)),
        ("a ** b ** c", bin(a, "**", bin(b, "**", c))),
        ("a @ b ** c", bin(a, "@", bin(b, "**", c))),
        ("-a ** b", neg(bin(a, "**", b))),
        ("a ** -b", bin(a, "**", neg(b))),
        ("-a @ b", neg(bin(a, "@", b))),
        ("a @ -b", bin(a, "@", neg(b))),
        ("a * -b", bin(a, "*", neg(b))),
        ("-a * b", bin(neg(a), "*", b)),
        ("a - -b", bin(a, "-", neg(b))),
        ("a--b", bin(a, "-", neg(b))),
        ("--a", neg(neg(a))),
        ("(a + b) * c", bin(bin(a, "+", b), "*", c)),
        ("a + b < c * d", bin(bin(a, "+", b), "<", bin(c, "*", d))),
        ("a < -b", bin(a, "<", neg(b))),
        ("a <-b", bin(a, "<", neg(b))),
        ("a == b and c >= d or a != b", bin(bin(bin(a, "==", b), "and", bin(c, ">=", d)), "or", bin(a, "!=", b))),
        ("not a == b", ast.Unary("not", bin(a, "==", b), span=NO)),
        ("a and not b", bin(a, "and", ast.Unary("not", b, span=NO))),
        ("a % b * c", bin(bin(a, "%", b), "*", c)),
        ("inf", num(float("inf"))),
        ("-inf", neg(num(float("inf")))),
        ("007", num(7)),
        ("2.50", num(2.5)),
        ("1e-5", num(1e-5)),
        ("2E3", num(2000.0)),
        ("9223372036854775807", num(2**63 - 1)),
        ("((a))", a),
    ],
)
def test_expressions(text: str, expected: ast.Expr) -> None:
    got = expr(text)
    assert got == expected
    if isinstance(got, ast.Number) and isinstance(expected, ast.Number):
        assert type(got.value) is type(expected.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f()", ast.Call(n("f"), None, (), span=NO)),
        ("f(a, b)", ast.Call(n("f"), None, (a, b), span=NO)),
        ("f(a, b,)", ast.Call(n("f"), None, (a, b), span=NO)),
        ("f(a, k=b, l=c)", ast.Call(n("f"), None, (a,), ((n("k"), b), (n("l"), c)), span=NO)),
        ("bf16(a)", ast.Call(n("bf16"), None, (a,), span=NO)),
        ("sum[d](a)", ast.Call(n("sum"), ast.Bracket(axes("d"), span=NO), (a,), span=NO)),
        ("sum[d, e,](a)", ast.Call(n("sum"), ast.Bracket(axes("d", "e"), span=NO), (a,), span=NO)),
        ("index[v]", ast.Call(n("index"), ast.Bracket(axes("v"), span=NO), (), called=False, span=NO)),
        ("rename[a -> b](a)", ast.Call(n("rename"), ast.Bracket(axes("a"), axes("b"), span=NO), (a,), span=NO)),
        ("split[h -> q=32, k=8](a)", ast.Call(n("split"), ast.Bracket(axes("h"), axes(("q", 32), ("k", 8)), span=NO), (a,), span=NO)),
        ("pack[q, k -> h](a, b)", ast.Call(n("pack"), ast.Bracket(axes("q", "k"), axes("h"), span=NO), (a, b), span=NO)),
    ],
)
def test_calls(text: str, expected: ast.Call) -> None:
    assert expr(text) == expected


# --- statements, defs, programs ------------------------------------------------------------------------------------------


def test_statements() -> None:
    t = lambda name, dtype=None: ast.Target(name, dtype, span=NO)  # noqa: E731
    text = """
y = a
z: bf16 = a
p, q = a
p, q: f16 = a, b
save y, z
recompute q
distribute y, z
require a % 8 == 0
nominal m = 8192, n = 64
param eps = 1e-5, ignore = -100, top = -inf
"""
    assert body(text) == (
        ast.Assign((t("y"),), (a,), span=NO),
        ast.Assign((t("z", "bf16"),), (a,), span=NO),
        ast.Assign((t("p"), t("q")), (a,), span=NO),
        ast.Assign((t("p"), t("q", "f16")), (a, b), span=NO),
        ast.Save((n("y"), n("z")), False, span=NO),
        ast.Save((n("q"),), True, span=NO),
        ast.Distribute((n("y"), n("z")), span=NO),
        ast.Require(bin(bin(a, "%", num(8)), "==", num(0)), span=NO),
        ast.Nominal(n("m"), 8192, span=NO),
        ast.Nominal(n("n"), 64, span=NO),
        ast.Param("eps", 1e-5, span=NO),
        ast.Param("ignore", -100, span=NO),
        ast.Param("top", float("-inf"), span=NO),
    )


def test_signatures() -> None:
    text = """
# Says what it does,
# in two lines.
forward program f(x: bf16[m, lane=2, d], const s: f32[],
                  g: T[d],)
    -> (y: bf16[m], z: f32[])
y = x
"""
    [program] = module(text).items
    ty = lambda dtype, *names: ast.TypeExpr(dtype, axes(*names), span=NO)  # noqa: E731
    inputs = (
        ast.Input("x", ty("bf16", "m", ("lane", 2), "d"), span=NO),
        ast.Input("s", ty("f32"), True, span=NO),
        ast.Input("g", ty("T", "d"), span=NO),
    )
    outputs = (ast.Output("y", ty("bf16", "m"), span=NO), ast.Output("z", ty("f32"), span=NO))
    statement = ast.Assign((ast.Target("y", span=NO),), (n("x"),), span=NO)
    assert program == ast.Program("f", inputs, outputs, (statement,), True, "Says what it does,\nin two lines.", span=NO)
    assert program.span == Span("a.coda", 4, 1, 6, 30)


@pytest.mark.parametrize(
    "text",
    [
        "def f[d](x, eps=1e-5) = x * eps",
        "def f[d](x, eps=1e-5) =\n  x * eps",
        "def f[d](x, eps=1e-5) =\n\n      # a comment\n  # another\n      x\n        * eps\n# and one more\n",
        "def f[d](x,\n   eps=1e-5\n) = x\n* eps",
    ],
)
def test_defs(text: str) -> None:
    arguments = (ast.Argument("x", span=NO), ast.Argument("eps", num(1e-5), span=NO))
    assert module(text).items == (ast.Def("f", axes("d"), arguments, (), (bin(n("x"), "*", n("eps")),), span=NO),)


@pytest.mark.parametrize("result", ["a, b", "(a, b)", "(a, b,)"])
def test_blocks(result: str) -> None:
    [found] = module(f"def f() =\n    a = 1\n    b, c = 2, 3\n    {result}\n").items
    assert isinstance(found, ast.Def)
    assert [t.name for s in found.body for t in s.targets] == ["a", "b", "c"] and found.results == (a, b)


def test_statements_belong_to_the_program_above() -> None:
    text = """param shared = 1
type T = bf16 | f16
def g(x) = x
param also = 2
program p(x: T[m]) -> (y: T[m])
param own = 3
y = x
program q(x: T[m]) -> (y: T[m])
y = x
def h(x) = x
param last = 4
"""
    found = module(text).items
    assert [getattr(i, "name", "") for i in found] == ["shared", "T", "g", "also", "p", "q", "h", "last"]
    assert [len(i.body) for i in found if isinstance(i, ast.Program)] == [2, 1]
    assert found[1] == ast.TypeAlias("T", ("bf16", "f16"), span=NO)


def test_comments_become_documentation_only_right_above() -> None:
    items = module("# far\n\n# near\ndef f(x) = x  # beside\ndef g(x) = x\n#\n#   indented\n#\ndef h(x) = x\n").items
    assert [i.doc for i in items if isinstance(i, ast.Def)] == ["near", "", "\nindented\n"]


# --- lines ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["+", "-", "*", "/", "@", "**", "%", "<", "<=", ">", ">=", "==", "!=", "and", "or"])
@pytest.mark.parametrize("gap", ["\n", "\n    ", "  # why\n\n  # and\n"])
def test_a_line_that_starts_with_a_binary_operator_goes_on(op: str, gap: str) -> None:
    assert expr(f"a{gap}{op} b") == bin(a, op, b)


def test_lines_end_nowhere_inside_brackets() -> None:
    assert expr("f(a,\nk\n=\nb\n)") == expr("f(a, k=b)")
    assert expr("(\na\n+\nb\n)") == bin(a, "+", b)
    assert expr("sum[\nd\n](a)") == expr("sum[d](a)")


def test_a_statement_that_starts_with_a_minus_needs_parentheses() -> None:
    [found] = module("def f(a, b) =\n    c = a\n    (-b)\n").items
    assert isinstance(found, ast.Def) and found.results == (neg(b),)
    with pytest.raises(CodaError, match="C0115"):
        module("def f(a, b) =\n    c = a\n    -b\n")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_and_blanks_do_not_matter(end: str) -> None:
    text = "program f(x: bf16[m]) -> (y: bf16[m])\n\n\ny\t =\tx  \n\n# end"
    assert module(text.replace("\n", end)) == module("program f(x: bf16[m]) -> (y: bf16[m])\ny = x")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "marked"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_files_of_every_editor_read_alike(tmp_path: Path, mark: bytes, end: bytes) -> None:
    path = tmp_path / "a.coda"
    path.write_bytes(mark + end.join([b"# c", b"program f(x: bf16[m]) -> (y: bf16[m])", b"y = x", b"z = x x", b""]))
    with pytest.raises(CodaError) as raised:
        parse(driver.read_file(str(path)))
    [error] = raised.value.diagnostics
    assert error.code == "C0129" and error.span == Span(str(path), 4, 7, 4, 8)


def test_spans_are_where_things_stand() -> None:
    [statement] = body("total: bf16 = (a + b) * f[d](c)\n    - 2.5")
    assert isinstance(statement, ast.Assign)
    [value] = statement.values
    assert statement.span == Span("a.coda", 2, 1, 3, 10) and statement.targets[0].span == Span("a.coda", 2, 1, 2, 12)
    assert value.span == Span("a.coda", 2, 15, 3, 10)
    assert isinstance(value, ast.Binary) and isinstance(value.left, ast.Binary) and isinstance(value.left.right, ast.Call)
    assert value.left.left.span == Span("a.coda", 2, 15, 2, 22) and value.left.right.span == Span("a.coda", 2, 25, 2, 32)
    assert value.left.right.bracket and value.left.right.bracket.span == Span("a.coda", 2, 26, 2, 29)


# --- words ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", sorted(RESERVED))
def test_reserved_words_are_no_names(word: str) -> None:
    with pytest.raises(CodaError) as raised:
        body(f"{word} = 1\n")
    if word not in ("and", "or"):  # these go on with the line before
        assert [d.code for d in raised.value.diagnostics] == ["C0108" if word in FUTURE else "C0107"]
    with pytest.raises(CodaError):
        body(f"y = sum[{word}](x)\n")
    assert body(f"{word}_ = 1\n")


def test_word_lists_are_consistent() -> None:
    assert set(STATEMENTS) <= set(KEYWORDS) and not set(KEYWORDS) & set(DTYPES) & set(FUTURE) and not set(FOREIGN) & set(KEYWORDS)


def test_the_lexer_and_the_grammar_know_the_same_terminals() -> None:
    declared = {t.name for t in _machine()[0].terminals} | {"_NEWLINE", "_INDENT", "_DEDENT"}
    made = set(lexer._TYPES.values()) | {"NAME", "NUMBER", "_NEWLINE", "_INDENT", "_DEDENT"}
    assert declared == made
    by_name = {t.name: t.pattern for t in _machine()[0].terminals}
    for text, name in lexer._TYPES.items():
        if name != "COMPARE":
            assert by_name[name].value == text


# --- any text ------------------------------------------------------------------------------------------------------------


def survives(text: str) -> list[str]:
    """Parses anything; the error codes. Whatever is raised must be a CodaError that renders."""
    try:
        module(text)
    except CodaError as error:
        assert 1 <= len(error.diagnostics) <= 20
        assert render(error) and render(error, color=True) and to_json(error)
        for d in error.diagnostics:
            assert d.span is not None and d.help and 1 <= d.span.line <= text.count("\n") + 1
        return [d.code for d in error.diagnostics]
    return []


HEAD = "program f(x: bf16[m]) -> (y: bf16[m])\ny = "
BIG = 1_000_000


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("", {"C0128"}),
        ("\n\n  \n\t\n", {"C0128"}),
        ("# only\n# comments", {"C0128"}),
        ("\ufeff" + HEAD + "x", {"C0102"}),  # a file's mark is dropped where files are read
        ("\0\1\2\xff\ud800", {"C0102"}),
        (HEAD + "(" * 10_000 + "x" + ")" * 10_000, {"C0112"}),
        (HEAD + "f(" * 10_000, {"C0112"}),
        (HEAD + "[" * BIG, {"C0135"}),
        (HEAD + "-" * 10_000 + "x", {"C0112"}),
        (HEAD + "not " * 10_000 + "x", {"C0112"}),
        (HEAD + "x ** " * 10_000 + "x", {"C0112"}),
        (HEAD + "x + " * 10_000 + "x", {"C0112"}),
        (HEAD + ")" * 10_000, {"C0111"}),
        (HEAD + "y" * BIG, {"C0104"}),
        (HEAD + "9" * BIG, {"C0106"}),
        (HEAD + "1." + "9" * BIG, set()),
        (HEAD + "1e" + "9" * BIG, {"C0106"}),
        (" " * BIG, {"C0128"}),
        ("\n" * BIG, {"C0128"}),
        ("# x\n" * (BIG // 4), {"C0128"}),
        ('"' * BIG, {"C0103"}),
        ("\x00\xff" * (BIG // 2), {"C0102"}),
        ("\x00" * BIG, {"C0102", "C0135"}),
        (HEAD + "f(" + "x, " * 300_000, {"C0135"}),
        (HEAD + "f(" + "x, " * 40_000 + ")", set()),
        (HEAD + "f(" + ", ".join(f"k{i}=x" for i in range(20_000)) + ")", set()),
        (HEAD + "x\n" + " y = x\n" * 20_000, {"C0113"}),
        ("def f(x) =\n" * 15_000, {"C0115"}),
        (HEAD + "(\n" * 90, {"C0110"}),
    ],
    ids=lambda v: repr(v[:20]) + f"×{len(v)}" if isinstance(v, str) else None,
)
@pytest.mark.slow
def test_monstrous_sources_end_in_bounded_time(text: str, codes: set[str]) -> None:
    began = time.process_time()
    assert set(survives(text)) == codes
    assert time.process_time() - began < 20


def test_too_many_tokens() -> None:
    assert survives(HEAD + "x\ny = x" * 40_000) == ["C0135"]


PIECES = st.sampled_from(
    [*KEYWORDS, *"()[],:=+-*/@%<>|.", "->", "**", "==", "<=", "\n", "\n    ", "\n\t", " "]
    + ["x", "y", "m", "bf16", "1", "0.5", "1e", "# c", '"', "é", "\0"]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=40).map("".join))
@example("def f(x) =\n  y\n z")
@example("y = (\nparam")
@example("forward\n->")
def test_pieces_of_the_language_in_any_order(text: str) -> None:
    survives(text)
    survives(HEAD + text)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    survives(text)


SPECS = sorted((ROOT / "specs").glob("*.coda"))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([p.read_text(encoding="utf-8") for p in SPECS]), st.data())
def test_damaged_programs(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 8))
    survives(text[:at] + data.draw(st.lists(PIECES, max_size=3).map("".join)) + text[at + cut :])


@pytest.mark.parametrize("path", [*SPECS, ROOT / "coda_lang" / "prelude.coda"], ids=lambda p: p.name)
def test_every_program_of_the_repository_parses(path: Path) -> None:
    assert module(path.read_text(encoding="utf-8")).items


def test_threads_may_parse_at_once() -> None:
    texts = {f"t{i}.coda": f"program p{i}(x: bf16[m]) -> (y: bf16[m])\n" + f"y = x + {i}\n" * 50 for i in range(6)}
    found: dict[str, ast.Module] = {}
    threads = [threading.Thread(target=lambda f=f, t=t: found.update({f: parse(Source(f, t))})) for f, t in texts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file, text in texts.items():
        assert found[file] == parse(Source(file, text)) and found[file].span.file == file
