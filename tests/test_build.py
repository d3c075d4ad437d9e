"""The front end's second half: every error code with its exact place, and the programs that come out. No torch.

In sources of errors (see build_errors.py), « and » stand around the text that the error points at.
"""

from __future__ import annotations

import ast as python
import re
from pathlib import Path
from random import Random

import pytest
from build_errors import ERRORS, HEAD, ROPE

from coda_lang.diagnostics.entries import names, types
from coda_lang.diagnostics.model import CodaError, Diagnostic
from coda_lang.ir.build import build
from coda_lang.ir.build_warnings import warnings
from coda_lang.ir.graph import Lit, Program
from coda_lang.ir.printer import equation, to_text
from coda_lang.ir.reader import from_text
from coda_lang.ir.types import BF16, BOOL, F16, F32, I32, I64, Axis
from coda_lang.ir.verify import verify
from coda_lang.source import Source, Span
from coda_lang.syntax.parse import parse

ROOT = Path(__file__).resolve().parent.parent


def programs(text: str, **options) -> tuple[Program, ...]:
    source = Source("t.coda", text)
    return build(parse(source), (source,), **options)


def program(text: str, **options) -> Program:
    """The one program of a source, verified, the same after printing and reading back."""
    (result,) = programs(text, **options)
    verify(result)
    assert from_text(to_text(result)) == result
    return result


def body(text: str, **options) -> list[str]:
    """The equations of a source's one program."""
    return [equation(e) for e in program(text, **options).eqns]


def errors(text: str, **options) -> list[Diagnostic]:
    with pytest.raises(CodaError) as raised:
        programs(text, **options)
    return list(raised.value.diagnostics)


def marked(text: str) -> tuple[str, list[Span]]:
    """The text without « and », and the spans between them."""
    spans, opened, clean, line, col = [], None, [], 1, 1
    for c in text:
        if c == "«":
            opened = (line, col)
        elif c == "»":
            spans.append(Span("t.coda", *opened, line, col))
        else:
            clean.append(c)
            line, col = (line + 1, 1) if c == "\n" else (line, col + 1)
    return "".join(clean), spans


# --- every code, at its place -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code, text, message, help", ERRORS, ids=[f"{c}-{i}" for i, (c, *_) in enumerate(ERRORS)])
def test_error(code: str, text: str, message: str, help: str) -> None:
    """One error, with its code, under the right piece of text, saying what is wrong and what to do."""
    clean, (span,) = marked(text)
    (found,) = errors(clean)
    assert (found.code, found.span) == (code, span), f"{found}"
    assert message in found.message
    assert help in found.help


@pytest.mark.parametrize(
    "text, note",
    [
        (
            "program p(x: bf16[m, d], w: bf16[n, d], g: bf16[n]) -> (y: bf16[m, n])\ny = rmsnorm[d](x, g, 1e-5) @ w",
            "the left side has `n` from `g`",
        ),
        (ROPE.replace("pos: i32[m]", "pos: i32[n]") + "y = rope[lane](x @ w, pos, freq)", "`n` comes from `pos`"),
        (
            "def f(a, b) = a + b\nprogram p(x: bf16[m, d], w: bf16[n, d], r: bf16[q]) -> (y: bf16[m, n])\ny = f(x @ w, r)",
            "`q` comes from `r`",
        ),
    ],
)
def test_notes_trace_an_axis_to_the_input_that_brought_it(text: str, note: str) -> None:
    (found,) = errors(text)
    assert note in found.notes


# Errors without a place in the text, and one whose text is long.
OUTSIDE = [
    ("C0210", {"params": {"epps": 1.0}}, "no param `epps`", "did you mean `eps`?"),
    ("C0210", {"params": {"eps": "small"}}, "not a number", "eps=1e-5"),
    ("C0316", {"params": {"eps": 1e39}}, "does not fit f32", "that f32 holds"),
    ("C0210", {"extents": {"q": 4}}, "no axis `q` to fix", "there are `d` and `m`"),
    ("C0210", {"extents": {"d": 0}}, "set to 0; it is from 1", "d=64"),
    ("C0210", {"extents": {"d": True}}, "not a whole number", "d=64"),
    ("C0210", {"types": {"S": "bf16"}}, "no type `S`", "there are `T`"),
    ("C0210", {"types": {"T": "f64"}}, "cannot be f64", "`bf16` or `f16`"),
]


@pytest.mark.parametrize("code, options, message, help", OUTSIDE)
def test_error_from_outside(code: str, options: dict, message: str, help: str) -> None:
    text = "param eps = 1e-5\ntype T = bf16 | f16\nprogram p(x: T[m, d]) -> (y: T[m])\ny = sum[d](x) + eps"
    (found,) = errors(text, **options)
    assert (found.code, found.span) == (code, None)
    assert message in found.message and help in found.help


