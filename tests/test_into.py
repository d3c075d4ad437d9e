"""Gradients added to buffers by the kernels that store them: which do, what is written, how it is rounded, and the machine code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from coda_lang.backend_cute import accumulate, configs, into, spec  # noqa: E402
from coda_lang.backend_cute.derivative import INTO, NO, SUM, Derivative  # noqa: E402
from tests.autograd_cases import Kernels, both, cotangents, kernels, leaves, truth  # noqa: E402
from tests.autograd_cases import function as trained  # noqa: E402
from tests.handwritten.training import LINEAR_RESIDUAL  # noqa: E402

TEXT = """
program p(x: bf16[m, d], w: bf16[lane=2, f, d], v: bf16[f, lane2=2, d], b: f32[f], s: f32[]) -> (y: bf16[m, f], z: bf16[m, f])
g, u = x @ w
y = silu(g + b) * u * s
e, h = x @ v
z = e * h
"""
SIZES = {"m": 24, "d": 16, "f": 32, "lane": 2, "lane2": 2}


@pytest.fixture(scope="module")
def derivative() -> Derivative:
    return coda_lang.compile(TEXT).training(None).derivative


def asked(derivative: Derivative, name: str, code: int) -> list[int]:
    return [code if i == name else NO for i in derivative.inputs]


@pytest.mark.parametrize("dtype", INTO)
@pytest.mark.parametrize("name", ["w", "x", "b", "s"])
def test_a_gemm_or_a_finisher_adds_to_a_buffer(derivative: Derivative, name: str, dtype: str) -> None:
    step = derivative.step(asked(derivative, name, INTO[dtype]), [True, True])
    place = derivative.inputs.index(name)
    assert step.program.into == ((f"d_{name}", f"d_{name}_into"),) and step.buffers == {f"d_{name}_into": place}
    assert [o.dtype for o in step.program.outputs] == [dtype]
    (kernel,) = [k for k in step.program.kernels if f"_into_{dtype}" in k.name]
    assert isinstance(kernel, spec.Finish) == (name in ("b", "s"))
    if isinstance(kernel, spec.Gemm):
        assert configs.offered(kernel)


def test_what_cannot_be_added_in_place_is_made_in_f32(derivative: Derivative) -> None:
    """Lanes that travel in pairs are stored by twos."""
    fn = coda_lang.compile("program p(x: bf16[m, f, lane=2], b: f32[f]) -> (y: bf16[m, f])\ng, u = x\ny = silu(g + b) * u\n")
    pairs = fn.training(None).derivative
    sinks = [s for k in spec.launches(pairs.backward) for g in spec.gemms(k) for s in g.sinks if isinstance(s, spec.Store)]
    assert [s.matrix.pack for s in sinks if s.matrix.tensor == "d_x"] == [2]
    assert into.added(pairs.backward, pairs.functions, "d_x", "f32") is None
    assert into.added(pairs.backward, pairs.functions, "d_b", "f32") is not None
    step = derivative.step(asked(derivative, "w", SUM), [True, True])
    assert step.program.into == () and [o.dtype for o in step.program.outputs] == ["f32"]


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_buffer_itself_is_written_and_nothing_else_is_launched(path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, calls = trained(LINEAR_RESIDUAL, path)
    tensors = leaves(LINEAR_RESIDUAL, needs=["w"])
    buffer = torch.ones(tensors[1].shape, dtype=dtype)
    before, version = buffer.data_ptr(), buffer._version
    settled, finish = list[tuple[int, bool]](), accumulate.settle
    monkeypatch.setattr(accumulate, "settle", lambda b, g, added: settled.append((g.data_ptr(), added)) or finish(b, g, added))
    given = cotangents([fn(*tensors)])
    fn(*tensors, accumulate_into={"w": buffer}).backward(given[0])
    assert (
        settled == [(before, True)]
        and any("_into_" in name for name in calls)
        and buffer.data_ptr() == before
        and buffer._version > version
    )
    (want,) = truth(LINEAR_RESIDUAL, tensors, given)
    torch.testing.assert_close(buffer.double(), want + 1.0, rtol=8e-3, atol=8e-3)


@both
def test_a_sum_is_rounded_once(path: str) -> None:
    """256 is one bf16 step of 2 wide: a gradient of 0.75 rounded first would be added as it is, two of them make one step."""
    fn = coda_lang.compile("program p(x: bf16[m, k], w: bf16[n, k]) -> (y: f32[m, n])\ny = x @ w\n")
    if path == "kernels":
        fn.objects = Kernels(fn.functions, {"m": 8, "n": 8, "k": 8}, {}, [])
    x, w = torch.full((8, 8), 0.16).bfloat16(), torch.zeros(8, 8).bfloat16().requires_grad_()
    buffer = torch.full((8, 8), 256.0).bfloat16()
    fn(x, w, accumulate_into={"w": buffer}).sum().backward()
    exact = 256.0 + 8 * x[0, 0].double()
    assert bool((buffer == exact.to(torch.bfloat16)).all()) and exact > 257.0


@both
def test_a_buffer_seen_with_merged_dims_is_added_to(path: str) -> None:
    fn = coda_lang.compile("program p(x: bf16[m, k], w: bf16[head=4, hd=8, k]) -> (y: bf16[m, head, hd])\ny = x @ w\n")
    if path == "kernels":
        fn.objects = Kernels(fn.functions, {"m": 8, "head": 4, "hd": 8, "k": 16}, {"head": 4, "hd": 8}, [])
    x, w = torch.randn(8, 16).bfloat16(), torch.randn(32, 16).bfloat16().requires_grad_()
    buffer, slanted = torch.ones(32, 16), torch.ones(16, 32).T
    for into_this in (buffer, slanted):
        fn(x, w, accumulate_into={"w": into_this}).sum().backward()
    want = 1.0 + x.double().sum(0).expand(32, 16)
    torch.testing.assert_close(buffer.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slanted.double(), want, rtol=1e-5, atol=1e-5)


@both
def test_gemms_of_one_launch_each_add_to_their_buffer(path: str) -> None:
    text = "program p(x: bf16[m=64, k=64], w: bf16[n=64, k], v: bf16[j=64, k]) -> (y: bf16[m, n], z: bf16[m, j])\ny = x @ w\nz = x @ v\n"
    fn, calls = coda_lang.compile(text), list[str]()
    if path == "kernels":
        sizes = {"m": 64, "k": 64, "n": 64, "j": 64}
        fn.objects = Kernels(fn.functions, sizes, sizes, calls)
    x, w, v = torch.randn(64, 64).bfloat16(), *(torch.randn(64, 64).bfloat16().requires_grad_() for _ in range(2))
    buffers = {"w": torch.ones(64, 64), "v": torch.ones(64, 64).bfloat16()}
    outs = fn(x, w, v, accumulate_into=buffers)
    given = [torch.randn(64, 64).bfloat16() for _ in outs]
    torch.autograd.backward(list(outs), given)
    for name, g in zip(buffers, given):
        want = 1.0 + g.double().T @ x.double()
        torch.testing.assert_close(buffers[name].double(), want, rtol=2e-2, atol=2e-2)
    assert path == "planned" or len(calls) <= 4


@pytest.mark.slow
def test_the_kernels_compile(derivative: Derivative) -> None:
    pytest.importorskip("cutlass")
    from test_cubins import check, defaults

    cases = []
    for dtype in INTO:
        step = derivative.step(asked(derivative, "w", INTO[dtype]), [True, True])
        fixed = {name: size for name, size in step.program.extents if size is not None}
        found = [k for k in spec.launches(step.program) if "_into_" in k.name]
        cases += [SimpleNamespace(gemm=k, functions=step.functions, fixed=fixed) for k in found]
    assert len(cases) == 2
    check(cases, defaults)
