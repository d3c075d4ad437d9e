"""Extents of axes chosen from outside the file, as values of params are: `--extent qh=16`, `compile(…, extents={"qh": 16})`.

In: a program's syntax, extents by name. Out: the program as if its text gave these axes those extents. An extent that the text gives is a
default, like a param's value; an axis that it leaves free becomes fixed. A def's own brackets (`rope[lane=2]`) stay: they are its rule.
Non-goals: whether the program makes sense so (the other files of this stage).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

from ..syntax import ast
from .build_scope import walk

Node = TypeVar("Node")
MOST = 2**31 - 1  # an index along an axis is an i32


def axes_of(programs: Iterable[ast.Program]) -> set[str]:
    """The names of all axes that the programs themselves write."""
    return {n.name for p in programs for n in walk(p) if isinstance(n, ast.AxisSpec)}


def problem(name: str, value: object) -> str:
    """Why this cannot be an extent; empty where it can."""
    if isinstance(value, bool) or not isinstance(value, int):
        return f"the extent of `{name}` is set to {value!r}, which is not a whole number"
    return "" if 1 <= value <= MOST else f"the extent of `{name}` is set to {value}; it is from 1 to {MOST}"


def with_extents(node: Node, given: Mapping[str, int]) -> Node:
    """The node with the given extents wherever it names their axes."""
    if isinstance(node, tuple):
        kept = (n for n in node if not (isinstance(n, ast.Nominal) and n.axis.name in given))  # a fixed axis needs none
        return tuple(with_extents(n, given) for n in kept)  # type: ignore[return-value]
    if isinstance(node, ast.AxisSpec):
        return replace(node, extent=given.get(node.name, node.extent))
    if not is_dataclass(node) or not given:
        return node
    parts = {f.name: getattr(node, f.name) for f in fields(node) if f.name != "span"}
    return replace(node, **{n: with_extents(p, given) for n, p in parts.items() if isinstance(p, tuple) or is_dataclass(p)})  # type: ignore[type-var]
