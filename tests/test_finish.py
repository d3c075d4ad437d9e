"""Finishing kernels without a GPU: every kind and dtype compiles, and the code is what it should be. Numbers: bench/gpu_functions.py."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass")
pytestmark = pytest.mark.slow

from coda_lang.backend_cute import compile as compiler  # noqa: E402
from coda_lang.backend_cute import sass, spec  # noqa: E402

KINDS = ("sum", "max", "min", "amax", "lse", "moments", "only")
DTYPES = ("f32", "bf16", "f16", "i32", "i64", "bool")
ROW = spec.Index("row")


def vector(name: str, dtype: str, role: str = "in") -> spec.Tensor:
    return spec.Tensor(name, dtype, (("n",),), role)


def every_dtype(f, p, i, extent, b, h, g, w, q, flag, one):
    """Reads a port of every dtype, returns a value for an output of every dtype."""
    total = p + f.f32(i) * f.f32(extent) + b + h + g + one
    condition = f.logical_or(flag, f.gt(total, 0.0))
    return (f.where(condition, total, f.f32(w)), total, total, w + i, q - w, condition)


def every_kind(f, a, b, c, d, e, h, g):
    return (a + b + c, d + e * g + h)


def all_dtypes(kind: str) -> spec.Finish:
    ports = (
        spec.Iota("i", spec.Index("row", div=(4,), mod=("k",))), spec.Extent("nk", ("n", "k", 2)),
        *(spec.Load(f"{d}_in", f"{d}_in", (ROW,)) for d in ("bf16", "f16", "f32", "i32", "i64", "bool")), spec.Load("one", "one", ()),
    )  # fmt: skip
    tensors = (
        vector("p", "f32", "work"), *(vector(f"{d}_in", d) for d in DTYPES), spec.Tensor("one", "f32", ()),
        *(vector(f"{d}_out", d, "out") for d in DTYPES),
    )  # fmt: skip
    outputs = tuple(f"{d}_out" for d in DTYPES)
    return spec.Finish(f"{kind}_of_all", tensors, (spec.Partial("p", kind),), "every_dtype", outputs, ("n",), ports, ("n", "k"))


def all_kinds() -> spec.Finish:
    """Seven partials in one kernel, one scalar out and a vector into a merged mode."""
    outs = (spec.Tensor("y", "f32", (), "out"), spec.Tensor("z", "bf16", (("a", "b"), ("c",)), "out"))
    tensors = (*(vector(kind, "f32", "work") for kind in KINDS), *outs)
    return spec.Finish("all_kinds", tensors, tuple(spec.Partial(k, k) for k in KINDS), "every_kind", ("y", "z"), ("a", "b", "c"))


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One object a kind, and the one with all; compiled side by side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        kernels = {**{kind: all_dtypes(kind) for kind in KINDS}, "all": all_kinds()}
        functions = {"every_dtype": every_dtype, "every_kind": every_kind}
        jobs = [compiler.job(kernel, None, functions, {"c": 8}) for kernel in kernels.values()]
        return dict(zip(kernels, compiler.objects_for(jobs)))


@pytest.fixture(scope="module")
def code(objects: dict[str, Path]) -> dict[str, list[str]]:
    if sass.nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    return {name: sass.instructions(sass.disassemble(path)) for name, path in objects.items()}


@pytest.mark.parametrize("kind", [*KINDS, "all"])
def test_every_kind_with_every_dtype_compiles_without_spills_or_atomics(kind: str, code: dict[str, list[str]]) -> None:
    kinds = {i.split(".")[0] for i in code[kind]}
    assert not {"STL", "LDL", "ATOM", "ATOMG", "ATOMS", "RED"} & kinds
    assert {"LDG", "STG"} <= kinds


@pytest.mark.parametrize("kind", ["max", "min", "amax", "lse"])
def test_nan_propagates_through_extremes(kind: str, code: dict[str, list[str]]) -> None:
    extremes = [i for i in code[kind] if i.startswith("FMNMX")]
    assert extremes and all("NAN" in i for i in extremes)


def test_outputs_are_stored_in_their_own_width(code: dict[str, list[str]]) -> None:
    stores = [i for i in code["sum"] if i.startswith("STG")]
    assert len(stores) == len(DTYPES)
    assert sum(".64" in i for i in stores) == 1 and sum(".U16" in i for i in stores) == 2 and sum(".U8" in i for i in stores) == 1


def test_what_is_read_as_it_is_needs_no_barrier(code: dict[str, list[str]]) -> None:
    assert not any(i.startswith("BAR") for i in code["only"])
    assert sum(i.startswith("BAR") for i in code["sum"]) >= 2


def test_loads_of_a_batch_are_in_flight_together(code: dict[str, list[str]]) -> None:
    """Four loads before the first addition that uses one."""
    loop = [i for i in code["sum"] if i.startswith(("LDG", "FADD"))]
    first = next(n for n, i in enumerate(loop) if i.startswith("LDG"))
    assert [i.split(".")[0] for i in loop[first : first + 4]] == ["LDG"] * 4


def test_arguments_are_checked_before_a_launch(objects: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch")
    launch = compiler.load(objects["all"])
    with pytest.raises(ValueError, match="Mismatched"):
        wide = [torch.zeros(planes, 3, 16) for planes in (2, 4)]
        launch(*[torch.zeros(3, 16)] * 4, *wide, torch.zeros(1, 16), torch.zeros(1), torch.zeros(2, 8))
