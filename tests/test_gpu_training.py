"""The checks of derivatives on a GPU, as far as they can be tested without one: what is run, oracles, the checks themselves, logs."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from bench import gpu_training, protocol, training_cases, training_checks, training_objects, training_speed  # noqa: E402
from coda_lang.backend_cute import compile, configs, selfcheck, spec, torch_fns  # noqa: E402
from tests.clocks import AnyClock  # noqa: E402

TINY = {"m": 40, "d": 48, "f": 56, "v": 72}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("training")
    gpu_training.emit(path, [])
    return path


@pytest.fixture(scope="module")
def programs(folder):
    return gpu_training.functions(folder)


@pytest.mark.slow
def test_every_spec_with_gradients_is_checked_at_every_shape(programs, root):
    jobs, objects = gpu_training.jobs_of(programs, ["gradients", "train"])
    ran = {j["program"] for j in jobs if j["kind"] == "gradients"}
    assert ran == {n for n, fn in programs.items() if fn.gradients} - {"mlp_block_lanes"}
    assert len(ran) >= len(list((root / "specs").glob("*.coda")))
    for name in ran:
        shapes = [j["shape"] for j in jobs if j.get("program") == name]
        assert [s["n" if name == "linear_columns" else "m"] for s in shapes] == [1, 7, 1000, 4096, 4096]
    assert {"m": 1000, "n": 1003, "k": 264} in [j["shape"] for j in jobs if j.get("program") == "linear_bf16"]
    assert {"lane": 2, "m": 4096, "f": 14336, "d": 4096} in [j["shape"] for j in jobs if j.get("program") == "swiglu"]
    keys = [o.key for o in objects]
    assert len(set(keys)) == len(keys) and {k for j in jobs for k in j["needs"]} == set(keys)


def test_a_job_needs_the_kernels_of_forward_and_backward(programs):
    shape = {"m": 40, "n": 72, "k": 48}
    job = {"kind": "gradients", "shape": shape}
    names = [o.kernel.name for o in training_cases.needed(programs["linear_bf16"], job)]
    assert names == ["linear_bf16", "linear_bf16_backward_d_x", "linear_bf16_backward_d_w"]
    only = training_cases.needed(programs["linear_bf16"], {"kind": "forward", "shape": shape})
    assert [o.kernel.name for o in only] == ["linear_bf16"]
    used = training_cases.needed(programs["linear_bf16"], {"kind": "uses", "shape": shape})
    assert any(t.dtype == "f32" for o in used for t in o.kernel.tensors if t.role == "out")  # a gradient for a buffer


def test_configurations_are_sampled_and_forced(programs):
    fn = programs["swiglu"]
    gemms = spec.launches(fn.backward)
    choices = training_cases.samples(fn, [])
    assert len(choices) == 3
    for gemm in gemms:
        assert len({c[gemm.name] for c in choices}) == min(3, len(configs.offered(gemm)))
    job = {"kind": "gradients", "shape": training_cases.shape_of(fn, training_cases.RAGGED), "configs": choices[1]}
    planned = {o.kernel.name: o.config.key for o in training_cases.needed(fn, job) if o.kernel in gemms}
    assert planned == choices[1]


@pytest.mark.parametrize("name", ["linear_bf16", "linear_f16", "swiglu", "head_rmsnorm", "lm_loss", "mlp_block"])
def test_gradients_on_the_cpu_are_within_the_bound(programs, name):
    fn = programs[name]
    found = training_checks.check(fn, {"shape": training_cases.shape_of(fn, training_cases.SMALL), "runs": 2}, "cpu")
    assert found["ok"], found
    assert set(found["gradients"]) == {n for n, _ in fn.gradients}


def test_eager_rounds_every_operation(programs):
    fn = programs["rowscale_linear"]
    tensors = training_cases.leaves(fn, {"m": 40, "n": 72, "k": 48}, "cpu")
    with torch.no_grad():
        x, w, s, c = tensors
        (got,) = fn._reference(training_cases.Eager(), *tensors)
        assert torch.equal(got, ((s[:, None] * (x @ w.T)) * c).to(torch.bfloat16))
    fn = programs["swiglu"]
    tensors = training_cases.leaves(fn, {"lane": 2, "m": 40, "f": 72, "d": 48}, "cpu")
    with torch.no_grad():
        x, w = tensors
        z = torch.einsum("md,fld->mfl", x, w)
        y = torch.nn.functional.silu(z[..., 0]) * z[..., 1]
        got = fn._reference(training_cases.Eager(), *tensors)
    assert selfcheck.error(got[0], y) < 1e-3  # but for the order of a product's sum
    assert selfcheck.error(got[0], fn._reference(torch_fns.Exact(), *[t.detach().double() for t in tensors])[0]) > 1e-3


def test_a_wrong_gradient_and_a_run_that_differs_are_found(programs, monkeypatch):
    fn = programs["linear_bf16"]
    job = {"shape": {"m": 40, "n": 72, "k": 48}, "runs": 3}
    true = training_checks.gradients
    monkeypatch.setattr(training_checks, "gradients", lambda *a: [g * 1.02 for g in true(*a)])
    found = training_checks.check(fn, job, "cpu")
    assert not found["ok"] and not any(g["ok"] for g in found["gradients"].values()) and found["repeatable"]
    monkeypatch.setattr(training_checks, "gradients", lambda *a: [g + 1e-4 * torch.rand(()).bfloat16() for g in true(*a)])
    assert not training_checks.check(fn, job, "cpu")["repeatable"]


@pytest.mark.parametrize("name", ["linear_bf16", "linear_bias_gelu"])
def test_uses_by_autograd(programs, name):
    fn = programs[name]
    found = training_checks.uses(fn, {"shape": training_cases.shape_of(fn, training_cases.SMALL)}, "cpu")
    assert found["ok"] and len(found["uses"]) == len(training_checks.USES) - 1, found


def test_measured_methods_compute_the_same(programs):
    groups = training_speed.Groups(programs, "cpu", TINY)
    for name in groups.names:
        found = protocol.measure(*groups.methods(name), AnyClock({}), far=1e-2)
        assert found["ok"] and {"coda", "compile", "gemm"} <= set(found["ms"]), found
    for name in groups.names:
        for program, shape in gpu_training.speed_shapes(name).items():
            assert set(shape) == {a for a, _ in programs[program].program.extents}


@pytest.mark.slow
def test_jobs_run_in_a_process_and_give_a_line_each(folder):
    shape = {"m": 9, "n": 8, "k": 16}
    jobs = [{"kind": k, "program": p, "shape": shape, "runs": 2} for k, p in (("gradients", "linear_bf16"), ("gradients", "no_such"))]
    text = f"from pathlib import Path; from bench import gpu_training as g; g.work(Path({str(folder)!r}), {jobs!r}, 0, False, 'cpu')"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=gpu_training.ROOT)
    first, second = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert first["ok"] and first["gradients"]["x"]["error"] <= first["gradients"]["x"]["bound"], done.stderr
    assert not second["ok"] and "KeyError" in second["raised"] and second["job"] == 1


@pytest.mark.slow
def test_a_rehearsal_without_a_gpu(tmp_path, monkeypatch, capfd):
    """The parent's whole way: plan, run in processes, memory tools that are not there, write, sum up."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(gpu_training.shutil, "which", lambda name: str(tmp_path / "no_such_tool"))
    out = tmp_path / "results.jsonl"
    command = ["gpu_training.py", "--run", str(tmp_path), "--device", "cpu", "--only", "linear", "--parts", "uses", "configs", "sanitizer"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(out), "--limit", "1000"])
    monkeypatch.setenv("CODA_CACHE_DIR", "")  # restored afterwards
    assert gpu_training.main() == 1  # the tools
    head, *lines = (json.loads(line) for line in out.read_text().splitlines())
    assert [x["ok"] for x in lines if x["kind"] != "sanitizer"] == [True] * 7  # uses of one program; two programs, three configurations
    assert all("refused" in x["summary"][0] and x["status"] == "not started" for x in lines if x["kind"] == "sanitizer")
    said = capfd.readouterr().out
    assert "9 of 9 jobs, 2 not right" in said and "linear_bf16" in said and "uses: all right" in said


