"""Entries of the error catalog, C07xx: calling a compiled function."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = ()
