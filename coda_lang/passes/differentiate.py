"""Reverse mode on a tensor program: every float input that may have a gradient gets one, by the operator table's rules alone.

In: a checked program. Out: its derivative, a program again: the inputs and one cotangent per float output come in, one gradient per
differentiable input goes out, of that input's axes and dtype, rounded once after summing in f32. The forward equations are part of
it, as if everything were recomputed; which of them are saved instead is decided later. Non-goals: storage, kernels, fusing.

Un-broadcasting happens in one place, `unbroadcast`: the gradient of a row vector is a sum over rows, of a column vector a sum over
columns, of a scalar both. Integers, `const` inputs and what `stop_gradient` hides have none.

The branch of a choice that is not taken contributes exactly 0, even where its value or slope is NaN or infinite: a zero cotangent
alone would not do (0 · NaN is NaN), so cotangents inside a branch carry its condition as a `guard`, applied again after each rule.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from .. import ops
from ..diagnostics.model import CodaError, Diagnostic
from ..ir.graph import Atom, Eqn, Lit, Output, Program, Tensor, Var
from ..ir.types import F32
from ..ops.builder import EqnBuilder, Value, unbroadcast
from .state import is_temporary


@dataclass(frozen=True)
class Derivative:
    """The backward program, and which of its tensors mean what: pairs of (the forward's name, the backward's name)."""

    program: Program
    cotangents: tuple[tuple[str, str], ...]  # (output, input of the backward)
    gradients: tuple[tuple[str, str], ...]  # (input, output of the backward)
    totals: tuple[tuple[str, Atom], ...]  # (value, its whole cotangent), of the values that a gradient flows through
    carries: frozenset[str]  # the forward's values through which a gradient can flow to a differentiable input
    forward: Program  # whose derivative it is


@dataclass(frozen=True)
class Part:
    """A summand of a cotangent; where `guard` does not hold it is 0."""

    value: Value
    guard: Value | None = None


def differentiate(program: Program) -> Derivative:
    """The derivative. Raises CodaError C0511 for a `forward` program, C0512 if no input has a gradient, C0513 if no output is a float."""
    wanted = tuple(t for t in program.inputs if t.dtype.kind == "float" and not t.const)
    sources = tuple(o for o in program.outputs if o.tensor.dtype.kind == "float")
    _refuse(program, bool(wanted), bool(sources))
    taken = {v.name for e in program.eqns for v in (e.out, *e.args) if isinstance(v, Var)} | {t.name for t in program.inputs}
    b = EqnBuilder(program.axes, taken | {o.tensor.name for o in program.outputs})
    b.eqns = list(program.eqns)
    cotangents = tuple(Tensor(b.fresh(f"d_{o.tensor.name}"), o.tensor.dtype, o.tensor.axes) for o in sources)
    sums: dict[str, list[Part]] = defaultdict(list)
    for o, t in zip(sources, cotangents):
        sums[o.value.name].append(Part(b.value(Var(t.name, replace(o.value.ty, dtype=t.dtype)))))
    carries = active(program)
    called: dict[str, str] = {}
    totals: dict[str, Atom] = {}
    for e in reversed(program.eqns):
        if e.out.name in carries and e.out.name in sums:
            total = _step(b, e, sums, carries)
            totals[e.out.name] = total.atom
            if isinstance(total.atom, Var) and is_temporary(total.atom.name) and not is_temporary(e.out.name):
                called.setdefault(total.atom.name, f"d_{e.out.name}")
    outputs, pairs = [], []
    for t in wanted:
        total = _total(b, sums[t.name]) if sums[t.name] else b.value(0.0)
        name = b.fresh(f"d_{t.name}")
        outputs.append(Output(Tensor(name, t.dtype, t.axes), _stored(b, total, t)))
        pairs.append((t.name, name))
    inputs = (*program.inputs, *cotangents)
    backward = replace(program, name=f"{program.name}_backward", inputs=inputs, outputs=tuple(outputs), eqns=tuple(b.eqns), doc="")
    backward, names = _renamed(backward, called)
    whole = tuple((v, replace(a, name=names.get(a.name, a.name)) if isinstance(a, Var) else a) for v, a in totals.items())
    return Derivative(backward, tuple((o.tensor.name, t.name) for o, t in zip(sources, cotangents)), tuple(pairs), whole, carries, program)


def active(program: Program) -> frozenset[str]:
    """The values through which a gradient can flow to a differentiable input."""
    carries = {t.name for t in program.inputs if t.dtype.kind == "float" and not t.const}
    for e in program.eqns:
        flows = ops.TABLE[e.op].vjp is not None and e.out.ty.dtype.kind == "float"
        if flows and any(isinstance(a, Var) and a.name in carries for a in e.args):
            carries.add(e.out.name)
    return frozenset(carries)


def _renamed(program: Program, called: dict[str, str]) -> tuple[Program, dict[str, str]]:
    """The cotangent of a value that the source names is called after it, and so is that cotangent rounded; also who is called how."""
    taken = {v.name for e in program.eqns for v in (e.out, *e.args) if isinstance(v, Var)} | {t.name for t in program.inputs}
    taken |= {o.tensor.name for o in program.outputs}
    names: dict[str, str] = {}
    for e in program.eqns:
        of = names.get(e.args[0].name) if e.op == ops.CAST.name and isinstance(e.args[0], Var) and is_temporary(e.out.name) else None
        wanted = called.get(e.out.name) or (f"{of}_{e.attr('dtype')}" if of else "")
        wanted += "_sum" if wanted in taken else ""
        if wanted and wanted not in taken:
            names[e.out.name] = wanted
            taken.add(wanted)

    def new(v: Var) -> Var:
        return replace(v, name=names.get(v.name, v.name))

    eqns = tuple(replace(e, out=new(e.out), args=tuple(new(a) if isinstance(a, Var) else a for a in e.args)) for e in program.eqns)
    return replace(program, eqns=eqns, outputs=tuple(replace(o, value=new(o.value)) for o in program.outputs)), names


def _step(b: EqnBuilder, e: Eqn, sums: dict[str, list[Part]], carries: frozenset[str]) -> Value:
    """Adds the cotangents of one equation's arguments; gives its own."""
    vjp = ops.TABLE[e.op].vjp
    assert vjp is not None
    guard = _common([p.guard for p in sums[e.out.name]])
    g = _spread(b, _total(b, sums[e.out.name]), e.out.ty.axes)
    start = len(b.eqns)
    parts = vjp(b, g, b.value(e.out), *(b.value(a) for a in e.args), **dict(e.attrs))
    for i, (a, part) in enumerate(zip(e.args, parts)):
        if part is None or not isinstance(a, Var) or a.name not in carries:
            continue
        part = b.value(part)
        if guard is not None and part is not g and _within(guard, part.ty.axes):
            part = b.apply(ops.WHERE.name, (guard, part, 0.0))
        whole = unbroadcast(b, _spread(b, part, a.ty.axes), a.ty.axes)
        inner = _branch(b, e, i, guard)
        sums[a.name].append(Part(whole, inner if inner is not None and _within(inner, a.ty.axes) else None))
    b.eqns[start:] = [replace(x, span=e.span) for x in b.eqns[start:]]
    return g


