"""Every curated program on a Hopper GPU, against float64, from objects compiled on a machine without one.

    python bench/gpu_specs.py --build DIR [--configs N] [--only NAME …]     # needs nvidia-cutlass-dsl and a C compiler, no GPU
    python bench/gpu_specs.py --run DIR [--out FILE] [--limit SECONDS]      # needs torch and apache-tvm-ffi; cutlass is not imported

Each program of specs/*.coda and bench/rows.coda runs at every (M, N, K) among 1, 7, 128, 1000, 4096 that its fixed axes allow, and at
a shape of LLaMA-3-8B, with every configuration built; buffers start as NaN. A line of JSON a call: relative Frobenius error of each
output against float64, beside what the same program in eager PyTorch has (twice that and a little bounds it, `eager.bound`), and the
distance from `reference_planned` in units of the last place (16-bit outputs: at most 2, or 8 where a rounded value is read on).
And the rows of bench/rows.py.
A call that hangs is killed with its process and reported; the next process goes on after it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import math
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RUNTIME = "libcute_dsl_runtime.so"
SIZES = (1, 7, 128, 1000, 4096)
LLAMA = {"m": 4096, "n": 14336, "k": 4096}  # LLaMA-3-8B: tokens, the MLP's width, the model's width
VOCABULARY = 128256
FEW = ((1, 7, 128), (7, 1000, 1000), (128, 128, 4096), (1000, 1000, 7), (1000, 4096, 128), (4096, 128, 1000), (4096, 4096, 4096))
TYPICAL = ((4096, 4096, 4096), (128, 4096, 4096), (1000, 1000, 1000), (7, 128, 128))  # whose default configurations are built
KINDS = ((True, 1, 1), (False, 2, 1), (True, 1, 2), (False, 1, 1), (True, 2, 1), (False, 1, 2))  # ping-pong, cluster
MAX_ULPS = 2.0  # of a 16-bit output between kernels and planned reference, whose f32 sums are in another order
ROUNDED_ULPS = 8.0  # the same, where the program rounds a value that it reads on: one may fall to the other side
PATIENCE = 60.0  # seconds for one call


# --- shapes --------------------------------------------------------------------------------------------------------------


def extents_of(program: Any, m: int, n: int, k: int) -> dict[str, int] | None:
    """Extents that give m rows, n columns and depth k as nearly as the fixed axes allow; None where no call can have them."""
    from coda_lang.backend_cute import spec
    from coda_lang.backend_cute.binding import bind
    from coda_lang.backend_cute.errors import CallError

    gemm = spec.gemms(spec.launches(program)[0])[0]
    extents = {name: size for name, size in program.extents if size is not None}
    same = {other: one for one, other in program.equal}
    for sizes, wanted in ((gemm.rows, m), (gemm.cols, n)):
        free = [same.get(s, s) for s in sizes if isinstance(s, str) and same.get(s, s) not in extents]
        fixed = math.prod(s if isinstance(s, int) else extents.get(same.get(s, s), 1) for s in sizes)
        if free and wanted % fixed and wanted > fixed:
            wanted = wanted // fixed * fixed
        for axis in free[:1]:
            extents[axis] = max(wanted // fixed, 1)
        for axis in free[1:]:
            extents[axis] = 1
    depths = [a for product in gemm.products for a in _inner(gemm, product)]
    for i, axis in enumerate(dict.fromkeys(a for a in depths if a not in extents)):
        extents[axis] = k if i == 0 else max(min(k, 64), 1)
    for name, _ in program.extents:
        extents.setdefault(name, extents.get(same.get(name, name), k))
    try:
        bind(program, [tuple(extents[a] for a in argument.axes) for argument in program.inputs])
    except CallError:
        return None
    return extents


def _inner(gemm: Any, product: Any) -> Iterator[str]:
    record = next(t for t in gemm.tensors if t.name == product.a.tensor)
    for mode in product.a.cols:
        yield from record.modes[mode]


def shapes_of(program: Any, every: bool) -> list[dict[str, int]]:
    """The distinct shapes to run a program at, the largest last."""
    asked = list(itertools.product(SIZES, repeat=3)) if every else list(FEW)
    wide = VOCABULARY if any(a in ("v", "vocab") for a, _ in program.extents) else LLAMA["n"]
    asked.append((LLAMA["m"], wide, LLAMA["k"]))
    found: list[dict[str, int]] = []
    for sizes in sorted(asked, key=math.prod):
        extents = extents_of(program, *sizes)
        if extents is not None and extents not in found:
            found.append(extents)
    return found


# --- building ------------------------------------------------------------------------------------------------------------


def sources() -> list[Path]:
    """The programs to run."""
    return [*sorted((ROOT / "specs").glob("*.coda")), ROOT / "bench" / "rows.coda"]


def chosen(gemm: Any, count: int, whole: Any = None) -> list[Any]:
    """Configurations of a launch (a variant of `whole`) to build: defaults of typical shapes, then a spread of others, `count` in all."""
    from coda_lang.backend_cute import configs

    offered = configs.candidates(gemm, whole)
    picked = list(dict.fromkeys(configs.default(gemm, *sizes, whole=whole) for sizes in TYPICAL))[: max(count // 2, 1)]
    spread = [c for kind in KINDS for c in offered if (c.pingpong, c.cluster_m, c.cluster_n) == kind and c.tile_m > 64]
    firsts = {(c.pingpong, c.cluster_m, c.cluster_n): c for c in reversed(spread)}
    return list(dict.fromkeys([*picked, *(firsts[kind] for kind in KINDS if kind in firsts), *offered]))[:count]


def build(directory: Path, count: int, only: list[str], workers: int) -> None:
    from coda_lang import driver
    from coda_lang.backend_cute import compile, spec
    from coda_lang.backend_cute.configs import variants
    from coda_lang.backend_cute.load import functions_of, import_file

    for source in sources():
        if only and source.stem not in only:
            continue
        began, folder = time.time(), directory / source.stem
        folder.mkdir(parents=True, exist_ok=True)
        module = folder / "kernel.py"
        module.write_text(driver.emit(str(source)), encoding="utf-8")
        functions = functions_of(import_file(module))
        gemms = [k for fn in functions for k in spec.built(fn.program) if not isinstance(k, spec.Finish)]
        whole = variants(functions)
        configs = {gemm.name: chosen(gemm, 1 if source.stem == "rows" else count, whole[gemm.name]) for gemm in gemms}
        scalar = {name: f for fn in functions for name, f in fn.functions.items()}
        copied = Path(tempfile.mkdtemp()) / module.name  # build copies the module in
        shutil.copyfile(module, copied)
        built = compile.build([fn.program for fn in functions], scalar, folder, configs=configs, module=copied, workers=workers)
        print(f"{source.stem}: {len(built.entries)} objects, {time.time() - began:.0f} s", flush=True)
    packed = directory / f"{RUNTIME}.xz"
    if not packed.exists():
        packed.write_bytes(lzma.compress(compile.runtime_library().read_bytes(), preset=6))


# --- running: the parent ---------------------------------------------------------------------------------------------------


def jobs_of(directory: Path) -> list[dict[str, Any]]:
    """All calls to make: rows first, then each program with the best configuration built at every shape, then the others at a few."""
    from coda_lang.backend_cute import load, spec

    first: list[dict[str, Any]] = [{"build": "rows", "program": "", "row": True}] if (directory / "rows").is_dir() else []
    every, few = [], []
    for folder in sorted(p for p in directory.iterdir() if p.is_dir()):
        for fn in load.load(folder):
            job = {"build": folder.name, "program": fn.program.name}
            keys = fn.objects.build.configs(spec.launches(fn.program)[0])
            every += [{**job, "config": "", "shape": e} for e in shapes_of(fn.program, folder.name != "rows")]
            few += [{**job, "config": key, "shape": e} for key in keys for e in shapes_of(fn.program, False)[:-1] if len(keys) > 1]
    return first + few + every


def run(directory: Path, out: Path, limit: float) -> int:
    """Make all calls in worker processes; the exit status."""
    deadline = time.time() + limit
    runtime = Path(tempfile.mkdtemp()) / RUNTIME
    runtime.write_bytes(lzma.decompress((directory / f"{RUNTIME}.xz").read_bytes()))
    jobs = jobs_of(directory)
    listed = runtime.parent / "jobs.json"
    listed.write_text(json.dumps(jobs))
    environment = {**os.environ, "CODA_DSL_RUNTIME": str(runtime)}
    results: list[dict[str, Any]] = []
    from bench import protocol

    with out.open("w", encoding="utf-8") as sink:
        sink.write(json.dumps(protocol.about(sys.argv)) + "\n")

        def keep(record: dict[str, Any]) -> None:
            results.append(record)
            sink.write(json.dumps(record) + "\n")
            sink.flush()

        index = 0
        while index < len(jobs) and time.time() < deadline:
            command = [sys.executable, __file__, "--work", str(directory), "--jobs", str(listed), "--start", str(index)]
            index = _watch(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment), jobs, index, keep, deadline)
    return summarise(results, len(jobs))


def _watch(process: Any, jobs: list[dict[str, Any]], index: int, keep: Any, deadline: float) -> int:
    """Read one worker's answers until it ends, hangs or time is up; the index of the next job."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=lambda: [lines.put(line) for line in process.stdout] + [lines.put(None)], daemon=True).start()
    while index < len(jobs) and time.time() < deadline:
        try:
            line = lines.get(timeout=PATIENCE)
        except queue.Empty:
            line = ""
        if line and line.startswith("{"):
            record = json.loads(line)
            keep(record)
            index = record["job"] + 1
            if not record.get("fatal"):
                continue
            break
        if line:
            continue
        reason = f"hung for {PATIENCE:.0f} s" if line == "" else f"the process ended with status {process.wait()}"
        keep({"job": index, **jobs[index], "ok": False, "raised": reason})
        index += 1
        break
    process.kill()
    process.wait()
    return index


