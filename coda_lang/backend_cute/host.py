"""Plans and makes calls of kernels: views where strides allow, copies where they do not, allocations, launches.

In: a `spec.Program`, tensors, where executables come from. Out: a `Plan`, everything about calls with these shapes, strides, dtypes and
alignments decided once; running it allocates outputs and launches on the current stream: no host synchronisation, no memory but from
torch's caching allocator, so it can be captured in a CUDA graph.
Nothing is launched over empty rows or columns: outputs are empty, reductions give their identity. Over an empty contraction, operands
of zeros stand in. Works on any device; that executables fit it is `arguments.check`'s and their provider's business.
Non-goals: what a call may look like (`binding`, `arguments`), what strides a kernel can use (`layout`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from . import configs, donate, layout, loops, schedules, spec
from .binding import Binding
from .host_loops import Looping, Pool
from .host_work import Working
from .plans import Plan, Step
from .spec import mode_shape, product
from .torch_fns import DTYPES


class Objects(Protocol):
    """Where executables come from: compiled on demand, or built ahead of time; then kernels are there `whole` and none can be cut down.

    Optional: `parts(launch, extents, device)`, the schedule of a launch (`schedules`); then also `functions` and `wholes`, and
    `extended(made)`: the same with the functions and wholes of a program whose launches are split.
    """

    whole: bool

    def config(self, launch: spec.Launch, extents: Mapping[str, int], device: torch.device) -> spec.Config:
        """The tile configuration to use at these extents."""

    def executables(self, wanted: Sequence[tuple[spec.Kernel, spec.Config | None]], device: torch.device) -> Sequence[Callable[..., None]]:
        """Callables on device tensors and extents, in the order that `spec` states."""


# What torch.compile's own code calls, where this torch has it: a buffer on the current device of (shape, strides, dtype), in a third of
# torch.empty_strided's time; a view with (shape, strides) that autograd does not see, in half of that of as_strided.
_QUICK = getattr(torch._C._dynamo, "guards", None)
_EMPTY = {kind: getattr(_QUICK, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}
_view = getattr(_QUICK, "_reinterpret_tensor", torch.as_strided)


def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Every buffer of a call comes from here, its device the current one; tests put a poisoning one in its place."""
    empty = _EMPTY.get(device.type)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device) if empty is None else empty(shape, strides, dtype)