def test_objects_that_do_not_compile_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path))
    made = []

    class Pool:
        def __init__(self, count):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

        def run(self, job, path):
            if job.key == "bad":
                raise ValueError("no room\nfor it")
            made.append(job.key)
            path.write_bytes(b"object")

    monkeypatch.setattr("coda_lang.backend_cute.worker.Pool", Pool)
    jobs = [SimpleNamespace(key=k, kernel=SimpleNamespace(name=k), config=None) for k in ("good", "bad")]
    failed = training_objects.compile_all(jobs, 2, 1e12)
    assert made == ["good"] and list(failed) == ["bad"] and "for it" in failed["bad"]
    assert training_objects.compile_all(jobs[:1], 2, 1e12) == {} and made == ["good"]
    assert "no time" in training_objects.compile_all(jobs[1:], 2, 0.0)["bad"]


def test_objects_run_where_the_compiler_is_not_installed(programs, tmp_path, monkeypatch):
    monkeypatch.setenv("CODA_CACHE_DIR", "")
    monkeypatch.setenv("CODA_DSL_RUNTIME", "")
    monkeypatch.delenv("CODA_DSL_RUNTIME")
    library = tmp_path / "library.so"
    library.write_bytes(b"runtime")
    monkeypatch.setattr(compile, "runtime_library", lambda: library)
    job = {"kind": "forward", "shape": {"m": 9, "n": 8, "k": 16}}
    with monkeypatch.context() as here:
        here.setattr(compile, "versions", lambda: {"nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15"})
        keys = [o.key for o in training_cases.needed(programs["linear_bf16"], job)]
        training_objects.pack(tmp_path)
    monkeypatch.setattr(compile, "versions", lambda: {"nvidia-cutlass-dsl": "none", "apache-tvm-ffi": "0.1.15"})
    training_objects.use(tmp_path)
    assert [o.key for o in training_cases.needed(programs["linear_bf16"], job)] == keys
    assert (tmp_path / training_objects.RUNTIME).read_bytes() == b"runtime"


