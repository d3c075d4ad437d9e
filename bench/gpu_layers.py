"""Whole LLaMA layers and the loss on a Hopper GPU: coda_lang, eager PyTorch, torch.compile, Liger, and the plain products, interleaved.

    python bench/gpu_layers.py [--only layer_8B layer_1B loss_8B …] [--tokens 8192 16384] [--out FILE] [--limit SECONDS]
    python bench/gpu_layers.py --table FILE     # what was measured, as a table in Markdown

A layer is shifted by half, attention excluded: output projection, residual, norm, gated feed-forward block, residual, norm, queries, keys
and values with rotary embedding (specs/llama/layer.coda); forward without gradients, and forward with backward to every input and weight.
The loss is head and cross-entropy of hidden states, forward with backward. Measured by bench/protocol.py: methods are compared with eager
PyTorch before they are timed. "gemm" is torch.mm alone for the products (three passes of each for a backward), "coda_gemm" ours: the
faster of both is what others are held to. A line of JSON a result; a file that is there already is gone on with.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import need_gpu, protocol, rivals, training_cases  # noqa: E402
from bench.protocol import Call, Method, no_grad, several  # noqa: E402

# Width, feed-forward width, heads, heads of keys and values, dims of a head; words.
MODELS = {"8B": (4096, 14336, 32, 8, 128, 128256), "1B": (2048, 8192, 32, 8, 64, 128256)}
TOKENS = (8192, 16384)
EPS, THETA = 1e-5, 500000.0
AHEAD = 10_000_000  # cycles that the GPU waits before a call, in which the host gets ahead of some hundred launches
PRODUCTS = """
program forward_product(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = x @ w

program data_gradient(dy: bf16[m, n], w: bf16[n, k]) -> (dx: bf16[m, k])
dx = dy @ w

program weight_gradient(dy: bf16[m, n], x: bf16[m, k]) -> (dw: bf16[n, k])
dw = dy @ x
"""
Methods = dict[str, Method]


# --- what users write in torch ------------------------------------------------------------------------------------------------


def norm(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return g * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def layer(a, x0, wo, g1, wg, wu, wd, g2, wq, wk, wv, cos, sin):  # type: ignore[no-untyped-def]
    """A layer shifted by half as Hugging Face's operations make it."""
    hd = cos.shape[-1]
    x1 = F.linear(a, wo) + x0
    n1 = norm(x1, g1)
    x2 = F.linear(F.silu(F.linear(n1, wg)) * F.linear(n1, wu), wd) + x1
    n2 = norm(x2, g2)
    q, k, v = (F.linear(n2, w).unflatten(-1, (-1, hd)) for w in (wq, wk, wv))
    return x2, turned(q, cos, sin), turned(k, cos, sin), v


def loss(h: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(h, w).float(), target)


def liger_layer() -> Callable[..., Any]:
    """The same with Liger's kernels; ImportError where there are none."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def run(a, x0, wo, g1, wg, wu, wd, g2, wq, wk, wv, cos, sin):  # type: ignore[no-untyped-def]
        hd = cos.shape[-1]
        x1 = F.linear(a, wo) + x0
        n1 = LigerRMSNormFunction.apply(x1, g1, EPS)
        x2 = F.linear(LigerSiLUMulFunction.apply(F.linear(n1, wg), F.linear(n1, wu)), wd) + x1
        n2 = LigerRMSNormFunction.apply(x2, g2, EPS)
        q, k, v = (F.linear(n2, w).view(1, len(n2), -1, hd) for w in (wq, wk, wv))
        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos.view(1, len(n2), hd), sin.view(1, len(n2), hd))
        return x2, q.transpose(1, 2)[0], k.transpose(1, 2)[0], v[0]

    return run


def liger_loss() -> Callable[..., Any]:
    """Liger's fused linear cross-entropy; ImportError where there is none."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda h, w, target: several(LigerFusedLinearCrossEntropyFunction.apply(h, w, target))[0]


# --- groups -------------------------------------------------------------------------------------------------------------------


class Bench:
    """What is measured, by name; `device` and `models` shrink it for tests."""

    def __init__(self, device: str = "cuda", models: Mapping[str, tuple[int, ...]] = MODELS) -> None:
        import coda_lang

        self.device, self.models = device, models
        self.products = coda_lang.compile(PRODUCTS)
        self.missing = rivals.peers([rivals.ADAPTERS["liger"]]).missing

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(torch.bfloat16)

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fn, fullgraph=True, dynamic=False) if self.device == "cuda" else fn

    def program(self, model: str) -> Any:
        """The layer's compiled program."""
        from coda_lang.nn.weights import Programs

        _, _, heads, kv_heads, hd, _ = self.models[model]
        return Programs("llama", ("layer",), {"qh": heads, "kh": kv_heads, "pair": hd // 2}, {"eps": EPS}).layer

    def head(self) -> Any:
        """The head's compiled programs."""
        from coda_lang.nn.head import programs

        return programs(-100)

    def inputs(self, model: str, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """What has gradients, what ours takes besides, what the others take besides."""
        d, f, heads, kv_heads, hd, _ = self.models[model]
        q, kv, r = heads * hd, kv_heads * hd, self.random
        norms = [(1 + 0.1 * torch.randn(d, device=self.device)).to(torch.bfloat16) for _ in range(2)]
        made = [r(tokens, q), r(tokens, d), r(d, q, scale=q**-0.5), norms[0], r(f, d, scale=d**-0.5), r(f, d, scale=d**-0.5)]
        made += [r(d, f, scale=f**-0.5), norms[1], r(q, d, scale=d**-0.5), r(kv, d, scale=d**-0.5), r(kv, d, scale=d**-0.5)]
        pos = torch.arange(tokens, dtype=torch.int32, device=self.device)
        freq = (1.0 / THETA ** (torch.arange(0, hd, 2, device=self.device) / hd)).float()
        angle = (pos[:, None] * freq).repeat(1, 2)[:, None]
        return [t.requires_grad_() for t in made], [pos, freq], [angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)]

    def layer(self, model: str, tokens: int) -> dict[str, Methods]:
        """The methods of both passes."""
        leaves, ours_too, theirs_too = self.inputs(model, tokens)
        fn, d, heads, kv_heads, hd = self.program(model), *(self.models[model][i] for i in (0, 2, 3, 4))
        shapes = [(tokens, d), (tokens, heads, hd), (tokens, kv_heads, hd), (tokens, kv_heads, hd)]
        given = [self.random(*s, scale=0.1) for s in shapes]
        methods: dict[str, Callable[[], Any]] = {"coda": lambda: fn(*leaves, *ours_too)}
        for name, peer in self.peers(layer, liger_layer).items():
            methods[name] = lambda peer=peer: peer(*leaves, *theirs_too)

        def training(call: Call) -> Call:
            def run() -> Any:
                outs = call()
                return torch.autograd.grad([o.reshape(g.shape) for o, g in zip(outs, given)], leaves, given)

            return run

        floors = {passes: self.plain(model, tokens, passes) for passes in (1, 3)}
        return {
            "forward": {n: whole(n, no_grad(c)) for n, c in methods.items()} | floors[1],
            "forward+backward": {n: whole(n, training(c)) for n, c in methods.items()} | floors[3],
        }

    def loss(self, model: str, tokens: int) -> dict[str, Methods]:
        """The methods of the loss with its backward."""
        d, *_, v = self.models[model]
        h, w = self.random(tokens, d).requires_grad_(), self.random(v, d, scale=d**-0.5).requires_grad_()
        target = torch.randint(0, v, (tokens,), device=self.device)
        heads = self.head()
        methods: dict[str, Callable[..., Any]] = {
            "coda": lambda *t: heads.head(*t, outputs="loss").mean(),
            "coda_chunked": lambda *t: heads.head_chunked(*t).mean(),
            **self.peers(loss, liger_loss),
        }

        def training(fn: Callable[..., Any]) -> Call:
            return lambda: torch.autograd.grad(fn(h, w, target), (h, w))

        products = self.passes([(h.detach(), w.detach(), self.random(tokens, v))], 3)
        return {"forward+backward": {n: whole(n, training(fn)) for n, fn in methods.items()} | products}

    def peers(self, eager: Callable[..., Any], liger: Callable[[], Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """The other methods by name; Liger where it imports, else `missing` says why."""
        found: dict[str, Callable[..., Any]] = {"eager": eager, "compile": self.compiled(eager)}
        return found if "liger" in self.missing else found | {"liger": liger()}

    def plain(self, model: str, tokens: int, passes: int) -> Methods:
        """The products of a layer alone: four forward, gate with up and q, k, v in one each."""
        d, f, heads, kv_heads, hd, _ = self.models[model]
        q, kv, r = heads * hd, kv_heads * hd, self.random
        sizes = [(q, d), (d, 2 * f), (f, d), (d, q + 2 * kv)]
        return self.passes([(r(tokens, k), r(n, k, scale=k**-0.5), r(tokens, n)) for k, n in sizes], passes)

    def passes(self, operands: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], passes: int) -> Methods:
        """x @ wᵀ, and with 3 passes dy @ w and dyᵀ @ x, by torch.mm and by our kernels."""

        def torchs() -> None:
            for x, w, dy in operands:
                torch.mm(x, w.mT)
                if passes > 1:
                    torch.mm(dy, w)
                    torch.mm(dy.mT, x)

        def ours() -> None:
            for x, w, dy in operands:
                self.products.forward_product(x, w)
                if passes > 1:
                    self.products.data_gradient(dy, w)
                    self.products.weight_gradient(dy, x)

        return {"gemm": Method(no_grad(torchs), part=True), "coda_gemm": Method(no_grad(ours), part=True)}

    def compile(self, cases: Sequence[tuple[str, str, int]], workers: int | None = None) -> int:
        """Compile the kernels of all cases side by side; how many there are."""
        from coda_lang.backend_cute import compile

        jobs: dict[str, Any] = {}

        def add(fn: Any, kind: str, shape: Mapping[str, int]) -> None:
            full = {axis: size if size is not None else shape[axis] for axis, size in fn.program.extents}
            jobs.update({j.key: j for j in training_cases.needed(fn, {"kind": kind, "shape": full})})

        for kind, model, tokens in cases:
            d, f, heads, kv_heads, hd, v = self.models[model]
            q, kv = heads * hd, kv_heads * hd
            if kind == "layer":
                add(self.program(model), "gradients", {"m": tokens, "d": d, "f": f})
                sizes = [(q, d), (d, 2 * f), (f, d), (d, q + 2 * kv)]
            else:
                chosen = self.head()
                add(chosen.head._chosen_for(("loss",)), "gradients", {"m": tokens, "d": d, "v": v})
                add(chosen.head_chunked, "gradients", {"m": tokens, "d": d, "v": v})
                sizes = [(d, v)]
            for k, n in sizes:
                for fn in vars(self.products).values():
                    add(fn, "forward", {"m": tokens, "k": k, "n": n})
        compile.objects_for(jobs.values(), workers)
        return len(jobs)


# --- measuring ----------------------------------------------------------------------------------------------------------------


def whole(name: str, call: Call) -> Method:
    """A method that does all of the work; heads may be an axis of their own, or not."""
    return Method(call, lambda out: [t.flatten() for t in several(out)], ours=name.startswith("coda"))


def measure(methods: Methods, clock: protocol.Gpu | None = None) -> dict[str, Any]:
    """The record of one pass of one case."""
    want = methods["eager"]
    return protocol.measure(methods, lambda: want.results(want.call()), clock or protocol.Gpu(ahead=AHEAD), graphs=False)


def run(options: argparse.Namespace) -> int:
    """All cases until the limit; the exit status."""
    began = time.time()
    bench = Bench()
    sheet = protocol.Sheet(options.out, protocol.about(sys.argv, missing=bench.missing), ("case", "model", "tokens", "pass"))
    wanted = [tuple(name.split("_")) for name in options.only]
    cases = [(kind, model, tokens) for tokens in options.tokens for kind, model in wanted if kind == "layer" or tokens == options.tokens[0]]
    last = "forward+backward"
    cases = [
        (kind, model, tokens) for kind, model, tokens in cases if not sheet.has(case=kind, model=model, tokens=tokens, **{"pass": last})
    ]
    count = bench.compile(cases)
    print(json.dumps({"compiled": count, "seconds": round(time.time() - began)}), flush=True)
    good = True
    for kind, model, tokens in cases:
        case: dict[str, Any] = {"case": kind, "model": model, "tokens": tokens}
        if time.time() - began > options.limit:
            good = False
            print(json.dumps({**case, "left_out": "no time"}), flush=True)
            continue
        torch.manual_seed(0)
        for name, methods in (bench.layer if kind == "layer" else bench.loss)(model, tokens).items():
            record = {**case, "pass": name}
            try:
                record |= measure(methods)
            except Exception as problem:
                record |= {"ok": False, "raised": {"all": f"{type(problem).__name__}: {problem}"[:800]}}
            good &= record["ok"]
            sheet.add(record)
        del methods
        torch.cuda.empty_cache()
    return 0 if good else 1


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """What was measured, for docs/performance.md: milliseconds, and MiB where a peak is shown."""
    methods = ("eager", "liger", "compile", "coda", "coda_chunked")
    lines = ["| case, tokens, pass | products alone | " + " | ".join(methods) + " | coda / products | compile / coda |"]
    lines.append("|---" * (len(methods) + 4) + "|")
    for r in (r for r in records if "ms" in r):
        ms, peaks = r["ms"], r["peak_mib"]
        floor = min(ms["gemm"], ms["coda_gemm"])
        cells = [f"{ms[m]:.2f}, {peaks[m]:.0f} MiB" if m in ms else "" for m in methods]
        lines.append(
            f"| {r['case']} {r['model']}, {r['tokens']}, {r['pass']} | {floor:.2f} | {' | '.join(cells)} "
            f"| {ms['coda'] / floor:.2f} | {ms['compile'] / ms['coda']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["layer_8B", "layer_1B", "loss_8B"], help="layer_ or loss_ and a model")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--out", type=Path, default=Path("layers.jsonl"))
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no further case begins")
    parser.add_argument("--table", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return 0
    need_gpu.insist()
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
