"""Entries of the error catalog, C02xx: names."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "C0201",
        "a value that does not exist",
        """An expression reads a name that is no input, no param and was not assigned above. Inside a def only its arguments and
        the names it assigned itself are visible: params and values of the program have to be passed in, so that a def means the
        same wherever it is called.""",
        """
program linear(x: bf16[m, k], w: bf16[n, k], bias: bf16[n]) -> (y: bf16[m, n])
y = x @ w + bais
""",
        """
program linear(x: bf16[m, k], w: bf16[n, k], bias: bf16[n]) -> (y: bf16[m, n])
y = x @ w + bias
""",
        "Correct the spelling, or add the value to the inputs.",
    ),
    Entry(
        "C0202",
        "a function that does not exist",
        """A call names no primitive (`codac ops` lists them), no def of this file and none of the prelude. Types are functions
        too: `bf16(x)` rounds x.""",
        """
program gated(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = swish(x @ w)
""",
        """
program gated(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = silu(x @ w)
""",
        "Use a primitive, or define the function with `def`.",
    ),
    Entry(
        "C0203",
        "an axis that does not exist",
        """Brackets name an axis which no tensor of the signature has and no line above made. Inside a def, brackets name the axes
        that the def's own brackets bind, and no others: `def f[d](x) = sum[d](x)`. Or a free axis stands only in outputs or
        statements: free extents are taken from the inputs of a call, so none would say how long it is.""",
        """
program sums(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], s: f32[m])
y = x @ w
s = sum[nn](y)
""",
        """
program sums(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], s: f32[m])
y = x @ w
s = sum[n](y)
""",
        "Name an axis of the program; in a def, bind it in the def's brackets.",
    ),
    Entry(
        "C0204",
        "a type that does not exist",
        """The types are bf16, f16, f32, i32, i64 and bool, and those that the file declares: `type T = bf16 | f16`.""",
        """
program linear(x: float16[m, k], w: f16[n, k]) -> (y: f16[m, n])
y = x @ w
""",
        """
program linear(x: f16[m, k], w: f16[n, k]) -> (y: f16[m, n])
y = x @ w
""",
        "Use one of the types.",
    ),
    Entry(
        "C0205",
        "a name with two meanings",
        """A name is given its meaning once: a value is assigned once, and inputs, outputs and params share one space of names
        with the assigned values. Two programs, two defs or two types cannot have one name either, and a def cannot take the name
        of a primitive. (Axes are a space of their own: an axis `d` and a value `d` can live together. A def may have the name of
        a prelude function, which it then shadows.)""",
        """
program mlp(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
h = x @ w
h = silu(h)
y = h
""",
        """
program mlp(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
h = x @ w
y = silu(h)
""",
        "Give the second one a name of its own.",
    ),
    Entry(
        "C0206",
        "a name used above its definition",
        """Statements are read from top to bottom: a value can be read below the line that assigns it, a generic type below the
        line that declares it. (A def may be called above its definition, and a program's params hold throughout.)""",
        """
program gated(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = silu(h)
h = x @ w
""",
        """
program gated(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
h = x @ w
y = silu(h)
""",
        "Move the line that defines the name above its use.",
    ),
    Entry(
        "C0207",
        "a name of the wrong kind",
        """Values, axes and functions are three different things. An axis is not a number: its extent is `size[d]`, and the
        positions along it are `index[d]`. A function is called, `silu(x)`; a value is not.""",
        """
program scaled(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = (x @ w) / k
""",
        """
program scaled(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = (x @ w) / size[k]
""",
        "Write what is meant: `size[d]`, `index[d]`, `f(x)`, `a * (…)`.",
    ),
    Entry(
        "C0208",
        "arguments that do not fit",
        """A call has too many arguments, lacks one, gives one twice, or names one that the function does not have. Arguments are
        given in order, or by name: `clamp(x, lo=0.0, hi=1.0)`. `size[d]` and `index[d]` have no arguments and no parentheses.""",
        """
program clipped(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = clamp(x @ w, 6.0)
""",
        """
program clipped(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = clamp(x @ w, 0.0, 6.0)
""",
        "Call the function as the message spells it.",
    ),
    Entry(
        "C0209",
        "a recursive def",
        """A def is inlined where it is called, so it cannot call itself, nor be reached from itself through others. A kernel has
        no stack, and every program has a fixed number of steps.""",
        """
def power(x, n) = x * power(x, n - 1)
program cubed(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = power(x @ w, 3)
""",
        """
def cube(x) = x * x * x
program cubed(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = cube(x @ w)
""",
        "Write the repetition out.",
    ),
    Entry(
        "C0210",
        "an option that the file does not have",
        """A param, a type or an axis's extent was chosen from outside (`--param eps=1e-6`, `--type T=bf16`, `--extent head=16`, or
        keyword arguments of `compile`), but the file has none of that name, or the value is not one it can have.""",
        """
import coda_lang

coda_lang.compile("specs/linear.coda", epsilon=1e-6)
""",
        """
import coda_lang

coda_lang.compile("specs/head_rmsnorm.coda", eps=1e-5)
""",
        "Choose among the params and types that the file declares, and the axes that its programs name.",
        kind="python",
    ),
    Entry(
        "C0211",
        "an output that is never assigned",
        """Every output in the signature is assigned in the body, by its name. A program has at least one output.""",
        """
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
out = x @ w
""",
        """
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = x @ w
""",
        "Assign the output, or remove it from the signature.",
    ),
    Entry(
        "C0212",
        "brackets that do not fit",
        """Brackets hold axes, parentheses hold values. `sum mean max min amax logsumexp` reduce the axes in their brackets and
        need them (`max` and `min` without brackets are element-wise); `rename` and runs of `split` and `pack` take an arrow;
        element-wise functions and casts take no brackets. A def is called with as many axes as its own brackets bind; a single
        name there binds all the axes given.""",
        """
program sums(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], s: f32[m])
y = x @ w
s = sum(y)
""",
        """
program sums(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], s: f32[m])
y = x @ w
s = sum[n](y)
""",
        "Call the function as the message spells it.",
    ),
    Entry(
        "C0214",
        "a program too large to compile",
        """Defs are inlined, so a few defs which each call another several times can stand for millions of operations. A program
        may have 4000: far more than anyone writes, or a kernel can hold.""",
        """
def a(x) = x + x * x
def b(x) = a(a(a(a(x))))
def c(x) = b(b(b(b(x)))) + b(x + b(b(x)))
def d(x) = c(c(c(c(x)))) + c(x + c(c(x)))
def e(x) = d(d(d(d(x)))) + d(x + d(d(x)))
program big(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = e(e(e(e(e(e(e(e(e(x @ w)))))))))
""",
        """
def a(x) = x + x * x
def b(x) = a(a(a(a(x))))
program big(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = b(x @ w)
""",
        "Call the defs fewer times, or give results that are used several times a name.",
    ),
    Entry(
        "C0215",
        "an input that is never read",
        """No value of the program depends on the input, so a call has to pass a tensor for nothing; more often something was
        forgotten, such as to add a bias. It is a warning: the program compiles, and the exit status is that of success. An
        input that alone says how long an axis is counts as read.""",
        """
program linear(x: bf16[m, k], w: bf16[n, k], bias: bf16[n]) -> (y: bf16[m, n])
y = x @ w
""",
        """
program linear(x: bf16[m, k], w: bf16[n, k], bias: bf16[n]) -> (y: bf16[m, n])
y = x @ w + bias
""",
        "Use the input, or take it out of the signature.",
        "warning",
    ),
)
