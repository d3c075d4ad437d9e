"""Entries of the error catalog, C03xx: types and axes."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = ()
