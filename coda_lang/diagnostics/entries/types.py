"""Entries of the error catalog, C03xx: types and axes."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "C0301",
        "an operand of the wrong type",
        """Arithmetic takes numbers, `and or not` and the condition of `where` take bools, `gather` takes an integer position.
        Integers meet f32 as f32; nothing else is converted without being told.""",
        """
program masked(x: bf16[m, k], w: bf16[n, k], keep: i32[n]) -> (y: bf16[m, n])
y = where(keep, x @ w, 0.0)
""",
        """
program masked(x: bf16[m, k], w: bf16[n, k], keep: i32[n]) -> (y: bf16[m, n])
y = where(keep != 0, x @ w, 0.0)
""",
        "Convert the operand: compare a number, choose numbers with `where`, or write a cast.",
    ),
    Entry(
        "C0302",
        "an outer result of a product",
        """Element-wise operators broadcast by name. Values that no product made may meet in an outer result, such as `pos *
        freq`. But where an operand descends from a product, the result has the axes of an operand that does: a residual or a bias
        with a mis-named axis would otherwise turn a matrix into an array of matrices, silently.

        Where that is meant, `expand[d](…)` says so.""",
        """
program residual(x: bf16[m, k], w: bf16[n, k], r: bf16[m, d]) -> (y: bf16[m, n])
y = x @ w + r
""",
        """
program residual(x: bf16[m, k], w: bf16[n, k], r: bf16[m, n]) -> (y: bf16[m, n])
y = x @ w + r
""",
        "Name the axis as the product does, or write `expand[…](…)`.",
    ),
    Entry(
        "C0303",
        "an axis that the value lacks",
        """A reduction, `gather`, `split`, `rename` or `matmul` names an axis of the program which this value does not have,
        perhaps because it was reduced or contracted before.""",
        """
program sums(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], s: f32[m])
y = x @ w
s = sum[k](y)
""",
        """
program sums(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], s: f32[m])
y = x @ w
s = sum[n](y)
""",
        "Name one of the value's axes; the message lists them.",
    ),
    Entry(
        "C0304",
        "a product with nothing to contract",
        """`@` contracts the axes that both sides share, whatever their order. If they share none, the contracted axis probably
        has two names.""",
        """
program linear(x: bf16[m, k], w: bf16[n, d]) -> (y: bf16[m, n])
y = x @ w
""",
        """
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = x @ w
""",
        "Give the contracted axis one name on both sides.",
    ),
    Entry(
        "C0305",
        "a product one side of which keeps no axis",
        """Each side of a product keeps an axis of its own: those become the rows and columns of the result. A sum of products
        without that is a reduction, and is written as one.""",
        """
program scores(x: bf16[m, k], w: bf16[n, k], v: bf16[n]) -> (y: bf16[m, n], s: f32[m])
y = x @ w
s = y @ v
""",
        """
program scores(x: bf16[m, k], w: bf16[n, k], v: bf16[n]) -> (y: bf16[m, n], s: f32[m])
y = x @ w
s = sum[n](y * v)
""",
        "Write `sum[…](a * b)`.",
    ),
    Entry(
        "C0306",
        "a group of contracted axes that is not stored as one",
        """`@` may contract several axes at once if every stored operand holds them side by side and in one order: then they are
        one long axis. A computed operand imposes no order. Anything else has to be named, `matmul[a, b](x, w)`, since it may be a
        mistake, and costs a copy.""",
        """
program grouped(x: bf16[m, head, hd=64], w: bf16[n, hd, head]) -> (y: bf16[m, n])
y = x @ w
""",
        """
program grouped(x: bf16[m, head, hd=64], w: bf16[n, head, hd]) -> (y: bf16[m, n])
y = x @ w
""",
        "Store the axes in one order, or name them with `matmul[…]`.",
    ),
    Entry(
        "C0307",
        "a product of types that cannot be multiplied",
        """A product multiplies bf16 by bf16, or f16 by f16, and sums in f32. An f32 operand is rounded to the other's type; if
        both are f32, or one is bf16 and the other f16, the program has to say which type it means.""",
        """
