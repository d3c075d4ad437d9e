"""Programs by hand: reductions with their finishers, two K segments, a tile port, a gather."""

from __future__ import annotations

from coda_lang.backend_cute import spec as s

from .build import COL, NO_LANES, ROW, A, Case, W, program, tensor

# --- residual tile, low-rank update (two K segments), row sum of squares (mean, finished), column sums, whole amax -----------


def residual_phase0(f, z, r):
    u = f.bf16(z + r)
    return (u, u * u, u, u)


def residual_mean(f, total, n):
    return (f.div(total, f.f32(n)),)


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
