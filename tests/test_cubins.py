"""Every kernel becomes the machine code it should: tensor cores, bulk copies, no spills, shared memory within the limit. No GPU needed.

Slow: the default configuration of every spec and every hand-written record, and a fixed sample of others. Nightly: every spec × every
configuration offered.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")  # the functions of hand-written programs stand beside torch references
pytest.importorskip("cutlass")

import gemm_cases

from coda_lang import driver
from coda_lang.backend_cute import compile as compiler
from coda_lang.backend_cute import configs, load, row_configs, sass, schedules, spec

SAMPLE = (
    "128x128_pp_c1x1", "256x128_coop_c2x1", "128x192_pp_c1x2", "128x208_pp_c2x1", "192x128_pp_c1x1", "256x192_coop_c1x2", "64x256_pp_c1x1",
)  # fmt: skip
SAMPLED = ("linear", "swiglu_halves", "residual", "reductions")
FOLDER = Path(__file__).resolve().parent.parent / "specs"
SPECS = sorted(FOLDER.glob("*.coda"))
WHOLE = sorted(FOLDER.glob("*/*.coda"))  # models' layers, dozens of kernels each


def name_of(path: Path) -> str:
    """`swiglu`, `llama_layer`."""
    return path.stem if path.parent == FOLDER else f"{path.parent.name}_{path.stem}"


@pytest.fixture(scope="module", autouse=True)
def disassembler():
    if sass.nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")


def inspect(launch: spec.Launch, path: Path) -> None:
    """Assert what holds of every kernel."""
    text = sass.disassemble(path)
    names = sass.instructions(text)
    heads = [name.split(".")[0] for name in names]
    if row_configs.of_rows(launch):
        assert heads.count("STL") + heads.count("LDL") == 0 and not re.search(r"\bCALL\b", text)
        assert heads.count("UTMALDG") + heads.count("HGMMA") == 0 and "LDG.E.128" in text and "STG.E.128" in text
        return
    gemms = spec.gemms(launch)
    products = [p for gemm in gemms for p in gemm.products]
    tiles = [p for gemm in gemms for p in gemm.ports if isinstance(p, spec.Tile)]
    assert (heads.count("HGMMA") > 0) == bool(products), "no tensor cores, or tensor cores in a map kernel"
    assert (heads.count("UTMALDG") > 0) == bool(products or tiles), "no bulk loads"
    assert heads.count("USETMAXREG") == 2, "registers are not handed from the loading to the multiplying warps"
    assert heads.count("STL") + heads.count("LDL") == 0, f"{heads.count('STL') + heads.count('LDL')} spills"
    stores = [s for gemm in gemms for s in gemm.sinks if isinstance(s, spec.Store)]
    assert (heads.count("UTMASTG") > 0) == bool(stores), "a tile store is no bulk store"
    waits = [name for name in names if name.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) == (len(products) + len(gemms) if products else 0), "the compiler serialises the multiplications"
    assert not re.search(r"\bCALL\b", text), "a library call"




def emitted(source: Path, folder: Path) -> list[SimpleNamespace]:
    path = folder / f"{source.stem}.py"
    path.write_text(driver.emit(str(source)), encoding="utf-8")
    found = []
    for fn in load.functions_of(load.import_file(path)):
        fixed = {name: size for name, size in fn.program.extents if size is not None}
        found += [SimpleNamespace(gemm=launch, functions=fn.functions, fixed=fixed) for launch in spec.launches(fn.program)]
    return found


def check(cases, choose) -> None:
    """Compile every case with the configurations chosen for it, all at once, and inspect what comes out."""
    picked = [(case, config) for case in cases for config in choose(case.gemm)]
    jobs = [compiler.job(case.gemm, config, case.functions, case.fixed) for case, config in picked]
    problems = []
    for (case, config), path in zip(picked, compiler.objects_for(jobs)):
        try:
            inspect(case.gemm, path)
        except AssertionError as problem:
            problems.append(f"{case.gemm.name} {config.key}: {str(problem).splitlines()[0]}")
    assert not problems, "\n".join(problems)


def defaults(gemm: spec.Gemm) -> list[spec.Config]:
    """What is taken at a large and a small shape."""
    return list(dict.fromkeys(configs.default(gemm, *size) for size in ((4096, 4096, 4096), (7, 128, 128))))


@pytest.mark.slow
@pytest.mark.parametrize("name", gemm_cases.ALL)
def test_default_configurations(name):
    check([gemm_cases.ALL[name]], defaults)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_of_configurations(name):
    gemm = gemm_cases.ALL[name].gemm
    chosen = [c for c in configs.offered(gemm) if c.key in SAMPLE]
    assert len(chosen) >= 3
    check([gemm_cases.ALL[name]], lambda _: chosen)


TOGETHER = (("linear", "residual", "rope"), ("two_tiles", "reductions"), ("major_mk", "linear"))


def together(names: tuple[str, ...]) -> SimpleNamespace:
    """Hand-written Gemms in one launch."""
    cases = [gemm_cases.ALL[name] for name in names]
    functions = {name: fn for case in cases for name, fn in case.functions.items()}
    fixed = {axis: n for case in cases for axis, n in case.fixed.items()}
    return SimpleNamespace(gemm=spec.joined(tuple(case.gemm for case in cases)), functions=functions, fixed=fixed)


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_gemms_together_are_the_sum_of_what_they_are_alone(names):
    """One loop each, nothing between them: no spills, and no more code than the kernels apart."""
    case = together(names)
    config = configs.default(case.gemm, 4096, 4096, 4096)
    check([case], lambda _: [config])
    alone = [compiler.job(g, config, case.functions, case.fixed) for g in case.gemm.gemms]
    paths = compiler.objects_for([compiler.job(case.gemm, config, case.functions, case.fixed), *alone])
    both, *each = (len(sass.instructions(sass.disassemble(path))) for path in paths)
    assert both <= 1.1 * sum(each)  # the scheduler of each, and where each begins


@pytest.mark.nightly
@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_gemms_together_with_every_configuration(names):
    check([together(names)], configs.offered)


SPLIT = (("linear", 4), ("reductions", 2), ("swiglu_halves", 3), ("odd_windows", 2), ("major_kn", 3))


def in_parts(name: str, count: int) -> list[SimpleNamespace]:
    """A hand-written Gemm with K in so many parts: their launch, and what adds them."""
    case = gemm_cases.ALL[name]
    made = schedules.split(case.gemm, count)
    assert made is not None
    functions = {**case.functions, **(schedules.functions(made, case.functions) or {})}
    return [SimpleNamespace(gemm=kernel, functions=functions, fixed=case.fixed) for kernel in made.kernels]


@pytest.mark.slow
@pytest.mark.parametrize("name, count", SPLIT)
def test_parts_and_what_adds_them(name, count):
    """With what is taken at few rows."""
    check(in_parts(name, count), lambda gemm: [configs.default(gemm, 64, 2048, 8192 // count)])


@pytest.mark.nightly
@pytest.mark.parametrize("name", gemm_cases.ALL)
def test_parts_of_every_gemm(name):
    gemm = gemm_cases.ALL[name].gemm
    counts = [count for count in (1, 2, 3, 4) if schedules.split(gemm, count)]
    cases = [case for count in counts for case in in_parts(name, count)]
    check(cases, lambda gemm: list(dict.fromkeys(configs.default(gemm, m, 2048, 2048) for m in (16, 64, 256))))


@pytest.mark.slow
@pytest.mark.parametrize("source", [*SPECS, *(pytest.param(p, marks=pytest.mark.nightly) for p in WHOLE)], ids=name_of)
def test_specs_with_default_configurations(source, tmp_path):
    check(emitted(source, tmp_path), defaults)


@pytest.mark.nightly
@pytest.mark.parametrize("source", [*SPECS, *WHOLE], ids=name_of)
def test_specs_with_every_configuration(source, tmp_path):
    check(emitted(source, tmp_path), configs.offered)


def test_a_wrong_arrival_count_is_found_while_tracing():
    from coda_lang.backend_cute.gemm_sm90.ring import Ring

    class Miscounted(Ring):
        @property
        def empty_arrivals(self) -> int:
            return self.consumer_warps * self.cluster[0] * self.cluster[1]  # as if every block loaded into every other

    with pytest.raises(AssertionError, match="arrivals"):
        Miscounted(0, 4, 1024, 8, (2, 2))
    for cluster, arrivals in (((1, 1), 8), ((2, 1), 16), ((1, 2), 16), ((2, 2), 24)):
        assert Ring(0, 4, 1024, 8, cluster).empty_arrivals == arrivals
    with pytest.raises(AssertionError, match="bytes"):
        Ring(0, 4, 1 << 20, 8)


def test_segments_must_agree_in_their_major_order():
    from coda_lang.backend_cute.gemm_sm90 import GemmSm90

    case = gemm_cases.ALL["geglu"]
    product = case.gemm.products[0]
    across = spec.Product(product.a, (product.b[0], spec.Matrix("wu", (1,), (0,))))
    gemm = spec.Gemm(case.gemm.name, case.gemm.tensors, (across,), case.gemm.phases, case.gemm.ports, case.gemm.sinks)
    with pytest.raises(ValueError, match="major order"):
        GemmSm90(gemm, spec.Config(), case.functions)


def test_columns_are_a_power_of_two_that_divides_a_tile():
    for name, case in gemm_cases.ALL.items():
        for config in () if row_configs.of_rows(case.gemm) else configs.offered(case.gemm):
            step = configs.step_columns(case.gemm, config)
            assert step in (8, 16, 32) and configs.columns_per_segment(case.gemm, config) % step == 0, (name, config.key)
            assert math.log2(step) % 1 == 0
