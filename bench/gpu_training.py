"""Derivatives on a Hopper GPU: gradients against float64, what autograd may do, configurations, memory tools, speed, a training run.

    python bench/gpu_training.py --run DIR [--parts PART …] [--out FILE] [--limit SECONDS]    # on a GPU; compiles what DIR lacks
    python bench/gpu_training.py --build DIR [--only NAME …]                                  # without one; --run then needs no DSL

Parts: gradients (every program with a derivative at every shape), uses, configs (a sample of each backward Gemm's), sanitizer
(compute-sanitizer, beside the checks), speed, train (bench/train_mlp.py). Buffers of checks start as NaN. A line of JSON a result.
The bound of a gradient is twice the error of the program run op by op in bf16 by torch (`training_cases.Eager`), plus 1e-6; the
error of the program as written (f32 inside) stands beside it. A call that hangs is killed with its process and reported; the next
process goes on after it. A summary comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import gpu_specs, protocol, rows, training_cases, training_checks, training_objects, training_speed  # noqa: E402

PARTS = ("gradients", "uses", "configs", "sanitizer", "speed", "train")
TOOLS = ("memcheck", "racecheck")
TOOL_SECONDS = 120.0
gpu_specs.PATIENCE = 45.0  # seconds: a first call starts torch, and torch.compile takes its time

Job = dict[str, Any]


# --- what to do -----------------------------------------------------------------------------------------------------------


def emit(directory: Path, only: Sequence[str]) -> None:
    """Write the modules of all programs."""
    from coda_lang import driver

    (directory / "modules").mkdir(parents=True, exist_ok=True)
    for source in training_cases.sources():
        if not only or source.stem in only:
            (directory / "modules" / f"{source.stem}.py").write_text(driver.emit(str(source)), encoding="utf-8")


def functions(directory: Path) -> dict[str, Any]:
    """All functions by program, compiling on demand."""
    from coda_lang.backend_cute import load

    found = {}
    for path in sorted((directory / "modules").glob("*.py")):
        for fn in load.functions_of(load.import_file(path)):
            fn.objects = training_cases.Chosen(fn.program, fn.functions, {}, fn.saving)
            found[fn.program.name] = fn
    return found


def jobs_of(found: Mapping[str, Any], parts: Iterable[str]) -> tuple[list[Job], list[Any]]:
    """The jobs in order, each with the keys of the objects it `needs`, and the objects' compilations, those of early jobs first."""
    jobs: list[Job] = []
    objects: dict[str, Any] = {}

    def add(job: Job, fn: Any) -> list[Any]:
        compilations = training_cases.needed(fn, job)
        objects.update({c.key: c for c in compilations if c.key not in objects})
        jobs.append({**job, "needs": [c.key for c in compilations]})
        return compilations

    trained = {name: fn for name, fn in found.items() if fn.backward is not None and name != "mlp_block_lanes"}
    for part in [p for p in PARTS if p in parts]:
        if part in ("gradients", "configs"):
            for name, fn in trained.items():
                job: Job = {"kind": "gradients", "program": name}
                shapes = training_cases.shapes_of(fn)
                if part == "gradients":
                    for shape in shapes:
                        add({**job, "shape": shape}, fn)
                    continue
                ragged = training_cases.shape_of(fn, training_cases.RAGGED)
                if ragged is not None:
                    known = [c for shape in shapes for c in training_cases.needed(fn, {**job, "shape": shape})]
                    for choice in training_cases.samples(fn, known):
                        add({**job, "shape": ragged, "configs": choice, "runs": 3}, fn)
        elif part in ("uses", "sanitizer"):
            names = training_cases.USED if part == "uses" else training_cases.SANITIZED
            size = training_cases.RAGGED if part == "uses" else training_cases.SMALL
            for name in (n for n in names if n in trained):
                kind = "uses" if part == "uses" else "sanitizer"
                add({"kind": kind, "program": name, "shape": training_cases.shape_of(trained[name], size), "runs": 1}, trained[name])
        elif part == "speed" and set(training_speed.PROGRAMS) <= set(found):
            for group in training_speed.Groups.names:
                needs: list[str] = []
                for name, shape in speed_shapes(group).items():
                    kind = "gradients" if group.endswith("training") else "forward"
                    add({"kind": kind, "shape": shape}, found[name])
                    needs += jobs.pop()["needs"]
                jobs.append({"kind": "speed", "group": group, "needs": needs})
        elif part == "train":
            jobs.append({"kind": "train", "needs": []})
    return jobs, list(objects.values())


