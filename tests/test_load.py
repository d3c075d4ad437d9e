"""Builds as callables: what is refused before anything runs, and that nothing imports the compiler."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from coda_lang import driver  # noqa: E402
from coda_lang.backend_cute import cache, compile, configs, load, manifest, spec  # noqa: E402
from coda_lang.backend_cute.errors import CallError  # noqa: E402

TEXT = """
program one(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], peak: f32[])
y = x @ w
peak = amax[m, n](x @ w)

program two(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = relu(x @ w)
"""
CPU = torch.device("cpu")
CONFIGS = ("128x128_pp_c1x1", "256x128_coop_c2x1")


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A build as `compile.build` writes it, but for the contents of its objects."""
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "build"
    folder.mkdir()
    module = folder / "kernel.py"
    module.write_text(driver.emit(TEXT))
    entries = []
    for fn in load.functions_of(load.import_file(module)):
        for kernel in fn.program.kernels:
            keys = CONFIGS if spec.gemms(kernel) else (None,)
            for config in [next((c for c in configs.offered(kernel) if c.key == key), None) if key else None for key in keys]:
                file = folder / f"{kernel.name}-{config.key if config else ''}.so"
                file.write_bytes(b"not machine code")
                record = compile.job(kernel, config, fn.functions).record
                key = config.key if config else None
                entries.append(manifest.Entry(fn.program.name, kernel.name, key, record, file.name, cache.checksum(file)))
    made = manifest.Manifest("sm_90a", tuple(entries), module.name, compile.versions(), folder)
    manifest.write(made)
    return made


def test_a_build_gives_the_functions_of_its_module(build):
    loaded = coda_lang.load(build.directory)
    assert sorted(vars(loaded)) == ["one", "two"]
    x, w = torch.randn(4, 8).bfloat16(), torch.randn(6, 8).bfloat16()
    assert torch.equal(loaded.one(x, w).y, x @ w.T) or torch.allclose(loaded.one(x, w).y.float(), (x @ w.T).float(), atol=0.1)
    assert loaded.two.last_path is None and loaded.two(x, w).shape == (4, 6) and loaded.two.last_path == "reference"


def test_only_configurations_that_were_built_are_chosen(build):
    fn = coda_lang.load(build.directory).two
    gemm = fn.program.kernels[0]
    assert len(configs.offered(gemm)) > len(CONFIGS)
    for m, n, k in ((1, 8, 8), (64, 4096, 64), (4096, 4096, 4096)):
        assert fn.objects.config(gemm, {"m": m, "n": n, "k": k}, torch.device("cpu")).key in CONFIGS
    assert set(fn.explain(torch.zeros(7, 8).bfloat16(), torch.zeros(9, 8).bfloat16()).configs.values()) <= set(CONFIGS)


def test_objects_of_another_program_or_damaged_ones_are_refused(build):
    fn = coda_lang.load(build.directory).two
    (gemm,) = fn.program.kernels
    config = fn.objects.config(gemm, dict.fromkeys("mnk", 8), torch.device("cpu"))
    other = dataclasses.replace(gemm, granule=gemm.granule * 2)
    with pytest.raises(CallError, match="C0712.*is stale"):
        fn.objects.executables([(other, config)], CPU)
    (build.directory / f"{gemm.name}-{config.key}.so").write_bytes(b"other machine code")
    with pytest.raises(CallError, match="C0712.*is damaged"):
        fn.objects.executables([(gemm, config)], CPU)
    (build.directory / f"{gemm.name}-{config.key}.so").unlink()
    with pytest.raises(CallError, match="C0712.*lacks"):
        fn.objects.executables([(gemm, config)], CPU)


def test_outputs_that_were_not_built_are_refused_with_the_remedy(build):
    fn = coda_lang.load(build.directory).one
    x, w = torch.zeros(4, 8).bfloat16(), torch.zeros(6, 8).bfloat16()
    assert fn(x, w, outputs="y").shape == (4, 6)  # the reference needs no object
    with pytest.raises(CallError, match="C0712.*has no object for one"):
        fn.explain(x, w, outputs="y")


@pytest.mark.parametrize(
    "change, code, words",
    [
        ({"arch": "sm_100a"}, "C0705", "is for sm_100a; this version runs sm_90a"),
        ({"format": 0}, "C0712", "has format 0"),
        ({"versions": {"nvidia-cutlass-dsl": "0.1"}}, "C0712", "was made with nvidia-cutlass-dsl 0.1"),
        ({"versions": {"apache-tvm-ffi": "7.0"}}, "C0712", "was made with apache-tvm-ffi 7.0"),
        ({"module": None}, "C0712", "holds no programs"),
        ({"module": "other.py"}, "C0712", "is missing"),
        ({"entries": 3}, "C0712", "manifest.json that is none"),
    ],
    ids=str,
)
def test_what_cannot_run_here_is_refused_before_anything_runs(build, monkeypatch, change, code, words):
    monkeypatch.setattr(compile, "versions", lambda: {"nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15"})
    path = build.directory / manifest.FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CallError) as caught:
        coda_lang.load(build.directory)
    assert caught.value.diagnostics[0].code == code and words in str(caught.value) and "help: " in str(caught.value)


