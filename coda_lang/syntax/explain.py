"""Why a token could not stand where it stands. In: an item's tokens and Lark's `UnexpectedToken`. Out: the most specific diagnostic known.

Non-goals: errors that the tokens alone show (lexer.py).
"""

from __future__ import annotations

from lark.exceptions import UnexpectedToken
from lark.lexer import Token

from ..diagnostics.model import Diagnostic
from ..source import Source
from .lexer import span_of


def explain(source: Source, tokens: list[Token], error: UnexpectedToken) -> Diagnostic:
    """The diagnostic for `error`, raised at one of `tokens`."""
    token = error.token
    return Diagnostic("C0101", f"unexpected `{token}`", span_of(source.file, token))
