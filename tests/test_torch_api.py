"""`coda_lang.compile` and `coda_lang.load`: sources in every form, what comes back, what importing costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from coda_lang import torch_api  # noqa: E402

LINEAR = "program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_one_program_is_a_function_several_a_namespace():
    fn = coda_lang.compile(LINEAR)
    assert repr(fn) == "<coda_lang function linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])>" and fn.__name__ == "linear"
    both = coda_lang.compile(LINEAR + "\n" + LINEAR.replace("linear", "again"))
    assert list(vars(both)) == ["linear", "again"]


def test_a_path_or_a_text(tmp_path):
    path = tmp_path / "linear.coda"
    path.write_text(LINEAR)
    x, w = torch.randn(4, 8).bfloat16(), torch.randn(6, 8).bfloat16()
    want = coda_lang.compile(LINEAR)(x, w)
    for source in (path, str(path)):
        assert torch.equal(coda_lang.compile(source)(x, w), want)
    with pytest.raises(coda_lang.CodaError, match="C0801"):
        coda_lang.compile("missing.coda")


def test_params_and_types():
    text = "type T = bf16 | f16\nparam c = 1.0\nprogram scaled(x: T[m, k], w: T[n, k]) -> (y: T[m, n])\ny = x @ w * c\n"
    assert sorted(vars(coda_lang.compile(text))) == ["scaled_bf16", "scaled_f16"]
    half = coda_lang.compile(text, types={"T": "f16"}, c=0.5)
    x, w = torch.ones(2, 8).half(), torch.ones(3, 8).half()
    y = half(x, w)
    assert y.dtype == torch.float16 and bool((y == 4).all())
    with pytest.raises(coda_lang.CodaError, match="C0210"):
        coda_lang.compile(LINEAR, epsilon=1.0)


def test_extents():
    text = "program heads(x: bf16[m, d], w: bf16[head=4, e=8, d]) -> (y: bf16[m, head, e])\ny = x @ w\n"
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(6, 16, 8).bfloat16()
    y = coda_lang.compile(text, extents={"head": 6, "e": 16})(x, w)
    assert y.shape == (3, 6, 16)
    with pytest.raises(coda_lang.CodaError, match="C07"):
        coda_lang.compile(text)(x, w)
    for wrong in ({"heads": 6}, {"e": 16.0}, [("e", 16)]):
        with pytest.raises(coda_lang.CodaError, match="C0210"):
            coda_lang.compile(text, extents=wrong)


def test_the_emitted_module_is_kept_and_mended(cache):
    coda_lang.compile(LINEAR)
    (module,) = (cache / "modules").glob("*.py")
    assert "def linear_reference" in module.read_text()
    module.write_text("raise RuntimeError\n")
    assert coda_lang.compile(LINEAR).__name__ == "linear" and "def linear_reference" in module.read_text()


def test_a_cache_that_cannot_be_written_is_an_error_with_a_remedy(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(coda_lang.CodaError, match="C0714(.|\n)*help: set CODA_CACHE_DIR"):
        coda_lang.compile(LINEAR)


@pytest.mark.slow
def test_names_are_offered_lazily():
    script = (
        "import sys, coda_lang\n"
        "assert 'compile' in dir(coda_lang) and 'torch' not in sys.modules\n"
        "assert issubclass(coda_lang.CodaError, Exception) and 'torch' not in sys.modules\n"
        "coda_lang.compile\n"
        "assert 'torch' in sys.modules and 'cutlass' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert coda_lang.load is torch_api.load
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        coda_lang.nothing  # noqa: B018


@pytest.mark.slow
def test_sharded_tensors_are_refused():
    """Row 29: a real DTensor, in a process of its own."""
    pytest.importorskip("torch.distributed.tensor")
    script = (
        "import torch, torch.distributed as dist, coda_lang\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "dist.init_process_group('fake', rank=0, world_size=2, store=FakeStore())\n"
        "w = distribute_tensor(torch.randn(6, 8).bfloat16(), init_device_mesh('cpu', (2,)), [Shard(0)])\n"
        f"fn = coda_lang.compile({LINEAR!r})\n"
        "try: fn(torch.randn(4, 8).bfloat16(), w)\n"
        "except coda_lang.CodaError as problem: print(problem)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip("this torch has no fake process group")
    assert "C0702: linear: argument 'w': got a sharded DTensor" in done.stdout and ".full_tensor()" in done.stdout, done.stderr


def test_a_refused_source_says_in_python_what_codac_says():
    with pytest.raises(coda_lang.CodaError) as caught:
        coda_lang.compile("program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\nparam eps = 1.0\ny = silu(x @ w) * esp\n")
    text = str(caught.value)
    assert "error[C0201]" in text and "^^^" in text and "`eps`" in text, text
