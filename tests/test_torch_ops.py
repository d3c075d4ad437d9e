"""Functions as registered operators: opcheck, torch.compile, torch.export, dispatch modes; measuring host time. Without a GPU."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from tests import handwritten as hw  # noqa: E402
from tests.autograd_cases import SIZES, cotangents, function, gradients, leaves, planned, several  # noqa: E402
from tests.handwritten.training import AFFINE, SWIGLU_TRAINED, TRAINED  # noqa: E402


@pytest.mark.slow
@planned
@pytest.mark.parametrize("name", TRAINED)
def test_opcheck(path, name):
    fn, _ = function(TRAINED[name], path)
    fn.prepare()
    tensors = leaves(TRAINED[name])
    for given in (tensors, [t.detach() for t in tensors]):
        result = torch.library.opcheck(fn.operator.forward, tuple(given))
        assert set(result.values()) == {"SUCCESS"} and len(result) == 4


@pytest.mark.slow
@planned
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", TRAINED)
def test_torch_compile_without_a_break(path, name, backend):
    """Row 27."""
    torch._dynamo.reset()
    case = TRAINED[name]
    fn, _ = function(case, path)
    compiled = torch.compile(lambda *t: [o * 2 for o in several(fn(*t))], fullgraph=True, backend=backend)
    for m in (33, 34, 70):  # the third with a symbolic extent
        tensors = leaves(case, {**SIZES, "m": m})
        outs, want = compiled(*tensors), [o * 2 for o in several(fn(*tensors))]
        assert all(torch.equal(a, b) for a, b in zip(outs, want))
        wanted, given = [t for t in tensors if t.requires_grad], cotangents(outs)
        for a, b in zip(torch.autograd.grad(outs, wanted, given), torch.autograd.grad(want, wanted, given)):
            assert torch.equal(a, b)
    frozen = leaves(case, needs=["x"])
    assert torch.equal(gradients(compiled, frozen)[0][0], gradients(lambda *t: [o * 2 for o in several(fn(*t))], frozen)[0][0])
    with torch.no_grad():
        assert torch.equal(compiled(*frozen)[0], 2 * several(fn(*frozen))[0])


@pytest.mark.slow
@planned
def test_torch_compile_by_name_with_chosen_outputs_numbers_and_autocast(path):
    torch._dynamo.reset()
    fn, _ = function(AFFINE, path)
    x, w, b, r, _, c = leaves(AFFINE)
    compiled = torch.compile(lambda x, w, b, r, c: fn(x, w, b=b, r=r, s=0.5, c=c, outputs="q"), fullgraph=True, backend="aot_eager")
    q, want = compiled(x, w, b, r, c), fn(x, w, b, r, 0.5, c, outputs="q")
    assert torch.equal(q, want)
    for a, e in zip(torch.autograd.grad(q.sum(), [x, w, b]), torch.autograd.grad(want.sum(), [x, w, b])):
        assert torch.equal(a, e)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x.detach().float(), w, b, r, c), want)


@planned
def test_a_wrong_call_while_tracing_says_what_is_wrong(path):
    torch._dynamo.reset()
    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = (t.detach() for t in leaves(SWIGLU_TRAINED))
    compiled = torch.compile(fn, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="C0707: swiglu: argument 'w': axis 'd'"):
        compiled(x, w[:, :, 1:])


@planned
def test_fake_tensors_and_dispatch_modes_see_one_operator(path):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    want, given = gradients(fn, [x, w])
    with Watch():
        y = fn(x.detach(), w.detach())
    assert [s for s in seen if "coda_lang" in s] == [str(fn.operator.forward)] and torch.equal(y, fn(x, w))
    del seen[:]
    with Watch():
        got = torch.autograd.grad(fn(x, w), [x, w], given[0])
    assert sum("coda_lang" in s for s in seen) == 2 and all(torch.equal(a, b) for a, b in zip(got, want))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, w)]
        assert fn(*fakes).shape == (33, 16)
    assert fn(*fakes).shape == (33, 16)


def test_operator_names_are_stable_and_apart():
    a, b, c = SWIGLU_TRAINED.function(), SWIGLU_TRAINED.function(), hw.SWIGLU.function()
    for fn in (a, b, c, a):
        fn.prepare()
    names = [fn.operator.forward._schema.name for fn in (a, b, c)]
    digests = [re.fullmatch(r"coda_lang::swiglu_([0-9a-f]{8})(_[0-9]+)?", n)[1] for n in names]
    assert digests[0] == digests[1] != digests[2] and len(set(names)) == 3


@planned
def test_accumulate_into_is_refused_while_tracing(path):
    torch._dynamo.reset()
    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    into = torch.zeros(w.shape)
    with pytest.raises(Exception, match="accumulate_into"):
        torch.compile(lambda x, w: fn(x, w, accumulate_into={"w": into}), fullgraph=True, backend="eager")(x, w)


class Layer(torch.nn.Module):
    """A module around a function."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.w = fn, torch.nn.Parameter(leaves(SWIGLU_TRAINED)[1].detach().clone())

    def forward(self, x):
        return self.fn(x, self.w)


@pytest.mark.slow
@planned
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_free_extent(path, strict):
    torch._dynamo.reset()
    layer = Layer(function(SWIGLU_TRAINED, path)[0])
    x = leaves(SWIGLU_TRAINED, needs=[])[0]
    exported = torch.export.export(layer, (x,), strict=strict, dynamic_shapes=({0: torch.export.Dim("m", min=2)},))
    targets = [n.target for n in exported.graph.nodes if n.op == "call_function"]
    assert targets == [layer.fn.operator.forward]
    assert torch.equal(exported.module()(x[:5]), layer(x[:5]))


@pytest.mark.slow
@planned
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler on the CPU")
def test_inductor(path):
    torch._dynamo.reset()
    layer = Layer(function(SWIGLU_TRAINED, path)[0])
    x = leaves(SWIGLU_TRAINED, needs=[])[0]
    layer(x).float().square().sum().backward()
    want, layer.w.grad = layer.w.grad, None
    torch.compile(layer, fullgraph=True)(x).float().square().sum().backward()
    torch.testing.assert_close(layer.w.grad, want, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_host_time_is_measured(root, tmp_path):
    out = tmp_path / "times.jsonl"
    command = [sys.executable, str(root / "bench" / "host_time.py"), "--stubs", "--calls", "4", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, *found = (json.loads(line) for line in out.read_text().splitlines())
    assert head["command"].startswith("bench/host_time.py --stubs")
    assert {row["program"] for row in found} == {"linear", "swiglu"} and len(found) == 16
    assert all(0 < row["best_us"] <= row["median_us"] for row in found)
