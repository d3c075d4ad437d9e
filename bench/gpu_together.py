"""Launches of several Gemms on a Hopper GPU: right in every configuration, the same bits as one launch each, and faster by how much.

    python bench/gpu_together.py [--parts check configs time] [--out DIR] [--limit SECONDS] [--device cuda]

check: forward and all gradients of `SOURCES` at three shapes, by the machinery of bench/gpu_training.py (against float64, twenty runs of
the same bits), beside the same program compiled with one Gemm a launch, whose stored results must be the same bits. configs: the launches
of qkv_apart and of `mixed` in every configuration offered, forward and backward. time: medians at LLaMA-3-8B and 1B widths, 256 to 8192
tokens, forward and forward with backward, together and apart, interleaved with a cold cache. A line of JSON a result in
DIR/together.jsonl. On the CPU (--device cpu) the twin stands for the kernels, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import coda_lang  # noqa: E402
from bench import gpu_models, protocol, training_cases, training_checks  # noqa: E402
from coda_lang.backend_cute import compile, configs, spec, timing, together  # noqa: E402

PARTS = ("check", "configs", "time")
# Depths of their own, another axis of rows, a residual tile, reductions over rows and over columns.
MIXED = """
program mixed(x: bf16[m, d], w: bf16[a, d], u: bf16[p, e], v: bf16[b, e], r: bf16[m, a], o: bf16[c, d])
    -> (y: bf16[m, a], ms: f32[m], z: bf16[p, b], top: f32[b], t: f32[m, c])
