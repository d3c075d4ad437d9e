"""Every syntax error, as a function from where it is to its diagnostic. In: spans and the offending text. Out: `Diagnostic`s C01xx.

Non-goals: finding errors (lexer.py, tree.py, explain.py), long explanations (diagnostics/entries/syntax.py), characters and numbers
(spelling.py).
"""

from __future__ import annotations

from ..diagnostics.model import Diagnostic, Label
from ..source import Span

CLOSING = {"(": ")", "[": "]"}


def short(text: str, limit: int = 40) -> str:
    """`text`, cut in the middle where it is too long to quote."""
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 4 :]}"


def counted(count: int, noun: str) -> str:
    """`1 name`, `2 names`."""
    return f"{count} {noun}{'s' * (count != 1)}"


# --- words -------------------------------------------------------------------------------------------------------------


def long_name(span: Span, text: str, limit: int) -> Diagnostic:
    return Diagnostic("C0104", f"a name of {len(text)} characters", span, help=f"names have at most {limit} characters")


def reserved(span: Span, word: str, kind: str) -> Diagnostic:
    """A reserved word where a name stands. `kind`: "keyword", "dtype" or "Python word"."""
    why = {
        "keyword": f"`{word}` is a keyword of the language",
        "dtype": f"`{word}` is an element type",
        "Python word": f"`{word}` is a word of Python, in which kernels are written and called by argument name",
    }[kind]
    return Diagnostic("C0107", f"`{word}` cannot be a name", span, notes=(why,), help=f"write `{word}_`, or another name")


def future(span: Span, word: str, instead: str) -> Diagnostic:
    return Diagnostic("C0108", f"`{word}` is reserved: it is not in version 1 of the language", span, help=f"today: {instead}")


def foreign(span: Span, word: str, instead: str) -> Diagnostic:
    return Diagnostic("C0109", f"the language has no `{word}`", span, help=instead)


# --- brackets and lines ------------------------------------------------------------------------------------------------


def unclosed(span: Span, text: str, before: Span | None) -> Diagnostic:
    where = (Label(before, "this statement starts inside it"),) if before else ()
    return Diagnostic("C0110", f"`{text}` is never closed", span, "opened here", where, help=f"add the missing `{CLOSING[text]}`")


def mismatched(span: Span, text: str, opener: Span | None = None, opened: str | None = None) -> Diagnostic:
    if opener is None or opened is None:
        return Diagnostic("C0111", f"`{text}` closes nothing", span, help="remove it, or open the bracket before")
    mend = f"close with `{CLOSING[opened]}`, or open with the other bracket"
    return Diagnostic("C0111", f"`{text}` cannot close `{opened}`", span, "", (Label(opener, "opened here"),), help=mend)


_SIMPLER = "give parts of the expression names of their own"


def brackets_too_deep(span: Span, limit: int) -> Diagnostic:
    return Diagnostic("C0112", f"more than {limit} brackets inside each other", span, help=_SIMPLER)


def too_deep(span: Span, limit: int) -> Diagnostic:
    return Diagnostic("C0112", f"an expression of more than {limit} levels", span, help=_SIMPLER)


def indented(span: Span) -> Diagnostic:
    return Diagnostic("C0113", "unexpected indentation", span, help="start the line in column 1: only the block of a `def` is indented")


def uneven(span: Span, first: Span, expected: int, found: int) -> Diagnostic:
    label = Label(first, f"the block's first line: {counted(expected, 'space')}")
    mend = f"indent by {counted(expected, 'space')}"
    return Diagnostic("C0113", "the lines of a block start in one column", span, counted(found, "space"), (label,), help=mend)


def tab(span: Span) -> Diagnostic:
    return Diagnostic("C0114", "a tab in the indentation", span, help="indent with spaces")


def early_end(span: Span, text: str, mend: str) -> Diagnostic:
    return Diagnostic("C0120", f"the line ends too early, after `{short(text)}`", span, help=mend)


def too_long(span: Span, limit: int) -> Diagnostic:
    return Diagnostic("C0135", f"a source of more than {limit} words and signs", span, help="split it into several files")


# --- signatures --------------------------------------------------------------------------------------------------------


