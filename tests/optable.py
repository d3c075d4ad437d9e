"""Applications of every op of the table, for tests: argument types, attributes, samples inside the op's domain and off its kinks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from coda_lang.ir.graph import Lit
from coda_lang.ir.types import BF16, BOOL, F32, I32, I64, Axis, DType, Ty
from coda_lang.ops import TABLE, Op
from coda_lang.ops.builder import Builder, EvalBuilder, Frame, Value, apply_op, unbroadcast

AXES = tuple(Axis(*a) for a in (("m",), ("n",), ("p",), ("k",), ("lane", 2), ("head", 5), ("qh", 2), ("kh", 3), ("b", 2)))
EXTENTS = {"m": 3, "n": 4, "p": 4, "k": 5, "lane": 2, "head": 5, "qh": 2, "kh": 3, "b": 2}
FRAME = Frame(tuple(EXTENTS), EXTENTS)


def ty(dtype: DType, axes: str = "") -> Ty:
    return Ty(dtype, tuple(a.name for a in AXES if a.name in axes.split()))


@dataclass(frozen=True)
class Case:
    """One application: types of the arguments (a number stands for a literal) and attributes."""

    op: str
    args: tuple[Ty | float, ...]
    attrs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        attrs = "".join(f" {k}={v}" for k, v in self.attrs.items())
        return f"{self.op}({', '.join(map(str, self.args))}){attrs}"

    @property
    def entry(self) -> Op:
        return TABLE[self.op]


def _map_cases(op: Op) -> list[Case]:
    """Same axes, axes that broadcast either way, and a literal where there are several numbers."""
    kinds = {"bool": BOOL, "int": I32}
    dtypes = [kinds.get(op.read(i), F32) for i in range(len(op.args))]
    attrs = {"dtype": "bf16"} if op.attrs else {}
    cases = [Case(op.name, tuple(ty(d, "m n") for d in dtypes), attrs)]
    if len(op.args) > 1:
        cases.append(Case(op.name, tuple(ty(d, "m" if i % 2 else "n") for i, d in enumerate(dtypes)), attrs))
    if len(op.args) > 1 and "f32" in op.reads + tuple("f32" for r in op.reads if r == "number"):
        for literal in range(len(op.args)):
            if op.read(literal) in ("f32", "number"):
                lo, hi = op.domain.intervals[min(literal, len(op.domain.intervals) - 1)]
                args = [ty(d, "m n") for d in dtypes]
                cases.append(Case(op.name, tuple(round(4 * lo + 4 * hi + 2) / 8 if i == literal else a for i, a in enumerate(args)), attrs))
    return cases


def cases() -> list[Case]:
    """At least one application of every op."""
    out = [c for op in TABLE.values() if op.kind == "map" for c in _map_cases(op)]
    x, v = ty(F32, "m n"), ty(F32, "m lane n")
    for op in TABLE.values():
        if op.kind == "reduce" and op.attrs == ("axes",):
            out += [Case(op.name, (x,), {"axes": over}) for over in (("n",), ("m",), ("m", "n"))]
    out += [
        Case("gather", (x, ty(I64, "m")), {"axis": "n"}),
        Case("gather", (ty(F32, "n"), ty(I32, "m")), {"axis": "n"}),
        Case("gather", (x, ty(I32, "lane")), {"axis": "n"}),
        Case("contract", (ty(BF16, "m k"), ty(BF16, "n k")), {"axes": ("k",), "batch": ()}),
        Case("contract", (ty(BF16, "m k lane"), ty(BF16, "k n lane")), {"axes": ("k", "lane"), "batch": ()}),
        Case("contract", (ty(BF16, "m k b"), ty(BF16, "k n b head")), {"axes": ("k",), "batch": ("b",)}),
        Case("lane", (v,), {"axis": "lane", "index": 0}),
        Case("lane", (v,), {"axis": "lane", "index": 1}),
        Case("pack", (x, x), {"axis": "lane"}),
        Case("pack", (ty(F32, "m"), ty(F32, "n")), {"axis": "lane"}),
        Case("pack", (x, 0.5), {"axis": "lane"}),
        Case("run", (ty(F32, "m head"),), {"axis": "head", "start": 0, "to": "qh"}),
        Case("run", (ty(F32, "m head"),), {"axis": "head", "start": 2, "to": "kh"}),
        Case("join", (ty(F32, "m qh"), ty(F32, "n kh")), {"axis": "head", "of": ("qh", "kh")}),
        Case("join", (ty(F32, "m qh"), ty(F32, "m kh")), {"axis": "head", "of": ("qh", "kh")}),
        Case("rename", (x,), {"axis": "n", "to": "p"}),
        Case("expand", (ty(F32, "m"),), {"axes": ("n",)}),
        Case("expand", (ty(F32),), {"axes": ("n", "m")}),
        Case("index", (), {"axis": "n"}),
        Case("size", (), {"axes": ("n", "k")}),
        Case("stop_gradient", (x,)),
    ]
    return out


def sample(case: Case, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Tensors laid out in FRAME (numbers stay numbers), inside the domain, every kink and tie at least 0.02 away."""
    g = torch.Generator().manual_seed(seed)
    dom = case.entry.domain
    out: list[Any] = []
    for i, a in enumerate(case.args):
        if not isinstance(a, Ty):
            out.append(a)
            continue
        shape = [EXTENTS[x] if x in a.axes else 1 for x in FRAME.order]
        if a.dtype.kind == "bool":
            out.append(torch.rand(shape, generator=g) < 0.5)
        elif a.dtype.kind == "int":
            out.append(torch.randint(0, 4, shape, generator=g).to(torch.int64 if a.dtype is I64 else torch.int32))
        else:
            lo, hi = dom.intervals[min(i, len(dom.intervals) - 1)]
            x = lo + (hi - lo) * torch.rand(shape, generator=g, dtype=torch.float64)
            for kink in dom.kinks:
                near = (x - kink).abs() < 0.02
                x = torch.where(near, x + 0.05, x)
            out.append(x.to(dtype))
    return out


