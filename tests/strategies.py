"""Random well-typed programs, for properties such as *a pass preserves the float64 meaning*.

`programs()` draws a `Generated`: a product (or the sum of two), maps, lanes and reductions after it, in the forms a fused kernel has: row
vectors, column vectors, tiles and scalars as operands; one or two axes of rows; two lanes, heads with a norm of each, or runs of a split
axis; tile stores, packed stores, row and column reductions and a gather as results, with maps on reduced values. With it come extents of
all axes and, for each output, a bound on |written − exact| that follows from the program by first-order error analysis.
`tensors` makes inputs for any program. Choices depend on integers only, so written and exact never part ways at a jump.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from coda_lang.ir.graph import Output, Program, Tensor, Var
from coda_lang.ir.types import BF16, F16, F32, I32, I64, Axis, DType, Ty
from coda_lang.ops import TABLE
from coda_lang.ops.builder import EqnBuilder, Value

ULP = 2.0**-23
TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "i32": torch.int32, "i64": torch.int64, "bool": torch.bool}
IGNORED = -100

# name → (largest |value|, largest slope) over |x| ≤ B
UNARY = {
    "neg": lambda b: (b, 1.0),
    "abs": lambda b: (b, 1.0),
    "relu": lambda b: (b, 1.0),
    "relu2": lambda b: (b * b, 2 * b),
    "square": lambda b: (b * b, 2 * b),
    "silu": lambda b: (b, 1.1),
    "gelu": lambda b: (b, 1.13),
    "gelu_tanh": lambda b: (b, 1.13),
    "quick_gelu": lambda b: (b, 1.1),
    "tanh": lambda b: (1.0, 1.0),
    "sigmoid": lambda b: (1.0, 0.25),
    "softplus": lambda b: (b + 0.7, 1.0),
    "sin": lambda b: (1.0, 1.0),
    "cos": lambda b: (1.0, 1.0),
    "erf": lambda b: (1.0, 1.13),
    "exp": lambda b: (2.718281828**b, 2.718281828**b),
    "exp2": lambda b: (2.0**b, 0.7 * 2.0**b),
}
FORMS = ("plain", "plain", "lanes", "heads", "runs")
LARGEST = 64.0  # no value exceeds it, so that no error is amplified without bound


@dataclass(frozen=True)
class Term:
    """A value with a bound on its magnitude and on the error of its written f32 (or rounded) value."""

    value: Value
    size: float
    error: float


@dataclass(frozen=True)
class Generated:
    """A program, extents of all its axes, and per output the bound on |written − exact|."""

    program: Program
    extents: dict[str, int]
    errors: dict[str, float]
    seed: int

    def tensors(self) -> dict[str, torch.Tensor]:
        return tensors(self.program, self.extents, self.seed)


def tensors(program: Program, extents: dict[str, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of a program: floats in [−1, 1], integers positions along the shortest axis, some of them −100."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for t in program.inputs:
        shape = [extents[a] for a in t.axes]
        if t.dtype.kind == "float":
            x = torch.rand(shape, generator=g) * 2 - 1
        else:
            x = torch.randint(0, max(1, min(extents.values())), shape, generator=g)
            x = torch.where(torch.rand(shape, generator=g) < 0.25, IGNORED, x)
        out[t.name] = x.to(TORCH[t.dtype.name])
    return out


class Maker:
    """Draws one program."""

    def __init__(self, draw: Any, multiple: int) -> None:
        self.draw, self.multiple = draw, multiple
        self.form = draw(st.sampled_from(FORMS))
        self.two = draw(st.booleans()) and self.form != "lanes"
        self.cols: tuple[str, ...] = {"heads": ("n", "hd"), "runs": ("head",)}.get(self.form, ("n",))
        self.rows: tuple[str, ...] = ("b", "t") if draw(st.booleans()) and draw(st.booleans()) else ("m",)
        extra = {"lanes": (Axis("lane", 2),), "heads": (Axis("hd", 8),), "runs": (Axis("head", 24), Axis("qh", 16), Axis("kh", 8))}
        free = (*map(Axis, self.rows), Axis("k"), *((Axis("r"),) if self.two else ()), *((Axis("n"),) if self.form != "runs" else ()))
        self.axes = (*free, *extra.get(self.form, ()))
        self.half = draw(st.sampled_from([BF16, F16]))
        self.inputs: list[Tensor] = []
        self.outputs: list[Output] = []
        self.errors: dict[str, float] = {}
        self.names = ["x", "w", "row", "part", "col", "tile", "scalar", "target", "u", "v", *(f"y{i}" for i in range(8))]
        self.b = EqnBuilder(self.axes, self.names)
        self.extents = {a.name: a.extent or multiple * draw(st.integers(1, 4)) for a in self.axes}

    def pick(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def input(self, name: str, dtype: DType, axes: tuple[str, ...]) -> Value:
        """Declares an input, its axes stored in any order."""
        stored = tuple(self.draw(st.permutations(axes))) if len(axes) > 1 else axes
        self.inputs.append(Tensor(name, dtype, stored))
        return self.b.value(Var(name, Ty(dtype, tuple(a.name for a in self.axes if a.name in axes))))

    def term(self, name: str, size: float, *args: Term, slope: float = 1.0, **attrs: Any) -> Term:
        """Applies an op; the error adds the arguments' times the slope and some ulps of the result."""
        value = self.b.apply(name, [a.value for a in args], attrs)
        return Term(value, size, slope * sum(a.error for a in args) + 16 * ULP * max(size, 1.0))

    # --- the parts of a program

    def product(self) -> list[Term]:
        """The accumulator, or its two lanes."""
        cols = (*self.cols, "lane") if self.form == "lanes" else self.cols
        acc = self.contraction("x", "w", "k", cols)
        if self.two:
            other = self.contraction("u", "v", "r", cols)
            acc = self.term("add", acc.size + other.size, acc, other)
        if self.form != "lanes":
            return [acc]
        return [Term(self.b.lane(acc.value, axis="lane", index=i), acc.size, acc.error) for i in range(2)]

    def contraction(self, x: str, w: str, over: str, cols: tuple[str, ...]) -> Term:
        a, b = self.input(x, self.half, (*self.rows, over)), self.input(w, self.half, (*cols, over))
        k = self.extents[over]
        return Term(self.b.contract(a, b, axes=(over,), batch=()), k, k * k * ULP)

    def operands(self) -> list[Term]:
        """Vectors, a tile, a scalar, and what is made of positions: whatever the draw says."""
        kinds = ["row", "part", "col", "tile", "scalar", "index", "size", "number"]
        wanted = self.draw(st.lists(st.sampled_from(kinds), max_size=3, unique=True))
        held = {"row": self.cols, "part": self.cols[-1:], "col": self.rows, "tile": (*self.rows, *self.cols), "scalar": ()}
        out = []
        for kind in wanted:
            if kind in held:
                dtype = self.pick([BF16, F32]) if kind != "scalar" else F32
                out.append(Term(self.input(kind, dtype, held[kind]), 1.0, 0.0))
            elif kind == "number":
                out.append(Term(self.b.value(self.draw(st.floats(-2, 2, width=32))), 2.0, 0.0))
            elif kind == "index":
                axis = self.pick([*self.rows, *self.cols])
                last = self.b.maximum(self.b.cast(self.b.size(axes=(axis,)), dtype="f32"), 1.0)
                out.append(Term(self.b.cast(self.b.index(axis=axis), dtype="f32") / last, 1.0, 4 * ULP))
            else:
                out.append(Term(1.0 / self.b.size(axes=self.cols), 1.0, 4 * ULP))
        return out

    def tame(self, t: Term) -> Term:
        """The term, squashed where it could be large."""
        return t if t.size <= LARGEST else self.term("tanh", 1.0, t)

    def step(self, tiles: list[Term], others: list[Term]) -> Term:
        """One more value made of a tile and of anything."""
        x, y = self.tame(self.pick(tiles)), self.tame(self.pick([*tiles, *others]))
        kinds = ["unary", "unary", "add", "sub", "mul", "minimum", "maximum", "clamp", "div", "rsqrt", "fma", "where", "round"]
        kind = self.pick([*kinds, "norm", "norm"] if self.form == "heads" else kinds)
        if kind == "unary":
            return self.unary(x)
        if kind == "norm":
            return self.norm(x)
        if kind in ("add", "sub"):
            return self.tame(self.term(kind, x.size + y.size, x, y))
        if kind == "mul":
            product = x.size * y.size
            return self.tame(self.term("mul", product, x, y, slope=max(x.size, y.size, 1.0)))
        if kind in ("minimum", "maximum"):
            return self.term(kind, max(x.size, y.size), x, y)
        if kind == "clamp":
            lo, hi = sorted([self.draw(st.floats(-4, 4, width=32)), self.draw(st.floats(-4, 4, width=32))])
            return Term(self.b.clamp(x.value, lo, hi), 4.0, x.error)
        if kind == "div":
            return Term(x.value / (self.b.abs(y.value) + 1.0), x.size, x.error + x.size * y.error + 16 * ULP * max(x.size, 1.0))
        if kind == "rsqrt":
            slope = 2 * x.size
            return Term(self.b.rsqrt(self.b.square(x.value) + 1.0), 1.0, slope * x.error + 16 * ULP * max(x.size**2, 1.0))
        if kind == "fma":
            return self.tame(self.term("fma", x.size * y.size + x.size, x, y, x, slope=max(x.size, y.size, 1.0)))
        if kind == "where":
            return Term(self.b.where(self.condition(), x.value, y.value), max(x.size, y.size), max(x.error, y.error))
        return Term(self.b.cast(x.value, dtype=self.half.name), x.size, x.error + 2.0**-8 * max(x.size, 1.0))

    def condition(self) -> Value:
        """A bool made of integers."""
        i, j = (self.b.index(axis=self.pick([*self.rows, *self.cols])) for _ in range(2))
        first = self.b.apply(self.pick(["ge", "lt", "eq"]), (i * self.draw(st.integers(1, 3)) - 1, self.draw(st.integers(0, 6))))
        second = self.b.apply(self.pick(["gt", "le", "ne"]), (j, self.b.minimum(i, self.b.size(axes=self.rows) - 1)))
        return self.pick([first, ~first, first & second, first | second])

    def norm(self, x: Term) -> Term:
        """x / √(mean x² + 1) over each head."""
        root = self.extents["hd"] ** 0.5
        r = self.b.rsqrt(self.b.mean(self.b.square(x.value), axes=("hd",)) + 1.0)
        return Term(x.value * r, root, (1 + root) * x.error + 32 * ULP * max(x.size, 1.0) ** 2)

    def unary(self, x: Term) -> Term:
        name = self.pick(UNARY)
        size, slope = UNARY[name](x.size)
        if size > LARGEST:
            name, (size, slope) = "tanh", UNARY["tanh"](x.size)
        return self.term(name, size, x, slope=slope)

    # --- results

    def store(self, t: Term) -> None:
        """An output of the term's axes, f32 or 16 bits."""
        name, dtype = f"y{len(self.outputs)}", self.pick([F32, self.half])
        value, error = t.value, t.error
        if value.ty.dtype is not dtype or value.is_literal:
            value = self.b.cast(value, dtype=dtype.name)
            error += 2.0**-8 * max(t.size, 1.0) if dtype is not F32 else 0.0
        order = tuple(self.draw(st.permutations(value.ty.axes))) if len(value.ty.axes) > 1 else value.ty.axes
        self.outputs.append(Output(Tensor(name, dtype, order), value.atom))  # type: ignore[arg-type]
        self.errors[name] = error

    def reduced(self, t: Term) -> Term:
        """A reduction of a tile along its rows, its columns or within a head, perhaps with a map after it."""
        over = self.pick([self.cols, *([self.rows] if self.form != "runs" else []), *([("hd",)] if self.form == "heads" else [])])
        name = self.pick(["sum", "mean", "max", "min", "amax", "logsumexp"])
        n = math.prod(self.extents[a] for a in over)
        scale = n if name == "sum" else 1.0
        size = t.size * scale + (4.0 if name == "logsumexp" else 0.0)
        out = Term(self.b.apply(name, [t.value], {"axes": over}), size, t.error * scale + (n + 16) * ULP * max(size, 1.0))
        return self.unary(self.tame(out)) if self.draw(st.booleans()) else out

    def picked(self, t: Term) -> Term:
        """The element of each row at `target`, 0 where it is to be ignored."""
        target = self.input("target", self.pick([I32, I64]), self.rows)
        found = self.b.gather(t.value, target, axis=self.cols[0])
        return Term(self.b.where(self.b.eq(target, IGNORED), 0.0, found), t.size, t.error)

    def program(self) -> Generated:
        tiles = self.product()
        if self.form == "runs":
            (acc,) = tiles
            for start, run in ((0, "qh"), (16, "kh")):
                self.cols = (run,)
                value = self.b.run(acc.value, axis="head", start=start, to=run)
                self.finish([Term(value, acc.size, acc.error)], [], 2)
        else:
            self.finish(tiles, self.operands(), 6)
        program = Program("random", self.axes, tuple(self.inputs), tuple(self.outputs), tuple(self.b.eqns))
        return Generated(program, self.extents, self.errors, self.draw(st.integers(0, 2**16)))

    def finish(self, tiles: list[Term], others: list[Term], steps: int) -> None:
        """Maps, then results."""
        for _ in range(self.draw(st.integers(0, steps))):
            tiles.append(self.step(tiles, others))
        kinds = self.draw(st.lists(st.sampled_from(["tile", "tile", "pack", "reduce", "reduce", "gather"]), min_size=1, max_size=3))
        for kind in kinds:
            t = self.pick(tiles[-3:])
            if kind == "pack" and self.form == "lanes":
                u = self.pick(tiles)
                self.store(self.term("pack", max(t.size, u.size), t, u, axis="lane"))
            elif kind == "reduce":
                self.store(self.reduced(t))
            elif kind == "gather" and self.form in ("plain", "lanes") and all(i.name != "target" for i in self.inputs):
                self.store(self.picked(t))
            else:
                self.store(t)


@st.composite
def programs(draw: Any, multiple: int = 1) -> Generated:
    """Programs with one accumulator (or two lanes); free extents are 1 to 4 times `multiple`."""
    return Maker(draw, multiple).program()


assert set(UNARY) <= set(TABLE)
