"""Executes the records of `spec` on torch tensors: what `reference_planned` means.

In: a `spec.Program`, the emitted scalar functions and tensors of the declared shapes. Out: the outputs by name. It sees what the
kernels see (views, segments, K products, ports through index maps, sinks with windows, groups, partials of the kernels' shapes,
finishers), accumulates in f32 and rounds where the kernels store; with `torch_fns.Exact` it computes in float64 and rounds nothing,
so that a wrong record or a wrong line shows at 1e-12 instead of hiding under rounding. Works on any device.
Non-goals: speed, and the order in which a kernel sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from . import configs, loops, spec, torch_fns
from .row_configs import of_rows
from .spec import mode_shape, product

IDENTITY = {"sum": 0.0, "max": -math.inf, "min": math.inf, "amax": 0.0, "lse": -math.inf, "moments": 0.0, "only": math.nan}

Tensors = dict[str, torch.Tensor]
Extents = Mapping[str, int]


def run(
    program: spec.Program,
    functions: Mapping[str, Callable[..., tuple]],
    inputs: Mapping[str, torch.Tensor],
    *,
    f: Any = None,
    config: Mapping[str, spec.Config] | spec.Config | None = None,
    extents: Extents | None = None,
) -> dict[str, torch.Tensor]:
    """All outputs of `program`, by name, in their declared shapes; float64 where `f` is `torch_fns.Exact`.

    `inputs` have the declared axes in storage order. `config` decides the partition of partial results: one for all Gemms, or
    by kernel name; without it the default for the shape. `extents` where the inputs do not have every axis.
    """
    f = f or torch_fns.Written()
    extents = bind(program, inputs) if extents is None else extents
    tensors: Tensors = dict(inputs)
    axes = {a.name: a.axes for a in program.inputs + program.outputs + program.temps}
    for output, given in program.same:
        exact = not f.rounds and inputs[given].is_floating_point()
        tensors[output] = inputs[given].to(f.dtype) if exact else inputs[given]


    def one(kernel: spec.Kernel, tensors: Tensors, extents: Extents) -> None:
        launch(kernel, functions, tensors, extents, axes, f, config.get(kernel.name) if isinstance(config, Mapping) else config)

    for item in loops.items(program):
        if isinstance(item, loops.Round):
            _round(program, item, tensors, extents, f, one)
        else:
            one(item, tensors, extents)
    return {o.name: tensors[o.name] for o in program.outputs}


def _round(
    program: spec.Program,
    item: loops.Round,
    tensors: Tensors,
    extents: Extents,
    f: Any,
    one: Callable[[spec.Kernel, Tensors, Extents], None],
) -> None:
    """A loop over chunks: `tensors` gains what its kernels write."""
    loop, along = item.loop, loops.along(program, item.loop)
    declared = {a.name: a for a in (*program.outputs, *program.temps)}

    def zeros(name: str) -> torch.Tensor:
        dtype, shape = torch_fns.DTYPES[declared[name].dtype], [extents[a] for a in declared[name].axes]
        device = next((t.device for t in tensors.values()), torch.device("cpu"))
        return torch.zeros(shape, dtype=f.dtype if dtype.is_floating_point and not f.rounds else dtype, device=device)

    written = [t.name for k in item.kernels for t in k.tensors if t.name in along and t.name not in tensors]
    tensors.update({name: zeros(name) for name in written})
    tensors.update({before: zeros(before) for before, _ in loop.carried})
    for start, length in loops.chunks(loop, extents):
        seen = {n: t.narrow(along[n], start, length) if n in along else t for n, t in tensors.items() if n not in written}
        for kernel in item.kernels:
            one(kernel, seen, loops.inside(loop, extents, start, length))
        for name in written:
            tensors[name].narrow(along[name], start, length).copy_(seen[name])
        tensors.update({before: seen[after] for before, after in loop.carried})
    tensors.update({after: tensors[before] for before, after in loop.carried})


def launch(
    kernel: spec.Kernel,
    functions: Mapping[str, Callable[..., tuple]],
    tensors: Tensors,
    extents: Extents,
    axes: Mapping[str, tuple[str, ...]],
    f: Any,
    config: spec.Config | None = None,
) -> None:
    """Run one kernel over `tensors`, which gains what the kernel writes and is not there yet.

    `axes` names the dims of the program's own tensors, which may be in another order than a kernel's modes; of other tensors the
    dims are the modes.
    """
    if not isinstance(kernel, spec.Finish):
        config = config or configs.choose(kernel, extents)
    for part in spec.members(kernel):
        run = _Run(part, functions, tensors, extents, axes, f)
        run.finish(part) if isinstance(part, spec.Finish) else run.gemm(part, config)


def bind(program: spec.Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The extent of every axis, from inputs of declared rank."""
    extents = {name: size for name, size in program.extents if size is not None}
    for argument in program.inputs:
        extents.update(zip(argument.axes, inputs[argument.name].shape, strict=True))
    for one, other in program.equal * 2:  # renames may follow each other
        for known, name in ((one, other), (other, one)):
            if known in extents:
                extents.setdefault(name, extents[known])
    return extents


