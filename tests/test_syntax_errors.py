"""Every syntax error at its place. `«»` stand around what the error marks; a text that starts with `!` is a whole source, others follow a
signature.

In: wrong programs. Out: the code, the message and the span of the one error each has; and sources with several errors.
"""

from __future__ import annotations

import re

import pytest

from coda_lang.diagnostics.catalog import FAMILIES
from coda_lang.diagnostics.model import CodaError, Diagnostic
from coda_lang.source import Source
from coda_lang.syntax.parse import parse

SIGNATURE = "program f(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\n"

ONE: dict[str, list[tuple[str, str]]] = {
    "C0101": [
        ("type T = bf16«,» f16", "`,` cannot stand here"),
        ("save «3»", "`3` cannot stand here"),
    ],
    "C0102": [
        ("y = «λ»", "the name `λ` has letters outside ASCII"),
        ("y = x «×» w", "`×` (U+00D7) is not part of the language"),
        ("y = x«\u00a0»@ w", "the character U+00A0 is not part of the language"),
    ],
    "C0103": [
        ("y = a «&&»  b", "`&&` is not part of the language"),
        ("!program f(x: bf16[m, d]) «=>» (y: bf16[m])", "`=>` is not part of the language"),
        ("!program f(x: bf16[m]) -> (y: bf16[m]) «{»", "`{` is not part of the language"),
        ("y = a «|» b", "`|` is not an operator"),
        ("y = x«.»T", "`.` is not part of the language"),
        ("y = x «//» w", "`//` is not part of the language"),
        ("y «+=» x", "`+=` is not an operator"),
        ("y = «\"a\"»", "`\"a\"` is not part of the language"),
        ("y = x«;»", "`;` is not part of the language"),
        ("y = rename[a «=>» b](x)", "`=>` is not part of the language"),
        ("y = a «<>» b", "`<>` is not part of the language"),
        ("y = a «=<» b", "`=<` is not part of the language"),
        ("y = «!»x", "`!` is not part of the language"),
        ("y = x «?» 1 : 0", "`?` is not part of the language"),
    ],
    "C0104": [
        ("y = «" + "a" * 101 + "»", "a name of 101 characters"),
    ],
    "C0105": [
        ("y = «.5»", "`.5` is not a number"),
        ("y = «5.»", "`5.` is not a number"),
        ("y = «1.e5»", "`1.e5` is not a number"),
        ("y = «1_000»", "`1_000` is not a number"),
        ("y = «0x1f»", "`0x1f` is not a number"),
        ("y = «1f»", "`1f` is not a number"),
        ("y = «1.2.3»", "`1.2.3` is not a number"),
        ("y = «1e»", "`1e` is not a number"),
        ("y = «3٣»", "`3٣` is not a number"),
        ("y = «2x»", "`2x` is not a number"),
    ],
    "C0106": [
        ("y = «1e39»", "`1e39` is larger than any f32"),
        ("y = «1e999999»", "`1e999999` is larger than any f32"),
        ("y = «1e-60»", "`1e-60` rounds to zero in f32"),
        ("y = «9223372036854775808»", "the integer `9223372036854775808` does not fit in 64 bits"),
        ("y = «" + "9" * 10_000 + "»", "the integer `99999999999999999999…9999999999` does not fit in 64 bits"),
    ],
    "C0107": [
        ("«save» = 3", "`save` cannot be a name"),
        ("«param» = 3", "`param` cannot be a name"),
        ("y = «param» * 3", "`param` cannot be a name"),
        ("«lambda» = 3", "`lambda` cannot be a name"),
        ("«not» = 3", "`not` cannot be a name"),
        ("«inf» = 3", "`inf` cannot be a name"),
        ("«bf16» = 3", "`bf16` cannot be a name"),
        ("y = «bf16» * 3", "`bf16` cannot be a name"),
        ("def «bf16»(x) = x", "`bf16` cannot be a name"),
        ("a = «def»", "`def` cannot be a name"),
    ],
    "C0108": [
        ("y = «dropout»(x)", "`dropout` is reserved: it is not in version 1 of the language"),
        ("y = «ragged»[m](x)", "`ragged` is reserved: it is not in version 1 of the language"),
    ],
    "C0109": [
        ("!«progam» f(x: bf16[m]) -> (y: bf16[m])\ny = x\nz = y", "the language has no `progam`"),
        ("!«foward» program f(x: bf16[m]) -> (y: bf16[m])\ny = x", "the language has no `foward`"),
        ("!«Def» f(x) = x", "the language has no `Def`"),
        ("«requires» d % 8 == 0", "the language has no `requires`"),
        ("«nominl» m = 3", "the language has no `nominl`"),
        ("y = x @ w\n«if» x > 0:\n", "the language has no `if`"),
        ("«return» y", "the language has no `return`"),
        ("y = x «if» x else w", "the language has no `if`"),
        ("«let» y = 3", "the language has no `let`"),
        ("«else»:\n", "the language has no `else`"),
        ("«end»", "the language has no `end`"),
    ],
    "C0110": [
        ("y = f«(»", "`(` is never closed"),
    ],
    "C0111": [
        ("y = f(x«]»]", "`]` cannot close `(`"),
        ("«]»", "`]` closes nothing"),
    ],
    "C0112": [
        ("y = " + "(" * 100 + "«(»x" + ")" * 101, "more than 100 brackets inside each other"),
        ("y = " + "(" * 100 + "«(»", "more than 100 brackets inside each other"),
        ("y = «" + "x + " * 99 + "x + x»", "an expression of more than 100 levels"),
        ("y = " + "-" * 50 + "«" + "-" * 100 + "x»", "an expression of more than 100 levels"),
        ("y = x + " + "x ** " * 50 + "«" + "x ** " * 100 + "x»", "an expression of more than 100 levels"),
    ],
    "C0113": [
        ("!def f(x)= x\n  «y»", "unexpected indentation"),
        ("!def f(x) =\n  y = x\n    «z» = y\n  z", "the lines of a block start in one column"),
    ],
    "C0114": [
        ("!def f(x) =\n«\t»x", "a tab in the indentation"),
        ("!def f(x) =\n  y = x\n« \t»y", "a tab in the indentation"),
        ("«\t»y = x", "a tab in the indentation"),
    ],
    "C0115": [
        ("!def f(x) «=» \n", "`def f` has no body"),
        ("!def f(x) =\n  «y = x»\n", "the last line of `def f` is not a result"),
    ],
    "C0116": [
        ("require d % 8 «=» 0", "`=` and `==` confused"),
        ("a = b «=» c", "`=` and `==` confused"),
        ("y = (x «=» 0)", "`=` and `==` confused"),
        ("param eps «==» 3", "`=` and `==` confused"),
        ("y = split[lane«==»2](x)", "`=` and `==` confused"),
    ],
    "C0117": [
        ("y = sum[a «+» b](x)", "`+` between axes"),
        ("y = sum[«0»](x)", "`0` is not an axis"),
        ("y = x[«0»]", "`0` is not an axis"),
        ("y=sum«[]»(x)", "empty brackets"),
        ("!program f(x: bf16[«128», d]) -> (y: bf16[m])", "`128` is not an axis"),
        ("y = sum[d, «-»1](x)", "`-` is not an axis"),
        ("x[«0»] = 3", "`0` is not an axis"),
    ],
    "C0118": [
        ("y = rename[a «>» b](x)", "`>` where `->` is expected"),
        ("!program f(x: bf16[m, d]«)»", "the signature has no outputs"),
        ("!program f(x: bf16[m, d]) «=» (y: bf16[m])", "`=` where `->` is expected"),
        ("!program f(x: bf16[m, d]) «-» > (y: bf16[m])", "an arrow in two pieces"),
        ("!program f(x: bf16[m]) -> «y»: bf16[m]", "the outputs stand in parentheses"),
        ("y = a «->» b", "an arrow where none belongs"),
    ],
    "C0119": [
        ("!program f(«x», w) -> (y: bf16[m])", "`x` has no type"),
        ("!program f(x: «bf16», w: f32) -> (y: bf16[m])", "`bf16` lacks its axes"),
        ("!program f(x: «[»m]) -> (y: bf16[m])", "a type starts with its element type"),
    ],
    "C0120": [
        ("y = x @ w «+»\n  r", "the line ends too early, after `+`"),
        ("param «a»", "the line ends too early, after `a`"),
        ("type T «=» ", "the line ends too early, after `=`"),
        ("«type»", "the line ends too early, after `type`"),
        ("«save»", "the line ends too early, after `save`"),
        ("«require»", "the line ends too early, after `require`"),
        ("!y = «-»", "the line ends too early, after `-`"),
    ],
    "C0121": [
        ("«f(x)» = 3", "only a name can be assigned"),
    ],
    "C0122": [
        ("a, b = «1, 2, 3»", "2 names for 3 values"),
        ("y = («1, 2)»", "1 name for 2 values"),
        ("y = 1, («2, 3)»", "values have no tuples inside"),
    ],
    "C0123": [
        ("y = x @ w«:»", "not a type annotation"),
        ("y = f(a«:» b)", "not a type annotation"),
        ("y: «bf16[»m] = x", "not a type annotation"),
        ("y: «=» x", "not a type annotation"),
        ("y = «x: bf16»", "not a type annotation"),
    ],
    "C0124": [
        ("!def f(x)«:»\n    x", "a def's body follows `=`"),
        ("!def f(x«:» bf16[m]) = x", "arguments of a def have no types"),
        ("!def f «x» = x", "a def's arguments stand in parentheses"),
        ("!def f(x) «->» x", "a def's body follows `=`"),
        ("!def f(x«)»\n", "a def's body follows `=`"),
        ("def f«[a->b]»(x) = x", "a def's brackets hold axes, without an arrow"),
        ("!def f(x) =\n\n  # c\n  «param» q = 3\n  x", "`param` cannot stand in a def"),
    ],
    "C0125": [
        ("!def f(x) =\n  «x»\n  x", "a value without a name"),
        ("«x @ w»", "a value without a name"),
        ("«y»", "a value without a name"),
    ],
    "C0126": [
        ("y = where(x = 0, «1», 2)", "a positional argument after a named one"),
        ("y = f(a=1, «b»)", "a positional argument after a named one"),
        ("y = f(a=1,«a»=2)", "`a` is given twice"),
        ("def f(«x=1», y) = x", "an argument with a default before one without"),
    ],
    "C0127": [
        ("!def f(x) = x\n«y = 3»", "a statement outside every program"),
    ],
    "C0128": [
        ("!«»# nothing\n", "there is no program here"),
        ("!«»\n", "there is no program here"),
    ],
    "C0129": [
        ("y = f(x)«(»z)", "only a name can be called"),
        ("y = (x+w)«[»d]", "brackets follow the name of a function"),
        ("!program f(x: bf16[m] «w»: bf16[n]) -> (y: bf16[m])", "a comma is missing after `]`"),
        ("y = a «b»", "nothing joins `a` and `b`"),
        ("y = 2 «x»", "nothing joins `2` and `x`"),
        ("y = f(a «b»)", "nothing joins `a` and `b`"),
        ("y = f(a «b»=3)", "a comma is missing after `a`"),
        ("y = sum[a «b»](x)", "a comma is missing after `a`"),
    ],
    "C0130": [
        ("y = a == b «==» c", "comparisons do not chain"),
    ],
    "C0131": [
        ("y = a, «,» b", "a value is missing after `,`, before `,`"),
        ("y = «+» a", "there is no unary `+`"),
        ("y = a * «/» b", "a value is missing after `*`, before `/`"),
        ("y = (a + «)»", "a value is missing after `+`, before `)`"),
        ("y = («)»", "empty parentheses"),
        ("y = a == «not» b", "`not` cannot stand here"),
        ("y = «[»a, b]", "there are no lists"),
        ("y = x @«@» w", "a value is missing after `@`, before `@`"),
        ("y = x ** «**» 2", "a value is missing after `**`, before `**`"),
        ("y, «=» x", "a value is missing after `,`, before `=`"),
        ("«,»", "a value is missing, before `,`"),
        ("«=» 3", "a value is missing, before `=`"),
    ],
    "C0132": [
        ("param eps = 1«/»8", "a param's value is a number"),
        ("nominal m = «d»", "a nominal extent is a whole number"),
        ("nominal m = «-»1", "a nominal extent is a whole number"),
    ],
    "C0133": [
        ("y = split[lane=«n»](x)", "`n` is not an extent"),
        ("y = split[lane=«0»](x)", "`0` is not an extent"),
        ("y = split[lane=«]»(x)", "an extent is missing"),
    ],
    "C0134": [
        ("!«linear»(x: bf16[m, k]) -> (y: bf16[m])\ny = x\nz = y", "a signature starts with `program`"),
        ("!program «(»x: bf16[m]) -> (y: bf16[m])", "the program has no name"),
        ("!program f(x: bf16[m] «=» 3) -> (y: bf16[m])", "inputs have no defaults"),
        ("!program f «->» (y: bf16[m])", "the inputs stand in parentheses"),
        ("!forward «f»(x: bf16[m]) -> (y: bf16[m])", "`forward` stands before `program`"),
    ],
}


