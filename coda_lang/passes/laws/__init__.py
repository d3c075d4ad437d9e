"""The laws: one file each. Those of programs, in the order in which `passes.normalise` applies them: `ASKED` where the program asks for
them, `LAWS` wherever they apply, `CHOSEN` where it pays. `OF_DERIVATIVES` are those of what stands between a forward and its backward,
weighed by `passes.saving`.

To add one: a file with its record, its place in a tuple, property tests (tests/test_laws.py walks them), a row in docs/laws.md.
"""

from __future__ import annotations

from . import euler, linear, moments, narrow, rank_one, scale_across, scale_out
from .law import AnyLaw, ChosenLaw, DerivativeLaw, Law, Use

LAWS: tuple[Law, ...] = (moments.LAW, scale_out.LAW, linear.LAW)
ASKED: tuple[ChosenLaw, ...] = (rank_one.LAW,)
CHOSEN: tuple[ChosenLaw, ...] = (scale_across.LAW,)
OF_DERIVATIVES: tuple[DerivativeLaw, ...] = (euler.EULER, euler.ROUNDED, euler.ADJOINT, euler.SHIFTED, narrow.LAW)

__all__ = ["ASKED", "CHOSEN", "LAWS", "OF_DERIVATIVES", "AnyLaw", "ChosenLaw", "DerivativeLaw", "Law", "Use"]
