"""Rows 6 and 7 of what went wrong for users elsewhere, for gradients: offsets beyond 2³¹ elements, vocabularies that no tile divides.

On the CPU the derived backward by the twin and by the host with stand-ins for kernels; marked `gpu`, the kernels.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from coda_lang.backend_cute import arguments, host  # noqa: E402
from coda_lang.backend_cute.function import fixed  # noqa: E402
from tests.autograd_cases import Kernels  # noqa: E402
from tests.standins import poisoning  # noqa: E402

WAYS = pytest.mark.parametrize("way", ["planned", "kernels", pytest.param("cuda", marks=pytest.mark.gpu)])
GATED = "program p(x: bf16[m, k], w: bf16[n, k], b: f32[n]) -> (y: bf16[m, n])\ny = silu(x @ w) * b\n"
LOSS = """
program p(x: bf16[m, d], w: bf16[v, d], target: i64[m]) -> (loss: f32[m])
z = x @ w
loss = where(target == -100, 0.0, logsumexp[v](z) - gather[v](z, target))
"""


def compiled(text: str, way: str, monkeypatch: pytest.MonkeyPatch, **sizes: int):
    """The callable, and the device of its tensors; buffers are poisoned."""
    fn = coda_lang.compile(text)
    monkeypatch.setattr(host, "allocate", poisoning)
    if way == "kernels":
        monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
        monkeypatch.setattr(arguments, "check_gpu", lambda *_: None)
        fn.objects = Kernels(fn.functions, {**sizes, **fixed(fn.program)}, fixed(fn.program), [])
    return fn, torch.device("cuda" if way == "cuda" else "cpu")


@WAYS
@pytest.mark.parametrize("which", ["x", "w", "cotangent"])
def test_row_6_offsets_beyond_32_bits(way: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as from compact tensors; the last rows lie more than 2³¹ elements behind the first."""
    fn, device = compiled(GATED, way, monkeypatch, m=3, n=16, k=32)
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 32).bfloat16(), torch.randn(16, 32).bfloat16(), torch.randn(16)
    given = torch.randn(3, 16).bfloat16()
    held = {"x": x.to(device), "w": w.to(device), "cotangent": given.to(device)}
    found = []
    for far in (False, True):
        now = dict(held)
        if far:
            t = now[which]
            rows, stride = t.shape[0], -(-(2**31) // (t.shape[0] - 1) // 8) * 8
            now[which] = torch.empty_strided(t.shape, (stride, 1), dtype=t.dtype, device=device).copy_(t)
            assert (rows - 1) * now[which].stride(0) >= 2**31
        leaves = [now["x"].detach().requires_grad_(), now["w"].detach().requires_grad_(), b.to(device).requires_grad_()]
        assert (leaves[0].stride(0) > 32) == (far and which == "x")
        y = fn(*leaves)
        found.append([y.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(y, leaves, now["cotangent"]))])
        del y, leaves, now
    assert all(torch.equal(a, c) for a, c in zip(*found))
    z = x.double() @ w.double().T
    want = (given.double() * torch.nn.functional.silu(z)).sum(0)
    torch.testing.assert_close(found[1][3].double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_row_6_gradients_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight gradient of more than 2³¹ elements; finite wrong values look plausible, so look at the last rows."""
    fn, device = compiled("program p(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n", "cuda", monkeypatch)
    n, k = 131080, 16392
    x, w = torch.randn(8, k, device=device).bfloat16(), torch.zeros(n, k, device=device, dtype=torch.bfloat16).requires_grad_()
    given = torch.randn(8, n, device=device).bfloat16()
    (got,) = torch.autograd.grad(fn(x, w), [w], given)
    assert got.numel() > 2**31
    for part in (slice(0, 8), slice(n - 8, n)):
        want = given[:, part].double().T @ x.double()
        assert float((got[part].double() - want).norm() / want.norm()) < 4e-3


@WAYS
@pytest.mark.parametrize("v", [1, 129, 517, 1001])
def test_row_7_padded_columns_take_no_part(way: str, v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target in the last column; rows that are ignored have no gradient; a row of dz sums to 0 only if no other column took part."""
    fn, device = compiled(LOSS, way, monkeypatch, m=37, d=64, v=v)
    torch.manual_seed(v)
    x, w = torch.randn(37, 64).bfloat16(), (torch.randn(v, 64) / 4).bfloat16()
    w = w - 4.0 if v == 129 else w  # logits far below the zeros that padding would be
    target = torch.full((37,), v - 1)
    target[::5] = -100
    leaves = [x.to(device).requires_grad_(), w.to(device).requires_grad_()]
    loss = fn(*leaves, target.to(device))
    got = [g.cpu().double() for g in torch.autograd.grad(loss.sum(), leaves)]
    doubles = [x.double().requires_grad_(), w.double().requires_grad_()]
    exact = torch.nn.functional.cross_entropy(doubles[0] @ doubles[1].T, target, reduction="sum", ignore_index=-100)
    want = torch.autograd.grad(exact, doubles)
    assert not got[0][::5].any() and bool(got[0].isfinite().all()) and bool(got[1].isfinite().all())
    for g, e in zip(got, want):
        bound = 3e-2 if v == 129 else 1e-2  # weights about -4 times a dz that sums to 0: its rounding shows
        assert float((g - e).norm()) <= bound * float(e.norm()) + 1e-6
