"""The text of kernel.py: scalar functions with `# src:` comments, records, references, callables.

In: plans. Out: one readable Python module that `ruff format` leaves as it is; it is the key of the compile cache. Each program has one
scalar function a phase and a finisher, the record of its kernels, a reference (the program as written, in straight-line torch over
named axes) and a function of its name. Non-goals: running it (`function`), inlining the runtime (`standalone`).
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from .. import ops
from ..ir.graph import Atom, Eqn, Program, Var
from ..ir.kernels import Gemm, Kernel, Plan, Reduce, Sink
from ..passes.report import contract
from ..passes.state import extents, signature
from . import spec
from .lower import lower, lower_backward, lower_saving, phase_name
from .text import WIDTH, Raw, body, call, constant, literal, public, returns, safe, scalar


def emit(plans: Iterable[Plan]) -> str:
    """The module of these programs, in order."""
    plans = tuple(plans)
    names = Names([public(p.program.name) for p in plans])
    alias, runtime = names.take("s"), names.take("function")
    plans = tuple(names.kernels(p) for p in plans)
    parts = [_program(p, names, alias, runtime) for p in plans]
    text = "\n\n\n".join(parts)
    mentioned = re.findall(r"\b(?:inf|nan)\b", text)
    read = {x.id for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Name)} if mentioned else set()
    numbers = [n for n in ("inf", "nan") if n in read]
    head = _docstring(plans)
    imports = [f"from math import {', '.join(numbers)}\n"] if numbers else []
    renamed = f" as {runtime}" if runtime != "function" else ""
    imports += [f"from coda_lang.backend_cute import function{renamed}", f"from coda_lang.backend_cute import spec as {alias}"]
    main = f'if __name__ == "__main__":\n    raise SystemExit({runtime}.main([{", ".join(public(p.program.name) for p in plans)}]))\n'
    return f"{head}\n\n" + "\n".join(imports) + "\n\n" + text + "\n\n" + main


class Names:
    """The names of one module, each given once; those of the programs come first, whatever they are."""

    def __init__(self, programs: Iterable[str]) -> None:
        self.taken = {*programs, "inf", "nan"}
        self.used: set[str] = set()  # by kernels, which name the files of a build

    def take(self, name: str) -> str:
        """The name, or one like it."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def kernels(self, plan: Plan) -> Plan:
        """The plan with names for its kernels that leave their scalar functions names of their own."""
        if plan.stages:
            stages = tuple(map(self.kernels, plan.stages))
            plan = replace(plan, stages=stages, kernels=tuple(k for p in stages for k in p.launched))
        else:
            plan = replace(plan, kernels=tuple(self._kernel(plan, k) if k in plan.launched else k for k in plan.kernels))
        if plan.derived is None:
            return plan
        saving = plan.derived.saving and self.kernels(plan.derived.saving)
        return replace(plan, derived=replace(plan.derived, saving=saving, backward=self.kernels(plan.derived.backward)))

    def _kernel(self, plan: Plan, kernel: Kernel) -> Kernel:
        while kernel.name in self.used or self.taken & set(function_names(plan, kernel)):
            kernel = replace(kernel, name=kernel.name + "_")
        self.used.add(kernel.name)
        self.taken.update(function_names(plan, kernel))
        return kernel


def function_names(plan: Plan, kernel: Kernel) -> list[str]:
    """The names of a kernel's scalar functions."""
    return [phase_name(plan, kernel, i) for i in range(len(kernel.phases) if isinstance(kernel, Gemm) else 1)]


def _docstring(plans: Sequence[Plan]) -> str:
    files = list(dict.fromkeys(p.program.span.file for p in plans if p.program.span))
    names = ", ".join(p.program.name for p in plans)
    lines = [f'"""{names}: fused kernels made by codac' + (f" from {', '.join(files)}." if files else "."), ""]
    lines += [
        "Each program is a function on torch tensors: kernels on a GPU, the reference on the CPU. `python FILE` checks it against float64.",
        '"""',
    ]
    return "\n".join(line if len(line) <= WIDTH else textwrap.fill(line, WIDTH) for line in lines)