def test_a_module_that_does_not_run_is_refused(build):
    (build.directory / "kernel.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(CallError, match="C0712.*does not run: ModuleNotFoundError"):
        coda_lang.load(build.directory)


def test_versions_that_fit(build):
    later = compile.versions()["apache-tvm-ffi"] + ".post9"
    load.check(dataclasses.replace(build, versions={"nvidia-cutlass-dsl": "none", "apache-tvm-ffi": later}))


@pytest.mark.slow
def test_loading_and_calling_import_no_cutlass(build):
    script = (
        "import sys, time\nstart = time.process_time()\nimport torch\nheavy = time.process_time() - start\n"
        f"import coda_lang\nfn = coda_lang.load({str(build.directory)!r}).two\ntaken = time.process_time() - start - heavy\n"
        "assert taken < heavy / 2, (taken, heavy)\n"  # without bytecode, too; bench/load_time.py measures
        "front = {'driver', 'syntax', 'ir', 'ops', 'passes', 'cli'} & {m.partition('coda_lang.')[2].split('.')[0] for m in sys.modules}\n"
        "assert not front and not {'filelock', 'statistics', 'tvm_ffi'} & set(sys.modules), front\n"
        "fn(torch.zeros(4, 8).bfloat16(), torch.zeros(6, 8).bfloat16())\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('cutlass', 'lark', 'click', 'rich')]\n"
        "sys.exit(', '.join(bad) or 0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_built_object_loads_and_checks_its_arguments(tmp_path, root, monkeypatch):
    """The whole way without a GPU: compile, link, load by tvm_ffi; the object itself refuses tensors that are on no GPU."""
    pytest.importorskip("cutlass")
    pytest.importorskip("tvm_ffi")
    path = tmp_path / "kernel.py"
    path.write_text(driver.emit(TEXT))
    functions = load.functions_of(load.import_file(path))
    two = functions[1]
    (gemm,) = two.program.kernels
    compile.build([two.program], two.functions, tmp_path / "build", configs={gemm.name: [spec.Config(128, 128)]}, module=path)
    fn = coda_lang.load(tmp_path / "build").two
    (call,) = fn.objects.executables([(gemm, spec.Config(128, 128))], CPU)
    with pytest.raises((TypeError, ValueError), match="device_type=cuda"):
        call(*(torch.zeros(8, 8, dtype=torch.bfloat16) for _ in gemm.tensors))


def test_a_build_trains_with_whole_kernels(build, monkeypatch):
    """Nothing is compiled: kernels that no gradient needs are left out, others run as they were built."""
    from coda_lang.backend_cute import arguments
    from tests.standins import StandIns

    fn = coda_lang.load(build.directory).one
    assert fn.objects.whole and fn.backward is not None
    extents = {"m": 8, "k": 16, "n": 24}

    class Known(StandIns):
        whole = True

        def select(self, program, functions):
            assert {k.name for k in program.kernels} <= {k.name for p in fn.programs for k in spec.built(p)}
            return self

    fn.objects = Known(fn.functions, extents)
    monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    x, w = torch.randn(8, 16).bfloat16().requires_grad_(), torch.randn(24, 16).bfloat16()
    out = fn(x, w)
    (out.y.float().sum() + out.peak).backward()
    other = x.detach().clone().requires_grad_()
    reference = fn.reference(other, w)
    (reference.y.float().sum() + reference.peak).backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=3e-2, atol=3e-2)
    assert not any(name.endswith("d_w") for name in fn.objects.calls)
    with pytest.raises(CallError, match="C0712: one: a build has no kernels that leave a gradient in f32"):
        fn(x, w, accumulate_into={"x": torch.zeros(8, 16)})
