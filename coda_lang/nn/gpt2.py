"""GPT-2: a model of three programs, `pre`, `layer` (shifted by half: from one attention to the next) and `post`, and its head.

In: `GPT2Config`, token ids. Out: hidden states, losses, logits. Parameters have Hugging Face's names and layout (weights with inputs as
rows). Non-goals: dropout, generation with a cache of keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import head
from .attention import attend, mask_of
from .config import GPT2Config
from .weights import Accept, Group, Programs, Weight, check_whole, positions, says_of_weights

CAUSAL_MASKS = (".attn.bias", ".attn.masked_bias")  # buffers of older checkpoints


def _block(d: int, f: int, options: dict[str, Any]) -> Group:
    """The parameters of one block."""
    return Group(
        ln_1=Weight(d, bias=d, **options),
        attn=Group(c_attn=Weight(d, 3 * d, bias=3 * d, **options), c_proj=Weight(d, d, bias=d, **options)),
        ln_2=Weight(d, bias=d, **options),
        mlp=Group(c_fc=Weight(d, f, bias=f, **options), c_proj=Weight(f, d, bias=d, **options)),
    )


def _both(*parts: Any) -> list[Tensor]:
    """Weight and bias of each."""
    return [t for part in parts for t in (part.weight, part.bias)]


def _before(block: Any) -> list[Tensor]:
    """What stands before a block's attention."""
    return _both(block.ln_1, block.attn.c_attn)


def _behind(block: Any) -> list[Tensor]:
    """What stands behind it."""
    return _both(block.attn.c_proj, block.ln_2, block.mlp.c_fc, block.mlp.c_proj)


class GPT2Model(nn.Module):
    """Token ids to the last hidden state (after the final layer norm)."""

    def __init__(self, config: GPT2Config, *, dtype: torch.dtype = torch.bfloat16, device: Any = None) -> None:
        super().__init__()
        self.config = config
        options = {"dtype": dtype, "device": device}
        d, f = config.n_embd, config.n_inner or 4 * config.n_embd
        self.wte, self.wpe = Weight(config.vocab_size, d, **options), Weight(config.n_positions, d, **options)
        self.h = nn.ModuleList(_block(d, f, options) for _ in range(config.n_layer))
        self.ln_f = Weight(d, bias=d, **options)
        self.programs = Programs("gpt2", ("pre", "attn_out_mlp", "lm_head"), config.extents, {"eps": config.layer_norm_epsilon})
        self.register_load_state_dict_pre_hook(Accept(CAUSAL_MASKS))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start anew: layer norms 1, biases 0, weights normal, those that add to the residual smaller."""
        for name, part in self.named_modules():
            if isinstance(part, Weight):
                std = self.config.initializer_range
                small = std / (2 * self.config.n_layer) ** 0.5
                part.start(1.0 if part.weight.dim() == 1 else None, small if name.endswith("c_proj") else std)

    @says_of_weights
    def forward(self, input_ids: Tensor, *, position_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """[batch, rows, d] of ids [batch, rows]; see `attention.mask_of` for masks, positions count from 0 in each sequence by default."""
        shape, hd, run = input_ids.shape, self.config.extents["hd"], self.programs
        mask = mask_of(attention_mask, shape)
        blocks = list(self.h)
        check_whole(blocks[0])
        places = positions(input_ids, position_ids, self.config.n_positions)
        x = F.embedding(input_ids.flatten(), self.wte.weight) + F.embedding(places, self.wpe.weight)
        q, k, v = run.pre(x, *_before(blocks[0]))
        for here, following in zip(blocks, blocks[1:]):
            a = attend(q, k, v, shape, hd, mask)
            x, q, k, v = run.layer(a, x, *_behind(here), *_before(following))
        h = run.post(attend(q, k, v, shape, hd, mask), x, *_behind(blocks[-1]), *_both(self.ln_f))
        return h.view(*shape, h.shape[-1])

    @property
    def last_path(self) -> str | None:
        """What ran the last calls of these programs: "kernels" or "reference"."""
        return self.programs.last_path()


class GPT2LMHeadModel(nn.Module):
    """A GPT-2 with its head, which is its embedding. `load_state_dict` takes a Hugging Face GPT-2's state dict, `state_dict` gives one.

    ignore_index: the label of tokens that no loss counts. keep_logits False: a training step stores no logits (see `linear_cross_entropy`).
    """

    def __init__(
        self, config: GPT2Config, *, ignore_index: int = -100, keep_logits: bool = True, dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.ignore_index, self.keep_logits = config, ignore_index, keep_logits
        self.programs = head.programs(ignore_index)
        self.transformer = GPT2Model(config, dtype=dtype, device=device)
        self.lm_head = Group()
        self.lm_head.weight = self.transformer.wte.weight
        aliases = (("lm_head.weight", "transformer.wte.weight"),)
        self.register_load_state_dict_pre_hook(Accept(CAUSAL_MASKS, aliases, prefix="transformer."))

    @says_of_weights
    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, *, position_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        reduction: str = "mean", return_logits: bool | None = None,
    ) -> head.CausalLMOutput:  # fmt: skip
        """Logits [batch, rows, v]; with labels [batch, rows] (the ids themselves: they are shifted here) the loss, and logits if asked for.

        reduction: "mean" over the labels that count, "sum", or "none" (one loss a row, [batch, rows], the last row's 0).
        """
        hidden = self.transformer(input_ids, position_ids=position_ids, attention_mask=attention_mask)
        return head.output(
            self.programs, hidden, self.lm_head.weight, labels, reduction=reduction, ignore_index=self.ignore_index,
            keep_logits=self.keep_logits, return_logits=return_logits,
        )  # fmt: skip

    @property
    def last_path(self) -> str | None:
        """What ran the last calls of these programs: "kernels" or "reference"."""
        return self.transformer.last_path
