"""Entries of the error catalog, C01xx: syntax."""

from __future__ import annotations

from ..entry import Entry

_LINEAR = "program f(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\n"
_TWICE = "def twice(x) = 2.0 * x\n\n"

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "C0101",
        "something that cannot stand here",
        """A word or sign does not fit at its place, and none of the more specific errors applies. The message lists what could
        stand there.""",
        "type T = bf16, f16\n\nprogram f(x: T[m, d], w: T[n, d]) -> (y: T[m, n])\ny = x @ w",
        "type T = bf16 | f16\n\nprogram f(x: T[m, d], w: T[n, d]) -> (y: T[m, n])\ny = x @ w",
        "Write one of the things that the message expects.",
    ),
    Entry(
        "C0102",
        "a character outside the language",
        """Programs are written in ASCII: letters `a` to `z` and `A` to `Z`, digits, `_`, and the operators. Names become names of
        Python arguments and of kernels, and look-alike letters or invisible spaces would make two names that read the same.
        Comments may hold any text.""",
        _LINEAR + "α = 2.0\ny = α * (x @ w)",
        _LINEAR + "alpha = 2.0\ny = alpha * (x @ w)",
        "Write the name with ASCII letters, and operators as on the keyboard: `*` for ×, `->` for →, `<=` for ≤.",
    ),
    Entry(
        "C0103",
        "an operator of another language",
        """The operators are `+ - * / % ** @`, the comparisons `== != < <= > >=`, and the words `and`, `or`, `not`. There is no
        assignment that updates, since every name is assigned once; no attribute access, since values have no methods; no
        strings.""",
        _LINEAR + "y = max(x @ w, 0.0) && 1",
        _LINEAR + "y = max(x @ w, 0.0)",
        "Use the operator that the message names.",
    ),
    Entry(
        "C0104",
        "a name that is too long",
        "Names appear in the emitted kernel and in file names, so they have at most 100 characters.",
        _LINEAR + "y" * 101 + " = x @ w",
        _LINEAR + "y = x @ w",
        "Choose a shorter name.",
    ),
    Entry(
        "C0105",
        "a malformed number",
        """Numbers are decimal: `12`, `0.5`, `1e-5`, `2.5e3`. Digits stand on both sides of a point; there are no suffixes, no `_`
        between digits and no hexadecimal. A name cannot start with a digit, so `2x` is not a product.""",
        _LINEAR + "y = .5 * (x @ w)",
        _LINEAR + "y = 0.5 * (x @ w)",
        "Write the number as the message suggests.",
    ),
    Entry(
        "C0106",
        "a number that no type holds",
        """A literal is an f32 or an integer of at most 64 bits. A number beyond the largest f32 would silently be infinity, and
        one below the smallest would silently be zero.""",
        _LINEAR + "y = min(x @ w, 1e39)",
        _LINEAR + "y = min(x @ w, 1e38)",
        "Write a number that fits, or `inf` where infinity is meant.",
    ),
    Entry(
        "C0107",
        "a reserved word used as a name",
        """Keywords and element types cannot be names of values, axes, functions or programs. Neither can words of Python: kernels
        are Python, and a compiled program is called with its inputs as keyword arguments.""",
        "program f(x: bf16[m, d], w: bf16[in, d]) -> (y: bf16[m, in])\ny = x @ w",
        "program f(x: bf16[m, d], w: bf16[d_in, d]) -> (y: bf16[m, d_in])\ny = x @ w",
        "Choose another name; one `_` at the end is enough.",
    ),
    Entry(
        "C0108",
        "a feature reserved for later",
        """The words `dropout`, `argmax`, `argmin`, `ragged` and `attention` are kept free for later versions, so that programs of
        today keep their meaning. Nothing stands behind them yet.""",
        _LINEAR + "y = dropout(x @ w)",
        "program f(x: bf16[m, d], w: bf16[n, d], const mask: bf16[m, n]) -> (y: bf16[m, n])\ny = (x @ w) * mask",
        "Do what the message suggests in its place.",
    ),
    Entry(
        "C0109",
        "a statement of another language",
        """A program is a list of assignments; its results are the outputs of its signature. There are no loops and no branches:
        operators work on whole axes, and `where(condition, a, b)` chooses element by element. A `def` has no `return`: its last
        line is the result.""",
        _LINEAR + "return x @ w",
        _LINEAR + "y = x @ w",
        "Assign to an output's name, use `where`, or make the last line of a `def` its result.",
    ),
    Entry(
        "C0110",
        "an open bracket that nothing closes",
        """Inside brackets a statement goes on over line ends, so a missing bracket would swallow the lines that follow. The error
        stands at the bracket that is still open where the next statement starts.""",
        _LINEAR + "y = silu(x @ w",
        _LINEAR + "y = silu(x @ w)",
        "Add the missing bracket.",
    ),
    Entry(
        "C0111",
        "brackets that do not match",
        "`(` is closed by `)` and holds values; `[` is closed by `]` and holds axes.",
        "program f(x: bf16[m, d), w: bf16[n, d]) -> (y: bf16[m, n])\ny = x @ w",
        _LINEAR + "y = x @ w",
        "Close each bracket with its own partner.",
    ),
    Entry(
        "C0112",
        "too many levels",
        """Brackets nest at most 100 deep, and so do operators: a sum of more than 100 terms in one expression counts as that many
        levels. The limit keeps every tool that reads a program safe from running out of stack.""",
        _LINEAR + "y = " + "(" * 101 + "x @ w" + ")" * 101,
        _LINEAR + "y = x @ w",
        "Give parts of the expression names of their own.",
    ),
    Entry(
        "C0113",
        "wrong indentation",
        """Statements of a program start in column 1. Only the block of a `def`, after a `=` at the line's end, is indented, all
        its lines by the same number of spaces. Lines inside brackets, and lines that start with an operator, may start
        anywhere.""",
        _LINEAR + "    y = x @ w",
        _LINEAR + "y = x @ w",
        "Start the line in column 1, or in the column of its block.",
    ),
    Entry(
        "C0114",
        "a tab in the indentation",
        """How wide a tab is differs between editors, so indentation is made of spaces. Elsewhere in a line a tab counts as a
        space.""",
        "def twice(x) =\n\t2.0 * x\n\n" + _LINEAR + "y = twice(x @ w)",
        "def twice(x) =\n    2.0 * x\n\n" + _LINEAR + "y = twice(x @ w)",
        "Indent with spaces.",
    ),
    Entry(
        "C0115",
        "a def without a result",
        """The body of a `def` ends with its result: an expression, or several separated by commas. Lines before it are
        assignments.""",
        "def twice(x) =\n    y = 2.0 * x\n\n" + _LINEAR + "y = twice(x @ w)",
        "def twice(x) =\n    y = 2.0 * x\n    y\n\n" + _LINEAR + "y = twice(x @ w)",
        "End the block with the value.",
    ),
    Entry(
        "C0116",
        "= and == confused",
        """`=` gives a name to a value, fixes an extent (`lane=2`), sets a param, or passes a named argument. `==` compares. A line
        assigns once.""",
        _LINEAR + "require d % 8 = 0\ny = x @ w",
        _LINEAR + "require d % 8 == 0\ny = x @ w",
        "Write `==` to compare and `=` to name.",
    ),
    Entry(
        "C0117",
        "an axis given by position",
        """Axes have names, never positions: a tensor's type lists its axes by name, and functions name the axes they work on. That
        is what lets the compiler tell a bias of the columns from one of the rows when both have the same length.""",
        "program f(x: bf16[m, d], w: bf16[n, d]) -> (y: f32[m])\ny = sum[1](x @ w)",
        "program f(x: bf16[m, d], w: bf16[n, d]) -> (y: f32[m])\ny = sum[n](x @ w)",
        "Name the axis.",
    ),
    Entry(
        "C0118",
        "a signature without its arrow or outputs",
        """A signature reads `program name(inputs) -> (outputs)`. The outputs have names and types, in parentheses even if there is
        one, and so do the inputs, of which there is at least one: a call finds its device there. Elsewhere `->` stands only in
        brackets that rename or split an axis.""",
        "program f(x: bf16[m, d], w: bf16[n, d])\ny = x @ w",
        _LINEAR + "y = x @ w",
        "Add `-> (name: type)` after the inputs.",
    ),
    Entry(
        "C0119",
        "a tensor without a complete type",
        """Each input and output has an element type and its axes, in the order in which the tensor is stored (the last one
        contiguous). A scalar has empty brackets, `f32[]`.""",
        "program f(x: bf16[m, d], w: bf16[n, d], scale: f32) -> (y: bf16[m, n])\ny = scale * (x @ w)",
        "program f(x: bf16[m, d], w: bf16[n, d], scale: f32[]) -> (y: bf16[m, n])\ny = scale * (x @ w)",
        "Write the type out: `x: bf16[m, d]`, or `f32[]` for a scalar.",
    ),
    Entry(
        "C0120",
        "a line that ends too early",
        """A statement ends with its line, except inside brackets, or if the next line starts with `->` or a binary operator. An
        operator at the end of a line does not continue it.""",
        "program f(x: bf16[m, d], w: bf16[n, d], r: bf16[m, n]) -> (y: bf16[m, n])\ny = x @ w +\n  r",
        "program f(x: bf16[m, d], w: bf16[n, d], r: bf16[m, n]) -> (y: bf16[m, n])\ny = x @ w\n  + r",
        "Move the operator to the start of the next line, or put the expression in parentheses.",
    ),
    Entry(
        "C0121",
        "assignment to something that is not a name",
        "Left of the `=` stands a name, or several with commas. Parts of a value cannot be assigned: values never change.",
        _LINEAR + "silu(y) = x @ w",
        _LINEAR + "y = silu(x @ w)",
        "Assign to a name and compute on the right.",
    ),
    Entry(
        "C0122",
        "names and values that do not pair up",
        """`a, b = e1, e2` assigns one value to each name. `a, b = e` splits one value along the axis that is fixed to as many
        positions as there are names. Nothing else has several names.""",
        _LINEAR + "a, y = x @ w, 1.0, 2.0",
        _LINEAR + "a, y = 1.0, x @ w",
        "Write as many values as names, or one value with an axis of that extent.",
    ),
    Entry(
        "C0123",
        "a wrong type annotation",
        """`name: bf16 = e` rounds the value to that element type. Axes are not repeated: they follow from the value. The
        annotation stands on the left of the `=`; inside an expression a cast does the same, `bf16(e)`.""",
        _LINEAR + "z: bf16[m, n] = x @ w\ny = relu(z)",
        _LINEAR + "z: bf16 = x @ w\ny = relu(z)",
        "Write the element type alone.",
    ),
    Entry(
        "C0124",
        "a malformed def",
        """A function reads `def name[axes](arguments) = result`, or has an indented block after the `=`. The brackets are left out
        where no axis is named. Arguments have no types, since a def is inlined where it is called; they may have defaults. A
        block holds assignments, then the result.""",
        "def twice(x):\n    2.0 * x\n\n" + _LINEAR + "y = twice(x @ w)",
        _TWICE + _LINEAR + "y = twice(x @ w)",
        "Write `=` between the arguments and the body.",
    ),
    Entry(
        "C0125",
        "a value without a name",
        """An expression on a line of its own would compute something that nothing uses. Only the last line of a def's block is an
        expression.""",
        _LINEAR + "x @ w",
        _LINEAR + "y = x @ w",
        "Assign the value, to an output or to a name used later.",
    ),
    Entry(
        "C0126",
        "arguments in the wrong order",
        """In a call, positional arguments come before named ones, and no name is given twice. In a def, arguments without a
        default come before those with one.""",
        "def shifted(x, by=1.0) = x + by\n\n" + _LINEAR + "y = shifted(by=2.0, x @ w)",
        "def shifted(x, by=1.0) = x + by\n\n" + _LINEAR + "y = shifted(x @ w, by=2.0)",
        "Move the positional arguments to the front.",
    ),
    Entry(
        "C0127",
        "a statement outside every program",
        """Statements belong to the program above them. A `def` or a `type` ends the program before it, so statements that follow
        it have no program. Only a `param` may stand there: it is shared by all programs below.""",
        "def twice(x) = 2.0 * x\ny = 3.0",
        _TWICE + _LINEAR + "y = twice(x @ w)",
        "Move the statement below a signature, and defs above it.",
    ),
    Entry(
        "C0128",
        "a source without a program",
        "There is nothing to compile: the source is blank, or holds only defs, params and types.",
        "def twice(x) = 2.0 * x",
        _LINEAR + "y = x @ w",
        "Write a program.",
    ),
    Entry(
        "C0129",
        "a missing operator or comma",
        """Two values stand side by side with nothing between them. A product is written with `*` or `@`; arguments, inputs and
        axes are separated by commas; brackets follow the name of a function, never a value.""",
        _LINEAR + "y = 2.0 (x @ w)",
        _LINEAR + "y = 2.0 * (x @ w)",
        "Write the operator or the comma.",
    ),
    Entry(
        "C0130",
        "chained comparisons",
        "`a < b < c` would compare a truth value with a number. Comparisons are joined with `and`.",
        _LINEAR + "require 8 <= d <= 4096\ny = x @ w",
        _LINEAR + "require 8 <= d and d <= 4096\ny = x @ w",
        "Write `a < b and b < c`.",
    ),
    Entry(
        "C0131",
        "a missing operand",
        """An operator, a comma or a bracket stands where a value is expected. There is no unary `+`, and `not` as an operand takes
        parentheses.""",
        _LINEAR + "y = (x @ w) * / 2.0",
        _LINEAR + "y = (x @ w) / 2.0",
        "Write the missing value, or remove the sign that is left over.",
    ),
    Entry(
        "C0132",
        "a setting that is not a number",
        """A `param` is a number that is known when the program is compiled, and that `--param` replaces; `nominal` takes a whole
        number. Neither is computed from other values.""",
        _LINEAR + "param scale = 1 / 8\ny = scale * (x @ w)",
        _LINEAR + "param scale = 0.125\ny = scale * (x @ w)",
        "Write the number out, or make it an ordinary value: `scale = 1 / 8`.",
    ),
    Entry(
        "C0133",
        "an extent that is not a positive whole number",
        "`lane=2` fixes the length of an axis. An axis without `=` is free: its length is that of the tensor at run time.",
        "program f(x: bf16[m, d], w: bf16[n, lane=0, d]) -> (y: bf16[m, n])\ngate, up = x @ w\ny = silu(gate) * up",
        "program f(x: bf16[m, d], w: bf16[n, lane=2, d]) -> (y: bf16[m, n])\ngate, up = x @ w\ny = silu(gate) * up",
        "Write a whole number, 1 or more, or the bare name.",
    ),
    Entry(
        "C0134",
        "a malformed signature",
        """A signature reads `program name(x: bf16[m, d], …) -> (y: bf16[m, n], …)`, with `forward` before it where no gradient is
        wanted. Inputs have no defaults, and nothing follows the outputs on their line.""",
        "program f(x: bf16[m, d], w: bf16[n, d], scale: f32[] = 0.5) -> (y: bf16[m, n])\ny = scale * (x @ w)",
        _LINEAR + "param scale = 0.5\ny = scale * (x @ w)",
        "Write the signature in this form; constants are params below it.",
    ),
    Entry(
        "C0135",
        "a source that is too long",
        "A file holds a few programs. One of more than 100000 words and signs is something else, and reading it would take long.",
        """from coda_lang import driver

driver.check("program f(x: bf16[m]) -> (y: bf16[m])\\n" + "y = x\\n" * 40_000)
""",
        "",
        "Split it into several files.",
        "python",
    ),
)
