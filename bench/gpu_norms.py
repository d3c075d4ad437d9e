"""Norms on a Hopper GPU: outputs and gradients against float64, and time against a copy of as many bytes.

    python bench/gpu_norms.py [--quick] --build DIR                                # needs the DSL and a C compiler, no GPU
    python bench/gpu_norms.py [--quick] --run DIR [--out FILE] [--limit SECONDS]   # on a GPU; compiles what DIR lacks

The programs are those of bench/norms.coda: row kernels, and a LayerNorm between two products, whose statistics are `moments`. Data lie
around 0, 30 and 1000 standard deviations. Relative Frobenius errors are bounded by twice those of the program as written in f32 by
torch, plus 2 units of the last place of what is stored. Times are of CUDA graphs of ten calls, interleaved with `copy_`
(`coda_lang.backend_cute.timing`); bytes are what must be read and written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import gpu_training, protocol, training_cases, training_objects  # noqa: E402

SHAPES = ((8192, 4096), (8192, 768), (1000, 1000), (64, 8192), (7, 104), (300, 33024))
TIMED = ((8192, 4096), (8192, 768), (16384, 8192))
MEANS = (0.0, 30.0, 1000.0)
REPEATS = 10  # calls in a graph, so that what a launch costs does not count


def shape_of(fn: Any, m: int, d: int) -> dict[str, int]:
    sizes = {"m": m, "d": d, "h": 256, "n": 256, "head": max(d // 64, 1), "hd": 64}
    return {name: size if size is not None else sizes[name] for name, size in fn.program.extents}


def functions(directory: Path) -> dict[str, Any]:
    from coda_lang import driver

    (directory / "modules").mkdir(parents=True, exist_ok=True)
    target = directory / "modules" / "norms.py"
    if not target.exists():
        target.write_text(driver.emit(str(ROOT / "bench" / "norms.coda")), encoding="utf-8")
    return gpu_training.functions(directory)


def compile_all(directory: Path, deadline: float) -> dict[str, str]:
    jobs: dict[str, Any] = {}
    for fn in functions(directory).values():
        for shape in (*SHAPES, *TIMED):
            for kind in ("forward", "training"):
                for job in training_cases.needed(fn, {"kind": kind, "shape": shape_of(fn, *shape)}):
                    jobs[job.key] = job
    return training_objects.compile_all(list(jobs.values()), min(os.cpu_count() or 1, 16), deadline)


def checks(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Outputs and gradients at every shape, twice for equal bits."""
    import torch

    from coda_lang.backend_cute import torch_fns
    from coda_lang.backend_cute.selfcheck import error

    for name, fn in found.items():
        for shape in SHAPES:
            for mean in MEANS[: 3 if fn.program.inputs[0].dtype == "f32" else 2]:  # 16 bits cannot hold a spread of 1 around 1000
                tensors = training_cases.leaves(fn, shape_of(fn, *shape), "cuda")
                with torch.no_grad():
                    tensors[0].add_(mean)
                outs = protocol.several(fn(*tensors))
                given = training_cases.cotangents(outs)
                grads = training_cases.gradients(outs, tensors, given)
                again = protocol.several(fn(*tensors))
                same = all(torch.equal(a, b) for a, b in zip(outs, again))
                same &= all(torch.equal(a, b) for a, b in zip(grads, training_cases.gradients(again, tensors, given)))
                exact = training_cases.truth(fn, torch_fns.Exact(), tensors, given)
                plain = training_cases.truth(fn, torch_fns.Written(), tensors, given)
                with torch.no_grad():
                    ways = (torch_fns.Exact(), [t.double() for t in tensors]), (torch_fns.Written(), tensors)
                    forward = [protocol.several(fn._reference(f, *t)) for f, t in ways]
                names = [o.name for o in fn.program.outputs] + [f"d_{n}" for n, _ in fn.gradients]
                rows = zip(names, [*outs, *grads], [*forward[0], *exact], [*forward[1], *plain], strict=True)
                for what, got, want, eager in rows:
                    off, bound = error(got, want), 2 * error(eager, want) + 2 * torch.finfo(got.dtype).eps
                    ok = same and math.isfinite(off) and off <= bound
                    yield {"program": name, "shape": shape, "mean": mean, "what": what, "error": off, "bound": bound, "ok": ok}


def speed(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Microseconds of a call, and the part of a copy's bandwidth that it reaches."""
    import torch

    from coda_lang.backend_cute import timing

    for name, fn in found.items():
        if name == "between":
            continue
        for shape in TIMED:
            tensors = training_cases.leaves(fn, shape_of(fn, *shape), "cuda")
            outs = protocol.several(fn(*tensors))
            given = [g for g in training_cases.cotangents(outs) if g is not None]
            wanted = [t for t in tensors if t.requires_grad]
            moved = sum(t.nbytes for t in (*tensors, *outs))
            source = torch.empty(moved // 4, dtype=torch.int16, device="cuda")
            target = torch.empty_like(source)
            runs = {"copy": partial(target.copy_, source), "forward": partial(_quietly, fn, tensors)}
            runs["both"] = partial(_step, fn, tensors, wanted, given)
            graphs = {label: timing.graph(partial(_repeat, run)) for label, run in runs.items()}
            times = {label: ms / REPEATS * 1e3 for label, ms in timing.medians(timing.interleaved(graphs)).items()}
            back = sum(t.nbytes for t in (*tensors, *wanted, *given))  # inputs, gradients, cotangents
            rate = moved / times["copy"]
            backward = times["both"] - times["forward"]
            line = {"program": name, "shape": shape, "us": {k: round(v, 2) for k, v in times.items()}, "copy_TBps": round(rate / 1e6, 3)}
            line |= {"forward_of_copy": round(moved / times["forward"] / rate, 3), "backward_of_copy": round(back / backward / rate, 3)}
            yield line


def _quietly(fn: Any, tensors: Any) -> None:
    import torch

    with torch.no_grad():
        fn(*tensors)


def _repeat(run: Any) -> None:
    for _ in range(REPEATS):
        run()


def _step(fn: Any, tensors: Any, wanted: Any, given: Any) -> None:
    import torch

    torch.autograd.grad([o for o in protocol.several(fn(*tensors)) if o.requires_grad], wanted, given)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--quick", action="store_true", help="two shapes, a third of the objects")
    args = parser.parse_args()
    if args.quick:
        global SHAPES, TIMED
        SHAPES, TIMED = SHAPES[::2][:2], TIMED[:1]
    directory, deadline = args.build or args.run, time.time() + (1e9 if args.build else args.limit)
    directory.mkdir(parents=True, exist_ok=True)
    training_objects.use(directory)
    failed = compile_all(directory, deadline)
    print(json.dumps({"failed to compile": failed}), flush=True)
    if args.build:
        training_objects.pack(directory)
        return 1 if failed else 0
    found, bad, lines = functions(directory), 0, []
    for part in (speed, checks):
        for line in part(found):
            lines.append(line)
            bad += not line.get("ok", True)
            if "us" in line or not line["ok"]:
                print(json.dumps(line), flush=True)
            if time.time() > deadline:
                print("no time was left")
                break
    print(json.dumps({"checks": sum("ok" in x for x in lines), "failed": bad}))
    if args.out:
        head = protocol.about(sys.argv)
        args.out.write_text("".join(json.dumps(x) + "\n" for x in (head, *lines)), encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
