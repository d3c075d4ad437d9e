"""Programs by hand: axes that are groups of columns: statistics over a group, runs, rotary lanes."""

from __future__ import annotations

from coda_lang.backend_cute import spec as s

from .build import NO_LANES, ROW, A, Case, Y, program, tensor

# --- per-head RMS norm: a group statistic, an index map onto the inner axis, a merged mode --------------------------------------


def head_norm_phase0(f, z, g):
    return (z * z,)


def head_norm_phase1(f, z, g, total):
    return (z * f.rsqrt(f.div(total, 64.0) + 1e-5) * g,)


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