def _program(plan: Plan, names: Names, alias: str, runtime: str) -> str:
    """A program: its kernels, its reference, the kernels of its derivative, the callable."""
    name, derived = plan.program.name, plan.derived
    written = names.take(f"{name}_reference")
    saving = lower_saving(plan) if derived is not None and derived.saving is not None else None
    record, functions, blocks = _kernels(plan, lower(plan, saving), names, alias, _about(plan), [reference(plan, written)])
    more: dict[str, object] = {}
    if derived is not None:
        kept = ", ".join(t.name for t in derived.residuals)
        if derived.saving is not None and saving is not None:
            title = f"{name} with what its backward reads: {kept}"
            more["saving"], found, text = _kernels(derived.saving, saving, names, alias, title, [])
            functions, blocks = functions + found, blocks + text
        backward = derived.backward
        more["backward"], found, text = _kernels(backward, lower_backward(plan), names, alias, signature(backward.program), [])
        functions, blocks = functions + found, blocks + text
        more = {k: Raw(str(v)) for k, v in more.items()}
        more |= {"residuals": tuple(t.name for t in derived.residuals)} if derived.residuals else {}
        more |= {"cotangents": derived.cotangents, "gradients": derived.gradients}
    arguments = [(record, None), ("", {fn: Raw(fn) for fn in functions}), (written, None), *more.items()]
    return "\n\n\n".join(blocks) + "\n\n" + _callable(f"{public(name)} = {runtime}.Function(", arguments)


def _kernels(
    plan: Plan, lowered: spec.Program, names: Names, alias: str, about: str, extra: list[str]
) -> tuple[str, list[str], list[str]]:
    """The record's name, the names of its scalar functions, and the text of all: a title, functions, `extra`, the record."""
    name = plan.program.name
    constant_name = names.take(name.upper() if name.upper() != name else f"{name}_RECORD")
    functions = _functions(plan)
    title = f"# --- {name} "
    title += "-" * (119 - len(title)) + "\n#"
    title += "".join(
        f"\n# {line}" for text in about.split("\n") for line in textwrap.wrap(text, WIDTH - 4, subsequent_indent="    ") or [""]
    )
    title = "\n".join(line.rstrip() for line in title.split("\n"))
    record = f"{constant_name} = {literal(lowered, 0, len(constant_name) + 3, alias)}"
    return constant_name, [fn for fn, _ in functions], [title, *(text for _, text in functions), *extra, record]


def _about(plan: Plan) -> str:
    """Signature, words of the source, shape contract."""
    lines = [signature(plan.program), *filter(None, [" ".join(plan.program.doc.split())]), "", "Shapes"]
    return "\n".join([*lines, *(f"  {c}" for c in contract(plan))])


def _callable(head: str, arguments: Sequence[tuple[str, object]]) -> str:
    """The call that makes a function, on one line if it fits."""

    def argument(name: str, value: object, indent: int, column: int) -> str:
        if value is None:
            return name
        return (f"{name}=" if name else "") + literal(value, indent, column)

    flat = head + ", ".join(argument(n, v, 0, -9999) for n, v in arguments) + ")"
    if len(flat) <= WIDTH:
        return flat
    return head + "\n" + "".join(f"    {argument(n, v, 4, len(n) + 6)},\n" for n, v in arguments) + ")"


# --- scalar functions --------------------------------------------------------------------------------------------------


def _functions(plan: Plan) -> list[tuple[str, str]]:
    """Name and text of every scalar function, in the order of the kernels."""
    out = []
    for kernel in (kernel for part in plan.parts for kernel in part.launched):
        if isinstance(kernel, Gemm):
            given = [v.name for v in kernel.accumulators] + [v.name for p in kernel.ports for v in p.vars]
            for i, phase in enumerate(kernel.phases):
                name = phase_name(plan, kernel, i)
                last = i == len(kernel.phases) - 1
                wanted = [v for s in kernel.sinks for v in s.values] if last else [s.value for s in phase.statistics]
                stats = ", ".join(f"the {s.kind} over {' and '.join(s.over)}" for s in phase.statistics)
                doc = f"One element of {_sinks(kernel.sinks)}" if last else f"What goes into {stats}"
                out.append((name, _function(name, given, phase.eqns, wanted, doc)))
                given += [s.var.name for s in phase.statistics]
        else:
            name = phase_name(plan, kernel)
            given = [p.var.name for p in kernel.partials] + [v.name for p in kernel.ports for v in p.vars]
            one = {"row": "One row", "col": "One column", "": "The total"}.get(kernel.over, "One element")
            doc = f"{one}: {', '.join(r.tensor for r in kernel.results)}"
            out.append((name, _function(name, given, kernel.eqns, [r.value for r in kernel.results], doc)))
    return out


