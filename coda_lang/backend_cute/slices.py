"""Scalar functions cut down to the results that are wanted and the arguments that those need.

In: a scalar function as the emitter writes it, a `def` in a file with straight-line assignments and one return of a tuple. Out: another
such function, in a file that `inspect` finds, as the compiler and the cache want it; or None where the text is of another form. With
`exact`, a cast to 16 bits that is the last thing done to a result is left off. Needs neither torch nor cutlass.
"""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
import textwrap
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Scalar = Callable[..., tuple]
ROUNDINGS = ("bf16", "f16")
_READ: weakref.WeakKeyDictionary[Scalar, Straight | None] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Straight:
    """A function's arguments after the library, its assignments and the expressions it returns."""

    name: str
    library: str
    arguments: tuple[str, ...]
    lines: tuple[ast.Assign, ...]
    results: tuple[ast.expr, ...]


def straight(function: Scalar) -> Straight | None:
    """Read a function, once in its life; None where it is not straight-line."""
    if function not in _READ:
        _READ[function] = _straight(function)
    return _READ[function]


def _straight(function: Scalar) -> Straight | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError):
        return None
    if len(tree) != 1 or not isinstance(tree[0], ast.FunctionDef):
        return None
    defined = tree[0]
    body = defined.body[1:] if ast.get_docstring(defined) is not None else defined.body
    *lines, last = body
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Tuple):
        return None
    if not all(isinstance(x, ast.Assign) and len(x.targets) == 1 and _targets(x) for x in lines):
        return None
    library, *arguments = [a.arg for a in defined.args.args]
    return Straight(defined.name, library, tuple(arguments), tuple(lines), tuple(last.value.elts))  # type: ignore[arg-type]


def needed(text: Straight, keep: Sequence[int]) -> frozenset[str]:
    """The arguments that the results at `keep` depend on."""
    return frozenset(_live(text, [text.results[i] for i in keep])[1]) & frozenset(text.arguments)


def cut(
    function: Scalar, keep: Sequence[int], *, name: str, drop: Collection[str] = (), zero: Collection[str] = (), exact: Collection[int] = ()
) -> Scalar | None:
    """A function called `name` that returns the results at `keep`, those in `exact` unrounded.

    It takes no argument in `drop`, which no result may need, and none in `zero`, which are 0.0.
    """
    text = straight(function)
    if text is None or needed(text, keep) & set(drop):
        return None
    zeros = tuple(ast.parse(f"{a} = {text.library}.f32(0.0)").body[0] for a in text.arguments if a in zero)
    text = replace(text, arguments=tuple(a for a in text.arguments if a not in zero), lines=zeros + text.lines)  # type: ignore[arg-type]
    results = [_unrounded(text, text.results[i]) if i in exact else text.results[i] for i in keep]
    return written(text, [a for a in text.arguments if a not in drop], results, name, function)


def plus(function: Scalar, places: Mapping[int, str], *, at: int, rounding: str, name: str) -> Scalar | None:
    """A function called `name` that has further arguments, from position `at` on, and adds each to the result at its place: to what that is
    before it is rounded, and the sum is rounded (if `rounding` says how)."""
    text = straight(function)
    if text is None or set(places.values()) & (set(text.arguments) | {t for line in text.lines for t in _targets(line)}):
        return None
    results = list(text.results)
    for i, argument in places.items():
        total: ast.expr = ast.BinOp(_unrounded(text, results[i]), ast.Add(), ast.Name(argument))
        results[i] = ast.parse(f"{text.library}.{rounding}({ast.unparse(total)})", mode="eval").body if rounding else total
    return written(text, [*text.arguments[:at], *places.values(), *text.arguments[at:]], results, name, function)


def written(text: Straight, arguments: Sequence[str], results: Sequence[ast.expr], name: str, function: Scalar) -> Scalar:
    """The function of these arguments and results."""
    lines = [copy.deepcopy(line) for line in _live(text, results)[0]]
    body = [ast.unparse(line) for line in lines] + [f"return ({''.join(ast.unparse(r) + ', ' for r in results).rstrip()})"]
    source = f"def {name}({', '.join([text.library, *arguments])}):\n" + "".join(f"    {line}\n" for line in body)
    return define(source, name, function)


def define(source: str, name: str, like: Scalar) -> Any:
    """Execute the text of a function in the module of another, where `inspect` finds it."""
    file = f"<{name} of {inspect.getsourcefile(like)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = dict(like.__globals__)
    exec(compile(source, file, "exec"), scope)
    return scope[name]


def _targets(line: ast.Assign) -> list[str]:
    """The names that a line binds; none where it does anything else."""
    target = line.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    return [n.id for n in names if isinstance(n, ast.Name)] if all(isinstance(n, ast.Name) for n in names) else []


def _reads(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _live(text: Straight, results: Sequence[ast.expr]) -> tuple[list[ast.Assign], set[str]]:
    """The lines that results depend on, and the names that these read."""
    wanted = set().union(*map(_reads, results)) if results else set()
    kept: list[ast.Assign] = []
    for line in reversed(text.lines):
        if wanted & set(_targets(line)):
            kept.insert(0, line)
            wanted = (wanted - set(_targets(line))) | _reads(line.value)
    return kept, wanted


def _unrounded(text: Straight, result: ast.expr) -> ast.expr:
    """What a result is before its last cast to 16 bits."""
    lines = list(text.lines)
    while isinstance(result, ast.Name):
        bound = [line for line in lines if result.id in _targets(line)]
        if len(bound) != 1 or len(_targets(bound[0])) != 1:
            return result
        if isinstance(bound[0].value, ast.Name) or _rounding(text, bound[0].value):
            result = bound[0].value
        else:
            return result
    return result.args[0] if isinstance(result, ast.Call) and _rounding(text, result) else result


def _rounding(text: Straight, node: ast.expr) -> bool:
    call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    return call and node.func.attr in ROUNDINGS and node.func.value.id == text.library and len(node.args) == 1  # type: ignore[attr-defined]
