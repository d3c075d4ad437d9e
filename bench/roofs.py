"""Rooflines of what was measured: for each kernel its bytes, FLOPs, floor, and the time it took.

    python -m bench.roofs     # counts the kernels of today's plans into bench/results/counts.jsonl

In: bench/results. Out: `Point`s of kernels that were timed by themselves; `Step`s, the kernels of a whole layer with their floors alone.
Counts are those of `coda_lang.backend_cute.roofline`, kept in a file as of the commit that it names: figures do not move with a later plan.
Non-goals: measuring (`codac bench`), drawing (`plots`).
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")) if p not in sys.path]

from bench import gpu_configs, gpu_layers, training_speed  # noqa: E402
from coda_lang.backend_cute import derivative, roofline  # noqa: E402

RESULTS = ROOT / "bench" / "results"
PEAK = next(p for p in roofline.PEAKS if p.name == "NVIDIA H200")
FUSED = {  # groups of fused_speed_h200.jsonl that are one program: what it is, its source, its program by method
    "swiglu_forward": ("gate-up and swiglu, pre-activation stored", "specs/swiglu.coda", {"coda": "swiglu"}),
    "residual_sumsq": ("down, residual, row sums of squares, two stores", "specs/residual_sumsq.coda", {"coda": "residual_sumsq"}),
    "lm_head": ("lm-head and logsumexp, logits not stored", "specs/lm_head_lse.coda", {"coda": "lm_head"}),
    "swiglu_backward": (
        "swiglu backward on the dgrad GEMM", "bench/training.coda",
        {"coda": "swiglu_backward", "coda_interleaved": "swiglu_backward_interleaved"},
    ),
}  # fmt: skip
TOLD = re.compile(r"^  (\w+) +(\d+x\w+|) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +[\d.]+x +(memory|tensor cores)$", re.M)


@functools.cache
def records(name: str) -> tuple[dict[str, Any], ...]:
    """The lines of a file of results; the first says what it is."""
    return tuple(json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines())


@dataclass(frozen=True)
class Point:
    """A kernel (with its finisher) that was timed by itself."""

    name: str
    raw: str
    bytes: int
    flops: int
    ms: float

    @property
    def floor_ms(self) -> float:
        """The least time by the data sheet."""
        return PEAK.floor_ms(self.bytes, self.flops)

    @property
    def bound(self) -> str:
        return PEAK.bound(self.bytes, self.flops)

    @property
    def distance(self) -> float:
        """Times the floor."""
        return self.ms / self.floor_ms

    @property
    def rate(self) -> float:
        """FLOPs a second."""
        return self.flops / self.ms * 1e3

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes


def product(m: int, n: int, k: int, ms: float, name: str = "") -> Point:
    """A plain product of 16-bit matrices."""
    return Point(name, "configs_h200.jsonl", 2 * (m * k + n * k + m * n), 2 * m * n * k, ms)


def plain() -> Iterator[tuple[gpu_configs.Judged, Point]]:
    """Plain products of many rows, in the configuration that the model takes."""
    for x in gpu_configs.judged(records("configs_h200.jsonl")):
        if not x.few:
            name = f"product {x.m} × {x.n} × {x.k}" if x.layout == "kk" else f"product {x.m} × {x.n} × {x.k}, {x.layout}"
            yield x, product(x.m, x.n, x.k, x.ms[x.taken], name)


def fused() -> Iterator[Point]:
    """Fused kernels at LLaMA-3-8B's sizes."""
    found = {r["group"]: r["ms"] for r in records("fused_speed_h200.jsonl") if "group" in r}
    counted = {(r["group"], r["method"]): r for r in records("counts.jsonl") if "group" in r}
    for group, (what, _, programs) in FUSED.items():
        for method in programs:
            kind = f", {method.removeprefix('coda_')}" if method != "coda" else ""
            count = counted[group, method]
            yield Point(what + kind, "fused_speed_h200.jsonl", count["bytes"], count["flops"], found[group][method])


