"""From syntax to meaning: names become values, every rule of the language is checked, and each program becomes tensor IR.

In: a module's syntax tree, values of params and choices of generic types. Out: one `graph.Program` per program and choice.
Raises CodaError with all errors of this stage (C02xx names, C03xx types and axes).
Non-goals: fusibility, derivatives, kernels (the passes).

The stage in files: `build_extents` extents chosen from outside, `build_scope` what names mean, `build_defs` defs checked before they are
called, `build_axes` axes and extents, `build_values` values, literals and equations, `build_apply`, `build_lanes` and `build_calls` the
rules of operators, `build_guess` what a refused one probably means, `build_exprs` expressions, `build_conditions` shape conditions,
`build_program` one program, `build_names` and `build_report` errors, `build_warnings` what is accepted, but hardly meant.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product

from ..diagnostics.model import Label
from ..diagnostics.suggest import did_you_mean
from ..source import Source, Span
from ..syntax import ast
from .build_apply import MAX_EQNS, TooLarge
from .build_defs import library_of
from .build_extents import axes_of, problem, with_extents
from .build_names import taken, unknown_type
from .build_program import Context, build_program
from .build_report import Report, listed
from .build_scope import PRELUDE, Library, prelude, types_in
from .build_values import F32_MAX, F32_TINY
from .graph import Program
from .types import DTYPES, DType

Aliases = dict[str, tuple[DType, ...]]


def build(
    module: ast.Module,
    sources: Sequence[Source],
    *,
    params: Mapping[str, float] = {},
    types: Mapping[str, str] = {},
    extents: Mapping[str, int] = {},
) -> tuple[Program, ...]:
    """The programs of a module, in the order of the text, verified to be well-typed.

    params overrides the values of `param`s by name. types chooses for generic types: {"T": "bf16"}; a program that uses a generic type
    without a choice is built once a choice, as `linear_bf16`, `linear_f16`. extents gives axes other extents than the text does, or fixes
    free ones. Raises CodaError.
    """
    report = Report((*sources, prelude()[0]), PRELUDE)
    programs: list[Program] = []
    try:
        programs = _Module(module, report, params, types, extents).build()
    except (RecursionError, TooLarge) as error:
        what = f"a program's defs expand to more than {MAX_EQNS} operations or calls"
        if isinstance(error, RecursionError):
            what = "the defs call each other through too many levels"
        report.error("C0214", what, module.span, help="defs that call others several times multiply: give shared results names")
    report.finish()
    return tuple(programs)


class _Module:
    def __init__(
        self, module: ast.Module, report: Report, params: Mapping[str, float], types: Mapping[str, str], extents: Mapping[str, int]
    ) -> None:
        self.module, self.report, self.given, self.chosen, self.extents = module, report, params, types, extents
        self.aliases: Aliases = {}
        self.spans: dict[str, Span] = {}
        self.params: dict[str, ast.Param] = {}
        self.names: dict[str, Span] = {}

    def build(self) -> list[Program]:
        library = library_of(self.module, self.report)
        self.outside()
        programs: list[Program] = []
        below = {i.name: i.span for i in self.module.items if isinstance(i, ast.TypeAlias)}
        for item in self.module.items:
            if isinstance(item, ast.TypeAlias):
                below.pop(item.name, None)
                self.alias(item)
            elif isinstance(item, ast.Param):
                if item.name in self.params:
                    taken(self.report, "a param", item.name, item.span, self.params[item.name].span, "remove one of them")
                else:
                    self.params[item.name] = item
            elif isinstance(item, ast.Program):
                programs += self.program(item, library, below)
        return programs

    def alias(self, item: ast.TypeAlias) -> None:
        """Enters a generic type and its choices."""
        if item.name in self.aliases:
            taken(self.report, "a type", item.name, item.span, self.spans[item.name], "remove one of them")
            return
        unknown = [c for c in item.choices if c not in DTYPES]
        for c in unknown:
            unknown_type(self.report, c, item.span, ())
        if len(set(item.choices)) < len(item.choices):
            self.report.error("C0205", f"the type `{item.name}` names a choice twice", item.span, help="name each choice once")
        self.aliases[item.name] = tuple(DTYPES[c] for c in dict.fromkeys(item.choices) if c in DTYPES) or (DTYPES["f32"],)
        self.spans[item.name] = item.span

    def program(self, item: ast.Program, library: Library, below: Mapping[str, Span]) -> Iterator[Program]:
        """The program once for each choice of the generic types that it uses."""
        item = with_extents(item, self.extents)
        used = types_in((item.inputs, item.outputs, item.body), library)
        generic = {n: self.choices(n) for n in self.aliases if n in used}
        rest = {n: choices[0] for n, choices in self.aliases.items()}
        for choice in product(*generic.values()):
            types = DTYPES | rest | dict(zip(generic, choice))
            name = "_".join([item.name, *(d.name for d, choices in zip(choice, generic.values()) if len(choices) > 1)])
            if name in self.names:
                what = "a program" if name == item.name else "the name of a program, with the choice of its type"
                taken(self.report, what, name, item.span, self.names[name], "rename one of the two programs")
            else:
                self.names[name] = item.span
            self.report.program = name
            built = build_program(item, name, Context(library, types, below, dict(self.params), self.given), self.report)
            if built is None:
                return  # the other choices would have the same errors
            yield built

    def choices(self, name: str) -> tuple[DType, ...]:
        """What a generic type may be, after the choice from outside."""
        chosen = self.chosen.get(name)
        return tuple(d for d in self.aliases[name] if chosen in (None, d.name)) or self.aliases[name][:1]

    def outside(self) -> None:
        """Checks the params, types and extents given from outside the file."""
        programs = [i for i in self.module.items if isinstance(i, ast.Program)]
        params = {p.name for p in (*self.module.items, *(s for i in programs for s in i.body)) if isinstance(p, ast.Param)}
        self.given = {n: v for n, v in self.given.items() if self.known(f"param `{n}`", n, params, "set") and self.number(n, v)}
        axes = axes_of(programs) if self.extents else ()
        self.extents = {n: v for n, v in self.extents.items() if self.known(f"axis `{n}`", n, axes, "fix") and self.extent(n, v)}
        aliases = {i.name: i for i in self.module.items if isinstance(i, ast.TypeAlias)}
        for name, choice in self.chosen.items():
            if self.known(f"type `{name}`", name, aliases, "choose") and choice not in aliases[name].choices:
                labels = [Label(aliases[name].span, "its choices")]
                help = f"choose {listed(aliases[name].choices, 'or')}"
                self.report.error("C0210", f"the type `{name}` cannot be {choice}", None, secondary=labels, help=help)

    def known(self, what: str, name: str, names: Collection[str], verb: str) -> bool:
        if name not in names:
            others = f"there are {listed(sorted(names))}" if names else "the file declares none"
            near = did_you_mean(name, names)
            self.report.error("C0210", f"there is no {what} to {verb}", None, notes=[others] if near else [], help=near or others)
        return name in names

    def extent(self, name: str, value: object) -> bool:
        """Can this be the extent of an axis?"""
        wrong = problem(name, value)
        if wrong:
            self.report.error("C0210", wrong, None, help=f"give a whole number, as in {name}=64")
        return not wrong

    def number(self, name: str, value: object) -> bool:
        """Can this be the value of a param?"""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            help = f"give a number, as in {name}=1e-5"
            self.report.error("C0210", f"the param `{name}` is set to {value!r}, which is not a number", None, help=help)
            return False
        if abs(value) != math.inf and (abs(value) > F32_MAX or 0 < abs(value) <= F32_TINY):
            help = "give a number that f32 holds, or inf"
            shown = value if isinstance(value, float) or abs(value) < 10**40 else f"an integer of {value.bit_length()} bits"
            self.report.error("C0316", f"the param `{name}` is set to {shown}, which does not fit f32", None, help=help)
            return False
        return True
