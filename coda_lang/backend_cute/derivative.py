"""What of a program's saving forward and backward has to run, for the gradients that are asked for.

In: the three programs of a `Function`, which inputs need a gradient, which cotangents are there. Out: `Saving`, the forward that stores
what that backward reads, and `Step`, the backward cut down to it: no kernel, store or load that no asked gradient needs. Both are
decided once and kept. Needs neither torch nor cutlass. Non-goals: running them (`autograd`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from . import into, loops, slices, spec
from .prune import Single, each, prune, target, used, without, written

Functions = Mapping[str, Callable[..., tuple]]
Mask = tuple[bool, ...]

NO, YES, SUM = 0, 1, 2  # of an input's gradient: not asked for, in the input's dtype, in f32 to be added to a buffer
INTO = {"f32": 3, "bf16": 4}  # added to a buffer of this dtype by the kernel that stores it


@dataclass(frozen=True)
class Saving:
    """A forward whose outputs are those the caller gets, then `extra`: what else the backward reads. Without any, `program` is None: the
    plain program serves.

    `kept` are what the backward reads, `places` where each stands among the inputs, the caller's outputs and `extra`, in this order.
    """

    program: spec.Program | None
    functions: Functions
    extra: tuple[str, ...]
    kept: tuple[str, ...]
    places: tuple[int, ...]
    asked: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A backward. `reads`: per input of `program`, the name of a kept tensor or the place of an output whose cotangent it is.

    `gives`: per input of the forward, where its gradient is: a result's place, (tensor read as in `reads`) where it is that tensor
    itself, or None where there is none. `asked` and `known` say what the step was made for. `buffers`: inputs of `program` that are the
    buffer of a forward's input, by its place.
    """

    program: spec.Program
    functions: Functions
    reads: tuple[str | int, ...]
    gives: tuple[int | tuple[str | int] | None, ...]
    asked: tuple[int, ...]
    known: Mask
    buffers: Mapping[str, int] = field(default_factory=dict)


class Derivative:
    """The derivative of one function: `program` with `wanted` outputs, the programs that emission gave.

    `whole`: kernels cannot be cut down, only left out.
    """

    def __init__(
        self,
        program: spec.Program,
        saving: spec.Program | None,
        backward: spec.Program,
        functions: Functions,
        cotangents: Sequence[tuple[str, str]],
        gradients: Sequence[tuple[str, str]],
        wanted: Sequence[str] = (),
        whole: bool = False,
    ) -> None:
        self.program, self.forward, self.backward, self.functions = program, saving or program, backward, functions
        self.inputs = [a.name for a in program.inputs]
        self.outputs = [o.name for o in program.outputs if not wanted or o.name in wanted]
        self.gradient = dict(gradients)
        self.cotangent = {c: o for o, c in cotangents}  # of every output, those dropped too
        self.differentiable: Mask = tuple(name in self.gradient for name in self.inputs)
        self.smooth: Mask = tuple(o in self.cotangent.values() for o in self.outputs)
        self.whole = whole
        self._savings: dict[tuple, Saving] = {}
        self._steps: dict[tuple, Step] = {}

    def saving(self, needs: Sequence[bool]) -> Saving:
        """The forward for a backward of the inputs in `needs`."""
        key = tuple(needs)
        if key not in self._savings:
            self._savings[key] = self._saving(key)
        return self._savings[key]

    def step(self, asked: Sequence[int], known: Sequence[bool]) -> Step:
        """The backward for inputs' gradients as `asked` (NO, YES, SUM, INTO), where cotangents of the outputs in `known` are not zero."""
        key = (tuple(asked), tuple(known))
        if key not in self._steps:
            self._steps[key] = self._step(*key)
        return self._steps[key]

    def _saving(self, needs: Mask) -> Saving:
        asked = tuple(YES if n and d else NO for n, d in zip(needs, self.differentiable, strict=True))
        step = self.step(asked, (True,) * len(self.outputs))
        sames = [g[0] for g in step.gives if isinstance(g, tuple)]
        kept = tuple(dict.fromkeys(r for r in (*step.reads, *sames) if isinstance(r, str)))
        extra = tuple(o.name for o in self.forward.outputs if o.name in kept and o.name not in self.outputs)
        known = [*self.inputs, *self.outputs, *extra]
        program: spec.Program | None = None
        functions = self.functions
        if extra:
            program, functions = prune(self.forward, self.functions, (*self.outputs, *extra), whole=self.whole)
            program = replace(program, outputs=tuple(sorted(program.outputs, key=lambda o: known.index(o.name))))
        return Saving(program, functions, extra, kept, tuple(known.index(name) for name in kept), asked)

    def _step(self, asked: tuple[int, ...], known: Mask) -> Step:
        there = {o for o, k in zip(self.outputs, known, strict=True) if k}
        names = {i: self.gradient[i] for i, a in zip(self.inputs, asked, strict=True) if a}
        names = {i: g for i, g in names.items() if self._reached(g, there)}
        same = {o: given for o, given in self.backward.same}
        computed = [o.name for o in self.backward.outputs if o.name in names.values() and o.name not in same]
        program, pruned = prune(self.backward, self.functions, computed, whole=self.whole)
        if not self.whole:
            program, pruned = without(program, pruned, {c for c, o in self.cotangent.items() if o not in there})
        program, functions, buffers = self._into(program, pruned, asked, names)
        added = {name.removesuffix(into.SUFFIX) for name in buffers}
        sums = {names[i] for i, a in zip(self.inputs, asked) if a > YES and i in names} - added
        program, functions = widen(program, functions, sums)
        reads = self._read_by(program)
        program = replace(program, inputs=tuple(a for a in program.inputs if a.name in reads))
        places = {o.name: i for i, o in enumerate(program.outputs)}
        gives: list[int | tuple[str | int] | None] = []
        for name in self.inputs:
            g = names.get(name)
            gives.append(None if g is None else (self._source(same[g]),) if g in same else places[g])
        return Step(program, functions, tuple(self._source(a.name) for a in program.inputs), tuple(gives), asked, known, buffers)

    def _into(
        self, program: spec.Program, functions: Functions, asked: tuple[int, ...], names: Mapping[str, str]
    ) -> tuple[spec.Program, Functions, dict[str, int]]:
        """The program whose kernels add to buffers what they can; which of its inputs are these."""
        buffers: dict[str, int] = {}
        for place, (name, wanted) in enumerate(zip(self.inputs, asked)):
            dtype = next((d for d, code in INTO.items() if code == wanted), "")
            found = into.added(program, functions, names[name], dtype) if dtype and name in names else None
            if found is not None:
                (program, functions), buffers[names[name] + into.SUFFIX] = found, place
        return program, functions, buffers

    def _reached(self, gradient: str, there: set[str]) -> bool:
        """May a gradient be other than zero? It is linear in the cotangents, so only if it reads one that is there, or none at all."""
        if there.issuperset(self.cotangent.values()):
            return True
        given = dict(self.backward.same).get(gradient)
        reads = {given} if given else self._read_by(prune(self.backward, self.functions, [gradient])[0])
        sources = {self.cotangent[r] for r in reads if r in self.cotangent}
        return not sources or bool(sources & there)

    def _read_by(self, program: spec.Program) -> set[str]:
        return {a.name for a in program.inputs} & set().union(*map(used, program.kernels)) if program.kernels else set()

    def _source(self, name: str) -> str | int:
        """A tensor of the backward: a kept one by name, or the place of the output whose cotangent it is; -1 of a dropped output."""
        if name not in self.cotangent:
            return name
        output = self.cotangent[name]
        return self.outputs.index(output) if output in self.outputs else -1