def speed_shapes(group: str) -> dict[str, dict[str, int]]:
    """The shapes at which a group of measurements calls programs."""
    m, d, f, v = (training_speed.LLAMA_8B[x] for x in "mdfv")
    block = {"m": m, "d": d, "h": d, "f": f}
    gemm = {"swiglu_forward": (2 * f, d), "residual_sumsq": (d, f), "lm_head": (v, d)}
    shapes: dict[str, dict[str, dict[str, int]]] = {
        "swiglu_backward": {
            "swiglu_backward": {"m": m, "d": d, "f": f, "lane": 2},
            "swiglu_backward_interleaved": {"m": m, "d": d, "f": f, "lane": 2},
            "linear_kn": {"m": m, "k": d, "n": f},
        },
        "swiglu_forward": {"swiglu": {"m": m, "d": d, "f": f, "lane": 2}},
        "residual_sumsq": {"residual_sumsq": {"m": m, "k": f, "d": d}},
        "lm_head": {"lm_head": {"m": m, "d": d, "v": v}},
    }
    both = {"mlp_block": block, "mlp_block_lanes": {**block, "lane": 2}}
    found = shapes.get(group, both)
    if group in gemm:
        found["linear_bf16"] = {"m": m, "n": gemm[group][0], "k": gemm[group][1]}
    return found


# --- running: the parent ----------------------------------------------------------------------------------------------------


