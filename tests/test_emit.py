"""The emitted text: it computes what the program means (reference and kernels' twin, exact and rounded), and reads like a person's."""

from __future__ import annotations

import importlib.util
import itertools
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gallery import PROGRAMS  # noqa: E402
from strategies import tensors  # noqa: E402

from coda_lang import driver, passes  # noqa: E402
from coda_lang.backend_cute.emit import emit  # noqa: E402
from coda_lang.backend_cute.standalone import inline  # noqa: E402
from coda_lang.ir.graph import Program  # noqa: E402
from coda_lang.ir.interp import run  # noqa: E402
from coda_lang.source import Source  # noqa: E402

SPECS = sorted((Path(__file__).resolve().parent.parent / "specs").glob("*.coda"))
SOURCES = PROGRAMS | {f.name: f.read_text(encoding="utf-8") for f in SPECS}


def module(text: str, folder: Path):
    """The emitted module, imported from a file of its own: Python takes one that changes within a second for what it was."""
    path = folder / f"kernel{len(list(folder.iterdir()))}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def extents(program: Program, sizes: tuple[int, ...]) -> dict[str, int]:
    """An extent for each axis; those that a rename makes one are equal."""
    free = itertools.cycle(sizes)
    found = {a.name: a.extent or next(free) for a in program.axes}
    for e in program.eqns * 2:
        if e.op == "rename":
            found[e.attr("to")] = found[e.attr("axis")]
    return found


def errors(program: Program, fn, sizes: tuple[int, ...], seed: int = 0) -> dict[tuple[str, str, bool], float]:
    """For each output, way and precision: the error relative to the output's size, infinite where NaN or shapes differ."""
    given = tensors(program, extents(program, sizes), seed)
    found = {}
    for exact in (True, False):
        want = run(program, given, torch, "exact" if exact else "written")
        for way in (fn.reference, fn.reference_planned):
            got = way(*given.values(), exact=exact)
            for o, value in zip(program.outputs, got if isinstance(got, tuple) else (got,), strict=True):
                truth = want[o.tensor.name]
                assert value.shape == truth.shape and value.dtype == truth.dtype
                value, truth = value.double(), truth.double()
                same = torch.equal(value.isnan(), truth.isnan()) and torch.equal(value.isinf(), truth.isinf())
                off = torch.nan_to_num(value - truth, posinf=0.0, neginf=0.0).abs().max().item() if value.numel() else 0.0
                size = torch.nan_to_num(truth, posinf=0.0, neginf=0.0).abs().max().item() if value.numel() else 1.0
                found[o.tensor.name, way.__name__, exact] = off / (size + 1e-6) if same else float("inf")
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_the_emitted_module_computes_what_the_program_means(name, tmp_path):
    for program in driver.programs(Source(name, SOURCES[name])):
        fn = getattr(module(emit([passes.run(program)]), tmp_path), program.name)
        for (output, way, exact), error in errors(program, fn, (5, 7, 24, 3)).items():
            assert error <= (1e-12 if exact else 2**-7), f"{output} by {way}, exact={exact}: off by {error}"


def test_a_planted_error_is_seen(tmp_path):
    (program,) = driver.programs(Source("swiglu.coda", SOURCES["swiglu.coda"]))
    text = emit([passes.run(program)])
    planted = (("f.silu(gate) * up", "f.silu(up) * gate"), ("at=((1, 0),)", "at=((1, 1),)"), ("y = f.silu", "y = f.silu"))
    for right, wrong in planted:
        broken = module(text.replace(right, wrong, 1), tmp_path).swiglu
        worst = max(e for (_, way, exact), e in errors(program, broken, (5, 7, 24)).items() if way == "reference_planned" and exact)
        assert (worst > 1e-3) == (right != wrong)


def test_nothing_to_do_and_nothing_to_contract(tmp_path):
    (program,) = driver.programs(Source("p.coda", PROGRAMS["row_means"]))
    fn = module(emit([passes.run(program)]), tmp_path).p
    for sizes in ((0, 5, 7), (5, 0, 7), (1, 1, 1)):
        assert max(errors(program, fn, sizes).values()) <= 2**-7


# --- text --------------------------------------------------------------------------------------------------------------


def function_of(text: str, name: str) -> str:
    """One function of the module."""
    return "def " + name + text.split(f"def {name}", 1)[1].split("\n\n\n", 1)[0] + "\n"


def test_a_scalar_function_reads_as_a_person_would_write_it():
    text = driver.emit(Source("specs/swiglu.coda", SOURCES["swiglu.coda"]))
    first = SOURCES["swiglu.coda"].split("\n").index("z = x @ w") + 1
    assert function_of(text, "swiglu_phase0") == f'''\
def swiglu_phase0(f, acc_gate, acc_up):
    """One element of y, z."""
    gate = f.bf16(acc_gate)  # src: specs/swiglu.coda:{first}
    up = f.bf16(acc_up)  # src: specs/swiglu.coda:{first}
    y = f.silu(gate) * up  # src: specs/swiglu.coda:{first + 2}
    return y, gate, up
'''


