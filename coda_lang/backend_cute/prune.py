"""Takes unwanted outputs out of a program: their stores, what only they needed, and kernels that write nothing any more.

In: a `spec.Program`, its scalar functions, the wanted outputs. Out: the smaller program and functions that return fewer values; kernels no
longer load what only dropped values needed. A pruned function holds the text that it needs, so whatever reads a function's source (the
compiler, the cache) sees all of it. Needs neither torch nor cutlass.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from . import loops, slices, spec

Functions = Mapping[str, Callable[..., tuple]]
Single = spec.Gemm | spec.Finish


def prune(
    program: spec.Program, functions: Functions, wanted: Sequence[str], *, whole: bool = False
) -> tuple[spec.Program, dict[str, Callable[..., tuple]]]:
    """The program that computes only the outputs in `wanted`, which are in the order declared.

    An unwanted output that another kernel reads becomes a tensor between kernels. With `whole`, kernels stay or go, but none changes: one
    that stays writes its unwanted outputs to such tensors, and Gemms of a launch that loses some run alone.
    """
    made = dict(functions)
    needed = set(wanted)
    kernels: list[spec.Kernel] = []
    names: dict[str, str] = {}
    for kernel in reversed(program.kernels):
        if whole:
            found = [k for k in spec.members(kernel) if needed & written(k)]
            smaller = [kernel] if len(found) == len(spec.members(kernel)) else found
        else:
            smaller = [k for k in (each(kernel, partial(_smaller, needed=needed, functions=made)),) if k is not None]
        kernels = [*smaller, *kernels]
        if smaller:
            names[kernel.name] = smaller[0].name
        needed |= {t.name for k in smaller for t in k.tensors}
    kernels = kernels if whole else _unloaded(kernels, made)
    outputs = tuple(o for o in program.outputs if o.name in wanted)
    read = set().union(*map(used, kernels)) if kernels else set()
    temps = tuple(t for t in (*program.temps, *program.outputs) if t.name in read and t not in outputs)
    same = tuple(pair for pair in program.same if pair[0] in wanted)
    kept = loops.kept(program.loops, names, read)
    return replace(program, outputs=outputs, kernels=tuple(kernels), temps=temps, same=same, loops=kept), made


def each(kernel: spec.Kernel, change: Callable[[Any], Single | None]) -> spec.Kernel | None:
    """The kernel with every Gemm and finisher of the launch changed; None where none is left. One Gemm that is left runs alone."""
    if not isinstance(kernel, spec.Together):
        return change(kernel)
    made = [change(gemm) for gemm in kernel.gemms]
    kept = tuple(gemm for gemm in made if isinstance(gemm, spec.Gemm))
    return kernel if kept == kernel.gemms else spec.joined(kept) if kept else None


def _smaller(kernel: Single, needed: set[str], functions: dict[str, Callable[..., tuple]]) -> Single | None:
    return _finish(kernel, needed, functions) if isinstance(kernel, spec.Finish) else _gemm(kernel, needed, functions)


def _finish(kernel: spec.Finish, needed: set[str], functions: dict[str, Callable[..., tuple]]) -> spec.Finish | None:
    keep = [i for i, name in enumerate(kernel.outputs) if name in needed]
    if len(keep) == len(kernel.outputs):
        return kernel
    if not keep:
        return None
    dropped = {name for i, name in enumerate(kernel.outputs) if i not in keep}
    return replace(
        kernel,
        name=f"{kernel.name}_{_suffix(keep)}",
        tensors=tuple(t for t in kernel.tensors if t.name not in dropped),
        outputs=tuple(kernel.outputs[i] for i in keep),
        fn=_select(functions, kernel.fn, keep),
    )


def _gemm(kernel: spec.Gemm, needed: set[str], functions: dict[str, Callable[..., tuple]]) -> spec.Gemm | None:
    keep: list[int] = []
    sinks: list[spec.Sink] = []
    position = 0
    for sink in kernel.sinks:
        width = sink.matrix.pack if isinstance(sink, spec.Store) else 2 if isinstance(sink, spec.Point) else 1
        if target(sink) in needed:
            sinks.append(sink)
            keep.extend(range(position, position + width))
        position += width
    if len(sinks) == len(kernel.sinks):
        return kernel
    if not sinks:
        return None
    dropped = {target(sink) for sink in kernel.sinks} - {target(sink) for sink in sinks}
    last = kernel.phases[-1]
    return replace(
        kernel,
        name=f"{kernel.name}_{_suffix(keep)}",
        tensors=tuple(t for t in kernel.tensors if t.name not in dropped),
        sinks=tuple(sinks),
        phases=(*kernel.phases[:-1], replace(last, fn=_select(functions, last.fn, keep))),
    )


def _unloaded(kernels: Sequence[spec.Kernel], functions: dict[str, Callable[..., tuple]]) -> list[spec.Kernel]:
    """The kernels without ports that none of their functions needs."""
    made = [each(kernel, partial(_lighter, functions=functions)) for kernel in kernels]
    return [kernel for kernel in made if kernel is not None]


def _lighter(kernel: Single, functions: dict[str, Callable[..., tuple]]) -> Single:
    """The same of one; as it is where a function cannot be read."""
    names = [kernel.fn] if isinstance(kernel, spec.Finish) else [p.fn for p in kernel.phases]
    texts = [slices.straight(functions[name]) for name in names]
    first = len(kernel.partials) if isinstance(kernel, spec.Finish) else kernel.segments if kernel.products else 0
    needs: set[int] = set()
    for text in texts:
        if text is None:
            return kernel
        read = slices.needed(text, range(len(text.results)))
        needs |= {i for i, name in enumerate(text.arguments) if name in read}
    keep, drop, position = [], set(), first
    for port in kernel.ports:
        width = port.matrix.pack if isinstance(port, spec.Tile) else 1
        places = range(position, position + width)
        position += width
        if needs.isdisjoint(places):
            drop |= set(places)
        else:
            keep.append(port)
    if not drop:
        return kernel
    renamed = {}
    for name, text in zip(names, texts):
        assert text is not None
        renamed[name] = f"{name}_ports{'_'.join(str(i - first) for i in range(first, position) if i not in drop)}"
        dropped = [text.arguments[i] for i in drop]
        functions[renamed[name]] = slices.cut(functions[name], range(len(text.results)), name=renamed[name], drop=dropped)  # type: ignore
    if isinstance(kernel, spec.Finish):
        smaller: Single = replace(kernel, fn=renamed[kernel.fn], ports=tuple(keep))
    else:
        smaller = replace(kernel, phases=tuple(replace(p, fn=renamed[p.fn]) for p in kernel.phases), ports=tuple(keep))
    return replace(smaller, tensors=tuple(t for t in kernel.tensors if t.name in used(smaller)))


def without(program: spec.Program, functions: Functions, zero: set[str]) -> tuple[spec.Program, dict[str, Callable[..., tuple]]]:
    """The program where these inputs are 0 everywhere and not loaded; operands of products, and what cannot be read, stay as they are."""
    made = dict(functions)
    silent = [each(kernel, partial(_silenced, functions=made, zero=zero)) or kernel for kernel in program.kernels]
    names = {old.name: new.name for old, new in zip(program.kernels, silent)}
    kernels = tuple(_unloaded(silent, made))
    return replace(program, kernels=kernels, loops=loops.kept(program.loops, names, set().union(*map(used, kernels)))), made


def _silenced(kernel: Single, functions: dict[str, Callable[..., tuple]], zero: set[str]) -> Single:
    names = [kernel.fn] if isinstance(kernel, spec.Finish) else [p.fn for p in kernel.phases]
    texts = [slices.straight(functions[name]) for name in names]
    position = len(kernel.partials) if isinstance(kernel, spec.Finish) else kernel.segments if kernel.products else 0
    keep, places = [], set()
    for port in kernel.ports:
        width = port.matrix.pack if isinstance(port, spec.Tile) else 1
        tensor = port.matrix.tensor if isinstance(port, spec.Tile) else port.tensor if isinstance(port, spec.Load) else ""
        if tensor in zero:
            places |= set(range(position, position + width))
        else:
            keep.append(port)
        position += width
    if not places or any(text is None for text in texts):
        return kernel
    suffix = "without" + "_".join(map(str, sorted(places)))
    for name, text in zip(names, texts):
        assert text is not None
        absent = [text.arguments[i] for i in places]
        functions[f"{name}_{suffix}"] = slices.cut(  # type: ignore[assignment]
            functions[name], range(len(text.results)), name=f"{name}_{suffix}", zero=absent
        )
    if isinstance(kernel, spec.Finish):
        smaller: Single = replace(kernel, fn=f"{kernel.fn}_{suffix}", ports=tuple(keep))
    else:
        smaller = replace(kernel, phases=tuple(replace(p, fn=f"{p.fn}_{suffix}") for p in kernel.phases), ports=tuple(keep))
    return replace(smaller, name=f"{kernel.name}_{suffix}", tensors=tuple(t for t in kernel.tensors if t.name in used(smaller)))


def used(kernel: spec.Kernel) -> set[str]:
    """The tensors that a kernel's products, partials, ports, sinks and outputs name."""
    return set().union(*map(_used, spec.members(kernel)))


