"""Entries of the error catalog, C05xx: derivatives."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = ()