def operands(b: Builder, case: Case, tensors: list[Any]) -> list[Value]:
    """The samples as values of an EvalBuilder."""
    assert isinstance(b, EvalBuilder)
    return [b.tensor(t, a) if isinstance(a, Ty) else b.value(Lit(float(a), F32)) for a, t in zip(case.args, tensors)]


def forward(case: Case, tensors: list[Any], exact: bool = True) -> Any:
    """The oracle's value, laid out in FRAME; differentiable by torch."""
    real = torch.float64 if exact else torch.float32
    full = [t if isinstance(t, torch.Tensor) else torch.full([1] * FRAME.rank, t, dtype=real) for t in tensors]
    return apply_op(case.op, full, dict(case.attrs), FRAME, torch, exact)


def out_type(case: Case) -> Ty:
    return case.entry.infer(tuple(a if isinstance(a, Ty) else Ty(F32) for a in case.args), case.attrs, AXES)


def cotangents(case: Case, tensors: list[Any], g: Any, vjp: Any = None) -> list[Any]:
    """What the derivative rule gives for each argument, unbroadcast, as tensors laid out in FRAME; None where there is none."""
    b = EvalBuilder(AXES, FRAME, torch)
    args = operands(b, case, tensors)
    y = b.tensor(forward(case, tensors), out_type(case))
    rule = vjp or case.entry.vjp
    if rule is None:
        return [None] * len(args)
    found = rule(b, b.tensor(g, Ty(F32, out_type(case).axes)), y, *args, **case.attrs)
    assert len(found) == len(args), "one cotangent an argument"
    return [None if d is None or a.is_literal else unbroadcast(b, b.value(d), a.ty.axes).tensor for d, a in zip(found, args)]


def differentiable(case: Case) -> list[int]:
    """Positions of the float tensors, where torch knows a derivative of the result."""
    if out_type(case).dtype.kind != "float":
        return []
    return [i for i, a in enumerate(case.args) if isinstance(a, Ty) and a.dtype.kind == "float"]
