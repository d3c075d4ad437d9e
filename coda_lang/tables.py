"""What was measured, as text: tables of trials and reports, their JSON, a progress bar with the time left. In: plain records. Out: text.

Non-goal: measuring (`benchmark`, `backend_cute.tune`).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from click.termui import progressbar


def trials(found: Iterable[Any]) -> str:
    """A table a kernel of `tune.Trial`s, fastest first."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for t in found:
        groups.setdefault((t.program, t.kernel), []).append(t)
    lines = []
    for (_, kernel), members in groups.items():
        lines.append(kernel)
        rows = []
        for t in sorted(members, key=lambda t: t.milliseconds if t.milliseconds is not None else float("inf")):
            ms = f"{t.milliseconds:.4f} ms" if t.milliseconds is not None else t.problem
            rows.append((t.config, ms, " ".join(word for word, holds in (("chosen", t.chosen), ("default", t.default)) if holds)))
        lines += [*_table(rows), ""]
    return "\n".join(lines) if lines else "no kernel with tiles to choose\n"


def reports(found: Iterable[Any]) -> str:
    """`benchmark.Report`s: the calls, then each kernel beside the least time that its bytes and FLOPs take."""
    lines = []
    for r in found:
        lines.append(f"{r.program}: {', '.join(f'{a}={n}' for a, n in r.extents.items())}, on {r.device}")
        rows = [(method, f"{ms:.4f} ms", f"{r.peak_mib.get(method, 0):.0f} MiB") for method, ms in r.ms.items()]
        lines += [*_table(rows), f"  host {r.host_us:.1f} us a call, first call {r.first_call_s:.2f} s", ""]
        head = ("kernel", "tiles", "MB", "GFLOP", "floor ms", "ms", "of floor", "bound by")
        kernels = [
            (f"{k.kernel} x{k.times}" if k.times > 1 else k.kernel, k.config, f"{k.bytes / 1e6:.1f}", f"{k.flops / 1e9:.1f}",
             f"{k.floor_ms:.4f}" if k.floor_ms is not None else "", f"{k.ms:.4f}", f"{k.distance:.2f}x" if k.distance else "", k.bound)
            for k in r.kernels
        ]  # fmt: skip
        lines += [*_table([head, *kernels]), ""]
    return "\n".join(lines)


def json_of(found: Iterable[Any]) -> str:
    """The records as JSON."""
    return json.dumps([asdict(r) for r in found], indent=1) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


@contextlib.contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error, a new one for each thing that is being done, with the time left."""
    with contextlib.ExitStack() as stack:
        shown: dict[str, Any] = {}

        def progress(what: str, done: int, of: int) -> None:
            if of and what not in shown:
                stack.close()
                shown[what] = stack.enter_context(_bar(of, what))
            if of:
                shown[what].update(done - shown[what].pos)

        yield progress


def _bar(of: int, what: str) -> Any:
    return progressbar(length=of, label=what, show_eta=True, file=sys.stderr)
