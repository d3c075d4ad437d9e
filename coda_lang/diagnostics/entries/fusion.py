"""Entries of the error catalog, C04xx: what cannot be fused."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = ()
