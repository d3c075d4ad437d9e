"""`matmul[k](x, w)` with further shared axes: a launch for each position of the batch axis; forward and gradients, by twin and launcher."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from bench import rows  # noqa: E402
from coda_lang import driver  # noqa: E402
from coda_lang.backend_cute import arguments, autograd, derivative, host, torch_fns  # noqa: E402
from coda_lang.backend_cute.function import fixed  # noqa: E402
from coda_lang.backend_cute.selfcheck import inputs  # noqa: E402
from coda_lang.diagnostics.model import CodaError  # noqa: E402
from coda_lang.passes import report  # noqa: E402
from coda_lang.source import Source  # noqa: E402
from tests.autograd_cases import Kernels  # noqa: E402
from tests.test_training_programs import autograd_of, cotangents  # noqa: E402

PROGRAMS = {
    "plain": """
program p(x: bf16[b, m, d], w: bf16[b, n, d]) -> (y: bf16[b, m, n])
y = matmul[d](x, w)
""",
    "a fixed batch": """
program p(x: bf16[b=3, m, d], w: bf16[b, n, d]) -> (y: f32[b, m, n])
y = matmul[d](x, w)
""",
    "stored inside": """
program p(q: bf16[m, b, d], k: bf16[n, b, d]) -> (s: bf16[m, b, n])
s = 0.125 * matmul[d](q, k)
""",
    "an epilogue": """
program p(x: bf16[b, m, d], w: bf16[b, n, d], bias: bf16[b, n], s: f32[m], c: f32[b], r: bf16[b, m, n])
    -> (y: bf16[b, m, n], t: f32[b, m], top: f32[b, n])
z = matmul[d](x, w) * s + bias
y = silu(z) * c + r
t = sum[n](z)
top = max[m](z)
""",
    "sums over the batch": """
program p(x: bf16[b, m, d], w: bf16[b, n, d], g: f32[n]) -> (y: bf16[b, m, n], u: f32[n], v: f32[], a: f32[m])
z = matmul[d](x, w) * g
y = z
u = sum[b, m](z)
v = sum[b, m, n](z * z)
a = mean[b, n](z)
""",
    "positions": """
program p(x: bf16[b, m, d], w: bf16[b, n, d]) -> (y: f32[b, m, n])
y = where(index[n] <= index[m], matmul[d](x, w), 0.0) * f32(index[b]) / f32(size[b])
""",
    "lanes": """
program p(x: bf16[b, m, d], w: bf16[b, f, lane=2, d]) -> (y: bf16[b, m, f])
gate, up = matmul[d](x, w)
y = swiglu(gate, up)
""",
    "then an ordinary product": """
program p(x: bf16[b, m, d], w: bf16[b, n, d], o: bf16[j, n]) -> (y: bf16[b, m, j])
y = relu(matmul[d](x, w)) @ o
""",
    "two in a row": """
program p(x: bf16[b, m, d], w: bf16[b, n, d], v: bf16[b, d, n]) -> (y: bf16[b, m, d])
y = matmul[n](bf16(softmax[n](matmul[d](x, w))), v) + x
""",
    "contracted over two axes": """
