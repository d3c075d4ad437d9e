"""Whole models of compiled programs: `torch.nn` modules with ordinary parameters, in Hugging Face's names and layout.

In: a configuration, token ids. Out: losses and logits. What stands between two attentions is one program (nn/programs/); attention is
torch's. Importing this imports torch. Non-goals: generation, dropout, training loops.
"""

from .config import GPT2Config, LlamaConfig
from .gpt2 import GPT2LMHeadModel, GPT2Model
from .head import CausalLMOutput, linear_cross_entropy
from .llama import LlamaForCausalLM, LlamaModel

__all__ = [
    "CausalLMOutput",
    "GPT2Config",
    "GPT2LMHeadModel",
    "GPT2Model",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LlamaModel",
    "linear_cross_entropy",
]