def test_programs_that_grow_without_end_are_refused() -> None:
    twice = "\n".join(f"def g{i}(x) = g{i - 1}(x) + g{i - 1}(2 * x)" for i in range(1, 20))
    (found,) = errors(f"def g0(x) = x + 1\n{twice}\n{HEAD}y = g19(x @ w)\n")
    assert found.code == "C0214"
    (found,) = errors(f"def g0(x) = x + 1\n{twice}\n{HEAD}y = x @ w + g19(1)\n")
    assert found.code == "C0214", "numbers alone emit nothing, but take as long"


@pytest.mark.parametrize(
    "signature, body, unread",
    [
        ("x: bf16[m, k], w: bf16[n, k], b: bf16[n]", "y = x @ w", ["b"]),
        ("x: bf16[m, k], w: bf16[n, k], const b: bf16[n]", "y = x @ w", ["b"]),
        ("x: bf16[m, k], w: bf16[n, k], s: f32[], q: f32[q]", "y = x @ w", ["s", "q"]),
        ("x: bf16[m, k], w: bf16[n, k], b: bf16[n]", "h = x + b\ny = x @ w", []),
        ("x: bf16[m, k], w: bf16[n, k], b: bf16[q]", "y = (x @ w) * size[q]", []),
        ("x: bf16[m, k], b: bf16[n], c: bf16[n]", "y = expand[n](sum[k](x))", ["b"]),
        ("x: bf16[m, k], b: bf16[n]", "y = expand[n](sum[k](x))", []),
        ("x: bf16[m, n]", "y = x", []),
    ],
)
def test_inputs_that_nothing_reads_are_warned_of(signature: str, body: str, unread: list[str]) -> None:
    text = f"def first(a, b) = a\nprogram p({signature}) -> (y: bf16[m, n])\n{body}\n"
    (program,) = programs(text)
    found = warnings(program)
    assert [d.message for d in found] == [f"the input `{name}` is never read" for name in unread]
    assert all(d.severity == "warning" and d.code == "C0215" and d.span and d.span.line == 2 for d in found)


def test_a_program_has_outputs() -> None:
    (found,) = errors("program p(x: bf16[m]) -> ()\nh = x")
    assert found.code == "C0211"


def test_every_code_is_tested_and_in_the_catalog() -> None:
    """The codes in the source of this stage, in the tests above, and in the catalog are the same."""
    written: set[str] = set()
    for path in (ROOT / "coda_lang" / "ir").glob("build*.py"):
        for node in python.walk(python.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, python.Constant) and isinstance(node.value, str) and re.fullmatch(r"C0[23]\d\d", node.value):
                written.add(node.value)
    assert written == {c for c, *_ in ERRORS} | {c for c, *_ in OUTSIDE} | {"C0214", "C0215"}
    assert written == {e.code for e in (*names.ENTRIES, *types.ENTRIES)}


ENTRIES = [e for e in (*names.ENTRIES, *types.ENTRIES) if e.kind == "coda"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.code)
def test_catalog_example(entry) -> None:
    """The wrong example provokes exactly its code, once; the right one builds."""
    assert [e.code for e in errors(entry.wrong.strip("\n"))] == [entry.code]
    for p in programs(entry.right.strip("\n")):
        verify(p)


# --- how errors are collected ---------------------------------------------------------------------------------------------


def test_all_errors_at_once_in_source_order() -> None:
    text = HEAD + "a = silu(q)\nb = foo(x)\nc = x + (i < 0)\ny = sum[n](x)\nrequire d\nnominal z = 3\nsave x"
    assert [(e.code, e.span.line) for e in errors(text)] == [
        ("C0201", 2), ("C0202", 3), ("C0301", 4), ("C0303", 5), ("C0317", 6), ("C0203", 7), ("C0319", 8),
    ]  # fmt: skip


def test_errors_of_all_programs_at_once() -> None:
    text = "program a(x: f32[m]) -> (y: f32[m])\ny = x + q\nprogram b(x: f32[m]) -> (y: f32[m])\ny = x + q"
    assert [(e.code, e.span.line) for e in errors(text)] == [("C0201", 2), ("C0201", 4)]


def test_one_mistake_is_reported_once() -> None:
    """What depends on a value with an error is silent, however often it is used."""
    text = HEAD + "h = x @ q\na, b = h\nc = h + a * b - silu(h) + q * q\nd: bf16 = c\ny = rmsnorm[n](c, d, 1e-5) @ h"
    assert [(e.code, e.span.line) for e in errors(text)] == [("C0201", 2)]


