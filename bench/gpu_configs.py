"""Plain products in every layout and many configurations beside torch.mm, in bursts: what `configs.cycles` is fitted to and judged by.

    python bench/gpu_configs.py build DIR            # compiles; needs nvidia-cutlass-dsl and gcc, no GPU
    python bench/gpu_configs.py run DIR OUT [--limit S]  # runs; needs torch and apache-tvm-ffi, no cutlass
    python bench/gpu_configs.py judge OUT            # how good the model's choices were; needs neither

In: nothing. Out: JSON lines, one a layout and size: median milliseconds of torch.mm and of each configuration over rounds that run all in a
random order, each call after a flush of the L2 cache and a pause that hides the host. Layouts: "kk" x @ wᵀ (forward), "kn" x @ w (the
gradient of x), "mn" xᵀ @ w (that of w). Results are compared with torch.mm's. Non-goals: fused kernels (gpu_training), other peers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from gemm_objects import compiled  # noqa: E402

from coda_lang.backend_cute import configs  # noqa: E402

CASES = {"kk": "linear", "kn": "major_kn", "mn": "major_mn"}
LARGE = (
    "128x128_pp_c2x1", "128x128_pp_c1x2", "128x160_pp_c2x1", "128x192_pp_c2x1", "128x208_pp_c2x1", "192x128_pp_c1x2", "128x224_coop_c2x1",
    "128x256_coop_c2x1", "256x128_coop_c1x2", "256x160_coop_c1x2", "256x192_coop_c1x2", "256x192_coop_c2x1", "256x208_coop_c1x2",
)  # fmt: skip
SMALL = (
    "64x32_pp_c1x1", "64x32_pp_c2x1", "64x64_pp_c1x1", "64x64_pp_c2x1", "64x128_pp_c1x1", "64x128_pp_c1x2", "64x128_pp_c2x1",
    "64x192_pp_c1x1", "64x256_pp_c1x1", "64x256_pp_c1x2", "128x128_pp_c2x1", "128x128_pp_c1x2", "128x224_coop_c1x2", "128x256_coop_c2x1",
)  # fmt: skip
MODELS = {"1B": (2048, 3072, 8192), "8B": (4096, 6144, 14336), "70B": (8192, 10240, 28672)}  # width, columns of q k v, of a gate
VOCABULARY = 128256
FEW = (1, 16, 64, 128, 256, 512)
FLUSH = 1 << 28  # bytes, several times the L2 cache
PAUSE = 1_000_000  # cycles before each call
MOST_ROUNDS, BURST = 21, 250.0  # rounds at most, and milliseconds of products by all methods together


def sizes() -> Iterator[tuple[str, int, int, int]]:
    """(layout, m, n, k)."""
    yield from (("kk", n, n, n) for n in (1024, 2048, 4096, 8192))
    for name, (d, qkv, f) in MODELS.items():
        for tokens in (8192,) if name == "70B" else (8192, 16384):
            weights = [(d, d), (qkv, d), (2 * f, d), (d, f), *([(VOCABULARY, d)] if tokens == 8192 and name != "70B" else [])]
            yield from (("kk", tokens, n, k) for n, k in weights)
            if tokens == 8192:
                yield from (("kn", tokens, k, n) for n, k in weights)
                yield from (("mn", n, k, tokens) for n, k in weights)
    for name in ("1B", "8B"):
        d, qkv, f = MODELS[name]
        yield from (("kk", m, n, k) for m in FEW for n, k in ((d, d), (qkv, d), (2 * f, d), (d, f)))


def build(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for layout, case in CASES.items():
        for key in dict.fromkeys((*LARGE, *SMALL) if layout == "kk" else LARGE):
            target = directory / f"{layout}-{key}.so"
            if not target.exists():
                began = time.time()
                compiled(case, key, target)
                print(target.name, round(time.time() - began, 2), flush=True)


def run(directory: Path, out: Path, limit: float) -> None:
    import torch
    import tvm_ffi

    from bench import protocol

    deadline = time.time() + limit
    ctypes.CDLL(str(directory / "libcute_dsl_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    functions = {path.stem: tvm_ffi.load_module(str(path))["func"] for path in sorted(directory.glob("*-*.so"))}
    flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda")

    def once(call: Any) -> tuple[Any, Any]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(PAUSE)
        start.record()
        call()
        end.record()
        return start, end

    with out.open("w") as sink:
        sink.write(json.dumps(protocol.about(sys.argv)) + "\n")
        for layout, m, n, k in sizes():
            if time.time() > deadline:
                print("no time left", flush=True)
                break
            shapes = (k, m) if layout == "mn" else (m, k), (n, k) if layout == "kk" else (k, n)
            a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
            left, right = a.T if layout == "mn" else a, b.T if layout == "kk" else b
            want, got = torch.mm(left, right), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            calls = {"torch.mm": partial(torch.mm, left, right, out=want)}
            for key in SMALL if m < 1024 else LARGE:
                calls[key] = partial(functions[f"{layout}-{key}"], a, b, got)
            wrong = []
            for key, call in calls.items():
                got.fill_(math.nan)
                call()
                if key != "torch.mm" and not float((got - want).norm() / want.norm()) < 5e-3:
                    wrong.append(key)
            first = [once(call) for call in calls.values()]
            torch.cuda.synchronize()
            taken: dict[str, list[float]] = {key: [] for key in calls}
            for _ in range(max(5, min(MOST_ROUNDS, int(BURST / sum(s.elapsed_time(e) for s, e in first))))):
                events = [(key, once(calls[key])) for key in random.sample(list(calls), len(calls))]
                torch.cuda.synchronize()
                for key, (start, end) in events:
                    taken[key].append(start.elapsed_time(end))
            medians = {key: round(statistics.median(values), 5) for key, values in taken.items()}
            sink.write(json.dumps({"layout": layout, "size": (m, n, k), "wrong": wrong, "ms": medians}) + "\n")
            sink.flush()
            best = sorted((ms, key) for key, ms in medians.items() if key != "torch.mm")
            print(
                layout, m, n, k, medians["torch.mm"], wrong, *(f"{key} {medians['torch.mm'] / ms:.3f}" for ms, key in best[:4]), flush=True
            )


@dataclass(frozen=True)
class Judged:
    """One product: milliseconds of torch.mm and of each configuration, the one that the model takes of those, and the fastest."""

    layout: str
    m: int
    n: int
    k: int
    mm: float
    ms: Mapping[str, float]
    taken: str
    best: str

    @property
    def few(self) -> bool:
        """Few rows, as in decoding?"""
        return self.m < 1024

    @property
    def speed(self) -> float:
        """torch.mm's time over that of what the model takes."""
        return self.mm / self.ms[self.taken]


