"""The work that ours and rivals are measured at: what goes in, what must come out, as a user writes it in torch.

In: a device, sizes. Out: `Case`s: tensors with what the work makes of them, by the function that torch.compile is given too. Outputs of a
work with a derivative are followed by the gradients of all its inputs. Non-goals: who does it (`rivals`), measuring (`protocol`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from bench.protocol import Call, no_grad, several

BF16 = torch.bfloat16
EPS = 1e-6
# Width, columns of q, k and v, width of the feed-forward block, of LLaMA-3.
MODELS = {"1B": (2048, 3072, 8192), "8B": (4096, 6144, 14336), "70B": (8192, 10240, 28672)}
TOKENS = (8192, 16384)
VOCABULARIES = (32768, 128256)
CUBES = (2048, 4096, 8192)
RAGGED = {"m": 4097, "n": 4104, "k": 1016, "d": 1016, "f": 2056, "v": 32008}
Sizes = Mapping[str, int]


# --- what users write in torch: a [m, …] activation, weights as torch.nn.Linear stores them, gate and up as halves ---------------


def gemm(x: Any, w: Any) -> Any:
    return x @ w.mT


def swiglu(x: Any, w: Any) -> Any:
    z = x @ w.mT
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up, z


def rmsnorm_swiglu(x: Any, w: Any, rstd: Any) -> Any:
    z = (x @ w.mT) * rstd[:, None].to(x.dtype)
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up, z


def residual_rms(x: Any, w: Any, r: Any, g: Any) -> Any:
    h = x @ w.mT + r
    return h, h * g, torch.rsqrt(h.float().square().mean(-1) + EPS)


def swiglu_backward(dx: Any, w: Any, z: Any) -> Any:
    dy = (dx @ w).float()
    gate, up = (t.float() for t in z.chunk(2, -1))
    s = torch.sigmoid(gate)
    dgate, dup = dy * up * s * (1 + gate * (1 - s)), dy * gate * s
    dz = torch.cat([dgate, dup], -1).to(BF16)
    return dz, (gate * s * up).to(BF16), (dgate * gate + dup * up).sum(-1)


def rmsnorm_lse(x: Any, w: Any, rstd: Any) -> Any:
    z = (x @ w.mT) * rstd[:, None].to(x.dtype)
    return z, torch.logsumexp(z.float(), -1)


def linear_swiglu(x: Any, w: Any) -> Any:
    gate, up = (x @ w.mT).chunk(2, -1)
    return F.silu(gate) * up


def linear_cross_entropy(x: Any, w: Any, target: Any) -> Any:
    return F.cross_entropy((x @ w.mT).float(), target)


def rmsnorm(x: Any, g: Any) -> Any:
    return F.rms_norm(x, g.shape, g, EPS)


# --- works -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """`inputs` gives each tensor's shape by name, with its scale; `products` the sizes (m, n, k) of the products in it, each pass."""

    name: str
    what: str
    eager: Callable[..., Any]
    inputs: Mapping[str, tuple[str, ...]]
    outputs: tuple[str, ...]
    product: tuple[str, str, str] | None
    training: bool = False
    transposed: bool = False  # the weight is stored [k, n]

    @property
    def axes(self) -> tuple[str, ...]:
        """The free axes."""
        return tuple(dict.fromkeys(a.lstrip("2") for shape in self.inputs.values() for a in shape))


WORKS = {
    w.name: w
    for w in (
        Work("gemm", "y = x wᵀ", gemm, {"x": ("m", "k"), "w": ("n", "k")}, ("y",), ("m", "n", "k")),
        Work("swiglu", "z = x wᵀ stored in bf16, y = silu(gate) · up of its halves", swiglu,
             {"x": ("m", "d"), "w": ("2f", "d")}, ("y", "z"), ("m", "2f", "d")),
        Work("rmsnorm_swiglu", "the same with z = (x wᵀ) · rstd, one factor a row", rmsnorm_swiglu,
             {"x": ("m", "d"), "w": ("2f", "d"), "rstd": ("m",)}, ("y", "z"), ("m", "2f", "d")),
        Work("residual_rms", "h = x wᵀ + r, h · g, and each row's reciprocal root mean square", residual_rms,
             {"x": ("m", "f"), "w": ("d", "f"), "r": ("m", "d"), "g": ("d",)}, ("h", "hg", "rstd"), ("m", "d", "f")),
        Work("swiglu_backward", "dy = dx w; from z the gradient of z, y again, and the row sums Σ z·dz", swiglu_backward,
             {"dx": ("m", "d"), "w": ("d", "f"), "z": ("m", "2f")}, ("dz", "y", "rows"), ("m", "f", "d"), transposed=True),
        Work("rmsnorm_lse", "z = (x wᵀ) · rstd stored in bf16, and each row's logsumexp", rmsnorm_lse,
             {"x": ("m", "d"), "w": ("v", "d"), "rstd": ("m",)}, ("z", "lse"), ("m", "v", "d")),
        Work("linear_swiglu", "y = silu(gate) · up of x wᵀ, and the gradients of x and w", linear_swiglu,
             {"x": ("m", "d"), "w": ("2f", "d")}, ("y", "dx", "dw"), ("m", "2f", "d"), training=True),
        Work("linear_cross_entropy", "the mean cross-entropy of x wᵀ, and the gradients of x and w", linear_cross_entropy,
             {"x": ("m", "d"), "w": ("v", "d"), "target": ("m",)}, ("loss", "dx", "dw"), ("m", "v", "d"), training=True),
        Work("rmsnorm", "RMSNorm of stored x, and the gradients of x and g", rmsnorm,
             {"x": ("m", "d"), "g": ("d",)}, ("y", "dx", "dg"), None, training=True),
    )
}  # fmt: skip