def summarise(results: list[dict[str, Any]], asked: int) -> int:
    """Print what came out; 0 if all calls were made and all are right."""
    bad = [r for r in results if not r["ok"]]
    print(f"{len(results)} of {asked} ran, {len(bad)} failed")
    table: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        if "outputs" in r:
            table.setdefault(r["program"], []).append(r)
    for program, records in table.items():
        calls = [o for r in records for o in r["outputs"].values()]
        ratio = max((o["error"] / o["bound"] for o in calls if o["bound"]), default=0.0)
        ulps = max((o["ulps"] for o in calls), default=0.0)
        wrong = sum(not r["ok"] for r in records)
        print(f"  {program:28} {len(records):4} calls, {wrong} wrong; worst error {ratio:.2f} of its bound; {ulps:g} ulps from planned")
    for r in bad[:30]:
        print(json.dumps(r)[:700])
    return 1 if bad or len(results) < asked else 0


# --- running: the worker ---------------------------------------------------------------------------------------------------


def work(directory: Path, jobs: list[dict[str, Any]], start: int) -> None:
    """Make calls from `start` on, a JSON line each."""
    import torch

    from bench import rows
    from coda_lang.backend_cute import host, load

    torch.backends.cuda.matmul.allow_tf32 = False
    host.allocate = rows.poisoning
    builds: dict[str, dict[str, Any]] = {}
    for index in range(start, len(jobs)):
        job, began = jobs[index], time.time()
        try:
            if job["build"] not in builds:
                builds[job["build"]] = {fn.program.name: fn for fn in load.load(directory / job["build"])}
            if job.get("row"):
                found = rows.run_all(rows.Room(torch.device("cuda"), builds["rows"]))
                answer: dict[str, Any] = {"ok": not any(found.values()), "rows": found}
            else:
                answer = compare(builds[job["build"]][job["program"]], job)
        except Exception as problem:
            text = f"{type(problem).__name__}: {problem}"
            answer = {"ok": False, "raised": text[:600], "fatal": "CUDA error" in text or "illegal" in text}
        assert "cutlass" not in sys.modules
        print(json.dumps({"job": index, **job, **answer, "seconds": round(time.time() - began, 3)}), flush=True)
        if answer.get("fatal"):
            return


