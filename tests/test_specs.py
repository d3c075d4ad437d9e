"""Every program in specs/ means what a hand-written eager PyTorch function says, in float64; and the files are fit to be shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from meaning import built, inputs, means  # noqa: E402

from coda_lang.ir.interp import run  # noqa: E402

SPECS = Path(__file__).resolve().parent.parent / "specs"
FILES = sorted(SPECS.glob("*.coda"))


@dataclass(frozen=True)
class Case:
    """What a spec means, and extents at which to see it."""

    eager: Callable[..., Any]
    extents: dict[str, int]
    integers: dict[str, tuple[int, int]] = field(default_factory=dict)
    tolerance: float = 1e-9


def linear(x, w):
    return F.linear(x, w)


def swiglu(x, w):
    f, _, d = w.shape
    z = F.linear(x, w.reshape(2 * f, d))
    return F.silu(z[:, 0::2]) * z[:, 1::2], z.reshape(-1, f, 2)


def residual_sumsq(x, w, r, g):
    h = F.linear(x, w) + r
    return h, h * g, h.square().sum(dim=1)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rope_half(x, w, pos, freq):
    """As Hugging Face's LLaMA has it."""
    head, _, pair, d = w.shape
    q = F.linear(x, w.reshape(-1, d)).reshape(-1, head, 2 * pair)
    angle = torch.cat([pos[:, None] * freq] * 2, dim=-1)[:, None]
    return (q * angle.cos() + rotate_half(q) * angle.sin()).reshape(-1, head, 2, pair)


def rope_interleaved(x, w, pos, freq):
    """As Meta's LLaMA has it: complex numbers."""
    head, pair, _, d = w.shape
    q = torch.view_as_complex(F.linear(x, w.reshape(-1, d)).reshape(-1, head, pair, 2))
    turn = torch.polar(torch.ones((), dtype=x.dtype), pos[:, None] * freq)
    return torch.view_as_real(q * turn[:, None])


def qkv_apart(x, wq, wk, wv, pos, freq):
    return rope_half(x, wq, pos, freq), rope_half(x, wk, pos, freq), torch.einsum("md,hed->mhe", x, wv)


def split_qkv(x, w):
    q, k, v = F.linear(x, w.reshape(-1, w.shape[-1])).reshape(len(x), 48, 128).split([32, 8, 8], dim=1)
    return q, k, v


def head_rmsnorm(x, w, g):
    head, hd, d = w.shape
    return F.rms_norm(F.linear(x, w.reshape(-1, d)).reshape(-1, head, hd), (hd,), g, eps=1e-6)


def lm_head(x, w, target):
    z = F.linear(x, w)
    return F.cross_entropy(z, target, reduction="none", ignore_index=-100), z.logsumexp(dim=1)


def lm_head_logits(x, w, target):
    return (F.linear(x, w), *lm_head(x, w, target))


def lm_loss(x, w, b, target):
    z = F.linear(x, w, b)
    z = 30 * torch.tanh(z / 30)
    return F.cross_entropy(z, target, reduction="none", label_smoothing=0.1) + 1e-4 * z.logsumexp(dim=1).square()


def experts(x, w):
    z = torch.einsum("emd,efld->emfl", x, w)
    return F.silu(z[..., 0]) * z[..., 1]


