"""What `codac plan` prints about one program: kernels in order, what each fuses, memory traffic against unfused, the shape contract.

In: a `Plan`. Out: text. Costs are bytes at nominal extents (`nominal m = 8192`, else a default): operands and results once each, work
tensors for tiles of 128. Non-goals: time.
"""

from __future__ import annotations

from math import prod

from .. import ops
from ..ir.graph import Eqn, Program, Var
from ..ir.kernels import PLANES, Finish, Gemm, Kernel, Loop, Plan, Point, Read, Reduce, Store
from .state import extents, listed, nominal, signature

TILE = 128


def report(plan: Plan) -> str:
    """The whole report."""
    program = plan.program
    size = nominal(program)
    lines = [signature(program), ""]
    free = [a.name for a in program.axes if a.extent is None]
    lines.append("nominal extents: " + (", ".join(f"{a}={size[a]}" for a in free) or "all fixed"))
    lines += ["several kernels, because:" for _ in plan.why[:1]] + [f"  {reason}" for reason in plan.why]
    lines += [line for loop in plan.loops for line in _loop(plan, loop)]
    lines += [
        f"chunk {axis} by {count}: no kernel leaves anything along `{axis}` and another axis to a later one"
        for axis, count in program.chunk
        if not plan.loops
    ]
    number = 0
    for part in plan.parts:
        for kernel in part.launched:
            number += 1
            lines += ["", f"{number}. " + (_gemm(kernel) if isinstance(kernel, Gemm) else _finish(kernel))]
            lines += [f"   {line}" for line in _details(kernel)]
        lines += [f"   {line}" for line in _between(plan, part)]
    lines += ["" for _ in plan.same[:1]] + [f"{output} is {given} as it is: no kernel" for output, given in plan.same]
    fused, unfused = traffic(plan), unfused_traffic(program)
    flops = sum(_flops(part) * _times(plan, part) for part in plan.parts)
    lines += [
        "",
        f"memory: {_bytes(fused)} against {_bytes(unfused)} unfused ({unfused / fused:.1f}x less), {flops / 1e9:.1f} GFLOP in the product",
    ]
    lines += ["", "laws used: " + ("; ".join(plan.notes) or "none")]
    lines += ["", "shape contract:", *(f"  {line}" for line in contract(plan))]
    return "\n".join(lines) + "\n"


def _loop(plan: Plan, loop: Loop) -> list[str]:
    """What runs in chunks, and what that does to memory."""
    numbers = [i for i, (part, _) in enumerate(((p, k) for p in plan.parts for k in p.launched), 1) if part.program.name in loop.stages]
    sizes = nominal(plan.program) | {loop.axis: loop.size}
    tensors = {t.name: t for t in plan.temps}
    held = sum(prod(sizes[a] for a in tensors[name].axes) * tensors[name].dtype.bits / 8 for name in loop.local)
    sums = sum(prod(sizes[a] for a in t.axes) * 4.0 for t, _ in loop.carried)
    which = f"kernel {numbers[0]}" if len(numbers) == 1 else f"kernels {numbers[0]} to {numbers[-1]}"
    how = f"in chunks of `{loop.axis}`, {loop.size} at a time" if loop.size > 1 else f"a launch for each position of `{loop.axis}`"
    lines = [f"{how}: {which}"]
    lines += [f"  for one chunk: {', '.join(loop.local)}, {_bytes(held)}"] if loop.local else []
    lines += [f"  added up: {', '.join(name for _, name in loop.carried)}, {_bytes(sums)}"] if loop.carried else []
    return lines


