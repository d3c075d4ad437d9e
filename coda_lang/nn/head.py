"""A language model's head and loss: logits and cross-entropy of hidden states, by the programs llama/head.coda.

In: hidden states, the head's weight, targets or labels. Out: a loss, logits. Non-goals: other losses (write a program).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend_cute.errors import EXTENT, KIND, OPTION, refuse
from .weights import Programs

REDUCTIONS = ("mean", "sum", "none")


class CausalLMOutput(NamedTuple):
    """The loss, where labels were given; the logits, where they were asked for or no labels were given."""

    loss: Tensor | None = None
    logits: Tensor | None = None


def linear_cross_entropy(
    h: Tensor, weight: Tensor, target: Tensor, *, reduction: str = "mean", ignore_index: int = -100, keep_logits: bool = True
) -> Tensor:
    """`F.cross_entropy(h @ weight.T, target)` for h [..., d], weight [v, d], target [...] of integers; the loss is f32.

    reduction: "mean" over the rows that are not ignored (0, with zero gradients, if all are), "sum", or "none", of target's shape.
    A target outside of [0, v) that is not ignored gives NaN: the loss shows it, and no call waits for the device to look.
    keep_logits: the backward reads bf16 logits that the forward stored; False stores none and multiplies once more.
    Raises CodaError where the tensors do not fit.
    """
    return reduced(_loss(programs(ignore_index), h.flatten(0, -2), weight, target.flatten(), keep_logits), target, reduction, ignore_index)


def reduced(loss: Tensor, target: Tensor, reduction: str, ignore_index: int) -> Tensor:
    """Losses a row as torch's cross_entropy reduces them."""
    if reduction not in REDUCTIONS:
        raise refuse(OPTION, f"reduction={reduction!r}", help=f"it is one of {', '.join(REDUCTIONS)}")
    if reduction == "none":
        return loss.view(target.shape)
    total = loss.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum().clamp(min=1)


def programs(ignore_index: int) -> Programs:
    """The programs of a head, whatever model it belongs to."""
    return Programs("llama", ("head",), {}, {"ignore_index": ignore_index})


def _loss(run: Programs, h: Tensor, weight: Tensor, target: Tensor, keep_logits: bool) -> Tensor:
    return run.head(h, weight, target, outputs="loss") if keep_logits else run.head_chunked(h, weight, target)


def output(
    run: Programs, hidden: Tensor, weight: Tensor, labels: Tensor | None, *, reduction: str, ignore_index: int,
    keep_logits: bool, return_logits: bool | None,
) -> CausalLMOutput:  # fmt: skip
    """A model's answer from its last hidden state [batch, rows, d]; labels are shifted here: row t is to predict label t + 1."""
    h = hidden.flatten(0, 1)
    if labels is None:
        z = run.head(h, weight, _nothing(h, ignore_index), outputs="z")
        return CausalLMOutput(logits=z.view(*hidden.shape[:-1], z.shape[-1]))
    if labels.shape != hidden.shape[:-1]:
        text = f"labels of shape {list(labels.shape)}, and ids of shape {list(hidden.shape[:-1])}"
        raise refuse(EXTENT, text, help="pass the ids themselves, with ignore_index where a token is not to be learnt")
    if labels.dtype not in (torch.int32, torch.int64):
        raise refuse(KIND, f"labels of dtype {labels.dtype}, expected integers", help="pass the ids themselves")
    target = F.pad(labels.long(), (0, 1), value=ignore_index)[:, 1:]
    if return_logits:
        each, z = run.head(h, weight, target.reshape(-1))
        logits: Any = z.view(*hidden.shape[:-1], z.shape[-1])
    else:
        each, logits = _loss(run, h, weight, target.reshape(-1), keep_logits), None
    return CausalLMOutput(reduced(each, target, reduction, ignore_index), logits)


def _nothing(h: Tensor, ignore_index: int) -> Tensor:
    """Targets of rows that have none."""
    return torch.full((len(h),), ignore_index, dtype=torch.int64, device=h.device)