def judged(records: Iterable[Mapping[str, Any]]) -> Iterator[Judged]:
    """What was measured, judged; the line that says what a file is is passed over."""
    import gemm_cases

    for record in (r for r in records if "layout" in r):
        gemm, (m, n, k) = gemm_cases.ALL[CASES[record["layout"]]].gemm, record["size"]
        ms = {key: t for key, t in record["ms"].items() if key != "torch.mm"}
        offered = {c.key: c for c in configs.offered(gemm) if c.key in ms}
        taken = min(offered, key=lambda key: configs.cycles(gemm, offered[key], [(m, n, k)]))
        yield Judged(record["layout"], m, n, k, record["ms"]["torch.mm"], ms, taken, min(offered, key=lambda key: ms[key]))


def judge(out: Path) -> None:
    """torch.mm's time over that of the fastest configuration and of the one that the model takes of those that were measured."""
    records = [json.loads(line) for line in out.read_text().splitlines()]
    wrong = {(r["layout"], *r["size"]) for r in records if r.get("wrong")}
    found = [*judged(records)]
    for x in found:
        fastest, model = (f"{key} {x.mm / x.ms[key]:.3f}" for key in (x.best, x.taken))
        problem = "wrong" if (x.layout, x.m, x.n, x.k) in wrong else ""
        print(x.layout, x.m, x.n, x.k, f"{x.mm:.4f} ms", "fastest", fastest, "model", model, problem)
    for kind, few in (("large", False), ("few rows", True)):
        if speeds := [x.speed for x in found if x.few == few]:
            print(kind, "geometric mean", round(statistics.geometric_mean(speeds), 4), "least", round(min(speeds), 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("build", "run", "judge"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--limit", type=float, default=120.0)
    args = parser.parse_args()
    if args.verb == "build":
        build(*args.paths)
    elif args.verb == "run":
        run(*args.paths, args.limit)
    else:
        judge(*args.paths)


if __name__ == "__main__":
    main()
