"""Characters and numbers that are none of the language. In: the text and its span. Out: diagnostics C0102, C0103, C0105 and C0106, with
the likely meaning.

Non-goals: finding them (lexer.py).
"""

from __future__ import annotations

import re

from ..diagnostics.model import Diagnostic
from ..source import Span
from .problems import short
from .words import STRINGS

F32_MAX = 3.4028234663852886e38
F32_TINY = 2.0**-150  # anything at or below rounds to zero
I64_MAX = 2**63 - 1

_INSTEAD = {
    "×": "*", "·": "*", "∗": "*", "⊙": "*", "÷": "/", "−": "-", "–": "-", "—": "-", "≤": "<=", "≥": ">=", "≠": "!=", "→": "->", "⟶": "->",
    "²": "**2", "³": "**3", "√": "sqrt(…)", "∞": "inf", "∑": "sum[axis](…)", "，": ",", "（": "(", "）": ")", "…": "all of it",
}  # fmt: skip
_FOREIGN = {
    "&&": "write `and`", "||": "write `or`", "!": "write `not`", "&": "write `and`", "~": "write `not`", "^": "a power is `a ** b`",
    "//": "write `floor(a / b)`", ":=": "write `=`", "=>": "write `->`", "=<": "write `<=`", "<>": "write `!=`",
    ";": "put each statement on a line of its own",
    "?": "write `where(condition, a, b)`", '"': "the language has no strings", "'": "the language has no strings", "`": "remove it",
    ".": "values have no attributes or methods: call a function, `exp(x)`, and name axes in brackets, `sum[d](x)`",
    "{": "the language has no braces: a def's block is indented", "}": "the language has no braces: a def's block is indented",
    "\\": "a line goes on inside brackets, or when the next one starts with an operator",
}  # fmt: skip
_LETTERS = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "eps", "θ": "theta", "λ": "lam", "μ": "mu", "µ": "mu", "ν": "nu", "π": "pi",
    "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ω": "omega", "Δ": "delta", "Ω": "omega", "Σ": "sum", "₀": "0", "₁": "1", "₂": "2",
}  # fmt: skip


def character(span: Span, text: str) -> Diagnostic:
    """Text that starts no token, or a name with letters outside ASCII."""
    if len(text) > 1 and text[-1] == "=" and text[0] in "+-*/@%":
        mend = f"every name is assigned once: write `new = old {text[:-1]} …`"
        return Diagnostic("C0103", f"`{text}` is not an operator", span, help=mend)
    known = text[0] if text[0] in "\"'" else text
    if known in _FOREIGN:
        if instead := STRINGS.get(text.replace("'", '"')):
            return Diagnostic("C0103", f"`{short(text)}` is not part of the language", span, help=f"{_FOREIGN[known]}; {instead}")
        return Diagnostic("C0103", f"`{short(text)}` is not part of the language", span, help=_FOREIGN[known])
    if text[0] not in _INSTEAD and (text[0].isalnum() or text[0] == "_"):
        spelt = "".join(_LETTERS.get(c, c) for c in text)
        mend = f"write `{short(spelt)}`" if spelt.isascii() else "write it with the letters a to z, digits and `_`"
        return Diagnostic("C0102", f"the name `{short(text)}` has letters outside ASCII", span, help=mend)
    code = f"U+{ord(text[0]):04X}"
    shown = f"`{text[0]}` ({code})" if text[0].isprintable() and not text[0].isspace() else f"the character {code}"
    mend = f"write `{_INSTEAD[text]}`" if text in _INSTEAD else "write an ordinary space" if text.isspace() else "remove it"
    return Diagnostic("C0102", f"{shown} is not part of the language", span, help=mend)


def number(span: Span, text: str) -> Diagnostic | None:
    """What is wrong with a number's spelling or size; None where nothing is."""
    if not _plain(text):
        return Diagnostic("C0105", f"`{short(text)}` is not a number", span, help=_respelt(text))
    if text.isdigit():
        if len(text.lstrip("0")) > 19 or int(text) > I64_MAX:
            return Diagnostic("C0106", f"the integer `{short(text)}` does not fit in 64 bits", span, help=f"the largest is {I64_MAX}")
        return None
    value = float(text)
    if value > F32_MAX:
        mend = f"the largest is {F32_MAX:.8g}; infinity is written `inf`"
        return Diagnostic("C0106", f"`{short(text)}` is larger than any f32", span, help=mend)
    if value <= F32_TINY and any(c in "123456789" for c in text.lower().split("e")[0]):
        return Diagnostic("C0106", f"`{short(text)}` rounds to zero in f32", span, help="write `0.0`, or a number above 1e-45")
    return None


def _plain(text: str) -> bool:
    """`12`, `0.5`, `1e-5`: digits on both sides of a point, an optional exponent."""
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", text) is not None


def _respelt(text: str) -> str:
    """The remedy for a number in another language's spelling."""
    lower = text.lower()
    digits = text[: next((i for i, c in enumerate(text) if not c.isdigit()), len(text))]
    if "_" in text and _plain(text.replace("_", "")):
        return f"write `{text.replace('_', '')}`: digits are not grouped"
    for respelt in ("0" + text, text + "0", lower.replace(".e", ".0e")):
        if _plain(respelt):
            return f"write `{respelt}`: digits stand on both sides of the point"
    if lower[-1:] in "fl" and _plain(text[:-1]):
        return f"write `{text[:-1]}`: numbers have no suffix"
    if lower[:2] in ("0x", "0b", "0o"):
        return "write it in decimal"
    if digits and text[len(digits) :].isidentifier():
        return f"a name cannot start with a digit; a product is `{digits} * {short(text[len(digits) :])}`"
    return "numbers look like `12`, `0.5` or `1e-5`"