def test_the_reference_is_the_program_as_written():
    text = driver.emit(Source("p.coda", "program p(x: bf16[m, k], w: bf16[n, k], b: f32[n]) -> (y: bf16[m, n])\ny = gelu(x @ w + b)\n"))
    assert function_of(text, "p_reference") == '''\
def p_reference(f, x, w, b):
    """p as written; each value has one dim for each of the axes m, k, n."""
    M, K, N = 0, 1, 2
    size = (x.shape[0], x.shape[1], w.shape[0])
    x = f.load(x, (M, K), 3)
    w = f.load(w, (N, K), 3)
    b = f.load(b, (N,), 3)
    y = f.bf16(f.gelu(f.contract(x, w, (K,)) + b))  # src: p.coda:2
    return (f.store(y, (M, N), (size[M], size[N]), "bf16"),)
'''


@pytest.mark.slow
def test_text_is_the_same_every_time():
    for name, text in SOURCES.items():
        assert driver.emit(Source(name, text)) == driver.emit(Source(name, text))


@pytest.mark.slow
def test_emitted_text_is_what_ruff_would_write(tmp_path):
    ruff = Path(sys.executable).parent / "ruff"
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    for name, text in SOURCES.items():
        (tmp_path / f"{name.removesuffix('.coda')}.py").write_text(driver.emit(Source(name, text)), encoding="utf-8")
    for command in (["format", "--diff"], ["check", "--select", "E,F,I,W", "--ignore", "E741"]):
        done = subprocess.run([ruff, *command, "--line-length", "140", "--isolated", str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("names", [("lambda_", "function", "s"), ("f", "x", "M"), ("s", "K", "size")])
def test_awkward_names(names, tmp_path):
    program, weight, result = names
    text = f"program {program}(f: bf16[m, k], {weight}: bf16[n, k], inf_: f32[n]) -> ({result}: f32[m, n])\n"
    text += f"{result} = f @ {weight} + inf_\n"
    (made,) = driver.programs(Source("p.coda", text))
    fn = getattr(module(driver.emit(Source("p.coda", text)), tmp_path), program)
    assert max(errors(made, fn, (3, 4, 5)).values()) <= 1e-5


# --- standalone --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_standalone_module_runs_without_this_package(tmp_path):
    text = driver.emit(Source("swiglu.coda", SOURCES["swiglu.coda"]), standalone=True)
    assert inline(driver.emit(Source("swiglu.coda", SOURCES["swiglu.coda"]))) == text
    (tmp_path / "kernel.py").write_text(text, encoding="utf-8")
    check = (
        "import sys; sys.modules['coda_lang'] = None\n"
        "import torch, kernel\n"
        "x, w = torch.randn(3, 8).bfloat16(), torch.randn(5, 2, 8).bfloat16()\n"
        "y, z = kernel.swiglu(x, w)\n"
        "assert y.shape == (3, 5) and z.shape == (3, 5, 2) and kernel.swiglu.last_path == 'reference'\n"
        "assert torch.allclose(y, kernel.swiglu.reference_planned(x, w).y, rtol=0.02, atol=0.02)\n"
        "assert not any(m.startswith('coda_lang.') for m in sys.modules) and 'cutlass' not in sys.modules\n"
    )
    environment = {"PATH": "", "CODA_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    for _ in range(2):  # unpacked, then found; and mended if damaged
        done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (unpacked,) = (tmp_path / "cache" / "runtime").glob("*/backend_cute/spec.py")
        unpacked.write_text("raise RuntimeError\n")


# --- storage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_the_order_of_storage_never_changes_the_meaning(seed, tmp_path):
    """Every tensor of a program stored in some other order: the same values, and a plan (perhaps with copies), never a refusal."""
    draw = random.Random(seed)
    (program,) = driver.programs(Source("p.coda", PROGRAMS[draw.choice(sorted(PROGRAMS))]))

    def shuffled(tensor):
        return replace(tensor, axes=tuple(draw.sample(tensor.axes, len(tensor.axes))))

    outputs = tuple(replace(o, tensor=shuffled(o.tensor)) for o in program.outputs)
    other = replace(program, inputs=tuple(map(shuffled, program.inputs)), outputs=outputs)
    fn = getattr(module(emit([passes.run(other)]), tmp_path), program.name)
    for (output, way, exact), error in errors(other, fn, (5, 7, 24, 3), seed).items():
        assert error <= (1e-12 if exact else 2**-7), f"{output} by {way}, exact={exact}: off by {error}"