def compare(fn: Any, job: dict[str, Any]) -> dict[str, Any]:
    """One call against float64, and against the planned reference."""
    import torch

    from coda_lang.backend_cute import eager, selfcheck
    from coda_lang.backend_cute.errors import CallError

    fn.objects.among = (job["config"],) if job["config"] else ()
    fn.forget()
    extents = job["shape"]
    tensors = selfcheck.inputs(fn.program, extents, 0, "cuda")
    with torch.no_grad():
        try:
            explained = fn.explain(*tensors)
        except CallError as problem:
            return {"ok": False, "raised": str(problem)[:600]}
        got = _tuple(fn(*tensors))
        torch.cuda.synchronize()
        again = _tuple(fn(*tensors))
        exact = _tuple(fn.reference(*tensors, exact=True))
        baseline, planned = _tuple(fn.reference(*tensors, library=eager.Eager())), _tuple(fn.reference_planned(*tensors))
    most = ROUNDED_ULPS if any({"bf16", "f16"} & set(f.__code__.co_names) for f in fn.functions.values()) else MAX_ULPS
    outputs: dict[str, Any] = {}
    for output, g, a, e, w, p in zip(fn.program.outputs, got, again, exact, baseline, planned, strict=True):
        error, bound = selfcheck.error(g, e), eager.bound(selfcheck.error(w, e), fn.program, extents, "cuda")
        outputs[output.name] = {"error": error, "bound": bound, "ulps": ulps(g, p), "repeatable": bool(torch.equal(_bits(g), _bits(a)))}
        near = outputs[output.name]["ulps"] <= (most if output.dtype in ("bf16", "f16") else math.inf)
        outputs[output.name]["ok"] = error <= bound and near and outputs[output.name]["repeatable"]
    good = fn.last_path == "kernels" and all(o["ok"] for o in outputs.values())
    return {"ok": good, "tiles": explained.configs, "copies": len(explained.copies), "outputs": outputs}


