"""Judges whether a kernel can use a tensor's strides as they are, and chooses strides where it cannot.

In: a `spec.Tensor`, the shape of its modes, strides in elements, the address. Out: `Verdict`: usable strides, or why not; `pitched`.
Rule: the last mode has stride 1; of a tensor that its kernel touches by elements alone (`loose`) that is all. Of any other, strides but the
last are multiples of 16 bytes and not 0, and so is the address; of a packed tensor the pair is contiguous and the mode before it has
stride 2. A mode of extent 1 may have any stride: it is never used, so it is replaced by a legal one. Pure arithmetic: needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import spec
from .configs import BYTES

ALIGNMENT = 16  # bytes: what TMA asks of addresses and pitches
MAX_PITCH = 1 << 40  # bytes: TMA's limit

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """`strides` to hand to the kernel, or `reason` why a copy is needed."""

    strides: Shape = ()
    reason: str = ""


def packed_tensors(kernel: spec.Gemm | spec.Finish) -> frozenset[str]:
    """The tensors whose last mode travels as one element."""
    if isinstance(kernel, spec.Finish):
        return frozenset()
    matrices = [s.matrix for s in kernel.sinks if isinstance(s, spec.Store)]
    matrices += [p.matrix for p in kernel.ports if isinstance(p, spec.Tile)]
    matrices += [m for product in kernel.products for m in (product.a, *product.b)]
    return frozenset(m.tensor for m in matrices if m.pack > 1)


def judge(record: spec.Tensor, packed: bool, shape: Shape, strides: Shape, address: int = 0) -> Verdict:
    """May a kernel read or write this as it is? Strides are per mode, in elements."""
    if 0 in shape:
        return Verdict(pitched(record, packed, shape))
    width = BYTES[record.dtype]
    if address % alignment(record):
        return Verdict(reason=f"its address is not a multiple of {alignment(record)} bytes")
    chosen = list(strides)
    for i in reversed(range(len(shape))):
        inner = len(shape) - 1 - i
        exact = 1 if inner == 0 else shape[-1] if packed and inner == 1 else None
        if shape[i] == 1:
            chosen[i] = exact or pitched(record, packed, shape)[i]
        elif exact is not None and strides[i] != exact:
            return Verdict(reason=f"the stride of {_mode(record, i)} is {strides[i]}, not {exact}")
        elif record.loose:
            continue
        elif exact is None and (strides[i] == 0 or strides[i] * width % ALIGNMENT):
            return Verdict(reason=f"the stride of {_mode(record, i)} is {strides[i] * width} bytes, not a multiple of {ALIGNMENT} above 0")
        elif strides[i] * width >= MAX_PITCH:
            return Verdict(reason=f"the stride of {_mode(record, i)} is {strides[i] * width} bytes, more than a tile load can step")
    return Verdict(tuple(chosen))


def alignment(record: spec.Tensor) -> int:
    """What a tensor's address is a multiple of, in bytes."""
    return BYTES[record.dtype] if record.loose else ALIGNMENT


def contiguous(shape: Shape) -> Shape:
    """The strides of a tensor without gaps."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


def shared(dtype: str, shape: Shape, uses: Sequence[tuple[tuple[str, ...], ...]]) -> Shape:
    """Strides of a fresh tensor that several kernels see through modes of their own: pitches are padded where all have a boundary."""
    unit = max(ALIGNMENT // BYTES[dtype], 1)
    boundaries = [{sum(map(len, modes[: i + 1])) for i in range(len(modes))} for modes in uses]
    everywhere = set.intersection(*boundaries)
    strides: list[int] = []
    for i in reversed(range(len(shape))):
        step = strides[-1] * max(shape[i + 1], 1) if strides else 1
        strides.append(-(-step // unit) * unit if strides and i + 1 in everywhere else step)
    return tuple(reversed(strides))


def pitched(record: spec.Tensor, packed: bool, shape: Shape) -> Shape:
    """Strides of a fresh buffer that a kernel can use: contiguous but for padding of each pitch to 16 bytes."""
    unit = max(ALIGNMENT // BYTES[record.dtype], 1)
    strides: list[int] = []
    for i in reversed(range(len(shape))):
        inner = len(shape) - 1 - i
        step = 1 if inner == 0 else strides[-1] * max(shape[i + 1], 1)
        strides.append(step if inner == 0 or (packed and inner == 1) else -(-step // unit) * unit)
    return tuple(reversed(strides))


def _mode(record: spec.Tensor, i: int) -> str:
    axes = record.modes[i]
    return f"axis {axes[0]!r}" if len(axes) == 1 else f"the axes {', '.join(axes)}"
