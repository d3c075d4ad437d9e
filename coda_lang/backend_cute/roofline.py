"""What kernels move and multiply at given extents, and the least time that takes on a card: the roofline.

In: `spec` records, extents, tile configurations, a card's peaks. Out: `Count`s, floors in milliseconds. Bytes are those of every tensor
once a kernel: of a tensor of which it touches some lanes only, those; of partial results, their shape under the configuration. FLOPs are
the products' alone, two a multiplication with its addition: tensor cores do no others. Pure arithmetic, without torch or a GPU.
Non-goals: predicting a time (`configs.cycles`), measuring one (`coda_lang.benchmark`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from . import configs, loops, spec
from .spec import mode_shape, product

Extents = Mapping[str, int]
Pins = frozenset[tuple[int, int]]  # modes with the one position in them that is touched


@dataclass(frozen=True)
class Peak:
    """A card at its best: `name` is how torch calls it, or the beginning of that; `copied` is what a copy reached where it was measured."""

    name: str
    bytes_per_second: float
    flops_per_second: float  # of the tensor cores, 16-bit operands, f32 sums, dense, at full clock
    source: str
    copied: float | None = None

    def floor_ms(self, moved: float, flops: float) -> float:
        """The least milliseconds for so many bytes and FLOPs, if both go on at once."""
        return max(moved / self.bytes_per_second, flops / self.flops_per_second) * 1e3

    def bound(self, moved: float, flops: float) -> str:
        """What limits: "memory" or "tensor cores"."""
        return "tensor cores" if flops / self.flops_per_second >= moved / self.bytes_per_second else "memory"


SHEET = "NVIDIA's data sheet; its figure with sparsity halved"
PEAKS = (  # a longer name goes before a shorter one that it begins with
    Peak("NVIDIA H200 NVL", 4.8e12, 835e12, SHEET),
    Peak("NVIDIA H200", 4.8e12, 989e12, SHEET, copied=4.26e12),
    Peak("NVIDIA H100 80GB HBM3", 3.35e12, 989e12, SHEET),
    Peak("NVIDIA H100 NVL", 3.9e12, 835e12, SHEET),
    Peak("NVIDIA H100 PCIe", 2.0e12, 756e12, SHEET),
)


def peak(device: str) -> Peak | None:
    """The peaks of a card by torch's name of it; None for one that is not listed: a floor of another card would be a wrong number."""
    return next((p for p in PEAKS if device.startswith(p.name)), None)


@dataclass(frozen=True)
class Count:
    """One kernel, all its `times` launches together; `config` is "" for a finisher."""

    kernel: str
    config: str
    bytes: int
    flops: int
    times: int = 1


def of_program(
    program: spec.Program, extents: Extents, chosen: Mapping[str, spec.Config] | None = None, sms: int = 132
) -> tuple[Count, ...]:
    """Every kernel in launch order. `extents` has the free axes; kernels that `chosen` does not name take their default configuration."""
    known, work = complete(program, extents), dict[str, int]()

    def one(kernel: spec.Kernel, sizes: Extents) -> Count:
        config = None if isinstance(kernel, spec.Finish) else (chosen or {}).get(kernel.name) or configs.choose(kernel, sizes, sms)
        work.update(partials(kernel, sizes, config))
        return of_kernel(kernel, sizes, config, work)

    found = []
    for item in loops.items(program):
        if not isinstance(item, loops.Round):
            found.append(one(item, known))
            continue
        parts = [loops.inside(item.loop, known, start, length) for start, length in loops.chunks(item.loop, known)]
        for kernel in item.kernels:
            counts = [one(kernel, sizes) for sizes in parts]
            key = counts[0].config if counts else ""
            found.append(Count(kernel.name, key, sum(c.bytes for c in counts), sum(c.flops for c in counts), len(counts)))
    return tuple(found)


