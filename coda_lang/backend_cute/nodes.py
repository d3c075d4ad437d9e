"""Autograd's nodes of a call, and differentiable calls of a known kind.

In: the tensors of a call, what `autograd` decided at the first call of its kind. Out: outputs with a backward; gradients, which refuse
to be differentiated. What every call of a kind does again is here, and short: a key, a plan's function, what autograd keeps.
Non-goals: deciding, and running what was not met before (`autograd`).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import accumulate, arguments, errors, plans
from .derivative import NO, Saving

Extents = Mapping[str, int]
Picker = Callable[[Any], tuple]
Place = tuple[int, Any]
_executes = getattr(torch._C, "_will_engine_execute_node", None)
_keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


@dataclass(frozen=True)
class Backward:
    """A backward of a kind: `pick` takes its plan's arguments from saved tensors and cotangents, `give` makes the gradients, one an input
    of the node, of the results. `donating` does the same and overwrites the arguments at `donors`, where nobody else holds them."""

    plan: plans.Plan
    pick: Picker
    give: Picker
    donating: plans.Plan | None = None
    donors: tuple[int, ...] = ()


@dataclass(eq=False)
class Kind:
    """Differentiable calls of one kind, as `arguments.key` tells kinds apart: what was decided at the first serves the others.

    `plan` is the forward's where kernels run it and nothing that is kept is a number; `keep` picks what is saved from arguments and
    results. `edges`: for each input whose gradient may be asked for, which of the node's edges is its. `steps` are backwards, by what is
    asked for and by the kinds of what was saved and of the cotangents.
    """

    training: Any  # autograd.Training
    saving: Saving
    extents: Extents
    shapes: Sequence[Any]
    edges: tuple[tuple[int, int], ...] = ()
    plan: plans.Plan | None = None
    keep: Picker = tuple
    steps: dict[tuple, Backward] = field(default_factory=dict)

    def __call__(self, tensors: Sequence[Any]) -> Any:
        """What the caller gets of a call of this kind, which is one of plain tensors in no transform."""
        return self.training.fn._pack(_apply(self, *tensors))

    def forward(self, ctx: Any, tensors: tuple) -> tuple[torch.Tensor, ...]:
        """Run the forward and keep what the backward of the inputs that need a gradient reads."""
        assert self.plan is not None
        results = self.plan.consume([*tensors])
        self.training.fn.last_path = "kernels"
        ctx.kind, ctx.numbers = self, ()
        ctx.save_for_backward(*self.keep((*tensors, *results)))
        return self.training.outputs(ctx, results)

    def backward(self, ctx: Any, cotangents: tuple, last: bool) -> tuple[torch.Tensor | None, ...]:
        """One gradient an input of the node, None where none is asked for, where it is zero, or where it went into a buffer.

        With `last`, nobody here reads the saved tensors afterwards: unless the graph is retained, each is dropped once its last kernel is
        launched.
        """
        asked, saved = self.asked(ctx), ctx.saved_tensors
        key = asked, arguments.key(saved), arguments.key(cotangents)
        found = self.steps.get(key) or self.training.learn(self, key, saved, cotangents)
        if found is None:
            return self.training.backward(ctx, cotangents, asked, saved)
        given = [*found.pick((*saved, *cotangents))]
        del saved
        plan = found.plan
        if last:
            ctx.maybe_clear_saved_tensors()
            if found.donating is not None and dropped() and all([alone(given, i) for i in found.donors]):
                plan = found.donating
        results = plan.consume(given)
        self.training.fn.last_backward = "kernels"
        return found.give(results)

    def asked(self, ctx: Any) -> tuple[int, ...]:
        """Which gradients this pass of the engine wants: of the inputs that need one, perhaps not all (`torch.autograd.grad`)."""
        asked = self.saving.asked
        if self.training.buffers:
            codes = {i: accumulate.code(b) for i, b in self.training.buffers.items()}
            asked = tuple([codes.get(i, a) if a else a for i, a in enumerate(asked)])
        if _executes is None or len(self.edges) < 2:
            return asked
        edges, chosen = ctx.next_functions, [*asked]
        for i, edge in self.edges:
            node = edges[edge][0]
            try:
                if node is not None and not _executes(node):
                    chosen[i] = NO
            except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
                pass
        return tuple(chosen)


class Gradient(torch.autograd.Function):
    """The node in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, by: Any, *tensors: Any) -> tuple[torch.Tensor, ...]:
        return by.forward(ctx, tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        kind = ctx.kind
        if not torch.is_grad_enabled():
            return kind.backward(ctx, cotangents, last=True)
        with torch.no_grad():
            gradients = kind.backward(ctx, cotangents, last=False)
        return tuple(_once(kind.training.fn.program.name, gradients, [*ctx.saved_tensors, *cotangents]))


# What `apply` calls once it has looked for torch.func transforms, of which `arguments.kind` knows that there are none.
_apply: Any = getattr(super(torch.autograd.Function, Gradient), "apply", Gradient.apply)


def _once(name: str, gradients: tuple[torch.Tensor | None, ...], sources: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """The gradients as results that depend on `sources` and refuse to be differentiated."""
    there = [g for g in gradients if g is not None]
    if not there:
        return gradients
    marked = iter(_Once.apply(name, len(there), *there, *[s for s in sources if s is not None]))
    return [None if g is None else next(marked) for g in gradients]


class _Once(torch.autograd.Function):
    """The node that stands for a second derivative."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.name = name
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise errors.refuse(
            errors.TWICE,
            f"{ctx.name}: the gradient of a gradient was asked for, and {ctx.name}_backward has no derivative",
            help=f"differentiate once, without create_graph=True; or use {ctx.name}.reference(...), which torch can differentiate twice",
        )


def _holders(given: Sequence[Any], place: int) -> tuple[int, int, int]:
    """How many hold a tensor: its Python object, the tensor, its memory."""
    return sys.getrefcount(given[place]), given[place]._use_count(), torch._C._storage_Use_Count(given[place].untyped_storage()._cdata)


try:  # what these count is torch's own business: where one is missing, nothing is overwritten
    _LONE: tuple[int, int, int] | None = _holders([torch.empty(1)], 0)
except (AttributeError, RuntimeError, TypeError):
    _LONE = None


def dropped() -> bool:
    """Does the running backward drop its graph, so that no other reads what was saved?"""
    return _keeps is not None and not _keeps()


def alone(given: list[Any], place: int) -> bool:
    """Does nobody hold this tensor, or another view of its memory, but the list?"""
    return _LONE is not None and _holders(given, place) == _LONE


def picker(places: Sequence[int]) -> Callable[[tuple], tuple]:
    """What picks the values at these places."""
    if len(places) < 2:
        return lambda values: tuple(values[i] for i in places)
    return operator.itemgetter(*places)


def giver(places: Sequence[Place | None]) -> Picker:
    """What makes a node's gradients of results: one, for a gradient, at each of these places, None at others and before them all."""
    if any(p is not None and p[1] is not None for p in places):

        def give(results: list) -> tuple:
            return None, *[p and (results[p[0]] if p[1] is None else results[p[0]].reshape(p[1])) for p in places]

        return give
    pick = operator.itemgetter(-1, *[-1 if p is None else p[0] for p in places])
    return lambda results: pick([*results, None])
