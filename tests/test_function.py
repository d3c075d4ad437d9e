"""The callable: arguments, outputs, paths, gradients, explanations, plans that are kept."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from coda_lang.backend_cute import arguments, host  # noqa: E402
from coda_lang.backend_cute.errors import CallError  # noqa: E402
from coda_lang.backend_cute.prune import prune, target  # noqa: E402
from tests import handwritten as hw  # noqa: E402
from tests.standins import StandIns, poisoning, run  # noqa: E402
from tests.test_host import SIZES  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setattr(host, "allocate", poisoning)


def test_by_name_by_position_and_wrong_signatures():
    fn = hw.LINEAR.function()
    x, w = hw.inputs(hw.LINEAR.program, SIZES[0])
    assert torch.equal(fn(x, w), fn(w=w, x=x)) and torch.equal(fn(x, w), fn(x, w=w))
    assert fn.last_path == "reference" and fn(x, w).dtype == torch.bfloat16
    for call in (lambda: fn(x), lambda: fn(x, w, w), lambda: fn(x, w=w, b=w), lambda: fn(x, x=x)):
        with pytest.raises(CallError, match=r"C0701: linear: .*\n  help: the signature is linear\(x, w\)"):
            call()


def test_several_outputs_are_a_named_tuple_and_outputs_picks():
    fn = hw.RESIDUAL.function()
    tensors = hw.inputs(hw.RESIDUAL.program, SIZES[0])
    everything = fn(*tensors)
    assert everything._fields == ("u", "ms", "total", "peak") and torch.equal(everything.ms, everything[1])
    assert torch.equal(fn(*tensors, outputs="ms"), everything.ms)
    pair = fn(*tensors, outputs=("ms", "u"))
    assert pair._fields == ("u", "ms")
    with pytest.raises(CallError, match="C0711: residual: has no output 'z'"):
        fn(*tensors, outputs=("z",))


@pytest.mark.parametrize("wanted", [("u",), ("ms",), ("total", "peak"), ("ms", "total", "peak")], ids=str)
def test_dropped_outputs_drop_their_stores_and_kernels(wanted):
    case = hw.RESIDUAL
    program, functions = prune(case.program, case.functions, wanted)
    gemm = program.kernels[0]
    assert [target(sink) for sink in gemm.sinks] == [{"u": "u"}.get(w, f"{w}_work") for w in wanted]
    assert len(program.kernels) == 1 + len(set(wanted) - {"u"})
    tensors = hw.inputs(case.program, SIZES[1])
    got, _ = run(hw.Case(program, functions, case.reference), *tensors)
    want = dict(zip([o.name for o in case.program.outputs], run(case, *tensors)[0]))
    for name, value in zip(wanted, got, strict=True):
        torch.testing.assert_close(value, want[name])
    fn = functions[gemm.phases[-1].fn]
    assert "u = f.bf16(z + r)" in inspect.getsource(fn)  # the cache key sees all of it


def test_a_gather_alone_needs_no_logits():
    case = hw.LM_HEAD
    program, functions = prune(case.program, case.functions, ("loss",))
    tensors = hw.inputs(case.program, SIZES[1])
    got, _ = run(hw.Case(program, functions, case.reference), *tensors)
    torch.testing.assert_close(got[0], run(case, *tensors)[0][1])


def test_gradients_are_refused_not_dropped():
    fn = hw.LINEAR.function()
    x, w = hw.inputs(hw.LINEAR.program, SIZES[0])
    w = torch.nn.Parameter(w)
    with pytest.raises(CallError, match="C0501: linear: argument 'w' requires a gradient"):
        fn(x, w)
    with torch.no_grad():
        assert not fn(x, w).requires_grad
    fn.reference(x, w).sum().backward()
    assert w.grad is not None and w.grad.shape == w.shape


def test_tensor_subclasses_are_refused_with_a_remedy():
    class Sharded(torch.Tensor):
        def to_local(self):
            return self

    class Tagged(torch.Tensor):
        pass

    fn = hw.LINEAR.function()
    x, w = hw.inputs(hw.LINEAR.program, SIZES[0])
    with pytest.raises(CallError, match=r"C0702: linear: argument 'w': got a sharded Sharded\n  help: pass its shard \(.to_local\(\)\)"):
        fn(x, w.as_subclass(Sharded))
    with pytest.raises(CallError, match="C0702: linear: argument 'x': got the tensor subclass Tagged"):
        fn(x.as_subclass(Tagged), w)


def test_a_mapped_tensor_is_refused():
    fn = hw.LINEAR.function()
    x, w = hw.inputs(hw.LINEAR.program, SIZES[0])
    with pytest.raises(CallError, match="C0702"):
        torch.func.vmap(lambda row: fn(row[None], w))(x)


def test_a_tensor_marked_as_negated_is_refused():
    """Its memory, which kernels read, has the other sign."""
    fn = hw.ROPE.function()
    x, w, pos, freq = hw.inputs(hw.ROPE.program, {"m": 6, "d": 16, "head": 3})
    fn(x, w, pos, torch.complex(freq, freq).imag)
    with pytest.raises(CallError, match=r"C0702: .*'freq': got a tensor that is marked as negated(.|\n)*resolve_neg"):
        fn(x, w, pos, torch.complex(freq, freq).conj().imag)


def test_explain_tells_path_tiles_and_copies():
    fn = hw.RESIDUAL.function()
    explained = fn.explain(*hw.inputs(hw.RESIDUAL.program, SIZES[1]))
    assert explained.path == "reference" and explained.launches == ("residual_k0", "residual_k1", "residual_k2", "residual_k3")
    assert explained.extents["n"] == 301 and set(explained.configs) == {"residual_k0"}
    text = str(explained)
    assert "on a GPU it would launch residual_k0 with tiles" in text and "output 'u' is written to a temporary" in text


def test_planned_is_the_reference_up_to_rounding():
    fn = hw.HEAD_NORM.function()
    tensors = hw.inputs(hw.HEAD_NORM.program, SIZES[1])
    planned, written = fn.reference_planned(*tensors), fn.reference(*tensors, exact=True)
    torch.testing.assert_close(planned.double(), written, rtol=1e-2, atol=1e-2)


def test_a_call_of_a_known_kind_is_planned_once(monkeypatch):
    """The path that CUDA tensors take, with stand-ins for device and executables."""
    fn = hw.SWIGLU.function()
    tensors = hw.inputs(hw.SWIGLU.program, SIZES[0])
    fn.objects = StandIns(hw.SWIGLU.functions, {"m": 8, "d": 16, "f": 24, "lane": 2})
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    planned = []
    decide = host.plan
    monkeypatch.setattr(host, "plan", lambda *a: planned.append(1) or decide(*a))
    key = arguments.key(tensors)
    first = fn._pack(fn._decide(key, tensors, CPU).run(tensors))
    second = fn(*tensors)
    assert planned == [1] and fn.last_path == "kernels" and torch.equal(first, second)
    assert fn.objects.calls == ["swiglu_k0"] * 2


# --- arguments that no program could take ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scaled():
    head = "program p(x: bf16[m, d], w: bf16[n, d], s: f32[]) -> (y: bf16[m, n], z: f32[m])\n"
    return coda_lang.compile(head + "y = x @ w * s\nz = sum[n](y)\n")


@pytest.mark.parametrize("outputs", [3, [3], b"y", ["y", None]])
@pytest.mark.parametrize("method", ["__call__", "reference", "explain"])
def test_outputs_are_named(outputs, method, scaled):
    x, w = torch.ones(4, 8).bfloat16(), torch.ones(3, 8).bfloat16()
    with pytest.raises(CallError, match="C0711: p: outputs= takes names"):
        getattr(scaled, method)(x, w, 1.0, outputs=outputs)


@pytest.mark.parametrize("buffers", [["w"], 3, "w"])
def test_buffers_are_named(buffers, scaled):
    x, w = torch.ones(4, 8).bfloat16(), torch.ones(3, 8).bfloat16().requires_grad_()
    with pytest.raises(CallError, match="C0516: p: accumulate_into= takes buffers by name"):
        scaled(x, w, 1.0, accumulate_into=buffers)


@pytest.mark.parametrize("number", [10**400, -(10**400), 2**128])
@pytest.mark.parametrize("grad", [False, True])
def test_a_number_that_f32_cannot_hold(number, grad, scaled):
    x, w = torch.ones(4, 8).bfloat16(), torch.ones(3, 8).bfloat16().requires_grad_(grad)
    scaled(x, w, 2)  # a call of the kind is known
    for call in (scaled, scaled.reference, scaled.explain):
        with pytest.raises(CallError, match=f"C0702: p: argument 's': got an integer of {number.bit_length()} bits"):
            call(x, w, number)