def _used(kernel: Single) -> set[str]:
    ports = {p.matrix.tensor if isinstance(p, spec.Tile) else p.tensor for p in kernel.ports if isinstance(p, (spec.Tile, spec.Load))}
    if isinstance(kernel, spec.Finish):
        return ports | {p.work for p in kernel.partials} | set(kernel.outputs)
    return ports | {m.tensor for p in kernel.products for m in (p.a, *p.b)} | {target(s) for s in kernel.sinks}


def written(kernel: spec.Kernel) -> set[str]:
    """The tensors that a kernel writes."""
    return set(kernel.outputs) if isinstance(kernel, spec.Finish) else {target(s) for gemm in spec.gemms(kernel) for s in gemm.sinks}


def target(sink: spec.Sink) -> str:
    """The tensor that a sink writes."""
    return sink.matrix.tensor if isinstance(sink, spec.Store) else sink.tensor if isinstance(sink, spec.Point) else sink.work


def _suffix(keep: Sequence[int]) -> str:
    return "only" + "_".join(map(str, keep))


def _select(functions: dict[str, Callable[..., tuple]], name: str, keep: Sequence[int]) -> str:
    """A function like `name` that returns only the values at `keep`; gives its name."""
    original = functions[name]
    selected = f"{name}_{_suffix(keep)}"
    functions[selected] = slices.cut(original, keep, name=selected) or _wrapped(original, keep, selected)
    return selected


def _wrapped(original: Callable[..., tuple], keep: Sequence[int], selected: str) -> Callable[..., tuple]:
    arguments = ", ".join(inspect.signature(original).parameters)
    values = "".join(f"values[{i}], " for i in keep)
    text = (
        f"def {selected}({arguments}):\n"
        f"{textwrap.indent(textwrap.dedent(inspect.getsource(original)), '    ')}\n"
        f"    values = {original.__name__}({arguments})\n"
        f"    return ({values.rstrip()})\n"
    )
    return slices.define(text, selected, original)
