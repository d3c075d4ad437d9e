"""Gemm records by hand that reach every feature of the device code: for the tests of cubins and for the check on a GPU.

`ALL` maps a name to `GemmCase`. Those of `handwritten` are here too; the others are for what they leave out: major orders,
dtypes, windows off the
step, groups narrower and wider than a step, packed tiles, reductions of each kind, elements chosen by column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from handwritten import ALL as PROGRAMS
from handwritten import COL, ROW, tensor

from coda_lang.backend_cute import spec as s


@dataclass(frozen=True)
class GemmCase:
    """A record, its scalar functions, the extents that are fixed, and other sizes that some axis needs."""

    gemm: s.Gemm
    functions: dict[str, Callable[..., tuple]]
    fixed: dict[str, int] = field(default_factory=dict)
    divisor: int = 1  # the number of columns must be a multiple
    far: tuple[str, ...] = ()  # tensors whose rows lie 2²⁰ elements apart when checked on a GPU


def gemm(name, tensors, products, phases, **rest) -> s.Gemm:
    return s.Gemm(name, tuple(tensor(*t) if isinstance(t, tuple) else tensor(t) for t in tensors), products, phases, **rest)


KM, KN = s.Matrix("x", (0,), (1,)), s.Matrix("w", (0,), (1,))
PLAIN = (s.Product(KM, (KN,)),)
Y = s.Matrix("y", (0,), (1,))
STORE = (s.Store(Y),)


def same(f, z):
    return (z,)


def twice(f, z):
    return (z, z)


def four(f, z):
    return (z, z, z, z)


def add_pair(f, z, a, b):
    return (z + a, z - b)


def scaled_sum(f, z, u, v):
    return (z * u + v,)


def difference(f, a, b):
    return (a - b,)


def blend(f, u, v, a, b):
    z = u * a + v * b
    return (z, z, z)


def mean_and_moments(f, x, g, r, size, column):
    return (x + r, x)


def layer_norm(f, x, g, r, size, column, total, spread):
    mean = f.div(total, f.f32(size))
    return ((x - mean) * f.rsqrt(f.div(spread, f.f32(size)) + 1.0) * g, mean, f.eq(column, 0))


def two_sums(f, x, g, r):
    return (x * r, g)


def four_rows(f, x, g, r, total, top):
    y = x * g + total + top
    return (y, y, r, x)


def squares(f, z):
    return (z * z, z)


def normalised(f, z, total, top):
    return (z * f.rsqrt(total + 1.0) + top,)


def plus_lse(f, z, lse):
    return (z - lse,)


def pick(f, z, v, target):
    return (z, f.eq(v, target))


def by_position(f, z, row, col, extent, flag):
    return (z + f.div(f.where(flag, f.f32(row), f.f32(col)), f.f32(extent)),)


def operands(a: str, b: str, dtype: str = "bf16"):
    """Tensors x and w and their product for major orders: "k" contiguous along the contraction, "m"/"n" across it."""
    x = f"x {dtype} m d" if a == "k" else f"x {dtype} d m"
    w = f"w {dtype} n d" if b == "k" else f"w {dtype} d n"
    first = s.Matrix("x", (0,), (1,)) if a == "k" else s.Matrix("x", (1,), (0,))
    second = s.Matrix("w", (0,), (1,)) if b == "k" else s.Matrix("w", (1,), (0,))
    return x, w, (s.Product(first, (second,)),)


def _majors(a: str, b: str, dtype: str = "bf16", out: str = "bf16") -> GemmCase:
    x, w, products = operands(a, b, dtype)
    tensors = [x, w, (f"y {out} m n", "out")]
    record = gemm(f"major_{a}{b}", tensors, products, (s.Phase("same"),), sinks=(s.Store(Y),), rows=("m",), cols=("n",))
    return GemmCase(record, {"same": same})


def _simple(name, tensors, phases, functions, ports=(), sinks=STORE, divisor=1, fixed=None, **rest) -> GemmCase:
    tensors = ["x bf16 m d", "w bf16 n d", *tensors]
    record = gemm(name, tensors, PLAIN, phases, ports=ports, sinks=sinks, rows=("m",), cols=("n",), **rest)
    return GemmCase(record, functions, fixed or {}, divisor)


OUT = ("y bf16 m n", "out")

EXTRA = {
    "major_mk": _majors("m", "k"),
    "major_kn": _majors("k", "n"),
    "major_mn": _majors("m", "n"),
    "f16": _majors("k", "k", "f16", "f16"),
    "f32_out": _majors("k", "k", "bf16", "f32"),
    "transposed": _simple(
        "transposed", [("y bf16 n m", "out"), ("z f32 n m", "out")], (s.Phase("twice"),), {"twice": twice},
        sinks=(s.Store(s.Matrix("y", (1,), (0,))), s.Store(s.Matrix("z", (1,), (0,)))),
    ),
    "mixed_majors": GemmCase(
        gemm(
            "mixed_majors", ["x bf16 m d", "w bf16 n d", "t bf16 r m", "b bf16 r n", OUT],
            (*PLAIN, s.Product(s.Matrix("t", (1,), (0,)), (s.Matrix("b", (1,), (0,)),))),
            (s.Phase("same"),), sinks=(s.Store(Y),), rows=("m",), cols=("n",),
        ),
        {"same": same},
    ),
    "packed_tile": _simple(
        "packed_tile", ["p f16 m n lane", ("y bf16 m n lane", "out")], (s.Phase("add_pair"),), {"add_pair": add_pair},
        ports=(s.Tile("p", s.Matrix("p", (0,), (1,), pack=2)),), sinks=(s.Store(s.Matrix("y", (0,), (1,), pack=2)),), fixed={"lane": 2},
    ),
    "two_tiles": _simple(
        "two_tiles", ["u f32 m n", "v bf16 n m", OUT], (s.Phase("scaled_sum"),), {"scaled_sum": scaled_sum},
        ports=(s.Tile("u", s.Matrix("u", (0,), (1,))), s.Tile("v", s.Matrix("v", (1,), (0,)))),
    ),
    "odd_windows": _simple(
        "odd_windows", [("q bf16 m qn", "out"), ("k f32 m kn", "out"), ("work f32 m", "work"), ("top f32 m", "work")],
        (s.Phase("four"),), {"four": four},
        sinks=(
            s.Store(s.Matrix("q", (0,), (1,)), s.Window(0, 100)), s.Store(s.Matrix("k", (0,), (1,)), s.Window(100, 156)),
            s.RowReduce("sum", "work", s.Window(100, 156)), s.RowReduce("lse", "top", s.Window(0, 100)),
        ),
        fixed={"n": 256, "qn": 100, "kn": 156},
    ),
    "even_windows": _simple(
        "even_windows", [("q bf16 m qn", "out"), ("k bf16 m kn", "out")], (s.Phase("twice"),), {"twice": twice},
        sinks=(s.Store(s.Matrix("q", (0,), (1,)), s.Window(0, 96)), s.Store(s.Matrix("k", (0,), (1,)), s.Window(96, 100))),
        fixed={"n": 196, "qn": 96, "kn": 100},
    ),
    "halves_n_major": GemmCase(
        gemm(
            "halves_n_major", ["x bf16 m d", "w bf16 d lane n", OUT],
            (s.Product(KM, (s.Matrix("w", (2,), (0,), ((1, 0),)), s.Matrix("w", (2,), (0,), ((1, 1),)))),),
            (s.Phase("difference"),), sinks=(s.Store(Y),), rows=("m",), cols=("n",),
        ),
        {"difference": difference}, {"lane": 2},
    ),
    "far_apart": GemmCase(
        gemm(
            "far_apart", ["x bf16 m d", "w bf16 n d", "v bf16 m n", "u bf16 m n", OUT], PLAIN, (s.Phase("scaled_sum"),),
            ports=(s.Tile("u", s.Matrix("u", (0,), (1,))), s.Load("v", "v", (ROW, COL))), sinks=(s.Store(Y),), rows=("m",), cols=("n",),
        ),
        {"scaled_sum": scaled_sum}, far=("x", "v", "u", "y"),
    ),
    "wide_groups": _simple(
        "wide_groups", [OUT], (s.Phase("squares", (s.Group("sum", 128), s.Group("amax", 64))), s.Phase("normalised")),
        {"squares": squares, "normalised": normalised}, divisor=128, granule=128,
    ),
    "narrow_groups": _simple(
        "narrow_groups", [OUT], (s.Phase("squares", (s.Group("sum", 2), s.Group("min", 4))), s.Phase("normalised")),
        {"squares": squares, "normalised": normalised}, divisor=8,
    ),
    "lse_group": _simple(
        "lse_group", [OUT], (s.Phase("same", (s.Group("lse", 16),)), s.Phase("plus_lse")), {"same": same, "plus_lse": plus_lse},
        divisor=16, granule=16,
    ),
    "moments_group": _simple(
        "moments_group", [OUT], (s.Phase("same", (s.Group("moments", 16), s.Group("moments", 4))), s.Phase("normalised")),
        {"same": twice, "normalised": normalised}, divisor=16, granule=16,
    ),
    "moments": _simple(
        "moments", [OUT, ("a f32 m", "work"), ("b f32 m", "work"), ("c f32 n", "work")], (s.Phase("four"),), {"four": four},
        sinks=(*STORE, s.RowReduce("moments", "a"), s.RowReduce("sum", "b"), s.ColReduce("moments", "c")),
    ),
    "moments_of_a_run": _simple(
        "moments_of_a_run", [OUT, ("a f32 m", "work")], (s.Phase("twice"),), {"twice": twice},
        sinks=(*STORE, s.RowReduce("moments", "a", s.Window(100, 156))),
    ),
    "reductions": _simple(
        "reductions", [("a f32 m", "work"), ("b f32 m", "work"), ("c f32 n", "work"), ("e f32 n", "work")],
        (s.Phase("four"),), {"four": four},
        sinks=(s.RowReduce("max", "a"), s.RowReduce("min", "b"), s.ColReduce("lse", "c"), s.ColReduce("amax", "e")),
    ),
    "column_points": _simple(
        "column_points", ["target i32 n", ("y f32 n", "out")], (s.Phase("pick"),), {"pick": pick},
        ports=(s.Iota("r", ROW), s.Load("target", "target", (COL,))), sinks=(s.Point("y", (COL,)),),
    ),
    "positions": _simple(
        "positions", ["flag bool m n", OUT], (s.Phase("by_position"),), {"by_position": by_position},
        ports=(
            s.Iota("row", s.Index("row", div=("k",))), s.Iota("col", s.Index("col", div=(3,), mod=(5,))), s.Extent("e", ("k", 2)),
            s.Load("flag", "flag", (ROW, COL)),
        ),
        extents=("k",),
    ),
    "map": GemmCase(
        gemm(
            "map", ["u f32 m n", "v bf16 n m", "a bf16 m", "b f32 n", OUT, ("r f32 m", "work"), ("c f32 n", "work")],
            (), (s.Phase("blend"),),
            ports=(
                s.Tile("u", s.Matrix("u", (0,), (1,))), s.Tile("v", s.Matrix("v", (1,), (0,))), s.Load("a", "a", (ROW,)),
                s.Load("b", "b", (COL,)),
            ),
            sinks=(*STORE, s.RowReduce("lse", "r"), s.ColReduce("sum", "c")), rows=("m",), cols=("n",), extents=("m", "n"),
        ),
        {"blend": blend},
    ),
    "row_norm": GemmCase(
        gemm(
            "row_norm", ["x bf16 m n", "g f32 n", "r bf16 m n", OUT, ("t f32 m", "out")],
            (), (s.Phase("mean_and_moments", (s.Group("sum", 0), s.Group("moments", 0))), s.Phase("layer_norm")),
            ports=(
                s.Tile("x", s.Matrix("x", (0,), (1,))), s.Load("g", "g", (COL,)), s.Tile("r", s.Matrix("r", (0,), (1,))),
                s.Extent("size", ("n",)), s.Iota("column", COL),
            ),
            sinks=(*STORE, s.Point("t", (ROW,), once=True)), rows=("m",), cols=("n",), extents=("m", "n"),
        ),
        {"mean_and_moments": mean_and_moments, "layer_norm": layer_norm},
    ),
    "row_backward": GemmCase(
        gemm(
            "row_backward", ["x bf16 m n", "g f32 n", "r bf16 m n", OUT, ("c f32 n", "work"), ("e f32 n", "work"), ("s f32 m", "work")],
            (), (s.Phase("two_sums", (s.Group("sum", 0), s.Group("max", 0))), s.Phase("four_rows")),
            ports=(s.Tile("x", s.Matrix("x", (0,), (1,))), s.Load("g", "g", (COL,)), s.Tile("r", s.Matrix("r", (0,), (1,)))),
            sinks=(*STORE, s.ColReduce("sum", "c"), s.ColReduce("moments", "e"), s.RowReduce("lse", "s")),
            rows=("m",), cols=("n",), extents=("m", "n"),
        ),
        {"two_sums": two_sums, "four_rows": four_rows},
    ),
    "map_vectors": GemmCase(
        gemm(
            "map_vectors", ["b f32 n", ("r f32", "work")], (), (s.Phase("same"),), ports=(s.Load("b", "b", (COL,)),),
            sinks=(s.RowReduce("sum", "r"),), cols=("n",), extents=("n",),
        ),
        {"same": same},
    ),
    "columns_only": GemmCase(
        gemm(
            "columns_only", ["x bf16 d", "w bf16 n d", ("y bf16 n", "out")],
            (s.Product(s.Matrix("x", (), (0,)), (KN,)),), (s.Phase("same"),), sinks=(s.Store(s.Matrix("y", (), (0,))),), cols=("n",),
        ),
        {"same": same},
    ),
}  # fmt: skip


def _from_programs() -> dict[str, GemmCase]:
    cases = {}
    for name, case in PROGRAMS.items():
        for kernel in case.program.kernels:
            if isinstance(kernel, s.Gemm) and not case.program.temps:  # one kernel's tensors are the program's
                fixed = {axis: size for axis, size in case.program.extents if size is not None}
                cases[name] = GemmCase(kernel, case.functions, fixed, kernel.granule if kernel.granule > 8 else 1)
    return cases


ALL = {**_from_programs(), **EXTRA}
