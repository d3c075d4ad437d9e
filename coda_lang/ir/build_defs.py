"""What can be said of defs before they are called: names known, each bound once, no recursion.

In: a module. Out: its `Library` over the prelude, errors reported. Non-goals: types and axes of a def's body, which depend on the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .. import ops
from ..diagnostics.model import Label
from ..source import Span
from ..syntax import ast
from .build_names import taken, unbound_axis, unknown_function, unknown_type, unknown_value
from .build_report import Report
from .build_scope import Library, calls, prelude, reads
from .types import DTYPES


def library_of(module: ast.Module, report: Report) -> Library:
    """The defs of a module over the prelude, which they shadow."""
    defs: dict[str, ast.Def] = {}
    for d in (i for i in module.items if isinstance(i, ast.Def)):
        if d.name in ops.names():
            report.error(
                "C0205",
                f"`{d.name}` is a primitive and cannot be redefined",
                d.span,
                "this def takes its name",
                help="give the def another name",
            )
        elif d.name in defs:
            taken(report, "a def", d.name, d.span, defs[d.name].span, "rename or remove one of them")
        else:
            defs[d.name] = d
    library = Library(defs, prelude()[1])
    aliases = {i.name for i in module.items if isinstance(i, ast.TypeAlias)}
    params = {i.name: i.span for i in module.items if isinstance(i, ast.Param)}
    functions = library.names() | set(ops.names()) | set(DTYPES) | aliases
    for d in defs.values():
        _Check(d, functions, aliases, params, report).run()
    _recursion(defs, report)
    return library


class _Check:
    """The names of one def."""

    def __init__(self, d: ast.Def, functions: set[str], aliases: set[str], params: Mapping[str, Span], report: Report) -> None:
        self.d, self.functions, self.aliases, self.params, self.report = d, functions, aliases, params, report
        self.axes = [a.name for a in d.axes]
        self.known: dict[str, Span] = {}
        self.later = {t.name: t.span for s in d.body for t in s.targets}

    def run(self) -> None:
        for i, axis in enumerate(self.d.axes):
            if axis.name in self.axes[:i]:
                taken(
                    self.report,
                    "bound by these brackets",
                    axis.name,
                    axis.span,
                    self.d.axes[self.axes.index(axis.name)].span,
                    "name each axis once",
                )
        self.arguments()
        for statement in self.d.body:
            self.expressions(statement.values)
            for target in statement.targets:
                self.bind(target.name, target.span)
                if target.dtype and target.dtype not in DTYPES and target.dtype not in self.aliases:
                    unknown_type(self.report, target.dtype, target.span, self.aliases)
        self.expressions(self.d.results)

    def arguments(self) -> None:
        for argument in self.d.args:
            if argument.default is not None:
                self.expressions((argument.default,))
            self.bind(argument.name, argument.span)

    def bind(self, name: str, span: Span) -> None:
        if name in self.known:
            taken(self.report, "assigned", name, span, self.known[name], "a name is assigned once: give the second value a name of its own")
        else:
            self.known[name] = span

    def expressions(self, values: Iterable[ast.Expr]) -> None:
        for value in values:
            for call in calls(value):
                if call.fn.name not in self.functions:
                    unknown_function(self.report, call.fn, self.functions, self.known)
                for spec in (*call.bracket.axes, *(call.bracket.to or ())) if call.bracket else ():
                    if spec.name not in self.axes:
                        unbound_axis(self.report, spec, self.axes)
            for name in reads(value):
                if name.name not in self.known:
                    later = {n: s for n, s in self.later.items() if n not in self.known}
                    unknown_value(self.report, name, self.known, later=later, axes=self.axes, functions=self.functions, hidden=self.params)


def _recursion(defs: Mapping[str, ast.Def], report: Report) -> None:
    """Reports each def that reaches itself, once a cycle."""
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            cycle = (*trail[trail.index(name) :], name)
            call = next(c for c in calls(defs[cycle[-2]]) if c.fn.name == name)
            report.error(
                "C0209",
                f"`{name}` is recursive: " + ", which calls ".join(f"`{c}`" for c in cycle).replace(", which calls", " calls", 1),
                call.span,
                "calls itself" if len(cycle) == 2 else f"calls `{name}` again",
                secondary=[Label(defs[name].span, f"`{name}` is defined here")],
                notes=["a def is inlined where it is called, so it cannot reach itself"],
                help="write the repetition out",
            )
        elif name not in done:
            for callee in sorted({c.fn.name for c in calls(defs[name])} & set(defs)):
                visit(callee, (*trail, name))
            done.add(name)

    for name in defs:
        visit(name, ())
