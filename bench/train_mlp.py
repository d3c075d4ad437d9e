"""Trains a two-layer network on handwritten digits: coda_lang and eager PyTorch in bf16, from one seed, beside float64.

    python bench/train_mlp.py [--device cpu|cuda] [--steps N] [--out FILE]

The network with its loss is one program, whose backward coda_lang derives; on the CPU forward and backward are what the kernels compute,
in plain torch. Weights are kept in f32 and rounded to bf16 for each step; plain momentum. Data: scikit-learn's digits, 1797 pictures of
8 x 8 (`pip install scikit-learn`). Passes if the curve of coda_lang is as near to that of float64 as eager bf16's is, within a factor of
two. Writes the three curves as JSON; bench/plot_mlp.py draws them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PROGRAM = """
program mlp(x: bf16[m, d], w1: bf16[h, d], b1: bf16[h], w2: bf16[c, h], b2: bf16[c], target: i64[m]) -> (loss: f32[m])
y    = gelu(x @ w1 + b1)
z    = y @ w2 + b2
loss = logsumexp[c](z) - gather[c](z, target)
"""
STEPS, BATCH, HIDDEN, CLASSES = 200, 128, 256, 10
RATE, MOMENTUM = 0.05, 0.9
TRAINED_ON = 1500  # pictures; the others tell the accuracy
Model = Callable[..., torch.Tensor]


def eager(x: torch.Tensor, w1: Any, b1: Any, w2: Any, b2: Any, target: torch.Tensor) -> torch.Tensor:
    """The network's losses as PyTorch users write it, in the type of its arguments; the loss itself in f32 at least."""
    z = F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
    return F.cross_entropy(z.float() if z.dtype != torch.float64 else z, target, reduction="none")


def data(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures in [0, 1] and what they show."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pictures = torch.tensor(digits.data / 16.0, dtype=torch.float32, device=device)
    return pictures, torch.tensor(digits.target, dtype=torch.int64, device=device)


def start(width: int) -> list[torch.Tensor]:
    """The first weights, the same for every model."""
    gen = torch.Generator().manual_seed(0)
    shapes = ((HIDDEN, width), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,))
    return [torch.randn(s, generator=gen) * s[-1] ** -0.5 if len(s) > 1 else torch.zeros(s) for s in shapes]


def train(model: Model, dtype: torch.dtype, device: str, steps: int) -> tuple[list[float], float]:
    """The loss of every step, and the share of unseen pictures that are recognised at the end."""
    x, target = data(device)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    weights = [w.to(device, kept).requires_grad_() for w in start(x.shape[1])]
    optimiser = torch.optim.SGD(weights, lr=RATE, momentum=MOMENTUM)
    gen = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        batch = torch.randint(0, TRAINED_ON, (BATCH,), generator=gen).to(device)
        loss = model(x[batch].to(dtype), *[w.to(dtype) for w in weights], target[batch]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        w1, b1, w2, b2 = weights
        z = F.linear(F.gelu(F.linear(x[TRAINED_ON:].to(kept), w1, b1)), w2, b2)
    return losses, float((z.argmax(-1) == target[TRAINED_ON:]).double().mean())


def distance(one: list[float], other: list[float]) -> float:
    """The mean distance between two curves."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def compare(device: str, steps: int = STEPS, out: Path | None = None, fn: Any = None) -> dict[str, Any]:
    """Train all three; `ok` says whether coda_lang stays within bf16's noise. Writes everything to `out`."""
    import coda_lang

    fn = fn or coda_lang.compile(PROGRAM)
    runs = {"coda_lang": (fn, torch.bfloat16), "eager_bf16": (eager, torch.bfloat16), "eager_float64": (eager, torch.float64)}
    curves, accuracy = {}, {}
    for name, (model, dtype) in runs.items():
        curves[name], accuracy[name] = train(model, dtype, device, steps)
    ours, noise = (distance(curves[name], curves["eager_float64"]) for name in ("coda_lang", "eager_bf16"))
    learnt = curves["coda_lang"][-1] < 0.7 * curves["coda_lang"][0] if steps >= 20 else True
    found = {
        "ok": ours <= 2 * noise + 1e-3 and learnt,
        "device": device,
        "path": [fn.last_path, fn.last_backward],
        "steps": steps,
        "noise": {"coda_lang": ours, "eager_bf16": noise, "between": distance(curves["coda_lang"], curves["eager_bf16"])},
        "final": {name: curve[-1] for name, curve in curves.items()},
        "accuracy": accuracy,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**found, "curves": {n: [round(v, 6) for v in c] for n, c in curves.items()}}) + "\n")
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path("train_mlp.json"))
    options = parser.parse_args()
    found = compare(options.device, options.steps, options.out)
    print(json.dumps(found, indent=1))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