def _sinks(sinks: Iterable[Sink]) -> str:
    return ", ".join(dict.fromkeys(s.work if isinstance(s, Reduce) else s.access.tensor for s in sinks))


def _function(name: str, given: Sequence[str], eqns: Sequence[Eqn], wanted: Sequence, doc: str) -> str:
    lines, known = body(eqns, wanted, scalar)
    values = [_result(atom, known) for atom in wanted]
    head = f"def {name}({', '.join(['f', *map(safe, given)])}):"
    if len(head) > WIDTH:
        head = f"def {name}(\n" + "".join(f"    {a},\n" for a in ["f", *map(safe, given)]) + "):"
    doc = textwrap.shorten(doc, WIDTH - 12, placeholder=" and more")
    return "\n".join([head, f'    """{doc}."""', *(line.text() for line in lines), returns(values)])


def _result(atom, known: dict[str, ast.expr]) -> str:
    if isinstance(atom, Var):
        return ast.unparse(known[atom.name]) if atom.name in known else safe(atom.name)
    return ast.unparse(constant(atom))


# --- the program as written ----------------------------------------------------------------------------------------------


def reference(plan: Plan, name: str) -> str:
    """The program in straight-line torch, a function of this name; every value has one dim for each axis."""
    return _Reference(plan.written or plan.program).text(name)


def _number(e: Eqn, name: str) -> ast.expr:
    return ast.Constant(int(e.attr(name)))  # type: ignore[call-overload]


