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
        "a gradient of a program that has no derivative",
        """A call in grad mode with a tensor that requires a gradient asks autograd for a backward. A `forward program` has none, nor has
        one whose float inputs are all `const`. A result that silently required no gradient would train nothing, so the call is refused,
        on the CPU too, lest a program train there and stop on a GPU. A `const` argument never gets a gradient and is not refused.

        `fn.reference(...)` is plain PyTorch and can be differentiated by autograd on any device.""",
        _LINEAR.replace("program", "forward program") + "linear(x, w)",
        _LINEAR + "linear(x, w)",
        "Drop the word `forward`; or call under torch.no_grad(), pass x.detach(), or differentiate fn.reference(...).",
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
    Entry(
        "C0514",
        "a gradient of a gradient",
        """The backward of a program is kernels, which have no derivative themselves. With `create_graph=True` the gradients can be had, and
        differentiating them is refused.""",
        _LINEAR + "(g,) = torch.autograd.grad(linear(x, w).square().sum(), w, create_graph=True)\ng.sum().backward()",
        _LINEAR + "(g,) = torch.autograd.grad(linear(x, w).square().sum(), w)",
        "Differentiate once; fn.reference(...) is plain PyTorch, which can be differentiated twice.",
        kind="python",
    ),
    Entry(
        "C0515",
        "a derivative that is not in reverse mode",
        """Programs have a backward, for `backward()` and `torch.autograd.grad`. They have no forward-mode derivative, and the transforms of
        `torch.func` (grad, vmap, jvp), which replace tensors by their own, cannot look into kernels. Ignoring a tangent would give a wrong
        derivative, so it is refused.""",
        _LINEAR
        + """import torch.autograd.forward_ad as forward_ad

with forward_ad.dual_level():
    linear(forward_ad.make_dual(x, torch.ones_like(x)), w.detach())
""",
        _LINEAR + "linear(x, w).sum().backward()",
        "Differentiate in reverse mode, or transform fn.reference(...), which is plain PyTorch.",
        kind="python",
    ),
    Entry(
        "C0516",
        "a buffer that cannot take a gradient",
        """`accumulate_into={"w": buffer}` adds the gradient of `w` to a buffer: in f32, rounded once to the buffer's type. The
        buffer has w's shape and device, is float32 or bfloat16 (or of w's own type), has memory of its own and needs no gradient
        itself; `w` must require one, for else none would ever be added. While torch.compile traces a call, buffers are refused.""",
        _LINEAR + 'linear(x, w, accumulate_into={"w": torch.zeros(64)})',
        _LINEAR + 'linear(x, w, accumulate_into={"w": torch.zeros(8, 64)}).sum().backward()',
        "Make it by torch.zeros_like(w, dtype=torch.float32).",
        kind="python",
    ),
)
