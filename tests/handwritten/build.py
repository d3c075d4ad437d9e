"""Building blocks of programs written by hand: `Case`, short forms of records, random inputs."""


from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from coda_lang.backend_cute import spec as s
from coda_lang.backend_cute.function import Function
from coda_lang.backend_cute.torch_fns import DTYPES


@dataclass(frozen=True)
class Case:
    """A program, its scalar functions by name, and its reference `(f, *tensors) -> tuple`."""

    program: s.Program
    functions: dict[str, Callable[..., tuple]]
    reference: Callable[..., tuple]

    def stored(self, f, *tensors) -> tuple:
        """The reference's results in the types of the outputs, as an emitted reference returns them."""
        results = zip(self.reference(f, *tensors), self.program.outputs, strict=True)
        return tuple(r.to(DTYPES[o.dtype]) if f.rounds else r for r, o in results)

    def function(self, **functions) -> Function:
        """The callable, with some scalar functions replaced."""
        return Function(self.program, {**self.functions, **functions}, self.stored)


def program(name, inputs, outputs, kernels, requires=(), **extents) -> s.Program:
    """`x: bf16[m, d]` written as `"x bf16 m d"`; every axis not in `extents` is free."""

    def argument(text: str) -> s.Argument:
        const = text.startswith("const ")
        arg, dtype, *axes = text.removeprefix("const ").split()
        return s.Argument(arg, dtype, tuple(axes), const)

    ins, outs = tuple(map(argument, inputs)), tuple(map(argument, outputs))
    names = dict.fromkeys(a for arg in ins + outs for a in arg.axes)
    return s.Program(name, ins, outs, tuple((a, extents.get(a)) for a in names), tuple(kernels), tuple(requires))


def tensor(text: str, role: str = "in") -> s.Tensor:
    """`"x bf16 m d"`; merged axes of one mode are joined by a dot."""
    name, dtype, *modes = text.split()
    return s.Tensor(name, dtype, tuple(tuple(m.split(".")) for m in modes), role)


ROW, COL = s.Index("row"), s.Index("col")
A = s.Matrix("x", (0,), (1,))
W = s.Matrix("w", (0,), (1,))
Y = s.Matrix("y", (0,), (1,))
NO_LANES = (s.Product(A, (W,)),)


def inputs(prog: s.Program, sizes: dict[str, int], seed: int = 0, device: str = "cpu"):
    """Random inputs of declared shape; integers lie inside the smallest axis."""
    gen = torch.Generator().manual_seed(seed)
    sizes = {**sizes, "hd": 8 * sizes.get("head", 5)}
    extents = {name: sizes.get(name, 5) if fixed is None else fixed for name, fixed in prog.extents}
    made = []
    for a in prog.inputs:
        shape = [extents[x] for x in a.axes]
        if a.dtype in ("i32", "i64"):
            made.append(torch.randint(0, max(min(extents.values()), 1), shape, generator=gen).to(DTYPES[a.dtype]).to(device))
        else:
            made.append(torch.randn(shape, generator=gen).to(DTYPES[a.dtype]).to(device))
    return made
