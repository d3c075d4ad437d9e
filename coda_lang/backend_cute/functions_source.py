"""Scalar functions as the text of a module that defines them, for a process that does not have them.

In: functions by name, written in files: straight-line Python over their arguments, with numbers and other such functions of their
module. Out: text that, executed, gives `FUNCTIONS`, the same mapping. Raises InternalError where a function needs more than that.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from ..diagnostics.model import InternalError

_PLAIN = (bool, int, float, str, type(None))


def source_of(functions: Mapping[str, Callable[..., tuple]]) -> str:
    """The module's text."""
    parts: dict[str, str] = {}
    for name in functions:
        _collect(functions[name], parts)
    table = ", ".join(f"{name!r}: {fn.__name__}" for name, fn in functions.items())
    return "\n\n".join(["from __future__ import annotations", *parts.values(), f"FUNCTIONS = {{{table}}}"]) + "\n"


def _collect(fn: Any, parts: dict[str, str]) -> None:
    """Add a function, after what it uses."""
    if not isinstance(fn, FunctionType):
        raise InternalError(f"{fn!r} is not a plain function")
    try:
        text = textwrap.dedent(inspect.getsource(fn))
        tree = ast.parse(text)
    except (OSError, SyntaxError):
        raise InternalError(f"the source of {fn.__qualname__} is not to be had; scalar functions must stand in a file") from None
    defined = tree.body[0]
    if not isinstance(defined, ast.FunctionDef) or len(tree.body) > 1 or defined.decorator_list or defined.name != fn.__name__:
        raise InternalError(f"{fn.__qualname__} is not written as a plain `def {fn.__name__}(…)`")
    if fn.__name__ in parts:
        if parts[fn.__name__] != text:
            raise InternalError(f"two scalar functions are called {fn.__name__}")
        return
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or ()))
    for name in _free_names(defined):
        if name in cells or name in fn.__globals__:
            _use(fn, name, cells[name].cell_contents if name in cells else fn.__globals__[name], parts)
        elif not hasattr(builtins, name):
            raise InternalError(f"{fn.__qualname__} uses {name}, which is not defined")
    parts[fn.__name__] = text


def _use(fn: FunctionType, name: str, value: Any, parts: dict[str, str]) -> None:
    """Add what `name` stands for in `fn`."""
    if isinstance(value, FunctionType) and value.__name__ == name and value is not fn:
        _collect(value, parts)
    elif isinstance(value, _PLAIN):
        line = f"{name} = {_literal(value)}"
        if parts.setdefault(name, line) != line:
            raise InternalError(f"two constants of scalar functions are called {name}")
    else:
        raise InternalError(f"{fn.__qualname__} uses {name}, which is neither a number nor another function of its module")


def _free_names(defined: ast.FunctionDef) -> list[str]:
    """The variables a function reads but does not bind, in order; its annotations are never evaluated."""
    bound = {node.arg for node in ast.walk(defined) if isinstance(node, ast.arg)}
    bound |= {node.name for node in ast.walk(defined) if isinstance(node, ast.FunctionDef) and node is not defined}
    parts = [*defined.body, *defined.args.defaults, *(d for d in defined.args.kw_defaults if d)]
    names = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)]
    bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return list(dict.fromkeys(node.id for node in names if node.id not in bound))


def _literal(value: Any) -> str:
    finite = not isinstance(value, float) or math.isfinite(value)
    return repr(value) if finite else f"float({str(value)!r})"
