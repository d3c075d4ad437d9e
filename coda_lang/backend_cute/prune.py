"""Takes unwanted outputs out of a program: their stores, what only they needed, and kernels that write nothing any more.

In: a `spec.Program`, its scalar functions, the wanted outputs. Out: the smaller program and functions that return fewer values. A pruned
function contains the text of the one it calls, so whatever reads a function's source (the compiler, the cache) sees all of it.
Needs neither torch nor cutlass. Non-goal: dead code inside a scalar function, which the device compiler removes.
"""

from __future__ import annotations

import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from . import spec

Functions = Mapping[str, Callable[..., tuple]]


def prune(program: spec.Program, functions: Functions, wanted: Sequence[str]) -> tuple[spec.Program, dict[str, Callable[..., tuple]]]:
    """The program that computes only the outputs in `wanted`, which are in the order declared."""
    made = dict(functions)
    needed = set(wanted)
    kernels: list[spec.Kernel] = []
    for kernel in reversed(program.kernels):
        smaller = _finish(kernel, needed, made) if isinstance(kernel, spec.Finish) else _gemm(kernel, needed, made)
        if smaller is not None:
            kernels.insert(0, smaller)
            needed |= {t.name for t in smaller.tensors}
    outputs = tuple(o for o in program.outputs if o.name in wanted)
    temps = tuple(t for t in program.temps if t.name in needed)
    same = tuple(pair for pair in program.same if pair[0] in wanted)
    return replace(program, outputs=outputs, kernels=tuple(kernels), temps=temps, same=same), made


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


def target(sink: spec.Sink) -> str:
    """The tensor that a sink writes."""
    return sink.matrix.tensor if isinstance(sink, spec.Store) else sink.tensor if isinstance(sink, spec.Point) else sink.work


def _suffix(keep: Sequence[int]) -> str:
    return "only" + "_".join(map(str, keep))


def _select(functions: dict[str, Callable[..., tuple]], name: str, keep: Sequence[int]) -> str:
    """A function like `name` that returns only the values at `keep`; gives its name."""
    original = functions[name]
    selected = f"{name}_{_suffix(keep)}"
    arguments = ", ".join(inspect.signature(original).parameters)
    values = "".join(f"values[{i}], " for i in keep)
    text = (
        f"def {selected}({arguments}):\n"
        f"{textwrap.indent(textwrap.dedent(inspect.getsource(original)), '    ')}\n"
        f"    values = {original.__name__}({arguments})\n"
        f"    return ({values.rstrip()})\n"
    )
    file = f"<{selected} of {inspect.getsourcefile(original)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope = dict(original.__globals__)
    exec(compile(text, file, "exec"), scope)
    functions[selected] = scope[selected]
    return selected
