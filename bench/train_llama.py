"""Trains a small LLaMA on text: coda_lang and eager PyTorch in bf16, from one seed, beside float64.

    python bench/train_llama.py [--device cpu|cuda] [--steps N] [--size small|tiny] [--out FILE]

The model is `coda_lang.nn.LlamaForCausalLM`, grouped queries and all, against the plain PyTorch model of bench/plain_models.py with the
same weights; on the CPU its forward is the reference and its backward what the kernels compute, in plain torch. Weights are kept in f32 and
rounded to bf16 for each step; AdamW. Data: the language reference that every Python carries (`pydoc help`), byte by byte. Passes if the
curve of coda_lang is as near to that of float64 as eager bf16's is, within a factor of two. Writes the three curves as JSON;
bench/plot_mlp.py draws them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import plain_models  # noqa: E402
from bench.train_mlp import distance  # noqa: E402

STEPS, WARM = 300, 20
RATE, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1
# Layers, width, feed-forward width, heads, heads of keys and values; sequences a step, tokens a sequence.
SIZES = {"small": (4, 256, 688, 4, 2, 16, 256), "tiny": (2, 64, 104, 4, 2, 4, 48)}
HELD_BACK = 0.05  # the share of the text that tells the loss at the end
Loss = Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]


def text(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes to train on, and those held back."""
    from pydoc_data.topics import topics

    data = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.int64, device=device)
    cut = int(len(data) * (1 - HELD_BACK))
    return data[:cut], data[cut:]


def batch(data: torch.Tensor, gen: torch.Generator, sequences: int, length: int) -> torch.Tensor:
    """Random stretches of the text."""
    starts = torch.randint(0, len(data) - length, (sequences, 1), generator=gen)
    return data[(starts + torch.arange(length)).to(data.device)]


def config(size: str) -> Any:
    """The model's sizes; its words are bytes."""
    from coda_lang.nn import LlamaConfig

    layers, width, inner, heads, kv_heads, *_ = SIZES[size]
    return LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )  # fmt: skip


def start(size: str) -> dict[str, torch.Tensor]:
    """The first weights, the same for every model."""
    from coda_lang.nn import LlamaForCausalLM

    torch.manual_seed(0)
    return {name: p.detach() for name, p in LlamaForCausalLM(config(size), dtype=torch.float32).named_parameters()}


def ours(size: str, device: str) -> tuple[Any, Loss]:
    """coda_lang's model and its loss."""
    from coda_lang.nn import LlamaForCausalLM

    model = LlamaForCausalLM(config(size), device=device)
    return model, lambda weights, ids: functional_call(model, weights, (ids,), {"labels": ids}).loss


def eager(size: str, device: str, dtype: torch.dtype) -> Loss:
    """The plain model's loss."""
    model = plain_models.PlainLlama(config(size)).to(device, dtype)
    model.freq = model.freq.to(device)
    return lambda weights, ids: plain_models.loss(functional_call(model, weights, (ids,)), ids)


def train(loss: Loss, dtype: torch.dtype, size: str, device: str, steps: int) -> dict[str, Any]:
    """The loss of every step, the loss of unseen text at the end, and the seconds a step took."""
    *_, sequences, length = SIZES[size]
    data, unseen = text(device)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    weights = {n: w.to(device, kept, copy=True).requires_grad_() for n, w in start(size).items()}
    optimiser = torch.optim.AdamW(weights.values(), lr=RATE, betas=BETAS, weight_decay=DECAY)
    slow = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min((step + 1) / WARM, 1.0))
    gen = torch.Generator().manual_seed(1)
    losses, began = [], time.time()
    for step in range(steps):
        if step == 1:  # the first compiles
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.time()
        value = loss({n: w.to(dtype) for n, w in weights.items()}, batch(data, gen, sequences, length))
        optimiser.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimiser.step()
        slow.step()
        losses.append(value.detach())
    curve = [float(v) for v in losses]
    seconds = (time.time() - began) / max(steps - 1, 1)
    rest = unseen[: len(unseen) // length * length].view(-1, length)[: 4 * sequences]
    held = [float(loss({n: w.to(dtype) for n, w in weights.items()}, part).detach()) for part in rest.split(sequences)]
    return {"curve": curve, "unseen": sum(held) / len(held), "seconds_a_step": round(seconds, 5)}


def compare(device: str, steps: int = STEPS, size: str = "small", out: Path | None = None, changed: Any = None) -> dict[str, Any]:
    """Train all three; `ok` says whether coda_lang stays within bf16's noise. `changed` replaces coda_lang's loss, for tests."""
    model, loss = ours(size, device)
    runs: dict[str, tuple[Loss, torch.dtype]] = {
        "coda_lang": (changed(loss) if changed else loss, torch.bfloat16),
        "eager_bf16": (eager(size, device, torch.bfloat16), torch.bfloat16),
        "eager_float64": (eager(size, device, torch.float64), torch.float64),
    }
    found = {name: train(fn, dtype, size, device, steps) for name, (fn, dtype) in runs.items()}
    curves = {name: f["curve"] for name, f in found.items()}
    off, noise = (distance(curves[name], curves["eager_float64"]) for name in ("coda_lang", "eager_bf16"))
    learnt = curves["coda_lang"][-1] < (0.75 if steps >= 100 else 1.0) * curves["coda_lang"][0] if steps >= 10 else True
    result = {
        "ok": off <= 2 * noise + 1e-3 and learnt,
        "device": device,
        "path": [model.last_path, model.model.programs.layer.last_backward],
        "steps": steps,
        "size": size,
        "noise": {"coda_lang": off, "eager_bf16": noise, "between": distance(curves["coda_lang"], curves["eager_bf16"])},
        "final": {name: curve[-1] for name, curve in curves.items()},
        "unseen": {name: f["unseen"] for name, f in found.items()},
        "seconds_a_step": {name: f["seconds_a_step"] for name, f in found.items()},
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**result, "curves": {n: [round(v, 6) for v in c] for n, c in curves.items()}}) + "\n")
    return result


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--out", type=Path, default=Path("train_llama.json"))
    options = parser.parse_args()
    found = compare(options.device, options.steps, options.size, options.out)
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