def matrix_view(tensor: torch.Tensor, matrix: spec.Matrix) -> torch.Tensor:
    """The matrix's elements as a view: dims of its rows, its columns, then the packed lane if there is one."""
    packed = (tensor.dim() - 1,) if matrix.pack > 1 else ()
    view = tensor.permute(*matrix.rows, *matrix.cols, *packed, *(mode for mode, _ in matrix.at))
    for _, index in reversed(matrix.at):
        view = view.select(-1, index)
    return view


def combine(kind: str, partials: torch.Tensor) -> torch.Tensor:
    """Reduce over parts: [parts, length], with planes outside where the kind has them, gives [length]."""
    if kind == "only":
        return partials.squeeze(0)
    if kind == "lse":
        top, total = partials
        peak = top.amax(0)
        scale = torch.where(top == peak, torch.ones_like(top), torch.exp(top - peak))
        return torch.where(torch.isinf(peak), peak, peak + torch.log((total * scale).sum(0)))
    if kind == "moments":
        return _moments(partials)
    return reduce(kind, partials, 0)


def _moments(partials: torch.Tensor) -> torch.Tensor:
    """Σ (x − mean)² from the parts' counts, anchors, offsets and own such sums; distances are taken from the first part's anchor."""
    count, anchor, offset, rest = partials
    total = count.sum(0)
    first = anchor.gather(0, (count > 0).int().argmax(0, keepdim=True))
    mean = (anchor - first) + offset
    mean = torch.where(count > 0, mean, torch.zeros_like(mean))
    middle = (count * mean).sum(0) / total.clamp(min=1)
    return (rest + count * torch.square(mean - middle)).sum(0)


def reduce(kind: str, values: torch.Tensor, dim: int) -> torch.Tensor:
    """One reduction over a dim that is not empty; NaN propagates."""
    if kind == "lse":
        return torch.logsumexp(values, dim)
    if kind == "sum":
        return values.sum(dim)
    if kind == "moments":
        return torch.square(values - values.mean(dim, keepdim=True)).sum(dim)
    return {"max": torch.amax, "min": torch.amin, "amax": lambda x, d: torch.amax(x.abs(), d)}[kind](values, dim)


