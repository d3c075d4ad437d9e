"""Errors about names (C02xx), worded once for programs and defs. In: what was written, what is known. Out: reports. Non-goal: look-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .. import ops
from ..diagnostics.model import Label
from ..diagnostics.suggest import did_you_mean
from ..source import Span
from ..syntax import ast
from .build_report import Report, listed
from .types import DTYPES

_FOREIGN = {
    "float": "f32",
    "float32": "f32",
    "fp32": "f32",
    "double": "f32",
    "float64": "f32",
    "f64": "f32",
    "half": "f16",
    "float16": "f16",
    "fp16": "f16",
    "bfloat16": "bf16",
    "int": "i32",
    "int32": "i32",
    "int64": "i64",
    "long": "i64",
    "boolean": "bool",
}

_PRODUCTS = {"linear": "x @ w + b", **dict.fromkeys(("mm", "bmm", "dot", "einsum"), "x @ w")}  # which functions are operators here


def taken(report: Report, what: str, name: str, span: Span, first: Span, help: str) -> None:
    """A name given a second meaning; `what` is how the first one came about ("an input", "assigned")."""
    report.error("C0205", f"`{name}` is already {what}", span, "a second meaning", secondary=[Label(first, "first here")], help=help)


def unknown_function(report: Report, fn: ast.Name, functions: Iterable[str], values: Iterable[str]) -> None:
    if fn.name in set(values):
        report.error(
            "C0207", f"`{fn.name}` is a value, not a function", fn.span, "called here", help=f"to multiply, write `{fn.name} * (…)`"
        )
        return
    foreign = _FOREIGN.get(fn.name.lower())
    product = _PRODUCTS.get(fn.name)
    report.error(
        "C0202",
        f"there is no function `{fn.name}`",
        fn.span,
        "not a primitive, not in the prelude, not defined in this file",
        help=f"write `{foreign}(…)`"
        if foreign
        else f"write `{product}`: a product contracts the axes that both sides share"
        if product
        else did_you_mean(fn.name, functions) or "`codac ops` lists the primitives; `def` makes a function",
        once=True,
    )


def unknown_value(
    report: Report,
    name: ast.Name,
    known: Iterable[str],
    *,
    later: Mapping[str, Span] = {},
    axes: Iterable[str] = (),
    functions: Iterable[str] = (),
    hidden: Mapping[str, Span] = {},
) -> None:
    """`later`: names assigned below. `hidden`: params which a def does not see."""
    n = name.name
    if n in later:
        report.error(
            "C0206",
            f"`{n}` is read before it is assigned",
            name.span,
            "not assigned yet",
            secondary=[Label(later[n], "assigned here")],
            help="move that line above this one",
        )
    elif n in hidden:
        report.error(
            "C0201",
            f"a def does not see the param `{n}`",
            name.span,
            "a def sees its arguments and its brackets only",
            secondary=[Label(hidden[n], "the param")],
            help=f"make `{n}` an argument of the def and pass it in the call",
        )
    elif n in set(axes):
        help = f"its extent is `size[{n}]`, the positions along it are `index[{n}]`"
        report.error("C0207", f"`{n}` is an axis, not a value", name.span, "read as a value here", help=help)
    elif n in set(functions):
        ways = {"none": f"{n}(…)", "axes": f"{n}[axis](…)", "axis": f"{n}[axis](…)", "arrow": f"{n}[a -> b](…)"}
        calls = [w if op.args else w.removesuffix("(…)") for b, w in ways.items() if (op := ops.find(n, b))]
        help = f"call it: {listed(dict.fromkeys(calls) or [f'{n}(…)'], 'or')}"
        report.error("C0207", f"`{n}` is a function, not a value", name.span, "read as a value here", help=help)
    else:
        near = did_you_mean(n, {*known, *later})
        report.error(
            "C0201",
            f"there is no value `{n}`",
            name.span,
            "not an input, not a param, not assigned above",
            notes=[] if near else [f"the values here are {listed(sorted(known))}"] if known else [],
            help=near or f"add `{n}` to the inputs, or assign it first",
            once=True,
        )


def unknown_axis(report: Report, spec: ast.AxisSpec, axes: Iterable[str]) -> None:
    report.error(
        "C0203",
        f"there is no axis `{spec.name}` in this program",
        spec.span,
        "not in the signature, nor made above",
        notes=[f"its axes are {listed(axes)}"] if axes else [],
        help=did_you_mean(spec.name, axes) or "name an axis of the signature",
        once=True,
    )


def unbound_axis(report: Report, spec: ast.AxisSpec, bound: Iterable[str]) -> None:
    report.error(
        "C0203",
        f"the def's brackets bind no axis `{spec.name}`",
        spec.span,
        "a def sees the axes in its own brackets only",
        notes=[f"they bind {listed(bound)}"] if bound else [],
        help=did_you_mean(spec.name, bound) or f"add `{spec.name}` to the brackets after the def's name",
    )


def unknown_type(report: Report, name: str, span: Span, aliases: Iterable[str], later: Mapping[str, Span] = {}) -> None:
    if name in later:
        labels = [Label(later[name], "declared here")]
        report.error("C0206", f"the type `{name}` is used before it is declared", span, secondary=labels, help="move the `type` line above")
        return
    foreign = _FOREIGN.get(name.lower())
    report.error(
        "C0204",
        f"there is no type `{name}`",
        span,
        "not a type",
        notes=[f"the types are {listed([*DTYPES, *sorted(aliases)])}"],
        help=f"write `{foreign}`"
        if foreign
        else did_you_mean(name, [*DTYPES, *aliases]) or "use one of these, or declare it: `type T = bf16 | f16`",
    )
