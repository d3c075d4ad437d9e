"""Speed of fused kernels and of their derivatives at LLaMA-3-8B's sizes: coda_lang, torch.compile and plain products, interleaved.

In: the functions of the programs by name, one Hopper GPU. Out: per group the median milliseconds of each method over rounds in which
every method runs once, with a cold L2 cache, on random data; ratios; how far the methods' results are apart. Times are the GPU's: a
wait ahead of each call hides the host. `sizes` shrinks everything, for tests. Non-goals: correctness against float64.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bench.training_cases import several
from coda_lang.backend_cute import timing

LLAMA_8B = {"m": 8192, "d": 4096, "f": 14336, "v": 128256}
PROGRAMS = (
    "swiglu_backward", "swiglu_backward_interleaved", "swiglu", "residual_sumsq", "lm_head", "mlp_block", "mlp_block_lanes",
    "linear_bf16", "linear_kn",
)  # fmt: skip
Call = Callable[[], Any]


# --- what users write in torch -----------------------------------------------------------------------------------------------


def swiglu_backward(dx: Any, w: Any, z: Any) -> Any:
    dy = (dx @ w).float()
    gate, up = (t.float() for t in z.chunk(2, -1))
    s = torch.sigmoid(gate)
    dgate, dup = dy * up * s * (1 + gate * (1 - s)), dy * gate * s
    dz = torch.cat([dgate, dup], -1).to(torch.bfloat16)
    return dz, (gate * s * up).to(torch.bfloat16), (dgate * gate + dup * up).sum(-1)


def swiglu(x: Any, w: Any) -> Any:
    z = x @ w.mT
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up, z


def residual_sumsq(x: Any, w: Any, r: Any, g: Any) -> Any:
    h = x @ w.mT + r
    return h, h * g, h.float().square().sum(-1)


def lm_head(x: Any, w: Any, target: Any) -> Any:
    z = (x @ w.mT).float()
    lse = torch.logsumexp(z, -1)
    return torch.where(target == -100, 0.0, lse - z.gather(-1, target[:, None])[:, 0]), lse


def mlp_block(a: Any, x0: Any, wo: Any, g: Any, wg: Any, wu: Any, wd: Any) -> Any:
    x1 = a @ wo.mT + x0
    n = F.rms_norm(x1, g.shape, g, 1e-5)
    return (F.silu(n @ wg.mT) * (n @ wu.mT)) @ wd.mT + x1


# --- groups ------------------------------------------------------------------------------------------------------------------


class Groups:
    """The groups by name; each gives its methods, the name of the one to hold against the others first."""

    names = ("swiglu_backward", "swiglu_forward", "residual_sumsq", "lm_head", "mlp_block_forward", "mlp_block_training")

    def __init__(self, functions: Mapping[str, Any], device: str = "cuda", sizes: Mapping[str, int] = LLAMA_8B) -> None:
        self.functions, self.device = functions, device
        self.m, self.d, self.f, self.v = (sizes[x] for x in "mdfv")

    def methods(self, name: str) -> dict[str, Call]:
        """The calls of a group by method."""
        torch.manual_seed(0)
        return getattr(self, name)()

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(torch.bfloat16)

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fn, fullgraph=True, dynamic=False) if self.device == "cuda" else fn

    def swiglu_backward(self) -> dict[str, Call]:
        m, d, f, fns = self.m, self.d, self.f, self.functions
        dx, w, z, peer = self.random(m, d), self.random(d, f, scale=f**-0.5), self.random(m, 2 * f), self.compiled(swiglu_backward)
        pairs = z.view(m, 2, f).transpose(1, 2).contiguous()
        return {
            "coda": lambda: fns["swiglu_backward"](dx, w, z),
            "coda_interleaved": lambda: fns["swiglu_backward_interleaved"](dx, w, pairs),
            "compile": lambda: peer(dx, w, z),
            "coda_gemm": lambda: fns["linear_kn"](dx, w),
            "gemm": lambda: torch.mm(dx, w),
        }

    def swiglu_forward(self) -> dict[str, Call]:
        m, d, f, fns = self.m, self.d, self.f, self.functions
        x, w, peer = self.random(m, d), self.random(2 * f, d, scale=d**-0.5), self.compiled(swiglu)
        pairs = w.view(2, f, d).transpose(0, 1).contiguous()
        return {
            "coda": lambda: fns["swiglu"](x, pairs),
            "compile": lambda: peer(x, w),
            "coda_gemm": lambda: fns["linear_bf16"](x, w),
            "gemm": lambda: torch.mm(x, w.mT),
        }

    def residual_sumsq(self) -> dict[str, Call]:
        m, d, f, fns = self.m, self.d, self.f, self.functions
        x, w, r, g = self.random(m, f), self.random(d, f, scale=f**-0.5), self.random(m, d), self.random(d)
        peer = self.compiled(residual_sumsq)
        return {
            "coda": lambda: fns["residual_sumsq"](x, w, r, g),
            "compile": lambda: peer(x, w, r, g),
            "coda_gemm": lambda: fns["linear_bf16"](x, w),
            "gemm": lambda: torch.mm(x, w.mT),
        }

    def lm_head(self) -> dict[str, Call]:
        m, d, v, fns = self.m, self.d, self.v, self.functions
        x, w, peer = self.random(m, d), self.random(v, d, scale=d**-0.5), self.compiled(lm_head)
        target = torch.randint(0, v, (m,), device=self.device)
        return {
            "coda": lambda: fns["lm_head"](x, w, target),
            "compile": lambda: peer(x, w, target),
            "coda_gemm": lambda: fns["linear_bf16"](x, w),
            "gemm": lambda: torch.mm(x, w.mT),
        }

    def _block(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inputs of `mlp_block`, and of `mlp_block_lanes`."""
        m, d, f = self.m, self.d, self.f
        a, x0, g = self.random(m, d), self.random(m, d), self.random(d)
        wo, w, wd = self.random(d, d, scale=d**-0.5), self.random(2 * f, d, scale=d**-0.5), self.random(d, f, scale=f**-0.5)
        return [a, x0, wo, g, w[:f].clone(), w[f:].clone(), wd], [a, x0, wo, g, w, wd]

    def mlp_block_forward(self) -> dict[str, Call]:
        apart, lanes = self._block()
        fns, peer, products = self.functions, self.compiled(mlp_block), self._products(1)
        return {
            "coda": no_grad(lambda: fns["mlp_block"](*apart)),
            "coda_lanes": no_grad(lambda: fns["mlp_block_lanes"](*lanes)),
            "compile": no_grad(lambda: peer(*apart)),
            "eager": no_grad(lambda: mlp_block(*apart)),
            "gemm": no_grad(products),
        }

    def mlp_block_training(self) -> dict[str, Call]:
        apart, lanes = ([t.requires_grad_() for t in tensors] for tensors in self._block())
        lanes = [t.detach().requires_grad_() for t in lanes]
        cotangent, fns, peer = self.random(self.m, self.d), self.functions, self.compiled(mlp_block)

        def training(fn: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> Call:
            return lambda: torch.autograd.grad(fn(*tensors), tensors, cotangent)

        return {
            "coda": training(fns["mlp_block"], apart),
            "coda_lanes": training(fns["mlp_block_lanes"], lanes),
            "compile": training(peer, apart),
            "eager": training(mlp_block, apart),
            "gemm": no_grad(self._products(3)),
        }

    def _products(self, passes: int) -> Call:
        """The products of `mlp_block` alone: forward, or with both of each one's backward."""
        m, d, f = self.m, self.d, self.f
        x, y = self.random(m, d), self.random(m, f)
        wo, w, wd = self.random(d, d, scale=d**-0.5), self.random(2 * f, d, scale=d**-0.5), self.random(d, f, scale=f**-0.5)
        z = self.random(m, 2 * f)

        def call() -> None:
            for a, b, c in ((x, wo, x), (x, w, z), (y, wd, x)):
                torch.mm(a, b.mT)
                if passes > 1:
                    torch.mm(c, b)
                    torch.mm(c.mT, a)

        return call


def no_grad(call: Call) -> Call:
    """The call without gradients."""

    def quiet() -> Any:
        with torch.no_grad():
            return call()

    return quiet


# --- measuring -----------------------------------------------------------------------------------------------------------------


def apart(one: Any, other: Any) -> float:
    """The largest relative Frobenius distance between results, of those of one shape; only a check that both compute the same thing."""
    pairs = [(a, b) for a, b in zip(several(one), several(other)) if a.numel() == b.numel()]
    return max(float((a.double().flatten() - b.double().flatten()).norm() / b.double().norm()) for a, b in pairs)


def measure(groups: Groups, name: str) -> dict[str, Any]:
    """One group: medians, ratios to the best product and of torch.compile to coda_lang."""
    methods = groups.methods(name)
    ours, peer = methods["coda"](), methods["compile"]()
    distance = apart(ours[0], peer[0]) if name == "swiglu_forward" else apart(ours, peer)  # its z is interleaved
    del ours, peer
    peaks = {}
    for method, call in methods.items():
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks[method] = round((torch.cuda.max_memory_allocated() - held) / 2**20)
    times = timing.interleaved(methods)
    medians = {method: statistics.median(t) for method, t in times.items()}
    spread = {m: round((sorted(t)[len(t) * 9 // 10] - sorted(t)[len(t) // 10]) / medians[m], 3) for m, t in times.items()}
    ratios = {f"compile / {m}": round(medians["compile"] / t, 3) for m, t in medians.items() if m.startswith("coda") and m != "coda_gemm"}
    ratios |= {f"{m} / gemm": round(t / medians["gemm"], 3) for m, t in medians.items() if m != "gemm"}
    return {
        "ok": distance < 2e-2, "ms": {m: round(t, 4) for m, t in medians.items()}, "ratios": ratios, "distance": distance,
        "spread_p10_p90": spread, "rounds": len(times["coda"]), "peak_mib": peaks,
    }  # fmt: skip
