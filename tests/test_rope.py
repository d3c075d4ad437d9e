"""Rotary embedding: exact angles up to a million positions, both layouts and signs (row 17 of known failures), partial width."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from coda_lang.backend_cute import autograd, torch_fns  # noqa: E402

PAIRS, HEADS = 16, 3
ANGLE = 1.2e-6  # radians, of an angle below a turn in f32: two roundings of it, and those of sin and cos
NEAR = 1e-7  # in float64: constants are pairs of f32, 2^-50 of 10^6
PREFIX = "program p(x: bf16[m, d], w: bf16[head, lane=2, pair=16, d], pos: i32[m], "


def frequencies(theta: float = 500000.0) -> torch.Tensor:
    return theta ** -(torch.arange(PAIRS, dtype=torch.float64) / PAIRS)


def positions() -> torch.Tensor:
    """From the first to a million, those with many bits among them."""
    drawn = torch.randint(0, 10**6 + 1, (200,), generator=torch.Generator().manual_seed(0))
    return torch.cat((torch.arange(8), 2 ** torch.arange(20) - 1, torch.tensor([10**6 - 1, 10**6]), drawn)).int()


def two_floats(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = x.float()
    return high, (x - high.double()).float()


def turned(q: torch.Tensor, angle: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """float64, lane before pair."""
    a, b = q.unbind(-2)
    c, s = angle.cos()[:, None], sign * angle.sin()[:, None]
    return torch.stack((a * c - b * s, a * s + b * c), -2)


def unit_vectors(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and w whose product is (1, 0) in every plane, so that the result is cos and sin of each angle."""
    x = torch.zeros(m, 8)
    x[:, 0] = 1
    w = torch.zeros(HEADS, 2, PAIRS, 8)
    w[:, 0, :, 0] = 1
    return x.bfloat16(), w.bfloat16()


@pytest.mark.parametrize("way", ["reference", "reference_planned"])
def test_angles_are_exact_for_the_frequencies_given(way: str) -> None:
    """As float64 has them from the same f32 frequencies, to about an ulp, wherever the position is."""
    fn = coda_lang.compile(PREFIX + "const freq: f32[pair]) -> (y: f32[m, head, lane, pair])\ny = rope[lane](x @ w, pos, freq)\n")
    pos, freq = positions(), frequencies().float()
    x, w = unit_vectors(len(pos))
    got = getattr(fn, way)(x, w, pos, freq).double()
    angle = pos.double()[:, None] * freq.double()
    want = torch.stack((angle.cos(), angle.sin()), 1)[:, None].expand_as(got)
    assert (got - want).abs().max() < ANGLE
    naive = (pos.float()[:, None] * freq).double()
    assert (naive.cos() - angle.cos()).abs().max() > 1e-2  # what a product rounded to f32 would give


@pytest.mark.parametrize("way", ["reference", "reference_planned"])
def test_exact_frequencies_in_two_floats(way: str) -> None:
    fn = coda_lang.compile(
        PREFIX + "const hi: f32[pair], const lo: f32[pair]) -> (y: f32[m, head, lane, pair])\ny = rope_exact[lane](x @ w, pos, hi, lo)\n"
    )
    pos, freq = positions(), frequencies()
    x, w = unit_vectors(len(pos))
    got = getattr(fn, way)(x, w, pos, *two_floats(freq / (2 * math.pi))).double()
    angle = pos.double()[:, None] * freq
    want = torch.stack((angle.cos(), angle.sin()), 1)[:, None].expand_as(got)
    assert (got - want).abs().max() < ANGLE
    rounded = pos.double()[:, None] * freq.float().double()
    assert (rounded.cos() - angle.cos()).abs().max() > 1e-3  # what f32 frequencies cannot say


