"""Programs by hand: several kernels, tensors between them that each sees through modes of its own, an output that is an input."""

from __future__ import annotations

import dataclasses

from coda_lang.backend_cute import spec as s

from .build import COL, ROW, A, Case, program, tensor

# --- h = silu(x @ w1), per head; r = 1 / norm(h); y = (h @ w2) * r, h read as one matrix; x is returned as it is -----------------------


def chain_phase0(f, z):
    h = f.bf16(f.silu(z))
    return (h, h * h)


def chain_norm(f, total):
    return (f.rsqrt(total + 1.0),)


def chain_phase1(f, z, r, b):
    return (z * r + b,)


def chain_reference(f, x, w1, w2, b):
    h = f.bf16(f.silu(f.f32(x) @ f.f32(w1).flatten(0, 1).T))
    r = f.rsqrt((h * h).sum(1, keepdim=True) + 1.0)
    return x if f.rounds else f.f32(x), (h @ f.f32(w2).flatten(1).T) * r + f.f32(b)


_one = program(
    "chain",
    ["x bf16 m d", "w1 bf16 head dim d", "w2 bf16 n head dim", "b f32 n"],
    ["again bf16 m d", "y bf16 m n"],
    [
        s.Gemm(
            "chain_k0",
            (
                tensor("x bf16 m d"), tensor("w1 bf16 head dim d"), tensor("h bf16 m head dim", "temp"),
                tensor("square_work f32 m", "work"),
            ),
            (s.Product(A, (s.Matrix("w1", (0, 1), (2,)),)),), (s.Phase("chain_phase0"),),
            sinks=(s.Store(s.Matrix("h", (0,), (1, 2))), s.RowReduce("sum", "square_work")), rows=("m",), cols=("head", 8), granule=8,
        ),
        s.Finish(
            "chain_k1", (tensor("square_work f32 m", "work"), tensor("r f32 m", "temp")), (s.Partial("square_work", "sum"),),
            "chain_norm", ("r",), ("m",),
        ),
        s.Gemm(
            "chain_k2",
            (
                tensor("h bf16 m head.dim", "temp"), tensor("w2 bf16 n head.dim"), tensor("r f32 m", "temp"), tensor("b f32 n"),
                tensor("y bf16 m n", "out"),
            ),
            (s.Product(s.Matrix("h", (0,), (1,)), (s.Matrix("w2", (0,), (1,)),)),), (s.Phase("chain_phase1"),),
            ports=(s.Load("r", "r", (ROW,)), s.Load("b", "b", (COL,))), sinks=(s.Store(s.Matrix("y", (0,), (1,))),),
            rows=("m",), cols=("n",),
        ),
    ],
    dim=8,
)  # fmt: skip

CHAIN = Case(
    dataclasses.replace(
        _one, temps=(s.Argument("h", "bf16", ("m", "head", "dim")), s.Argument("r", "f32", ("m",))), same=(("again", "x"),)
    ),
    {"chain_phase0": chain_phase0, "chain_norm": chain_norm, "chain_phase1": chain_phase1},
    chain_reference,
)
