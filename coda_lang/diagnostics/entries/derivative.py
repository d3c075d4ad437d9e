"""Entries of the error catalog, C05xx: derivatives."""

from __future__ import annotations

from ..entry import Entry

_LINEAR = '''
import torch, coda_lang

linear = coda_lang.compile("""
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = x @ w
""")
x, w = torch.randn(4, 64).bfloat16(), torch.randn(8, 64).bfloat16().requires_grad_()
'''

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "C0501",
        "a gradient of a program that has no backward kernels",
        """A call in grad mode with a tensor that requires a gradient asks autograd for a backward, and this version derives none. A
        result that silently required no gradient would train nothing, so the call is refused, on the CPU too, lest a program
        train there and stop on a GPU. A `const` argument never gets a gradient and is not refused.

        `fn.reference(...)` is plain PyTorch and can be differentiated by autograd on any device.""",
        _LINEAR + "linear(x, w)",
        _LINEAR + "with torch.no_grad():\n    linear(x, w)",
        "Call under torch.no_grad(), pass x.detach(), or differentiate fn.reference(...).",
        kind="python",
    ),
)
