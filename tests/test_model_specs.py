"""Whole programs, specs/*/: each means what hand-written PyTorch says in float64; its plan and its derived gradients agree with it; and
they show themselves: extents from outside, comments, what is launched and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from conftest import ROOT  # noqa: E402
from exact_programs import by_stand_ins  # noqa: E402
from meaning import built, means  # noqa: E402

import coda_lang  # noqa: E402
from bench.plain_models import rotated  # noqa: E402
from coda_lang import driver  # noqa: E402
from coda_lang.backend_cute import autograd, selfcheck, spec  # noqa: E402
from coda_lang.backend_cute.lower import lower  # noqa: E402
from coda_lang.source import Source  # noqa: E402

FILES = sorted((ROOT / "specs").glob("*/*.coda"))
FIXED = {"qh": 4, "kh": 2, "pair": 8, "head": 3, "hd": 8}  # small heads in place of those in the text
FREE = {"m": 6, "d": 24, "f": 40, "v": 11, "n": 16, "k": 24, "r": 3}
RAGGED = {"m": 37, "d": 72, "f": 104, "v": 203, "n": 40, "k": 56, "r": 8}  # what kernels would meet
INTEGERS = {"pos": (0, 9), "target": (0, 11)}


def linear(x, w, b=None):
    """A product with a weight whose rows are outputs, axes of heads merged on either side."""
    y = F.linear(x.flatten(1), w.flatten(1) if w.shape[0] == FREE["d"] else w.reshape(-1, w.shape[-1]))
    return y if b is None else y + b.flatten()


def rms(x, g):
    return F.rms_norm(x, x.shape[-1:], g.flatten(), eps=EPS)


def gemma_rms(x, g):
    return F.rms_norm(x, x.shape[-1:], 1 + g.flatten(), eps=1e-6)


EPS = 1e-5


def split(x, w):
    """Heads as the program's outputs have them: [m, head, lane, pair]."""
    return x.reshape(len(x), w.shape[0], *w.shape[1:-1])


def turned(x, w, pos, freq, norm=lambda h: h):
    h = norm(x.reshape(len(x), w.shape[0], -1))
    return split(rotated(h, pos, freq), w)


def qkv(n, wq, wk, wv, pos, freq):
    return turned(linear(n, wq), wq, pos, freq), turned(linear(n, wk), wk, pos, freq), split(linear(n, wv), wv)


def llama_pre(x0, g, wq, wk, wv, pos, freq):
    return qkv(rms(x0, g), wq, wk, wv, pos, freq)


def swiglu(x, wg, wu, wd):
    return linear(F.silu(linear(x, wg)) * linear(x, wu), wd)


def llama_half(a, x0, wo, g1, wg, wu, wd):
    x1 = F.linear(a.flatten(1), wo.flatten(1)) + x0
    return swiglu(rms(x1, g1), wg, wu, wd) + x1


def llama_layer(a, x0, wo, g1, wg, wu, wd, g2, wq, wk, wv, pos, freq):
    x2 = llama_half(a, x0, wo, g1, wg, wu, wd)
    return (x2, *qkv(rms(x2, g2), wq, wk, wv, pos, freq))


def llama_post(a, x0, wo, g1, wg, wu, wd, g2):
    return rms(llama_half(a, x0, wo, g1, wg, wu, wd), g2)


def head(h, w, target):
    z = F.linear(h, w)
    return F.cross_entropy(z, target, reduction="none"), z


def gemma2_head(h, w, target):
    z = 30 * torch.tanh(F.linear(h, w) / 30)
    return F.cross_entropy(z, target, reduction="none"), z


def layer_norm(x, g, b):
    return F.layer_norm(x, x.shape[-1:], g, b, eps=1e-5)


def gpt2_qkv(n, w, bias):
    return tuple((torch.einsum("md,dphe->pmhe", n, w) + bias[:, None]).unbind(0))


def gpt2_pre(x0, g, b, w, bias):
    return gpt2_qkv(layer_norm(x0, g, b), w, bias)


def gpt2_half(a, x0, wo, bo, g1, b1, wf, bf, wp, bp):
    x1 = torch.einsum("mhe,hed->md", a, wo) + bo + x0
    return F.gelu(layer_norm(x1, g1, b1) @ wf + bf, approximate="tanh") @ wp + bp + x1


def gpt2_layer(a, x0, wo, bo, g1, b1, wf, bf, wp, bp, g2, b2, w, bias):
    x2 = gpt2_half(a, x0, wo, bo, g1, b1, wf, bf, wp, bp)
    return (x2, *gpt2_qkv(layer_norm(x2, g2, b2), w, bias))


