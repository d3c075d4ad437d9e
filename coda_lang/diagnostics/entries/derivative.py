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


def _derived(program: str) -> str:
    return f'''
from coda_lang import driver
from coda_lang.passes.differentiate import differentiate

[program] = driver.programs("""
{program}""")
differentiate(program)
'''


_SIGNS = "z = x @ w\npositive = i32(z > 0.0)\n"

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
    Entry(
        "C0511",
        "the derivative of a forward program",
        "`forward program` says that no derivative is wanted, so none is made.",
        _derived("forward program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n"),
        _derived("program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n"),
        "Drop the word `forward`.",
        kind="python",
    ),
    Entry(
        "C0512",
        "a derivative by nothing",
        "Floating-point inputs get gradients, unless they are `const`; integers never do. This program has no input left that would.",
        _derived("program linear(const x: bf16[m, k], const w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n"),
        _derived("program linear(const x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n"),
        "Write `forward program`, or drop `const` where a gradient is wanted.",
        kind="python",
    ),
    Entry(
        "C0513",
        "a derivative of integers",
        "Gradients start from floating-point outputs. Integers and truth values have none.",
        _derived("program signs(x: bf16[m, k], w: bf16[n, k]) -> (positive: i32[m, n])\n" + _SIGNS),
        _derived("program signs(x: bf16[m, k], w: bf16[n, k]) -> (z: bf16[m, n], positive: i32[m, n])\n" + _SIGNS),
        "Write `forward program`, or return the floating-point value too.",
        kind="python",
    ),
)