def test_logs_of_memory_tools():
    assert gpu_training.read_tool("sanitized linear\n========= ERROR SUMMARY: 0 errors\n")["ok"]
    assert gpu_training.read_tool("sanitized linear\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n")["ok"]
    assert not gpu_training.read_tool("sanitized linear\n========= Invalid __global__ write\n========= ERROR SUMMARY: 10 errors\n")["ok"]
    assert not gpu_training.read_tool("========= ERROR SUMMARY: 0 errors\n")["ok"]  # nothing ran
    refused = gpu_training.read_tool("========= Error: Device not supported\n")
    assert not refused["ok"] and "refused" in refused["summary"][0] and refused["said"]


def test_a_summary_fails_for_wrong_and_for_missing_results(capsys):
    good = {"ok": True, "kind": "gradients", "program": "p", "repeatable": True, "outputs_same": True, "unwritten": True}
    good["gradients"] = {"x": {"error": 1e-3, "bound": 2e-3, "written": 1e-3, "ok": True}}
    assert gpu_training.summarise([good], 1, 1.0) == 0 and gpu_training.summarise([good], 2, 1.0) == 1
    assert gpu_training.summarise([{**good, "ok": False, "repeatable": False}], 1, 1.0) == 1
    said = capsys.readouterr().out
    assert "0.50 of its bound (x)" in said and "not repeatable" in said