def gpt2_post(a, x0, wo, bo, g1, b1, wf, bf, wp, bp, g2, b2):
    return layer_norm(gpt2_half(a, x0, wo, bo, g1, b1, wf, bf, wp, bp), g2, b2)


def gemma_half(a, x0, wo, g_attention, g_before, wg, wu, wd, g_behind):
    x1 = x0 + gemma_rms(F.linear(a.flatten(1), wo.flatten(1)), g_attention)
    n = gemma_rms(x1, g_before)
    return x1 + gemma_rms(linear(F.gelu(linear(n, wg), approximate="tanh") * linear(n, wu), wd), g_behind)


def gemma2_layer(a, x0, wo, g_attention, g_before, wg, wu, wd, g_behind, g_input, wq, wk, wv, pos, freq):
    x2 = gemma_half(a, x0, wo, g_attention, g_before, wg, wu, wd, g_behind)
    return (x2, *qkv(gemma_rms(x2, g_input), wq, wk, wv, pos, freq))


def gemma3_layer(a, x0, wo, g_attention, g_before, wg, wu, wd, g_behind, g_input, wq, wk, wv, gq, gk, pos, freq):
    x2 = gemma_half(a, x0, wo, g_attention, g_before, wg, wu, wd, g_behind)
    n = gemma_rms(x2, g_input)
    q = turned(linear(n, wq), wq, pos, freq, lambda h: gemma_rms(h, gq))
    return x2, q, turned(linear(n, wk), wk, pos, freq, lambda h: gemma_rms(h, gk)), split(linear(n, wv), wv)


def qwen_rms(x, g):
    return F.rms_norm(x, x.shape[-1:], g.flatten(), eps=1e-6)


def qwen_half(a, x0, wo, g1, wg, wu, wd):
    x1 = F.linear(a.flatten(1), wo.flatten(1)) + x0
    return swiglu(qwen_rms(x1, g1), wg, wu, wd) + x1


def qwen2_layer(a, x0, wo, g1, wg, wu, wd, g2, wq, wk, wv, bq, bk, bv, pos, freq):
    x2 = qwen_half(a, x0, wo, g1, wg, wu, wd)
    n = qwen_rms(x2, g2)
    q, k = (turned(linear(n, w, b), w, pos, freq) for w, b in ((wq, bq), (wk, bk)))
    return x2, q, k, split(linear(n, wv, bv), wv)


def qwen3_layer(a, x0, wo, g1, wg, wu, wd, g2, wq, wk, wv, gq, gk, pos, freq):
    x2 = qwen_half(a, x0, wo, g1, wg, wu, wd)
    n = qwen_rms(x2, g2)
    q, k = (turned(linear(n, w), w, pos, freq, lambda h, g=g: qwen_rms(h, g)) for w, g in ((wq, gq), (wk, gk)))
    return x2, q, k, split(linear(n, wv), wv)


def lora(x, w, a, b):
    return F.linear(x, w) + 2 * F.linear(F.linear(x, a), b)


def lora_mlp(x, wg, wu, wd, ag, bg, au, bu, ad, bd):
    return lora(F.silu(lora(x, wg, ag, bg)) * lora(x, wu, au, bu), wd, ad, bd)


