"""Errors as a user reads them: the rendered text, the JSON, suggestions; and the catalog, whose examples do what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coda_lang import driver
from coda_lang.diagnostics import catalog, docs
from coda_lang.diagnostics.entry import Entry
from coda_lang.diagnostics.model import CodaError, Diagnostic, Label
from coda_lang.diagnostics.render import render, render_one, to_json
from coda_lang.diagnostics.suggest import did_you_mean, distance, suggest
from coda_lang.source import Source, Span

ROOT = Path(__file__).resolve().parent.parent


def span(line: int, col: int, end_line: int, end_col: int, file: str = "a.coda") -> Span:
    return Span(file, line, col, end_line, end_col)


def shown(text: str, *spans: tuple[Span, str], notes: tuple[str, ...] = (), help: str = "") -> str:
    """One error over `text`; the first span is the primary one."""
    (first, label), *rest = spans
    found = Diagnostic("C0301", "axes differ", first, label, tuple(Label(s, t) for s, t in rest), notes, help)
    return render_one(found, {"a.coda": Source("a.coda", text)})


# --- rendering ---------------------------------------------------------------------------------------------------------


def test_one_place() -> None:
    assert shown("z = 1.0\ny = x @ w + r", (span(2, 13, 2, 14), "has axes [q]"), help="rename it") == (
        "error[C0301]: axes differ\n"
        " --> a.coda:2:13\n"
        "  |\n"
        "2 | y = x @ w + r\n"
        "  |             ^ has axes [q]\n"
        "  |\n"
        "  = help: rename it"
    )


def test_labels_left_of_another_get_their_own_rows() -> None:
    text = shown("y = x @ w + r * s", (span(1, 13, 1, 14), "second"), (span(1, 5, 1, 10), "first"), (span(1, 17, 1, 18), "third"))
    assert text.splitlines()[3:] == [
        "1 | y = x @ w + r * s",
        "  |     -----   ^   - third",
        "  |     |       second",
        "  |     first",
    ]


def test_overlapping_labels_stand_below_each_other() -> None:
    text = shown("y = x @ w", (span(1, 5, 1, 6), "inner"), (span(1, 5, 1, 10), "outer"))
    assert text.splitlines()[3:] == ["1 | y = x @ w", "  |     ^ inner", "  |     ----- outer"]


def test_a_gap_between_lines_is_shown_as_dots_and_a_single_line_as_itself() -> None:
    text = shown("a\nb\nc\nd\ne\nf", (span(6, 1, 6, 2), ""), (span(1, 1, 1, 2), "there"), (span(3, 1, 3, 2), "here"))
    assert text.splitlines()[3:] == ["1 | a", "  | - there", "2 | b", "3 | c", "  | - here", "...", "6 | f", "  | ^"]


def test_a_span_over_lines_marks_each() -> None:
    text = shown("y = (a\n  + b\n  + c)", (span(1, 5, 3, 7), "all of it"))
    assert text.splitlines()[3:] == ["1 | y = (a", "  |     ^^", "2 |   + b", "  |   ^^^", "3 |   + c)", "  |   ^^^^ all of it"]


def test_a_long_span_marks_its_ends() -> None:
    text = shown("\n".join("abcdefgh"), (span(1, 1, 8, 2), "x"))
    assert [line for line in text.splitlines()[3:] if not line.startswith("  ")] == ["1 | a", "...", "8 | h"]


@pytest.mark.parametrize(
    ("text", "at", "lead"),
    [("\tab", 2, "    "), ("漢漢a", 3, "    "), ("e\u0301a", 3, " "), ("\x00a", 2, " "), ("a\x1b[31m", 1, "")],
    ids=["tab", "wide", "combining", "nul", "escape"],
)
def test_carets_stand_under_what_they_mean(text: str, at: int, lead: str) -> None:
    quoted, under = shown(text, (span(1, at, 1, at + 1), "")).splitlines()[3:5]
    assert under == "  | " + lead + "^"
    assert all(c.isprintable() for c in quoted)


def test_a_long_line_is_cut_around_the_place() -> None:
    quoted, under = shown("a" * 5000 + "B" + "c" * 5000, (span(1, 5001, 1, 5002), "")).splitlines()[3:5]
    assert len(quoted) < 160 and quoted[under.index("^")] == "B"


@pytest.mark.parametrize("place", [span(1, 9, 1, 9), span(9, 9, 9, 9), span(1, 1, 9, 9)], ids=["line end", "past the end", "to past it"])
def test_places_outside_the_text_still_render(place: Span) -> None:
    assert "^" in shown("y = 1.0", (place, ""))


def test_a_second_file_and_a_source_that_is_not_at_hand() -> None:
    found = Diagnostic("C0301", "m", span(1, 1, 1, 2), "", (Label(span(7, 3, 7, 4, "prelude.coda"), "defined here"),))
    text = render_one(found, {"a.coda": Source("a.coda", "x")})
    assert text.splitlines()[1:] == [" --> a.coda:1:1", "  |", "1 | x", "  | ^", " ::: prelude.coda:7:3"]
    assert render_one(Diagnostic("C0801", "no file", help="look")) == "error[C0801]: no file\n = help: look"


def test_nothing_from_the_source_reaches_the_terminal_raw() -> None:
    found = Diagnostic("C0801", "bad \x1b[2J name", notes=("a\nb \x07",))
    assert "\x1b" not in render_one(found) and "\x07" not in render_one(found)


def test_colour_changes_nothing_but_colour() -> None:
    error = CodaError([Diagnostic("C0301", "m", span(1, 1, 1, 2), "l", notes=("n",), help="h")], (Source("a.coda", "x"),))
    assert re.sub(r"\x1b\[[0-9;]*m", "", render(error, color=True)) == render(error)
    assert "\x1b[1;31merror[C0301]" in render(error, color=True)


def test_all_errors_and_where_to_read_more() -> None:
    error = CodaError([Diagnostic("C0302", "first"), Diagnostic("C0301", "second")])
    assert render(error).endswith("2 errors; `codac explain C0301` says more")
    assert render(error).index("first") < render(error).index("second")


def test_json_has_everything() -> None:
    found = Diagnostic("C0301", "m", span(1, 2, 3, 4), "l", (Label(span(5, 6, 7, 8), "s"),), ("n",), "h")
    [got] = json.loads(to_json(CodaError([found])))["diagnostics"]
    assert got == {
        "code": "C0301",
        "severity": "error",
        "message": "m",
        "span": {"file": "a.coda", "line": 1, "col": 2, "end_line": 3, "end_col": 4},
        "label": "l",
        "secondary": [{"span": {"file": "a.coda", "line": 5, "col": 6, "end_line": 7, "end_col": 8}, "text": "s"}],
        "notes": ["n"],
        "help": "h",
    }
    assert json.loads(to_json(CodaError([Diagnostic("C0801", "m")])))["diagnostics"][0]["span"] is None


# --- suggestions -------------------------------------------------------------------------------------------------------

NAMES = ("silu", "sigmoid", "relu", "relu2", "gelu", "gelu_tanh", "logsumexp", "rmsnorm", "layernorm", "sum", "min", "max")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sliu", ("silu",)),
        ("Silu", ("silu",)),
        ("rms_norm", ("rmsnorm",)),
        ("log_sum_exp", ("logsumexp",)),
        ("gelutanh", ("gelu_tanh",)),
        ("relu3", ("relu", "relu2")),
        ("sigm", ("sigmoid",)),
        ("softmax", ()),
        ("q", ()),
    ],
)
def test_suggestions(name: str, expected: tuple[str, ...]) -> None:
    assert suggest(name, NAMES)[: len(expected) or 1] == expected


def test_suggestions_do_not_depend_on_the_order_of_names() -> None:
    assert suggest("relu3", NAMES) == suggest("relu3", reversed(NAMES)) == suggest("relu3", set(NAMES))


def test_distance_counts_edits_up_to_its_limit() -> None:
    assert [distance(a, b, 3) for a, b in (("", ""), ("ab", "ba"), ("abc", "abd"), ("abc", "ab"), ("abc", "xyzabc"))] == [0, 1, 1, 1, 3]
    assert distance("a" * 1000, "b" * 1000, 2) == 3


def test_did_you_mean() -> None:
    assert did_you_mean("sliu", NAMES) == "did you mean `silu`?"
    assert did_you_mean("relu3", ("relu", "relu2")) == "did you mean `relu` or `relu2`?"
    assert did_you_mean("zebra", NAMES) == ""


# --- the catalog -------------------------------------------------------------------------------------------------------

ENTRIES = sorted(catalog.CATALOG.values(), key=lambda e: e.code)


def named(kind: str) -> list[Entry]:
    return [e for e in ENTRIES if e.kind == kind]


def test_codes_are_unique_and_in_their_family() -> None:
    everything = [(family, e) for family, (_, entries) in catalog.FAMILIES.items() for e in entries]
    assert len({e.code for _, e in everything}) == len(everything)
    assert all(re.fullmatch(r"C0\d{3}", e.code) and e.code.startswith(family) for family, e in everything)


def test_the_compiler_and_the_catalog_know_the_same_codes() -> None:
    used: dict[str, str] = {}
    for path in sorted((ROOT / "coda_lang").rglob("*.py")):
        if "entries" not in path.parts:
            for code in re.findall(r'"(C0\d{3})"', path.read_text(encoding="utf-8")):
                used.setdefault(code, str(path.relative_to(ROOT)))
    missing = {code: path for code, path in used.items() if code not in catalog.CATALOG}
    assert not missing, f"raised, but not in the catalog: {missing}"
    assert not set(catalog.CATALOG) - set(used), f"in the catalog, but never raised: {sorted(set(catalog.CATALOG) - set(used))}"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.code)
def test_entries_are_complete(entry: Entry) -> None:
    assert entry.kind in ("coda", "python", "shell", "reason", "warning")
    assert entry.title and not entry.title.endswith(".") and entry.title[0] == entry.title[0].lower()
    assert entry.why.strip().endswith((".", ".)")) and entry.remedy.endswith(".") and entry.wrong.strip()
    assert "\t" not in entry.why + entry.remedy


@pytest.mark.parametrize("entry", named("coda"), ids=lambda e: e.code)
def test_the_wrong_example_provokes_exactly_its_code(entry: Entry) -> None:
    with pytest.raises(CodaError) as raised:
        driver.check(Source("wrong.coda", entry.wrong))
    assert {d.code for d in raised.value.diagnostics} == {entry.code}
    for d in raised.value.diagnostics:
        assert d.span is not None, "an error in a source has a place"
        assert d.help or d.notes, "an error says what to do"
    assert entry.code in render(raised.value)


@pytest.mark.parametrize("entry", named("reason"), ids=lambda e: e.code)
def test_a_reason_is_given_for_several_kernels_and_none_for_one(entry: Entry) -> None:
    (made,) = driver.check(Source("several.coda", entry.wrong))
    assert {reason.split(":")[0] for reason in made.why} == {entry.code}
    assert not any(p.why for p in driver.check(Source("one.coda", entry.right)))


@pytest.mark.parametrize("entry", named("warning"), ids=lambda e: e.code)
def test_a_warning_is_given_for_what_is_accepted_and_none_for_what_is_meant(entry: Entry) -> None:
    source = Source("warned.coda", entry.wrong)
    assert driver.check(source)
    found = driver.warnings(source)
    assert {(d.code, d.severity) for d in found} == {(entry.code, "warning")} and all(d.span and d.help for d in found)
    text = render(CodaError(found, (source,)))
    assert text.startswith(f"warning[{entry.code}]: ") and text.endswith(f"1 warning; `codac explain {entry.code}` says more")
    assert not driver.warnings(Source("meant.coda", entry.right))


@pytest.mark.parametrize("entry", [e for e in named("coda") if e.right], ids=lambda e: e.code)
def test_the_right_example_is_accepted(entry: Entry) -> None:
    assert driver.check(Source("right.coda", entry.right))


def codes_of(script: str, name: str) -> list[str]:
    """Runs Python text; the codes of the CodaError that it ends with, if any."""
    try:
        exec(compile(script, name, "exec"), {"__name__": "__example__"})
    except CodaError as e:
        return sorted({d.code for d in e.diagnostics})
    return []


@pytest.mark.slow
@pytest.mark.parametrize("entry", named("python"), ids=lambda e: e.code)
def test_python_examples(entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "torch" in entry.wrong or "coda_lang.compile(" in entry.wrong:
        pytest.importorskip("torch")
    (tmp_path / "specs").symlink_to(ROOT / "specs")
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    try:
        assert codes_of(entry.wrong, "wrong.py") == [entry.code]
        os.environ.clear()
        os.environ.update(before)
        assert codes_of(entry.right, "right.py") == []
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.slow
@pytest.mark.parametrize("entry", named("shell"), ids=lambda e: e.code)
def test_shell_examples(entry: Entry, tmp_path: Path) -> None:
    (tmp_path / "specs").symlink_to(ROOT / "specs")
    (tmp_path / "codac").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m coda_lang "$@"\n')
    (tmp_path / "codac").chmod(0o755)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    texts = [t for t in (entry.wrong, entry.right) if t]
    run = [subprocess.run(["sh", "-c", t], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120) for t in texts]
    assert run[0].returncode == 2 and f"error[{entry.code}]" in run[0].stderr, run[0].stderr
    assert all(r.returncode == 0 for r in run[1:]), run[-1].stderr


def test_pages_are_current() -> None:
    """`python -m coda_lang.diagnostics.docs` writes them."""
    there = {p.name: p.read_text(encoding="utf-8") for p in docs.FOLDER.glob("*.md")}
    assert there == docs.pages(), "run: python -m coda_lang.diagnostics.docs"


def test_explain() -> None:
    text = catalog.explain("C0110")
    assert text is not None and text.startswith("C0110: ") and "Refused:" in text and "Remedy: " in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert catalog.explain("110") == catalog.explain("c0110") == text
    assert catalog.explain("C9999") is None and catalog.explain("nonsense") is None
    assert catalog.near("C0011").startswith("did you mean `C0")
    assert "C0101" in catalog.near("nonsense")