def outputs(span: Span, message: str, mend: str) -> Diagnostic:
    return Diagnostic("C0118", message, span, help=mend)


def untyped(span: Span, message: str, mend: str) -> Diagnostic:
    return Diagnostic("C0119", message, span, help=mend)


def signature(span: Span, message: str, mend: str) -> Diagnostic:
    return Diagnostic("C0134", message, span, help=mend)


def axes(span: Span, message: str, mend: str) -> Diagnostic:
    return Diagnostic("C0117", message, span, help=mend)


def extent(span: Span, text: str) -> Diagnostic:
    message = f"`{short(text)}` is not an extent" if text else "an extent is missing"
    return Diagnostic("C0133", message, span, help="an extent is a whole number, 1 or more: `lane=2`; a bare name is free at run time")


# --- statements --------------------------------------------------------------------------------------------------------


def equals(span: Span, mend: str) -> Diagnostic:
    return Diagnostic("C0116", "`=` and `==` confused", span, help=mend)


def target(span: Span) -> Diagnostic:
    """Something other than a name left of an `=`."""
    return Diagnostic("C0121", "only a name can be assigned", span, help="write `name = …`; a comparison is `==`")


def counts(values: Span, targets: Span, names: int, found: int) -> Diagnostic:
    names_text, values_text = counted(names, "name"), counted(found, "value")
    mend = "write as many values as names"
    return Diagnostic("C0122", f"{names_text} for {values_text}", values, values_text, (Label(targets, names_text),), help=mend)


def nested_tuple(span: Span) -> Diagnostic:
    return Diagnostic("C0122", "values have no tuples inside", span, help="write the values side by side, without these brackets")


def annotation(span: Span, mend: str) -> Diagnostic:
    return Diagnostic("C0123", "not a type annotation", span, help=mend)


def unnamed(span: Span, later: Span | None = None) -> Diagnostic:
    """A value that nothing names: in a program, or in a block before its last line."""
    mend = "give it a name" + (": only the last line of a block is its result" if later else ": `y = …`")
    return Diagnostic("C0125", "a value without a name", span, "", (Label(later, "the block goes on to here"),) if later else (), help=mend)


def arguments(span: Span, message: str, mend: str) -> Diagnostic:
    return Diagnostic("C0126", message, span, help=mend)


def homeless(span: Span) -> Diagnostic:
    mend = "move it below a `program` line, before any `def` that follows the program"
    return Diagnostic("C0127", "a statement outside every program", span, help=mend)


def empty(span: Span) -> Diagnostic:
    """A source without a program: blank, or made of defs alone."""
    mend = "a program starts with its signature: `program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])`"
    return Diagnostic("C0128", "there is no program here", span, help=mend)


def setting(span: Span, message: str, mend: str) -> Diagnostic:
    return Diagnostic("C0132", message, span, help=mend)


# --- functions ---------------------------------------------------------------------------------------------------------


def no_block(span: Span, name: str) -> Diagnostic:
    mend = "write the result after `=`, or an indented block below"
    return Diagnostic("C0115", f"`def {short(name)}` has no body", span, "nothing follows this `=`", help=mend)


def no_result(span: Span, name: str) -> Diagnostic:
    mend = "end the block with an expression, or several with commas"
    return Diagnostic("C0115", f"the last line of `def {short(name)}` is not a result", span, help=mend)


def def_shape(span: Span, message: str, mend: str) -> Diagnostic:
    return Diagnostic("C0124", message, span, help=mend)


# --- expressions -------------------------------------------------------------------------------------------------------


def missing_operator(span: Span, message: str, mend: str) -> Diagnostic:
    return Diagnostic("C0129", message, span, help=mend)


def missing_comma(span: Span, before: str) -> Diagnostic:
    return Diagnostic("C0129", f"a comma is missing after `{short(before)}`", span, help="separate the two with `,`")


def chained(span: Span) -> Diagnostic:
    return Diagnostic("C0130", "comparisons do not chain", span, help="write `a < b and b < c`")


def operand(span: Span, message: str, mend: str) -> Diagnostic:
    return Diagnostic("C0131", message, span, help=mend)
