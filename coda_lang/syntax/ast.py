"""The abstract syntax of .coda: what was written, with spans, before any name or type is known. Spans do not take part in equality."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..source import Span


def _span() -> Span:
    return field(compare=False, repr=False, kw_only=True)


# --- types and axes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisSpec:
    """`m`, or `lane=2`."""

    name: str
    extent: int | None = None
    span: Span = _span()


@dataclass(frozen=True)
class TypeExpr:
    """`bf16[m, lane=2, d]`; `dtype` may be a generic name (`type T = bf16 | f16`)."""

    dtype: str
    axes: tuple[AxisSpec, ...] = ()
    span: Span = _span()


@dataclass(frozen=True)
class Bracket:
    """`[v]`, `[a -> b]`, `[head -> qh=32, kh=8]`, `[qh, kh -> head]`; `to` is None without an arrow."""

    axes: tuple[AxisSpec, ...]
    to: tuple[AxisSpec, ...] | None = None
    span: Span = _span()


# --- expressions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """`value` is an int or a float, as written; `inf` is a Number too."""

    value: int | float
    span: Span = _span()


@dataclass(frozen=True)
class Name:
    name: str
    span: Span = _span()


@dataclass(frozen=True)
class Unary:
    """op: `-` or `not`."""

    op: str
    x: Expr
    span: Span = _span()


@dataclass(frozen=True)
class Binary:
    """op: `+ - * / ** @ == != < <= > >= and or %`."""

    op: str
    left: Expr
    right: Expr
    span: Span = _span()


@dataclass(frozen=True)
class Call:
    """`fn[bracket](args, name=value)`; bracket None where not written. `index[v]` and `size[v]` have `called` False."""

    fn: Name
    bracket: Bracket | None
    args: tuple[Expr, ...]
    kwargs: tuple[tuple[Name, Expr], ...] = ()
    called: bool = True
    span: Span = _span()


Expr = Number | Name | Unary | Binary | Call


# --- statements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """`name` or `name: bf16`."""

    name: str
    dtype: str | None = None
    span: Span = _span()


@dataclass(frozen=True)
class Assign:
    """`a = e`, `a, b = e` (one value: a split) or `a, b = e1, e2` (two assignments)."""

    targets: tuple[Target, ...]
    values: tuple[Expr, ...]
    span: Span = _span()


@dataclass(frozen=True)
class Save:
    """`save x, y` (recompute False) or `recompute x`."""

    names: tuple[Name, ...]
    recompute: bool
    span: Span = _span()


@dataclass(frozen=True)
class Distribute:
    """`distribute n`: the products of n may be distributed over its terms of rank one."""

    names: tuple[Name, ...]
    span: Span = _span()


@dataclass(frozen=True)
class Require:
    """`require d % 8 == 0`; names in `condition` are axes."""

    condition: Expr
    span: Span = _span()


@dataclass(frozen=True)
class Nominal:
    """`nominal m = 8192`."""

    axis: Name
    value: int
    span: Span = _span()


@dataclass(frozen=True)
class Chunk:
    """`chunk v by 4096`: what carries the axis exists for so many positions at a time."""

    axis: Name
    size: int
    span: Span = _span()


@dataclass(frozen=True)
class Param:
    """`param eps = 1e-5`: a compile-time f32."""

    name: str
    value: int | float
    span: Span = _span()


Stmt = Assign | Save | Distribute | Require | Nominal | Chunk | Param

# --- top level -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TypeAlias:
    """`type T = bf16 | f16`."""

    name: str
    choices: tuple[str, ...]
    span: Span = _span()


@dataclass(frozen=True)
class Argument:
    """An argument of a def; `default` None where required."""

    name: str
    default: Expr | None = None
    span: Span = _span()


@dataclass(frozen=True)
class Def:
    """`def f[d](x, eps=1e-5) = e`, or an indented block: assignments, then the results (one, or a tuple)."""

    name: str
    axes: tuple[AxisSpec, ...]
    args: tuple[Argument, ...]
    body: tuple[Assign, ...]
    results: tuple[Expr, ...]
    doc: str = ""  # the comment lines right above
    span: Span = _span()


@dataclass(frozen=True)
class Input:
    """`x: bf16[m, d]`, `const freq: f32[pair]`."""

    name: str
    type: TypeExpr
    const: bool = False
    span: Span = _span()


@dataclass(frozen=True)
class Output:
    name: str
    type: TypeExpr
    span: Span = _span()


@dataclass(frozen=True)
class Program:
    """`forward` is True for `forward program …`, which derives no backward."""

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    body: tuple[Stmt, ...]
    forward: bool = False
    doc: str = ""
    span: Span = _span()


@dataclass(frozen=True)
class Module:
    items: tuple[TypeAlias | Param | Def | Program, ...]
    span: Span = _span()
