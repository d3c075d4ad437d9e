"""One program: signature, statements, conditions. In: a program's syntax, the module's defs, params and types. Out: `graph.Program`.

A program with errors is built to its end, with poisoned values, so that all of them are reported; then there is no result.
Non-goals: expressions (`build_exprs`), the module (`build`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .. import ops
from ..diagnostics.model import Label
from ..source import Span
from ..syntax import ast
from ..syntax.words import CALL
from .build_apply import Apply, Operand
from .build_axes import AxisTable
from .build_conditions import Conditions
from .build_exprs import Evaluator
from .build_names import taken
from .build_report import Report, axes_text, listed
from .build_scope import Library, Scope
from .build_values import Emitter, Value, literal, renamed, settled
from .graph import Lit, Output, Program, Tensor, Var
from .types import DType, Ty


@dataclass(frozen=True)
class Context:
    """What a program sees of its module: types by name, those declared below it, shared params, values given from outside."""

    library: Library
    types: Mapping[str, DType]
    types_below: Mapping[str, Span]
    params: Mapping[str, ast.Param]
    given: Mapping[str, float]


def build_program(program: ast.Program, name: str, context: Context, report: Report) -> Program | None:
    """The program under the name `name`; None where errors were reported."""
    before = len(report.diagnostics)
    result = _Program(program, context, report).build(name)
    return result if len(report.diagnostics) == before else None


class _Program:
    def __init__(self, program: ast.Program, context: Context, report: Report) -> None:
        self.program, self.context, self.report = program, context, report
        self.before = len(report.diagnostics)
        self.axes = AxisTable(report)
        self.emitter = Emitter(self.axes)
        self.evaluator = Evaluator(Apply(report, self.axes, self.emitter))
        self.scope = Scope(context.library, context.types, types_below=context.types_below)
        self.outputs: dict[str, Tensor | None] = {}

    def build(self, name: str) -> Program:
        inputs = self.signature()
        self.params()
        body = self.program.body
        self.scope.later = {t.name: t.span for s in body if isinstance(s, ast.Assign) for t in s.targets}
        for statement in body:
            if isinstance(statement, ast.Assign):
                self.evaluator.assign(statement, self.scope, self.bind)
        self.complete()
        conditions = Conditions(self.report, self.axes)
        for statement in body:
            if isinstance(statement, ast.Require):
                conditions.require(statement)
            elif isinstance(statement, ast.Nominal):
                conditions.nominal(statement)
            elif isinstance(statement, ast.Chunk):
                conditions.chunk(statement, self.emitter.eqns)
        told = (*self.plans(), self.distributed())
        self.extents(inputs)
        return self.assemble(name, inputs, conditions, *told)

    # --- the signature ---------------------------------------------------------------------------------------------------

    def signature(self) -> tuple[Tensor, ...]:
        """Declares axes, inputs and outputs; inputs become values."""
        inputs: list[Tensor] = []
        for i in self.program.inputs:
            if i.name in self.scope.spans:
                self._again(i.name, i.span)
                continue
            if i.name in CALL:
                why = f"a compiled program is called with its inputs by name, and `{i.name}` has another meaning there"
                help = f"write `{i.name}_`, or another name"
                self.report.error("C0107", f"`{i.name}` cannot be the name of an input", i.span, notes=[why], help=help)
            tensor = self.tensor(i.name, i.type, i.const, i.span)
            self.scope.spans[i.name] = i.span
            self.scope.values[i.name] = None
            if tensor:
                inputs.append(tensor)
        for o in self.program.outputs:
            if o.name in self.scope.spans or o.name in self.outputs:
                self._again(o.name, o.span)
            else:
                self.outputs[o.name] = self.tensor(o.name, o.type, False, o.span)
        self.evaluator.apply.guess.results = tuple(o.axes for o in self.outputs.values() if o)
        for t in inputs:  # types need the program's axis order, which is complete only now
            self.scope.values[t.name] = Value(Var(t.name, Ty(t.dtype, self.axes.ordered(t.axes))), order=t.axes, origin=t.span)
        if not self.program.inputs:
            help = "add one: `(x: bf16[m, d])`; a number can be an input, too, `s: f32[]`"
            self.report.error("C0118", f"the program `{self.program.name}` has no inputs", self.program.span, help=help)
        if not self.program.outputs:
            self.report.error(
                "C0211",
                f"the program `{self.program.name}` has no outputs",
                self.program.span,
                help="name its results: `-> (y: bf16[m, n])`",
            )
        return tuple(inputs)

    def tensor(self, name: str, type_: ast.TypeExpr, const: bool, span: Span) -> Tensor | None:
        dtype = self.evaluator.dtype(type_.dtype, type_.span, self.scope)
        good = dtype is not None
        for i, axis in enumerate(type_.axes):
            first = next(a for a in type_.axes if a.name == axis.name)
            if type_.axes.index(axis) < i or first is not axis:
                self.report.error(
                    "C0314",
                    f"`{name}` has the axis `{axis.name}` twice",
                    axis.span,
                    "again here",
                    secondary=[Label(first.span, "first here")],
                    notes=["an axis is known by its name, so a tensor has it once"],
                    help="name the second one differently; `require` can say that two extents are equal",
                )
                good = False
            good = self.axes.declare(axis.name, axis.extent, axis.span) and good
        return Tensor(name, dtype, tuple(a.name for a in type_.axes), const, span) if good and dtype else None

    def signed(self) -> list[tuple[str, Span]]:
        """The names in the signature and where they stand."""
        return [(i.name, i.span) for i in self.program.inputs] + [(o.name, o.span) for o in self.program.outputs]

    def _again(self, name: str, span: Span) -> None:
        first = next(span for n, span in self.signed() if n == name)
        taken(self.report, "in the signature", name, span, first, "give it another name; a result that replaces an input is a new tensor")

    def params(self) -> None:
        """Shared params and the program's own: literals, under their names."""
        own = [s for s in self.program.body if isinstance(s, ast.Param)]
        for p in (*self.context.params.values(), *own):
            first = self.scope.spans.get(p.name) or dict(self.signed()).get(p.name)
            if first:
                own_param = any(p is o for o in own)
                at, other = (p.span, first) if own_param else (first, p.span)
                taken(self.report, "a value" if own_param else "a param", p.name, at, other, "give one of the two another name")
                continue
            self.scope.values[p.name] = replace(literal(float(self.context.given.get(p.name, p.value))), origin=p.span)
            self.scope.spans[p.name] = p.span

    # --- results ---------------------------------------------------------------------------------------------------------

    def bind(self, target: ast.Target, operand: Operand | None, scope: Scope) -> Value | None:
        """Gives a name its value: rounded as annotated, and, for an output, as declared."""
        output = self.outputs.get(target.name)
        dtype = self.evaluator.dtype(target.dtype, target.span, scope) if target.dtype else None
        if operand is None or target.dtype and dtype is None:
            return None
        if output is None:
            if target.name in self.outputs:  # its declaration has errors
                return None
            value = self.evaluator.convert(operand, dtype) if dtype else operand.value
        else:
            if dtype and dtype is not output.dtype:
                self.report.error(
                    "C0315",
                    f"`{target.name}` is {output.dtype} in the signature and {dtype} here",
                    target.span,
                    f"{dtype} here",
                    secondary=[Label(output.span, f"{output.dtype} here")] if output.span else [],
                    help=f"leave out the type here; to keep another one, give the value a name of its own first: `h: {dtype} = …`",
                )
                return None
            value = self.store(output, operand)
        if value:
            self.emitter.call(value, target.name, exact=True)
        return value

    def store(self, output: Tensor, operand: Operand) -> Value | None:
        """The value of an output: exactly its axes, in its dtype."""
        have, want = set(operand.axes), set(output.axes)
        if have != want:
            value_has = f"has {axes_text(operand.axes)}" if operand.axes else "is a scalar"
            more, less = [a for a in operand.axes if a not in want], [a for a in output.axes if a not in have]
            if more and less:
                pair = self.axes.likely(more, less) or (more[0], less[0])
                help = f"if `{pair[0]}` is meant to be `{pair[1]}`, name them alike"
            elif more:
                wider = f"{output.name}: {output.dtype}{axes_text((*output.axes, *more))}"
                help = f"reduce it, as in `sum[{', '.join(more)}](…)`, or declare `{wider}`"
            else:
                help = f"write `expand[{', '.join(less)}](…)`, or leave {listed(less)} out of the declaration"
            parts = [f"has also {listed(more)}"] * bool(more) + [f"lacks {listed(less)}"] * bool(less)
            self.report.error(
                "C0309",
                f"`{output.name}` is declared with the axes {axes_text(output.axes)}, its value {value_has}",
                operand.span,
                " and ".join(parts),
                secondary=[Label(output.span, "declared here")] if output.span else [],
                notes=["an output has exactly its declared axes"],
                help=help,
            )
            return None
        value = self.evaluator.convert(operand, output.dtype)
        if value and isinstance(value.atom, Lit):  # an output is a variable
            value = self.evaluator.apply.emit(ops.CAST, [Operand(value, operand.span)], operand.span, {"dtype": output.dtype.name})
        return value and replace(value, order=output.axes)

    def complete(self) -> None:
        for o in self.program.outputs:
            if o.name not in self.scope.spans:
                near = [n for n in self.scope.spans if n not in {i.name for i in self.program.inputs}]
                help = f"add a line `{o.name} = …`" + (f"; the last value assigned is `{near[-1]}`" if near else "")
                self.report.error("C0211", f"the output `{o.name}` is never assigned", o.span, "declared here", help=help)

    def extents(self, inputs: tuple[Tensor, ...]) -> None:
        """Every free axis is one of an input, perhaps under another name; that is where a call finds its extent."""
        if len(self.report.diagnostics) > self.before:
            return
        known = {a for t in inputs for a in t.axes} | {a.name for a in self.axes.axes() if a.extent is not None}
        renames = [(str(e.attr("axis")), str(e.attr("to"))) for e in self.emitter.eqns if e.op == ops.RENAME.name]
        while more := {b for pair in renames for a, b in (pair, pair[::-1]) if a in known} - known:
            known |= more
        for name in self.axes.names():
            if name not in known:
                at = self.axes.span(name)
                help = f"fix it where it appears, as in `{name}=4`, or name an axis of an input"
                self.report.error(
                    "C0203", f"no input has the axis `{name}`, so its extent is not known", at, "free, but not given", help=help
                )

    # --- saved and recomputed values -----------------------------------------------------------------------------------------

    def plans(self) -> tuple[list[Var], list[Var]]:
        """The values that `save` and `recompute` name."""
        saved: list[Var] = []
        recomputed: list[Var] = []
        said: dict[str, tuple[ast.Name, bool]] = {}
        inputs = {i.name for i in self.program.inputs}
        for s in (s for s in self.program.body if isinstance(s, ast.Save)):
            for name in s.names:
                if name.name in said:
                    first, what = said[name.name]
                    verbs = ("recompute" if what else "save", "recompute" if s.recompute else "save")
                    self.report.error(
                        "C0319",
                        f"`{name.name}` is named by `{verbs[0]}` and again by `{verbs[1]}`",
                        name.span,
                        secondary=[Label(first.span, "first here")],
                        help="keep one of the two",
                    )
                    continue
                said[name.name] = (name, s.recompute)
                value = self.evaluator.name(name, self.scope)
                if not isinstance(value, Value):
                    continue
                if name.name in inputs or isinstance(value.atom, Lit):
                    what_it_is = "an input" if name.name in inputs else "a constant"
                    self.report.error(
                        "C0319",
                        f"`{name.name}` is {what_it_is}: there is nothing to save or recompute",
                        name.span,
                        help="name a value that the program computes",
                    )
                    continue
                (recomputed if s.recompute else saved).append(value.atom)
        return saved, recomputed

    def distributed(self) -> list[Var]:
        """The values that `distribute` names."""
        found: list[Var] = []
        inputs = {i.name for i in self.program.inputs}
        for name in (n for s in self.program.body if isinstance(s, ast.Distribute) for n in s.names):
            value = self.evaluator.name(name, self.scope)
            if not isinstance(value, Value):
                continue
            if name.name in inputs or isinstance(value.atom, Lit):
                what_it_is = "an input" if name.name in inputs else "a constant"
                message = f"`{name.name}` is {what_it_is}: there is nothing to distribute"
                self.report.error("C0322", message, name.span, help="name a value that the program computes")
            else:
                found.append(value.atom)
        return list(dict.fromkeys(found))

    # --- the result ------------------------------------------------------------------------------------------------------

    def assemble(self, name: str, inputs: tuple[Tensor, ...], conditions: Conditions, *told: list[Var]) -> Program:
        """`told`: the values that are saved, recomputed, distributed."""
        names = self.emitter.finish({*self.scope.spans, *self.outputs})
        order = self.axes.ordered
        outputs = []
        for o in self.outputs.values():
            value = o and self.scope.values.get(o.name)
            if o and isinstance(value, Value) and isinstance(value.atom, Var):
                outputs.append(Output(o, settled(value.atom, names)))
        eqns = renamed(self.emitter.eqns, names)
        saved, recomputed, distributed = (tuple(settled(v, names).name for v in values) for values in told)
        assert all(e.out.ty.axes == order(e.out.ty.axes) for e in eqns)
        return Program(
            name=name,
            axes=self.axes.axes(),
            inputs=inputs,
            outputs=tuple(outputs),
            eqns=eqns,
            requires=tuple(conditions.requires),
            nominal=tuple(conditions.nominals.items()),
            chunk=tuple(conditions.chunks.items()),
            save=saved,
            recompute=recomputed,
            distribute=distributed,
            forward_only=self.program.forward,
            doc=self.program.doc,
            span=self.program.span,
        )
