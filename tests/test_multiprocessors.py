"""Kernels are spread over the multiprocessors of the device at hand: in keys, in the choice of tiles, in builds."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from coda_lang import driver  # noqa: E402
from coda_lang.backend_cute import compile, configs, host, load, manifest, spec  # noqa: E402

TEXT = """
forward program p(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], peak: f32[])
y = x @ w
peak = amax[m, n](x @ w)
"""
NORM = "program norm(x: bf16[m, n]) -> (y: bf16[m, n])\ny = x * rsqrt(mean[n](x * x))\n"
CPU = torch.device("cpu")


def jobs(fn, sms: int) -> dict[str, compile.Job]:
    made = [(k, configs.offered(k)[0] if spec.gemms(k) else None) for k in fn.program.kernels]
    return {k.name: compile.job(k, config, fn.functions, sms=sms) for k, config in made}


def test_the_number_is_part_of_the_key_of_what_it_changes() -> None:
    fn = coda_lang.compile(TEXT)
    here, other = jobs(fn, 132), jobs(fn, 78)
    for kernel in fn.program.kernels:
        same = isinstance(kernel, spec.Finish)
        assert (here[kernel.name].key == other[kernel.name].key) == same
        assert here[kernel.name].record == other[kernel.name].record  # of builds the manifest says it, once
    norm = coda_lang.compile(NORM)
    (rows,) = norm.program.kernels
    assert jobs(norm, 132)[rows.name].key == jobs(norm, 78)[rows.name].key


def test_kernels_are_compiled_for_the_device_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, asked = coda_lang.compile(TEXT), []
    monkeypatch.setattr(compile, "objects_for", lambda jobs: asked.extend(jobs) or [Path(str(j.sms)) for j in jobs])
    monkeypatch.setattr(compile, "load", lambda path: path)
    wanted = [(k, configs.offered(k)[0]) for k in fn.program.kernels if spec.gemms(k)]
    for sms in (132, 78, 132):
        monkeypatch.setattr(host, "multiprocessors", lambda device, sms=sms: sms)
        assert fn.objects.executables(wanted, CPU) == [Path(str(sms))]
    assert [j.sms for j in asked] == [132, 78]


def test_tiles_are_chosen_for_the_device_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = coda_lang.compile(TEXT)
    launch = next(k for k in fn.program.kernels if spec.gemms(k))
    shapes = [{"m": m, "n": 1024, "k": 4096} for m in range(256, 4096, 256)]
    chosen = {}
    for sms in (132, 78):
        monkeypatch.setattr(host, "multiprocessors", lambda device, sms=sms: sms)
        chosen[sms] = [fn.objects.config(launch, shape, CPU) for shape in shapes]
    assert chosen[132] != chosen[78]


@pytest.fixture
def build(tmp_path, monkeypatch) -> manifest.Manifest:
    """A build for 114 multiprocessors whose objects hold nothing."""
    monkeypatch.setattr(compile, "objects_for", lambda jobs, workers=None: [_empty(tmp_path / j.key) for j in jobs])
    module = tmp_path / "kernel.py"
    module.write_text(driver.emit(TEXT))
    (fn,) = load.functions_of(load.import_file(module))
    return compile.build([fn.program], fn.functions, tmp_path / "build", module=module, sms=114)


def _empty(path: Path) -> Path:
    path.write_bytes(b"no machine code")
    return path


def test_a_build_says_what_it_is_for_and_warns_once_elsewhere(build, monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifest.read(build.directory).sms == 114
    fn = coda_lang.load(build.directory)
    launch, extents = fn.program.kernels[0], {"m": 64, "n": 64, "k": 64}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(host, "multiprocessors", lambda device: 114)
        fn.objects.config(launch, extents, CPU)
    monkeypatch.setattr(host, "multiprocessors", lambda device: 78)
    with pytest.warns(RuntimeWarning, match="over 114 multiprocessors, and this device has 78: results are right.*--sms 78") as caught:
        fn.objects.config(launch, extents, CPU)
        fn.objects.config(launch, extents, CPU)
    assert len(caught) == 1


def test_a_build_from_before_is_for_132(build) -> None:
    path = build.directory / manifest.FILE
    content = json.loads(path.read_text())
    del content["sms"]
    path.write_text(json.dumps(content))
    assert manifest.read(build.directory).sms == 132


@pytest.mark.slow
def test_machine_code_is_that_of_the_number(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default's is what it was when the number was not asked for; another number makes another grid."""
    pytest.importorskip("cutlass")
    fn = coda_lang.compile("program q(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n")
    (kernel,) = fn.program.kernels
    job = compile.job(kernel, spec.Config(), fn.functions)
    assert job.sms == 132
    for name, one in (("default", job), ("few", dataclasses.replace(job, sms=78))):
        compile.objects_for([one])[0].replace(tmp_path / name)
    assert (tmp_path / "default").read_bytes() != (tmp_path / "few").read_bytes()
