"""Entries of the error catalog, C06xx: limits of the target."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = ()
