"""Programs by hand with their derivatives: what an emitted module gives a function, without the emitter."""

from __future__ import annotations

from dataclasses import dataclass

from coda_lang.backend_cute import spec as s
from coda_lang.backend_cute.function import Function

from .build import COL, ROW, A, Case, W, Y, program, tensor
from .plain import SWIGLU


@dataclass(frozen=True)
class Trained(Case):
    """A case with the programs of its derivative."""

    saving: s.Program | None = None
    backward: s.Program | None = None
    residuals: tuple[str, ...] = ()
    cotangents: tuple[tuple[str, str], ...] = ()
    gradients: tuple[tuple[str, str], ...] = ()

    def function(self, **functions) -> Function:
        return Function(
            self.program, {**self.functions, **functions}, self.stored, saving=self.saving, backward=self.backward,
            residuals=self.residuals, cotangents=self.cotangents, gradients=self.gradients,
        )  # fmt: skip


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, f"d_{name}") for name in text.split())


# --- y = x @ w + r: two products, and a gradient that is the cotangent as it is ------------------------------------------------


def linear_phase0(f, z, r):
    return (z + r,)


def gradient_phase0(f, z):
    return (f.bf16(z),)


def linear_reference(f, x, w, r):
    return (f.f32(x) @ f.f32(w).T + f.f32(r),)


def products(name: str, of: str, scale: tuple = ()) -> tuple[s.Gemm, s.Gemm]:
    """d_x = g @ wᵀ and d_w = gᵀ @ x, for x[m, d] and w[n, d]."""
    g = tensor(f"{of} bf16 m n")
    loads, more = (tuple(s.Load(a, a, ()) for a in scale)), tuple(tensor(f"{a} f32") for a in scale)
    phase = (s.Phase(f"{name}_gradient" if scale else "gradient_phase0"),)
    dgrad = s.Gemm(
        f"{name}_dgrad", (g, tensor("w bf16 n d"), *more, tensor("d_x bf16 m d", "out")),
        (s.Product(s.Matrix(of, (0,), (1,)), (s.Matrix("w", (1,), (0,)),)),), phase, loads,
        sinks=(s.Store(s.Matrix("d_x", (0,), (1,))),), rows=("m",), cols=("d",),
    )  # fmt: skip
    wgrad = s.Gemm(
        f"{name}_wgrad", (g, tensor("x bf16 m d"), *more, tensor("d_w bf16 n d", "out")),
        (s.Product(s.Matrix(of, (1,), (0,)), (s.Matrix("x", (1,), (0,)),)),), phase, loads,
        sinks=(s.Store(s.Matrix("d_w", (0,), (1,))),), rows=("n",), cols=("d",),
    )  # fmt: skip
    return dgrad, wgrad


def with_same(made: s.Program, **more) -> s.Program:
    return s.Program(**{**{k: getattr(made, k) for k in made.__dataclass_fields__}, **more})


LINEAR_RESIDUAL = Trained(
    program(
        "linear_residual", ["x bf16 m d", "w bf16 n d", "r bf16 m n"], ["y bf16 m n"],
        [
            s.Gemm(
                "linear_residual_k0", (tensor("x bf16 m d"), tensor("w bf16 n d"), tensor("r bf16 m n"), tensor("y bf16 m n", "out")),
                (s.Product(A, (W,)),), (s.Phase("linear_phase0"),), (s.Tile("r", s.Matrix("r", (0,), (1,))),),
                sinks=(s.Store(Y),), rows=("m",), cols=("n",),
            )
        ],
    ),
    {"linear_phase0": linear_phase0, "gradient_phase0": gradient_phase0},
    linear_reference,
    backward=with_same(
        program(
            "linear_residual_backward", ["x bf16 m d", "w bf16 n d", "d_y bf16 m n"], ["d_x bf16 m d", "d_w bf16 n d", "d_r bf16 m n"],
            products("linear_residual", "d_y"),
        ),
        same=(("d_r", "d_y"),),
    ),
    cotangents=pairs("y"),
    gradients=pairs("x w r"),
)  # fmt: skip


# --- swiglu: pre-activations saved as pairs, their gradient between kernels ---------------------------------------------------


def swiglu_saving_phase0(f, gate, up):
    return (f.silu(gate) * up, gate, up)


