"""What went wrong for users of systems like this one (rows 1 to 13, 16 to 18, 24 to 26, 30, 32 to 34 of the list), as tests of this one.

Rows about tensors are in bench/rows.py and run here twice: on the CPU, where the host goes its whole way over poisoned buffers with
stand-ins for kernels, and marked `gpu` with the kernels. The rows below them need no kernel to run.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from bench import rows  # noqa: E402
from coda_lang.backend_cute import configs, errors, host, plans, spec  # noqa: E402
from coda_lang.backend_cute.binding import bind  # noqa: E402
from coda_lang.backend_cute.function import fixed  # noqa: E402
from coda_lang.diagnostics.model import CodaError  # noqa: E402
from tests import standins  # noqa: E402


@pytest.fixture(scope="module")
def programs(root, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return vars(coda_lang.compile(root / "bench" / "rows.coda"))


def stand_in(fn, tensors):
    from coda_lang.backend_cute import arguments

    device = arguments.check(fn.program, tensors)
    binding = bind(fn.program, arguments.shapes(tensors))
    objects = standins.StandIns(fn.functions, binding.extents, fixed(fn.program), fn.program.loops)
    return host.plan(fn.program, binding, tensors, device, objects).run(tensors)


@pytest.mark.parametrize("row", rows.rows())
def test_row_with_stand_ins(row, programs, monkeypatch):
    monkeypatch.setattr(host, "allocate", rows.poisoning)
    rows.rows()[row](rows.Room(torch.device("cpu"), programs, stand_in))


@pytest.mark.gpu
@pytest.mark.parametrize("row", rows.rows())
def test_row_on_a_gpu(row, programs, monkeypatch):
    monkeypatch.setattr(host, "allocate", rows.poisoning)
    with torch.no_grad():
        rows.rows()[row](rows.Room(torch.device("cuda"), programs))


def test_a_kernel_that_leaves_an_element_out_is_noticed(programs, monkeypatch):
    """The rows can fail: a stand-in that skips one store leaves the poison."""
    monkeypatch.setattr(host, "allocate", rows.poisoning)

    class Lazy(standins.StandIns):
        def executable(self, kernel, config):
            call = super().executable(kernel, config)

            def skipping(*args):
                kept = args[len(kernel.tensors) - 1].clone()
                call(*args)
                args[len(kernel.tensors) - 1][-1:] = kept[-1:]

            return skipping

    def lazy(fn, tensors):
        binding = bind(fn.program, [tuple(t.shape) for t in tensors])
        return host.plan(fn.program, binding, tensors, torch.device("cpu"), Lazy(fn.functions, binding.extents)).run(tensors)

    with pytest.raises(AssertionError):
        rows.row_2_every_element_is_written(rows.Room(torch.device("cpu"), programs, lazy))


# --- row 10: a transposing use of the result -----------------------------------------------------------------------------------


def test_row_10_a_transposed_output_is_right_or_refused_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(host, "allocate", rows.poisoning)
    text = "program t(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[n, m])\ny = x @ w\n"
    fn = coda_lang.compile(text)
    for m, n in ((5, 9), (64, 48)):
        x, w = torch.randn(m, 24).bfloat16(), torch.randn(n, 24).bfloat16()
        (y,) = stand_in(fn, (x, w))
        assert y.shape == (n, m)
        torch.testing.assert_close(y.float(), (x.float() @ w.float().T).T, rtol=1e-2, atol=1e-2)


# --- rows 11 and 32: every configuration, every output -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums", "propagate", "four_biases"])
def test_rows_11_and_32_every_output_with_every_configuration(name, programs, monkeypatch):
    """What the host decides by the configuration (partials above all) holds for each; the kernels' part is checked on the card."""
    monkeypatch.setattr(host, "allocate", rows.poisoning)
    fn = programs[name]
    room = rows.Room(torch.device("cpu"), programs, stand_in)
    tensors = room.inputs(name, m=261, n=263, k=9)
    binding = bind(fn.program, [tuple(t.shape) for t in tensors])
    gemm = next(k for k in fn.program.kernels if isinstance(k, spec.Gemm))
    offered = configs.offered(gemm)
    assert len(offered) >= 6
    for config in offered[:: max(len(offered) // 12, 1)]:
        objects = standins.StandIns(fn.functions, binding.extents, fixed(fn.program))
        objects.config = lambda *shape, config=config: config
        room.right(name, tensors, tuple(host.plan(fn.program, binding, tensors, torch.device("cpu"), objects).run(tensors)))


# --- row 18: types that do not fit ----------------------------------------------------------------------------------------------


def test_row_18_a_type_that_is_not_declared_is_refused(programs):
    room = rows.Room(torch.device("cpu"), programs, stand_in)
    x, w, g, s, i = room.inputs("mixed", m=4, n=8, k=16)
    with pytest.raises(CodaError, match="C0703: mixed: argument 'g': got dtype bf16, expected f32"):
        programs["mixed"](x, w, g.bfloat16(), s, i)


# --- row 24: the device guard ----------------------------------------------------------------------------------------------------


def test_row_24_the_device_of_the_tensors_is_current_while_kernels_are_launched(monkeypatch):
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *exc):
            entered.append("left")

    monkeypatch.setattr(plans, "_current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    launch = plans.Step(lambda: entered.append("launch"))
    plans.Plan({}, torch.device("cuda", 1), steps=[launch]).run([])
    assert entered == [torch.device("cuda", 1), "launch", "left"]
    entered.clear()
    plans.Plan({}, torch.device("cuda", 0), steps=[launch]).run([])
    assert entered == ["launch"]


# --- row 26: a second process -----------------------------------------------------------------------------------------------------


def test_row_26_a_second_process_finds_the_object_and_a_corrupt_one_is_a_miss(tmp_path, monkeypatch):
    from coda_lang.backend_cute import cache

    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path))
    made = []
    path = cache.entry("key", lambda p: made.append(p.write_bytes(b"object")))
    script = "from coda_lang.backend_cute import cache; print(cache.entry('key', lambda p: 1 / 0))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(path)
    path.write_bytes(b"obj")
    assert cache.find("key") is None
    assert cache.entry("key", lambda p: made.append(p.write_bytes(b"object"))).read_bytes() == b"object" and len(made) == 2


