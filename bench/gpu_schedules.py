"""Launches with K in parts, and unfused, on a Hopper GPU: right, repeatable, and faster than planned or than torch.mm by how much.

    python bench/gpu_schedules.py [--parts check time] [--only PROGRAM …] [--out DIR] [--limit SECONDS] [--objects DIR] [--device cuda]
    python bench/gpu_schedules.py --compile --objects DIR   # compiles all of it into DIR; needs the DSL and gcc, no GPU
    python bench/gpu_schedules.py --judge FILE              # what the model would have taken, and what that costs; needs no GPU

check: forward and all gradients of `PROGRAMS` at `SHAPES`, every launch in 1 to 4 parts, by the machinery of bench/gpu_training.py:
against float64, runs of the same bits, outputs of the same bits with and without gradients, nothing unwritten. time: the plain product
and two fused ones at few rows of LLaMA-3's shapes, as planned and in every number of parts beside torch.mm, medians of interleaved calls
with a cold cache, with what `schedules.estimates` expects. A line of JSON a result in DIR/schedules.jsonl. Kernels are compiled when
first needed (705 in all, 90 with --only linear), or taken from --objects. On the CPU (--device cpu) the twin stands for the kernels, and
nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import coda_lang  # noqa: E402
from bench import gpu_models, training_cases, training_objects  # noqa: E402
from coda_lang.backend_cute import compile, host, schedules, spec, timing  # noqa: E402

PARTS = ("check", "time")
LINEAR = "program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])\nnominal m = 64, n = 2048, k = 8192\ny = x @ w\n"
SPECS = ("linear_residual", "swiglu", "lm_head_lse", "head_rmsnorm", "qkv_rope", "lm_loss")
PROGRAMS = {"linear": LINEAR, **{name: ROOT / "specs" / f"{name}.coda" for name in SPECS}}
TIMED = ("linear", "linear_residual", "swiglu")
SHAPES = ((1, 512, 640), (37, 264, 1000), (64, 512, 72), (200, 328, 2048))  # rows, columns, depth
FEW = (1, 16, 64, 128, 256, 512)
WIDTHS = ((2048, 2048), (3072, 2048), (2048, 8192), (4096, 4096), (6144, 4096), (4096, 14336))  # columns, depth


class Cut(training_cases.Chosen):
    """Executables that want every launch in `count` parts where that can be, 0: as planned."""

    count = schedules.PLANNED

    def parts(self, launch: spec.Launch, extents: Mapping[str, int], device: Any) -> int:
        return self.count if self.count in schedules.counts(launch, extents) else schedules.PLANNED


def executables(fn: Any, count: int) -> Cut:
    """Those of a function."""
    return type("Cut", (Cut,), {"count": count})(fn.program, fn.functions, {}, fn.saving)


def recorder(count: int) -> type[training_cases.Recorder]:
    """Executables that note what they would have to compile."""
    return type("Noted", (Cut, training_cases.Recorder), {"count": count})


def functions(name: str, count: int) -> dict[str, Any]:
    """The programs of a source, every launch in so many parts."""
    made = coda_lang.compile(PROGRAMS[name])
    found = vars(made) if isinstance(made, SimpleNamespace) else {name: made}
    for fn in found.values():
        fn.objects = executables(fn, count)
    return found


def shape(fn: Any, rows: int, cols: int, depth: int) -> dict[str, int]:
    """Extents: what stands in an output with rows is columns, what does not is contracted."""
    kept = {a for o in fn.program.outputs for a in o.axes}
    same = {other: one for one, other in fn.program.equal}
    found: dict[str, int] = {}
    for axis, size in fn.program.extents:
        axis_is = same.get(axis, axis)
        free = rows if axis_is == "m" else cols if axis_is in kept or axis_is in ("v", "vocab") else depth
        found[axis] = size if size is not None else found.get(axis_is, max(free // 128, 1) if axis_is == "head" else free)
    return found


def splits(fn: Any, extents: Mapping[str, int]) -> list[str]:
    """What of a forward is in parts."""
    return [s.note for s in schedules.scheduled(fn.program, extents, torch.device("cpu"), fn.objects).splits]


def cases(only: Any) -> Iterator[tuple[str, int, tuple[int, int, int]]]:
    """(program, parts, rows columns depth) of what is checked."""
    for name in PROGRAMS:
        if not only or name in only:
            yield from ((name, count, sizes) for count in range(1, schedules.MOST + 1) for sizes in SHAPES)


def check(name: str, count: int, sizes: tuple[int, int, int], device: str) -> Iterator[dict[str, Any]]:
    """One program at one shape in so many parts."""
    for key, fn in functions(name, count).items():
        extents = shape(fn, *sizes)
        if device == "cuda":
            compile.objects_for(jobs(fn, count, extents))
        found = gpu_models.check_program(fn, extents, device)
        yield {"part": "check", "program": key, "parts": count, "shape": extents, "split": splits(fn, extents), **found}


def jobs(fn: Any, count: int, extents: Mapping[str, int], kind: str = "gradients") -> list[compile.Job]:
    """What calls in so many parts need."""
    return training_cases.needed(fn, {"kind": kind, "shape": extents}, recorder(count))


def counts(fn: Any, extents: Mapping[str, int]) -> tuple[int, ...]:
    """Every schedule of a program of one launch, the planned one first."""
    (launch,) = spec.launches(fn.program)
    return (schedules.PLANNED, *schedules.counts(launch, extents))


def timed(name: str, m: int, n: int, k: int, device: str = "cuda") -> dict[str, Any]:
    """Milliseconds of every schedule and of torch.mm; those whose results are off are named and not timed."""
    (fn,) = functions(name, schedules.PLANNED).values()
    extents, calls, wrong, want = shape(fn, m, n, k), dict[str, Any](), [], None
    compile.objects_for({j.key: j for count in counts(fn, extents) for j in jobs(fn, count, extents, "forward")}.values())
    tensors = training_cases.leaves(fn, extents, device, needs=())
    for count in counts(fn, extents):
        plan = host.plan(fn.program, fn.bind(tensors), tensors, tensors[0].device, executables(fn, count))
        with host.filled(float("nan")):
            results = [r.double() for r in plan.run(tensors)]
        want = results if want is None else want
        if all(float((r - w).norm()) <= 2.0**-7 * float(w.norm()) for r, w in zip(results, want, strict=True)):
            calls[schedules.name_of(count)] = partial(plan.run, tensors)
        else:
            wrong.append(schedules.name_of(count))
    x, w = (torch.randn(*s, device=device, dtype=torch.bfloat16) for s in ((m, k), (n * (2 if name == "swiglu" else 1), k)))
    calls["torch.mm"] = partial(torch.mm, x, w.mT)
    ms = {key: round(value, 5) for key, value in timing.medians(timing.interleaved(calls, budget=300.0)).items()}
    (launch,) = spec.launches(fn.program)
    found = schedules.estimates(launch, extents, host.multiprocessors(x.device))
    expected = {schedules.name_of(e.parts): round(e.microseconds / 1e3, 5) for e in found}
    taken = schedules.name_of(schedules.best(found).parts)
    row = {"part": "time", "program": name, "size": (m, n, k), "ok": not wrong, "wrong": wrong}
    return {**row, "ms": ms, "expected": expected, "taken": taken}


def judge(file: Path) -> None:
    """Of each timed size: torch.mm over the planned schedule, the one the model takes, the fastest; and geometric means."""
    kept: dict[str, list[float]] = {"as planned": [], "taken": [], "fastest": []}
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if row.get("part") != "time":
            continue
        ms = {key: t for key, t in row["ms"].items() if key != "torch.mm"}
        fastest = min(ms, key=lambda key: ms[key])
        picks = {"as planned": "as planned", "taken": row["taken"] if row["taken"] in ms else "as planned", "fastest": fastest}
        ratios = {what: row["ms"]["torch.mm"] / ms[key] for what, key in picks.items()}
        print(row["program"], *row["size"], *(f"{what} {r:.3f} ({picks[what]})" for what, r in ratios.items()))
        for what, r in ratios.items():
            kept[what].append(r)
    for what, values in kept.items():
        if values:
            print(f"{what}: torch.mm / ours, geometric mean {statistics.geometric_mean(values):.3f}, least {min(values):.3f}")


def compiled(only: Any, directory: Path) -> int:
    """Compile what all parts need; the exit status."""
    wanted: list[compile.Job] = []
    for name, count, sizes in cases(only):
        for fn in functions(name, count).values():
            wanted += jobs(fn, count, shape(fn, *sizes))
    for name in [n for n in TIMED if not only or n in only]:
        (fn,) = functions(name, schedules.PLANNED).values()
        for extents in (shape(fn, m, n, k) for m in FEW for n, k in WIDTHS):
            for count in counts(fn, extents):
                wanted += jobs(fn, count, extents, "forward")
    unique = list({j.key: j for j in wanted}.values())
    failed = training_objects.compile_all(unique, compile.cores(), math.inf)
    training_objects.pack(directory)
    print(json.dumps({"objects": len(unique), "failed": failed}))
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--only", nargs="*", default=[], help="programs")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--limit", type=float, default=1e9)
    parser.add_argument("--objects", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.judge:
        judge(given.judge)
        return 0
    if given.objects:
        given.objects.mkdir(parents=True, exist_ok=True)
        training_objects.use(given.objects)
    if given.compile:
        return compiled(given.only, given.objects or Path("."))
    deadline, failed = time.time() + given.limit, 0
    with (given.out / "schedules.jsonl").open("a", encoding="utf-8") as sink:

        def note(row: dict[str, Any]) -> None:
            nonlocal failed
            failed += not row["ok"]
            sink.write(json.dumps(row) + "\n")
            sink.flush()
            print(json.dumps(row), flush=True)

        if "check" in given.parts:
            for name, count, sizes in cases(given.only):
                if time.time() < deadline:
                    for row in check(name, count, sizes, given.device):
                        note(row)
        if "time" in given.parts and given.device == "cuda":
            for name in [n for n in TIMED if not given.only or n in given.only]:
                for n, k in sorted(WIDTHS, key=lambda width: -width[1] / width[0]):  # where K is long first
                    for m in FEW:
                        if time.time() < deadline:
                            note(timed(name, m, n, k))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
