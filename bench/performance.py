"""The figures of docs/performance.md, made from bench/results: python -m bench.performance [--check]

In: the raw files, a page with places `<!-- figures: NAME -->` … `<!-- end -->`. Out: the page with those filled in again (--check: exit
status 1 where that changes it). Nothing between the marks is written by hand; what is around them holds no figure that a raw file
has. Non-goals: measuring; plots (`plots`).
"""

from __future__ import annotations

import functools
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import gpu_rivals, roofs  # noqa: E402
from bench.gpu_configs import MODELS, VOCABULARY, Judged  # noqa: E402
from bench.roofs import records  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
MARK = re.compile(r"<!-- figures: (\w+) -->\n.*?<!-- end -->", re.S)
LAYER_CASES = [(model, tokens) for model in ("8B", "1B") for tokens in (8192, 16384)]
PASSES = {"forward": "forward", "forward+backward": "forward + backward"}
Row = Sequence[Any]


def table(head: Row, rows: Iterable[Row]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


# --- the plain product ------------------------------------------------------------------------------------------------------------


def large() -> list[Judged]:
    """The 52 shapes: all of many rows but 1024³, which a card does in microseconds."""
    return [x for x, _ in roofs.plain() if (x.m, x.n, x.k) != (1024, 1024, 1024)]


def plain() -> str:
    """How products compare with cuBLAS."""
    found = large()
    speeds, best = [x.speed for x in found], [x.mm / x.ms[x.best] for x in found]
    least = min(found, key=lambda x: x.speed)
    cubes = {x.m: x.speed for x in found if x.m == x.n == x.k and x.layout == "kk"}
    mean, most = statistics.geometric_mean(speeds), statistics.geometric_mean(best)
    shapes = {(x.layout, x.m, x.n, x.k) for x in found}
    return (
        f"{len(shapes)} shapes, {len(found)} measurements (LLaMA-3's products at 8192 and 16384 tokens, and "
        f"{', '.join(f'{n}³' for n in cubes)}): geometric mean **{mean:.3f}**, "
        f"least {least.speed:.3f} ({least.m} × {least.n} × {least.k}, {least.layout}). "
        f"With the fastest of the measured configurations at each shape it would be {most:.3f}: the model's choice costs "
        f"{100 * (most / mean - 1):.1f} %. "
        f"{'; '.join(f'{n}³ {s:.3f}' for n, s in cubes.items())}."
    )


def products() -> str:
    """One row a weight: the three products of a training step."""
    found = {(x.layout, x.m, x.n, x.k): x for x in large()}

    def cell(*key: Any) -> str:
        x = found.get(key)
        return f"{x.speed:.3f} ({x.taken})" if x else ""

    rows, m = [], 8192
    for model, (d, qkv, f) in MODELS.items():
        weights = [("o", d, d), ("q k v", qkv, d), ("gate-up", 2 * f, d), ("down", d, f), ("lm-head", VOCABULARY, d)]
        for name, n, k in weights:
            cells = [cell("kk", m, n, k), cell("kn", m, k, n), cell("mn", n, k, m)]
            if any(cells):
                rows.append((f"{model} {name}, {n} × {k}", *cells))
    return table(("product, 8192 tokens", "forward", "gradient of the input", "gradient of the weight"), rows)


def few() -> str:
    """Few rows: a column a weight."""
    found = [x for x in map_judged() if x.few]
    weights = list(dict.fromkeys((x.n, x.k) for x in found))
    speeds = {(x.m, x.n, x.k): f"{x.speed:.2f}" for x in found}
    rows = [(m, *(speeds[m, n, k] for n, k in weights)) for m in dict.fromkeys(x.m for x in found)]
    worse = [x for x in found if x.speed < 0.9]
    said = f"Geometric mean {statistics.geometric_mean(x.speed for x in found):.3f}; {len(worse)} of {len(found)} below 0.90."
    return table(("rows", *(f"{n} × {k}" for n, k in weights)), rows) + f"\n\n{said}"


def map_judged() -> list[Judged]:
    """All judged products."""
    return [*roofs.gpu_configs.judged(records("configs_h200.jsonl"))]


# --- fused kernels ----------------------------------------------------------------------------------------------------------------

FUSED = [  # what, group, our method
    ("swiglu backward on the dgrad GEMM (dz, y, row sums), z interleaved", "swiglu_backward", "coda_interleaved"),
    ("the same, z as halves", "swiglu_backward", "coda"),
    ("gate-up and swiglu, pre-activation stored", "swiglu_forward", "coda"),
    ("down, residual, row sums of squares, two stores", "residual_sumsq", "coda"),
    ("lm-head and logsumexp, logits not stored", "lm_head", "coda"),
    ("MLP block forward (Wo + residual, RMSNorm, SwiGLU, down + residual), gate and up in two weights", "mlp_block_forward", "coda"),
    ("MLP block forward + backward, gate and up in one weight", "mlp_block_training", "coda_lanes"),
    ("MLP block forward + backward, gate and up in two weights", "mlp_block_training", "coda"),
]


def groups() -> dict[str, dict[str, Any]]:
    """The fused measurements by group."""
    return {r["group"]: r for r in records("fused_speed_h200.jsonl") if "group" in r}


def best_product(ms: dict[str, float]) -> float:
    """The better of cuBLAS and our plain product."""
    return min(ms[name] for name in ("gemm", "coda_gemm") if name in ms)


def fused() -> str:
    """Fused kernels beside torch.compile and their products."""
    rows = []
    for what, group, method in FUSED:
        ms = groups()[group]["ms"]
        ours, floor = ms[method], best_product(ms)
        rows.append((what, f"{ms['gemm']:.3f}", f"{floor:.3f}", f"{ms['compile']:.3f}", f"**{ours:.3f}**", f"{ms['compile'] / ours:.2f}",
                     f"{ours / ms['gemm']:.3f}", f"{ours / floor:.3f}"))  # fmt: skip
    head = ("kernel", "GEMM (cuBLAS)", "best GEMM", "compile", "coda_lang", "compile / coda_lang", "coda_lang / cuBLAS", "coda_lang / best")
    return table(head, rows)


def rivals() -> str:
    """Fused kernels beside other libraries."""
    if not (roofs.RESULTS / "rivals_h200.jsonl").is_file():
        return "No card has run `bench/gpu_rivals.py` yet."
    head, *found = records("rivals_h200.jsonl")
    missing = "".join(f" Left out: {why}." for why in head.get("missing", {}).values())
    return f"{gpu_rivals.table(found)}\n\n`{head['command']}` at {head['commit']}, raw in `rivals_h200.jsonl`.{missing}"


def norms() -> str:
    """Norms beside a copy."""
    if not (roofs.RESULTS / "norms_h200.jsonl").is_file():
        return "No card has run `bench/gpu_norms.py` yet."
    head, *found = records("norms_h200.jsonl")
    rows = []
    for r in (r for r in found if "us" in r):
        parts = f"{r['us']['forward']:.1f}", f"{r['forward_of_copy']:.2f}", f"{r['backward_of_copy']:.2f}"
        rows.append((r["program"], " × ".join(map(str, r["shape"])), *parts))
    checked = [r for r in found if "ok" in r]
    bad = sum(not r["ok"] for r in checked)
    said = f"{len(checked)} comparisons with float64, {bad} wrong. `{head['command']}`, raw in `norms_h200.jsonl`."
    return table(("norm", "rows × columns", "forward µs", "forward, of a copy's bandwidth", "backward"), rows) + f"\n\n{said}"


def fused_memory() -> str:
    """Peaks of the block's training step."""
    peaks = groups()["mlp_block_training"]["peak_mib"]
    return (
        f"The MLP block's training step peaks at {peaks['coda']} MiB ({peaks['coda_lanes']} with gate and up in one weight), "
        f"torch.compile's at {peaks['compile']} MiB."
    )


# --- layers -----------------------------------------------------------------------------------------------------------------------


def layer_records() -> dict[tuple[str, str, int, str], dict[str, Any]]:
    """By case, model, tokens, pass."""
    return {(r["case"], r["model"], r["tokens"], r["pass"]): r for r in records("layers_h200.jsonl") if "case" in r}


def layers() -> str:
    """Layers and the loss beside the others."""
    found, rows = layer_records(), []

    def cell(r: dict[str, Any], method: str, best: float) -> str:
        if method not in r["ms"]:
            return ""
        ms = f"{r['ms'][method]:.2f}"
        return f"{f'**{ms}**' if r['ms'][method] == best else ms}, {r['peak_mib'][method]:.0f} MiB"

    for model, tokens in LAYER_CASES:
        for name, said in PASSES.items():
            r = found["layer", model, tokens, name]
            rows.append(_layer(f"{model}, {tokens} tokens, {said}", r, "coda", cell))
    r = found["loss", "8B", 8192, "forward+backward"]
    rows.append(_layer("head and cross-entropy, V 128256, d 4096, 8192 tokens, forward + backward, logits kept", r, "coda", cell))
    rows.append(_layer("the same, no logits kept: the vocabulary in chunks", r, "coda_chunked", cell))
    others = ("eager", "Liger", "torch.compile", "coda_lang")
    return table(("", "products", *others, "coda_lang / products", "compile / coda_lang", "Liger / coda_lang"), rows)


def _layer(what: str, r: dict[str, Any], method: str, cell: Callable[[dict[str, Any], str, float], str]) -> Row:
    ms, floor = r["ms"], best_product(r["ms"])
    best = min(ms[name] for name in ("eager", "liger", "compile", method))
    cells = [cell(r, name, best) for name in ("eager", "liger", "compile", method)]
    return (
        what,
        f"{floor:.2f}",
        *cells,
        f"{ms[method] / floor:.3f}",
        f"{ms['compile'] / ms[method]:.2f}",
        f"{ms['liger'] / ms[method]:.2f}",
    )


# --- rooflines --------------------------------------------------------------------------------------------------------------------


def roofline() -> str:
    """Kernels that were timed by themselves."""
    points = [p for x, p in roofs.plain() if x.layout == "kk" and (x.m == x.n == x.k or (x.m, x.k) == (8192, 4096))]
    rows = [
        (p.name, f"{p.bytes / 1e6:.0f}", f"{p.flops / 1e9:.0f}", p.bound, f"{p.floor_ms:.3f}", f"{p.ms:.3f}", f"{p.distance:.2f}",
         f"{p.rate / 1e12:.0f}")
        for p in {p.name: p for p in (*points, *roofs.fused(), *roofs.told())}.values()
    ]  # fmt: skip
    return table(("kernel", "MB", "GFLOP", "bound by", "floor ms", "ms", "of floor", "TFLOP/s"), rows)


def layer_roofline() -> str:
    """Whole layers: what their kernels take at least, and what was measured."""
    rows = []
    for model, tokens in LAYER_CASES:
        for name, said in PASSES.items():
            steps = roofs.layer(model, tokens, name != "forward")
            ms = layer_records()["layer", model, tokens, name]["ms"]
            floor, best = sum(s.floor_ms for s in steps), best_product(ms)
            without = sum(s.floor_ms for s in steps if not s.flops)
            beside = sum(s.beside for s in steps) / roofs.PEAK.bytes_per_second * 1e3
            counted = sum(s.flops for s in steps) / 1e12, sum(s.bytes for s in steps) / 1e9, floor
            times = [f"{x:.2f} ({x / floor:.2f})" for x in (best, ms["coda"])]
            sizes = [len(steps), *(f"{x:.2f}" for x in counted), f"{without:.3f}"]
            rows.append((f"{model}, {tokens} tokens, {said}", *sizes, *times, f"{ms['coda'] - best:.2f}", f"{beside:.2f}"))
    head = ("", "kernels", "TFLOP", "GB", "floor ms", "of it without products", "products alone ms (of floor)", "coda_lang ms (of floor)",
            "above products ms", "bytes beside products ms")  # fmt: skip
    return table(head, rows)


# --- what else was measured -------------------------------------------------------------------------------------------------------


def right() -> str:
    """What was compared with float64 on the card."""
    specs = [r for r in records("specs_h200.jsonl") if "program" in r]
    gradients = [r for r in records("training_h200.jsonl") if "program" in r]
    tools = [r for r in records("training_speed_h200.jsonl") if r.get("kind") == "sanitizer"]
    models = [r for r in records("models_h200.jsonl") if r.get("check") in ("model", "program")]
    loops = records("gemm_mainloop_check.jsonl")
    together = [r for r in records("together_h200.jsonl") if "part" in r]
    mean = {r["model"]: r["mean_ratio"] for r in models if "mean_ratio" in r}

    def count(found: Sequence[dict[str, Any]], what: str) -> str:
        return f"{len(found)} {what}, {sum(not r['ok'] for r in found)} wrong"

    rows = [
        ("every program of `specs/` and the known-failure rows at every (M, N, K) among 1, 7, 128, 1000, 4096, four configurations, "
         "NaN-poisoned outputs, against float64", count(specs, "calls"), "`specs_h200.jsonl`", "`bench/gpu_specs.py`"),
        ("gradients of every program, 8 calls each at ragged and LLaMA-like shapes, 3 samples of configurations, the same bits on 20 runs "
         "(3 for the samples), outputs the same bits with and without gradients", count(gradients, "jobs"), "`training_h200.jsonl`",
         "`bench/gpu_training.py --parts gradients configs`"),
        (f"compute-sanitizer {' and '.join(r['tool'] for r in tools)} over forward and backward of {len(tools[0]['ran'])} programs",
         "0 errors, 0 hazards" if all(r["ok"] for r in tools) else "errors", "`training_speed_h200.jsonl`",
         "`bench/gpu_training.py --parts sanitizer`"),
        ("LLaMA and GPT-2 whole (4 layers, width 256): logits and every gradient against the plain model in float64, over two draws; every "
         "program of `specs/*/` at a ragged shape, LLaMA's layer at 8B's sizes too", count(models, "checks") + f"; errors on average "
         f"{mean['llama']:.2f} (LLaMA) and {mean['gpt2']:.2f} × (GPT-2) eager bf16's", "`models_h200.jsonl`",
         "`bench/gpu_models.py --parts model programs`"),
        ("several products in one launch, forward and gradients, beside one launch each", count(together, "checks"),
         "`together_h200.jsonl`", "`bench/gpu_together.py --parts check`"),
        ("hand-written kernel records: ports, sinks, groups, swizzles, 2³² offsets, map kernels", count(loops, "checks"),
         "`gemm_mainloop_check.jsonl`", "`bench/gpu_mainloop.py`"),
    ]  # fmt: skip
    return table(("what", "result", "raw", "command"), rows)


def training() -> str:
    """Training runs on the card."""
    (mlp,) = records("train_mlp_h200.json")
    (llama,) = (r for r in records("models_h200.jsonl") if r.get("check") == "train")
    seconds, final = llama["seconds_a_step"], llama["final"]
    return (
        f"Two layers on scikit-learn's digits, {mlp['steps']} steps, from one seed, kernels forward and backward: mean distance from the "
        f"float64 curve {mlp['noise']['coda_lang']:.1e} for coda_lang, {mlp['noise']['eager_bf16']:.1e} for eager PyTorch in bf16. "
        f"`bench/train_mlp.py`, raw in `train_mlp_cpu.json`, `train_mlp_h200.json`.\n\n"
        f"A small LLaMA (coda_lang.nn) on text, {llama['steps']} steps: mean distance {llama['noise']['coda_lang']:.1e} for coda_lang, "
        f"{llama['noise']['eager_bf16']:.1e} for eager bf16; final loss {final['coda_lang']:.3f}, {final['eager_bf16']:.3f} in eager bf16, "
        f"{final['eager_float64']:.3f} in float64; a step takes {seconds['coda_lang'] * 1e3:.1f} ms, "
        f"{seconds['eager_bf16'] * 1e3:.1f} in eager bf16. `bench/gpu_models.py --parts train`, raw in `models_h200.jsonl`."
    )


@functools.cache
def told() -> str:
    """What commands printed on the card."""
    return (roofs.RESULTS / "tune_bench_host_h200.txt").read_text(encoding="utf-8")


def tuning() -> str:
    """The tuner, and `codac bench`."""
    trials: dict[str, dict[str, float]] = {}
    for title, body in re.findall(r"^(\w+)\n((?:  \d+x\d+_.* ms.*\n)+)", told(), re.M):
        trials[title] = {word: float(ms) for ms, words in re.findall(r"([\d.]+) ms(.*)", body) for word in words.split()}
    gain, *gains = (100 * (found["default"] / found["chosen"] - 1) for found in trials.values())
    forward = next(iter(trials.values()))
    (command,) = re.findall(r"^\$ (codac tune .*)$", told(), re.M)
    call, products, graph = (
        re.findall(rf"^  {what} +([\d.]+) ms", told(), re.M)[0] for what in ("coda_lang", "products", "coda_lang in a graph")
    )
    return (
        f"`{command}`: the fastest of five configurations a kernel beat the default by {gain:.1f} % in the forward "
        f"({forward['chosen']:.4f} ms against {forward['default']:.4f}) and by {max(gains):.1f} % in the {len(gains)} products "
        f"of the backward. `codac bench` of the same then gave {call} ms for the call, {float(call) / float(products):.2f} × its plain "
        f"product, and {graph} ms in a replayed CUDA graph. Raw in `tune_bench_host_h200.txt`."
    )


def host() -> str:
    """Microseconds of the host a call takes."""
    us = {what.strip(): float(found) for what, found in re.findall(r"^linear +(.{52}) +([\d.]+) us", told(), re.M)}
    return (
        f"A call without gradients took {us['forward without gradients']:.1f} µs (linear, 256³; torch.matmul {us['torch.matmul']:.1f} "
        f"beside it), a forward that records a gradient {us['forward with gradients']:.1f} µs, where an empty autograd.Function took "
        f"{us['forward with gradients, an empty autograd.Function']:.1f}; forward with backward was not measured again. "
        "`bench/host_time.py --calls 500`, raw in `tune_bench_host_h200.txt`."
    )


def missed() -> str:
    """Targets that are missed, with what is known about why."""
    ms = {(group, method): (groups()[group]["ms"][method], groups()[group]["ms"]) for _, group, method in FUSED}
    over = {key: ours / best_product(all_ms) for key, (ours, all_ms) in ms.items()}
    back = {kind: ms["swiglu_backward", kind] for kind in ("coda_interleaved", "coda")}
    later = [f"{ours - all_ms['gemm']:.2f} ms" for ours, all_ms in back.values()]
    ratios = [f"{over['swiglu_backward', kind]:.3f} ({how})" for kind, how in zip(back, ("interleaved", "halves"))]
    point = next(p for p in roofs.fused() if p.name.endswith("interleaved"))
    m, d, f = (roofs.training_speed.LLAMA_8B[x] for x in "mdf")
    beside = point.bytes - roofs.product(m, f, d, 1.0).bytes
    layer = {key[1:]: r["ms"]["coda"] / best_product(r["ms"]) for key, r in layer_records().items() if key[0] == "layer"}
    good = [f"{model} with {tokens} tokens, {PASSES[name]}" for (model, tokens, name), x in layer.items() if x <= 1.03]
    steps = roofs.layer("8B", 8192, True)
    once = sum(s.flops for s in roofs.layer("8B", 8192, False))
    whole = layer_records()["layer", "8B", 8192, "forward+backward"]["ms"]
    loss = layer_records()["loss", "8B", 8192, "forward+backward"]["ms"]
    slow = [x for x in map_judged() if x.few and x.speed < 0.9]
    peak = roofs.PEAK.bytes_per_second
    rows = [
        ("fused forward kernels at most 1.03 × the best plain product",
         f"swiglu {over['swiglu_forward', 'coda']:.3f}, residual and statistics {over['residual_sumsq', 'coda']:.3f}, logsumexp "
         f"{over['lm_head', 'coda']:.3f}", "swiglu stores the pre-activation too, twice what y takes",
         "the miss is less than what runs differ by; nothing is known"),
        ("swiglu backward at most 1.07 × the best plain product",
         " and ".join(ratios),
         f"beside its product's operands and result it moves {beside / 1e9:.2f} GB, which alone takes {beside / peak * 1e3:.2f} ms at the "
         f"memory's peak; it takes {later[0]} and {later[1]} longer than cuBLAS's product: its epilogue hides little of that",
         "a profile of the epilogue's loads; z brought in ahead of the product's end"),
        ("a layer at most 1.03 × its products", f"{min(layer.values()):.3f} to {max(layer.values()):.3f}; held by {', '.join(good)}",
         f"a step's kernels do {sum(s.flops for s in steps) / once:.2f} × the FLOPs of the forward, so nothing is multiplied twice; those "
         f"without products take {sum(s.floor_ms for s in steps if not s.flops):.2f} ms at their floor (8B, 8192 tokens), all bytes beside "
         f"the products' own {sum(s.beside for s in steps) / peak * 1e3:.2f} ms; {whole['coda'] - best_product(whole):.2f} ms are lost. "
         f"The MLP block's step, in another run at a lower clock, is at {over['mlp_block_training', 'coda']:.2f}",
         "each kernel's own time, by `codac bench specs/llama/layer.coda`, which no card has run"),
        ("few rows: no shape slower than the best peer",
         f"{len(slow)} of {sum(x.few for x in map_judged())} below 0.90 × cuBLAS, the least {min(x.speed for x in slow):.2f}",
         "few tiles and a long contraction: cuBLAS splits it over several blocks, here one block at a time brings what a tile needs",
         "K in parts, which is built but off: no card has run it"),
        ("the loss without stored logits",
         f"{loss['coda_chunked'] / best_product(loss):.2f} × the products, torch.compile (which keeps them) "
         f"{loss['compile'] / best_product(loss):.2f}",
         f"it multiplies once more: four products are {4 / 3:.2f} ×; a chunk's gradient is added in f32",
         "larger chunks where memory allows"),
        ("no fused kernel slower than QuACK's or coda-kernels'", "not measured", "the adapters have not met a card",
         "`bench/gpu_rivals.py`, in the list of [bench/README.md](../bench/README.md)"),
        ("a call at most 15 µs of the host, without gradients", "20.7 µs" if "20.71" in told() else "", "measured before later changes",
         "`bench/host_time.py` on a card"),
    ]  # fmt: skip
    return table(("target", "measured", "what is known", "what would close it"), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        right,
        plain,
        products,
        few,
        fused,
        fused_memory,
        rivals,
        norms,
        layers,
        roofline,
        layer_roofline,
        tuning,
        host,
        training,
        missed,
    )
}


def filled(page: str) -> str:
    """The page with every block made again. Raises KeyError for a name that is none."""
    return MARK.sub(lambda m: f"<!-- figures: {m[1]} -->\n{BLOCKS[m[1]]()}\n<!-- end -->", page)


def main() -> int:
    """The command line."""
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if "--check" in sys.argv:
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