def test_a_broken_declaration_is_reported_once() -> None:
    text = "program p(x: bf17[m], w: bf16[m, m]) -> (y: bf18[m])\ny = x * x + sum[m](w)"
    assert [e.code for e in errors(text)] == ["C0204", "C0314", "C0204"]


def test_generic_programs_report_once() -> None:
    text = "type T = bf16 | f16\nprogram p(x: T[m]) -> (y: T[m])\ny = x + q"
    assert [e.code for e in errors(text)] == ["C0201"]


def test_only_the_second_choice_may_be_wrong() -> None:
    text = "type T = bf16 | f16\nprogram p(x: T[m, d], w: bf16[n, d]) -> (y: T[m, n])\ny = x @ w"
    assert [e.code for e in errors(text)] == ["C0307"]
    assert [p.name for p in programs(text, types={"T": "bf16"})] == ["p"]


def test_an_error_in_a_def_names_the_call() -> None:
    clean, (there, call) = marked("def f[k](a) = a + sum«[k]»(a)\n" + HEAD + "y = «f[d](x @ w)»")
    (found,) = errors(clean)
    assert (found.code, found.span) == ("C0303", there)
    assert (call, "in this call of `f`") in [(s.span, s.text) for s in found.secondary]


def test_an_error_in_the_prelude_is_the_callers() -> None:
    clean, (call,) = marked(HEAD + "y = «rmsnorm[d](x @ w, r, 1e-5)»")
    (found,) = errors(clean)
    assert (found.code, found.span, found.label) == ("C0303", call, "in this call of `rmsnorm`")
    assert any(s.span.file == "coda_lang/prelude.coda" for s in found.secondary)


def test_the_prelude_called_from_a_def() -> None:
    clean, (inner, outer) = marked("def f[k](a, b) = «rmsnorm[k](a, b, 1e-5)»\n" + HEAD + "y = «f[d](x @ w, r)»")
    (found,) = errors(clean)
    assert found.span == inner
    assert (outer, "in this call of `f`") in [(s.span, s.text) for s in found.secondary]


def test_secondary_places() -> None:
    """Where the other half of a contradiction stands."""
    clean, (first, second) = marked("program p(x: bf16[m, «d=3»], w: bf16[n, «d=4»]) -> (y: bf16[m, n])\ny = x @ w")
    (found,) = errors(clean)
    assert (found.span, [s.span for s in found.secondary]) == (second, [first])
    clean, (first, second) = marked(HEAD + "«h» = x @ w\n«h» = r\ny = h")
    (found,) = errors(clean)
    assert (found.span, [s.span for s in found.secondary]) == (second, [first])
    clean, (product, culprit) = marked("program p(x: bf16[m, d], w: bf16[n, d], r: bf16[m, q]) -> (y: bf16[m, n])\ny = «x @ w» + «r»")
    (found,) = errors(clean)
    assert (found.span, [s.span for s in found.secondary]) == (culprit, [product])


def test_every_error_has_a_remedy() -> None:
    for code, text, *_ in ERRORS:
        for found in errors(marked(text)[0]):
            assert found.help and found.message and not found.message.endswith("."), code


# --- what comes out -------------------------------------------------------------------------------------------------------


def test_names_and_rounding_places() -> None:
    text = HEAD + "h = x @ w + r\nz: bf16 = silu(h)\ny = z * h"
    assert body(text) == [
        "t1: f32[m, n] = contract(x, w) axes=[d] batch=[]",
        "h: f32[m, n] = add(t1, r)",
        "t2: f32[m, n] = silu(h)",
        "z: bf16[m, n] = cast(t2) dtype=bf16",
        "t3: f32[m, n] = mul(z, h)",
        "y: bf16[m, n] = cast(t3) dtype=bf16",
    ]


def test_temporaries_keep_clear_of_the_users_names() -> None:
    assert body("program p(t1: f32[m]) -> (t3: f32[m])\nt2 = 2 * (t1 + 1)\nt3 = t2 * (t1 - 1)") == [
        "t4: f32[m] = add(t1, 1.0:f32)",
        "t2: f32[m] = mul(2.0:f32, t4)",
        "t5: f32[m] = sub(t1, 1.0:f32)",
        "t3: f32[m] = mul(t2, t5)",
    ]


def test_names_of_defs_are_kept_where_they_are_free() -> None:
    text = "def f(a) =\n    h = a + 1\n    h * h\nprogram p(x: f32[m]) -> (y: f32[m], h_2: f32[m])\ny = f(x) + f(2 * x)\nh_2 = x + 3"
    assert [e.out.name for e in program(text).eqns] == ["h", "t1", "t2", "h_3", "t3", "y", "h_2"]