program p(x: bf16[b, m, d, e=8], w: bf16[b, n, d, e]) -> (y: bf16[b, m, n])
y = matmul[d, e](x, w)
""",
}
SIZES = (
    {"b": 3, "m": 17, "n": 24, "d": 16, "f": 9, "j": 7},
    {"b": 2, "m": 8, "n": 5, "d": 7, "f": 8, "j": 8},
    {"b": 1, "m": 3, "n": 8, "d": 8},
)


@pytest.fixture(scope="module")
def compiled():
    made = {}

    def function(name):
        if name not in made:
            made[name] = coda_lang.compile(PROGRAMS[name])
        return made[name]

    return function


def calls(fn):
    for sizes in SIZES:
        extents = {a: n if n is not None else sizes.get(a, 4) for a, n in fn.program.extents}
        yield inputs(fn.program, extents, 0, "cpu"), extents


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_product_of_the_batch_in_float64(name, compiled) -> None:
    fn = compiled(name)
    assert fn.program.loops and all(loop.size == 1 for loop in fn.program.loops)
    for tensors, _ in calls(fn):
        want, got = fn.reference(*tensors, exact=True), fn.reference_planned(*tensors, exact=True)
        for w, g in zip(*((v,) if isinstance(v, torch.Tensor) else v for v in (want, got))):
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)
        binding = fn.bind(tensors)
        given = cotangents(fn, binding)
        leaves = [t.requires_grad_(t.is_floating_point()) for t in tensors]
        expected = autograd_of(fn, torch_fns.Exact(), leaves, given)
        found = autograd.gradients_planned(fn, [t.detach() for t in leaves], given)
        for n, w in expected.items():
            torch.testing.assert_close(found[n].reshape(w.shape).double(), w, rtol=1e-6, atol=1e-9)


def test_the_reference_is_torchs_bmm(compiled) -> None:
    x, w = torch.randn(3, 5, 8).bfloat16(), torch.randn(3, 6, 8).bfloat16()
    want = torch.bmm(x.double(), w.double().transpose(1, 2))
    torch.testing.assert_close(compiled("plain").reference(x, w, exact=True), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PROGRAMS)
def test_by_the_host(name, compiled, monkeypatch) -> None:
    monkeypatch.setattr(host, "allocate", rows.poisoning)
    monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    fn = compiled(name)
    for tensors, extents in calls(fn):
        binding, launched = fn.bind(tensors), []
        known = {**derivative.extents(fn.backward, binding.extents), **binding.extents}
        every = [loop for p in fn.programs for loop in p.loops]
        run = type(fn)(
            fn.program, fn.functions, fn._reference, saving=fn.saving, backward=fn.backward, residuals=fn.residuals,
            cotangents=fn.cotangents, gradients=fn.gradients, objects=Kernels(fn.functions, known, fixed(fn.program), launched, every),
        )  # fmt: skip
        leaves = [t.requires_grad_(t.is_floating_point()) for t in tensors]
        outs = run(*leaves)
        outs = dict(zip([o.name for o in fn.program.outputs], (outs,) if isinstance(outs, torch.Tensor) else outs))
        planned = fn.reference_planned(*(t.detach() for t in tensors))
        for o, w in zip(outs.values(), (planned,) if isinstance(planned, torch.Tensor) else planned):
            torch.testing.assert_close(o.detach(), w, rtol=1e-2, atol=1e-4)
        given = cotangents(fn, binding)
        got = torch.autograd.grad([outs[n] for n in given], [t for t in leaves if t.requires_grad], list(given.values()))
        want = autograd.gradients_planned(fn, [t.detach() for t in leaves], given, exact=False)
        names = [a.name for a, t in zip(fn.program.inputs, leaves) if t.requires_grad]
        for n, g in zip(names, got, strict=True):
            torch.testing.assert_close(g, want[n].reshape(g.shape), rtol=1e-2, atol=1e-3)
        inside = {name for loop in every for name in loop.kernels} & set(launched)
        assert inside and all(launched.count(name) == extents["b"] for name in inside)


def test_an_empty_batch(compiled) -> None:
    fn = compiled("sums over the batch")
    x, w = torch.zeros(0, 5, 8).bfloat16(), torch.zeros(0, 6, 8).bfloat16()
    y, u, v, a = fn.reference_planned(x, w, torch.ones(6))
    assert y.shape == (0, 5, 6) and not u.any() and v == 0 and bool(torch.isnan(a).all())


def test_the_plan_says_so() -> None:
    (plan,) = driver.plan(Source("p.coda", PROGRAMS["an epilogue"]))
    text = report(plan)
    assert "C0404: this product has the batch axis `b`: one launch for each of its positions" in text
    assert "a launch for each position of `b`: kernels 1 to 3" in text or "a launch for each position of `b`" in text


@pytest.mark.parametrize(
    "text",
    [
        "program p(x: bf16[b, h, m, d], w: bf16[b, h, n, d]) -> (y: bf16[b, h, m, n])\ny = matmul[d](x, w)\n",
        "program p(x: bf16[b, m, d], w: bf16[b, n, d], u: bf16[j, n]) -> (y: f32[b, m, j])\ny = relu(matmul[d](x, w)) @ u\nchunk m by 8\n",
    ],
    ids=["two batch axes", "in chunks"],
)
def test_what_is_refused(text) -> None:
    with pytest.raises(CodaError) as caught:
        coda_lang.compile(text)
    assert {d.code for d in caught.value.diagnostics} == {"C0404"}
    assert all(d.help and d.span for d in caught.value.diagnostics)


def test_explain_says_how_often(compiled) -> None:
    text = str(compiled("plain").explain(torch.zeros(3, 9, 16).bfloat16(), torch.zeros(3, 7, 16).bfloat16()))
    assert ", 3 times" in text and "p_y: once for each of 3 positions of 'b'" in text