def gated(activation: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, wg, wu, wd: F.linear(activation(F.linear(x, wg)) * F.linear(x, wu), wd)


def clamped_swiglu_mlp(x, w, b, wd, bd):
    z = F.linear(x, w.flatten(0, 1), b.flatten())
    gate, up = z[:, 0::2].clamp(max=7), z[:, 1::2].clamp(-7, 7)
    return F.linear(gate * torch.sigmoid(1.702 * gate) * (up + 1), wd, bd)


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


EAGER: dict[str, Callable[..., Any]] = {
    "llama_pre": llama_pre, "llama_layer": llama_layer, "llama_post": llama_post, "llama_head": head,
    "llama_head_chunked": lambda h, w, target: head(h, w, target)[0],
    "gpt2_pre": gpt2_pre, "gpt2_layer": gpt2_layer, "gpt2_post": gpt2_post, "gpt2_head": head,
    "gemma2_layer": gemma2_layer, "gemma2_head": gemma2_head, "gemma3_layer": gemma3_layer,
    "qwen2_layer": qwen2_layer, "qwen3_layer": qwen3_layer, "lora": lora, "lora_mlp": lora_mlp,
    "swiglu_mlp": gated(F.silu), "geglu_mlp": gated(F.gelu), "geglu_tanh_mlp": gated(gelu_tanh), "reglu_mlp": gated(F.relu),
    "clamped_swiglu_mlp": clamped_swiglu_mlp,
}  # fmt: skip


def extents_in(text: str) -> dict[str, int]:
    """Those of the small extents whose axes a file has."""
    return {name: size for name, size in FIXED.items() if f"{name}=" in text}


TEXTS = {f"{file.parent.name}/{file.name}": file.read_text(encoding="utf-8") for file in FILES}
PROGRAMS = {name: p for text in TEXTS.values() for name, p in built(text, extents=extents_in(text)).items()}


def test_every_program_has_a_meaning() -> None:
    assert set(PROGRAMS) == set(EAGER)


@pytest.mark.parametrize("name", EAGER)
def test_program_means_what_torch_says(name: str) -> None:
    means(PROGRAMS[name], EAGER[name], FREE, INTEGERS, 1e-6)  # eps, 1.702 and 2^-x are f32 there


@pytest.mark.parametrize("file", TEXTS)
def test_program_is_explained(file: str) -> None:
    """Comments of one to five lines right above each program; lines short enough to show."""
    text = TEXTS[file]
    assert text.endswith("\n") and "\t" not in text and max(map(len, text.splitlines())) <= 120
    for name, program in built(text).items():
        assert 1 <= len(program.doc.splitlines()) <= 5, name


@pytest.fixture(scope="module")
def compiled():
    made: dict[str, Any] = {}

    def functions(file: str) -> list[Any]:
        if file not in made:
            found = coda_lang.compile(TEXTS[file], extents=extents_in(TEXTS[file]))
            made[file] = list(vars(found).values()) if hasattr(found, "__dict__") and not hasattr(found, "program") else [found]
        return made[file]

    return functions


QUICK = ("llama/layer.coda", "llama/head.coda", "gpt2/pre.coda", "lora/lora.coda")


@pytest.mark.parametrize("file", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in TEXTS])
def test_plan_and_gradients_agree_with_the_program(file: str, compiled, capsys) -> None:
    """What kernels compute, in float64 and rounded, forward and backward, at extents that no tile divides."""
    for fn in compiled(file):
        extents = {name: size if size is not None else RAGGED[name] for name, size in fn.program.extents}
        good = selfcheck.check(fn, extents, 0, "cpu") and selfcheck.check_gradients(fn, extents, 0, "cpu")
        assert good, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("path", ["kernels"], indirect=True)
@pytest.mark.parametrize("file", TEXTS)
def test_the_way_that_cuda_tensors_go(file: str, path: str, compiled) -> None:
    """Plans, strides, buffers that start as NaN, kernels' stand-ins, at ragged extents; the second call takes what the first decided."""
    for fn in compiled(file):
        extents = {name: size if size is not None else RAGGED[name] for name, size in fn.program.extents}
        inputs = selfcheck.inputs(fn.program, extents, 0, "cpu")
        names = [name for name, _ in fn.gradients]
        tensors = [t.requires_grad_(a.name in names) for a, t in zip(fn.program.inputs, inputs, strict=True)]
        ours = by_stand_ins(fn, extents)
        seen = []
        for _ in range(2):
            outs = ours(*tensors)
            outs = (outs,) if isinstance(outs, torch.Tensor) else tuple(outs)
            gen = torch.Generator().manual_seed(1)
            given = {o.name: torch.randn(t.shape, generator=gen).to(t.dtype) for o, t in zip(fn.program.outputs, outs, strict=True)}
            wanted = [t for t in tensors if t.requires_grad]
            seen.append([*outs, *torch.autograd.grad(outs, wanted, list(given.values()))])
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True)) and ours.last_path == ours.last_backward == "kernels"
        with torch.no_grad():
            planned = fn.reference_planned(*tensors)
        planned = [planned] if isinstance(planned, torch.Tensor) else [*planned]
        by_name = autograd.gradients_planned(fn, [t.detach() for t in tensors], given, exact=False)
        for got, want in zip(seen[0], [*planned, *(by_name[n] for n in names)], strict=True):
            torch.testing.assert_close(got, want.reshape(got.shape), rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def passes_over_memory(plan: Any) -> int:
    """Kernels without a product that touch whole tensors; finishers of reductions are not among them."""
    return sum(isinstance(k, spec.Gemm) and not k.products for k in lower(plan).kernels)


@pytest.mark.parametrize("file", ["llama/layer.coda", "qwen/qwen2.coda", "qwen/qwen3.coda"])
def test_between_two_attentions_no_pass_over_memory_is_left(file: str) -> None:
    """Norms, residuals, gates, biases, rotations: all in the kernels of products. The backward begins with the rotation, without one."""
    (plan,) = driver.plan(Source(file, TEXTS[file]))
    assert passes_over_memory(plan) == 0
    assert plan.derived is not None and passes_over_memory(plan.derived.backward) <= 2
