"""Entries of the error catalog, C08xx: files and the command line."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        code="C0801",
        title="a source that cannot be read",
        why="""A source is a file of UTF-8 text, or standard input for `-`. A missing file, a folder, a file that may not be
        read, binary data and anything above 4 MiB are refused before anything is parsed.""",
        wrong="codac check specs/swigluu.coda",
        right="codac check specs/swiglu.coda",
        remedy="Give the path of a .coda file that exists and is text; the message names near ones in the same folder.",
        kind="shell",
    ),
    Entry(
        code="C0802",
        title="an output that cannot be written",
        why="""An output is written whole or not at all: into a temporary file beside its place, then renamed. So its folder
        must exist and be writable, and no folder may stand where the file is to go.""",
        wrong="codac specs/swiglu.coda -o no/such/folder/kernel.py",
        right="codac specs/swiglu.coda -o kernel.py",
        remedy="Make the folder, or give another path.",
        kind="shell",
    ),
    Entry(
        code="C0803",
        title="a name on the command line that means nothing",
        why="""`codac ops NAME`, `codac explain CODE` and `codac ir --after PASS` take names that codac knows: operators and
        functions of the prelude, error codes, passes.""",
        wrong="codac ops sillu",
        right="codac ops silu",
        remedy="Take the name that the message suggests, or list them all: `codac ops`, docs/errors, `codac ir --help`.",
        kind="shell",
    ),
)