def run(directory: Path, options: argparse.Namespace) -> int:
    """Compile what is missing, make all calls in worker processes; the exit status."""
    began = time.time()
    training_objects.use(directory)
    emit(directory, options.only)
    jobs, objects = jobs_of(functions(directory), options.parts)
    print(f"{len(jobs)} jobs, {len(objects)} objects; emitted and planned in {time.time() - began:.0f} s", flush=True)
    urgent = {key for job in jobs if job["kind"] == "speed" for key in job["needs"]}
    objects.sort(key=lambda o: o.key not in urgent)
    failed = training_objects.compile_all(objects if options.device == "cuda" else [], options.workers, began + options.compile_limit)
    print(f"compiled by {time.time() - began:.0f} s; {len(failed)} objects failed", flush=True)
    if options.build:
        training_objects.pack(directory)
        for why in failed.values():
            print(why)
        return 1 if failed else 0
    results: list[dict[str, Any]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as sink:
        sink.write(json.dumps(protocol.about(sys.argv)) + "\n")

        def keep(record: dict[str, Any]) -> None:
            record.pop("needs", None)
            results.append(record)
            sink.write(json.dumps(record) + "\n")
            sink.flush()

        possible = []
        for job in jobs:
            why = [failed[key] for key in job["needs"] if key in failed]
            if why and job["kind"] not in ("speed", "sanitizer"):
                keep({**job, "ok": False, "raised": why[0]})
            else:
                possible.append(job)
        deadline = began + options.limit
        checks = [j for j in possible if j["kind"] not in ("speed", "train", "sanitizer")]
        small = [j for j in possible if j["kind"] == "sanitizer" and not any(k in failed for k in j["needs"])]
        tools = [start_tool(tool, directory, small) for tool in TOOLS] if small else []
        _run_jobs(directory, checks, keep, deadline, options.device)
        for tool in tools:
            keep(end_tool(*tool))
        _run_jobs(directory, [j for j in possible if j["kind"] in ("speed", "train")], keep, deadline, options.device)
    asked = len(jobs) - sum(j["kind"] == "sanitizer" for j in jobs) + len(tools)
    return summarise(results, asked, time.time() - began)


def _run_jobs(directory: Path, jobs: list[Job], keep: Any, deadline: float, device: str) -> None:
    """Run jobs in one process after another."""
    listed = directory / "jobs.json"
    listed.write_text(json.dumps(jobs))
    index = 0
    while index < len(jobs) and time.time() < deadline:
        command = [sys.executable, __file__, "--work", str(directory), "--jobs", str(listed), "--start", str(index), "--device", device]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        index = gpu_specs._watch(process, jobs, index, keep, deadline)


def start_tool(tool: str, directory: Path, jobs: list[Job]) -> tuple[str, Any, Path, float]:
    """Start a tool of compute-sanitizer on small calls; every buffer is an allocation of its own, so that its bounds are watched."""
    listed, log = directory / f"{tool}.json", directory / f"{tool}.log"
    listed.write_text(json.dumps(jobs))
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [program, "--tool", tool, sys.executable, __file__, "--work", str(directory), "--jobs", str(listed), "--plain"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        with log.open("w") as out:
            return tool, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment), log, time.time()
    except OSError as problem:
        log.write_text(str(problem))
        return tool, None, log, time.time()


def end_tool(tool: str, process: Any, log: Path, began: float) -> dict[str, Any]:
    """Wait for a tool, read what it found."""
    status: Any = "not started"
    if process is not None:
        try:
            status = process.wait(max(TOOL_SECONDS - (time.time() - began), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            status = "killed after " + str(int(TOOL_SECONDS)) + " s"
    return {"kind": "sanitizer", "tool": tool, **read_tool(log.read_text(errors="replace")), "status": status}


def read_tool(text: str) -> dict[str, Any]:
    """What a tool's log says: clean, errors, or that it refused to run."""
    lines = text.splitlines()
    summaries = [line for line in lines if "SUMMARY:" in line]
    ran = [line.split()[1] for line in lines if line.startswith("sanitized ")]
    clean = bool(summaries) and all(" 0 errors" in s or "(0 errors" in s or "0 hazards" in s for s in summaries) and bool(ran)
    found = [line for line in lines if line.startswith("=====") and line.strip("= ")]
    said = [] if clean else (found or lines)[:12]
    return {"ok": clean, "summary": summaries or ["no summary: the tool was refused, or did not end"], "ran": ran, "said": said}


def summarise(results: list[dict[str, Any]], asked: int, seconds: float) -> int:
    """Print what came out; 0 if all jobs were done and all are right."""
    bad = [r for r in results if not r["ok"]]
    table: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        if "gradients" in r:
            table.setdefault(r["program"], []).append(r)
    for r in bad[:25]:
        print(json.dumps(r)[:900])
    for program, records in table.items():
        worst = max((g["error"] / g["bound"], name) for r in records for name, g in r["gradients"].items())
        against = max(g["error"] / (2 * g["written"] + 1e-6) for r in records for g in r["gradients"].values())
        flags = [f for f in ("repeatable", "outputs_same", "unwritten") if not all(r[f] for r in records)]
        wrong = f"{sum(not r['ok'] for r in records)} wrong{', not ' + ', not '.join(flags) if flags else ''}"
        told = f"worst {worst[0]:.2f} of its bound ({worst[1]}), {against:.2f} of one from f32 inside"
        print(f"  {program:24} {len(records):3} calls, {wrong}; {told}")
    for r in results:
        if "uses" in r:
            print(f"  {r['program']:24} uses: {'all right' if r['ok'] else r['uses']}")
        elif r["kind"] == "sanitizer":
            print(f"  compute-sanitizer {r['tool']}: {r['summary'][-1]}; ran {len(r['ran'])} programs")
        elif "ratios" in r:
            print(f"  {r['group']:20} {r['ms']} ms; {r['ratios']}")
        elif r["kind"] == "train" and "noise" in r:
            print(f"  training: {r['noise']}")
    print(f"{len(results)} of {asked} jobs, {len(bad)} not right, in {seconds:.0f} s")
    return 1 if bad or len(results) < asked else 0


# --- running: the worker ----------------------------------------------------------------------------------------------------


def work(directory: Path, jobs: list[Job], start: int, plain: bool, device: str = "cuda") -> None:
    """Do jobs from `start` on, a JSON line each; `plain` only makes the calls, for memory tools."""
    import torch

    from coda_lang.backend_cute import host

    training_objects.use(directory)
    torch.backends.cuda.matmul.allow_tf32 = False
    allocate = host.allocate
    found = functions(directory)
    for index in range(start, len(jobs)):
        job, began = jobs[index], time.time()
        host.allocate = allocate if plain or job["kind"] in ("speed", "train") else rows.poisoning
        if plain:
            call_once(found[job["program"]], job["shape"], device)
            print(f"sanitized {job['program']}", flush=True)
            continue
        try:
            answer = do(found, job, directory, device)
        except Exception as problem:
            text = f"{type(problem).__name__}: {problem}"
            answer = {"ok": False, "raised": text[:900], "fatal": "CUDA error" in text or "illegal" in text}
        record = {**job, **answer, "job": index, "seconds": round(time.time() - began, 3)}
        record.pop("needs", None)
        print(json.dumps(record), flush=True)
        if answer.get("fatal"):
            return
        if device == "cuda" and torch.cuda.memory_reserved() > 20 << 30:
            torch.cuda.empty_cache()


def do(found: Mapping[str, Any], job: Job, directory: Path, device: str) -> dict[str, Any]:
    """One job."""
    if job["kind"] == "speed":
        return training_speed.measure(training_speed.Groups(found, device), job["group"])
    if job["kind"] == "train":
        from bench import train_mlp

        return train_mlp.compare(device, out=directory / "train_mlp.json")
    fn = found[job["program"]]
    return training_checks.uses(fn, job, device) if job["kind"] == "uses" else training_checks.check(fn, job, device)


def call_once(fn: Any, shape: Mapping[str, int], device: str) -> None:
    """Forward and backward, and nothing else that launches kernels of ours."""
    tensors = training_cases.leaves(fn, shape, device)
    outputs = protocol.several(fn(*tensors))
    training_cases.gradients(outputs, tensors, training_cases.cotangents(outputs))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verb = parser.add_mutually_exclusive_group(required=True)
    verb.add_argument("--build", type=Path, metavar="DIR")
    verb.add_argument("--run", type=Path, metavar="DIR")
    verb.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run (default all)")
    parser.add_argument("--only", nargs="*", default=[], help="names of sources (default all)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--compile-limit", type=float, default=150.0, help="seconds after which nothing more is compiled ahead")
    parser.add_argument("--out", type=Path, default=Path("gpu_training.jsonl"))
    parser.add_argument("--limit", type=float, default=290.0, help="seconds for everything (default 290)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal by the twin, nothing is compiled")
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, json.loads(options.jobs.read_text()), options.start, options.plain, options.device)
        return 0
    if options.build:
        options.compile_limit = 1e9
    return run(options.build or options.run, options)


if __name__ == "__main__":
    raise SystemExit(main())