def widen(program: spec.Program, functions: Functions, outputs: set[str]) -> tuple[spec.Program, Functions]:
    """The program that gives these outputs in f32, not rounded last; those it cannot widen stay as they are.

    An output that other kernels read, and lanes packed by twos, keep their type.
    """
    made = dict(functions)
    for name in outputs:
        writers = [k for k in program.kernels if name in written(k)]
        readers = [k for k in program.kernels if name in used(k) and k not in writers]
        if readers or len(writers) != 1 or _packed(writers[0], name):
            continue
        kernel = each(writers[0], partial(_widened, name=name, functions=made)) or writers[0]
        names = {k.name: kernel.name if k is writers[0] else k.name for k in program.kernels}
        program = replace(
            program,
            loops=loops.kept(program.loops, names, set().union(*map(used, program.kernels))),
            kernels=tuple(kernel if k is writers[0] else k for k in program.kernels),
            outputs=tuple(replace(o, dtype="f32") if o.name == name else o for o in program.outputs),
        )
    return program, made


def _packed(kernel: spec.Kernel, name: str) -> bool:
    sinks = [s for gemm in spec.gemms(kernel) for s in gemm.sinks]
    return any(isinstance(s, spec.Store) and s.matrix.tensor == name and s.matrix.pack > 1 for s in sinks)


def _widened(kernel: Single, name: str, functions: dict[str, Callable[..., tuple]]) -> Single:
    """A kernel that leaves an output in f32, if it writes it; its last function without the rounding of that result."""
    if name not in written(kernel):
        return kernel
    tensors = tuple(replace(t, dtype="f32") if t.name == name else t for t in kernel.tensors)
    if isinstance(kernel, spec.Finish):
        places, last = [kernel.outputs.index(name)], kernel.fn
    else:
        places, last, position = [], kernel.phases[-1].fn, 0
        for sink in kernel.sinks:
            width = sink.matrix.pack if isinstance(sink, spec.Store) else 2 if isinstance(sink, spec.Point) else 1
            places += [position] if target(sink) == name else []
            position += width
    text = slices.straight(functions[last])
    fn = last
    if text is not None:
        fn = f"{last}_f32_{'_'.join(map(str, places))}"
        cut = slices.cut(functions[last], range(len(text.results)), name=fn, exact=places)
        assert cut is not None
        functions[fn] = cut
    renamed = f"{kernel.name}_f32_{name}"
    if isinstance(kernel, spec.Finish):
        return replace(kernel, name=renamed, tensors=tensors, fn=fn)
    return replace(kernel, name=renamed, tensors=tensors, phases=(*kernel.phases[:-1], replace(kernel.phases[-1], fn=fn)))


def extents(program: spec.Program, known: Mapping[str, int]) -> dict[str, int]:
    """The extent of every axis of a backward, from those of its forward."""
    found = {name: known[name] if size is None else size for name, size in program.extents if size is not None or name in known}
    for one, other in program.equal * 2:  # renames may follow each other
        for first, second in ((one, other), (other, one)):
            if first in found:
                found.setdefault(second, found[first])
    return found