program linear(x: f16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = x @ w
""",
        """
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = x @ w
""",
        "Round an operand: `bf16(x) @ w`.",
    ),
    Entry(
        "C0308",
        "a conversion that is not made",
        """A signature or an annotation rounds floats, widens integers and turns integers into floats. Floats do not become integers
        (`floor` and `round` give whole numbers as floats), i64 does not become i32, and bools and numbers are kept apart: a comparison
        makes a bool, `where` a number.""",
        """
program flags(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], positive: f32[m, n])
y = x @ w
positive = y > 0.0
""",
        """
program flags(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], positive: f32[m, n])
y = x @ w
positive = where(y > 0.0, 1.0, 0.0)
""",
        "Write the comparison or the `where`, or keep the type.",
    ),
    Entry(
        "C0309",
        "an output with other axes than declared",
        """An output has exactly the axes of its declaration. It is neither summed nor spread over axes to make it fit.""",
        """
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m])
y = x @ w
""",
        """
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = x @ w
""",
        "Declare the axes that the value has, reduce it, or `expand` it.",
    ),
    Entry(
        "C0310",
        "an axis with two extents",
        """An axis name means one extent in a program. `lane=2` fixes it everywhere; a bare name is free at run time, or has the
        extent that another place gives it. A renamed axis keeps its extent.""",
        """
program heads(x: bf16[m, k], w: bf16[head, hd=64, k]) -> (y: bf16[m, head, hd=128])
y = x @ w
""",
        """
program heads(x: bf16[m, k], w: bf16[head, hd=64, k]) -> (y: bf16[m, head, hd])
y = x @ w
""",
        "Give different extents different names.",
    ),
    Entry(
        "C0311",
        "an axis that cannot be taken apart",
        """`split` and `pack` make values of the positions of an axis, so its extent is fixed, `lane=2`, and small. The short form
        `a, b = e` is for a value exactly one axis of which is fixed to as many positions as there are names.""",
        """
program gated(x: bf16[m, k], w: bf16[f, lane, k]) -> (y: bf16[m, f])
gate, up = x @ w
y = silu(gate) * up
""",
        """
program gated(x: bf16[m, k], w: bf16[f, lane=2, k]) -> (y: bf16[m, f])
gate, up = x @ w
y = silu(gate) * up
""",
        "Fix the axis where it is declared, or say which is meant: `split[lane](…)`.",
    ),
    Entry(
        "C0312",
        "lanes or runs that do not add up",
        """`pack[lane](…)` takes one value for each position of the axis. The runs of `split[head -> q=4, k=2](…)`, and those that
        `pack` joins, cover the whole axis, no less and no more.""",
        """
program heads(x: bf16[m, k], w: bf16[head=8, hd=64, k]) -> (q: bf16[m, qh=4, hd], r: bf16[m, rh=2, hd])
q, r = split[head -> qh, rh](x @ w)
""",
        """
program heads(x: bf16[m, k], w: bf16[head=8, hd=64, k]) -> (q: bf16[m, qh=4, hd], r: bf16[m, rh=4, hd])
q, r = split[head -> qh, rh](x @ w)
""",
        "Correct the extents, or name the rest as well.",
    ),
    Entry(
        "C0313",
        "several values in the place of one",
        """`split` and defs with several results give several values. They are given as many names, `a, b = f(x)`, before they are
        used.""",
        """
def both(a, b) = a + b, a - b
program butterfly(x: bf16[m, k], w: bf16[n, k], r: bf16[m, n]) -> (y: bf16[m, n])
y = both(x @ w, r)
""",
        """
def both(a, b) = a + b, a - b
program butterfly(x: bf16[m, k], w: bf16[n, k], r: bf16[m, n]) -> (y: bf16[m, n], z: bf16[m, n])
y, z = both(x @ w, r)
""",
        "Give each value a name.",
    ),
    Entry(
        "C0314",
        "an axis that a value would have twice",
        """Axes are known by their names, so a value has each once: a tensor is not declared `[m, m]`, and `rename`, `expand`,
        `pack` or `split` cannot give a value an axis that it has.""",
        """
program square(x: bf16[m, k], w: bf16[k, k]) -> (y: bf16[m, k])
y = x @ w
""",
        """
