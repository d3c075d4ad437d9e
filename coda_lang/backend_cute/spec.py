"""What one kernel is, as plain data: the contract between generated text, the device code, the host and the CPU twin.

A generated module contains these records and, beside them, one scalar function per epilogue phase. The fixed
mainloop (`gemm_sm90`), the finisher (`finish`), the launcher (`host`) and the CPU twin (`twin`) all read the same
records, so a tile shape, an axis or a dtype is stated once. Needs neither torch nor cutlass.

Geometry
    The accumulator of a `Gemm` has rows `m` and, for each N-segment, columns `n`. A *lane* axis never appears as
    accumulator columns: each lane is an N-segment of its own (its own block of the B tile, loaded through its own
    TMA box), so at one position (m, n) a thread holds one accumulator value *per segment*. Interleaved weights, halves and
    separate tensors differ only in the strides of the B views.

Map kernels
    A `Gemm` with `products == ()` has no accumulator: one pass over memory. Its geometry is `rows` x `cols` (m and n are their
    products; one segment; all their free axes are in `extents`), its values come through ports alone. Phases, groups and sinks
    are those of any Gemm. Where a program has a single axis, `rows == ()`: m is 1, and nothing but `Load`s and reductions occurs.

Row kernels
    A map kernel with a group of size 0: a statistic over all columns. A block owns whole rows and walks their columns once for each
    phase, so what is made of the statistic needs no other kernel. Its other groups have size 0 too, and it has no windows. A `Point` that
    is `once` is written where there are no columns, too.

Scalar functions
    phase(f, *accumulators, *ports, *statistics) -> tuple of f32 scalars. `f` is the function library: `device_fns` inside a
    kernel, `torch_fns` on the CPU. Accumulators come in segment order, ports in the order of `Gemm.ports` (a packed
    `Tile` contributes `pack` values), statistics of all earlier phases in order. Float ports arrive as f32, integers in
    their own type. The last phase returns the values that `Gemm.sinks` consume, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from os.path import commonprefix

Size = int | str  # a fixed extent, or the name of a free axis

PLANES = {"lse": 2, "moments": 4}  # of a partial result, where its kind needs more than one number


def planes(kind: str) -> tuple[int, ...]:
    """The leading dims of a work tensor of this kind: () where one number is a partial result."""
    return (PLANES[kind],) if kind in PLANES else ()


def product(sizes: tuple[Size, ...], extents: Mapping[str, int]) -> int:
    """The product of sizes, fixed ones and axes by name."""
    return prod(s if isinstance(s, int) else extents[s] for s in sizes)


@dataclass(frozen=True)
class Part:
    """The `index`-th of `of` runs of a tensor's mode, as long as each other but the last, in whole units; the last ones may be empty."""

    mode: int
    index: int
    of: int
    unit: int

    def span(self, extent: int) -> tuple[int, int]:
        """First position and length in a mode of this extent."""
        length = -(-extent // (self.of * self.unit)) * self.unit
        start = min(self.index * length, extent)
        return start, min(length, extent - start)


@dataclass(frozen=True)
class Tensor:
    """A tensor as the device sees it: one *mode* per group of axes that the host merges into one.

    `modes[i]` names the axes of mode i, outermost first; the last mode has stride 1 and every other stride is a multiple of
    16 bytes (the host guarantees both, by a copy if need be). A scalar has modes == () and is passed as one element.
    `role` is "in", "out", "work" (f32 partials that the launcher allocates) or "temp": an intermediate of a program of several kernels,
    one of `Program.temps`, allocated by the launcher. Exactly one kernel writes it (through several sinks where it has lanes), before
    any reads it. Kernels may merge its axes differently, so the launcher gives it strides for which every kernel's modes are views:
    each axis's stride is that of the axis inside it times its extent, and, where *every* kernel has a mode boundary, rounded up to
    16 bytes. The compiler chose an axis order for which no kernel needs a copy.
    `loose`: the kernel touches it element by element (`Load`, `Point`, what a finisher writes), never as a tile, nor, in a row kernel, in
    runs along columns. Then its address is a multiple of its element alone, and only the last stride is fixed: 1.
    `part`: the kernel reads this part of the tensor and no more.
    """

    name: str
    dtype: str  # "bf16" "f16" "f32" "i32" "i64" "bool"
    modes: tuple[tuple[str, ...], ...]
    role: str = "in"
    loose: bool = False
    part: Part | None = None


def mode_shape(tensor: Tensor, extents: Mapping[str, int]) -> tuple[int, ...]:
    """The extents of a tensor's modes, of the part that a kernel sees."""
    part = tensor.part
    return tuple(part.span(n)[1] if part and part.mode == i else n for i, n in enumerate(product(m, extents) for m in tensor.modes))


@dataclass(frozen=True)
class Matrix:
    """A matrix inside a tensor: which modes make its row and column index (outermost first), which lanes are pinned.

    `pack=2`: the tensor's last mode is a lane of two 16-bit elements that travel as one 32-bit element; that mode appears
    neither in `cols` nor in `at`.
    """

    tensor: str
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    at: tuple[tuple[int, int], ...] = ()  # (mode, index)
    pack: int = 1


@dataclass(frozen=True)
class Index:
    """A coordinate made from the accumulator's position: `((i - offset) // prod(div)) % prod(mod)`.

    `of` is "row", "col" or "fixed" (then the coordinate is `offset` itself). Empty `mod` means no remainder is taken.
    """

    of: str
    div: tuple[Size, ...] = ()
    mod: tuple[Size, ...] = ()
    offset: int = 0


# --- ports: what the epilogue reads ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A row vector, column vector, scalar or any subset of the axes: one `Index` per mode of the tensor."""

    name: str
    tensor: str
    index: tuple[Index, ...]


@dataclass(frozen=True)
class Tile:
    """A matrix of the accumulator's geometry, loaded by TMA."""

    name: str
    matrix: Matrix


@dataclass(frozen=True)
class Iota:
    """The position along an axis, as i32."""

    name: str
    index: Index


@dataclass(frozen=True)
class Extent:
    """The extent of an axis (a product of sizes), as i32."""

    name: str
    sizes: tuple[Size, ...]


Port = Load | Tile | Iota | Extent


# --- sinks: where the epilogue's values go -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Columns [start, start + size) of the accumulator: a run of a split axis."""

    start: int
    size: int


@dataclass(frozen=True)
class Store:
    """A tile store; consumes `matrix.pack` values. With a window, column `start` of the accumulator is column 0 here."""

    matrix: Matrix
    window: Window | None = None


@dataclass(frozen=True)
class RowReduce:
    """One partial per (row, N-tile) into work[n_tiles, m]; consumes one value. Kinds of several numbers have planes outside that:
    "lse" [2, n_tiles, m] (max, sum), "moments" [4, n_tiles, m] (count, anchor, offset of the mean from it, Σ (x − mean)²).

    kind: "sum" "max" "min" "amax" "lse" "moments". Columns outside the matrix or the window do not take part.
    """

    kind: str
    work: str
    window: Window | None = None


@dataclass(frozen=True)
class ColReduce:
    """One partial per (M-tile, column) into work[m_tiles, n], with planes as `RowReduce`; consumes one value."""

    kind: str
    work: str


@dataclass(frozen=True)
class Point:
    """A single element: where the second value (bool) holds, the first is written to tensor[index]; consumes two values.

    `once`: the first value is the same at all columns of a row, the second holds at the first column.
    """

    tensor: str
    index: tuple[Index, ...]
    once: bool = False


Sink = Store | RowReduce | ColReduce | Point


@dataclass(frozen=True)
class Group:
    """A statistic over `size` consecutive columns of a segment, 0 for all of them (of a row kernel), ready for the next
    phase; kind as in `RowReduce`, each one value: of "lse" the logsumexp, of "moments" Σ (x − mean)²."""

    kind: str
    size: int


@dataclass(frozen=True)
class Phase:
    """One scalar function; `groups` reduces its results, one per value. The last phase has no groups: its results go to the sinks."""

    fn: str
    groups: tuple[Group, ...] = ()


# --- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """One K-segment: acc[s] += A @ B[s]ᵀ for every N-segment s. A is (m, k), B[s] is (n, k), each in any major order."""

    a: Matrix
    b: tuple[Matrix, ...]


@dataclass(frozen=True)
class Gemm:
    """One mainloop with its epilogue; without products a map kernel.

    Device arguments: `tensors` in order, then one i32 per name in `extents`.
    """

    name: str
    tensors: tuple[Tensor, ...]
    products: tuple[Product, ...]
    phases: tuple[Phase, ...]
    ports: tuple[Port, ...] = ()
    sinks: tuple[Sink, ...] = ()
    extents: tuple[str, ...] = ()  # free axes whose extents the epilogue reads
    rows: tuple[Size, ...] = ()  # the sizes whose product is m, and per segment n: for the host and for messages
    cols: tuple[Size, ...] = ()
    granule: int = 8  # columns per segment in a tile must be a multiple of this (groups, fixed inner axes)

    @property
    def segments(self) -> int:
        """Number of N-segments, the accumulator values at one position; 1 for a map kernel, which has no accumulator."""
        return len(self.products[0].b) if self.products else 1


@dataclass(frozen=True)
class Together:
    """Several `Gemm`s in one launch (a grouped GEMM), each with products, none reading what another writes.

    They share the tile configuration and nothing else: blocks walk the tiles of the first, then those of the second, and so on.
    Device arguments: the tensors of each Gemm in order, then one i32 per name in `extents`.
    """

    name: str
    gemms: tuple[Gemm, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of all Gemms one after the other: a tensor that two of them read stands here twice, perhaps with other modes."""
        return tuple(t for gemm in self.gemms for t in gemm.tensors)

    @property
    def extents(self) -> tuple[str, ...]:
        """Free axes whose extents any epilogue reads, each once."""
        return tuple(dict.fromkeys(name for gemm in self.gemms for name in gemm.extents))


@dataclass(frozen=True)
class Partial:
    """A work tensor [parts, length] f32, [planes, parts, length] where its kind has several, that a finisher reduces over parts, in fixed
    order.

    kind: a reduction kind, or "only" (parts == 1: read as it is).
    """

    work: str
    kind: str


@dataclass(frozen=True)
class Finish:
    """The second stage: reduce partials, apply a scalar function, store one value per position.

    fn(f, *partials, *ports) -> one value per output. Ports are `Load`/`Iota`/`Extent` whose `Index.of` is "row" for the
    position. `length` is the sizes whose product is the number of positions (() for one scalar). Each output is a tensor with
    `length` elements, contiguous. Device arguments: `tensors` in order, then one i32 per name in `extents`.
    """

    name: str
    tensors: tuple[Tensor, ...]
    partials: tuple[Partial, ...]
    fn: str
    outputs: tuple[str, ...]
    length: tuple[Size, ...]
    ports: tuple[Port, ...] = ()
    extents: tuple[str, ...] = ()


Launch = Gemm | Together  # what has a tile configuration
Kernel = Launch | Finish


def joined(gemms: tuple[Gemm, ...]) -> Launch:
    """One launch of these Gemms; of a single one, that itself."""
    first, *rest = (gemm.name for gemm in gemms)
    prefix = commonprefix([first, *rest]).rpartition("_")[0] + "_"
    return Together("+".join([first, *(name.removeprefix(prefix) for name in rest)]), gemms) if rest else gemms[0]


def members(kernel: Kernel) -> tuple[Gemm | Finish, ...]:
    """What one launch computes: the kernel itself, or the Gemms that run together, in order."""
    return kernel.gemms if isinstance(kernel, Together) else (kernel,)


def gemms(kernel: Kernel) -> tuple[Gemm, ...]:
    """The Gemms of one launch; none of a finisher."""
    return tuple(k for k in members(kernel) if isinstance(k, Gemm))


@dataclass(frozen=True)
class Argument:
    """A tensor of the program's signature, as the user declared it. `axes` in storage order; () is a scalar."""

    name: str
    dtype: str
    axes: tuple[str, ...]
    const: bool = False


@dataclass(frozen=True)
class Require:
    """A shape condition, as the user or the compiler states it: `text` is a Python expression over extents by name."""

    text: str
    reason: str = ""


@dataclass(frozen=True)
class Loop:
    """Kernels that are launched once for each chunk of `size` positions of a free axis, one chunk after the other.

    Temporaries in `local` exist for one chunk. Of every other tensor along the axis a chunk's kernels see a part; the axis's extent is
    the chunk's. `carried` are temporaries (what a chunk adds to, what it leaves): one place in memory, zeros before the first chunk;
    kernels after the loop read it under its second name. `start` and `whole` are names among kernels' `extents`, for the chunk's first
    position and the axis's extent.
    """

    axis: str
    size: int
    kernels: tuple[str, ...]
    local: tuple[str, ...]
    carried: tuple[tuple[str, str], ...]
    start: str
    whole: str


@dataclass(frozen=True)
class Program:
    """A whole program: signature, shape contract, kernels in launch order.

    `temps` are tensors between kernels, axes in storage order. `same`: outputs that are an input as it is, (output, input); no kernel
    writes them. `extents` has every axis of every tensor; a kernel may need an axis that only other kernels' tensors have.
    """

    name: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    extents: tuple[tuple[str, int | None], ...]  # every axis, None where free
    kernels: tuple[Kernel, ...]
    requires: tuple[Require, ...] = ()
    source: str = ""  # path of the .coda file, for messages
    nominal: tuple[tuple[str, int], ...] = ()
    equal: tuple[tuple[str, str], ...] = ()  # axes of one extent under two names (`rename`); the second may stand in no input
    temps: tuple[Argument, ...] = ()
    same: tuple[tuple[str, str], ...] = ()
    loops: tuple[Loop, ...] = ()
    into: tuple[tuple[str, str], ...] = ()  # outputs that are written over an input which their kernel adds to them: (output, input)


def launches(program: Program) -> tuple[Launch, ...]:
    """A program's kernels without its finishers."""
    return tuple(k for k in program.kernels if isinstance(k, (Gemm, Together)))


def built(program: Program) -> tuple[Kernel, ...]:
    """What is compiled ahead of time: the kernels, and Gemms that run together also alone, for calls that want only some of them (no call
    wants some parts of a product)."""
    whole = (members(k) if all(t.part is None for t in k.tensors) else () for k in program.kernels)
    return tuple(dict.fromkeys(k for kernel, parts in zip(program.kernels, whole) for k in (kernel, *parts)))


@dataclass(frozen=True)
class Config:
    """A tile configuration of the mainloop. `tile_n` counts the columns of all segments together.

    `step` is the columns of one epilogue step, 0 for as many as fit; reductions combine step by step, so it is part of their bits.
    """

    tile_m: int = 128
    tile_n: int = 128
    pingpong: bool = True
    cluster_m: int = 1
    cluster_n: int = 1
    step: int = 0

    @property
    def key(self) -> str:
        """A short name for files and tables: `128x192_pp_c2x1`."""
        kind, step = "pp" if self.pingpong else "coop", f"_s{self.step}" if self.step else ""
        return f"{self.tile_m}x{self.tile_n}_{kind}_c{self.cluster_m}x{self.cluster_n}{step}"
