"""Speed of fused kernels and of their derivatives at LLaMA-3-8B's sizes: coda_lang, torch.compile and plain products, interleaved.

In: the functions of the programs by name, one Hopper GPU. Out: a record a group, by bench/protocol.py; every method's results are compared
with eager PyTorch's first. `sizes` shrinks everything, for tests. Non-goals: correctness against float64, other libraries (`rivals`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bench.protocol import Call, Method, no_grad
from bench.protocol import measure as measured
from bench.works import halves, pairs, swiglu, swiglu_backward

LLAMA_8B = {"m": 8192, "d": 4096, "f": 14336, "v": 128256}
PROGRAMS = (
    "swiglu_backward", "swiglu_backward_interleaved", "swiglu", "residual_sumsq", "lm_head", "mlp_block", "mlp_block_lanes",
    "linear_bf16", "linear_kn",
)  # fmt: skip
FAR = 2e-2  # between two ways to compute a group in bf16


# --- what users write in torch -----------------------------------------------------------------------------------------------


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


Group = tuple[dict[str, Method], Call]


# --- groups ------------------------------------------------------------------------------------------------------------------


class Groups:
    """The groups by name; each gives its methods, and the one in eager PyTorch whose results are theirs."""

    names = ("swiglu_backward", "swiglu_forward", "residual_sumsq", "lm_head", "mlp_block_forward", "mlp_block_training")

    def __init__(self, functions: Mapping[str, Any], device: str = "cuda", sizes: Mapping[str, int] = LLAMA_8B) -> None:
        self.functions, self.device = functions, device
        self.m, self.d, self.f, self.v = (sizes[x] for x in "mdfv")

    def methods(self, name: str) -> Group:
        """A group."""
        torch.manual_seed(0)
        return getattr(self, name)()

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(torch.bfloat16)

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fn, fullgraph=True, dynamic=False) if self.device == "cuda" else fn

    def swiglu_backward(self) -> Group:
        m, d, f, fns = self.m, self.d, self.f, self.functions
        dx, w, z, peer = self.random(m, d), self.random(d, f, scale=f**-0.5), self.random(m, 2 * f), self.compiled(swiglu_backward)
        beside = pairs(z)
        return {
            "coda": Method(lambda: fns["swiglu_backward"](dx, w, z), lambda out: (out[0].flatten(1), *out[1:]), ours=True),
            "coda_interleaved": Method(
                lambda: fns["swiglu_backward_interleaved"](dx, w, beside), lambda out: (halves(out[0]), *out[1:]), ours=True
            ),
            "compile": Method(lambda: peer(dx, w, z)),
            "coda_gemm": Method(lambda: fns["linear_kn"](dx, w), part=True),
            "gemm": Method(lambda: torch.mm(dx, w), part=True),
        }, lambda: swiglu_backward(dx, w, z)

    def swiglu_forward(self) -> Group:
        m, d, f, fns = self.m, self.d, self.f, self.functions
        x, w, peer = self.random(m, d), self.random(2 * f, d, scale=d**-0.5), self.compiled(swiglu)
        beside = w.view(2, f, d).transpose(0, 1).contiguous()
        ours = Method(lambda: fns["swiglu"](x, beside), lambda out: (out[0], halves(out[1])), ours=True)
        return {"coda": ours, "compile": Method(lambda: peer(x, w)), **self._product(x, w)}, lambda: swiglu(x, w)

    def _product(self, x: Any, w: Any) -> dict[str, Method]:
        """x wᵀ alone, by our kernel and by torch.mm."""
        ours = self.functions["linear_bf16"]
        return {"coda_gemm": Method(lambda: ours(x, w), part=True), "gemm": Method(lambda: torch.mm(x, w.mT), part=True)}

    def residual_sumsq(self) -> Group:
        m, d, f, fns = self.m, self.d, self.f, self.functions
        x, w, r, g = self.random(m, f), self.random(d, f, scale=f**-0.5), self.random(m, d), self.random(d)
        peer = self.compiled(residual_sumsq)
        ours = Method(lambda: fns["residual_sumsq"](x, w, r, g), ours=True)
        return {"coda": ours, "compile": Method(lambda: peer(x, w, r, g)), **self._product(x, w)}, lambda: residual_sumsq(x, w, r, g)

    def lm_head(self) -> Group:
        m, d, v, fns = self.m, self.d, self.v, self.functions
        x, w, peer = self.random(m, d), self.random(v, d, scale=d**-0.5), self.compiled(lm_head)
        target = torch.randint(0, v, (m,), device=self.device)
        ours = Method(lambda: fns["lm_head"](x, w, target), ours=True)
        return {"coda": ours, "compile": Method(lambda: peer(x, w, target)), **self._product(x, w)}, lambda: lm_head(x, w, target)

    def _block(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inputs of `mlp_block`, and of `mlp_block_lanes`."""
        m, d, f = self.m, self.d, self.f
        a, x0, g = self.random(m, d), self.random(m, d), self.random(d)
        wo, w, wd = self.random(d, d, scale=d**-0.5), self.random(2 * f, d, scale=d**-0.5), self.random(d, f, scale=f**-0.5)
        return [a, x0, wo, g, w[:f].clone(), w[f:].clone(), wd], [a, x0, wo, g, w, wd]

    def mlp_block_forward(self) -> Group:
        apart, lanes = self._block()
        fns, peer, products = self.functions, self.compiled(mlp_block), self._products(1)
        eager = no_grad(lambda: mlp_block(*apart))
        return {
            "coda": Method(no_grad(lambda: fns["mlp_block"](*apart)), ours=True),
            "coda_lanes": Method(no_grad(lambda: fns["mlp_block_lanes"](*lanes)), ours=True),
            "compile": Method(no_grad(lambda: peer(*apart))),
            "eager": Method(eager),
            "gemm": Method(no_grad(products), part=True),
        }, eager

    def mlp_block_training(self) -> Group:
        apart, lanes = ([t.requires_grad_() for t in tensors] for tensors in self._block())
        lanes = [t.detach().requires_grad_() for t in lanes]
        cotangent, fns, peer = self.random(self.m, self.d), self.functions, self.compiled(mlp_block)

        def training(fn: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> Call:
            return lambda: torch.autograd.grad(fn(*tensors), tensors, cotangent)

        def one_weight(found: Any) -> Any:  # whose gradient is that of gate above that of up
            return (*found[:4], *found[4].unflatten(0, (2, -1)), *found[5:])

        eager = training(mlp_block, apart)
        return {
            "coda": Method(training(fns["mlp_block"], apart), ours=True),
            "coda_lanes": Method(training(fns["mlp_block_lanes"], lanes), one_weight, ours=True),
            "compile": Method(training(peer, apart)),
            "eager": Method(eager),
            "gemm": Method(no_grad(self._products(3)), part=True),
        }, eager

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


def measure(groups: Groups, name: str) -> dict[str, Any]:
    """The record of one group."""
    methods, want = groups.methods(name)
    return measured(methods, want, graphs=not name.endswith("training"), far=FAR)
