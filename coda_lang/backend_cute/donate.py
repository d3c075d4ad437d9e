"""Which tensors a kernel may write in the place of one that it reads, and nobody needs afterwards: donated buffers.

In: a `spec.Program`, which of its inputs the launcher owns. Out: pairs (written, read). A kernel may overwrite what it reads if the block
that writes an element is the only one to read it, and has read it by then. That follows from the records: both tensors lie alike, both are
touched as tiles of the kernel's own geometry alone, and each box of 64 rows x a step's columns is loaded once, by the warpgroup that stores
the same box after its loads have landed (docs/decisions/0030). What the launcher must see to: that the strides are alike too, and that
nobody holds the tensor. Needs neither torch nor cutlass. Non-goals: kernels of loops, whose chunks share tensors.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection

from . import spec
from .prune import target, used
from .row_configs import of_rows

MAP, ROWS, GEMM = "map", "rows", "gemm"


def wanted() -> tuple[str, ...]:
    """The kinds of kernels that may overwrite: map kernels; with CODA_DONATE=all those too that no card has run so; with 0 none."""
    return {"0": (), "all": (MAP, ROWS, GEMM)}.get(os.environ.get("CODA_DONATE", ""), (MAP,))


def kind(gemm: spec.Gemm) -> str:
    """How a kernel walks memory."""
    return ROWS if of_rows(gemm) else GEMM if gemm.products else MAP


def may_overwrite(gemm: spec.Gemm, read: str, written: str) -> bool:
    """May the kernel write one of its tensors over another, if their strides are the same?

    No where another block may read an element that this one writes (operands of products, vectors), where writes are not those of the
    tile (windows, points), where a row is walked again after its first panel was written (reductions over rows), and where a kernel adds
    to what it writes.
    """
    records = {t.name: t for t in gemm.tensors}
    if read == written or not {read, written} <= set(records):
        return False
    one, other = records[read], records[written]
    if (one.dtype, one.modes, one.loose, one.part) != (other.dtype, other.modes, other.loose, other.part) or one.part is not None:
        return False
    if any(m.tensor in (read, written) for p in gemm.products for m in (p.a, *p.b)):
        return False
    ports = [p for p in gemm.ports if isinstance(p, (spec.Load, spec.Tile))]
    tiles = [p.matrix for p in ports if isinstance(p, spec.Tile) and p.matrix.tensor == read]
    if any((p.matrix.tensor if isinstance(p, spec.Tile) else p.tensor) == written for p in ports):
        return False
    if any(isinstance(p, spec.Load) and p.tensor == read for p in ports) or any(target(s) == read for s in gemm.sinks):
        return False
    sinks = [s for s in gemm.sinks if target(s) == written]
    stores = [s.matrix for s in sinks if isinstance(s, spec.Store) and s.window is None]
    if not tiles or not stores or len(stores) < len(sinks):
        return False
    if of_rows(gemm) and any(isinstance(s, spec.ColReduce) for s in gemm.sinks):
        return False
    # Lanes may differ: all tiles of a step are loaded before any of its stores.
    footprints = {(m.rows, m.cols, m.pack, tuple(mode for mode, _ in m.at)) for m in (*tiles, *stores)}
    return len(footprints) == 1


def pairs(program: spec.Program, owned: Collection[str], kinds: Collection[str]) -> dict[str, str]:
    """What may be written over which of the owned inputs: each at most once, none that a later kernel, another Gemm of the same launch or
    the caller reads; what is written, by one Gemm alone."""
    looped = {name for loop in program.loops for name in loop.kernels}
    free = set(owned) - {given for _, given in program.same} - {given for _, given in program.into}
    made = {name for name, _ in program.into}
    writers = Counter(name for kernel in program.kernels for gemm in spec.gemms(kernel) for name in {target(s) for s in gemm.sinks})
    found: dict[str, str] = {}
    for place, kernel in enumerate(program.kernels):
        if kernel.name in looped:
            continue
        later = set().union(*map(used, program.kernels[place + 1 :]))
        for gemm in spec.gemms(kernel):
            beside = set().union(*(used(g) for g in spec.gemms(kernel) if g is not gemm))
            for read in sorted(used(gemm) & free - later - beside - set(found.values())):
                names = [t.name for t in gemm.tensors if t.name not in found and t.name not in made and writers[t.name] == 1]
                fits = [name for name in names if kind(gemm) in kinds and may_overwrite(gemm, read, name)]
                found |= {name: read for name in fits[:1]}
    return found