def _branch(b: EqnBuilder, e: Eqn, argument: int, guard: Value | None) -> Value | None:
    """The guard of an argument's cotangent: its equation's, and for a choice also that this branch is taken."""
    if e.op != ops.WHERE.name or argument == 0:
        return guard
    condition = b.value(e.args[0])
    taken = condition if argument == 1 else ~condition
    return taken if guard is None else guard & taken


def _within(guard: Value, axes: tuple[str, ...]) -> bool:
    return set(guard.ty.axes) <= set(axes)


def _common(guards: list[Value | None]) -> Value | None:
    """The guard that all summands share; None where they differ (each is 0 by itself where it must be)."""
    first = guards[0]
    return first if first is not None and all(x is not None and x.atom == first.atom for x in guards) else None


def _total(b: EqnBuilder, parts: list[Part]) -> Value:
    total = parts[0].value
    for part in parts[1:]:
        total = total + part.value
    return total


def _spread(b: EqnBuilder, g: Value, axes: tuple[str, ...]) -> Value:
    """The cotangent at every position of `axes`: a rule may give one that is the same along some."""
    missing = tuple(a for a in axes if a not in g.ty.axes)
    return b.apply(ops.EXPAND.name, (g,), {"axes": missing}) if missing else g


def _stored(b: EqnBuilder, total: Value, tensor: Tensor) -> Var:
    """The gradient as it is stored: the tensor's dtype, all its axes."""
    if isinstance(total.atom, Lit) or total.ty.dtype is not tensor.dtype or tensor.dtype is F32:
        total = b.apply(ops.CAST.name, (total,), {"dtype": tensor.dtype.name})
    spread = _spread(b, total, tensor.axes).atom
    assert isinstance(spread, Var)
    return spread


def _refuse(program: Program, wanted: bool, sources: bool) -> None:
    def stop(code: str, message: str, help: str) -> None:
        raise CodaError([Diagnostic(code, message, program.span, "this program", help=help)])

    if program.forward_only:
        stop("C0511", f"`{program.name}` is a `forward` program: it has no derivative", "drop the word `forward`")
    if not wanted:
        message = f"no input of `{program.name}` has a gradient: all are integers or `const`"
        stop("C0512", message, "write `forward program`, or drop `const`")
    if not sources:
        message = f"no output of `{program.name}` is a float, so there is nothing to differentiate"
        stop("C0513", message, "write `forward program`")
