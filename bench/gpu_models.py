"""Whole programs and models on a Hopper GPU, against float64: layers of every family, LLaMA and GPT-2 whole, a training run.

    python bench/gpu_models.py [--parts programs model train] [--only NAME …] [--out DIR] [--limit SECONDS]

programs: every program of specs/*/, outputs and all gradients at a ragged shape (LLaMA's layer at 8B's sizes too), by the
machinery of bench/gpu_training.py: within twice the error of the program run op by op in bf16, the same bits on every run, the same outputs
with and without gradients. model: 4 layers, width 256, 1000 words, grouped queries; logits, loss and every gradient against the plain
PyTorch model in float64, within twice the error of that model in bf16, over two draws together. train: bench/train_llama.py. A line of
JSON a result in DIR/models.jsonl, the curves in DIR/train_llama.json. On the CPU (--device cpu) the twin stands for the kernels.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import plain_models, protocol, train_llama, training_cases, training_checks  # noqa: E402
from coda_lang.backend_cute import selfcheck  # noqa: E402

PARTS = ("programs", "model", "train")
RAGGED = {"m": 333, "d": 264, "f": 520, "v": 1003, "n": 520, "k": 264, "r": 16}
LARGE = {"m": 8192, "d": 4096, "f": 14336}  # LLaMA-3-8B's, whose kernels bench/gpu_layers.py compiles too
AT_LARGE = ("llama_layer",)
FIRST = ("llama_layer", "gpt2_layer", "gemma3_layer", "qwen3_layer", "llama_head", "llama_head_chunked")  # where time is short
RUNS = 3
SEEDS = (0, 1)
SHAPE = (16, 255)  # sequences, tokens: about as many as a step of train_llama.py has, so that tiles are the same
LOSS_OFF = 2e-3  # one number, in which eager may be lucky


# --- programs -----------------------------------------------------------------------------------------------------------------


def programs(only: list[str]) -> dict[str, Any]:
    """The functions of specs/*/ by program."""
    import coda_lang

    found: dict[str, Any] = {}
    for path in sorted((ROOT / "specs").glob("*/*.coda")):
        made = coda_lang.compile(path.resolve())
        for fn in vars(made).values() if isinstance(made, SimpleNamespace) else [made]:
            if not only or fn.program.name in only:
                fn.objects = training_cases.Chosen(fn.program, fn.functions, {}, fn.saving)
                found[fn.program.name] = fn
    return {name: found[name] for name in (*(n for n in FIRST if n in found), *(n for n in found if n not in FIRST))}


def shapes(fn: Any) -> Iterator[dict[str, int]]:
    """Where a program is checked."""
    for sizes in (RAGGED, LARGE) if fn.program.name in AT_LARGE else (RAGGED,):
        yield {axis: size if size is not None else sizes[axis] for axis, size in fn.program.extents}


def compile_all(calls: Iterable[tuple[Any, Mapping[str, int]]], kind: str = "gradients") -> None:
    """Compile the kernels of calls, functions with extents, side by side; says how many. kind "training": only those with gradients."""
    from coda_lang.backend_cute import compile

    began = time.time()
    jobs = {j.key: j for fn, shape in calls for j in training_cases.needed(fn, {"kind": kind, "shape": shape})}
    compile.objects_for(jobs.values())
    print(json.dumps({"compiled": len(jobs), "seconds": round(time.time() - began)}), flush=True)


def check_program(fn: Any, shape: Mapping[str, int], device: str) -> dict[str, Any]:
    """Outputs and gradients of one program at one shape."""
    tensors = training_cases.leaves(fn, shape, device, needs=())
    with torch.no_grad():
        got, exact = (protocol.several(f(*tensors)) for f in (fn, lambda *t: fn.reference(*t, exact=True)))
        eager = protocol.several(fn.reference(*tensors, library=training_cases.Eager()))
    outputs = {}
    for o, g, e, by_op in zip(fn.program.outputs, got, exact, eager, strict=True):
        error, bound = selfcheck.error(g, e), 2 * selfcheck.error(by_op, e) + 1e-6
        outputs[o.name] = {"error": error, "bound": bound, "ok": error <= bound}
    del got, exact, eager
    found = training_checks.check(fn, {"shape": shape, "runs": RUNS}, device)
    return {**found, "outputs": outputs, "ok": found["ok"] and all(o["ok"] for o in outputs.values())}


# --- models -------------------------------------------------------------------------------------------------------------------


def families() -> dict[str, tuple[Any, Any, Any]]:
    """Ours, the plain model, and the sizes."""
    from coda_lang import nn

    llama = nn.LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    gpt2 = nn.GPT2Config(vocab_size=1000, n_positions=256, n_embd=256, n_layer=4, n_head=4)
    return {"llama": (nn.LlamaForCausalLM, plain_models.PlainLlama, llama), "gpt2": (nn.GPT2LMHeadModel, plain_models.PlainGPT2, gpt2)}


def calls_of(model: Any, rows: int, outputs: tuple[str, ...] = ()) -> Iterator[tuple[Any, dict[str, int]]]:
    """A model's functions, with the extents of a training step of so many rows; of the head's `outputs`."""
    c, body = model.config, getattr(model, "model", None) or model.transformer
    sizes = {"m": rows, "v": c.vocab_size}
    sizes |= {"d": getattr(c, "hidden_size", 0) or c.n_embd, "f": getattr(c, "intermediate_size", 0) or c.n_inner}
    head = model.programs.head._chosen_for(outputs) if outputs else model.programs.head
    for fn in (body.programs.pre, body.programs.layer, body.programs.post, head):
        yield fn, {axis: size if size is not None else sizes[axis] for axis, size in fn.program.extents}