class _Run:
    """One Gemm or finisher over `tensors`, which gains its outputs and work tensors."""

    def __init__(self, kernel: spec.Gemm | spec.Finish, functions: Any, tensors: Tensors, extents: Extents, axes: Any, f: Any) -> None:
        self.functions, self.tensors, self.extents, self.axes, self.f = functions, tensors, extents, axes, f
        self.dtype = f.dtype
        self.records = {t.name: t for t in kernel.tensors}
        self.device = next((t.device for t in tensors.values()), torch.device("cpu"))
        self.size = (0, 0)

    def new(self, shape: tuple[int, ...], dtype: str = "f32") -> torch.Tensor:
        """A tensor for results, NaN where it can be, so that an element nobody writes shows."""
        real = torch_fns.DTYPES[dtype]
        real = self.dtype if real.is_floating_point and not self.f.rounds else real
        return torch.full(shape, math.nan if real.is_floating_point else 0, dtype=real, device=self.device)

    def wide(self, t: torch.Tensor) -> torch.Tensor:
        return t.to(self.dtype) if t.is_floating_point() else t

    def view(self, name: str) -> torch.Tensor:
        """A tensor with one dim per mode, or its part; a view of it where that can be."""
        record, part = self.records[name], self.records[name].part
        tensor, order = self.tensors[name], self.order(record)
        whole = (tensor.permute(order) if order else tensor).reshape(mode_shape(replace(record, part=None), self.extents))
        return whole.narrow(part.mode, *part.span(whole.shape[part.mode])) if part else whole

    def order(self, record: spec.Tensor) -> tuple[int, ...]:
        """Where the axes of the modes stand among the dims that the program declares; () where they are the same."""
        declared, inner = self.axes.get(record.name, ()), tuple(a for mode in record.modes for a in mode)
        return tuple(declared.index(a) for a in inner) if declared != inner and declared else ()

    def target(self, name: str) -> torch.Tensor:
        """A result with one dim per mode, made where it is not there yet."""
        record = self.records[name]
        shape = mode_shape(record, self.extents)
        if name not in self.tensors:
            result, order = self.new(shape, record.dtype), self.order(record)
            if name in self.axes:
                result = result.reshape([self.extents[a] for mode in record.modes for a in mode])
                result = result.permute([order.index(i) for i in range(len(order))]) if order else result
            self.tensors[name] = result
        view = self.view(name)
        assert view.data_ptr() == self.tensors[name].data_ptr(), "a result is written through a view"
        return view

    def matrix(self, matrix: spec.Matrix) -> torch.Tensor:
        """(rows, columns), and the packed lane last if there is one."""
        view = matrix_view(self.view(matrix.tensor), matrix)
        shape, split = view.shape, len(matrix.rows)
        cols = shape[split : split + len(matrix.cols)]
        packed = (matrix.pack,) if matrix.pack > 1 else ()
        return view.reshape(math.prod(shape[:split]), math.prod(cols), *packed)

    def index(self, index: spec.Index) -> torch.Tensor:
        """A coordinate for every position: (m, 1), (1, n) or a single element."""
        if index.of == "fixed":
            return torch.tensor(index.offset, device=self.device)
        m, n = self.size
        i = torch.arange(m, device=self.device)[:, None] if index.of == "row" else torch.arange(n, device=self.device)[None, :]
        i = (i - index.offset).div(product(index.div, self.extents), rounding_mode="floor")
        return i.remainder(product(index.mod, self.extents)) if index.mod else i

    def ports(self, ports: tuple[spec.Port, ...]) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        for port in ports:
            if isinstance(port, spec.Tile):
                tile = self.wide(self.matrix(port.matrix))
                values.extend(tile.unbind(-1) if port.matrix.pack > 1 else (tile,))
            elif isinstance(port, spec.Iota):
                values.append(self.index(port.index).to(torch.int32))
            elif isinstance(port, spec.Extent):
                values.append(torch.tensor(product(port.sizes, self.extents), dtype=torch.int32, device=self.device))
            else:
                values.append(self.wide(self.load(port)))
        return values

    def load(self, port: spec.Load) -> torch.Tensor:
        """Elements by coordinate; where a coordinate leaves the tensor (columns outside a window) the value is 0."""
        tensor = self.view(port.tensor)
        if not port.index:
            return tensor.reshape(())
        coords = [self.index(i) for i in port.index]
        inside = torch.ones((), dtype=torch.bool, device=self.device)
        safe = []
        for c, size in zip(coords, tensor.shape, strict=True):
            inside = inside & (c >= 0) & (c < size)
            safe.append(c.clamp(0, max(size - 1, 0)))
        if tensor.numel() == 0:
            return torch.zeros((), dtype=tensor.dtype, device=self.device)
        return torch.where(inside, tensor[tuple(safe)], torch.zeros((), dtype=tensor.dtype, device=self.device))

    def full(self, value: Any) -> torch.Tensor:
        """A result of a scalar function at every position."""
        return torch.as_tensor(value, device=self.device).expand(self.size)

    def gemm(self, kernel: spec.Gemm, config: spec.Config | None) -> None:
        assert config is not None
        self.size = _, n = product(kernel.rows, self.extents), product(kernel.cols, self.extents)
        accumulators: list[torch.Tensor] = []
        for s in range(kernel.segments if kernel.products else 0):
            acc = torch.zeros(self.size, dtype=self.dtype, device=self.device)
            for p in kernel.products:
                acc = acc + self.wide(self.matrix(p.a)) @ self.wide(self.matrix(p.b[s])).T
            accumulators.append(acc)
        if n == 0 and of_rows(kernel):
            return self.no_columns(kernel, config)
        ports = self.ports(kernel.ports)
        statistics: list[torch.Tensor] = []
        results: tuple = ()
        for phase in kernel.phases:
            results = tuple(self.functions[phase.fn](self.f, *accumulators, *ports, *statistics))
            for group, value in zip(phase.groups, results, strict=bool(phase.groups)):
                size = group.size or n
                grouped = self.full(value).unflatten(1, (n // size, size))
                statistics.append(reduce(group.kind, grouped, 2).repeat_interleave(size, 1))
        values = [self.full(value) for value in results]
        for sink in kernel.sinks:
            values = values[self.sink(kernel, sink, values, config) :]
        if values:
            raise ValueError(f"{kernel.name}: {len(values)} results of {kernel.phases[-1].fn} have no sink")

    def no_columns(self, kernel: spec.Gemm, config: spec.Config) -> None:
        """A row kernel without columns: its statistics are those of nothing, and what there is one of for a row is all it gives."""
        m = self.size[0]
        statistics = [torch.full((m, 1), IDENTITY[g.kind], dtype=self.dtype, device=self.device) for p in kernel.phases for g in p.groups]
        zero = torch.zeros((1, 1), dtype=self.dtype, device=self.device)
        ports: list[torch.Tensor] = []
        self.size = (m, 1)
        for port in kernel.ports:
            by_column = isinstance(port, spec.Load) and any(i.of == "col" for i in port.index)
            ports += [zero] * port.matrix.pack if isinstance(port, spec.Tile) else [zero] if by_column else self.ports((port,))
        values = [self.full(v) for v in self.functions[kernel.phases[-1].fn](self.f, *ports, *statistics)]
        for sink in kernel.sinks:
            once = isinstance(sink, spec.Point) and sink.once
            self.size = (m, 1 if once else 0)
            taken = [v if once else v[:, :0] for v in values]
            if isinstance(sink, spec.Point):
                taken[1] = torch.full_like(taken[0], once, dtype=torch.bool)
            values = values[self.sink(kernel, sink, taken, config) :]

    def sink(self, kernel: spec.Gemm, sink: spec.Sink, values: list[torch.Tensor], config: spec.Config) -> int:
        """Consume the first values; returns how many."""
        if isinstance(sink, spec.Store):
            target = matrix_view(self.target(sink.matrix.tensor), sink.matrix)
            taken = [self.windowed(v, sink.window) for v in values[: sink.matrix.pack]]
            value = torch.stack(taken, -1) if sink.matrix.pack > 1 else taken[0]
            target.copy_(value.reshape(target.shape))
            return sink.matrix.pack
        if isinstance(sink, spec.Point):
            value, chosen = values[:2]
            target = self.target(sink.tensor)
            where = tuple(self.index(i).expand(self.size)[chosen] for i in sink.index)
            taken = value[chosen].to(target.dtype)
            if where:
                target[where] = taken
            elif taken.numel():
                target.fill_(taken[0])
            return 2
        self.tensors[sink.work] = self.partials(kernel, sink, self.wide(values[0]), config)
        return 1

    @staticmethod
    def windowed(value: torch.Tensor, window: spec.Window | None) -> torch.Tensor:
        return value if window is None else value.narrow(1, window.start, window.size)

    def partials(self, kernel: spec.Gemm, sink: spec.RowReduce | spec.ColReduce, value: torch.Tensor, config: spec.Config) -> torch.Tensor:
        """What the kernel leaves in the work tensor; one part of identities where there is nothing to reduce."""
        m, n = self.size
        shape = configs.partial_shape(kernel, config, sink, max(m, 1), max(n, 1))
        identity = math.nan if sink.kind == "moments" else IDENTITY[sink.kind]
        outside = torch.zeros_like(value, dtype=torch.bool)
        if isinstance(sink, spec.RowReduce):
            if sink.window:
                column = torch.arange(n, device=self.device)
                outside |= (column < sink.window.start) | (column >= sink.window.start + sink.window.size)
                value = torch.where(outside, torch.full_like(value, identity), value)
            value, outside, part = value.T, outside.T, configs.part_columns(kernel, config, n)
        else:
            part = configs.warpgroup_rows(config)
        parts = shape[-2]  # value is (reduced, kept)
        more = (0, 0, 0, parts * part - value.shape[0])
        assert parts * part >= value.shape[0], "padding would cut what is there"
        value = torch.nn.functional.pad(value, more, value=identity).unflatten(0, (parts, part))
        if sink.kind == "moments":
            inside = ~torch.nn.functional.pad(outside, more, value=True).unflatten(0, (parts, part))
            return self.moments(value, inside)
        if sink.kind != "lse":
            return reduce(sink.kind, value, 1)
        top = value.amax(1)
        peak = top[:, None]
        at_infinity = ((value == peak) & (peak > 0)).to(value.dtype)
        return torch.stack((top, torch.where(torch.isinf(peak), at_infinity, torch.exp(value - peak)).sum(1)))

    @staticmethod
    def moments(value: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """[4, parts, kept] of [parts, reduced, kept]: count, anchor, offset of the mean from that, Σ (x − mean)²."""
        count = inside.sum(1).to(value.dtype)
        anchor = value.gather(1, inside.int().argmax(1, keepdim=True))
        apart = torch.where(inside, value - anchor, torch.zeros_like(value))
        offset = apart.sum(1) / count.clamp(min=1)
        rest = torch.where(inside, torch.square(apart - offset[:, None]), torch.zeros_like(value)).sum(1)
        empty = count == 0
        return torch.stack((count, *(torch.where(empty, torch.zeros_like(v), v) for v in (anchor[:, 0], offset, rest))))

    def finish(self, kernel: spec.Finish) -> None:
        length = product(kernel.length, self.extents)
        self.size = (length, 1)
        partials = []
        for p in kernel.partials:
            leading = spec.planes(p.kind)
            work = self.wide(self.tensors[p.work])
            parts = work.numel() // (math.prod(leading) * length) if length else 1
            if parts:
                partials.append(combine(p.kind, work.reshape(*leading, parts, length))[:, None])
            else:  # a reduction over an empty axis
                partials.append(torch.full(self.size, IDENTITY[p.kind], dtype=self.dtype, device=self.device))
        results = self.functions[kernel.fn](self.f, *partials, *self.ports(kernel.ports))
        for name, value in zip(kernel.outputs, results, strict=True):
            self.target(name).view(-1).copy_(self.full(value).reshape(-1))