program square(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
require n == k
y = x @ w
""",
        "Use two names; `require` can say that their extents are equal.",
    ),
    Entry(
        "C0315",
        "an annotation against the signature",
        """The type that the signature gives an output holds from its assignment on, so an annotation there can only repeat it. To
        use the value before it is rounded, give it a name of its own first.""",
        """
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y: f32 = x @ w
""",
        """
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
h: f32 = x @ w
y = h
""",
        "Drop the annotation, or name the wider value separately.",
    ),
    Entry(
        "C0316",
        "a number that its type cannot hold",
        """A number takes the type of what it meets: f32 beside floats, i32 or i64 beside integers. An integer that f32 would
        round is refused, and so is a param beyond the range of f32.""",
        """
program shifted(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], big: f32[])
y = x @ w
big = 16777217
""",
        """
program shifted(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], big: f32[])
y = x @ w
big = 16777217.0
""",
        "Write a number that the type holds, or `16777217.0` if rounding is meant.",
    ),
    Entry(
        "C0317",
        "a condition that cannot be one, or never holds",
        """`require` compares extents: names of axes, whole numbers, `+ - * / %`, comparisons, `and or not`. A condition on fixed
        extents alone is decided when the program is compiled.""",
        """
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
require k % 8
y = x @ w
""",
        """
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
require k % 8 == 0
y = x @ w
""",
        "Compare extents: `require k % 8 == 0`.",
    ),
    Entry(
        "C0318",
        "a nominal extent that has no use",
        """`nominal m = 8192` tells the planner how long a free axis usually is. A fixed axis has its extent already, and a free
        one has one nominal extent, of 1 or more.""",
        """
program gated(x: bf16[m, k], w: bf16[f, lane=2, k]) -> (y: bf16[m, f])
nominal lane = 4
gate, up = x @ w
y = silu(gate) * up
""",
        """
program gated(x: bf16[m, k], w: bf16[f, lane=2, k]) -> (y: bf16[m, f])
nominal m = 4096
gate, up = x @ w
y = silu(gate) * up
""",
        "Give one nominal extent to a free axis.",
    ),
    Entry(
        "C0319",
        "a value that cannot be saved or recomputed",
        """`save` and `recompute` overrule the planner for values that the program computes, each by one of the two. Inputs and
        constants are there anyway.""",
        """
program gated(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
h = x @ w
y = silu(h)
save h
recompute h
""",
        """
program gated(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
h = x @ w
y = silu(h)
save h
""",
        "Name a computed value, once.",
    ),
    Entry(
        "C0320",
        "a remainder of values",
        """`%` is for extents, in `require`. Values have no remainder, because languages differ on its sign.""",
        """
program wrapped(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = (x @ w) % 2.0
""",
        """
program wrapped(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
h = x @ w
y = h - 2.0 * floor(h / 2.0)
""",
        "Write `x - y * floor(x / y)`.",
    ),
    Entry(
        "C0321",
        "an axis that cannot be taken chunk by chunk",
        """`chunk v by 4096` says that what stands between kernels and carries `v` exists for 4096 positions of it at a time. One axis
        of a program can be taken so; it is free, keeps its name, and a chunk is a multiple of 8.""",
        """
program head(x: bf16[m, d], w: bf16[v, d], target: i64[m]) -> (loss: f32[m])
loss = cross_entropy[v](x @ w, target)
chunk v by 1000
chunk m by 2048
""",
        """
program head(x: bf16[m, d], w: bf16[v, d], target: i64[m]) -> (loss: f32[m])
loss = cross_entropy[v](x @ w, target)
chunk v by 4096
""",
        "Name one free axis, and a multiple of 8.",
    ),
    Entry(
        "C0322",
        "a value that cannot be distributed",
        """`distribute n` asks that products of `n` be taken apart, so `n` is a value that the program computes.""",
        """
program linear(x: bf16[m, d], w: bf16[f, d]) -> (y: bf16[m, f])
y = x @ w
distribute x
""",
        """
program linear(x: bf16[m, d], g: bf16[d], b: bf16[d], w: bf16[f, d]) -> (y: bf16[m, f])
n = layernorm[d](x, g, b, 1e-5)
y = n @ w
distribute n
""",
        "Name a computed value.",
    ),
)