def _bits(t: Any) -> Any:
    import torch

    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}.get(t.element_size(), torch.uint8))


def ulps(a: Any, b: Any) -> float:
    """The largest distance in units of the last place, of elements far below the largest one in units of what f32 sums are exact to."""
    import torch

    if not a.is_floating_point():
        return float((a != b).sum())
    digits, floor = {torch.bfloat16: (8, 2.0**-8), torch.float16: (11, 2.0**-5), torch.float32: (24, 1.0)}[a.dtype]
    x, y = a.double().nan_to_num(), b.double().nan_to_num()
    if not x.numel():
        return 0.0
    scale = torch.maximum(x.abs(), y.abs())
    unit = torch.exp2(torch.floor(torch.log2(torch.maximum(scale, scale.max() * floor).clamp_min(1e-300))) - digits + 1)
    return float(((x - y).abs() / unit).max())


def _tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verb = parser.add_mutually_exclusive_group(required=True)
    verb.add_argument("--build", type=Path, metavar="DIR")
    verb.add_argument("--run", type=Path, metavar="DIR")
    verb.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--configs", type=int, default=4, help="configurations to build for each Gemm (default 4)")
    parser.add_argument("--only", nargs="*", default=[], help="names of sources to build")
    parser.add_argument("--workers", type=int, default=2, help="processes that compile (default 2)")
    parser.add_argument("--out", type=Path, default=Path("gpu_specs.jsonl"))
    parser.add_argument("--limit", type=float, default=280.0, help="seconds for all calls (default 280)")
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build(options.build, options.configs, options.only, options.workers)
        return 0
    if options.run:
        return run(options.run, options.out, options.limit)
    work(options.work, json.loads(options.jobs.read_text()), options.start)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
