"""In which order the kernel walks its axes, and how it sees each stored tensor: modes, and the tensors that the host must rearrange.

In: a plan whose kernels name axes. Out: the plan with ordered row, column and contracted axes and one `Layout` a tensor. The orders are
those that cost the fewest bytes of copies at nominal extents. Non-goals: strides at run time (the host checks those), tile shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from itertools import product as every
from math import lcm, prod

from ..diagnostics.model import CodaError, Diagnostic
from ..ir.graph import Program
from ..ir.kernels import Access, Along, Finish, Gemm, Kernel, Layout, Operand, Plan, Point, Read, Store
from .state import MAX_COLUMNS, Placement, State, extents, fixed_product, listed, nominal

Modes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Use:
    """How a kernel reads or writes a tensor. For each axis: "row", "col" or "k0" (contracted by the first product, "k1" by the second, …)
    with the kernel axis it runs along, "lane", or "pair".

    kind: "a", "b", "tile" (through TMA: operands, tile loads and stores), "load" (element by element), "result" (of a finisher).
    """

    kind: str
    roles: tuple[tuple[str, tuple[str, str]], ...]

    def role(self, axis: str) -> tuple[str, str]:
        return dict(self.roles)[axis]


@dataclass(frozen=True)
class Orders:
    """The kernel's axes, outermost first."""

    row: tuple[str, ...]
    col: tuple[str, ...]
    k: tuple[tuple[str, ...], ...]

    def of(self, side: str) -> tuple[str, ...]:
        """The axes of a side, none for lanes."""
        return {"row": self.row, "col": self.col, **{f"k{i}": k for i, k in enumerate(self.k)}}.get(side, ())

    def follows(self, a: tuple[str, str], b: tuple[str, str]) -> bool:
        """Is b the next axis inside a?"""
        return a[0] == b[0] and (a[0] == "out" or (a[1], b[1]) in pairwise(self.of(a[0])))

    def innermost(self, role: tuple[str, str]) -> bool:
        return role[1] in self.of(role[0])[-1:]


def layout(state: State) -> State:
    """The pass. Raises CodaError (C0602) where no storage order serves all uses of a tensor."""
    assert state.plan is not None and state.placement is not None
    program, gemm = state.program, state.plan.gemm
    uses = _uses(state.plan)
    segments = max(len(gemm.accumulators), 1)
    best: tuple[float, Orders, tuple[Layout, ...]] | None = None
    for orders in _orders(state.plan, state.placement):
        layouts = [_best(program, tensor, found, orders, segments) for tensor, found in uses.items()]
        if None in layouts:
            continue
        cost = sum(_copied_bytes(program, x) for x in layouts if x is not None and x.copy)
        if best is None or cost < best[0]:
            best = cost, orders, tuple(x for x in layouts if x is not None)
        if cost == 0:
            break
    if best is None:
        raise CodaError([_no_layout(state.plan, uses, state.placement)])
    _, orders, chosen = best
    kernels = tuple(_ordered(k, orders) for k in state.plan.kernels)
    return replace(state, plan=replace(state.plan, kernels=kernels, layouts=chosen))


def _orders(plan: Plan, placement: Placement) -> Iterator[Orders]:
    """The orders of tensors that runs and groups allow, the program's own first."""
    gemm = plan.gemm

    def fits(cols: tuple[str, ...]) -> bool:
        if placement.outermost is not None and cols[0] != placement.outermost:
            return False
        return all(frozenset(cols[len(cols) - len(s) :]) == s for s in placement.suffixes)

    def depth(axis: str) -> tuple[bool, int]:
        return axis != placement.outermost, sum(axis in s for s in placement.suffixes)

    stored = [tuple(axis for _, (_, axis) in use.roles) for uses in _uses(plan).values() for use in uses]
    rows, cols = _seen(gemm.rows, stored), _seen(gemm.cols, stored)
    nested = dict.fromkeys(tuple(sorted(col, key=depth)) for col in cols)
    for row, col, *k in every(rows, filter(fits, nested), *(_seen(p.over, stored) for p in gemm.products)):
        yield Orders(row, col, tuple(k))


