"""Every syntax error, as a function from where it is to its diagnostic. In: spans and the offending text. Out: `Diagnostic`s C01xx.

Non-goals: finding errors (lexer.py, parse.py, explain.py), long explanations (diagnostics/catalog.py).
"""

from __future__ import annotations

from ..diagnostics.model import Diagnostic, Label
from ..source import Span

F32_MAX = 3.4028234663852886e38
F32_TINY = 2.0**-150  # anything at or below rounds to zero
I64_MAX = 2**63 - 1


def short(text: str, limit: int = 40) -> str:
    """`text`, cut in the middle where it is too long to quote."""
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 4 :]}"


# --- characters, names and numbers -----------------------------------------------------------------------------------

_INSTEAD = {
    "×": "*", "·": "*", "∗": "*", "⊙": "*", "÷": "/", "−": "-", "–": "-", "—": "-", "≤": "<=", "≥": ">=", "≠": "!=", "→": "->", "⟶": "->", "²": "**2",
    "³": "**3", "√": "sqrt(…)", "∞": "inf", "“": "", "”": "", "’": "", "\u00a0": "an ordinary space", "\u200b": "", "\ufeff": "", "，": ",", "（": "(", "）": ")",
    "∑": "sum[axis](…)", "Σ": "sum[axis](…)",
}  # fmt: skip
_FOREIGN = {
    "&&": "write `and`", "||": "write `or`", "!": "write `not`", "&": "write `and`", "//": "write `floor(a / b)`", ":=": "write `=`", "<-": "write `=`",
    ";": "put each statement on a line of its own", "=>": "write `->`", '"': "the language has no strings", "'": "the language has no strings",
    "`": "remove it", "?": "write `where(condition, a, b)`", "^": "a power is `a ** b`", "~": "write `not`",
    ".": "values have no attributes or methods: call a function, `exp(x)`, and name axes in brackets, `sum[d](x)`",
    "{": "the language has no braces: a def's block is indented", "}": "the language has no braces: a def's block is indented",
    "\\": "a line goes on inside brackets, or when the next one starts with an operator",
}  # fmt: skip
_LETTERS = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "eps", "θ": "theta", "λ": "lam", "μ": "mu", "µ": "mu", "ν": "nu", "π": "pi", "ρ": "rho",
    "σ": "sigma", "τ": "tau", "φ": "phi", "ω": "omega", "Δ": "delta", "Ω": "omega",
}  # fmt: skip


def character(span: Span, text: str) -> Diagnostic:
    """Text that starts no token, or a name with letters outside ASCII."""
    if text[-1:] == "=" and text[0] in "+-*/@%":
        return Diagnostic("C0103", f"`{text}` is not an operator", span, help=f"every name is assigned once: write `new = old {text[0]} …`")
    if text in _FOREIGN:
        return Diagnostic("C0103", f"`{text}` is not part of the language", span, help=_FOREIGN[text])
    if text[0].isalpha() or text[0] == "_":
        spelt = "".join(_LETTERS.get(c, c) for c in text)
        mend = f"write `{short(spelt)}`" if spelt.isascii() else "write it with the letters a to z, digits and `_`"
        return Diagnostic("C0102", f"the name `{short(text)}` has letters outside ASCII", span, help=mend)
    shown = f"`{text}` (U+{ord(text[0]):04X})" if text.isprintable() and text.strip() else f"the character U+{ord(text[0]):04X}"
    mend = _INSTEAD.get(text)
    return Diagnostic("C0102", f"{shown} is not part of the language", span, help=f"write `{mend}`" if mend else "remove it")


def long_name(span: Span, text: str, limit: int) -> Diagnostic:
    return Diagnostic("C0104", f"a name of {len(text)} characters", span, help=f"names have at most {limit} characters")


def number(span: Span, text: str) -> Diagnostic:
    """A malformed number, with its likely meaning."""
    mend = "numbers look like `12`, `0.5` or `1e-5`"
    body = text.rstrip(".")
    if "_" in text and _is_number(text.replace("_", "")):
        mend = f"write `{text.replace('_', '')}`: digits are not grouped"
    elif text.startswith(".") and _is_number("0" + text):
        mend = f"write `0{text}`"
    elif text.endswith(".") and _is_number(body + ".0"):
        mend = f"write `{body}.0`"
    elif ".e" in text.lower() and _is_number(text.lower().replace(".e", ".0e")):
        mend = f"write `{text.lower().replace('.e', '.0e')}`"
    elif text[-1:] in "fFlL" and _is_number(text[:-1]):
        mend = f"write `{text[:-1]}`: numbers have no suffix"
    elif text[:2].lower() in ("0x", "0b", "0o"):
        mend = "write the number in decimal"
    else:
        digits = text[: next((i for i, c in enumerate(text) if not c.isdigit()), len(text))]
        rest = text[len(digits) :]
        if digits and rest.isidentifier():
            mend = f"a name cannot start with a digit; a product is `{digits} * {rest}`"
    return Diagnostic("C0105", f"`{short(text)}` is not a number", span, help=mend)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text[0].isdigit() and text[-1].isdigit() and text.isascii() and "_" not in text


def range_of(span: Span, text: str) -> Diagnostic | None:
    """A well-formed number that no type of the language holds, else None."""
    if text.isdigit():
        if len(text.lstrip("0")) > 19 or int(text) > I64_MAX:
            return Diagnostic("C0106", f"the integer `{short(text)}` does not fit in 64 bits", span, help=f"the largest is {I64_MAX}")
        return None
    value = float(text)
    if value > F32_MAX:
        return Diagnostic("C0106", f"`{short(text)}` is larger than any f32", span, help=f"the largest is {F32_MAX:.8g}; infinity is written `inf`")
    if value <= F32_TINY and any(c in "123456789" for c in text.lower().split("e")[0]):
        return Diagnostic("C0106", f"`{short(text)}` rounds to zero in f32", span, help="write `0.0`, or a number above 1e-45")
    return None


