"""Programs by hand: products with element-wise epilogues: ports, lanes, packed stores, storage in other orders."""

from __future__ import annotations

import torch

from coda_lang.backend_cute import spec as s

from .build import COL, NO_LANES, A, Case, Y, program, tensor

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


# --- storage that the host rearranges: an output declared transposed, weight axes in another order than columns; B with d outermost ---


def rearranged_phase0(f, z, scale):
    return (z * scale,)


def rearranged_reference(f, x, w, scale):
    z = f.f32(x) @ f.f32(w).permute(2, 1, 0).flatten(1)
    return ((z * f.f32(scale)[None, :]).reshape(x.shape[0], w.shape[1], 8).permute(1, 2, 0),)


REARRANGED = Case(
    program(
        "rearranged",
        ["x bf16 m d", "w bf16 dim head d", "scale f32 hd"],
        ["y f16 head dim m"],
        [
            s.Gemm(
                "rearranged_k0",
                (
                    tensor("x bf16 m d"), tensor("w bf16 d head.dim"), tensor("scale f32 hd"),
                    tensor("y f16 m head.dim", "out"),
                ),
                (s.Product(A, (s.Matrix("w", (1,), (0,)),)),), (s.Phase("rearranged_phase0"),),
                ports=(s.Load("scale", "scale", (COL,)),), sinks=(s.Store(Y),), rows=("m",), cols=("head", 8),
            )
        ],
        requires=[s.Require("hd == head * 8")],
        dim=8,
    ),
    {"rearranged_phase0": rearranged_phase0},
    rearranged_reference,
)  # fmt: skip