def of_kernel(kernel: spec.Kernel, extents: Extents, config: spec.Config | None, work: Mapping[str, int] | None = None) -> Count:
    """One launch of a kernel. `work` has the bytes of the partial results that other kernels left."""
    sizes = {**(work or {}), **partials(kernel, extents, config)}
    moved: dict[tuple[str, spec.Part | None], int] = {}
    for member in spec.members(kernel):
        for t in member.tensors:
            touched = _touched(member, t, extents) if t.role != "work" else sizes.get(t.name, 0)
            key = t.name, t.part
            moved[key] = max(moved.get(key, 0), touched)  # two Gemms of a launch that read one tensor find it in the L2 cache
    return Count(kernel.name, config.key if config else "", sum(moved.values()), multiplies(kernel, extents))


def multiplies(kernel: spec.Kernel, extents: Extents) -> int:
    """Floating-point operations of a kernel's products."""
    return sum(2 * m * n * k * gemm.segments for gemm in spec.gemms(kernel) for m, n, k in products(gemm, extents))


def products(gemm: spec.Gemm, extents: Extents) -> list[tuple[int, int, int]]:
    """Rows, columns of one operand and depth of each product."""
    records = {t.name: mode_shape(t, extents) for t in gemm.tensors}

    def extent(matrix: spec.Matrix, modes: tuple[int, ...]) -> int:
        return prod(records[matrix.tensor][i] for i in modes)

    return [(extent(p.a, p.a.rows), extent(p.b[0], p.b[0].rows), extent(p.a, p.a.cols)) for p in gemm.products]


def partials(kernel: spec.Kernel, extents: Extents, config: spec.Config | None) -> dict[str, int]:
    """Bytes of the partial results that a launch leaves, by the name of their tensor."""
    found = {}
    for gemm in spec.gemms(kernel) if config is not None else ():
        m, n = product(gemm.rows, extents), product(gemm.cols, extents)
        for sink in gemm.sinks:
            if isinstance(sink, (spec.RowReduce, spec.ColReduce)) and config is not None:
                found[sink.work] = prod(configs.partial_shape(gemm, config, sink, m, n)) * configs.BYTES["f32"]
    return found


def complete(program: spec.Program, extents: Extents) -> dict[str, int]:
    """The extents of all axes: those given, fixed ones, and those that are equal to others."""
    known = {**{a: n for a, n in program.extents if n is not None}, **extents}
    return known | {other: known[one] for one, other in program.equal if one in known}


def _touched(kernel: spec.Gemm | spec.Finish, record: spec.Tensor, extents: Extents) -> int:
    """Bytes of a tensor that a kernel reads or writes: all but lanes that nothing names."""
    shape, pins = mode_shape(record, extents), set(_pins(kernel, record.name))
    share = Fraction(1)
    if pins and all(pins):
        share = min(sum((Fraction(1, max(prod(shape[mode] for mode, _ in pin), 1)) for pin in pins), Fraction()), share)
    return int(prod(shape) * configs.BYTES[record.dtype] * share)


def _pins(kernel: spec.Gemm | spec.Finish, tensor: str) -> Iterator[Pins]:
    """Where each access of a tensor keeps to one position of a mode."""
    matrices: list[spec.Matrix] = []
    if isinstance(kernel, spec.Gemm):
        matrices += [x for p in kernel.products for x in (p.a, *p.b)]
        matrices += [s.matrix for s in kernel.sinks if isinstance(s, spec.Store)]
    matrices += [p.matrix for p in kernel.ports if isinstance(p, spec.Tile)]
    yield from (frozenset(m.at) for m in matrices if m.tensor == tensor)
    points = [*kernel.ports, *(kernel.sinks if isinstance(kernel, spec.Gemm) else ())]
    for x in points:
        if isinstance(x, (spec.Load, spec.Point)) and x.tensor == tensor:
            yield frozenset((mode, i.offset) for mode, i in enumerate(x.index) if i.of == "fixed")
    if isinstance(kernel, spec.Finish) and tensor in kernel.outputs:
        yield frozenset()
