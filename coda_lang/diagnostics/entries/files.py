"""Entries of the error catalog, C08xx: files and the command line."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = ()