def test_one_cast_for_several_products() -> None:
    text = "program p(x: f32[m, d], w: bf16[n, d], v: bf16[n, d]) -> (y: f32[m, n])\ny = (x @ w) * (x @ v)"
    assert [e.op for e in program(text).eqns] == ["cast", "contract", "contract", "mul"]


def literals(text: str) -> list[Lit]:
    return [a for e in program(text).eqns for a in e.args if isinstance(a, Lit)]


def test_literals_take_the_type_of_their_company() -> None:
    start = "program p(x: bf16[m], i: i32[m], j: i64[m]) -> (y: f32[m])\n"
    assert literals(start + "y = x + 2") == [Lit(2.0, F32)]
    assert literals(start + "y = f32(i + 2)") == [Lit(2, I32)]
    assert literals(start + "y = f32(i + 2.0)") == [Lit(2, I32)]
    assert literals(start + "y = i + 0.5") == [Lit(0.5, F32)]
    assert literals(start + "y = where(j == -100, 0.0, x)") == [Lit(-100, I64), Lit(0.0, F32)]
    assert literals("param k = -100\n" + start + "y = where(j == k, 0, x)") == [Lit(-100, I64), Lit(0.0, F32)]
    assert literals(start + "y = x / 3") == [Lit(3.0, F32)]
    assert literals(start + "y = x + 1e-5") == [Lit(9.999999747378752e-06, F32)]
    assert literals(start + "y = exp(x) + exp(1)") == [Lit(1.0, F32)]


def test_literals_fold() -> None:
    start = "param a = 3\nprogram p(x: f32[m, l=64]) -> (y: f32[m, l])\n"
    assert literals(start + "y = x * (2 * a - 1 / 2 + -size[l] ** 2)") == [Lit(5.5 - 4096, F32)]
    assert literals(start + "y = where(a > 2, x, 0.0)") == [Lit(True, BOOL), Lit(0.0, F32)]
    assert literals(start + "y = x * -inf") == [Lit(-float("inf"), F32)]
    assert literals(start + "y = x * (1e38 * 1e38)") == [Lit(float("inf"), F32)]
    assert [e.op for e in program(start + "y = x * (1 / 0)").eqns] == ["div", "mul"]


def test_integers_meet_floats_by_a_cast() -> None:
    text = "program p(i: i32[m], f: f32[k]) -> (y: f32[m, k])\ny = i * f"
    assert body(text) == ["t1: f32[m] = cast(i) dtype=f32", "y: f32[m, k] = mul(t1, f)"]
    assert body("program p(i: i32[m]) -> (y: f32[m])\ny = i / 2") == ["t1: f32[m] = cast(i) dtype=f32", "y: f32[m] = div(t1, 2.0:f32)"]


def test_params_are_set_from_outside() -> None:
    text = "param eps = 1e-5\nprogram p(x: f32[m]) -> (y: f32[m])\nparam s = 2\ny = s * x + eps"
    assert literals(text) == [Lit(2.0, F32), Lit(9.999999747378752e-06, F32)]
    (p,) = programs(text, params={"eps": 0.5, "s": 3})
    assert [a for e in p.eqns for a in e.args if isinstance(a, Lit)] == [Lit(3.0, F32), Lit(0.5, F32)]


def test_extents_are_set_from_outside() -> None:
    text = (
        "program p(x: f32[m, head=8, lane=2, pair]) -> (q: f32[m, qh, lane, pair], k: f32[m, kh, lane, pair])\n"
        "q0, k = split[head -> qh=6, kh=2](x)\nq = rope[lane](q0, index[m], size[pair])"
    )
    (p,) = programs(text, extents={"head": 4, "qh": 3, "kh": 1, "pair": 32})
    assert {a.name: a.extent for a in p.axes} == {"m": None, "head": 4, "lane": 2, "pair": 32, "qh": 3, "kh": 1}
    assert [p.outputs for p in programs(text, extents={})] == [p.outputs for p in programs(text)]
    (found,) = errors(text, extents={"head": 4})
    assert found.code == "C0312", "what follows from an extent is checked as if the text said it"
    found, *_ = errors(text, extents={"lane": 3})
    assert found.code == "C0310" and "wants `lane=2`" in found.message, "a def's own extent is its rule"


