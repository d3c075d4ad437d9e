"""The reserved words of the language, in one place. In: nothing. Out: tables for the lexer, the parser, suggestions and docs/language.md.

Non-goals: names of operators (those are `coda_lang.ops`) and of prelude functions (which a program may shadow).
"""

from __future__ import annotations

import keyword

# Words that begin a statement or an item; at the start of a line they end an unclosed bracket.
STATEMENTS = ("program", "forward", "def", "param", "type", "save", "recompute", "distribute", "require", "nominal", "chunk")
KEYWORDS = STATEMENTS + ("const", "and", "or", "not", "inf")
DTYPES = ("bf16", "f16", "f32", "i32", "i64", "bool")  # usable as casts, never as names

# Reserved for later versions: what to do today instead.
FUTURE = {
    "dropout": "multiply by a mask given as an input: `y = x * mask`",
    "argmax": "the program can return the values, and PyTorch takes the argmax of those",
    "argmin": "the program can return the values, and PyTorch takes the argmin of those",
    "ragged": "pad the axis, or run one program per group of rows",
    "attention": "end the program at q, k and v, and call an attention kernel between two programs",
}

# First words of statements in other languages: what is written here instead.
FOREIGN = {
    "return": "a def's last line is its result, and a program's outputs are those of its signature",
    "let": "write `name = …`",
    "var": "write `name = …`",
    "if": "write `where(condition, a, b)`: both values exist, one is taken",
    "elif": "write `where(condition, a, b)`, which nests",
    "else": "write `where(condition, a, b)`",
    "for": "there are no loops: operators work on whole axes, `sum[d](x)` reduces one",
    "while": "there are no loops: operators work on whole axes",
    "import": "there are no imports: the prelude is always there, and a file holds its own defs",
    "from": "there are no imports: the prelude is always there, and a file holds its own defs",
    "class": "write a `program` or a `def`",
    "fn": "write `def name(x) = …`",
    "func": "write `def name(x) = …`",
    "function": "write `def name(x) = …`",
    "kernel": "write `program name(…) -> (…)`",
    "assert": "write `require d % 8 == 0`",
    "with": "remove it",
    "pass": "a def needs a result",
    "end": "remove it: a program ends where the next one starts",
}

# Python's constants: what is written here instead.
CONSTANTS = {
    "True": "a bool comes from a comparison: `x > 0`; an option that has no meaning here is left out",
    "False": "a bool comes from a comparison: `x > 0`; an option that has no meaning here is left out",
    "None": "leave it out; a bound that is not there is `inf` or `-inf`",
}

# `chunk` called as a function: what is written here instead.
LANES = "parts of a product are lanes: declare `w: bf16[lane=2, f, d]` and write `gate, up = x @ w`"

# Arguments that reductions have where axes are positions.
KEPT = ("keepdim", "keepdims")
BY_NAME = "leave it out: values broadcast by name"

# Options that other libraries take as strings: what is called here instead.
STRINGS = {'"tanh"': "the approximation by tanh is a function of its own: `gelu_tanh(x)`"}

# Kernels are Python and are called by argument name, so Python's own words cannot be names.
PYTHON = frozenset(keyword.kwlist) - set(KEYWORDS)

# What a compiled program takes besides its inputs, so that no input can be called so.
CALL = ("self", "outputs", "exact", "accumulate_into")

RESERVED = frozenset(KEYWORDS) | frozenset(DTYPES) | frozenset(FUTURE) | PYTHON
