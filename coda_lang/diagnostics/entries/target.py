"""Entries of the error catalog, C06xx: limits of the target."""

from __future__ import annotations

from ..entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "C0601",
        "a kernel that no tile holds",
        """A tile has at most 256 columns, of all accumulators together; groups with statistics must not straddle tiles; and the
        operands, tile loads and
        stores share 227 KiB of shared memory. No tile shape fits this program.""",
        """
program norms(x: bf16[m, d], w: bf16[three=3, head, hd=128, d], g: bf16[hd]) -> (y: bf16[m, three, head, hd])
q, k, v = rmsnorm[hd](x @ w, g, 1e-6)
y = pack[three](q, k, v)
""",
        """
program norms(x: bf16[m, d], w: bf16[three=3, head, hd=64, d], g: bf16[hd]) -> (y: bf16[m, three, head, hd])
q, k, v = rmsnorm[hd](x @ w, g, 1e-6)
y = pack[three](q, k, v)
""",
        "Use fewer lanes, smaller groups of columns, or fewer outputs.",
    ),
    Entry(
        "C0602",
        "a tensor used in two layouts",
        """A kernel sees each tensor in one storage order. The host may rearrange a tensor before the kernel runs, but here two uses
        ask for different
        orders, and none serves both.""",
        """
program twice(x: bf16[m, a, lane=2], w: bf16[n, a, lane]) -> (y: bf16[m, n])
g, u = rename[a -> n](x)
y = x @ w + g * u
""",
        """
program twice(x: bf16[m, a, lane=2], w: bf16[n, a, lane], r: bf16[m, n, lane]) -> (y: bf16[m, n])
g, u = r
y = x @ w + g * u
""",
        "Pass the tensor twice, under two names.",
        "reason",
    ),
)