def _fresh(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return allocate(shape, strides, dtype, device)  # whichever it is when the call is made


@contextlib.contextmanager
def filled(value: float) -> Iterator[None]:
    """Inside, fresh buffers of floats hold `value`: NaN shows what nobody writes."""
    global allocate
    plain = allocate

    def poisoned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = plain(shape, strides, dtype, device)
        return made.fill_(value) if dtype.is_floating_point else made

    allocate = poisoned
    try:
        yield
    finally:
        allocate = plain


def device_name(device: torch.device) -> str:
    """What a GPU is called; "" for anything else."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a device has; those of an H200 where it is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else configs.MULTIPROCESSORS


def plan(
    program: spec.Program,
    binding: Binding,
    arguments: Sequence[Any],
    device: torch.device,
    objects: Objects,
    owned: Collection[str] = (),
) -> Plan:
    """Decide a call. `arguments` are checked: tensors on `device` that `binding` describes, or floats for scalars. Those in `owned` may be
    overwritten, since nobody holds them when the plan is run."""
    made = schedules.scheduled(program, binding.extents, device, objects)
    found = _Planner(made.program, binding, arguments, device, made.serving(objects), owned).plan
    found.notes += [s.note for s in made.splits]
    return found


class _Planner(Looping, Working):
    """Builds a plan step by step. `meta[slot]` is what the slot will hold, without data; `home` the slot of a tensor in declared dims."""

    def __init__(
        self,
        program: spec.Program,
        binding: Binding,
        arguments: Sequence[Any],
        device: torch.device,
        objects: Objects,
        owned: Collection[str],
    ) -> None:
        self.over = donate.pairs(program, owned, donate.wanted()) if owned else {}
        self.program, self.binding, self.extents, self.objects = program, binding, binding.extents, objects
        self.plan = Plan(binding.extents, device)
        self.meta: list[torch.Tensor] = []
        self.address: list[int] = []
        self.home: dict[str, int] = {}
        self.work: dict[str, int] = {}
        self.operands: dict[tuple, int] = {}
        self.returns: dict[str, int] = {}
        self.owner: list[int] = []  # of each slot, the one whose memory it is a view of
        self.after: list[Step] = []
        self.places: dict[str, int] = {}
        self.chosen: dict[tuple[str, tuple[configs.Problem, ...]], spec.Config] = {}
        self.pool: Pool | None = None
        self.launches: list[tuple[int, spec.Kernel, spec.Config | None, Sequence[int], tuple[int, ...]]] = []
        self.declared = {a.name: a for a in program.inputs + program.outputs + program.temps}
        self.temps = {a.name for a in program.temps}
        for argument, value in zip(program.inputs, arguments, strict=True):
            self.home[argument.name] = self._argument(argument, value)
        self.fixed = len(self.meta)
        for argument, value in zip(program.inputs, arguments, strict=True):
            if not isinstance(value, torch.Tensor):
                self.home[argument.name] = self._scalar(self.home[argument.name], DTYPES[argument.dtype])
        for output, given in program.same:
            self.returns[output] = self._same(output, self.home[given])
        for item in loops.items(program):
            self._loop(item) if isinstance(item, loops.Round) else self._kernel(item)
        self._launch_all()
        self.plan.steps += self.after
        self.plan.arguments, self.plan.slots = self.fixed, len(self.meta) - self.fixed
        self.plan.results = tuple(self.returns[o.name] for o in program.outputs)
        self.plan.forget(self.owner)

    # slots

    def _do(self, call: Callable[..., Any], *reads: int, constants: tuple = (), out: int | None = None) -> None:
        """One more step."""
        self.plan.steps.append(Step(call, reads, constants, out))

    def _argument(self, argument: spec.Argument, value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return self._slot(value.shape, value.stride(), value.dtype, value.data_ptr())
        return self._slot((), (), torch.float64, 0)

    def _slot(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, address: int = 0, of: int | None = None) -> int:
        """A slot; `of` is one whose memory it shares."""
        self.meta.append(torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta"))
        self.address.append(address)
        self.owner.append(len(self.owner) if of is None else self.owner[of])
        return len(self.meta) - 1

    def _new(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
        """A slot for a fresh buffer; in a loop, for one of the chunk before."""
        found = self.pool.find(tuple(shape), tuple(strides), dtype) if self.pool else None
        if found is not None:
            return self._view(found, shape, strides)
        slot, shape, strides = self._slot(shape, strides, dtype), tuple(shape), tuple(strides)
        self._do(_fresh, constants=(shape, strides, dtype, self.plan.device), out=slot)
        if self.pool:
            self.pool.taken.append((slot, shape, strides, dtype))
        return slot

    def _contiguous(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return self._new(shape, layout.contiguous(tuple(shape)), dtype)

    def _view(self, source: int, shape: Sequence[int], strides: Sequence[int]) -> int:
        """A slot for another view of the same elements."""
        meta, shape, strides = self.meta[source], tuple(shape), tuple(strides)
        if (tuple(meta.shape), meta.stride()) == (shape, strides):
            return source
        slot = self._slot(shape, strides, meta.dtype, self.address[source], of=source)
        self._do(_view, source, constants=(shape, strides), out=slot)
        return slot

    def _scalar(self, source: int, dtype: torch.dtype) -> int:
        slot, device = self._slot((1,), (1,), dtype), self.plan.device
        self._do(lambda value: torch.full((1,), value, dtype=dtype, device=device), source, out=slot)
        return slot

    def _fill(self, slot: int, value: float) -> None:
        self._do(torch.Tensor.fill_, slot, constants=(value,))

    # program tensors as kernels see them

    def _same(self, output: str, source: int) -> int:
        """An output that is an input as it is: the caller gets the tensor itself, or a view where the leading dims differ."""
        shape = self.binding.returned(self.declared[output])
        if tuple(self.meta[source].shape) == shape:
            return source
        slot = self._slot(shape, layout.contiguous(shape), self.meta[source].dtype, of=source)
        self._do(torch.reshape, source, constants=(shape,), out=slot)
        return slot

    def _temporary(self, name: str, *names: str) -> int:
        """A tensor between kernels (known by several names), with strides for which the modes of every kernel that uses it are views."""
        return self._new(self.binding.declared(self.declared[name]), self._shared(name, *names), DTYPES[self.declared[name].dtype])

    def _shared(self, name: str, *names: str) -> tuple[int, ...]:
        argument = self.declared[name]
        records = [t for k in self.program.kernels for t in k.tensors if t.name in (name, *names)]
        return layout.shared(argument.dtype, self.binding.declared(argument), [r.modes for r in records])

    def _donated(self, record: spec.Tensor, packed: bool, strides: tuple[int, ...]) -> int | None:
        """An owned input's slot in whose place a tensor with these strides may be written; None where there is none that lies so."""
        given = self.over.get(record.name, "")
        if not given:
            return None
        slot, shape = self.home[given], self.binding.declared(self.declared[record.name])
        meta, lies = self.meta[slot], strides == layout.contiguous(shape)
        if not (lies and meta.is_contiguous() and meta.dtype == DTYPES[record.dtype] and meta.numel() == math.prod(shape)):
            return None
        if self._judged(slot, record, packed).reason:
            return None
        self.plan.over[record.name] = given
        self.plan.notes.append(f"{record.name} is written in the place of {given}")
        return self._view(slot, shape, strides)

    def _unmerged(self, record: spec.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The extents of all axes in the order of the modes, and where each stands among the declared dims."""
        inner = [a for mode in record.modes for a in mode]
        axes = self.declared[record.name].axes
        return tuple(self.extents[a] for a in inner), tuple(axes.index(a) for a in inner)

    def _as_modes(self, source: int, record: spec.Tensor) -> torch.Tensor | None:
        """The strides of a tensor's modes, as a meta tensor; None where no view has them."""
        try:
            declared = self.meta[source].view(self.binding.declared(self.declared[record.name]))
            return declared.permute(self._unmerged(record)[1]).view(mode_shape(record, self.extents))
        except RuntimeError:
            return None

    def _operand(self, kernel: spec.Gemm | spec.Finish, record: spec.Tensor) -> int:
        """The slot of an input, copied where the kernel cannot use its strides, or of what an earlier finisher left."""
        if record.name in self.work:
            shape = mode_shape(record, self.extents) or (1,)
            return self._view(self.work[record.name], shape, layout.contiguous(shape))
        source, whole = self.home[record.name], replace(record, part=None)
        packed = record.name in layout.packed_tensors(kernel)
        key = (record.name, record.modes, packed, record.loose)
        if key not in self.operands:
            self.operands[key] = self._usable(source, whole, packed)
        if record.part is None:
            return self.operands[key]
        return self._part(self.operands[key], record.part.mode, *record.part.span(mode_shape(whole, self.extents)[record.part.mode]))

    def _judged(self, source: int, record: spec.Tensor, packed: bool) -> layout.Verdict:
        """Can a kernel use a tensor as it is?"""
        if not record.modes:
            address = self.address[source]
            return layout.Verdict() if address % layout.alignment(record) == 0 else layout.judge(record, packed, (), (), address)
        view = self._as_modes(source, record)
        if view is None:
            return layout.Verdict(reason="its axes lie in an order that no view can merge")
        return layout.judge(record, packed, tuple(view.shape), view.stride(), self.address[source])

    def _usable(self, source: int, record: spec.Tensor, packed: bool) -> int:
        verdict = self._judged(source, record, packed)
        if not verdict.reason:
            return self._view(source, mode_shape(record, self.extents) or (1,), verdict.strides or (1,))
        self.plan.copies.append(f"{'input' if record.role == 'in' else 'intermediate'} {record.name!r} is copied: {verdict.reason}")
        shape = mode_shape(record, self.extents)
        slot = self._new(shape or (1,), layout.pitched(record, packed, shape) or (1,), DTYPES[record.dtype])
        declared = self.binding.declared(self.declared[record.name])
        unmerged, order = self._unmerged(record)
        self._do(lambda made, given: made.view(unmerged).copy_(given.reshape(declared).permute(order)), slot, source)
        return slot

    def _target(self, kernel: spec.Gemm | spec.Finish, record: spec.Tensor) -> int:
        """The slot of an output as the kernel writes it."""
        packed = record.name in layout.packed_tensors(kernel)
        key = (record.name, record.modes, packed, record.loose)
        if key not in self.operands:
            self.operands[key] = self._result(kernel, record, packed)
        return self.operands[key]

    def _result(self, kernel: spec.Gemm | spec.Finish, record: spec.Tensor, packed: bool) -> int:
        """A fresh output, as the kernel writes it; a temporary that is copied afterwards where the result's strides are of no use."""
        argument, shape = self.declared[record.name], mode_shape(record, self.extents)
        if record.name in self.places:
            return self._into(kernel, record, packed)
        if record.name in self.temps:
            return self._between(kernel, record, packed)
        result = self._fresh(argument, self._donated(record, packed, layout.contiguous(self.binding.returned(argument))))
        if not shape:
            return self._view(result, (1,), (1,))
        view = self._as_modes(result, record)
        if view is None:
            reason = "its axes are declared in another order than the kernel writes them"
        elif isinstance(kernel, spec.Finish):
            return self._view(result, view.shape, view.stride())
        else:
            verdict = layout.judge(record, packed, shape, view.stride())
            if not verdict.reason:
                return self._view(result, shape, verdict.strides)
            reason = verdict.reason
        self.plan.copies.append(f"output {record.name!r} is written to a temporary and copied: {reason}")
        temporary, unmerged, back = self._own(record, packed)
        declared = self.binding.declared(argument)
        self.after.append(Step(lambda made, written: made.view(declared).copy_(written.view(unmerged).permute(back)), (result, temporary)))
        return temporary

    def _fresh(self, argument: spec.Argument, donated: int | None = None) -> int:
        """The slot of an output, as a caller gets it."""
        into = dict(self.program.into).get(argument.name)
        slot = self.home[into] if into else donated
        if slot is None:
            slot = self._contiguous(self.binding.returned(argument), DTYPES[argument.dtype])
        self.returns[argument.name] = self.home[argument.name] = slot
        return slot

    def _between(self, kernel: spec.Gemm | spec.Finish, record: spec.Tensor, packed: bool) -> int:
        """A tensor between kernels, as its kernel writes it: where all others read it, or a place of its own that others copy from."""
        donated = self._donated(record, packed, self._shared(record.name))
        if donated is not None:
            self.home[record.name] = donated
            return self._usable(donated, record, packed)
        shared = self._temporary(record.name)
        self.home[record.name] = shared
        if isinstance(kernel, spec.Finish) or not self._judged(shared, record, packed).reason:
            return self._usable(shared, record, packed)
        if self.pool is None:
            self.plan.steps.pop()  # the allocation
        return self._own(record, packed)[0]

    def _own(self, record: spec.Tensor, packed: bool) -> tuple[int, tuple[int, ...], list[int]]:
        """A fresh buffer that a kernel can write, the tensor's home; its shape with all axes apart, and their way to the declared order."""
        shape = mode_shape(record, self.extents)
        slot = self._new(shape, layout.pitched(record, packed, shape), DTYPES[record.dtype])
        unmerged, order = self._unmerged(record)
        back = [order.index(i) for i in range(len(order))]
        inner = self.meta[slot].view(unmerged).permute(back)
        self.home[record.name] = self._view(slot, inner.shape, inner.stride())
        return slot, unmerged, back

    # kernels

    def _kernel(self, kernel: spec.Kernel) -> None:
        self._finish(kernel) if isinstance(kernel, spec.Finish) else self._gemms(kernel)

    def _gemms(self, launch: spec.Launch) -> None:
        """One launch; where a Gemm of several has no rows or columns, one of each of the others."""
        parts = spec.gemms(launch)
        if len(parts) > 1 and not all(product(gemm.rows, self.extents) * product(gemm.cols, self.extents) for gemm in parts):
            for gemm in parts:
                self._gemms(gemm)
            return
        problems = configs.problems(launch, self.extents)
        self.plan.sizes.setdefault(launch.name, problems)
        if (launch.name, problems) not in self.chosen:  # most chunks of a loop are of one size
            self.chosen[launch.name, problems] = self.objects.config(launch, self.extents, self.plan.device)
        config = self.chosen[launch.name, problems]
        slots = [self._gemm(gemm, config) for gemm in parts]
        if None not in slots:
            self.plan.configs[launch.name] = config
            self._launch(launch, [slot for found in slots for slot in found or ()], config)

    def _gemm(self, kernel: spec.Gemm, config: spec.Config) -> list[int] | None:
        """The slots of a Gemm's tensors in order; None where there is nothing to launch."""
        records = {t.name: t for t in kernel.tensors}
        m, n = product(kernel.rows, self.extents), product(kernel.cols, self.extents)
        depths = [math.prod(mode_shape(records[p.a.tensor], self.extents)[i] for i in p.a.cols) for p in kernel.products]
        slots: dict[str, int] = {}
        for sink in kernel.sinks:
            if isinstance(sink, spec.Store):
                slots[sink.matrix.tensor] = self._target(kernel, records[sink.matrix.tensor])
            elif isinstance(sink, spec.Point):
                slots[sink.tensor] = self._point(kernel, records[sink.tensor])
            else:
                slots[sink.work] = self._partials(kernel, sink, config, m, n)
        once = any(isinstance(s, spec.Point) and s.once for s in kernel.sinks)
        if m == 0 or n == 0 and not once:
            self.plan.notes.append(f"{kernel.name} is not launched: it has {m} rows and {n} columns")
            return None
        zeros = self._zeros(kernel, records, depths)
        for record in kernel.tensors:
            if record.name not in slots:
                slots[record.name] = zeros[record.name] if record.name in zeros else self._operand(kernel, record)
        if n == 0:
            slots |= {name: self._eight(kernel, records[name], slot) for name, slot in slots.items() if self.meta[slot].numel() == 0}
        return [slots[t.name] for t in kernel.tensors]

    def _finish(self, kernel: spec.Finish) -> None:
        length = product(kernel.length, self.extents)
        slots: dict[str, int] = {}
        scattered: list[tuple[int, int]] = []
        for record in kernel.tensors:
            if record.name in kernel.outputs:
                if record.role == "work":
                    slots[record.name] = self.work[record.name] = self._contiguous((length,), DTYPES[record.dtype])
                    continue
                target = slots[record.name] = self._target(kernel, record)
                if not self.meta[target].is_contiguous():  # between kernels, with pitches that others want
                    slots[record.name] = self._contiguous(self.meta[target].shape, DTYPES[record.dtype])
                    scattered.append((target, slots[record.name]))
        if length == 0:
            self.plan.notes.append(f"{kernel.name} is not launched: it has no positions")
            return
        for partial in kernel.partials:
            slots[partial.work] = self._parts(partial, length)
        for record in kernel.tensors:
            if record.name not in slots:
                slots[record.name] = self._operand(kernel, record)
        self._launch(kernel, [slots[t.name] for t in kernel.tensors], None)
        for target, fresh in scattered:
            self._do(torch.Tensor.copy_, target, fresh)

    def _launch(self, kernel: spec.Kernel, slots: Sequence[int], config: spec.Config | None) -> None:
        """Leave room for a launch: executables are asked for together, so that those to compile are compiled side by side."""
        self.launches.append((len(self.plan.steps), kernel, config, slots, tuple(self.extents[e] for e in kernel.extents)))
        self._do(_none, *slots)
        self.plan.launches.append(kernel.name)
        self.plan.kernels[kernel.name] = kernel
        self.plan.places.setdefault(kernel.name, len(self.plan.steps) - 1)  # of a loop, in its first chunk

    def _launch_all(self) -> None:
        wanted = list(dict.fromkeys((kernel, config) for _, kernel, config, *_ in self.launches))
        calls = dict(zip(wanted, self.objects.executables(wanted, self.plan.device), strict=True))
        for place, kernel, config, slots, integers in self.launches:
            self.plan.steps[place] = Step(calls[kernel, config], tuple(slots), integers)


def _none(*tensors: Any) -> None:
    """Stands where a launch will be."""
