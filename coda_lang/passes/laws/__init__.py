"""The laws: one file each, one `Law` each. `LAWS` is the order in which `passes.normalise` applies them.

To add one: a file with its `LAW`, its name in `LAWS`, property tests (`tests/test_laws.py` walks the tuple), a row in docs/language.md.
"""

from __future__ import annotations

from . import linear, moments, scale_out
from .law import Law, Use

LAWS: tuple[Law, ...] = (moments.LAW, scale_out.LAW, linear.LAW)

__all__ = ["LAWS", "Law", "Use"]