def _times(plan: Plan, part: Plan) -> int:
    """How often a stage runs."""
    sizes = nominal(plan.program)
    return prod(-(-sizes[loop.axis] // loop.size) for loop in plan.loops if part.program.name in loop.stages)


def _between(plan: Plan, part: Plan) -> list[str]:
    """What a stage leaves for later ones, for whom and why."""
    size = nominal(part.program)  # of a loop, for one chunk
    lines = []
    for t in (o.tensor for o in part.program.outputs if o.tensor in plan.temps):
        readers = [p for p in plan.stages if any(x.name == t.name for x in p.program.inputs)]
        operands = [p.program.name for p in readers if _multiplied(p, t.name)]
        others = [p.program.name for p in readers if p.program.name not in operands]
        why = [f"an operand of {', '.join(operands)}"] if operands else []
        why += [f"needed by {', '.join(others)}, which cannot compute it again without a product or a whole reduction"] if others else []
        count = prod(size[a] for a in t.axes) * t.dtype.bits / 8
        lines.append(f"leaves {t.name}: {t.dtype}[{', '.join(t.axes)}], {_bytes(count)}: {'; '.join(why)}")
    return lines


def _in_tiles(plan: Plan, tensor: str) -> bool:
    """Is the tensor an operand, or loaded or stored in tiles, by any kernel?"""
    ports = (x for p in plan.parts for k in p.launched if isinstance(k, Gemm) for x in (*k.ports, *k.sinks))
    tiles = {x.access.tensor for x in ports if isinstance(x, Store) or isinstance(x, Read) and x.tile}
    return tensor in tiles or any(_multiplied(p, tensor) for p in plan.parts)


def _multiplied(part: Plan, tensor: str) -> bool:
    """Is the tensor an operand of the stage's product?"""
    return any(o.tensor == tensor for k in part.kernels if isinstance(k, Gemm) for p in k.products for o in (p.a, *p.b))


def _gemm(kernel: Gemm) -> str:
    if kernel.whole_rows:
        rows, cols = listed(kernel.rows), listed(kernel.cols)
        return f"map {kernel.name}: each block owns rows ({rows}) and walks their columns ({cols}) once a phase, no product"
    if not kernel.products:
        return f"map {kernel.name}: rows {listed(kernel.rows)}, columns {listed(kernel.cols)}, no product"
    segments = f", {len(kernel.accumulators)} accumulators side by side" if len(kernel.accumulators) > 1 else ""
    depth = f", {len(kernel.products)} products into each" if len(kernel.products) > 1 else ""
    return f"gemm {kernel.name}: rows {listed(kernel.rows)}, columns {listed(kernel.cols)}{segments}{depth}"


def _finish(kernel: Finish) -> str:
    return f"finish {kernel.name}: " + (f"one value for each of {listed(kernel.axes)}" if kernel.axes else "one value")


def _details(kernel: Kernel) -> list[str]:
    out: list[str] = []
    if isinstance(kernel, Gemm):
        out += [f"multiplies {p.a} by {', '.join(dict.fromkeys(map(str, p.b)))}" for p in kernel.products]
        out += [f"reads {p}" for p in kernel.ports]
        out += [f"phase {i}: {_operations(p.eqns)}" + "".join(f", {s}" for s in p.statistics) for i, p in enumerate(kernel.phases)]
        out += [str(s) for s in kernel.sinks]
    else:
        out += [f"reads {p}" for p in (*kernel.partials, *kernel.ports)]
        out += [_operations(kernel.eqns), *map(str, kernel.results)]
    return out


def _operations(eqns: tuple[Eqn, ...]) -> str:
    return "1 operation" if len(eqns) == 1 else f"{len(eqns)} operations"


# --- traffic -----------------------------------------------------------------------------------------------------------


def traffic(plan: Plan) -> float:
    """Bytes that the kernels read and write, each tensor once a kernel, and copies twice."""
    if plan.stages:
        return sum(traffic(part) * _times(plan, part) for part in plan.stages) or 1.0
    program = plan.program
    size, tensors = nominal(program), {t.name: t for t in (*program.inputs, *(o.tensor for o in program.outputs))}

    def whole(name: str) -> float:
        return prod(size[a] for a in tensors[name].axes) * tensors[name].dtype.bits / 8

    gemm = plan.gemm
    m, n = prod(size[a] for a in gemm.rows), prod(size[a] for a in gemm.cols)
    work: dict[str, float] = {}
    total = 0.0
    for kernel in plan.launched:
        named: set[str] = set()
        if isinstance(kernel, Gemm):
            named |= {o.tensor for p in kernel.products for o in (p.a, *p.b)} | {
                s.access.tensor for s in kernel.sinks if isinstance(s, (Store, Point))
            }
            for s in kernel.sinks:
                if isinstance(s, Reduce):
                    work[s.work] = 4 * PLANES.get(s.kind, 1) * (m * -(-n // TILE) if s.kept == "row" else n * -(-m // TILE))
                    total += work[s.work]
        else:
            total += sum(work.get(p.work, 4 * m) for p in kernel.partials)
            named |= {r.tensor for r in kernel.results}
        named |= {p.access.tensor for p in kernel.ports if isinstance(p, Read)}
        total += sum(whole(t) if t in tensors else 4 * m for t in named)
    return total + sum(2 * whole(x.tensor) for x in plan.layouts if x.copy)


def unfused_traffic(program: Program) -> float:
    """Bytes if every operator were a kernel of its own that reads its operands and writes its result (views are free)."""
    size = nominal(program)

    def whole(var: Var) -> float:
        return prod(size[a] for a in var.ty.axes) * var.ty.dtype.bits / 8

    moved = ("move", "lanes")
    return (
        sum(whole(e.out) + sum(whole(a) for a in e.args if isinstance(a, Var)) for e in program.eqns if ops.TABLE[e.op].kind not in moved)
        or 1.0
    )


def _flops(plan: Plan) -> float:
    size, gemm = nominal(plan.program), plan.gemm
    mn = prod(size[a] for a in (*gemm.rows, *gemm.cols)) * len(gemm.accumulators)
    return 2.0 * mn * sum(prod(size[a] for a in p.over) for p in gemm.products)


def _bytes(n: float) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


# --- shape contract ----------------------------------------------------------------------------------------------------


def contract(plan: Plan) -> list[str]:
    """What is free, what costs a copy, what is refused."""
    program = plan.program
    size = extents(program)
    free = [a for a, n in size.items() if n is None]
    fixed = [f"{a}={n}" for a, n in size.items() if n is not None]
    lines = [f"free: {', '.join(free) or 'nothing'}" + (f"; fixed: {', '.join(fixed)}" if fixed else "")]
    for t in (*program.inputs, *(o.tensor for o in program.outputs)):
        layouts = [x for x in plan.layouts if x.tensor == t.name]
        if not layouts:
            lines.append(f"{t.name}: not read")
        elif layouts[0].copy:
            lines.append(f"{t.name}: copied at every call ({layouts[0].copy}); stored as {_stored(layouts[0].modes)} it would not be")
        elif layouts[0].modes and any(len(m) > 0 for m in layouts[0].modes) and len(layouts[0].modes) > 1:
            last = layouts[0].modes[-1]
            others = " and other strides are multiples of 16 bytes" if _in_tiles(plan, t.name) else ""
            lines.append(f"{t.name}: used as it is if {' x '.join(last)} is contiguous{others}, else copied")
    merged = [m for x in plan.layouts for m in x.modes if len(m) > 1]
    for m in dict.fromkeys(merged):
        lines.append(f"{listed(m)} may arrive merged into one" if sum(size[a] is None for a in m) <= 1 else f"{listed(m)} are used as one")
    lines += [f"require {r}" for r in program.requires]
    lines.append("refused: other dtypes, another rank, an extent that disagrees with a fixed one or between tensors")
    return lines


def _stored(modes: tuple[tuple[str, ...], ...]) -> str:
    return "[" + ", ".join(a for m in modes for a in m) + "]"