def swiglu_backward_phase0(f, d_y, gate, up):
    half = f.sigmoid(gate)
    d_gate = d_y * up * (half + gate * half * (1.0 - half))
    d_up = d_y * f.silu(gate)
    return (d_gate, d_up)


SWIGLU_TRAINED = Trained(
    SWIGLU.program,
    {
        **SWIGLU.functions, "swiglu_saving_phase0": swiglu_saving_phase0, "swiglu_backward_phase0": swiglu_backward_phase0,
        "gradient_phase0": gradient_phase0,
    },
    SWIGLU.reference,
    saving=program(
        "swiglu_saving", ["x bf16 m d", "w bf16 f lane d"], ["y bf16 m f", "pre bf16 m f lane"],
        [
            s.Gemm(
                "swiglu_saving_k0",
                (tensor("x bf16 m d"), tensor("w bf16 f lane d"), tensor("y bf16 m f", "out"), tensor("pre bf16 m f lane", "out")),
                SWIGLU.program.kernels[0].products, (s.Phase("swiglu_saving_phase0"),),
                sinks=(s.Store(Y), s.Store(s.Matrix("pre", (0,), (1,), pack=2))), rows=("m",), cols=("f",),
            )
        ],
        lane=2,
    ),
    backward=with_same(
        program(
            "swiglu_backward", ["d_y bf16 m f", "pre bf16 m f lane", "x bf16 m d", "w bf16 f lane d"],
            ["d_x bf16 m d", "d_w bf16 f lane d"],
            [
                s.Gemm(
                    "swiglu_backward_k0", (tensor("d_y bf16 m f"), tensor("pre bf16 m f lane"), tensor("d_pre bf16 m f lane", "temp")), (),
                    (s.Phase("swiglu_backward_phase0"),),
                    (s.Tile("d_y", s.Matrix("d_y", (0,), (1,))), s.Tile("pre", s.Matrix("pre", (0,), (1,), pack=2))),
                    sinks=(s.Store(s.Matrix("d_pre", (0,), (1,), pack=2)),), rows=("m",), cols=("f",),
                ),
                s.Gemm(
                    "swiglu_backward_k1",
                    (tensor("d_pre bf16 m f.lane", "temp"), tensor("w bf16 f.lane d"), tensor("d_x bf16 m d", "out")),
                    (s.Product(s.Matrix("d_pre", (0,), (1,)), (s.Matrix("w", (1,), (0,)),)),), (s.Phase("gradient_phase0"),),
                    sinks=(s.Store(s.Matrix("d_x", (0,), (1,))),), rows=("m",), cols=("d",),
                ),
                s.Gemm(
                    "swiglu_backward_k2",
                    (tensor("d_pre bf16 m f.lane", "temp"), tensor("x bf16 m d"), tensor("d_w bf16 f.lane d", "out")),
                    (s.Product(s.Matrix("d_pre", (1,), (0,)), (s.Matrix("x", (1,), (0,)),)),), (s.Phase("gradient_phase0"),),
                    sinks=(s.Store(s.Matrix("d_w", (0,), (1,))),), rows=("f", 2), cols=("d",),
                ),
            ],
            lane=2,
        ),
        temps=(s.Argument("d_pre", "bf16", ("m", "f", "lane")),),
    ),
    residuals=("pre",),
    cotangents=pairs("y"),
    gradients=pairs("x w"),
)  # fmt: skip


# --- u = s * (x @ w) + b + c + r, q = the rows' sums of squares: every kind of operand, two outputs, a stored output read again ----------


def affine_phase0(f, z, s, b, c, r):
    u = f.bf16(s * z + b + c + r)
    return (u, u * u)


def affine_saving_phase0(f, z, s, b, c, r):
    u = f.bf16(s * z + b + c + r)
    return (u, z, u * u)


def affine_total(f, total):
    return (total,)


def affine_backward_phase0(f, d_u, u, z, d_q):
    g = d_u + 2.0 * u * d_q
    return (f.bf16(g), f.bf16(g), g, g * z)


def affine_gradient(f, z, s):
    return (f.bf16(s * z),)


def affine_reference(f, x, w, b, r, s, c):
    u = f.f32(s) * (f.f32(x) @ f.f32(w).T) + f.f32(b) + f.f32(c) + f.f32(r)
    u = f.bf16(u)
    return u, (u * u).sum(1)


