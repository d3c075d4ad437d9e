"""Types of the tensor IR: a dtype and named axes.

A value's axes are a set; the tuple here is in the program's axis order, so equal sets compare equal.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """A scalar type. `bits` is its storage width."""

    name: str
    bits: int
    kind: str  # "float" | "int" | "bool"

    def __str__(self) -> str:
        return self.name


BF16, F16, F32 = DType("bf16", 16, "float"), DType("f16", 16, "float"), DType("f32", 32, "float")
I32, I64, BOOL = DType("i32", 32, "int"), DType("i64", 64, "int"), DType("bool", 8, "bool")
DTYPES = {d.name: d for d in (BF16, F16, F32, I32, I64, BOOL)}


@dataclass(frozen=True)
class Axis:
    """A named axis of one program; `extent` None is free at run time."""

    name: str
    extent: int | None = None


@dataclass(frozen=True)
class Ty:
    """dtype and the names of the axes, in program order."""

    dtype: DType
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.axes)}]"