def _seen(axes: tuple[str, ...], stored: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The orders in which stored tensors hold these axes, after the program's own."""
    found = [tuple(a for a in order if a in axes) for order in stored]
    return list(dict.fromkeys([axes, *(f for f in found if len(f) == len(axes))]))


def _ordered(kernel: Kernel, orders: Orders) -> Kernel:
    if isinstance(kernel, Finish):
        order = {"row": orders.row, "out": kernel.axes}.get(kernel.over, orders.col)
        return replace(kernel, axes=tuple(a for a in order if a in kernel.axes))
    products = tuple(replace(p, over=k) for p, k in zip(kernel.products, orders.k))
    return replace(kernel, rows=orders.row, cols=orders.col, products=products)


# --- uses --------------------------------------------------------------------------------------------------------------


def _uses(plan: Plan) -> dict[str, list[Use]]:
    """All uses of each tensor of the signature."""
    found: dict[str, list[Use]] = {}
    signature = {t.name for t in plan.program.inputs} | {o.tensor.name for o in plan.program.outputs}
    gemm = plan.gemm

    def add(tensor: str, use: Use) -> None:
        if tensor in signature and use not in found.setdefault(tensor, []):
            found[tensor].append(use)

    for i, p in enumerate(gemm.products):
        for kind, operands, side in (("a", (p.a,), "row"), ("b", p.b, "col")):
            for o in operands:
                add(o.tensor, _operand_use(kind, o, side, f"k{i}"))
    for kernel in plan.kernels:
        for port in kernel.ports:
            if isinstance(port, Read):
                add(port.access.tensor, _access_use("tile" if port.tile else "load", port.access, gemm))
        for sink in kernel.sinks if isinstance(kernel, Gemm) else ():
            if isinstance(sink, (Store, Point)):
                add(sink.access.tensor, _access_use("tile" if isinstance(sink, Store) else "load", sink.access, gemm))
        if isinstance(kernel, Finish):
            for result in kernel.results:
                side = "col" if kernel.over == "part" else kernel.over
                add(result.tensor, Use("result", tuple((own, (side, axis)) for own, axis in result.axes)))
    return found


def _operand_use(kind: str, o: Operand, side: str, contracted: str) -> Use:
    roles = [(own, (side, name)) for own, name in o.outer] + [(own, (contracted, name)) for own, name in o.inner]
    return Use(kind, tuple(roles + [(axis, ("lane", "")) for axis, _ in o.at]))


def _access_use(kind: str, access: Access, gemm: Gemm) -> Use:
    def role(axis: str, at: object) -> tuple[str, str]:
        if isinstance(at, Along):
            return ("row" if at.axis in gemm.rows else "col"), at.axis
        return ("pair" if axis == access.packed else "lane"), ""

    return Use(kind, tuple((axis, role(axis, at)) for axis, at in access.at))


# --- one tensor --------------------------------------------------------------------------------------------------------


def _axes(program: Program, tensor: str) -> tuple[str, ...]:
    return next(t.axes for t in (*program.inputs, *(o.tensor for o in program.outputs)) if t.name == tensor)


def _best(program: Program, tensor: str, uses: list[Use], orders: Orders, segments: int) -> Layout | None:
    """The tensor as stored if that serves every use, else the nearest rearrangement that does, else None."""
    stored = _axes(program, tensor)
    why = ""
    for axes in dict.fromkeys([stored, *(_arranged(stored, use, orders) for use in uses)]):
        modes, problem = _modes(program, axes, uses, orders, segments)
        if modes is not None:
            return Layout(tensor, modes, why)
        why = why or problem
    return None


def _arranged(stored: tuple[str, ...], use: Use, orders: Orders) -> tuple[str, ...]:
    """The axes in the order that serves a use best: lanes, rows, columns, contracted axes, each in the kernel's order; a pair last."""
    sides = {"lane": 0, "out": 0, "row": 1, "col": 2, "pair": 4}

    def place(axis: str) -> tuple[int, int]:
        side, name = use.role(axis)
        order = orders.of(side)
        return sides.get(side, 3), order.index(name) if name in order else 0

    return tuple(sorted(stored, key=place))


def _modes(program: Program, axes: tuple[str, ...], uses: list[Use], orders: Orders, segments: int) -> tuple[Modes | None, str]:
    """`axes`, in this storage order, merged as far as every use allows; or what is wrong with the order."""
    size = extents(program)

    def whole(axis: str) -> bool:
        """Does every use walk all of it? A run of an axis is narrower than what is stored: positions behind it would not line up."""
        return all(size.get(u.role(axis)[1], size[axis]) == size[axis] for u in uses)

    groups: list[list[str]] = []
    for axis in axes:
        if groups and whole(axis) and all(orders.follows(u.role(groups[-1][-1]), u.role(axis)) for u in uses):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    modes = tuple(tuple(g) for g in groups)
    for use in uses:
        problem = _misfit(program, modes, use, orders, segments)
        if problem:
            return None, problem
    return modes, ""


def _misfit(program: Program, modes: Modes, use: Use, orders: Orders, segments: int) -> str:
    """Why modes do not serve a use; "" where they do."""
    if use.kind == "load":
        return ""
    sides: dict[str, list[tuple[str, ...]]] = {"row": [], "col": [], "k": []}
    for mode in modes:
        side = use.role(mode[0])[0]
        sides.get("k" if side[0] == "k" else side, []).append(mode)
    for side, word in (("row", "rows"), ("k", "contracted axes")):
        if len(sides[side]) > 1:
            return f"{listed([a for m in sides[side] for a in m])} are not adjacent in one order, as {word} must be"
    if use.kind == "result":
        return "" if len(modes) <= 1 else f"{listed([a for m in modes for a in m])} stand in another order than the kernel's"
    if modes:
        last = use.role(modes[-1][-1])
        if last[0] == "lane":
            return f"the lane axis {modes[-1][-1]} is stored innermost"
        if last[0] == "pair":
            last = use.role(modes[-2][-1])
        if not orders.innermost(last):
            return f"{modes[-1][-1]} is stored innermost, but is not the kernel's innermost axis"
    columns = sorted(sides["col"], key=lambda m: orders.col.index(use.role(m[0])[1]))
    inner = tuple(a for mode in columns[1:] for a in mode)
    size = fixed_product(program, inner)
    if inner and (size is None or size % 8 or size * segments > MAX_COLUMNS):
        apart = listed([a for m in columns for a in m])
        return f"{apart} do not stand together, and {listed(inner)} is no fixed multiple of 8 that fits a tile"
    return ""


def granule(program: Program, plan: Plan) -> int:
    """What the inner modes of all TMA uses ask of the columns in a tile."""
    gemm = plan.gemm
    orders = Orders(gemm.rows, gemm.cols, tuple(p.over for p in gemm.products))
    sizes = [8]
    for tensor, uses in _uses(plan).items():
        modes = plan.layout(tensor).modes
        for use in uses:
            if use.kind in ("b", "tile"):
                columns = sorted((m for m in modes if use.role(m[0])[0] == "col"), key=lambda m: orders.col.index(use.role(m[0])[1]))
                sizes.append(prod(extents(program)[a] or 1 for mode in columns[1:] for a in mode))
    return lcm(*sizes)


def _copied_bytes(program: Program, x: Layout) -> float:
    size = nominal(program)
    dtype = next(t.dtype for t in (*program.inputs, *(o.tensor for o in program.outputs)) if t.name == x.tensor)
    return prod(size[a] for a in _axes(program, x.tensor)) * dtype.bits / 8


def _no_layout(plan: Plan, uses: dict[str, list[Use]], placement: Placement) -> Diagnostic:
    """The tensor that no order serves."""
    program, gemm = plan.program, plan.gemm
    for orders in _orders(plan, placement):
        for tensor, found in uses.items():
            if _best(program, tensor, found, orders, len(gemm.accumulators)) is None:
                _, why = _modes(program, _axes(program, tensor), found, orders, len(gemm.accumulators))
                span = next(t.span for t in (*program.inputs, *(o.tensor for o in program.outputs)) if t.name == tensor)
                return Diagnostic(
                    "C0602",
                    f"`{tensor}` is used in ways that no single storage order serves: {why}",
                    span,
                    "this tensor",
                    notes=("the host may rearrange a tensor before a kernel, but a kernel sees it in one order",),
                    help="pass it twice, under two names",
                )
    raise AssertionError("no order of the columns serves the statistics")
