"""Kernels' stand-ins where there is no GPU: they refuse what a kernel could not take and compute what it would, by the twin."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import torch

from coda_lang.backend_cute import arguments, compile, configs, host, layout, row_configs, torch_fns, twin
from coda_lang.backend_cute import spec as s
from coda_lang.backend_cute.binding import bind
from coda_lang.backend_cute.function import fixed
from coda_lang.backend_cute.selfcheck import error


class StandIns:
    """Executables that refuse what a kernel could not take, then compute what it would."""

    arch = "sm_90a"
    whole = False
    wholes = {}

    def __init__(self, functions, extents, fixed=None, loops=()):
        self.functions, self.extents, self.fixed, self.calls = functions, extents, fixed or {}, []
        self.chunked = {name: loop for loop in loops for name in loop.kernels}

    def config(self, launch, extents, device):
        return configs.choose(launch, extents)

    def extended(self, made):
        more = copy.copy(self)
        more.functions = {**self.functions, **made.functions}
        return more

    def executables(self, wanted, device):
        return [self.executable(kernel, config) for kernel, config in wanted]

    def executable(self, kernel, config):
        parts = s.members(kernel)

        def call(*args):
            tensors, integers = args[: len(kernel.tensors)], args[len(kernel.tensors) :]
            assert len(tensors) == len(kernel.tensors) and len(integers) == len(kernel.extents)
            known = dict(zip(kernel.extents, integers))
            self.calls.append(kernel.name)
            for part in parts:
                one(part, tensors[: len(part.tensors)], tuple(known[e] for e in part.extents))
                tensors = tensors[len(part.tensors) :]

        def one(kernel, tensors, integers):
            packed = layout.packed_tensors(kernel)
            given, empty, extents = {}, {}, dict(self.extents)
            if kernel.name in self.chunked:
                extents |= chunk_extents(self.chunked[kernel.name], kernel, tensors, integers, extents)
            assert integers == tuple(extents[e] for e in kernel.extents)
            for record, t in zip(kernel.tensors, tensors, strict=True):
                assert t.dtype == torch_fns.DTYPES[record.dtype] and t.data_ptr() % layout.alignment(record) == 0 and t.numel() > 0
                assert not t.is_neg(), "memory has the other sign"
                if record.role == "work" or isinstance(kernel, s.Finish):
                    assert t.is_contiguous()
                elif record.modes:
                    assert t.dim() == len(record.modes)
                    verdict = layout.judge(record, record.name in packed, tuple(t.shape), t.stride())
                    assert verdict.strides == t.stride() or record.part and verdict.strides, (record.name, verdict)
                    if 0 in twin.mode_shape(record, extents) and record.role != "work":  # an empty contraction arrives as zeros
                        assert not t.any()
                        if record.part is None:
                            empty[record.name] = t.new_empty(twin.mode_shape(record, extents))
                else:
                    assert t.shape == (1,)
                fits(t, *compile.dims(kernel, record, self.fixed))
                given[record.name] = t if record.part is None else whole_of(record, t, extents)
            if isinstance(kernel, s.Gemm) and row_configs.of_rows(kernel) and 0 in size_of(kernel, self.extents):
                extents = dict(self.extents)  # what has no columns is not touched
                shapes = {r.name: twin.mode_shape(r, extents) for r in kernel.tensors if r.role != "work"}
                given = {name: t.new_empty(shapes[name]) if 0 in shapes.get(name, ()) else t for name, t in given.items()}
            before, given = given, given | empty
            for sink in getattr(kernel, "sinks", ()):  # partial results are assigned, not written into
                if isinstance(sink, (s.RowReduce, s.ColReduce)):
                    want = configs.partial_shape(kernel, config, sink, *(max(size, 1) for size in size_of(kernel, extents)))
                    assert given[sink.work].shape == want or 0 in size_of(kernel, extents) and isinstance(sink, s.ColReduce)
            twin.launch(kernel, self.functions, given, extents, {}, torch_fns.Written(), config)
            for name, t in before.items():
                if given[name] is not t and name not in empty:
                    t.copy_(given[name])

        return call


def whole_of(record, t, extents):
    """The tensor of which a kernel sees a part: zeros but for that."""
    whole = t.new_zeros(twin.mode_shape(replace(record, part=None), extents))
    start, length = record.part.span(whole.shape[record.part.mode])
    whole.narrow(record.part.mode, start, length).copy_(t.narrow(record.part.mode, 0, length))
    return whole


def chunk_extents(loop, kernel, tensors, integers, extents):
    """The extents of one chunk, as the launch says them: integers, and the sizes of tensors along the axis."""
    known = {**extents, **dict(zip(kernel.extents, integers, strict=True))}
    for record, t in zip(kernel.tensors, tensors, strict=True):
        for mode, size in zip(record.modes, t.shape):
            if record.role != "work" and loop.axis in mode:
                known[loop.axis] = size // math.prod(known[a] for a in mode if a != loop.axis)
                assert 0 < known[loop.axis] <= loop.size
    assert known.get(loop.start, 0) % loop.size == 0
    assert known.get(loop.whole, extents[loop.axis]) == extents[loop.axis]
    return known


def fits(t, shape, strides, divisor):
    """Assert what the compiled object checks of an argument: rank, static extents and strides, what other strides are multiples of."""
    assert t.dim() == len(shape) == len(strides), (t.shape, shape)
    for size, stride, want, step in zip(t.shape, t.stride(), shape, strides):
        assert want in (None, size), (t.shape, shape)
        assert stride == step if step is not None else stride % divisor == 0, (t.stride(), strides)


def size_of(gemm, extents):
    return twin.product(gemm.rows, extents), twin.product(gemm.cols, extents)


def poisoning(shape, strides, dtype, device):
    """`host.allocate` whose buffers start as NaN, so that what nobody writes shows."""
    t = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    whole = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,))
    whole.fill_(math.nan if dtype.is_floating_point else 77)
    return t


def run(case, *tensors):
    """Plan and run a call with stand-ins; the outputs and the plan."""
    device = arguments.check(case.program, tensors)
    binding = bind(case.program, arguments.shapes(tensors))
    plan = host.plan(case.program, binding, tensors, device, StandIns(case.functions, binding.extents, fixed(case.program)))
    return plan.run(tensors), plan


def check(case, tensors, got, plain=None):
    want = case.reference(torch_fns.Written(), *(plain or tensors))
    for g, w, out in zip(got, want, case.program.outputs, strict=True):
        assert g.dtype == torch_fns.DTYPES[out.dtype] and g.is_contiguous()
        assert error(g.reshape(w.shape), w) < 5e-3, out.name
