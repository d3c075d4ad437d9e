"""Plain PyTorch models to hold ours against: a LLaMA and a GPT-2 as their users know them, with Hugging Face's names of parameters.

In: sizes. Out: modules that give logits, in any dtype; the pieces (`rotated`, `heads_norm`) serve the tests of single programs.
Written for reading, not for speed: nothing is fused, each operation rounds to the model's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotated(x: Tensor, pos: Tensor, freq: Tensor) -> Tensor:
    """Rotary embedding, half-split: x is [..., rows, heads, head_dim], pos [..., rows]; the angle is computed in f32 at least."""
    angle = (pos[..., None].to(freq.dtype) * freq).repeat(*[1] * pos.dim(), 2)[..., None, :]
    a, b = x.chunk(2, dim=-1)
    return x * angle.cos().to(x.dtype) + torch.cat((-b, a), dim=-1) * angle.sin().to(x.dtype)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of -log p(next token); in f32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [batch, rows, heads, head_dim], grouped queries; the same with the heads merged."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.hd = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * self.hd, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * self.hd, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * self.hd, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * self.hd, c.hidden_size, bias=False)

    def forward(self, x: Tensor, pos: Tensor, freq: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.hd)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attention(rotated(q, pos, freq), rotated(k, pos, freq), v))


class LlamaMLP(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(c), LlamaMLP(c)
        self.input_layernorm, self.post_attention_layernorm = (Norm(c.hidden_size, c.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, pos: Tensor, freq: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), pos, freq)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLlama(nn.Module):
    """LlamaForCausalLM: `forward(ids)` gives logits."""

    def __init__(self, c) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(LlamaLayer(c) for _ in range(c.num_hidden_layers))
        self.model.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.freq = (1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).double() / c.head_dim)).float()

    def forward(self, ids: Tensor, pos: Tensor | None = None) -> Tensor:
        x = self.model.embed_tokens(ids)
        pos = torch.arange(ids.shape[1], device=ids.device).expand_as(ids) if pos is None else pos
        freq = self.freq.double() if x.dtype == torch.float64 else self.freq
        for layer in self.model.layers:
            x = layer(x, pos, freq)
        return self.lm_head(self.model.norm(x))


class Conv1D(nn.Module):
    """A linear layer whose weight has inputs as rows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) * 0.02), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class GPT2Block(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.heads = c.n_head
        self.ln_1, self.ln_2 = (nn.LayerNorm(c.n_embd, eps=c.layer_norm_epsilon) for _ in range(2))
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn, self.attn.c_proj = Conv1D(c.n_embd, 3 * c.n_embd), Conv1D(c.n_embd, c.n_embd)
        self.mlp.c_fc, self.mlp.c_proj = Conv1D(c.n_embd, c.n_inner), Conv1D(c.n_inner, c.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.attn.c_attn(self.ln_1(x)).chunk(3, dim=-1))
        x = x + self.attn.c_proj(attention(q, k, v))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    """GPT2LMHeadModel: `forward(ids)` gives logits; the head is the embedding."""

    def __init__(self, c) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.transformer.wpe = nn.Embedding(c.n_positions, c.n_embd)
        self.transformer.h = nn.ModuleList(GPT2Block(c) for _ in range(c.n_layer))
        self.transformer.ln_f = nn.LayerNorm(c.n_embd, eps=c.layer_norm_epsilon)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids: Tensor, pos: Tensor | None = None) -> Tensor:
        pos = torch.arange(ids.shape[1], device=ids.device).expand_as(ids) if pos is None else pos
        x = self.transformer.wte(ids) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))