nominal m = 256, d = 256, a = 256, p = 128, e = 64, b = 256, c = 128
h = x @ w + r
y = h
ms = mean[a](h * h)
z = relu(u @ v)
top = max[p](u @ v)
t = x @ o
"""
SOURCES = {
    "qkv_apart": ROOT / "specs" / "qkv_apart.coda",
    "mixed": MIXED,
    "swiglu_mlp": ROOT / "specs" / "mlp" / "gated.coda",
    "gpt2_layer": ROOT / "specs" / "gpt2" / "attn_out_mlp.coda",
    "lora_mlp": ROOT / "specs" / "lora" / "lora.coda",
    "llama_pre": ROOT / "specs" / "llama" / "pre.coda",
}
SIZES = (  # for axes in the order of the program, ragged, small, of whole tiles
    (333, 264, 5, 3, 1, 72, 300, 136, 520),
    (9, 24, 2, 3, 1, 16, 24, 40, 24),
    (1024, 512, 8, 2, 1, 256, 640, 128, 384),
)
MODELS = {
    "8B": {"head": 32, "kv": 8, "qh": 32, "kh": 8, "d": 4096, "f": 14336, "r": 16},
    "1B": {"head": 16, "kv": 4, "qh": 32, "kh": 8, "d": 2048, "f": 8192, "r": 16},
}
TIMED = ("qkv_apart", "swiglu_mlp", "llama_pre", "lora_mlp", "gpt2_layer")
TOKENS = (256, 1024, 2048, 8192)


def functions(apart: bool) -> dict[str, Any]:
    """The programs, with one Gemm a launch where `apart`."""
    most, found = together.MOST, {}
    together.MOST = 1 if apart else most
    try:
        for name, source in SOURCES.items():
            made = coda_lang.compile(source)
            fn = made if not isinstance(made, SimpleNamespace) else vars(made)[name]
            fn.objects = training_cases.Chosen(fn.program, fn.functions, {}, fn.saving)
            found[name] = fn
    finally:
        together.MOST = most
    return found


def joined(fn: Any) -> list[spec.Together]:
    """Its launches of several."""
    return [k for p in fn.programs for k in spec.launches(p) if isinstance(k, spec.Together)]


def shape(fn: Any, sizes: tuple[int, ...]) -> dict[str, int]:
    """Extents of the free axes, in order."""
    free = iter(sizes)
    same = {other: one for one, other in fn.program.equal}
    found = {a: n if n is not None else next(free) for a, n in fn.program.extents if a not in same}
    return found | {other: found[one] for other, one in same.items()}


def check(fn: Any, alone: Any, extents: Mapping[str, int], chosen: Mapping[str, str], device: str) -> dict[str, Any]:
    """One program at one shape: right, repeatable, and where nothing is reduced the bits of one launch a Gemm."""
    found = training_checks.check(fn, {"shape": extents, "runs": 3 if chosen else 20, "configs": chosen}, device)
    tensors = training_cases.leaves(fn, extents, device, needs=())
    with torch.no_grad():
        one, other = (protocol.several(f(*tensors)) for f in (fn, alone))
    stored = {s.matrix.tensor for k in spec.launches(fn.program) for g in spec.gemms(k) for s in g.sinks if isinstance(s, spec.Store)}
    plain = [(a, b) for o, a, b in zip(fn.program.outputs, one, other, strict=True) if o.name in stored and len(fn.program.kernels) == 1]
    alike = all(torch.equal(a, b) for a, b in plain)
    return {**found, "ok": found["ok"] and alike, "bits of one launch each": alike}


def forced(fn: Any) -> Iterator[dict[str, str]]:
    """Every configuration of every launch of several, one launch at a time."""
    for launch in joined(fn):
        for config in configs.offered(launch):
            yield {launch.name: config.key}


def compile_forced(fn: Any, extents: Mapping[str, int]) -> None:
    """Compile what `forced` asks for side by side, before the first of it is called."""
    kind = {"kind": "gradients", "shape": extents}
    jobs = {j.key: j for chosen in forced(fn) for j in training_cases.needed(fn, {**kind, "configs": chosen})}
    compile.objects_for(jobs.values())


def step(fn: Any, tensors: list[torch.Tensor], backward: bool) -> Any:
    """A call to be timed."""
    if not backward:

        def forward() -> None:
            with torch.no_grad():
                fn(*tensors)

        return forward
    given = training_cases.cotangents(protocol.several(fn(*tensors)))

    def both() -> None:
        training_cases.gradients(protocol.several(fn(*tensors)), tensors, given)

    return both


def cases(fns: Mapping[str, Any]) -> Iterator[tuple[str, str, int, dict[str, int]]]:
    """(model, program, tokens, extents) of what is timed."""
    for model, sizes in MODELS.items():
        for name in TIMED:
            for tokens in TOKENS:
                known = {**sizes, "m": tokens, "n": sizes["d"], "k": sizes["d"]}
                extents = {a: n if n is not None else known.get(a, sizes["d"]) for a, n in fns[name].program.extents}
                yield model, name, tokens, extents


def timed(fns: Mapping[str, Any], alone: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Milliseconds, together and apart."""
    gpu_models.compile_all((f[name], extents) for f in (fns, alone) for _, name, _, extents in cases(fns))
    for model, name, tokens, extents in cases(fns):
        fn = fns[name]
        tensors = training_cases.leaves(fn, extents, "cuda")
        for backward in (False, True):
            calls = {key: step(f, tensors, backward) for key, f in (("together", fn), ("apart", alone[name]))}
            graphs = {key: timing.graph(call) for key, call in calls.items()} if not backward else calls
            ms = timing.medians(timing.interleaved(graphs, ahead=timing.AHEAD * (10 if backward else 1)))
            ratio = ms["apart"] / ms["together"]
            yield {"program": name, "model": model, "tokens": tokens, "backward": backward, **ms, "ratio": ratio}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--only", nargs="*", default=[], help="programs")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--limit", type=float, default=1e9)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    deadline, failed = time.time() + given.limit, 0
    fns, alone = functions(apart=False), functions(apart=True)
    kept = [name for name in SOURCES if not given.only or name in given.only]
    shapes = [(name, shape(fns[name], sizes)) for name in kept for sizes in SIZES]
    ragged = {name: extents for name, extents in reversed(shapes)}
    with (given.out / "together.jsonl").open("a", encoding="utf-8") as sink:
        sink.write(json.dumps(protocol.about(sys.argv)) + "\n")

        def note(row: dict[str, Any]) -> None:
            nonlocal failed
            failed += not row.get("ok", True)
            sink.write(json.dumps(row) + "\n")
            sink.flush()
            print(json.dumps(row), flush=True)

        if "check" in given.parts:
            if given.device == "cuda":
                gpu_models.compile_all((f[name], extents) for f in (fns, alone) for name, extents in shapes)
            for name, extents in shapes:
                if time.time() < deadline:
                    found = check(fns[name], alone[name], extents, {}, given.device)
                    note({"part": "check", "program": name, "launches": [k.name for k in joined(fns[name])], "shape": extents, **found})
        if "configs" in given.parts:
            for name in [n for n in ("qkv_apart", "mixed") if n in kept]:
                if given.device == "cuda":
                    compile_forced(fns[name], ragged[name])
                for chosen in forced(fns[name]):
                    if time.time() < deadline:
                        found = check(fns[name], alone[name], ragged[name], chosen, given.device)
                        note({"part": "configs", "program": name, "configs": chosen, "ok": found["ok"]})
        if "time" in given.parts and given.device == "cuda":
            for row in timed(fns, alone):
                note({"part": "time", **row})
                if time.time() > deadline:
                    break
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
