"""Draws the curves of bench/train_mlp.py or train_llama.py: python bench/plot_mlp.py FILE.json … --out FILE.svg (needs matplotlib)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOOKS = {"coda_lang": ("coda_lang, bf16", "-", "tab:red"), "eager_bf16": ("eager PyTorch, bf16", "--", "tab:blue")}
DEVICES = {"cpu": "CPU, what the kernels compute in plain torch", "cuda": "H200, kernels"}


def draw(runs: Sequence[Mapping[str, Any]], out: Path) -> None:
    """One column a run: losses above, distances from float64 below."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "coda_lang", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(runs), squeeze=False, sharex="col", figsize=(5.5 * len(runs), 5.5), layout="constrained")
    for (above, below), run in zip(axes.T, runs, strict=True):
        exact = run["curves"]["eager_float64"]
        steps = range(1, len(exact) + 1)
        above.plot(steps, exact, color="0.6", linewidth=4, label="float64")
        for name, (label, style, colour) in LOOKS.items():
            curve = run["curves"][name]
            above.plot(steps, curve, style, color=colour, linewidth=1.2, label=label)
            below.plot(steps, [abs(a - b) for a, b in zip(curve, exact)], style, color=colour, linewidth=1.2, label=label)
        above.set_title(DEVICES.get(run["device"], run["device"]))
        above.set_ylabel("loss")
        below.set_ylabel("distance from float64")
        below.set_yscale("log")
        below.set_xlabel("step")
        above.legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/train_mlp.svg"))
    options = parser.parse_args()
    draw([json.loads(path.read_text()) for path in options.files], options.out)


if __name__ == "__main__":
    main()