def lm_mean_loss(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def lm_weighted_loss(x, w, b, target, weight):
    z = 30 * torch.tanh(F.linear(x, w, b) / 30)
    each = F.cross_entropy(z, target, reduction="none", label_smoothing=0.125) + 2.0**-13 * z.logsumexp(dim=1).square()
    return (weight * each).sum() / weight.sum(), each


def attention_in(x, w, gq, gk, pos, freq):
    z = F.linear(x, w.reshape(-1, w.shape[-1])).reshape(len(x), 48, 128)
    q, k, v = z.split([32, 8, 8], dim=1)
    angle = torch.cat([pos[:, None] * freq] * 2, dim=-1)[:, None]

    def turned(h, g):
        h = F.rms_norm(h, (128,), g.reshape(-1), eps=1e-6)
        return (h * angle.cos() + rotate_half(h) * angle.sin()).unflatten(-1, (2, 64))

    return turned(q, gq), turned(k, gk), v.unflatten(-1, (2, 64))


def linear_amax(x, w):
    y = F.linear(x, w)
    return y, y.abs().max(dim=1).values, y.abs().max()


MKN = {"m": 5, "k": 7, "n": 6}
ROPE = {"m": 5, "d": 6, "head": 3}
CASES = {
    "linear_bf16": Case(linear, MKN),
    "linear_f16": Case(linear, MKN),
    "linear_kn": Case(lambda x, w: x @ w, MKN),
    "linear_columns": Case(lambda x, w: (x.T @ w.T).T, MKN),
    "linear_bias_gelu": Case(lambda x, w, b: F.gelu(F.linear(x, w, b)), {"m": 6, "k": 7, "n": 6}),
    "linear_residual": Case(lambda x, w, r: F.linear(x, w) + r, {"m": 6, "k": 7, "n": 6}),
    "rowscale_linear": Case(lambda x, w, s, c: s[:, None] * F.linear(x, w) * c, {"m": 6, "k": 7, "n": 6}),
    "swiglu": Case(swiglu, {"m": 5, "d": 7, "f": 4}),
    "geglu": Case(lambda x, wg, wu: F.gelu(F.linear(x, wg)) * F.linear(x, wu), {"m": 5, "d": 7, "f": 4}),
    "residual_sumsq": Case(residual_sumsq, {"m": 6, "k": 5, "d": 6}),
    "qkv_rope": Case(rope_half, ROPE, {"pos": (0, 9)}),
    "qkv_rope_interleaved": Case(rope_interleaved, ROPE, {"pos": (0, 9)}),
    "qkv_apart": Case(qkv_apart, {**ROPE, "kv": 2}, {"pos": (0, 9)}),
    "split_qkv": Case(split_qkv, {"m": 3, "d": 5}),
    "head_rmsnorm": Case(head_rmsnorm, {"m": 3, "d": 5, "head": 2}),
    "lm_head": Case(lm_head, {"m": 6, "d": 5, "v": 7}, {"target": (0, 7)}),
    "lm_head_logits": Case(lm_head_logits, {"m": 6, "d": 5, "v": 7}, {"target": (0, 7)}),
    "lm_loss": Case(lm_loss, {"m": 6, "d": 5, "v": 7}, {"target": (0, 7)}, tolerance=1e-7),  # 0.1 and 1e-4 are f32 there
    "experts": Case(experts, {"e": 3, "m": 5, "d": 7, "f": 4}),
    "lm_mean_loss": Case(lm_mean_loss, {"m": 6, "d": 5, "v": 7}, {"target": (0, 7)}),
    "lm_weighted_loss": Case(lm_weighted_loss, {"m": 6, "d": 5, "v": 7}, {"target": (0, 7)}),
    "attention_in": Case(attention_in, {"m": 3, "d": 5}, {"pos": (0, 9)}),
    "linear_amax": Case(linear_amax, MKN),
    "lora_linear": Case(lambda x, w, t, b: F.linear(x, w) + F.linear(t, b), MKN | {"r": 3}),
}
PROGRAMS = {name: program for file in FILES for name, program in built(file.read_text(encoding="utf-8")).items()}


def test_every_program_has_a_case() -> None:
    assert set(PROGRAMS) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_spec_means_what_torch_says(name: str) -> None:
    case = CASES[name]
    means(PROGRAMS[name], case.eager, case.extents, case.integers, case.tolerance)


def test_lm_head_ignores_rows() -> None:
    program = PROGRAMS["lm_head"]
    given = inputs(program, {"m": 4, "d": 5, "v": 7}) | {"target": torch.tensor([3, -100, 0, -100])}
    got = run(program, given, torch, precision="exact")
    torch.testing.assert_close(got["loss"], lm_head(**given)[0])
    assert got["loss"][1] == 0 and got["loss"][3] == 0


def test_the_two_rotary_conventions_agree_up_to_the_order_of_weights() -> None:
    """Interleaving the rows of half-split weights, and undoing it on the result, is the other program; the other sign is not."""
    half, interleaved = PROGRAMS["qkv_rope"], PROGRAMS["qkv_rope_interleaved"]
    given = inputs(half, ROPE, {"pos": (1, 9)})
    one = run(half, given, torch, precision="exact")["y"]
    other = run(interleaved, given | {"w": given["w"].transpose(1, 2)}, torch, precision="exact")["y"]
    torch.testing.assert_close(one, other.transpose(2, 3))
    backwards = run(half, given | {"pos": -given["pos"]}, torch, precision="exact")["y"]
    assert not torch.allclose(one, backwards)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_spec_is_explained(file: Path) -> None:
    """Each program has one to five comment lines right above it; lines are short enough to show."""
    text = file.read_text(encoding="utf-8")
    assert text.endswith("\n") and "\t" not in text
    assert max(map(len, text.splitlines())) <= 120
    for program in built(text).values():
        assert 1 <= len(program.doc.splitlines()) <= 5, program.name
