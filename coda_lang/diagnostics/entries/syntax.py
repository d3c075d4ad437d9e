"""Entries of the error catalog, C01xx: syntax."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = ()
