"""`chunk v by 4096`: the same results as without, to the order of a sum; what is in memory; what cannot be chunked; the launcher's way."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from bench import rows  # noqa: E402
from coda_lang.backend_cute import arguments, autograd, derivative, host, loops, spec, twin  # noqa: E402
from coda_lang.backend_cute.function import fixed  # noqa: E402
from coda_lang.diagnostics.model import CodaError  # noqa: E402
from tests.autograd_cases import Kernels  # noqa: E402

HEAD = "(x: bf16[m, d], w: bf16[v, d], b: bf16[v], target: i64[m], weight: f32[m])"
PROGRAMS = {
    "mean": f"""
program p{HEAD} -> (loss: f32[])
loss = mean_over[m](cross_entropy[v](x @ w + b, target), target != -100)
""",
    "a row": f"""
program p{HEAD} -> (loss: f32[m], lse: f32[m])
z = softcap(x @ w + b, 4.0)
lse = logsumexp[v](z)
loss = weight * smoothed_cross_entropy[v](z, target, 0.25) + z_loss[v](z, 0.125)
""",
    "rounded logits": f"""
program p{HEAD} -> (loss: f32[m])
z: bf16 = x @ w
loss = weight * cross_entropy[v](z + b, target)
""",
    "a norm before": """
program p(x: bf16[m, d], g: f32[d], w: bf16[v, d], target: i64[m]) -> (loss: f32[])
z = rmsnorm[d](x, g, 1e-5) @ w
loss = sum[m](cross_entropy[v](z, target))
""",
    "f32 gradients": """
program p(x: f32[m, d], w: bf16[v, d], b: f32[v], target: i64[m]) -> (loss: f32[m])
loss = cross_entropy[v](bf16(x) @ w + b, target)
""",
}
ROWS = {  # chunks of rows, in forward and backward
    "mlp": """
program p(x: bf16[m, d], w: bf16[v, d], u: bf16[d, v], r: bf16[m, d]) -> (y: bf16[m, d], peak: f32[m])
h = silu(x @ w)
y = h @ u + r
peak = max[v](h)
""",
    "softmax": """
program p(x: bf16[m, d], w: bf16[v, d], u: bf16[d, v]) -> (y: bf16[m, d])
y = softmax[v](x @ w) @ u
""",
    "positions": """
program p(x: bf16[m, d], w: bf16[v, d], u: bf16[d, v]) -> (y: bf16[m, d], s: f32[v])
h = where(index[v] <= index[m], x @ w, 0.0) / f32(size[m])
y = h @ u
s = mean[m](h)
""",
    "rows in two axes": """
program p(x: bf16[n, m, d], w: bf16[v, d], u: bf16[d, v]) -> (y: bf16[n, m, d])
y = relu(x @ w) @ u
""",
}
CASES = {
    **{f"{name} by {size} of {axis}": (text, axis, size) for name, text in PROGRAMS.items() for axis, size in (("v", 16), ("m", 8))},
    **{f"{name} by 8 of m": (text, "m", 8) for name, text in ROWS.items()},
}
SHAPES = ({"m": 33, "d": 24, "v": 133, "n": 3}, {"m": 8, "d": 16, "v": 16, "n": 2}, {"m": 17, "d": 8, "v": 9, "n": 1})


@pytest.fixture(scope="module")
def compiled():
    made = {}

    def function(text, chunk=""):
        if (text, chunk) not in made:
            made[text, chunk] = coda_lang.compile(text + chunk)
        return made[text, chunk]

    return function


def drawn(fn, extents, seed=0):
    gen, made = torch.Generator().manual_seed(seed), []
    for a in fn.program.inputs:
        shape = [extents[x] for x in a.axes]
        if a.dtype == "i64":
            t = torch.randint(0, max(extents["v"], 1), shape, generator=gen)
            t[1::3] = -100
        else:
            t = (torch.randn(shape, generator=gen) * 0.5).to({"bf16": torch.bfloat16, "f32": torch.float32}[a.dtype])
        made.append(t)
    return made


def upstream(fn, binding, seed=1):
    gen = torch.Generator().manual_seed(seed)
    outputs = {o.name: o for o in fn.program.outputs}
    drawn = {name: torch.randn(binding.declared(outputs[name]), generator=gen) for name, _ in fn.cotangents}
    return {n: g.bfloat16() if outputs[n].dtype == "bf16" else g for n, g in drawn.items()}


@pytest.mark.parametrize("case", CASES)
def test_chunks_change_nothing_but_the_order_of_sums(case, compiled) -> None:
    text, axis, size = CASES[case]
    plain, chunked = compiled(text), compiled(text, f"chunk {axis} by {size}\n")
    assert chunked.backward.loops and not plain.backward.loops
    for extents in SHAPES:
        tensors = drawn(plain, extents)
        for one, other in zip(*(twin_outputs(fn, tensors) for fn in (plain, chunked))):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        given = upstream(plain, plain.bind(tensors))
        want, got = (autograd.gradients_planned(fn, tensors, given) for fn in (plain, chunked))
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-12)


def twin_outputs(fn, tensors):
    inputs = {a.name: t for a, t in zip(fn.program.inputs, tensors, strict=True)}
    from coda_lang.backend_cute import torch_fns

    return list(twin.run(fn.program, fn.functions, inputs, f=torch_fns.Exact()).values())


@pytest.mark.parametrize("case", CASES)
def test_by_the_host(case, compiled, monkeypatch) -> None:
    """Forward and backward as CUDA tensors go, over poisoned buffers, with stand-ins that refuse what a kernel could not take."""
    text, axis, size = CASES[case]
    monkeypatch.setattr(host, "allocate", rows.poisoning)
    monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    fn = compiled(text, f"chunk {axis} by {size}\n")
    for extents in SHAPES:
        tensors = [t.requires_grad_(t.is_floating_point()) for t in drawn(fn, extents)]
        binding = fn.bind(tensors)
        known = {**derivative.extents(fn.backward, binding.extents), **binding.extents}
        every = [loop for p in fn.programs for loop in p.loops]
        calls: list[str] = []
        run = type(fn)(
            fn.program, fn.functions, fn._reference, saving=fn.saving, backward=fn.backward, residuals=fn.residuals,
            cotangents=fn.cotangents, gradients=fn.gradients, objects=Kernels(fn.functions, known, fixed(fn.program), calls, every),
        )  # fmt: skip
        outs = run(*tensors)
        outs = dict(zip([o.name for o in fn.program.outputs], (outs,) if isinstance(outs, torch.Tensor) else outs))
        given = upstream(fn, binding)
        got = torch.autograd.grad([outs[n] for n in given], [t for t in tensors if t.requires_grad], list(given.values()))
        want = autograd.gradients_planned(fn, [t.detach() for t in tensors], given, exact=False)
        for name, g in zip([a.name for a, t in zip(fn.program.inputs, tensors) if t.requires_grad], got, strict=True):
            torch.testing.assert_close(g, want[name].reshape(g.shape), rtol=1e-2, atol=1e-5)
        (loop,) = fn.backward.loops
        assert calls.count(loop.kernels[0]) == len(list(loops.chunks(loop, known)))
