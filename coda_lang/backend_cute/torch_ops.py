"""A function as registered torch operators, for whatever traces: torch.compile, torch.export, fake tensors, dispatch modes, checkpoints.

In: a `Function`. Out: three operators in the namespace `coda_lang`, named after the program and a digest of its text, so that a name
means the same in every process: NAME_digest(tensors) -> outputs, with fake and autograd; NAME_digest_saving and NAME_digest_backward,
which the first's autograd is made of. They compute what an eager call does, through the same code. An eager call on plain tensors does
not come here: the dispatcher would cost more than the launch. Operators are registered when first needed and live as long as the process.
Non-goals: derivatives under torch.func transforms, buffers (`accumulate_into`) while tracing.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import arguments, autograd, binding, derivative, errors, nodes, prune, slices, spec
from .derivative import Derivative, Saving, Step, extents
from .torch_fns import DTYPES

NAMESPACE = "coda_lang"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
BACKENDS = ("CPU", "CUDA")


@dataclass
class Operators:
    """The registered operators of one function; `saving` and `backward` only where it has a derivative."""

    forward: Any
    saving: Any = None
    backward: Any = None


def traced(fn: Any, tensors: Sequence[Any], accumulate_into: Any) -> Sequence[torch.Tensor]:
    """A call of a function that was prepared, as one operator; the outputs, unpacked. Traceable by torch.compile."""
    if accumulate_into is not None:
        raise errors.refuse(
            errors.ACCUMULATE,
            f"{fn.program.name}: accumulate_into works in eager calls only, and this call is being traced",
            help="keep this call out of torch.compile (torch.compiler.disable), or let the gradient be returned",
        )
    tensors = arguments.cast(fn.program, tensors)
    device = arguments.device_of(tensors)
    given = [
        t if isinstance(t, torch.Tensor) else torch.full((), t, dtype=DTYPES[a.dtype], device=device)
        for a, t in zip(fn.program.inputs, tensors)
    ]
    result = fn.operator.forward(*given)
    return (result,) if len(fn.program.outputs) == 1 else result


def register(fn: Any) -> Operators:
    """Define and implement the operators of a function."""
    program: spec.Program = fn.program
    name = _free(f"{program.name}_{_digest(fn)}")
    signature = ", ".join(f"Tensor {_argument(i, a)}" for i, a in enumerate(program.inputs))
    results = ", ".join(["Tensor"] * len(program.outputs))
    made = Operators(_define(name, f"({signature}) -> ({results})"))

    def pack(values: Sequence[torch.Tensor]) -> Any:
        return values[0] if len(program.outputs) == 1 else tuple(values)

    def forward(*tensors: torch.Tensor) -> Any:
        return pack(fn.run(tensors)[0])

    def fake(*tensors: torch.Tensor) -> Any:
        bound = fn.bind(tensors)
        return pack([tensors[0].new_empty(bound.returned(o), dtype=DTYPES[o.dtype]) for o in program.outputs])

    _implement(name, forward, fake)
    training = None
    if fn.backward is not None:
        training = fn.training(Registered(fn, made))
        _register_backward(fn, name, training.derivative, made)

    def with_autograd(*tensors: torch.Tensor) -> Any:
        if training is None:
            arguments.check_gradients(program, tensors)
        elif arguments.wants_gradients(tensors, training.derivative.differentiable):
            return pack(training(tensors))
        with torch._C._AutoDispatchBelowAutograd():
            return made.forward(*tensors)

    LIBRARY.impl(name, with_autograd, "Autograd")
    return made


def _register_backward(fn: Any, name: str, decided: Derivative, made: Operators) -> None:
    """The operators that the first one's autograd calls."""
    way = autograd.Eager(fn)
    axes = [axis for axis, _ in fn.program.extents]
    made.saving = _define(f"{name}_saving", "(Tensor[] tensors, bool[] needs) -> Tensor[]")
    made.backward = _define(f"{name}_backward", "(Tensor[] given, SymInt[] extents, int[] asked, bool[] known) -> Tensor[]")

    def saving(tensors: list[torch.Tensor], needs: list[bool]) -> list[torch.Tensor]:
        return way.forward(decided.saving(needs), tensors)[0]

    def fake_saving(tensors: list[torch.Tensor], needs: list[bool]) -> list[torch.Tensor]:
        bound = fn.bind(tensors)
        program = decided.saving(needs).program or fn.program
        return [tensors[0].new_empty(bound.returned(o), dtype=DTYPES[o.dtype]) for o in program.outputs]

    def backward(given: list[torch.Tensor], sizes: list[int], asked: list[int], known: list[bool]) -> list[torch.Tensor]:
        return way.backward(decided.step(asked, known), given, dict(zip(axes, sizes, strict=True)))

    def fake_backward(given: list[torch.Tensor], sizes: list[int], asked: list[int], known: list[bool]) -> list[torch.Tensor]:
        step = decided.step(asked, known)
        extent = extents(step.program, dict(zip(axes, sizes, strict=True)))
        return [given[0].new_empty([extent[a] for a in o.axes], dtype=DTYPES[o.dtype]) for o in step.program.outputs]

    _implement(f"{name}_saving", saving, fake_saving)
    _implement(f"{name}_backward", backward, fake_backward)


class Registered:
    """The way of `autograd` through registered operators."""

    def __init__(self, fn: Any, operators: Operators) -> None:
        self.fn, self.operators = fn, operators
        self.axes = [axis for axis, _ in fn.program.extents]

    def forward(self, saving: Saving, tensors: Sequence[Any]) -> tuple[list[torch.Tensor], autograd.Extents]:
        """The forward that saves what `saving.asked` needs."""
        results = self.operators.saving(list(tensors), [bool(a) for a in saving.asked])
        return list(results), self.fn.bind(tensors).extents

    def backward(self, step: Step, given: Sequence[Any], known: autograd.Extents) -> list[torch.Tensor]:
        """The backward; `step` goes as what it was made for."""
        return list(self.operators.backward(list(given), [known[a] for a in self.axes], list(step.asked), list(step.known)))

    def plan(self, saving: Saving, key: tuple | None) -> None:
        """Never a plan: the operator decides."""

    def plan_backward(self, step: Step, given: Sequence[Any], known: autograd.Extents, owned: Collection[str] = ()) -> None:
        """Never a plan: the operator decides."""


def _define(name: str, schema: str) -> Any:
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _implement(name: str, real: Any, fake: Any) -> None:
    for backend in BACKENDS:
        LIBRARY.impl(name, real, backend)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)


def _argument(place: int, argument: spec.Argument) -> str:
    """The name of an argument in a schema, where some words are taken."""
    return argument.name if argument.name.isidentifier() and not argument.name.startswith("_") else f"argument{place}"


def _free(name: str) -> str:
    """The name, or where a function of the same text has it already, one with a number."""
    taken, count = getattr(torch.ops, NAMESPACE), 1
    free = name
    while hasattr(taken, free):
        count += 1
        free = f"{name}_{count}"
    return free


def _digest(fn: Any) -> str:
    """Tells programs of one name apart, the same in every process.

    What the operators take and give is this version's business, and torch keeps compiled graphs on disk, so the version counts too.
    """
    parts = [inspect.getsource(module) for module in (autograd, nodes, derivative, prune, slices, binding, sys.modules[__name__])]
    parts += [repr(p) for p in (fn.program, fn.saving, fn.backward, fn.residuals, fn.cotangents, fn.gradients)]
    for name, function in sorted(fn.functions.items()):
        parts += [name, inspect.getsource(function)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]
