"""Reference pages made from the operator table and the prelude, for `codac ops` and docs/operators.md. In: the table. Out: text.

`python -m coda_lang.listing > docs/operators.md` writes the page again; a test compares them.

Non-goals: what an operator means (`ops`).
"""

from __future__ import annotations

import re
import textwrap
from importlib.resources import files
from typing import TYPE_CHECKING

from .ir.types import DTYPES
from .source import Source

if TYPE_CHECKING:
    from .ops.spec import Op
    from .syntax.ast import Def

CASTS = tuple(d for d in DTYPES if DTYPES[d].kind != "bool")

KINDS = {
    "map": "element-wise",
    "reduce": "reductions",
    "contract": "products",
    "lanes": "lanes",
    "move": "axes",
}


def prelude() -> tuple[Source, tuple[Def, ...]]:
    """The prelude's source and its functions."""
    from .syntax.ast import Def
    from .syntax.parse import parse

    source = Source("prelude.coda", files("coda_lang").joinpath("prelude.coda").read_text(encoding="utf-8"))
    return source, tuple(item for item in parse(source).items if isinstance(item, Def))


def table() -> dict[str, tuple[Op, ...]]:
    """The operators a source can write, by the name or symbol it writes; `min` is two, with brackets and without."""
    from . import ops

    found: dict[str, tuple[Op, ...]] = {}
    for op in ops.TABLE.values():
        for name in CASTS if op is ops.CAST else [n for n in (op.surface, op.symbol) if n]:
            found[name] = (*found.get(name, ()), op)
    return found


def form(op: Op) -> str:
    """How a source writes an application of the operator: `silu(x)`, `x + y`, `sum[axes](x)`."""
    from . import ops

    args = [a.lstrip("*") + (", …" if a.startswith("*") else "") for a in op.args]
    if op is ops.CAST:
        return ", ".join(f"{name}({args[0]})" for name in CASTS)
    if op.surface is None and op.symbol:
        return f"{op.symbol}{' ' if op.symbol.isalpha() else ''}{args[0]}" if len(args) == 1 else f" {op.symbol} ".join(args)
    brackets = {"none": "", "axes": "[axes]", "axis": "[axis]", "arrow": "[a -> b]"}[op.brackets]
    return f"{op.surface or op.name}{brackets}" + (f"({', '.join(args)})" if args else "")


def error(op: Op) -> str:
    """The error bound of the operator on the card."""
    bound = "exact or correctly rounded" if op.ulp is None else f"at most {op.ulp} f32 ulp{'s' * (op.ulp != 1)}"
    return f"{bound}, or {op.absolute:.1g} where that is more" if op.absolute else bound


def laws(op: Op) -> str:
    """The algebra of the operator in words; "" where there is none."""
    degree, linear = op.laws.homogeneous, op.laws.linear
    facts = [f"homogeneous of degree {degree:g}"] if degree is not None else []
    facts += [f"linear in {' and '.join(group)}" + (" together" if len(group) > 1 else "") for group in linear]
    facts += ["commutative"] if op.laws.commutative else []
    facts += ["0 at 0"] if op.laws.zero else []
    facts += ["never 0"] if op.laws.nonzero else []
    return "; ".join(facts)


def types(op: Op) -> str:
    """What an element-wise operator or a reduction reads, in words."""
    if op.kind not in ("map", "reduce") or "any" in op.reads:
        return ""
    words = {"f32": "f32 (integers are converted)", "number": "all f32, or all integers", "bool": "bool", "int": "an integer"}
    given = {read: [op.arg(i) for i in range(len(op.args)) if op.read(i) == read] for read in dict.fromkeys(op.reads)}
    return "; ".join(f"{', '.join(names)}: {words[read]}" for read, names in given.items())


def all_ops() -> str:
    """One line an operator, by kind, then the prelude's functions."""
    written = dict.fromkeys(op for found in table().values() for op in found)
    groups = [(title, [(form(op), op.doc) for op in written if op.kind == kind]) for kind, title in KINDS.items()]
    groups.append(("functions of the prelude (inlined; your own defs shadow them)", [(signature(d), d.doc) for d in prelude()[1]]))
    lines: list[str] = []
    for title, rows in groups:
        width = max((len(left) for left, _ in rows if len(left) <= 40), default=0)
        lines += [title, *(f"  {left:{width}}  {_first_sentence(doc, 116 - max(width, len(left)))}".rstrip() for left, doc in rows), ""]
    return "\n".join(lines + ["`codac ops NAME` says more about one of them."]) + "\n"


def _first_sentence(doc: str, width: int) -> str:
    return textwrap.shorten(re.split(r"(?<=[.;])\s(?![^(]*\))", " ".join(doc.split()), maxsplit=1)[0].rstrip(".;"), width, placeholder=" …")


def signature(d: Def) -> str:
    """`rmsnorm[d](x, g, eps)`; an argument with a default is written `ignore_index=…`."""
    axes = f"[{', '.join(a.name for a in d.axes)}]" if d.axes else ""
    return f"{d.name}{axes}({', '.join(a.name + ('=…' if a.default is not None else '') for a in d.args)})"


def page(name: str) -> str | None:
    """All about one operator or prelude function; None where there is no such name."""
    found = table().get(name)
    if found:
        return "\n".join(_op_page(op) for op in found)
    source, defs = prelude()
    for d in defs:
        if d.name == name:
            lines = source.text.split("\n")[d.span.line - 1 : d.span.end_line]
            doc = [f"  {line}" for line in d.doc.splitlines()]
            return "\n".join([f"{signature(d)}: a function of the prelude", *doc, "", *lines]).rstrip() + "\n"
    return None


def names() -> list[str]:
    """Everything that `page` knows."""
    return [*table(), *(d.name for d in prelude()[1])]


def _op_page(op: Op) -> str:
    rows = [
        ("kind", KINDS[op.kind]),
        ("derivative", op.derivative),
        ("error", error(op)) if op.kind == "map" else ("", ""),
        ("cost", f"{op.flops} flop{'s' * (op.flops != 1)} an element") if op.kind == "map" else ("", ""),
        ("types", types(op)),
        ("laws", laws(op)),
        ("emitted as", op.emit or ""),
    ]
    return "\n".join([form(op), *(f"  {line}" for line in op.doc.splitlines()), "", *(f"  {k:11} {v}" for k, v in rows if v)]) + "\n"


def markdown() -> str:
    """The page docs/operators.md."""
    written = dict.fromkeys(op for found in table().values() for op in found)
    lines = [
        "# Operators",
        "",
        "Made from the operator table by `python -m coda_lang.listing > docs/operators.md`; `codac ops NAME` prints one entry.",
        "g is the gradient of the result, dx that of x. Errors are those of the device functions against the exact value of their f32",
        "arguments; a reduction sums in f32 in a fixed order. A number takes the type of the operand beside it if it is exact there,",
        "an integer that meets f32 becomes f32, bf16 and f16 are read as f32.",
    ]
    for kind, title in KINDS.items():
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", "| written | meaning | derivative | error | laws |", "|---|---|---|---|---|"]
        for op in written:
            if op.kind == kind:
                cells = (f"`{form(op)}`", op.doc, op.derivative, error(op) if kind == "map" else "", laws(op))
                lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