def reserved(span: Span, word: str, kind: str) -> Diagnostic:
    """A reserved word where a name stands. `kind`: "keyword", "dtype" or "Python word"."""
    why = {
        "keyword": f"`{word}` is a keyword of the language",
        "dtype": f"`{word}` is a type",
        "Python word": f"`{word}` is a word of Python, in which kernels are written and called by argument name",
    }[kind]
    return Diagnostic("C0107", f"`{word}` cannot be a name", span, notes=(why,), help=f"write `{word}_`, or another name")


def future(span: Span, word: str, instead: str) -> Diagnostic:
    return Diagnostic("C0108", f"`{word}` is reserved: it is not in version 1 of the language", span, help=f"today: {instead}")


# --- brackets and lines ----------------------------------------------------------------------------------------------


def unclosed(span: Span, text: str, before: Span | None) -> Diagnostic:
    closing = {"(": ")", "[": "]"}[text]
    where = (Label(before, "this statement starts inside it"),) if before else ()
    return Diagnostic("C0110", f"`{text}` is never closed", span, "opened here", where, help=f"add the missing `{closing}`")


def mismatched(span: Span, text: str, opener: Span | None, opened: str | None) -> Diagnostic:
    if opener is None or opened is None:
        return Diagnostic("C0111", f"`{text}` closes nothing", span, help="remove it, or open the bracket before")
    closing = {"(": ")", "[": "]"}[opened]
    return Diagnostic(
        "C0111", f"`{text}` cannot close `{opened}`", span, "", (Label(opener, "opened here"),), help=f"close with `{closing}`, or open with the other bracket"
    )


def brackets_too_deep(span: Span, limit: int) -> Diagnostic:
    return Diagnostic("C0112", f"more than {limit} brackets inside each other", span, help="give parts of the expression names of their own")


def too_deep(span: Span, limit: int) -> Diagnostic:
    return Diagnostic("C0112", f"an expression of more than {limit} levels", span, help="give parts of the expression names of their own")


def indented(span: Span) -> Diagnostic:
    return Diagnostic("C0113", "unexpected indentation", span, help="start the line in column 1: only the block of a `def` is indented")


def uneven(span: Span, first: Span, expected: int, found: int) -> Diagnostic:
    label = Label(first, f"the block's first line: {_blanks(expected)}")
    return Diagnostic("C0113", "the lines of a block start in one column", span, _blanks(found), (label,), help=f"indent by {_blanks(expected)}")


def _blanks(count: int) -> str:
    return f"{count} space{'s' * (count != 1)}"


def tab(span: Span) -> Diagnostic:
    return Diagnostic("C0114", "a tab in the indentation", span, help="indent with spaces")


def no_block(span: Span, name: str) -> Diagnostic:
    return Diagnostic(
        "C0115", f"`def {short(name)}` has no body", span, "nothing follows this `=`", help="write the result after `=`, or an indented block below"
    )


# --- statements ------------------------------------------------------------------------------------------------------


def counts(values: Span, targets: Span, names: int, found: int) -> Diagnostic:
    label = Label(targets, f"{names} name{'s' * (names != 1)}")
    return Diagnostic("C0122", f"{names} name{'s' * (names != 1)} for {found} values", values, f"{found} values", (label,), help="write as many values as names")


def target(element: object) -> Diagnostic:
    """Something other than a name left of an `=`."""
    span: Span = element.span  # type: ignore[attr-defined]
    return Diagnostic("C0121", "only a name can be assigned", span, help="write `name = …`; a comparison is `==`")


def misplaced_annotation(span: Span) -> Diagnostic:
    return Diagnostic("C0123", "a type annotation belongs to the name on the left of `=`", span, help="write `name: bf16 = …`, or cast with `bf16(…)`")


def nested_tuple(span: Span) -> Diagnostic:
    return Diagnostic("C0122", "values have no tuples inside", span, help="write the values side by side, without these brackets")


def def_arrow(span: Span) -> Diagnostic:
    return Diagnostic("C0124", "a def's brackets hold axes, without an arrow", span, help="write `def f[d](x) = …`")


def early_result(span: Span, last: Span) -> Diagnostic:
    label = Label(last, "the block goes on to here")
    return Diagnostic("C0125", "a value without a name", span, "", (label,), help="give it a name: only the last line of a block is its result")


def no_result(span: Span, name: str) -> Diagnostic:
    return Diagnostic("C0115", f"the last line of `def {short(name)}` is not a result", span, help="end the block with an expression, or several with commas")


def default_first(span: Span) -> Diagnostic:
    return Diagnostic("C0126", "an argument with a default before one without", span, help="move it behind the others")


def unnamed(span: Span) -> Diagnostic:
    return Diagnostic("C0125", "a value without a name", span, help="give it a name: `y = …`")


def homeless(span: Span) -> Diagnostic:
    return Diagnostic("C0127", "a statement outside every program", span, help="move it below a `program` line, or before the `def` that precedes it")


def repeated_name(span: Span, first: Span, name: str) -> Diagnostic:
    return Diagnostic("C0126", f"`{short(name)}` is defined twice", span, "", (Label(first, "first here"),), help="give one another name")


def empty(span: Span) -> Diagnostic:
    return Diagnostic("C0128", "the file has no program", span, help="a file starts with a signature: `program scale(x: bf16[m, d]) -> (y: bf16[m, d])`")
