"""`Matrix` records as cute tensors: which part of an argument is a matrix, and its TMA atoms.

In: a device tensor whose modes are those of its `Tensor` record. Out: a rank-2 tensor ((rows), (columns)), each side nested innermost
first where the matrix has several modes there. Nothing is copied; a pinned lane is an offset. Non-goals: layouts in shared memory.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..spec import Matrix, Tensor

DTYPES = {"bf16": BFloat16, "f16": Float16, "f32": Float32, "i32": Int32, "i64": Int64, "bool": Boolean}


def columns_contiguous(record: Tensor, matrix: Matrix) -> bool:
    """Whether neighbours along a row are neighbours in memory (K-major for an operand, N-major for a result)."""
    last = len(record.modes) - (2 if matrix.pack > 1 else 1)
    return last not in matrix.rows


def matrix_view(tensor: cute.Tensor, matrix: Matrix, align: int = 16) -> cute.Tensor:
    """The matrix inside `tensor`, its first element at a multiple of `align` bytes. A packed pair becomes one Int32 element."""
    pointer, strides = tensor.iterator, list(tensor.stride)
    for mode, index in matrix.at:
        pointer = pointer + index * strides[mode]
    if matrix.pack == 2:
        pointer = cute.recast_ptr(pointer.align(16), dtype=Int32)
        strides = [_halved(s) for s in strides]

    def side(modes: tuple[int, ...]):
        # Outermost extents are made dynamic: a fixed one that a tile does not divide gives TMA boxes that the hardware refuses.
        if not modes:  # a matrix of one row or one column; the stride is never used, but TMA wants a legal one
            return Int32(1), cute.assume(Int64(1 << 20), divby=128 // pointer.dtype.width)
        shape = tuple(tensor.shape[i] for i in reversed(modes))
        shape = (*shape[:-1], Int32(shape[-1]))
        stride = tuple(strides[i] for i in reversed(modes))
        return (shape[0], stride[0]) if len(modes) == 1 else (shape, stride)

    rows, cols = side(matrix.rows), side(matrix.cols)
    return cute.make_tensor(pointer.align(align), cute.make_layout((rows[0], cols[0]), stride=(rows[1], cols[1])))


def _halved(stride):
    """A stride counted in pairs. The contiguous mode is the pair itself, so every other stride is even."""
    return stride // 2 if isinstance(stride, int) else cute.assume(stride // 2, divby=4)


def check_box(view: cute.Tensor, tile: tuple[int, int], name: str) -> None:
    """A TMA box must not straddle an inner mode: raises ValueError while tracing where it would."""
    for side, extent in zip(view.shape, tile):
        inner = side
        if isinstance(side, tuple):
            for inner in side[:-1]:
                if not isinstance(inner, int):
                    raise ValueError(f"{name}: an inner mode of a split axis has a run-time extent")
                if extent % inner and inner % extent:
                    raise ValueError(f"{name}: {extent} columns or rows of a tile do not fit a split axis of {inner}")
                extent = max(extent // inner, 1)


def load_atom(view: cute.Tensor, smem_layout, tile: tuple[int, int], multicast: int, name: str):
    """(copy atom, coordinate tensor) of a TMA load of `tile`, of which each of `multicast` blocks issues its share."""
    check_box(view, tile, name)
    op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    atom, coords = cpasync.make_tiled_tma_atom(op, view, smem_layout, tile, num_multicast=multicast)
    return atom, coords


def store_atom(view: cute.Tensor, smem_layout, tile: tuple[int, int], name: str):
    """(copy atom, coordinate tensor) of a TMA store of `tile`."""
    check_box(view, tile, name)
    atom, coords = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), view, smem_layout, tile)
    return atom, coords


def swizzled(pointer: cute.Pointer, layout, dtype) -> cute.Tensor:
    """The tensor of a composed (swizzled) layout at `pointer`, with the swizzle moved to the pointer."""
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def element_offset(tensor: cute.Tensor, coords) -> Int64:
    """Offset of an element, in 64 bits: tensors may be larger than 2³¹ elements."""
    offset = Int64(0)
    strides = tensor.stride
    for i, c in enumerate(coords):
        offset = offset + Int64(c) * Int64(strides[i])
    return offset


def element(tensor: cute.Tensor, coords) -> cute.Tensor:
    """A one-element tensor at `coords`."""
    pointer = tensor.iterator if not coords else tensor.iterator + element_offset(tensor, coords)
    return cute.make_tensor(pointer, cute.make_layout(1))


def matrix_element(view: cute.Tensor, row, col) -> cute.Tensor:
    """A one-element tensor at (row, col) of a matrix, whatever its sides are made of."""
    return cute.make_tensor(view.iterator + view.layout((Int64(row), Int64(col))), cute.make_layout(1))


@cute.jit
def store_if(condition, target: cute.Tensor, value):
    """target[0] = value where `condition` holds."""
    if condition:
        target[0] = value


def to_f32_or_int(value, dtype):
    """A loaded element as a scalar function sees it: floats as f32, bool as bool, integers as they are."""
    if dtype in (BFloat16, Float16):
        return value.to(Float32)
    if dtype.width == 8:
        return value != 0
    return value