def affine(name: str, outputs: list[str], fn: str, stores: list[str]) -> s.Program:
    return program(
        name, ["x bf16 m d", "w bf16 n d", "b f32 n", "r bf16 m n", "s f32", "const c f32 n"], outputs,
        [
            s.Gemm(
                f"{name}_k0",
                (
                    tensor("x bf16 m d"), tensor("w bf16 n d"), tensor("b f32 n"), tensor("r bf16 m n"), tensor("s f32"), tensor("c f32 n"),
                    *(tensor(f"{t} bf16 m n", "out") if t == "u" else tensor(f"{t} f32 m n", "out") for t in stores),
                    tensor("q_work f32 m", "work"),
                ),
                (s.Product(A, (W,)),), (s.Phase(fn),),
                (
                    s.Load("s", "s", ()), s.Load("b", "b", (COL,)), s.Load("c", "c", (COL,)),
                    s.Tile("r", s.Matrix("r", (0,), (1,))),
                ),
                sinks=(*(s.Store(s.Matrix(t, (0,), (1,))) for t in stores), s.RowReduce("sum", "q_work")), rows=("m",), cols=("n",),
            ),
            s.Finish(
                f"{name}_k1", (tensor("q_work f32 m", "work"), tensor("q f32 m", "out")), (s.Partial("q_work", "sum"),),
                "affine_total", ("q",), ("m",),
            ),
        ],
    )  # fmt: skip


AFFINE = Trained(
    affine("affine", ["u bf16 m n", "q f32 m"], "affine_phase0", ["u"]),
    {
        "affine_phase0": affine_phase0, "affine_saving_phase0": affine_saving_phase0, "affine_total": affine_total,
        "affine_backward_phase0": affine_backward_phase0, "affine_gradient": affine_gradient,
    },
    affine_reference,
    saving=affine("affine_saving", ["u bf16 m n", "q f32 m", "z f32 m n"], "affine_saving_phase0", ["u", "z"]),
    backward=with_same(
        program(
            "affine_backward",
            ["x bf16 m d", "w bf16 n d", "s f32", "u bf16 m n", "z f32 m n", "d_u bf16 m n", "d_q f32 m"],
            ["d_x bf16 m d", "d_w bf16 n d", "d_b f32 n", "d_r bf16 m n", "d_s f32"],
            [
                s.Gemm(
                    "affine_backward_k0",
                    (
                        tensor("d_u bf16 m n"), tensor("u bf16 m n"), tensor("z f32 m n"), tensor("d_q f32 m"),
                        tensor("g bf16 m n", "temp"), tensor("d_r bf16 m n", "out"),
                        tensor("d_b_work f32 n", "work"), tensor("d_s_work f32 m", "work"),
                    ),
                    (), (s.Phase("affine_backward_phase0"),),
                    (
                        s.Tile("d_u", s.Matrix("d_u", (0,), (1,))), s.Tile("u", s.Matrix("u", (0,), (1,))),
                        s.Tile("z", s.Matrix("z", (0,), (1,))), s.Load("d_q", "d_q", (ROW,)),
                    ),
                    sinks=(
                        s.Store(s.Matrix("g", (0,), (1,))), s.Store(s.Matrix("d_r", (0,), (1,))), s.ColReduce("sum", "d_b_work"),
                        s.RowReduce("sum", "d_s_work"),
                    ),
                    rows=("m",), cols=("n",),
                ),
                s.Finish(
                    "affine_backward_k1", (tensor("d_b_work f32 n", "work"), tensor("d_b f32 n", "out")), (s.Partial("d_b_work", "sum"),),
                    "affine_total", ("d_b",), ("n",),
                ),
                s.Finish(
                    "affine_backward_k2", (tensor("d_s_work f32 m", "work"), tensor("d_s f32", "out")), (s.Partial("d_s_work", "sum"),),
                    "affine_total", ("d_s",), (),
                ),
                *products("affine", "g", ("s",)),
            ],
        ),
        temps=(s.Argument("g", "bf16", ("m", "n")),),
    ),
    residuals=("z",),
    cotangents=pairs("u q"),
    gradients=pairs("x w b r s"),
)  # fmt: skip

TRAINED = {"linear_residual": LINEAR_RESIDUAL, "swiglu": SWIGLU_TRAINED, "affine": AFFINE}

__all__ = ["AFFINE", "LINEAR_RESIDUAL", "SWIGLU_TRAINED", "TRAINED", "Trained"]