class Case:
    """One work at one size: its tensors `t` by name, the gradient `given` that comes in."""

    def __init__(self, work: Work, sizes: Sizes, device: str, seed: int = 0) -> None:
        self.work, self.sizes, self.device = work, {a: sizes[a] for a in work.axes}, device
        self.gen = torch.Generator(device).manual_seed(seed)
        self.t = {name: self._input(name, shape) for name, shape in work.inputs.items()}
        if work.training:
            for t in self.t.values():
                t.requires_grad_(t.is_floating_point())
            with torch.no_grad():
                y = work.eager(*self.t.values())
            self.given = self.random(*y.shape, scale=0.1).to(y.dtype) if y.dim() else torch.ones_like(y)

    def extent(self, size: str) -> int:
        """ "2f" is twice f."""
        return 2 * self.sizes[size[1:]] if size.startswith("2") else self.sizes[size]

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.gen, device=self.device) * scale).to(BF16)

    def _input(self, name: str, shape: tuple[str, ...]) -> torch.Tensor:
        extents = [self.extent(s) for s in shape]
        if name == "target":
            return torch.randint(0, self.sizes["v"], extents, generator=self.gen, device=self.device)
        if name == "rstd":
            return torch.rand(*extents, generator=self.gen, device=self.device) + 0.5
        if name == "w" and self.work.product:
            return self.random(*extents, scale=self.extent(self.work.product[2]) ** -0.5)
        return 1 + self.random(*extents, scale=0.1) if name == "g" else self.random(*extents)

    def want(self) -> tuple[torch.Tensor, ...]:
        """The work's outputs by eager PyTorch."""
        return several(self.call(self.work.eager)())

    def call(self, fn: Callable[..., Any], *tensors: torch.Tensor) -> Call:
        """`fn` of the work's inputs, or of others in their place; with gradients where the work has them."""
        values = tensors or tuple(self.t.values())
        if not self.work.training:
            return no_grad(lambda: fn(*values))
        leaves = [t for t in values if t.is_floating_point()]

        def step() -> Any:
            y = fn(*values)
            return (y.detach(), *torch.autograd.grad(y, leaves, self.given.reshape(y.shape).to(y.dtype)))

        return step

    def paired(self, w: torch.Tensor) -> torch.Tensor:
        """Halves along the first dim as adjacent rows: [2f, …] as [f, 2, …]."""
        return w.detach().unflatten(0, (2, -1)).transpose(0, 1).contiguous().requires_grad_(w.requires_grad)

    def products(self) -> Call:
        """The products alone, by torch.mm: forward, or all three of a step."""
        x, w = (self.t[name].detach() for name in ("dx" if "dx" in self.t else "x", "w"))
        right = w if self.work.transposed else w.mT
        dy = self.random(x.shape[0], right.shape[1]) if self.work.training else None

        def call() -> Any:
            y = torch.mm(x, right)
            if dy is not None:
                torch.mm(dy, right.mT)
                torch.mm(dy.mT, x)
            return y

        return no_grad(call)


def halves(z: torch.Tensor) -> torch.Tensor:
    """Interleaved columns [m, f, 2] or [m, 2f] as halves [m, 2f]."""
    return z.reshape(z.shape[0], -1, 2).transpose(1, 2).reshape(z.shape[0], -1)


def pairs(z: torch.Tensor) -> torch.Tensor:
    """Halves [m, 2f] as interleaved columns [m, f, 2]."""
    return z.unflatten(1, (2, -1)).transpose(1, 2).contiguous()


def row_halves(w: torch.Tensor) -> torch.Tensor:
    """Interleaved rows [f, 2, d] or [2f, d] as halves [2f, d]."""
    return w.reshape(-1, 2, w.shape[-1]).transpose(0, 1).reshape(-1, w.shape[-1])


# --- shapes ----------------------------------------------------------------------------------------------------------------------


def cases(
    only: Sequence[str] = (), models: Sequence[str] = tuple(MODELS), tokens: Sequence[int] = TOKENS
) -> Iterator[tuple[str, str, dict[str, int]]]:
    """(work, where the shape comes from, its sizes): LLaMA-3's, then those where all extents are alike, and ragged ones."""
    names = only or tuple(WORKS)
    for name in names:
        for model in models:
            for m in tokens:
                yield from ((name, f"{model}{part}", sizes) for part, sizes in _of_model(WORKS[name], model, m, m == tokens[0]))
    for name in names:
        axes = WORKS[name].axes
        wide = "2f" in (WORKS[name].product or ())
        yield from ((name, "cube", {a: n // 2 if a == "f" and wide else n for a in axes}) for n in CUBES)
        yield name, "ragged", {a: RAGGED[a] for a in axes}


def _of_model(work: Work, model: str, m: int, heads: bool) -> Iterator[tuple[str, dict[str, int]]]:
    d, qkv, f = MODELS[model]
    if work.name == "gemm":
        weights = [("o", d, d), ("qkv", qkv, d), ("gate-up", 2 * f, d), ("down", d, f)]
        weights += [("head", v, d) for v in VOCABULARIES] if heads else []
        yield from ((f" {part}", {"m": m, "n": n, "k": k}) for part, n, k in weights)
        return
    for v in VOCABULARIES if "v" in work.axes else (0,):
        yield "", {a: {"m": m, "d": d, "f": f, "v": v}[a] for a in work.axes}