def told() -> Iterator[Point]:
    """Kernels that `codac bench` timed one by one."""
    text = (RESULTS / "tune_bench_host_h200.txt").read_text(encoding="utf-8")
    seen = set()
    for name, config, moved, flops, _, ms, _ in TOLD.findall(text):
        if name not in seen:
            seen.add(name)
            yield Point(f"{name} ({config})", "tune_bench_host_h200.txt", round(float(moved) * 1e6), round(float(flops) * 1e9), float(ms))
    for path in sorted(RESULTS.glob("roofs_*.json")):  # what `codac bench --json` prints
        for report in json.loads(path.read_text(encoding="utf-8")):
            for k in report["kernels"]:
                if k["kernel"] not in seen:
                    seen.add(k["kernel"])
                    yield Point(
                        f"{k['kernel']} ({k['config']})" if k["config"] else k["kernel"], path.name, k["bytes"], k["flops"], k["ms"]
                    )


@dataclass(frozen=True)
class Step:
    """A kernel of a layer: its floor, what memory and what the tensor cores take by themselves, and its bytes beyond its products' own."""

    kernel: str
    bytes: int
    flops: int
    beside: int

    @property
    def memory_ms(self) -> float:
        return self.bytes / PEAK.bytes_per_second * 1e3

    @property
    def tensor_ms(self) -> float:
        return self.flops / PEAK.flops_per_second * 1e3

    @property
    def floor_ms(self) -> float:
        return max(self.memory_ms, self.tensor_ms)


def layer(model: str, tokens: int, training: bool) -> tuple[Step, ...]:
    """The kernels of LLaMA-3's layer at a size, forward alone or a whole step."""
    (found,) = (r for r in records("counts.jsonl") if (r.get("layer"), r.get("tokens"), r.get("training")) == (model, tokens, training))
    return tuple(Step(*kernel) for kernel in found["kernels"])


# --- counting -------------------------------------------------------------------------------------------------------------------


def counts() -> Iterator[dict[str, Any]]:
    """What counts.jsonl holds, by the plans of today."""
    for group, (_, source, programs) in FUSED.items():
        sizes = {**training_speed.LLAMA_8B, "k": training_speed.LLAMA_8B["f"]}
        for method, name in programs.items():
            program = compiled(source)[name].program
            found = roofline.of_program(program, {a: n if n is not None else sizes[a] for a, n in program.extents})
            yield {"group": group, "method": method, "bytes": sum(c.bytes for c in found), "flops": sum(c.flops for c in found)}
    for model in gpu_layers.MODELS:
        for tokens in gpu_layers.TOKENS:
            for training in (False, True):
                kernels = [(s.kernel, s.bytes, s.flops, s.beside) for s in layer_of_today(model, tokens, training)]
                yield {"layer": model, "tokens": tokens, "training": training, "kernels": kernels}


@functools.cache
def compiled(source: str) -> Mapping[str, Any]:
    """The functions of a source by program."""
    import coda_lang

    made = coda_lang.compile(ROOT / source)
    return vars(made) if isinstance(made, SimpleNamespace) else {made.program.name: made}


@functools.cache
def layer_of_today(model: str, tokens: int, training: bool) -> tuple[Step, ...]:
    """The kernels of LLaMA-3's layer at a size, forward alone or a whole step."""
    from coda_lang.backend_cute import spec
    from coda_lang.nn.weights import Programs

    d, f, heads, kv_heads, hd, _ = gpu_layers.MODELS[model]
    fn = Programs("llama", ("layer",), {"qh": heads, "kh": kv_heads, "pair": hd // 2}, {"eps": gpu_layers.EPS}).layer
    known = roofline.complete(fn.program, {"m": tokens, "d": d, "f": f})
    parts = (
        [(fn.saving or fn.program, known), (fn.backward, dict(derivative.extents(fn.backward, known)))]
        if training
        else [(fn.program, known)]
    )
    steps = []
    for program, extents in parts:
        kernels = {k.name: k for k in program.kernels}
        sizes = roofline.complete(program, extents)
        for count in roofline.of_program(program, extents):
            own = sum(
                2 * (m * k + n * gemm.segments * k + m * n * gemm.segments)
                for gemm in spec.gemms(kernels[count.kernel]) for m, n, k in roofline.products(gemm, sizes)
            )  # fmt: skip
            steps.append(Step(count.kernel, count.bytes, count.flops, count.bytes - own))
    return tuple(steps)


def main() -> None:
    """Write counts.jsonl."""
    from bench import protocol

    head = {"commit": protocol.commit(), "command": "python -m bench.roofs", "columns of kernels": list(Step.__dataclass_fields__)}
    lines = [json.dumps(record) for record in (head, *counts())]
    (RESULTS / "counts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