# --- row 30: refusals list their reasons ---------------------------------------------------------------------------------------------


def test_row_30_a_refused_call_says_all_that_is_wrong(programs):
    with pytest.raises(CodaError) as caught:
        programs["four_biases"](*(torch.zeros(3) for _ in range(5)), "one")
    assert [d.code for d in caught.value.diagnostics] == [errors.DTYPE, errors.DTYPE, errors.DTYPE, errors.KIND]
    with pytest.raises(CodaError) as caught:
        programs["raw_and_gelu"](torch.zeros(4, 8).bfloat16(), torch.zeros(4, 9, 3).bfloat16())
    text = str(caught.value)
    assert "raw_and_gelu: argument 'w'" in text and "[n, k]" in text and "accepted: " in text and "help: " in text


def test_row_30_a_refused_program_says_why_and_what_would_do():
    with pytest.raises(CodaError) as caught:
        coda_lang.compile("program p(x: bf16[e, f, m, k], w: bf16[e, f, n, k]) -> (y: f32[e, f, m, n])\ny = matmul[k](x, w)\n")
    (problem,) = caught.value.diagnostics
    assert problem.code.startswith("C04") and problem.span is not None and problem.notes and problem.help


# --- row 33: another architecture ----------------------------------------------------------------------------------------------------


def test_row_33_another_gpu_is_refused_before_anything_is_launched(programs, monkeypatch):
    from coda_lang.backend_cute import arguments

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(CodaError, match=r"C0705: mixed: the kernels are for sm_90a; cuda:0 is a NVIDIA A100 of compute capability 8.0"):
        arguments.check_gpu(programs["mixed"].program, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    arguments.check_gpu(programs["mixed"].program, torch.device("cuda", 0))


# --- row 34: a laptop ------------------------------------------------------------------------------------------------------------------


def test_row_34_checking_and_emitting_need_no_torch(root):
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] in ('torch', 'cutlass', 'tvm_ffi', 'numpy'): raise ImportError(name + ' is not here')\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import coda_lang\n"
        "from coda_lang import driver\n"
        "driver.check('specs/swiglu.coda')\n"
        "assert 'silu' in driver.emit('specs/swiglu.coda')\n"
        "assert not {'torch', 'cutlass', 'tvm_ffi', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True)
