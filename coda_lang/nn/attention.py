"""Causal attention between two programs, by torch.

In: queries, keys and values as programs give them, one row a token; sizes; a mask. Out: one row a token, heads merged.
Non-goals: kernels of our own, caches of keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend_cute.errors import EXTENT, refuse


def mask_of(given: Tensor | None, shape: torch.Size) -> Tensor | None:
    """The mask that scaled_dot_product_attention takes: None for plain causal attention.

    `given`: [batch, rows], 0 or False where a token is padding (never attended to); or bool [batch, 1, rows, rows], True where a token
    may attend, which is taken as it is. Raises CallError (C0707) for other shapes.
    """
    if given is None:
        return None
    batch, rows = shape
    whole = given.dim() == 4 and given.shape[0] in (1, batch) and given.shape[2:] == (rows, rows)
    if not whole and given.shape != shape:
        text = f"attention_mask of shape {list(given.shape)}, and ids of shape {[batch, rows]}"
        help = f"pass [{batch}, {rows}] with 0 for padding, or a bool mask [{batch}, 1, {rows}, {rows}], True where a token may attend"
        raise refuse(EXTENT, text, help=help)
    if whole:
        return given
    causal = torch.ones(rows, rows, dtype=torch.bool, device=given.device).tril()
    itself = torch.eye(rows, dtype=torch.bool, device=given.device)  # so that padding attends to something
    return (causal & given.bool()[:, None, None, :]) | itself


def attend(q: Tensor, k: Tensor, v: Tensor, shape: torch.Size, head_dim: int, mask: Tensor | None) -> Tensor:
    """[batch · rows, heads · head_dim], from q, k, v [batch · rows, heads, …]; heads of k and v may be fewer."""
    q, k, v = (t.view(*shape, t.shape[1], head_dim).transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return a.transpose(1, 2).reshape(shape.numel(), q.shape[1] * head_dim)