class _Reference:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.dims: dict[str, str] = {}
        taken = {safe(v) for v in [t.name for t in program.inputs] + [e.out.name for e in program.eqns]}
        for axis in program.axes:
            name = axis.name.upper()
            while name in taken:
                name += "_"
            taken.add(name)
            self.dims[axis.name] = name
        self.rank = len(program.axes)
        self.extents = extents(program)
        self.numbers: set[str] = set()  # values made of literals and extents alone: not aligned to the axes
        for e in program.eqns:
            if (ops.TABLE[e.op].kind == "map" or e.op == ops.SIZE.name) and all(map(self.is_number, e.args)):
                self.numbers.add(e.out.name)

    def text(self, name: str) -> str:
        p = self.program
        lines, known = body(p.eqns, [o.value for o in p.outputs], self.right)
        stores = [self.store(o) for o in p.outputs]
        names = [safe(t.name) for t in p.inputs]
        out = [
            f"def {name}({', '.join(['f', *names])}):",
            f'    """{p.name} as written; each value has one dim for each of the axes {", ".join(a.name for a in p.axes)}."""',
        ]
        if self.dims:
            out.append(f"    {', '.join(self.dims.values())} = {', '.join(map(str, range(self.rank)))}")
        if self.dims and any("size[" in text for text in (*stores, *(line.value for line in lines))):
            out.append(f"    size = ({', '.join(self.size(a.name) for a in p.axes)}{',' if self.rank == 1 else ''})")
        out += [f"    {n} = f.load({n}, {self.tuple(t.axes)}, {self.rank})" for n, t in zip(names, p.inputs)]
        out += [line.text() for line in lines]
        if sum(map(len, stores)) + 2 * len(stores) + 12 <= WIDTH:
            out.append(returns(stores))
        else:
            out += ["    return (", *(f"        {s}," for s in stores), "    )"]
        return "\n".join(out)

    def tuple(self, axes: Sequence[str]) -> str:
        return f"({', '.join(self.dims[a] for a in axes)}{',' if len(axes) == 1 else ''})"

    def size(self, axis: str) -> str:
        """An axis's extent: fixed, or read off an input that has it, perhaps under another name."""
        if self.extents[axis] is not None:
            return str(self.extents[axis])
        same = {axis}
        pairs = [(str(e.attr("axis")), str(e.attr("to"))) for e in self.program.eqns if e.op == ops.RENAME.name]
        while more := {b for pair in pairs for a, b in (pair, pair[::-1]) if a in same} - same:
            same |= more
        for t in self.program.inputs:
            for i, a in enumerate(t.axes):
                if a in same:
                    return f"{safe(t.name)}.shape[{i}]"
        raise AssertionError(f"no input has the axis {axis}")

    def is_number(self, a: Atom) -> bool:
        return a.name in self.numbers if isinstance(a, Var) else True

    def device(self) -> ast.expr:
        return ast.Attribute(ast.Name(safe(self.program.inputs[0].name)), "device")

    def aligned(self, value: ast.expr) -> ast.expr:
        """A number as a tensor of the reference's rank."""
        return call("scalar", value, ast.Constant(self.rank), self.device())

    def store(self, o) -> str:
        sizes = ", ".join(f"size[{self.dims[a]}]" for a in o.tensor.axes) + ("," if len(o.tensor.axes) == 1 else "")
        name = ast.Name(safe(o.value.name))
        value = self.aligned(name) if self.is_number(o.value) else name
        return f'f.store({ast.unparse(value)}, {self.tuple(o.tensor.axes)}, ({sizes}), "{o.tensor.dtype}")'

    # --- one equation

    def dim(self, axis: object) -> ast.expr:
        return ast.Name(self.dims[str(axis)])

    def many(self, axes: object) -> ast.expr:
        return ast.Tuple([self.dim(a) for a in axes])  # type: ignore[attr-defined]

    def extent(self, axis: object) -> ast.expr:
        return ast.Subscript(ast.Name("size"), self.dim(axis))

    def right(self, e: Eqn, args: Sequence[ast.expr]) -> ast.expr:
        kind = ops.TABLE[e.op].kind
        if kind == "map":
            return scalar(e, args)
        args = [self.aligned(x) if self.is_number(a) else x for a, x in zip(e.args, args)]
        if kind == "contract":
            return call(e.op, *args, self.many(e.attr("axes")))
        if kind == "reduce":
            gathers = e.op == ops.GATHER.name
            return call(e.op, *args, self.dim(e.attr("axis")) if gathers else self.many(e.attr("axes")))
        return self.lanes(e, args) if kind == "lanes" else self.move(e, args)

    def lanes(self, e: Eqn, args: Sequence[ast.expr]) -> ast.expr:
        axis = self.dim(e.attr("axis"))
        if e.op == ops.LANE.name:
            return call(e.op, args[0], axis, _number(e, "index"))
        if e.op == ops.PACK.name:
            return call(e.op, axis, *args)
        if e.op == ops.RUN.name:
            return call(e.op, args[0], axis, _number(e, "start"), self.extent(e.attr("to")), self.dim(e.attr("to")))
        return call(e.op, axis, self.many(e.attr("of")), *args)

    def move(self, e: Eqn, args: Sequence[ast.expr]) -> ast.expr:
        if e.op == ops.RENAME.name:
            return call(e.op, args[0], self.dim(e.attr("axis")), self.dim(e.attr("to")))
        if e.op == ops.EXPAND.name:
            value = args[0]
            for a in e.attr("axes"):  # type: ignore[attr-defined]
                value = call(e.op, value, self.dim(a), self.extent(a))
            return value
        if e.op == ops.INDEX.name:
            return call(e.op, self.dim(e.attr("axis")), self.extent(e.attr("axis")), ast.Constant(self.rank), self.device())
        if e.op == ops.SIZE.name:
            first, *rest = (self.extent(a) for a in e.attr("axes"))  # type: ignore[attr-defined]
            return functools.reduce(lambda x, y: ast.BinOp(x, ast.Mult(), y), rest, first)
        return args[0]
