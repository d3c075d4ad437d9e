"""Everything that no card has run on today's device code, in a fixed order, within a time: for the next hour on a Hopper GPU.

    python bench/gpu_pending.py --out DIR [--limit SECONDS] [--steps NAME …]
    python bench/gpu_pending.py --list      # the steps, how long each takes, what it shows; needs no GPU

In: a checkout, a GPU, what the steps need (`--list` says it). Out: two files, DIR/pending.jsonl (a line a step: exit status, seconds, the
end of what it printed) and DIR/results.zip (the files and the log of each). A step that ended well at this commit on this device is not
run again, and one that was cut off finds the files that it had written, so a run goes on where another ended, on another machine too if
DIR came along. A step begins only if a third of its time is left, and is ended when the time is up. Non-goals: judging figures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LOG = 200_000  # characters of a step's log that are kept, its end
TAIL = 1500  # of them in its line
OVER = 2.0  # times what a step is expected to take, after which it is ended


@dataclass(frozen=True)
class Step:
    """One thing to run. Words of commands may hold {dir}, a folder of the step's own, {build}, one for compiled objects that all steps
    share, and {limit}, the seconds it has. `seconds` are what it is expected to take on an H200 with 16 cores, compilation included.
    `results` are files that it leaves in {dir}; one that begins with ">" takes what the last command prints."""

    name: str
    shows: str
    seconds: int
    commands: tuple[tuple[str, ...], ...]
    results: tuple[str, ...] = ()
    needs: str = ""


def script(name: str, *words: str) -> tuple[str, ...]:
    """A script of bench/ with its words."""
    return (f"bench/{name}.py", *words)


TRAINING = ("--run", "{build}/training", "--out", "{dir}/training.jsonl", "--limit", "{limit}", "--parts")
MEASURED = ("--shape", "m=8192,d=4096,f=14336", "--json")
STEPS = (
    Step("tests", "gradient rows 3 to 9 and 13, and the known failures, by kernels", 90,
         (("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/test_gradient_rows.py", "tests/test_known_failures.py"),),
         needs="pytest"),
    Step("uses", "what autograd may do, accumulate_into inside the kernel; compute-sanitizer on small shapes", 200,
         (script("gpu_training", *TRAINING, "uses", "sanitizer"),), ("training.jsonl",), "compute-sanitizer"),
    Step("host", "host time of a call, forward and with backward", 40,
         (script("host_time", "--calls", "500", "--out", "{dir}/host_time.jsonl"),), ("host_time.jsonl",)),
    Step("functions", "scalar functions and finishers against float64", 180,
         (script("gpu_functions", "--build", "{build}/functions"), script("gpu_functions", "--run", "{build}/functions")),
         (">functions.jsonl",)),
    Step("norms", "norms against float64, and their bandwidth beside a copy's", 200,
         (script("gpu_norms", "--run", "{build}/norms", "--out", "{dir}/norms.jsonl", "--limit", "{limit}"),), ("norms.jsonl",)),
    Step("together", "what launches of several gain", 350,
         (script("gpu_together", "--parts", "time", "--out", "{dir}", "--limit", "{limit}"),), ("together.jsonl",)),
    Step("roofs", "every kernel of a layer, forward and backward, against its roofline", 120,
         (("-m", "coda_lang", "bench", "specs/llama/layer.coda", *MEASURED),), (">roofs_layer.json",)),
    Step("layers", "layers and the loss beside eager, torch.compile, Liger", 220,
         (script("gpu_layers", "--out", "{dir}/layers.jsonl", "--limit", "{limit}"),), ("layers.jsonl",)),
    Step("fused", "fused kernels beside torch.compile and their products", 180,
         (script("gpu_training", *TRAINING, "speed"),), ("training.jsonl",)),
    Step("rivals", "fused kernels beside everyone that imports, LLaMA-3-8B", 450,
         (script("gpu_rivals", "--models", "8B", "--tokens", "8192", "--adapters", "coda", "coda_chunked", "gemm", "compile", "liger",
                 "quack", "coda_kernels", "--out", "{dir}/rivals.jsonl", "--limit", "{limit}"),), ("rivals.jsonl",)),
    Step("schedules", "products of few rows with K in parts: compared, then timed", 120,
         (("-m", "coda_lang", "tune", "specs/linear_residual.coda", "--shape", "m=64,k=8192,n=2048"),)),
    Step("models", "whole models and every program of specs/*/ against float64", 280,
         (script("gpu_models", "--parts", "model", "programs", "--out", "{dir}", "--limit", "{limit}"),), ("models.jsonl",)),
    Step("train", "a small LLaMA on text: curves for the picture", 90,
         (script("gpu_models", "--parts", "train", "--out", "{dir}", "--limit", "{limit}"),), ("models.jsonl", "train_llama.json")),
    Step("together_configs", "launches of several in every configuration against float64", 350,
         (script("gpu_together", "--parts", "configs", "--out", "{dir}", "--limit", "{limit}"),), ("together.jsonl",)),
    Step("specs", "every program of specs/ at every size against float64", 480,
         (script("gpu_specs", "--build", "{build}/specs", "--configs", "2", "--workers", "16"),
          script("gpu_specs", "--run", "{build}/specs", "--out", "{dir}/specs.jsonl", "--limit", "{limit}")), ("specs.jsonl",)),
    Step("gradients", "gradients of every program, and in other configurations", 480,
         (script("gpu_training", *TRAINING, "gradients", "configs"),), ("training.jsonl",)),
    Step("most", "torch.compile's max-autotune, and the other models' shapes", 600,
         (script("gpu_rivals", "--only", "gemm", "swiglu", "residual_rms", "--adapters", "coda", "gemm", "compile", "compile_max",
                 "--out", "{dir}/rivals.jsonl", "--limit", "{limit}"),), ("rivals.jsonl",)),
)  # fmt: skip


def run(options: argparse.Namespace, steps: Sequence[Step] = STEPS) -> int:
    """The steps that are not done, until the limit; the exit status is 0 if all of them ended well."""
    from bench import protocol

    began, good = time.time(), True
    head = {k: v for k, v in protocol.about(sys.argv).items() if k != "driver"}  # results say it; another machine may have another
    sheet = protocol.Sheet(options.out / "pending.jsonl", head, ("step", "ok"))
    for step in steps:
        if options.steps and step.name not in options.steps or sheet.has(step=step.name, ok=True):
            continue
        left = options.limit - (time.time() - began)
        if left < step.seconds / 3:
            print(f"{step.name}: {step.seconds} s are wanted, {left:.0f} are left", flush=True)
            good = False
            continue
        with tempfile.TemporaryDirectory() as folder:
            restore(options.out / "results.zip", step, Path(folder))
            record = attempt(step, Path(folder), min(left, step.seconds * OVER))
            keep(options.out / "results.zip", step, Path(folder))
        good &= record["ok"]
        sheet.add(record)
    return 0 if good else 1


def attempt(step: Step, folder: Path, limit: float) -> dict[str, Any]:
    """Run a step's commands; its line."""
    began, status = time.time(), "not started"
    log = folder / "log.txt"
    # What a script is told to keep to lies below what ends it, so that it can write down what it has.
    build = Path(tempfile.gettempdir()) / "coda_lang-pending"
    build.mkdir(exist_ok=True)
    words = {"dir": str(folder), "build": str(build), "limit": str(int(limit * 0.9))}
    ok = True
    for place, command in enumerate(step.commands):
        argv = [sys.executable, *(word.format(**words) for word in command)]
        printed = [r[1:] for r in step.results if r.startswith(">")] if place == len(step.commands) - 1 else []
        with log.open("a", encoding="utf-8") as errors, (folder / printed[0] if printed else log).open("a", encoding="utf-8") as out:
            process = subprocess.Popen(argv, cwd=ROOT, stdout=out, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                status = str(process.wait(max(limit - (time.time() - began), 1)))
            except subprocess.TimeoutExpired:
                status = f"ended after {limit:.0f} s"
                end(process)
        ok &= status == "0"
        if not ok:
            break
    text = log.read_text(encoding="utf-8", errors="replace")
    log.write_text(text[-LOG:], encoding="utf-8")
    return {"step": step.name, "ok": ok, "status": status, "seconds": round(time.time() - began), "said": text[-TAIL:]}


def end(process: Any) -> None:
    """End a command and what it started."""
    import os
    import signal

    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def restore(source: Path, step: Step, folder: Path) -> None:
    """Put back what an earlier attempt of a step left: scripts that can go on from it do."""
    if source.is_file():
        with zipfile.ZipFile(source) as held:
            for name in (r for r in step.results if not r.startswith(">") and f"{step.name}/{r}" in held.namelist()):
                (folder / name).write_bytes(held.read(f"{step.name}/{name}"))


def keep(target: Path, step: Step, folder: Path) -> None:
    """Put a step's files into the archive, in place of those of an earlier attempt."""
    held: dict[str, bytes] = {}
    if target.is_file():
        with zipfile.ZipFile(target) as old:
            held = {name: old.read(name) for name in old.namelist() if not name.startswith(f"{step.name}/")}
    for name in ("log.txt", *(r.removeprefix(">") for r in step.results)):
        if (folder / name).is_file():
            held[f"{step.name}/{name}"] = (folder / name).read_bytes()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in held.items():
            new.writestr(name, content)


def listing(steps: Sequence[Step] = STEPS) -> str:
    """The steps as a table in Markdown."""
    lines = ["| step | expected | shows | command |", "|---|---|---|---|"]
    for s in steps:
        words: Mapping[str, str] = {"dir": "DIR", "build": "BUILD", "limit": "SECONDS"}
        commands = ", then ".join("`" + " ".join(w.format(**words) for w in c) + "`" for c in s.commands)
        lines.append(f"| {s.name} | {s.seconds} s | {s.shows}{f' (needs {s.needs})' if s.needs else ''} | {commands} |")
    return "\n".join([*lines, "", f"{sum(s.seconds for s in steps)} s in all."])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("pending"))
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds for everything (default 1500)")
    parser.add_argument("--steps", nargs="+", default=[], choices=[s.name for s in STEPS], help="those alone, in their order")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print(listing())
        return 0
    from bench import need_gpu

    need_gpu.insist()
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
