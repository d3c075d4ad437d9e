"""Compiling, caching and building: keys, locks, corrupt entries, manifests, the source of functions, what a worker's failure becomes."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from coda_lang.backend_cute import cache, errors, manifest, spec, worker
from coda_lang.backend_cute import compile as compiler
from coda_lang.backend_cute.functions_source import source_of
from coda_lang.diagnostics.model import CodaError, InternalError

EPS, BIG = 1e-5, math.inf
silu = object()  # a name of the module that functions only use as an attribute


def plus_eps(f, x):
    return f.silu(x) + EPS


def scaled(f, x):
    low = plus_eps(f, x)
    return (f.minimum(low, BIG) * 2.0,)


def other(f, x):
    return (x - 1.0,)


ROW = spec.Index("row")
VECTOR = spec.Finish(
    "vector",
    (spec.Tensor("p", "f32", (("n",),), "work"), spec.Tensor("y", "bf16", (("n",),), "out")),
    (spec.Partial("p", "sum"),), "scaled", ("y",), ("n",),
)  # fmt: skip
FUNCTIONS = {"scaled": scaled, "other": other}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def code(problem: pytest.ExceptionInfo[CodaError]) -> str:
    return problem.value.diagnostics[0].code


# --- the source of functions -------------------------------------------------------------------------------------------


def test_source_holds_helpers_and_constants() -> None:
    scope: dict = {}
    exec(source_of(FUNCTIONS), scope)
    assert set(scope["FUNCTIONS"]) == {"scaled", "other"}

    class Plain:
        silu, minimum = staticmethod(lambda x: x), staticmethod(min)

    assert scope["FUNCTIONS"]["scaled"](Plain, 3.0) == (2 * (3.0 + EPS),)


def test_source_refuses_what_another_process_cannot_have() -> None:
    table = [1, 2]

    def uses_list(f, x):
        return (x * table[0],)

    with pytest.raises(InternalError, match="uses table"):
        source_of({"uses_list": uses_list})
    with pytest.raises(InternalError, match="not written as a plain"):
        source_of({"a": lambda f, x: (x,)})
    with pytest.raises(InternalError, match="not to be had"):
        scope: dict = {}
        exec("def ghost(f, x):\n    return (x,)", scope)
        source_of({"ghost": scope["ghost"]})
    with pytest.raises(InternalError, match="not a plain function"):
        source_of({"print": print})  # type: ignore[dict-item]


def scaled_by(factor: float):
    """A function of one text whatever the factor, which its closure holds."""

    def scaled(f, x):
        return (x * factor,)

    return scaled


# --- keys --------------------------------------------------------------------------------------------------------------


def key_of(kernel=VECTOR, functions=None, fixed=None) -> str:
    return compiler.job(kernel, None, functions or FUNCTIONS, fixed).key


def test_a_key_depends_on_everything_an_object_does(monkeypatch: pytest.MonkeyPatch) -> None:
    base = key_of()
    assert base == key_of()
    keys = {
        base,
        key_of(dataclasses.replace(VECTOR, name="w")),
        key_of(dataclasses.replace(VECTOR, fn="other")),
        key_of(functions={"scaled": scaled_by(1.0)}),
        key_of(functions={"scaled": scaled_by(2.0)}),
        key_of(fixed={"n": 64}),
    }
    monkeypatch.setattr(compiler, "versions", lambda: {"nvidia-cutlass-dsl": "5"})
    keys.add(key_of())
    monkeypatch.setattr(compiler, "device_code", lambda: "changed")
    keys.add(key_of())
    assert len(keys) == 8
    assert key_of() == key_of(fixed={"unused": 3})  # an extent the kernel's tensors do not have


def test_another_architecture_is_refused() -> None:
    with pytest.raises(CodaError) as problem:
        compiler.job(VECTOR, None, FUNCTIONS, arch="sm_80")
    assert code(problem) == errors.ARCHITECTURE


def test_dims_of_device_tensors() -> None:
    free = spec.Tensor("t", "bf16", (("m",), ("head", "pair")))
    assert compiler.dims(VECTOR, free, {"head": 2, "pair": 8}) == ((None, 16), (None, 1), 8)
    assert compiler.dims(VECTOR, free, {"pair": 8}) == ((None, None), (None, 1), 8)
    assert compiler.dims(VECTOR, spec.Tensor("s", "f32", ()), {}) == ((1,), (1,), 1)
    assert compiler.dims(VECTOR, VECTOR.tensors[0], {}) == ((None, None), (None, 1), 1)  # [parts, length]
    assert compiler.dims(VECTOR, VECTOR.tensors[1], {}) == ((None,), (1,), 1)
    lse = dataclasses.replace(VECTOR, partials=(spec.Partial("p", "lse"),))
    assert compiler.dims(lse, VECTOR.tensors[0], {}) == ((2, None, None), (None, None, 1), 1)
    a = spec.Matrix("x", (0,), (1,))
    pairs = spec.Tensor("y", "bf16", (("m",), ("n",), ("lane",)), "out")
    store = spec.Store(spec.Matrix("y", (0,), (1,), pack=2))
    gemm = spec.Gemm("g", (pairs,), (spec.Product(a, (a,)),), (spec.Phase("scaled"),), sinks=(store,))
    assert compiler.dims(gemm, pairs, {"lane": 2}) == ((None, None, 2), (None, 2, 1), 8)


# --- the cache ---------------------------------------------------------------------------------------------------------


def writer(text: bytes, calls: list):
    def make(path: Path) -> None:
        calls.append(path)
        path.write_bytes(text)

    return make


def test_an_entry_is_made_once(folder: Path) -> None:
    calls: list = []
    first = cache.entry("k", writer(b"object", calls))
    assert first.read_bytes() == b"object" and first.parent == folder
    assert cache.entry("k", writer(b"other", calls)) == first and len(calls) == 1
    assert cache.find("k") == first and cache.find("l") is None


@pytest.mark.parametrize("damage", ["truncated", "changed", "checksum gone", "checksum garbage", "object gone"])
def test_a_corrupt_entry_is_a_miss(folder: Path, damage: str) -> None:
    path = cache.entry("k", writer(b"object", []))
    if damage == "truncated":
        path.write_bytes(b"obj")
    elif damage == "changed":
        path.write_bytes(b"abject")
    elif damage == "checksum gone":
        path.with_suffix(".sha256").unlink()
    elif damage == "checksum garbage":
        path.with_suffix(".sha256").write_bytes(b"\xff\xfe")
    else:
        path.unlink()
    assert cache.find("k") is None
    assert cache.entry("k", writer(b"again", [])).read_bytes() == b"again"
    assert cache.find("k") is not None


def test_a_failure_leaves_nothing(folder: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.entry("k", fail)
    assert cache.find("k") is None
    assert [p.name for p in folder.iterdir() if p.suffix != ".lock"] == []


def test_threads_make_an_entry_once(folder: Path) -> None:
    calls: list = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        assert cache.entry("k", writer(b"object", calls)).read_bytes() == b"object"

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_processes_make_an_entry_once(folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time, uuid; from pathlib import Path; from coda_lang.backend_cute import cache\n"
        f"note = Path({str(tmp_path / 'notes')!r}); note.mkdir(exist_ok=True)\n"
        "def make(path):\n    (note / uuid.uuid4().hex).touch(); time.sleep(0.3); path.write_bytes(b'object')\n"
        "assert cache.entry('k', make).read_bytes() == b'object'\n"
    )
    root = str(Path(__file__).resolve().parent.parent)
    env = {**os.environ, "PYTHONPATH": root}
    running = [subprocess.Popen([sys.executable, "-c", script], env=env) for _ in range(3)]
    assert [p.wait() for p in running] == [0, 0, 0]
    assert len(list((tmp_path / "notes").iterdir())) == 1


def test_a_useless_folder_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("CODA_CACHE_DIR", str(blocked))
    with pytest.raises(CodaError) as problem:
        cache.entry("k", writer(b"object", []))
    assert code(problem) == errors.CACHE and "CODA_CACHE_DIR" in str(problem.value)


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CODA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.directory() == Path("/somewhere/coda_lang")


# --- manifests ---------------------------------------------------------------------------------------------------------


def made(directory: Path) -> manifest.Manifest:
    (directory / "vector.so").write_bytes(b"object")
    record = compiler.job(VECTOR, None, FUNCTIONS).record
    entry = manifest.Entry("p", "vector", None, record, "vector.so", cache.checksum(directory / "vector.so"))
    written = manifest.Manifest("sm_90a", (entry,), None, {"nvidia-cutlass-dsl": "4.8.1"}, directory)
    manifest.write(written)
    return written


def test_a_manifest_reads_back(tmp_path: Path) -> None:
    written = made(tmp_path)
    read = manifest.read(tmp_path)
    assert read == written
    assert read.find(VECTOR, None, written.entries[0].record) == tmp_path / "vector.so"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("object changed", "damaged"), ("object gone", "lacks vector.so"), ("no manifest", "cannot be read"), ("garbage", "that is none"),
        ("format", "format 99"), ("not an object", "that is none"), ("stale", "stale"), ("unknown kernel", "no object for"),
        ("unknown config", "no object for vector with tiles 128x128_pp_c1x1"),
    ],
)  # fmt: skip
def test_a_damaged_build_is_refused(tmp_path: Path, damage: str, words: str) -> None:
    record = made(tmp_path).entries[0].record
    file, kernel, config = tmp_path / manifest.FILE, VECTOR, None
    if damage == "object changed":
        (tmp_path / "vector.so").write_bytes(b"abject")
    elif damage == "object gone":
        (tmp_path / "vector.so").unlink()
    elif damage == "no manifest":
        file.unlink()
    elif damage == "garbage":
        file.write_bytes(b"\xff{")
    elif damage == "not an object":
        file.write_text("[]")
    elif damage == "format":
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    elif damage == "stale":
        record = compiler.job(VECTOR, None, {"scaled": scaled_by(3.0)}).record
    elif damage == "unknown kernel":
        kernel = dataclasses.replace(VECTOR, name="matrix")
    elif damage == "unknown config":
        config = spec.Config()
    with pytest.raises(CodaError, match=words) as problem:
        manifest.read(tmp_path).find(kernel, config, record)
    assert code(problem) == errors.BUILD


# --- loading -----------------------------------------------------------------------------------------------------------


def test_the_runtime_library_is_found_where_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CODA_DSL_RUNTIME", raising=False)
    (tmp_path / compiler.RUNTIME).write_bytes(b"")
    assert compiler.runtime_library(tmp_path) == tmp_path / compiler.RUNTIME
    monkeypatch.setenv("CODA_DSL_RUNTIME", str(tmp_path / compiler.RUNTIME))
    assert compiler.runtime_library() == tmp_path / compiler.RUNTIME
    monkeypatch.setenv("CODA_DSL_RUNTIME", str(tmp_path / "nowhere.so"))
    with pytest.raises(CodaError) as problem:
        compiler.runtime_library(tmp_path)
    assert code(problem) == errors.TOOLS and "nowhere.so" in str(problem.value)


# --- compiling, for real -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compile_build_and_load_without_importing_cutlass(folder: Path, tmp_path: Path) -> None:
    """A program of two kernels: compiled once, found by a second process, built ahead of time, loaded and called with wrong arguments."""
    pytest.importorskip("cutlass")
    torch = pytest.importorskip("torch")
    program = spec.Program("p", (), (), (("n", None),), (VECTOR, dataclasses.replace(VECTOR, name="second", fn="other")))
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import test_compile as t; from coda_lang.backend_cute import compile as c, worker\n"
        "if sys.argv[3] == 'offline':\n    worker.Pool.run = lambda *_: sys.exit('compiled again')\n"
        "print(c.object_for(t.VECTOR, None, t.FUNCTIONS)); assert 'cutlass' not in sys.modules and 'torch' not in sys.modules\n"
    )
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-c", script, str(here.parent), str(here)]
    first = subprocess.run([*command, "compile"], capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    second = subprocess.run([*command, "offline"], capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert first.stdout == second.stdout and Path(first.stdout.strip()).is_file()

    Path(first.stdout.strip()).write_bytes(b"corrupt")
    build = compiler.build([program], FUNCTIONS, tmp_path / "build", module=Path(__file__))
    assert [e.kernel for e in build.entries] == ["vector", "second"] and (tmp_path / "build" / "test_compile.py").is_file()
    record = compiler.job(VECTOR, None, FUNCTIONS).record
    launch = compiler.load(manifest.read(tmp_path / "build").find(VECTOR, None, record))
    with pytest.raises(ValueError, match="device_type=cuda"):
        launch(torch.zeros(1, 64), torch.zeros(64, dtype=torch.bfloat16))


@pytest.mark.slow
def test_failures_in_a_worker_become_errors_here(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cutlass")

    def broken(f, x):
        return (f.no_such_function(x),)

    with pytest.raises(InternalError, match="no_such_function"):
        compiler.object_for(dataclasses.replace(VECTOR, fn="broken"), None, {"broken": broken})
    m, n, d = ("m",), ("n",), ("d",)
    gemm = spec.Gemm(
        "wide", (spec.Tensor("x", "bf16", (m, d)), spec.Tensor("w", "bf16", (n, d)), spec.Tensor("y", "f32", (m, n), "out")),
        (spec.Product(spec.Matrix("x", (0,), (1,)), (spec.Matrix("w", (0,), (1,)),)),), (spec.Phase("scaled"),),
        sinks=(spec.Store(spec.Matrix("y", (0,), (1,))),), rows=("m",), cols=("n",),
    )  # fmt: skip
    with pytest.raises(ValueError, match="shared memory"):
        compiler.object_for(gemm, spec.Config(256, 512, False), FUNCTIONS)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(CodaError) as problem:
        compiler.object_for(VECTOR, None, FUNCTIONS)
    assert code(problem) == errors.TOOLS and "C compiler" in str(problem.value)


class Local:
    """A worker that answers in this process."""

    def ask(self, question):
        questions, answers = io.BytesIO(pickle.dumps(question)), io.BytesIO()
        worker.serve(questions, answers)
        return pickle.loads(answers.getvalue())

    def stop(self) -> None:
        pass


def test_without_the_dsl_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_Worker", Local)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(CodaError) as problem:
        compiler.object_for(VECTOR, None, FUNCTIONS)
    assert code(problem) == errors.TOOLS and "nvidia-cutlass-dsl" in str(problem.value)


@pytest.fixture(autouse=True)
def own_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of one test serve no other."""
    monkeypatch.setattr(worker, "_SHARED", worker._Shared())


def test_a_worker_that_dies_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InternalError, match="ended with status 1"):
        compiler.object_for(VECTOR, None, FUNCTIONS)


def test_workers_serve_again_until_the_environment_changes(monkeypatch):
    """Importing the DSL takes seconds: the kernels of a backward go to the workers of the forward."""

    class Asked:
        made = 0

        def __init__(self):
            Asked.made += 1
            self.environment, self.process = dict(os.environ), SimpleNamespace(poll=lambda: None)

        fits = worker._Worker.fits

        def ask(self, question):
            return ("done",)

        def stop(self):
            pass

    monkeypatch.setattr(worker, "_Worker", Asked)
    for _ in range(2):
        with worker.shared(1) as pool:
            pool.run(None, Path())
    assert Asked.made == 1
    monkeypatch.setenv("CC", "another")
    with worker.shared(1) as pool:
        pool.run(None, Path())
    assert Asked.made == 2
    worker._SHARED.clock.cancel()
    worker._SHARED.idle()
    with worker.shared(1) as pool:
        pool.run(None, Path())
    assert Asked.made == 3, "an idle pool is empty"
    worker._SHARED.clock.cancel()
