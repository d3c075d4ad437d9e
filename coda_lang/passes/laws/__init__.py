"""The laws: one file each. `LAWS` is the order in which `passes.normalise` applies those of programs; `OF_DERIVATIVES` are those of what
stands between a forward and its backward, from which `passes.training` chooses by cost.

To add one: a file with its record, its place in the tuple, property tests (tests/test_laws.py walks both), a row in docs/laws.md.
"""

from __future__ import annotations

from . import euler, linear, moments, narrow, scale_out
from .law import DerivativeLaw, Law, Use

LAWS: tuple[Law, ...] = (moments.LAW, scale_out.LAW, linear.LAW)
OF_DERIVATIVES: tuple[DerivativeLaw, ...] = (euler.EULER, euler.ROUNDED, euler.ADJOINT, narrow.LAW)

__all__ = ["LAWS", "OF_DERIVATIVES", "DerivativeLaw", "Law", "Use"]
