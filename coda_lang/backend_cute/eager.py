"""What eager PyTorch computes in a program's own precision: the baseline that errors of kernels are measured by.

In: a function, CUDA or CPU tensors. Out: its outputs, each product of 16-bit operands by torch.mm on the tensor cores with an f32 result,
all else as written in f32; and the bound of a kernel's error. Tensor cores truncate each sum, so the error of an f32 result grows with
the depth; torch.mm has shorter chains where it splits the depth over blocks.
Non-goals: being the reference, which is independent of what the hardware does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch

from . import spec, torch_fns

FACTOR, FLOOR = 2.0, 1e-6
FEW = 4  # positions of an axis: an error made of fewer roundings than this is a matter of luck
TRUNCATION = 2.0**-28  # of the result for each step of the depth: measured are 2^-30, and twice that where a result is squared


class Eager(torch_fns.Written):
    """As `Written`, but for products on a GPU."""

    def contract(self, x: Any, y: Any, dims: tuple[int, ...]) -> torch.Tensor:
        """Sum of x * y over `dims`; operands are 16-bit values, held in f32."""
        a, b = self._float(x), self._float(y)
        half = next((t for t in (torch.bfloat16, torch.float16) if all(torch.equal(v.to(t).to(v.dtype), v) for v in (a, b))), None)
        rows = [d for d in range(a.dim()) if d not in dims and a.shape[d] > 1]
        cols = [d for d in range(a.dim()) if d not in dims and b.shape[d] > 1]
        batched = bool(set(rows) & set(cols)) or any(a.shape[d] != b.shape[d] for d in dims)
        if not a.is_cuda or not a.numel() or not b.numel() or half is None or batched:
            return super().contract(x, y, dims)
        shape = [1 if d in dims else max(a.shape[d], b.shape[d]) for d in range(a.dim())]
        left, right = _matrix(a.to(half), rows, dims), _matrix(b.to(half), cols, dims)
        out = torch.mm(left, right.mT, out_dtype=torch.float32).reshape([a.shape[d] for d in rows] + [b.shape[d] for d in cols])
        order = sorted(range(len(rows) + len(cols)), key=[*rows, *cols].__getitem__)
        return out.permute(order).reshape(shape)


def _matrix(t: torch.Tensor, kept: list[int], over: tuple[int, ...]) -> torch.Tensor:
    """The operand as a matrix [kept, over]; its other dims are 1."""
    rest = [d for d in range(t.dim()) if d not in kept and d not in over]
    moved = t.permute([*kept, *over, *rest])
    return moved.reshape(_size(t, kept), _size(t, over))


def _size(t: torch.Tensor, dims: Iterable[int]) -> int:
    size = 1
    for d in dims:
        size *= t.shape[d]
    return size


def bound(unavoidable: float, program: spec.Program, extents: Mapping[str, int], device: str) -> float:
    """The relative error an output may have where eager PyTorch has `unavoidable`: twice that, and what a GPU's chains of sums add.

    A program of several kernels may round elsewhere than eager PyTorch (a law moved it). The errors of the two are then two draws, and
    where few roundings make them one may be lucky: there the bound is doubled.
    """
    few = min((extents[axis] for axis, size in program.extents if size is None), default=FEW) < FEW
    luck = 2.0 if few and sum(len(spec.gemms(k)) for k in program.kernels) > 1 else 1.0
    chains = TRUNCATION * _depth(program, extents) if device.startswith("cuda") else 0.0
    return luck * FACTOR * unavoidable + FLOOR + chains


def _depth(program: spec.Program, extents: Mapping[str, int]) -> int:
    """Of the program's deepest product."""
    depths = [0]
    for gemm in (g for k in program.kernels for g in spec.gemms(k)):
        modes = {t.name: t.modes for t in gemm.tensors}
        depths.append(sum(prod(extents[axis] for mode in p.a.cols for axis in modes[p.a.tensor][mode]) for p in gemm.products))
    return max(depths)