def test_a_gradient_of_the_frequencies_is_that_of_the_product() -> None:
    fn = coda_lang.compile(PREFIX + "freq: f32[pair]) -> (y: f32[m, head, lane, pair])\ny = rope[lane](x @ w, pos, freq)\n")
    gen, pos, freq = torch.Generator().manual_seed(1), positions()[:60], frequencies().float()
    x, w = torch.randn(60, 8, generator=gen).bfloat16(), torch.randn(HEADS, 2, PAIRS, 8, generator=gen).bfloat16()
    upstream = torch.randn(60, HEADS, 2, PAIRS, generator=gen)
    f = freq.double().requires_grad_()
    q = torch.einsum("md,hlpd->mhlp", x.double(), w.double())
    (want,) = torch.autograd.grad((turned(q, pos.double()[:, None] * f) * upstream).sum(), [f])
    got = autograd.gradients_planned(fn, (x, w, pos, freq), {"y": upstream})["freq"]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_row_17_layouts_and_signs() -> None:
    """Half-split and adjacent pairs are one rotation under a permutation of the weight's rows; the two signs are inverses, and differ."""
    head = "(x: bf16[m, d], w: bf16[head, {axes}, d], pos: i32[m], const freq: f32[pair]) -> (y: f32[m, head, {axes}])\n"
    made = {
        (layout, name): coda_lang.compile(f"program p{head.format(axes=layout)}y = {name}[lane](x @ w, pos, freq)\n")
        for layout in ("lane=2, pair=16", "pair=16, lane=2")
        for name in ("rope", "rope_clockwise")
    }
    gen, pos, freq = torch.Generator().manual_seed(2), positions()[:40], frequencies().float()
    x, w = torch.randn(40, 8, generator=gen).bfloat16(), torch.randn(HEADS, 2, PAIRS, 8, generator=gen).bfloat16()
    angle = pos.double()[:, None] * freq.double()
    q = torch.einsum("md,hlpd->mhlp", x.double(), w.double())
    for name, sign in (("rope", 1), ("rope_clockwise", -1)):
        half = made["lane=2, pair=16", name].reference_planned(x, w, pos, freq, exact=True)
        pairs = made["pair=16, lane=2", name].reference_planned(x, w.transpose(1, 2).contiguous(), pos, freq, exact=True)
        want = turned(q, angle, sign)
        torch.testing.assert_close(half, want, rtol=NEAR, atol=NEAR)
        torch.testing.assert_close(pairs, want.transpose(2, 3), rtol=NEAR, atol=NEAR)
    assert (turned(q, angle) - turned(q, angle, -1)).abs().max() > 0.1
    torch.testing.assert_close(turned(turned(q, angle), angle, -1), q)


PARTIAL = {
    "half-split": (  # of 5 · 16 coordinates the first 32, (i, i + 16) together: Phi, GPT-NeoX
        "(x: bf16[m, d], w: bf16[head, part=5, pair=16, d], pos: i32[m], const freq: f32[pair]) -> (y: bf16[m, head, part, pair])\n"
        "turn, keep = split[part -> lane=2, rest=3](x @ w)\n"
        "y = pack[lane, rest -> part](rope[lane](turn, pos, freq), keep)\n",
        lambda q, angle: torch.cat((turned(q[:, :, :2], angle), q[:, :, 2:]), 2),
        (5, 16),
    ),
    "adjacent": (  # of 40 · 2 coordinates the first 32, (2i, 2i + 1) together: GPT-J
        "(x: bf16[m, d], w: bf16[head=3, pairs=40, lane=2, d], pos: i32[m], const freq: f32[pair]) -> (y: bf16[m, head, pairs, lane])\n"
        "turn, keep = split[pairs -> pair=16, rest=24](x @ w)\n"
        "y = pack[pair, rest -> pairs](rope[lane](turn, pos, freq), keep)\n",
        lambda q, angle: torch.cat((turned(q[:, :, :16].transpose(2, 3), angle).transpose(2, 3), q[:, :, 16:]), 2),
        (40, 2),
    ),
}


@pytest.mark.parametrize("convention", PARTIAL)
def test_partial_width(convention: str) -> None:
    """Only the first coordinates of a head turn; the others pass as they are, with their gradients."""
    text, want_of, inner = PARTIAL[convention]
    fn = coda_lang.compile("program p" + text)
    gen, pos, freq = torch.Generator().manual_seed(3), positions()[:30], frequencies().float()
    x, w = torch.randn(30, 8, generator=gen).bfloat16(), torch.randn(HEADS, *inner, 8, generator=gen).bfloat16()
    angle = pos.double()[:, None] * freq.double()
    a, c = x.double().requires_grad_(), w.double().requires_grad_()
    want = want_of(torch.einsum("md,hped->mhpe", a, c), angle)
    for got in (fn.reference(x, w, pos, freq, exact=True), fn.reference_planned(x, w, pos, freq, exact=True)):
        torch.testing.assert_close(got, want.detach(), rtol=NEAR, atol=NEAR)
    upstream = torch.randn(want.shape, generator=gen).bfloat16()
    found = autograd.gradients_planned(fn, (x, w, pos, freq), {"y": upstream})
    for name, g in zip("xw", torch.autograd.grad(want, [a, c], upstream.double())):
        torch.testing.assert_close(found[name], g, rtol=NEAR, atol=NEAR)


def test_the_steps_of_the_reduction() -> None:
    """What it stands on: fma rounds once, round goes to even."""
    f = torch_fns.Written()
    x = torch.tensor([1.0 + 2.0**-23])
    assert f.fma(x, x, -f.mul(x, x)).item() == 2.0**-46
    assert f.round(torch.tensor([0.5, 1.5, -2.5])).tolist() == [0.0, 2.0, -2.0]
