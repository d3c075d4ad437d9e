"""Entries of the error catalog, C04xx: what cannot be one kernel.

Most are no errors: the program becomes several kernels, and `codac plan` gives the code as the reason."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "C0401",
        "a program of several kernels",
        """An operand of a product comes out of another product. Every row of the second needs whole rows of the first, so the first must be
        finished: two kernels, and what stands between them is stored. `codac plan` shows both.""",
        """
program mlp(x: bf16[m, d], w: bf16[f, d], v: bf16[e, f]) -> (y: bf16[m, e])
y = relu(x @ w) @ v
""",
        """
program up(x: bf16[m, d], w: bf16[f, d]) -> (h: bf16[m, f])
h = relu(x @ w)

program down(h: bf16[m, f], v: bf16[e, f]) -> (y: bf16[m, e])
y = h @ v
""",
        "Nothing to do: the program becomes one kernel a product.",
        "reason",
    ),
    Entry(
        "C0403",
        "products that cannot share one kernel",
        """Two products run in one kernel if they are summed, unscaled, into one accumulator (`x @ w + t @ b`), or if they multiply the
        same rows and
        have the same columns (`x @ wg` beside `x @ wu`). Lanes may be split on one side of the product only.""",
        """
program pair(x: bf16[m, k], w: bf16[n, k], t: bf16[m, r], b: bf16[n, r]) -> (y: bf16[m, n])
y = x @ w + 0.5 * (t @ b)
""",
        """
program pair(x: bf16[m, k], w: bf16[n, k], t: bf16[m, r], b: bf16[n, r]) -> (y: bf16[m, n])
y = x @ w + t @ b
""",
        "Fold a scale into one of the operands before, or compute one product in a program of its own.",
        "reason",
    ),
    Entry(
        "C0404",
        "a batched product",
        """Both operands share an axis that is not contracted: there is one product for each of its positions. A kernel computes one
        product, so it is launched once for each position; of several batch axes, or of one that is taken apart, renamed or in a
        program that also runs in chunks, no such launches are made.""",
        """
program scores(q: bf16[b, h, t, k], w: bf16[b, h, s, k]) -> (y: bf16[b, h, t, s])
y = matmul[k](q, w)
""",
        """
program scores(q: bf16[bh, t, k], w: bf16[bh, s, k]) -> (y: bf16[bh, t, s])
y = matmul[k](q, w)
""",
        "Declare batch axes that stand side by side as one, or give them to one operand only.",
    ),
    Entry(
        "C0405",
        "an operand that is computed",
        """A kernel loads the operands of its product as they are stored, straight into the tensor cores. An operand that is computed
        from inputs (added, activated, rounded from f32) is written first, by a kernel of its own.

        A factor that carries no contracted axis is no obstacle: it moves behind the product, (x · s) @ w = s · (x @ w), unless --strict
        forbids to move the rounding.""",
        """
