"""Models of `coda_lang.nn` beside plain ones with the same weights, and what a step gives of each: what their tests share."""

from __future__ import annotations

import pytest
import torch

from bench.plain_models import PlainGPT2, PlainLlama, loss
from coda_lang import nn

SMALL = nn.LlamaConfig(
    vocab_size=203, hidden_size=72, intermediate_size=104, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
FULL = nn.LlamaConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
)
SMALL_GPT2 = nn.GPT2Config(vocab_size=203, n_positions=40, n_embd=48, n_layer=3, n_head=3)
FULL_GPT2 = nn.GPT2Config(vocab_size=1000, n_positions=64, n_embd=256, n_layer=4, n_head=4)
FAMILIES = {
    "llama": (nn.LlamaForCausalLM, PlainLlama, SMALL),
    "gpt2": (nn.GPT2LMHeadModel, PlainGPT2, SMALL_GPT2),
}
FULL_FAMILIES = {
    "llama": (nn.LlamaForCausalLM, PlainLlama, FULL),
    "gpt2": (nn.GPT2LMHeadModel, PlainGPT2, FULL_GPT2),
}
SHAPE = (2, 19)
both = pytest.mark.parametrize("family", FAMILIES)


def ids_of(config, shape=SHAPE, seed=0):
    return torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def randomised(model, seed=0):
    """Weights whose norms and biases matter, the same for equal shapes in equal order; products keep values near 1."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            drawn = torch.randn(p.shape, generator=gen)
            p.copy_((1 + 0.2 * drawn if name.endswith("norm.weight") or ".ln_" in name else 0.2 * drawn) if p.dim() == 1 else 0.08 * drawn)
    return model


def pair(family, families=FAMILIES, seed=0):
    """Ours and a plain model with the same bf16 weights, and ids."""
    ours, plain, config = families[family]
    model = randomised(ours(config), seed)
    other = plain(config).bfloat16()
    other.load_state_dict(model.state_dict())
    return model, other, ids_of(config, seed=seed)


def results(logits, value, model):
    """What is compared: logits, loss, gradients by name."""
    value.backward()
    return {"logits": logits.detach(), "loss": value.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def of_ours(model, ids, **options):
    out = model(ids, labels=ids, return_logits=True, **options)
    return results(out.logits, out.loss, model)


def of_plain(model, ids):
    logits = model(ids)
    return results(logits, loss(logits, ids), model)
