"""The plots of docs/performance.md, made from bench/results: python bench/plots.py [--out docs] (needs matplotlib)

In: the raw files. Out: products.svg (speed beside cuBLAS by shape), fused.svg (fused kernels over their product), layers.svg (layers and
the loss over their products), roofline.svg. The same files give the same text under the same version of matplotlib. Non-goals: tables
(`performance`), curves of training (`plot_mlp`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import performance, roofs  # noqa: E402

OURS, THEIRS, OTHERS = "tab:red", "tab:blue", "tab:green"
LAYOUTS = {"kk": ("forward", "o"), "kn": ("gradient of the input", "s"), "mn": ("gradient of the weight", "^")}
SHORT = {  # of performance.FUSED
    "swiglu_backward coda_interleaved": "swiglu backward", "swiglu_backward coda": "swiglu backward,\nhalves",
    "swiglu_forward coda": "swiglu", "residual_sumsq coda": "residual,\nstatistics", "lm_head coda": "logsumexp",
    "mlp_block_forward coda": "MLP block", "mlp_block_training coda_lanes": "MLP block, step,\none weight",
    "mlp_block_training coda": "MLP block,\nstep",
}  # fmt: skip


def start(width: float, height: float, columns: int = 1) -> tuple[Any, Any, Any]:
    """pyplot, a figure and its axes, drawn alike everywhere."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "coda_lang", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)
    return pyplot, figure, axes[0]


def products(out: Path) -> None:
    """Speed beside cuBLAS over the FLOPs of a product."""
    pyplot, figure, (ax,) = start(8, 4)
    for layout, (name, mark) in LAYOUTS.items():
        found = [x for x in performance.large() if x.layout == layout]
        work = [2 * x.m * x.n * x.k / 1e12 for x in found]
        ax.plot(work, [x.speed for x in found], mark, color=OURS, markerfacecolor="none", label=f"{name}, the model's choice")
        ax.plot(work, [x.mm / x.ms[x.best] for x in found], ".", color="0.6", label="fastest configuration" if layout == "kk" else None)
    ax.axhline(1, color="0.3", linewidth=0.8)
    ax.set(
        xscale="log", xlabel="TFLOP of the product", ylabel="speed, cuBLAS = 1", title="Plain products in bf16 beside torch.mm, one H200"
    )
    ax.legend(frameon=False)
    save(pyplot, figure, out)


def fused(out: Path) -> None:
    """Time over the best plain product."""
    pyplot, figure, (ax,) = start(9, 4)
    for place, (_, group, method) in enumerate(performance.FUSED):
        ms = performance.groups()[group]["ms"]
        floor = performance.best_product(ms)
        ax.bar(place - 0.2, ms["compile"] / floor, 0.38, color=THEIRS, label="torch.compile" if not place else None)
        ax.bar(place + 0.2, ms[method] / floor, 0.38, color=OURS, label="coda_lang" if not place else None)
    ax.axhline(1, color="0.3", linewidth=0.8)
    ax.set_ylim(0.9, None)
    ax.set_xticks(range(len(performance.FUSED)), [SHORT[f"{g} {m}"] for _, g, m in performance.FUSED], fontsize=8)
    ax.set(ylabel="time / best plain product (from 0.9)", title="Fused kernels over their products, LLaMA-3-8B, 8192 tokens, one H200")
    ax.legend(frameon=False)
    save(pyplot, figure, out)


def layers(out: Path) -> None:
    """Layers forward, and forward with backward, over their products."""
    pyplot, figure, axes = start(10, 4, len(performance.PASSES))
    found = performance.layer_records()
    methods = (("eager", "eager", "0.7"), ("liger", "Liger", OTHERS), ("compile", "torch.compile", THEIRS), ("coda", "coda_lang", OURS))
    for ax, (name, said) in zip(axes, performance.PASSES.items(), strict=True):
        for place, (model, tokens) in enumerate(performance.LAYER_CASES):
            ms = found["layer", model, tokens, name]["ms"]
            floor = performance.best_product(ms)
            for i, (method, label, colour) in enumerate(methods):
                ax.bar(place + (i - 1.5) * 0.2, ms[method] / floor, 0.19, color=colour, label=label if not place else None)
        ax.axhline(1, color="0.3", linewidth=0.8)
        ax.set_ylim(0.9, None)
        ax.set_xticks(range(len(performance.LAYER_CASES)), [f"{m}\n{t} tokens" for m, t in performance.LAYER_CASES])
        ax.set(title=said, ylabel="time / products alone (from 0.9)")
    axes[0].legend(frameon=False)
    figure.suptitle("A LLaMA-3 layer, attention excluded, one H200")
    save(pyplot, figure, out)


def roofline(out: Path) -> None:
    """FLOPs a second over FLOPs a byte."""
    pyplot, figure, (ax,) = start(8, 4.5)
    peak = roofs.PEAK
    reach = [10.0, 10000.0]
    roof = [
        min(i * peak.bytes_per_second, peak.flops_per_second) / 1e12
        for i in (*reach[:1], peak.flops_per_second / peak.bytes_per_second, reach[1])
    ]
    ax.plot([reach[0], peak.flops_per_second / peak.bytes_per_second, reach[1]], roof, color="0.3", linewidth=1, label="data sheet")
    if peak.copied:
        ridge = peak.flops_per_second / peak.copied
        ax.plot(
            [reach[0], ridge],
            [reach[0] * peak.copied / 1e12, peak.flops_per_second / 1e12],
            "--",
            color="0.6",
            linewidth=1,
            label="copies, measured",
        )
    found = list(roofs.plain())
    ax.plot(
        [roofs.product(x.m, x.n, x.k, x.mm).intensity for x, _ in found],
        [p.flops / x.mm / 1e9 for x, p in found],
        ".",
        color=THEIRS,
        label="torch.mm",
    )
    ax.plot(
        [p.intensity for _, p in found], [p.rate / 1e12 for _, p in found], "o", color=OURS, markerfacecolor="none", label="plain products"
    )
    others = [*roofs.fused(), *roofs.told()]
    ax.plot([p.intensity for p in others], [p.rate / 1e12 for p in others], "D", color=OTHERS, label="fused kernels")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP / byte, every tensor once",
        ylabel="TFLOP/s",
        title="Kernels against the roofline, one H200",
    )
    ax.set_ylim(50, 1500)
    ax.legend(frameon=False)
    save(pyplot, figure, out)


def save(pyplot: Any, figure: Any, out: Path) -> None:
    """Write a figure without the hour."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


PLOTS: dict[str, Callable[[Path], None]] = {f.__name__: f for f in (products, fused, layers, roofline)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    for name, draw in PLOTS.items():
        draw(options.out / f"{name}.svg")


if __name__ == "__main__":
    main()
