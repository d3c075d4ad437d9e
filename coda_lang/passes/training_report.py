"""What `codac plan` prints about a program's derivative: what is saved and why, and where each value of the backward can be known.

In: a `Plan` with `derived`. Out: text, and `decisions`, the block-locality theorem applied (docs/theorem.md). Costs are bytes and FLOPs at
nominal extents. Non-goals: deciding (`saving`, `place`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .. import ops
from ..ir.graph import Eqn, Program, Tensor, Var
from ..ir.kernels import Derived, Finish, Gemm, Plan
from .memory import peak
from .report import report
from .saving import BYTES_PER_SECOND, FLOPS_PER_SECOND, saved_by_autograd
from .state import definitions, is_temporary, nominal

EPILOGUE, MAP, PARTIAL, PRODUCT, AGAIN = "epilogue", "map", "partial", "product", "again"


@dataclass(frozen=True)
class Decision:
    """Where a value of the backward is known. `where`: EPILOGUE or MAP (of one tile), PARTIAL (all tiles), PRODUCT, AGAIN (of the forward).

    `stored` says whether it leaves its kernel, `why` gives the reason.
    """

    value: str
    where: str
    kernel: str
    stored: bool
    why: str

    def __str__(self) -> str:
        return f"{self.value}: {self.why}" + (", and stored" if self.stored else "")


def decisions(plan: Plan) -> tuple[Decision, ...]:
    """Every value of the backward, kernel by kernel."""
    derived = plan.derived
    assert derived is not None
    forward = {e.out.name for e in plan.program.eqns}
    return tuple(d for part in derived.backward.parts for d in _of(part, forward, derived))


def _of(part: Plan, forward: set[str], derived: Derived) -> list[Decision]:
    kernel = next((k for k in part.launched if isinstance(k, Gemm)), None)
    name = kernel.name if kernel else next(k.name for k in part.launched)
    product = kernel is not None and bool(kernel.products)
    shown = {o.value.name: o.tensor.name for o in part.program.outputs}
    finished = _finished(part)
    made = {e.out.name for e in part.program.eqns}
    given = [t.name for t in part.program.inputs if t.name in dict((c, o) for o, c in derived.cotangents)]
    found = []
    for e in part.program.eqns:
        value, stored = shown.get(e.out.name, e.out.name), e.out.name in shown
        if e.out.name in forward and e.out.name in made:
            found.append(Decision(value, AGAIN, name, stored, f"computed again from what `{name}` reads anyway"))
        elif e.op == ops.CONTRACT.name:
            over = ", ".join(e.attr("axes"))  # type: ignore[arg-type]
            found.append(
                Decision(value, PRODUCT, name, stored, f"the product of `{name}`: it contracts {over}, so its operands are whole before")
            )
        elif e.out.name in finished:
            found.append(Decision(value, PARTIAL, name, stored, _partial(e, name)))
        elif product:
            why = f"tile-local in the epilogue of `{name}`, which makes its incoming gradient"
            found.append(Decision(value, EPILOGUE, name, stored, why))
        else:
            what = f"its incoming gradient {', '.join(given)} is given" if given else "its incoming gradient is stored"
            found.append(Decision(value, MAP, name, stored, f"tile-local in the map kernel `{name}`: {what}"))
    return found


def _finished(part: Plan) -> set[str]:
    """The values that a finisher computes: reductions that leave the tile, and what is made of those alone."""
    inside = {e.out.name for k in part.launched if isinstance(k, Gemm) for p in k.phases for e in p.eqns}
    works = any(isinstance(k, Finish) and k.partials for k in part.launched)
    found: set[str] = set()
    for e in part.program.eqns:
        args = [a.name for a in e.args if isinstance(a, Var)]
        leaves = ops.TABLE[e.op].kind == "reduce" and works and not _grouped(part, e)
        if leaves or e.out.name not in inside and any(a in found for a in args):
            found.add(e.out.name)
    return found


def _grouped(part: Plan, e: Eqn) -> bool:
    """Is the reduction a statistic of one tile, or over lanes?"""
    size = part.program
    over: tuple[str, ...] = (str(e.attr("axis")),) if e.op == ops.GATHER.name else tuple(e.attr("axes"))  # type: ignore[arg-type]
    gemm = part.gemm
    across = [a for a in over if a in gemm.rows or a in gemm.cols]
    statistics = {a for p in gemm.phases for s in p.statistics for a in s.over}
    return not across or set(across) <= statistics and all(size.extent(a) is not None for a in across)


def _partial(e: Eqn, name: str) -> str:
    if ops.TABLE[e.op].kind != "reduce":
        return f"after `{name}`, in its finisher: made of whole reductions"
    over = (str(e.attr("axis")),) if e.op == ops.GATHER.name else e.attr("axes")
    return f"a reduction over {', '.join(over)}: partial results of the tiles of `{name}`, then its finisher"  # type: ignore[arg-type]


# --- text --------------------------------------------------------------------------------------------------------------


def text(plan: Plan) -> str:
    """The report on the derivative."""
    derived = plan.derived
    assert derived is not None
    lines = [f"the derivative of {plan.program.name}", "", *_saved(plan, derived), "", "where each value of the backward is known:"]
    for d in decisions(plan):
        if d.stored or d.where in (PARTIAL, PRODUCT) or not is_temporary(d.value):
            lines.append(f"  {d}")
    again = [d.value for d in decisions(plan) if d.where == AGAIN]
    lines += [f"  computed again: {', '.join(dict.fromkeys(again))}"] if again else []
    return "\n".join(lines) + "\n\n" + report(derived.backward)


def _saved(plan: Plan, derived: Derived) -> list[str]:
    """The save plan as a table."""
    program = derived.saving.program if derived.saving else plan.program
    size = nominal(plan.program) | nominal(program) | nominal(derived.backward.program)
    reads = [t.name for t in derived.backward.program.inputs]
    own = {t.name for t in plan.program.inputs} | {o.tensor.name for o in plan.program.outputs}
    free = [name for name in reads if name in own]
    total = sum(_bytes(t, size) for t in derived.residuals)
    lines = [f"saved for the backward: {_amount(total) if total else 'nothing'}" + (f"; read as it is: {', '.join(free)}" if free else "")]
    lines += [f"  {_row(t, program, size)}" for t in derived.residuals]
    eager = saved_by_autograd(plan.program)
    held = sum(_bytes(v, size) for v in eager)
    lines.append(
        f"PyTorch's autograd of the program, op by op, would save {_amount(held)}: {', '.join(v.name for v in eager) or 'nothing'}"
    )
    most = peak(plan)
    if most is not None:
        kinds = [(most.residuals, "saved"), (most.between, "between kernels"), (most.gradients, "gradients")]
        listed = ", ".join(f"{_amount(n)} {what}" for n, what in kinds if n)
        lines.append(f"the backward holds at most {_amount(most.total)} of its own, in `{most.kernel}`: {listed}")
    if plan.program.save or plan.program.recompute or plan.program.chunk:
        told = [f"save {', '.join(plan.program.save)}"] * bool(plan.program.save)
        told += [f"recompute {', '.join(plan.program.recompute)}"] * bool(plan.program.recompute)
        told += [f"chunk {axis} by {count}" for axis, count in plan.program.chunk]
        lines.append(f"as the program says: {'; '.join(told)}")
    return lines


def _row(t: Tensor, program: Program, size: dict[str, int]) -> str:
    count = _bytes(t, size)
    value = next(o.value for o in program.outputs if o.tensor.name == t.name)
    work = flops(program, value.name, size)
    moved = 2 * count / BYTES_PER_SECOND
    row = f"{t.name}: {t.dtype}[{', '.join(t.axes)}], {_amount(count)}, {1e6 * moved:.0f} us to store and load"
    if work:
        again = "computing it again" if is_temporary(t.name) else f"`recompute {t.name}`"
        row += f"; {again} instead costs {work / 1e12:.2f} TFLOP, {1e6 * work / FLOPS_PER_SECOND:.0f} us"
        row += " (to ask for it, give the value a name)" if is_temporary(t.name) else ""
    return row


def flops(program: Program, name: str, size: dict[str, int]) -> float:
    """Of the products that a value needs to be computed again, to the stored values before them."""
    defs, seen, total = definitions(program), set(), 0.0
    pending = [name]
    while pending:
        e = defs.get(pending.pop())
        if e is None or e.out.name in seen:
            continue
        seen.add(e.out.name)
        if e.op == ops.CONTRACT.name:
            total += 2.0 * prod(size[a] for a in (*e.out.ty.axes, *e.attr("axes")))  # type: ignore[misc]
        else:
            pending += [a.name for a in e.args if isinstance(a, Var)]
    return total


def _bytes(t: Tensor | Var, size: dict[str, int]) -> float:
    axes, dtype = (t.axes, t.dtype) if isinstance(t, Tensor) else (t.ty.axes, t.ty.dtype)
    return prod(size[a] for a in axes) * dtype.bits / 8


def _amount(n: float) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"


__all__ = ["Decision", "decisions", "text"]