program activated(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = bf16(relu(x)) @ w
""",
        """
program activated(r: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = r @ w
""",
        "Have the kernel that makes the operand store it as it is wanted here.",
        "reason",
    ),
    Entry(
        "C0406",
        "a result of all tiles inside one tile",
        """A reduction over all columns (or rows) of a product is complete only when every tile is done; until then each tile has a
        part of it. So
        its result cannot be used by the kernel that computes it. The value and the reduction are stored, and a second kernel, one pass
        over memory, goes on from there.

        Over a fixed group of inner columns that fits a tile (a head) a statistic is known at once, and this error does not arise.""",
        """
program norm(x: bf16[m, k], w: bf16[d, k], g: bf16[d]) -> (y: bf16[m, d])
y = rmsnorm[d](x @ w, g, 1e-5)
""",
        """
program norm(x: bf16[m, k], w: bf16[d, k], g: bf16[d]) -> (h: bf16[m, d], sumsq: f32[m])
t     = x @ w
h     = t * g
sumsq = sum[d](t * t)
""",
        "To do without the second kernel, output the value and the reduction, and apply the result behind the next product.",
        "reason",
    ),
    Entry(
        "C0407",
        "values at different columns of a product",
        """A tile knows its own columns. Runs of a split axis are different columns, so they cannot meet in one expression, nor be joined in
        another order; and a run must be a consecutive range of columns that is known when compiling.

        Lanes are different: declare the weight with a lane axis, and its lanes are computed side by side in one tile.""",
        """
program gated(x: bf16[m, d], w: bf16[two=512, d]) -> (y: bf16[m, g=256])
a, b = split[two -> g, u=256](x @ w)
y = silu(a) * rename[u -> g](b)
""",
        """
program gated(x: bf16[m, d], w: bf16[lane=2, g=256, d]) -> (y: bf16[m, g])
a, b = x @ w
y = silu(a) * b
""",
        "Split lanes instead of runs.",
        "reason",
    ),
    Entry(
        "C0408",
        "an axis that the product lacks",
        """Everything in a kernel happens at a row and a column of its product. A value with a further free axis would use each element
        of the product
        once for every position of it. A fixed axis is fine: its positions are lanes.""",
        """
program spread(x: bf16[m, k], w: bf16[n, k], r: bf16[n, e]) -> (y: bf16[m, n, e])
y = expand[e](x @ w) * r
""",
        """
program spread(x: bf16[m, k], w: bf16[n, k], r: bf16[n, e=2]) -> (y: bf16[m, n, e])
y = expand[e](x @ w) * r
""",
        "Fix the extent of the axis, or leave it out.",
        "reason",
    ),
    Entry(
        "C0409",
        "a reduction of an input",
        """A kernel with a product reduces values of that product. A reduction (or `gather`) of something that no product made is a
        kernel of its own before this one.""",
        """
program normed(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = (x @ w) * rsqrt(mean[k](x * x) + 1e-5)
""",
        """
program normed(x: bf16[m, k], w: bf16[n, k], ms: f32[m]) -> (y: bf16[m, n])
y = (x @ w) * rsqrt(ms + 1e-5)
""",
        "If another program makes x, let it reduce x as well, and make the result an input.",
        "reason",
    ),
    Entry(
        "C0410",
        "a partial reduction across tiles",
        """Across tiles, a reduction takes all rows or all columns of the product, in partial results that a small second kernel
        finishes. Within a tile,
        it takes the innermost columns. Some outer columns, or some of the rows, are neither.""",
        """
program heads(x: bf16[m, d], w: bf16[head, hd=64, d]) -> (s: f32[m, hd])
s = sum[head](x @ w)
""",
        """
program heads(x: bf16[m, d], w: bf16[head, hd=64, d]) -> (s: f32[m, head])
s = sum[hd](x @ w)
""",
        "Reduce over the innermost columns, or over all of them; or declare the weight with the reduced axes innermost.",
        "reason",
    ),
    Entry(
        "C0411",
        "a statistic that no tile holds",
        """A statistic over a group of columns (the norm of a head) is used by the kernel that computes it if one tile holds the whole
        group. So its
        extent must be fixed, at most 256, and 1, 2, 4 or a multiple of 8.""",
        """
program heads(x: bf16[m, d], w: bf16[head, hd, d], g: bf16[hd]) -> (y: bf16[m, head, hd])
y = rmsnorm[hd](x @ w, g, 1e-6)
""",
        """
program heads(x: bf16[m, d], w: bf16[head, hd=128, d], g: bf16[hd]) -> (y: bf16[m, head, hd])
y = rmsnorm[hd](x @ w, g, 1e-6)
""",
        "Fix the extent of the group in the signature.",
        "reason",
    ),
    Entry(
        "C0412",
        "a gather across tiles",
        """`gather` picks, for each row, the element of the product whose column equals the index (or, for each column, the row). The
        axis must be all of
        the product's columns, and the index must be known to every tile: computed from inputs without that axis.""",
        """
program picked(x: bf16[m, d], w: bf16[head, v, d], i: i64[m, head]) -> (z: f32[m, head])
z = gather[v](x @ w, i)
""",
        """
program picked(x: bf16[m, d], w: bf16[v, d], i: i64[m]) -> (z: f32[m])
z = gather[v](x @ w, i)
""",
        "Gather along the only column axis of the product.",
        "reason",
    ),
    Entry(
        "C0413",
        "a finished reduction spread out again",
        """A reduction is finished by a small second kernel that makes one value a row, one a column, or a scalar. Spreading finished
        values over rows and columns is a kernel of its own.""",
        """
program outer(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
z = x @ w
y = expand[n](sum[n](z)) * sum[m](z)
""",
        """
program outer(x: bf16[m, k], w: bf16[n, k]) -> (rows: f32[m], columns: f32[n])
z = x @ w
rows = sum[n](z)
columns = sum[m](z)
""",
        "To do without the last kernel, output the reductions, and do this step where they are used.",
        "reason",
    ),
    Entry(
        "C0414",
        "an output of the wrong extent",
        """A tile writes values that have all the rows of the product; a finisher writes one value a row, one a column, or a scalar. An
        output with only some of the rows is none of these, so a kernel of its own writes it.""",
        """
program scores(x: bf16[b, t, k], w: bf16[n, k], c: f32[b]) -> (y: bf16[b, t, n], e: f32[b])
y = x @ w
e = exp(c)
""",
        """
program scores(x: bf16[b, t, k], w: bf16[n, k], c: f32[b, t]) -> (y: bf16[b, t, n], e: f32[b, t])
y = x @ w
e = exp(c)
""",
        "Nothing to do; or give the output all the rows.",
        "reason",
    ),
    Entry(
        "C0415",
        "a whole that one chunk cannot know",
        """`chunk v by 4096` runs kernels for one part of `v` after the other. What sums over `v` is known after the last part, so no kernel
        before that can use it; and only f32 sums can be put together from parts.""",
        """
program attend(x: bf16[m, d], w: bf16[v, d], u: bf16[n, v]) -> (y: bf16[m, n])
y = softmax[v](x @ w) @ u
chunk v by 4096
""",
        """
program attend(x: bf16[m, d], w: bf16[v, d], u: bf16[n, v]) -> (y: bf16[m, n])
y = softmax[v](x @ w) @ u
chunk m by 2048
""",
        "Chunk an axis over which nothing is reduced in between: the rows.",
    ),
    Entry(
        "C0416",
        "an operand that cannot be distributed",
        """`distribute n` asks that products of `n` be taken apart: into one of a part of `n`, and products of vectors. So `n` is an operand
        of products and nothing else, and a sum of one tensor, which factors for rows and factors for contracted axes may scale, and of
        products of such vectors: a layer norm, or codes with a zero point for each row.""",
        """
program block(x: bf16[m, d], g: bf16[d], w: bf16[f, d]) -> (y: bf16[m, f])
n = rmsnorm[d](x, g, 1e-5)
y = n @ w
distribute n
""",
        """
program block(x: bf16[m, d], g: bf16[d], w: bf16[f, d]) -> (y: bf16[m, f])
n = rmsnorm[d](x, g, 1e-5)
y = n @ w
""",
        "Drop the statement: a value that no vector is added to has nothing to be taken apart.",
    ),
)