def test_generic_types() -> None:
    p, q = "program p(x: T[m]) -> (y: T[m])\ny = x + S(x)\n", "program q(x: f32[m]) -> (y: f32[m])\ny = x"
    text = "type T = bf16 | f16\ntype S = f32 | bf16\n" + p + q
    assert [p.name for p in programs(text)] == ["p_bf16_f32", "p_bf16_bf16", "p_f16_f32", "p_f16_bf16", "q"]
    assert [p.name for p in programs(text, types={"S": "bf16"})] == ["p_bf16", "p_f16", "q"]
    chosen, other = programs(text, types={"S": "bf16", "T": "f16"})
    assert (chosen.name, chosen.inputs[0].dtype, other.name) == ("p", F16, "q")


def test_generic_types_reach_into_defs() -> None:
    text = "type T = bf16 | f16\ndef f(x) = T(x)\nprogram p(x: f32[m]) -> (y: f32[m])\ny = f(x)"
    assert [(p.name, p.eqns[0].out.ty.dtype) for p in programs(text)] == [("p_bf16", BF16), ("p_f16", F16)]


def test_the_rest_of_a_program() -> None:
    text = """# About p.
forward program p(x: f32[m, d], const f: f32[d], l: i64[b=4, c]) -> (y: f32[m, d])
nominal m = 64
h = x * f
y = h * h
save h
recompute y
require d % 8 == 0 and (m > 2 * d or not m == d / 2 - 1)
"""
    p = program(text)
    assert p.axes == (Axis("m"), Axis("d"), Axis("b", 4), Axis("c"))
    assert [(t.name, t.const) for t in p.inputs] == [("x", False), ("f", True), ("l", False)]
    assert (p.nominal, p.save, p.recompute, p.forward_only, p.doc) == ((("m", 64),), ("h",), ("y",), True, "About p.")
    assert p.requires == ("((d % 8) == 0 and (m > (2 * d) or (not m == ((d / 2) - 1))))",)
    assert eval(p.requires[0], {"m": 100, "d": 16})


def test_an_output_may_be_an_input_or_a_number() -> None:
    p = program("program p(x: bf16[m]) -> (y: bf16[m], z: f32[m], c: f32[], e: i32[m])\ny = x\nz = x\nc = 2.5\ne = expand[m](3)")
    assert [o.value.name for o in p.outputs] == ["x", "z", "c", "e"]


def test_a_def_shadows_the_prelude_for_its_own_file_only() -> None:
    text = "def softcap(x, cap) = x + cap\nprogram p(x: f32[m]) -> (y: f32[m])\ny = softcap(x, 2)"
    assert body(text) == ["y: f32[m] = add(x, 2.0:f32)"]
    inner = "def rotate[lane](x, c, s) = x\nprogram p(x: f32[m, lane=2], f: f32[]) -> (y: f32[m, lane])\ny = rope[lane](x, 1, f)"
    assert "pack" in [e.op for e in program(inner).eqns], "the prelude's rope calls the prelude's rotate"


def test_equations_point_at_the_users_text() -> None:
    text = "def twice(a) = a + a\nprogram p(x: f32[m, d], g: f32[d]) -> (y: f32[m, d])\ny = twice(rmsnorm[d](x, g, 1e-5))"
    lines = {e.op: e.span.line for e in program(text).eqns}
    assert (lines["rsqrt"], lines["add"]) == (3, 1)
    assert {e.span.file for e in program(text).eqns} == {"t.coda"}


WORD = re.compile(r"[A-Za-z_]\w*|\d+(?:\.\d+)?(?:e-?\d+)?")
CORPUS = sorted((ROOT / "specs").glob("*.coda"))


@pytest.mark.parametrize("file", CORPUS, ids=lambda f: f.name)
def test_mutated_programs_are_built_or_refused(file: Path) -> None:
    """Words exchanged at random: whatever comes, there is a well-formed program, or errors that each have a place and a remedy."""
    random = Random(file.name)
    text = "\n".join(line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    words = list(WORD.finditer(text))
    for _ in range(40):
        mutated = text
        for word in sorted(random.sample(words, 2), key=lambda w: -w.start()):
            mutated = mutated[: word.start()] + random.choice(words)[0] + mutated[word.end() :]
        try:
            for p in programs(mutated):
                assert from_text(to_text(verify(p))) == p
        except CodaError as error:
            assert all(d.span and d.help for d in error.diagnostics if d.code >= "C02"), mutated


def test_an_extent_from_outside_takes_the_place_of_a_nominal() -> None:
    text = "program p(x: bf16[m, d]) -> (y: bf16[m, d])\ny = 2 * x\nnominal d = 4096, m = 64\n"
    (program,) = programs(text, extents={"d": 128})
    assert program.extent("d") == 128 and dict(program.nominal) == {"m": 64}