def errors(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(CodaError) as raised:
        parse(Source("a.coda", text))
    return raised.value.diagnostics


def found(text: str) -> list[str]:
    return [f"{d.code} {d.span.line}:{d.span.col}" for d in errors(text) if d.span]


CASES = [(code, marked, message) for code, cases in ONE.items() for marked, message in cases]


@pytest.mark.parametrize(("code", "marked", "message"), CASES, ids=[f"{c} {m}" for c, m, _ in CASES])
def test_one_error(code: str, marked: str, message: str) -> None:
    marked = marked[1:] if marked.startswith("!") else SIGNATURE + marked
    before, inside, after = re.split("[«»]", marked)
    [error] = errors(before + inside + after)
    assert (error.code, error.message) == (code, message)
    assert error.help
    start = (before.count("\n") + 1, len(before) - before.rfind("\n"))
    through = before + inside
    end = (through.count("\n") + 1, len(through) - through.rfind("\n"))
    assert error.span and ((error.span.line, error.span.col), (error.span.end_line, error.span.end_col)) == (start, end)


def test_every_syntax_code_has_a_case_here() -> None:
    assert {e.code for e in FAMILIES["C01"][1]} - set(ONE) == set(ELSEWHERE)


# Codes whose cases are too large for the table: see the tests named.
ELSEWHERE = {"C0135": "test_syntax.test_too_many_tokens"}


def test_several_errors_in_one_source_come_in_order() -> None:
    text = "program f(x: bf16[m, d) -> (y: bf16[m])\na = b c\nz = α\nq = 1_0 + .5\nok = x\n r = 5\ndef g(x):\n    x\nparam p = q"
    assert found(text) == ["C0111 1:23", "C0129 2:7", "C0102 3:5", "C0105 4:5", "C0105 4:11", "C0113 6:2", "C0124 7:9", "C0132 9:11"]


def test_an_error_in_a_signature_hides_none_in_its_statements_and_makes_none() -> None:
    assert found("program f(x) -> (y: bf16[m])\na = x\nb = x x\n") == ["C0119 1:11", "C0129 3:7"]


def test_an_unclosed_bracket_does_not_swallow_the_next_statements() -> None:
    text = SIGNATURE + "a = silu(x\nb = x x\nparam p = 1\nc = f(\nprogram g() -> ()\nd = x x\n"
    assert found(text) == ["C0110 2:9", "C0129 3:7", "C0110 5:6", "C0129 7:7"]


def test_an_error_in_a_block_is_one_error() -> None:
    assert found("def f(x) =\n    y = x x\n    z = y\n    z\n" + SIGNATURE + "y = x @ w\n") == ["C0129 2:11"]


def test_a_run_of_indented_lines_is_one_error() -> None:
    assert found(SIGNATURE + "    a = x\n    b = x\n\n    c = x\ny = x\n    d = x\n") == ["C0113 2:5", "C0113 7:5"]


def test_at_most_twenty_errors() -> None:
    assert len(errors(SIGNATURE + "a = b c\n" * 100)) == len(errors(SIGNATURE + "a = ? ?\n" * 100)) == 20
    assert found(SIGNATURE + "a = b c\n" * 100)[:2] == ["C0129 2:7", "C0129 3:7"]


def test_adjacent_bad_characters_are_one_error() -> None:
    assert found(SIGNATURE + "y = €€€\n") == ["C0102 2:5"]


def test_an_unclosed_bracket_says_where_the_next_statement_starts() -> None:
    [error] = errors(SIGNATURE + "a = silu(x\nparam p = 1\n")
    assert [(s.span.line, s.text) for s in error.secondary] == [(3, "this statement starts inside it")]


SIGNED = "program f({}, w: bf16[n, d]) -> (y: bf16[m, n])\n"


@pytest.mark.parametrize(
    "text, code, help",
    [
        (SIGNATURE + "y = sum(x @ w, -1, keepdim=True)\n", "C0109", "leave it out: values broadcast by name"),
        (SIGNATURE + "z = x @ w\ny = z - mean[m](z)[:, None]\n", "C0129", "leave it out: values broadcast by name"),
        (SIGNATURE + "y = f(x, True)\n", "C0109", "a bool comes from a comparison: `x > 0`"),
        (SIGNATURE + "z = x @ w\ny = if z > 0 then z\n", "C0109", "write `where(condition, a, b)`"),
        (SIGNATURE + "z = x @ w\ny = if (z > 0) then z else 0.0\n", "C0109", "write `where(condition, a, b)`"),
        (SIGNATURE + "gate, up = chunk(x @ w, 2)\n", "C0109", "write `gate, up = x @ w`"),
        (SIGNATURE + "y = clamp(x @ w, None, 1.0)\n", "C0109", "a bound that is not there is `inf` or `-inf`"),
        (SIGNATURE + 'y = gelu(x @ w, approximate="tanh")\n', "C0103", "`gelu_tanh(x)`"),
        (SIGNED.format("x: bf16[m, 4096]"), "C0117", "write `k=4096`"),
        (SIGNED.format("x"), "C0119", "write `x: bf16[m, d]`"),
        (SIGNED.format("x: f32").replace("m, n", "rows"), "C0119", "write `f32[rows, n, d]`; a scalar is `f32[]`"),
        (SIGNED.format("x").replace("y: bf16[m, n]", "y: bf16[n, d]"), "C0119", "write `x: bf16[n, d]`"),
        ("program f(x)\n", "C0119", "write `x: bf16[m, d]`"),
    ],
)
def test_what_another_library_writes_is_answered_in_the_users_own_names(text: str, code: str, help: str) -> None:
    with pytest.raises(CodaError) as caught:
        parse(Source("t.coda", text))
    (found,) = caught.value.diagnostics
    assert found.code == code and help in found.help
