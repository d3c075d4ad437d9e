"""LLaMA: a model of three programs, `pre`, `layer` (shifted by half: from one attention to the next) and `post`, and its head.

In: `LlamaConfig`, token ids. Out: hidden states, losses, logits. Parameters have Hugging Face's names and layout, one each.
Non-goals: generation with a cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import head
from .attention import attend, mask_of
from .config import LlamaConfig
from .weights import Accept, Group, Programs, Weight, check_whole, positions, says_of_weights

OTHERS = (  # what tells checkpoints of other families, whose layers are otherwise a LLaMA's
    ("_proj.bias", "biases (Qwen 2: specs/qwen/qwen2.coda)"),
    ("self_attn.q_norm.weight", "norms of queries and keys (Qwen 3: specs/qwen/qwen3.coda; Gemma 3: specs/gemma/gemma3.coda)"),
    ("_feedforward_layernorm.weight", "norms on both sides of the feed-forward (Gemma 2: specs/gemma/gemma2.coda)"),
)


def _layer(c: LlamaConfig, options: dict[str, Any]) -> Group:
    """The parameters of one layer."""
    d, f, hd = c.hidden_size, c.intermediate_size, c.extents["pair"] * 2
    q, kv = c.extents["qh"] * hd, c.extents["kh"] * hd
    return Group(
        self_attn=Group(
            q_proj=Weight(q, d, **options), k_proj=Weight(kv, d, **options), v_proj=Weight(kv, d, **options), o_proj=Weight(d, q, **options)
        ),
        mlp=Group(gate_proj=Weight(f, d, **options), up_proj=Weight(f, d, **options), down_proj=Weight(d, f, **options)),
        input_layernorm=Weight(d, **options),
        post_attention_layernorm=Weight(d, **options),
    )


def _before(layer: Any) -> tuple[Tensor, ...]:
    """What stands before a layer's attention."""
    a = layer.self_attn
    return layer.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight


def _behind(layer: Any) -> tuple[Tensor, ...]:
    """What stands behind it."""
    m = layer.mlp
    norm = layer.post_attention_layernorm.weight
    return layer.self_attn.o_proj.weight, norm, m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight


def _angles(c: LlamaConfig, device: Any = None) -> Tensor:
    """What each pair of coordinates turns by from one position to the next: f32 [pair]."""
    return torch.tensor(c.frequencies(), dtype=torch.float32, device=device)


class LlamaModel(nn.Module):
    """Token ids to the last hidden state (after the final norm).

    The buffer `freq` holds the angles, f32 [head_dim / 2]; it may be replaced by others. It moves with the model, and keeps its type.
    """

    freq: Tensor

    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype = torch.bfloat16, device: Any = None) -> None:
        super().__init__()
        self.config = config
        options = {"dtype": dtype, "device": device}
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size, **options)
        self.layers = nn.ModuleList(_layer(config, options) for _ in range(config.num_hidden_layers))
        self.norm = Weight(config.hidden_size, **options)
        self.register_buffer("freq", _angles(config, device), persistent=False)
        self.programs = Programs("llama", ("pre", "layer", "post"), config.extents, {"eps": config.rms_norm_eps})
        self.register_load_state_dict_pre_hook(Accept(dropped=(".rotary_emb.inv_freq",), others=OTHERS))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start anew: norms 1, all else normal."""
        for part in self.modules():
            if isinstance(part, Weight):
                part.start(1.0 if part.weight.dim() == 1 else None, self.config.initializer_range)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LlamaModel:
        """Casts weights only: angles in bf16 would be others. Where a model without storage gets one (`to_empty`), so do the angles."""
        before = self.freq
        super()._apply(fn, recurse)
        device = self.freq.device
        self.freq = _angles(self.config, device) if before.is_meta and device.type != "meta" else before.to(device)
        return self

    @says_of_weights
    def forward(self, input_ids: Tensor, *, position_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """[batch, rows, d] of ids [batch, rows]; see `attention.mask_of` for masks, positions count from 0 in each sequence by default."""
        shape, hd, run = input_ids.shape, self.config.extents["pair"] * 2, self.programs
        angle = (positions(input_ids, position_ids), self.freq)
        mask = mask_of(attention_mask, shape)
        layers = list(self.layers)
        check_whole(layers[0])
        x = F.embedding(input_ids, self.embed_tokens.weight).flatten(0, 1)
        q, k, v = run.pre(x, *_before(layers[0]), *angle)
        for here, following in zip(layers, layers[1:]):
            a = attend(q, k, v, shape, hd, mask)
            x, q, k, v = run.layer(a, x, *_behind(here), *_before(following), *angle)
        h = run.post(attend(q, k, v, shape, hd, mask), x, *_behind(layers[-1]), self.norm.weight)
        return h.view(*shape, h.shape[-1])

    @property
    def last_path(self) -> str | None:
        """What ran the last calls of these programs: "kernels" or "reference"."""
        return self.programs.last_path()


class LlamaForCausalLM(nn.Module):
    """A LLaMA with its head. `load_state_dict` takes a Hugging Face LLaMA's state dict, `state_dict` gives one.

    ignore_index: the label of tokens that no loss counts. keep_logits False: a training step stores no logits (see `linear_cross_entropy`).
    """

    def __init__(
        self, config: LlamaConfig, *, ignore_index: int = -100, keep_logits: bool = True, dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.ignore_index, self.keep_logits = config, ignore_index, keep_logits
        self.programs = head.programs(ignore_index)
        self.model = LlamaModel(config, dtype=dtype, device=device)
        self.lm_head = Weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.lm_head.start(None, config.initializer_range)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.register_load_state_dict_pre_hook(Accept(aliases=(("lm_head.weight", "model.embed_tokens.weight"),)))

    @says_of_weights
    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, *, position_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        reduction: str = "mean", return_logits: bool | None = None,
    ) -> head.CausalLMOutput:  # fmt: skip
        """Logits [batch, rows, v]; with labels [batch, rows] (the ids themselves: they are shifted here) the loss, and logits if asked for.

        reduction: "mean" over the labels that count, "sum", or "none" (one loss a row, [batch, rows], the last row's 0).
        """
        hidden = self.model(input_ids, position_ids=position_ids, attention_mask=attention_mask)
        return head.output(
            self.programs, hidden, self.lm_head.weight, labels, reduction=reduction, ignore_index=self.ignore_index,
            keep_logits=self.keep_logits, return_logits=return_logits,
        )  # fmt: skip

    @property
    def last_path(self) -> str | None:
        """What ran the last calls of these programs: "kernels" or "reference"."""
        return self.model.last_path
