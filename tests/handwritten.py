"""Programs written by hand as `spec` records, with their scalar functions and references: what the emitter will produce, before it does.

`ALL` maps a name to `Case(program, functions, reference)`; a reference takes `torch_fns.Written()` or `Exact()` first.
Each uses one more of the contract's features than the last; the tests of twin, host and self-check run all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from coda_lang.backend_cute import spec as s
from coda_lang.backend_cute.torch_fns import DTYPES


@dataclass(frozen=True)
class Case:
    """A program, its scalar functions by name, and its reference `(f, *tensors) -> tuple`."""

    program: s.Program
    functions: dict[str, Callable[..., tuple]]
    reference: Callable[..., tuple]


def program(name, inputs, outputs, kernels, requires=(), **extents) -> s.Program:
    """`x: bf16[m, d]` written as `"x bf16 m d"`; every axis not in `extents` is free."""

    def argument(text: str) -> s.Argument:
        const = text.startswith("const ")
        arg, dtype, *axes = text.removeprefix("const ").split()
        return s.Argument(arg, dtype, tuple(axes), const)

    ins, outs = tuple(map(argument, inputs)), tuple(map(argument, outputs))
    names = dict.fromkeys(a for arg in ins + outs for a in arg.axes)
    return s.Program(name, ins, outs, tuple((a, extents.get(a)) for a in names), tuple(kernels), tuple(requires))


def tensor(text: str, role: str = "in") -> s.Tensor:
    """`"x bf16 m d"`; merged axes of one mode are joined by a dot."""
    name, dtype, *modes = text.split()
    return s.Tensor(name, dtype, tuple(tuple(m.split(".")) for m in modes), role)


ROW, COL = s.Index("row"), s.Index("col")
A = s.Matrix("x", (0,), (1,))
W = s.Matrix("w", (0,), (1,))
Y = s.Matrix("y", (0,), (1,))
NO_LANES = (s.Product(A, (W,)),)


# --- y = x @ w ---------------------------------------------------------------------------------------------------------


def linear_phase0(f, z):
    return (z,)


def linear_reference(f, x, w):
    return ((f.f32(x) @ f.f32(w).T),)


LINEAR = Case(
    program(
        "linear",
        ["x bf16 m d", "w bf16 n d"],
        ["y bf16 m n"],
        [
            s.Gemm(
                "linear_k0", (tensor("x bf16 m d"), tensor("w bf16 n d"), tensor("y bf16 m n", "out")), NO_LANES,
                (s.Phase("linear_phase0"),), sinks=(s.Store(Y),), rows=("m",), cols=("n",),
            )
        ],
    ),
    {"linear_phase0": linear_phase0},
    linear_reference,
)  # fmt: skip


# --- y = gelu(alpha * (x @ w) + b); also the raw product ---------------------------------------------------------------


def bias_gelu_phase0(f, z, b, alpha):
    u = z * alpha + b
    return (z, f.gelu(u))


def bias_gelu_reference(f, x, w, b, alpha):
    z = f.f32(x) @ f.f32(w).T
    return z, f.gelu(z * f.f32(alpha) + f.f32(b))


BIAS_GELU = Case(
    program(
        "bias_gelu",
        ["x bf16 m d", "w bf16 n d", "b f32 n", "alpha f32"],
        ["z bf16 m n", "y bf16 m n"],
        [
            s.Gemm(
                "bias_gelu_k0",
                (
                    tensor("x bf16 m d"), tensor("w bf16 n d"), tensor("b f32 n"), tensor("alpha f32"),
                    tensor("z bf16 m n", "out"), tensor("y bf16 m n", "out"),
                ),
                NO_LANES, (s.Phase("bias_gelu_phase0"),),
                ports=(s.Load("b", "b", (COL,)), s.Load("alpha", "alpha", ())),
                sinks=(s.Store(s.Matrix("z", (0,), (1,))), s.Store(Y)), rows=("m",), cols=("n",),
            )
        ],
        requires=[s.Require("d >= 0", "stated by the user")],
    ),
    {"bias_gelu_phase0": bias_gelu_phase0},
    bias_gelu_reference,
)  # fmt: skip


# --- swiglu, weights interleaved, as halves, and separate; the last also stores its pre-activations packed ---------------


def swiglu_phase0(f, gate, up):
    return (f.silu(gate) * up,)


def swiglu_reference(f, x, w):
    z = f.f32(x) @ f.f32(w).flatten(0, -2).T
    gate, up = z.reshape(x.shape[0], *w.shape[:2]).unbind(2)
    return (f.silu(gate) * up,)


def swiglu_halves_reference(f, x, w):
    z = f.f32(x) @ f.f32(w).flatten(0, -2).T
    gate, up = z.reshape(x.shape[0], *w.shape[:2]).unbind(1)
    return (f.silu(gate) * up,)


def _swiglu(name: str, w: str, b: tuple[s.Matrix, ...], reference) -> Case:
    modes = w.split()[2:]
    return Case(
        program(
            name,
            ["x bf16 m d", w],
            ["y bf16 m f"],
            [
                s.Gemm(
                    f"{name}_k0", (tensor("x bf16 m d"), tensor(w), tensor("y bf16 m f", "out")), (s.Product(A, b),),
                    (s.Phase("swiglu_phase0"),), sinks=(s.Store(Y),), rows=("m",), cols=("f",),
                )
            ],
            **({"lane": 2} if "lane" in modes else {}),
        ),
        {"swiglu_phase0": swiglu_phase0},
        reference,
    )  # fmt: skip


_INTERLEAVED = s.Matrix("w", (0,), (2,), ((1, 0),)), s.Matrix("w", (0,), (2,), ((1, 1),))
_HALVES = s.Matrix("w", (1,), (2,), ((0, 0),)), s.Matrix("w", (1,), (2,), ((0, 1),))
SWIGLU = _swiglu("swiglu", "w bf16 f lane d", _INTERLEAVED, swiglu_reference)
SWIGLU_HALVES = _swiglu("swiglu_halves", "w bf16 lane f d", _HALVES, swiglu_halves_reference)


def geglu_phase0(f, gate, up):
    return (gate, up, f.gelu_tanh(gate) * up)


def geglu_reference(f, x, wg, wu):
    gate, up = f.f32(x) @ f.f32(wg).T, f.f32(x) @ f.f32(wu).T
    return torch.stack((gate, up), 2), f.gelu_tanh(gate) * up


GEGLU = Case(
    program(
        "geglu",
        ["x bf16 m d", "wg bf16 f d", "wu bf16 f d"],
        ["pre bf16 m f lane", "y bf16 m f"],
        [
            s.Gemm(
                "geglu_k0",
                (
                    tensor("x bf16 m d"), tensor("wg bf16 f d"), tensor("wu bf16 f d"),
                    tensor("pre bf16 m f lane", "out"), tensor("y bf16 m f", "out"),
                ),
                (s.Product(A, (s.Matrix("wg", (0,), (1,)), s.Matrix("wu", (0,), (1,)))),),
                (s.Phase("geglu_phase0"),),
                sinks=(s.Store(s.Matrix("pre", (0,), (1,), pack=2)), s.Store(Y)), rows=("m",), cols=("f",),
            )
        ],
        lane=2,
    ),
    {"geglu_phase0": geglu_phase0},
    geglu_reference,
)  # fmt: skip


# --- residual tile, low-rank update (two K segments), row sum of squares (mean, finished), column sums, whole amax -----------


def residual_phase0(f, z, r):
    u = f.bf16(z + r)
    return (u, u * u, u, u)


def residual_mean(f, total, n):
    return (total / f.f32(n),)


def residual_column(f, total):
    return (total,)


def residual_peak(f, peak):
    return (peak,)


def residual_reference(f, x, w, t, b, r):
    u = f.bf16(f.f32(x) @ f.f32(w).T + f.f32(t) @ f.f32(b).T + f.f32(r))
    return u, (u * u).sum(1) / u.shape[1], u.sum(0), f.amax(u, (0, 1)).reshape(())


RESIDUAL = Case(
    program(
        "residual",
        ["x bf16 m d", "w bf16 n d", "t bf16 m rank", "b bf16 n rank", "r bf16 m n"],
        ["u bf16 m n", "ms f32 m", "total f32 n", "peak f32"],
        [
            s.Gemm(
                "residual_k0",
                (
                    tensor("x bf16 m d"), tensor("w bf16 n d"), tensor("t bf16 m rank"), tensor("b bf16 n rank"), tensor("r bf16 m n"),
                    tensor("u bf16 m n", "out"), tensor("ms_work f32 m", "work"), tensor("total_work f32 n", "work"),
                    tensor("peak_work f32 m", "work"),
                ),
                (s.Product(A, (W,)), s.Product(s.Matrix("t", (0,), (1,)), (s.Matrix("b", (0,), (1,)),))),
                (s.Phase("residual_phase0"),),
                ports=(s.Tile("r", s.Matrix("r", (0,), (1,))),),
                sinks=(
                    s.Store(s.Matrix("u", (0,), (1,))), s.RowReduce("sum", "ms_work"), s.ColReduce("sum", "total_work"),
                    s.RowReduce("amax", "peak_work"),
                ),
                rows=("m",), cols=("n",),
            ),
            s.Finish(
                "residual_k1", (tensor("ms_work f32 m", "work"), tensor("ms f32 m", "out")), (s.Partial("ms_work", "sum"),),
                "residual_mean", ("ms",), ("m",), ports=(s.Extent("n", ("n",)),), extents=("n",),
            ),
            s.Finish(
                "residual_k2", (tensor("total_work f32 n", "work"), tensor("total f32 n", "out")), (s.Partial("total_work", "sum"),),
                "residual_column", ("total",), ("n",),
            ),
            s.Finish(
                "residual_k3", (tensor("peak_work f32 m", "work"), tensor("peak f32", "out")), (s.Partial("peak_work", "amax"),),
                "residual_peak", ("peak",), (),
            ),
        ],
    ),
    {
        "residual_phase0": residual_phase0, "residual_mean": residual_mean,
        "residual_column": residual_column, "residual_peak": residual_peak,
    },
    residual_reference,
)  # fmt: skip


# --- the loss head: logits stored, logsumexp and gather over the vocabulary, finished into a loss --------------------------------


def lm_head_phase0(f, z, target, v):
    return (z, z, z, f.eq(v, target))


def lm_head_loss(f, lse, picked, target):
    return (f.where(f.eq(target, -100), 0.0, lse - picked),)


def lm_head_reference(f, x, w, target):
    z = f.f32(x) @ f.f32(w).T
    inside = (target >= 0) & (target < z.shape[1])
    if z.shape[1]:
        picked = f.where(inside, z.gather(1, target.clamp(0, z.shape[1] - 1)[:, None])[:, 0], float("nan"))
    else:
        picked = z.new_full((z.shape[0],), float("nan"))
    return z, f.where(f.eq(target, -100), 0.0, z.logsumexp(1) - picked)


LM_HEAD = Case(
    program(
        "lm_head",
        ["x bf16 m d", "w bf16 v d", "target i64 m"],
        ["logits bf16 m v", "loss f32 m"],
        [
            s.Gemm(
                "lm_head_k0",
                (
                    tensor("x bf16 m d"), tensor("w bf16 v d"), tensor("target i64 m"), tensor("logits bf16 m v", "out"),
                    tensor("lse_work f32 m", "work"), tensor("picked_work f32 m", "work"),
                ),
                NO_LANES, (s.Phase("lm_head_phase0"),),
                ports=(s.Load("target", "target", (ROW,)), s.Iota("v", COL)),
                sinks=(s.Store(s.Matrix("logits", (0,), (1,))), s.RowReduce("lse", "lse_work"), s.Point("picked_work", (ROW,))),
                rows=("m",), cols=("v",),
            ),
            s.Finish(
                "lm_head_k1",
                (
                    tensor("lse_work f32 m", "work"), tensor("picked_work f32 m", "work"), tensor("target i64 m"),
                    tensor("loss f32 m", "out"),
                ),
                (s.Partial("lse_work", "lse"), s.Partial("picked_work", "only")), "lm_head_loss", ("loss",), ("m",),
                ports=(s.Load("target", "target", (ROW,)),),
            ),
        ],
    ),
    {"lm_head_phase0": lm_head_phase0, "lm_head_loss": lm_head_loss},
    lm_head_reference,
)  # fmt: skip


# --- per-head RMS norm: a group statistic, an index map onto the inner axis, a merged mode --------------------------------------


def head_norm_phase0(f, z, g):
    return (z * z,)


def head_norm_phase1(f, z, g, total):
    return (z * f.rsqrt(total / 64.0 + 1e-5) * g,)


def head_norm_reference(f, x, w, g):
    z = f.f32(x) @ f.f32(w).flatten(0, -2).T
    z = z.reshape(x.shape[0], *w.shape[:2])
    return (z * f.rsqrt((z * z).sum(2, keepdim=True) / 64.0 + 1e-5) * f.f32(g),)


HEAD_NORM = Case(
    program(
        "head_norm",
        ["x bf16 m d", "w bf16 head dim d", "g bf16 dim"],
        ["y bf16 m head dim"],
        [
            s.Gemm(
                "head_norm_k0",
                (tensor("x bf16 m d"), tensor("w bf16 head.dim d"), tensor("g bf16 dim"), tensor("y bf16 m head.dim", "out")), NO_LANES,
                (s.Phase("head_norm_phase0", (s.Group("sum", 64),)), s.Phase("head_norm_phase1")),
                ports=(s.Load("g", "g", (s.Index("col", mod=(64,)),)),),
                sinks=(s.Store(Y),), rows=("m",), cols=("head", 64), granule=64,
            )
        ],
        dim=64,
    ),
    {"head_norm_phase0": head_norm_phase0, "head_norm_phase1": head_norm_phase1},
    head_norm_reference,
)  # fmt: skip


# --- runs of a split axis go to three tensors; one has a row sum of its own window ---------------------------------------------


def qkv_phase0(f, z):
    return (z, z, z, z)


def qkv_sum(f, total):
    return (total,)


def qkv_reference(f, x, w):
    z = (f.f32(x) @ f.f32(w).flatten(0, -2).T).reshape(x.shape[0], 4, 64)
    return z[:, :2], z[:, 2:3], z[:, 3:], z[:, 2:3].sum((1, 2))


QKV = Case(
    program(
        "qkv",
        ["x bf16 m d", "w bf16 head dim d"],
        ["q bf16 m qh dim", "k bf16 m kh dim", "v bf16 m vh dim", "ksum f32 m"],
        [
            s.Gemm(
                "qkv_k0",
                (
                    tensor("x bf16 m d"), tensor("w bf16 head.dim d"), tensor("q bf16 m qh.dim", "out"), tensor("k bf16 m kh.dim", "out"),
                    tensor("v bf16 m vh.dim", "out"), tensor("ksum_work f32 m", "work"),
                ),
                NO_LANES, (s.Phase("qkv_phase0"),),
                sinks=(
                    s.Store(s.Matrix("q", (0,), (1,)), s.Window(0, 128)), s.Store(s.Matrix("k", (0,), (1,)), s.Window(128, 64)),
                    s.Store(s.Matrix("v", (0,), (1,)), s.Window(192, 64)), s.RowReduce("sum", "ksum_work", s.Window(128, 64)),
                ),
                rows=("m",), cols=(4, 64), granule=64,
            ),
            s.Finish(
                "qkv_k1", (tensor("ksum_work f32 m", "work"), tensor("ksum f32 m", "out")), (s.Partial("ksum_work", "sum"),),
                "qkv_sum", ("ksum",), ("m",),
            ),
        ],
        head=4, dim=64, qh=2, kh=1, vh=1,
    ),
    {"qkv_phase0": qkv_phase0, "qkv_sum": qkv_sum},
    qkv_reference,
)  # fmt: skip


# --- half-split rotary embedding: two row axes of positions merged, an output lane pinned between column modes -----------------------


def rope_phase0(f, a, b, pos, freq):
    angle = f.f32(pos) * freq
    c, s_ = f.cos(angle), f.sin(angle)
    return (a * c - b * s_, a * s_ + b * c)


def rope_reference(f, x, w, pos, freq):
    z = (f.f32(x) @ f.f32(w).flatten(0, -2).T).reshape(x.shape[0], *w.shape[:3])
    a, b = z.unbind(2)
    angle = (f.f32(pos)[:, None] * f.f32(freq)[None, :])[:, None, :]
    c, s_ = f.cos(angle), f.sin(angle)
    y = z.clone()
    y[:, :, 0], y[:, :, 1] = a * c - b * s_, a * s_ + b * c
    return (y,)


ROPE = Case(
    program(
        "rope",
        ["x bf16 m d", "w bf16 head lane pair d", "pos i32 m", "const freq f32 pair"],
        ["y bf16 m head lane pair"],
        [
            s.Gemm(
                "rope_k0",
                (
                    tensor("x bf16 m d"), tensor("w bf16 head lane pair d"), tensor("pos i32 m"), tensor("freq f32 pair"),
                    tensor("y bf16 m head lane pair", "out"),
                ),
                (s.Product(A, (s.Matrix("w", (0, 2), (3,), ((1, 0),)), s.Matrix("w", (0, 2), (3,), ((1, 1),)))),),
                (s.Phase("rope_phase0"),),
                ports=(s.Load("pos", "pos", (ROW,)), s.Load("freq", "freq", (s.Index("col", mod=(64,)),))),
                sinks=(s.Store(s.Matrix("y", (0,), (1, 3), ((2, 0),))), s.Store(s.Matrix("y", (0,), (1, 3), ((2, 1),)))),
                rows=("m",), cols=("head", 64), granule=64,
            )
        ],
        lane=2, pair=64,
    ),
    {"rope_phase0": rope_phase0},
    rope_reference,
)  # fmt: skip


ALL = {
    "linear": LINEAR, "bias_gelu": BIAS_GELU, "swiglu": SWIGLU, "swiglu_halves": SWIGLU_HALVES, "geglu": GEGLU, "residual": RESIDUAL,
    "lm_head": LM_HEAD, "head_norm": HEAD_NORM, "qkv": QKV, "rope": ROPE,
}  # fmt: skip


def inputs(prog: s.Program, sizes: dict[str, int], seed: int = 0, device: str = "cpu"):
    """Random inputs of declared shape; integers lie inside the smallest axis."""
    gen = torch.Generator().manual_seed(seed)
    extents = {name: sizes.get(name, 5) if fixed is None else fixed for name, fixed in prog.extents}
    made = []
    for a in prog.inputs:
        shape = [extents[x] for x in a.axes]
        if a.dtype in ("i32", "i64"):
            made.append(torch.randint(0, max(min(extents.values()), 1), shape, generator=gen).to(DTYPES[a.dtype]).to(device))
        else:
            made.append(torch.randn(shape, generator=gen).to(DTYPES[a.dtype]).to(device))
    return made