def compile_models(options: argparse.Namespace) -> None:
    """Compile the kernels of the models that are checked and trained, side by side."""
    calls: list[tuple[Any, Mapping[str, int]]] = []
    if "model" in options.parts:
        for ours, _, config in families().values():
            calls += calls_of(ours(config), math.prod(SHAPE))
    if "train" in options.parts:
        *_, sequences, length = train_llama.SIZES[options.size]
        calls += calls_of(train_llama.ours(options.size, "cpu")[0], sequences * length, ("loss",))
    compile_all(calls, "training")


def results(logits: torch.Tensor, loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What is compared: logits, loss, gradients by name."""
    model.zero_grad()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}


def check_model(family: str, device: str, shape: tuple[int, int] = SHAPE) -> dict[str, Any]:
    """A whole model against the plain one; errors of both by what they are errors of."""
    ours, plain, config = families()[family]
    off: dict[str, float] = {}
    may: dict[str, float] = {}
    repeatable = True
    path = None
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = ours(config)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(1 + 0.2 * torch.randn_like(p) if p.dim() == 1 else 0.08 * torch.randn_like(p))
        other = plain(config).bfloat16()
        other.load_state_dict(model.state_dict())
        model, other, exact = model.to(device), other.to(device), copy.deepcopy(other).to(device).double()
        for peer in (other, exact):
            if hasattr(peer, "freq"):
                peer.freq = peer.freq.to(device)
        ids = torch.randint(0, 1000, shape, device=device)

        def of_ours(model: Any = model, ids: torch.Tensor = ids) -> dict[str, torch.Tensor]:
            out = model(ids, labels=ids, return_logits=True)
            return results(out.logits, out.loss, model)

        got = {n: t.clone() for n, t in of_ours().items()}
        again = of_ours()
        stable = [n for n in got if n in ("logits", "loss")]  # torch's attention may add gradients in any order
        repeatable &= all(torch.equal(got[n], again[n]) for n in stable)
        path = model.last_path
        logits = other(ids)
        eager = results(logits, plain_models.loss(logits, ids), other)
        logits = exact(ids)
        true = results(logits, plain_models.loss(logits, ids), exact)
        assert set(got) == set(true)
        for name, value in true.items():
            off[name] = off.get(name, 0.0) + selfcheck.error(got[name], value) ** 2
            may[name] = may.get(name, 0.0) + selfcheck.error(eager[name], value) ** 2
    errors = {n: {"error": off[n] ** 0.5, "eager": may[n] ** 0.5} for n in off}
    wrong = [n for n, e in errors.items() if e["error"] > (LOSS_OFF if n == "loss" else 2 * e["eager"] + 1e-6)]
    ratios = [e["error"] / e["eager"] for n, e in errors.items() if n != "loss"]
    good = not wrong and repeatable and path == ("kernels" if device == "cuda" else "reference")
    return {
        "ok": good, "path": path, "wrong": wrong, "repeatable": repeatable, "compared": len(errors), "worst_ratio": max(ratios),
        "mean_ratio": sum(ratios) / len(ratios), "errors": errors,
    }  # fmt: skip


# --- all ----------------------------------------------------------------------------------------------------------------------


def checks(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every check's record."""
    device, deadline = options.device, time.time() + options.limit

    def safely(record: dict[str, Any], check: Any, *arguments: Any) -> dict[str, Any]:
        began = time.time()
        if began > deadline:
            return {**record, "ok": False, "left_out": "no time"}
        try:
            found = check(*arguments)
        except Exception as problem:
            found = {"ok": False, "raised": f"{type(problem).__name__}: {problem}"[:800]}
        return {**record, **found, "seconds": round(time.time() - began, 1)}

    if device == "cuda" and {"model", "train"} & set(options.parts):
        compile_models(options)
    if "model" in options.parts:
        for family in families():
            yield safely({"check": "model", "model": family}, check_model, family, device)
    if "train" in options.parts:
        yield safely({"check": "train"}, train_llama.compare, device, options.steps, options.size, options.out / "train_llama.json")
    if "programs" in options.parts:
        found = programs(options.only)
        for group in ([n for n in found if n in FIRST], [n for n in found if n not in FIRST]):
            calls = [(found[name], shape) for name in group for shape in shapes(found[name])]
            if device == "cuda" and time.time() < deadline:
                compile_all(calls)
            for fn, shape in calls:
                yield safely({"check": "program", "program": fn.program.name, "shape": shape}, check_program, fn, shape, device)


def main() -> int:
    """The command line; the exit status is 0 only if every check that was asked for was made and holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--only", nargs="+", default=[], help="programs; all of specs/*/ by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=train_llama.STEPS)
    parser.add_argument("--size", choices=list(train_llama.SIZES), default="small")
    parser.add_argument("--out", type=Path, default=Path("models"))
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no further check begins")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began, good = time.time(), True
    with (options.out / "models.jsonl").open("w", encoding="utf-8") as sink:
        sink.write(json.dumps(protocol.about(sys.argv)) + "\n")
        for record in checks(options):
            good &= record["ok"]
            sink.write(json.dumps(record) + "\n")
            sink.flush()
            long = ("errors",) if not record["ok"] else ("errors", "gradients", "outputs")
            print(json.dumps({k: v for k, v in record.items() if k not in long}), flush=True)
    print(json.dumps({"ok": good, "seconds": round(time.time() - began)}), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
