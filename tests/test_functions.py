"""The scalar function libraries: `torch_fns` against float64 and torch, its reference helpers, and `device_fns` without a GPU.

What the device functions compute is measured on a GPU by bench/gpu_functions.py; here they are traced, compiled and their machine code is
read, and the polynomials they use are evaluated in emulated f32.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from coda_lang import ops  # noqa: E402
from coda_lang.backend_cute import spec, torch_fns  # noqa: E402

NAN, INF = math.nan, math.inf
WRITTEN, EXACT = torch_fns.Written(), torch_fns.Exact()
X = torch.cat([torch.linspace(-6, 6, 193), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 2.5, 3.5, -0.5])])


def t(*values: float, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


# The meaning of each function of one argument, in Python's own floating point.
MEANING = {
    "neg": lambda x: -x, "abs": abs, "floor": math.floor, "round": round, "square": lambda x: x * x, "reciprocal": lambda x: 1 / x,
    "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x), "exp": math.exp, "exp2": lambda x: 2.0**x, "log": math.log, "log1p": math.log1p,
    "erf": math.erf, "tanh": math.tanh, "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "softplus": lambda x: math.log1p(math.exp(-abs(x))) + max(x, 0),
    "sin": math.sin, "cos": math.cos, "relu": lambda x: max(x, 0.0), "relu2": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x / (1 + math.exp(-x)), "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANING)
def test_one_argument_means_what_it_says(name: str) -> None:
    x = X.double()
    if name in ("sqrt", "rsqrt", "log", "reciprocal"):
        x = x[x > 1e-20]
    if name == "log1p":
        x = x[x > -1]
    want = torch.tensor([float(MEANING[name](v)) for v in x.tolist()], dtype=torch.float64)
    got = getattr(EXACT, name)(x)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)
    in_f32 = getattr(WRITTEN, name)(x.float())
    assert in_f32.dtype == torch.float32
    torch.testing.assert_close(in_f32.double(), getattr(EXACT, name)(x.float()), rtol=4e-6, atol=1e-6)


def test_every_name_is_tested_here_or_below() -> None:
    below = set("add sub mul div pow fma minimum maximum clamp eq ne lt le gt ge logical_and logical_or logical_not where".split())
    below |= {"bf16", "f16", "f32", "i32", "i64"}
    assert set(torch_fns.NAMES) == set(MEANING) | below


def test_the_operator_table_emits_known_names_only() -> None:
    used = {n for op in ops.TABLE.values() if op.emit for n in re.findall(r"\bf\.(\w+)", op.emit.replace("{dtype}", "bf16"))}
    assert used <= set(torch_fns.NAMES)
    assert len(used) > 30


def test_two_arguments() -> None:
    a, b = t(1.0, -2.0, 7.0, 0.0), t(3.0, -2.0, 0.5, 0.0)
    pairs = list(zip(a.tolist(), b.tolist()))
    assert WRITTEN.add(a, b).tolist() == [x + y for x, y in pairs]
    assert WRITTEN.sub(a, 1).tolist() == [x - 1 for x, _ in pairs]
    assert WRITTEN.mul(2.0, b).tolist() == [2 * y for _, y in pairs]
    assert WRITTEN.minimum(a, b).tolist() == [min(p) for p in pairs]
    assert WRITTEN.maximum(a, 0.0).tolist() == [max(x, 0.0) for x, _ in pairs]
    assert WRITTEN.clamp(a, -1.0, b).tolist() == [min(max(x, -1.0), y) for x, y in pairs]
    assert WRITTEN.div(t(1, 2, dtype=torch.int32), t(2, 8, dtype=torch.int32)).tolist() == [0.5, 0.25]
    assert WRITTEN.pow(t(2.0, 4.0), t(10.0, -0.5)).tolist() == [1024.0, 0.5]
    for name, fn in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
        assert getattr(WRITTEN, name)(a, b).tolist() == [eval(f"x {fn} y", {"x": x, "y": y}) for x, y in pairs]


def test_fma_rounds_once() -> None:
    x = t(1.0 + 2.0**-12)
    assert WRITTEN.fma(x, x, t(-1.0 - 2.0**-11)).item() == 2.0**-24
    assert (x * x + t(-1.0 - 2.0**-11)).item() == 0.0


@pytest.mark.parametrize("f", [WRITTEN, EXACT], ids=["written", "exact"])
def test_nan_propagates(f) -> None:
    nan = t(NAN)
    for value in (f.minimum(nan, 1.0), f.minimum(1.0, nan), f.maximum(nan, 1.0), f.maximum(1.0, nan), f.clamp(nan, 0.0, 1.0)):
        assert value.isnan().all()
    for value in (f.clamp(t(0.5), nan, 1.0), f.clamp(t(0.5), 0.0, nan), f.relu(nan), f.relu2(nan), f.bf16(nan), f.f16(nan), f.silu(nan)):
        assert value.isnan().all()
    assert f.ne(nan, nan).item() and not f.eq(nan, nan).item() and not f.lt(nan, 0.0).item() and not f.ge(nan, 0.0).item()
    assert f.where(f.eq(nan, nan), nan, 2.0).item() == 2.0
    assert f.where(True, 1.0, nan).item() == 1.0


@pytest.mark.parametrize("f", [WRITTEN, EXACT], ids=["written", "exact"])
def test_infinity(f) -> None:
    inf, low = t(INF), t(-INF)
    assert f.relu(inf).item() == INF and f.relu(low).item() == 0.0
    assert f.clamp(low, -1.0, 1.0).item() == -1.0 and f.maximum(low, 3.0).item() == 3.0
    assert f.exp(low).item() == 0.0 and f.sigmoid(low).item() == 0.0 and f.softplus(inf).item() == INF and f.softplus(low).item() == 0.0
    assert f.silu(inf).item() == INF and f.gelu(inf).item() == INF and f.gelu_tanh(inf).item() == INF
    assert f.log(t(0.0)).item() == -INF and f.log(t(-1.0)).isnan().item() and f.rsqrt(t(0.0)).item() == INF


def test_literals_take_the_computing_dtype() -> None:
    assert EXACT.where(torch.tensor([True, False]), 0.1, 0.2).tolist() == [0.1, 0.2]
    assert EXACT.exp(1.0).item() == math.e
    assert WRITTEN.where(t(1, dtype=torch.bool), 0.1, 0.2).dtype == torch.float32
    assert WRITTEN.where(torch.tensor([True]), 1, torch.tensor([2], dtype=torch.int64)).dtype == torch.int64
    assert WRITTEN.add(torch.tensor([1], dtype=torch.int32), torch.tensor([2**40])).item() == 2**40 + 1
    assert WRITTEN.mul(torch.tensor([3], dtype=torch.int32), 0.5).item() == 1.5


def test_casts() -> None:
    x = torch.randn(1000) * 100
    assert torch.equal(WRITTEN.bf16(x), x.bfloat16().float())
    assert torch.equal(WRITTEN.f16(x * 1e4), (x * 1e4).half().float())
    assert WRITTEN.f16(t(1e6)).item() == INF
    for cast in (EXACT.bf16, EXACT.f16, EXACT.f32):
        assert torch.equal(cast(x.double()), x.double())
    assert WRITTEN.f32(t(1, 0, dtype=torch.bool)).tolist() == [1.0, 0.0]
    assert WRITTEN.f32(torch.tensor([2**24 + 1])).item() == 2.0**24
    least, most = -(2**31), 2**31 - 1
    assert WRITTEN.i32(t(1.9, -1.9, 3e9, -3e9, NAN, INF, -INF, -(2.0**31))).tolist() == [1, -1, most, least, 0, most, least, least]
    assert WRITTEN.i64(t(-2.5, 1e30, -1e30, NAN)).tolist() == [-2, 2**63 - 1, -(2**63), 0]
    assert WRITTEN.i32(torch.tensor([2**32 + 5])).item() == 5
    assert WRITTEN.i64(t(7, dtype=torch.int32)).dtype == torch.int64


def test_logic() -> None:
    p, q = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    assert torch.equal(WRITTEN.logical_and(p, q), p & q) and torch.equal(WRITTEN.logical_or(p, q), p | q)
    assert torch.equal(WRITTEN.logical_not(p), ~p)


def test_the_module_stands_for_written() -> None:
    assert torch.equal(torch_fns.silu(X), WRITTEN.silu(X))
    with pytest.raises(AttributeError):
        torch_fns.sillu  # noqa: B018


# --- reference helpers: tensors aligned to axes (m, n, k, lane) --------------------------------------------------------


def test_load_and_store_are_inverse() -> None:
    stored = torch.randn(5, 2, 3).bfloat16()  # dims are axes 2, 3, 0
    aligned = WRITTEN.load(stored, (2, 3, 0), 4)
    assert aligned.shape == (3, 1, 5, 2) and aligned.dtype == torch.float32
    back = WRITTEN.store(aligned, (2, 3, 0), (5, 2, 3), "bf16")
    assert torch.equal(back, stored) and back.is_contiguous()
    assert EXACT.store(aligned, (2, 3, 0), (5, 2, 3), "bf16").dtype == torch.float64
    assert WRITTEN.store(torch.ones(1, 1, 1, 1), (0, 1), (2, 7), "f32").shape == (2, 7)
    assert WRITTEN.store(torch.full((1, 1), 2.0), (), (), "f32").shape == ()


def test_contract() -> None:
    x, w = torch.randn(3, 1, 4, 1), torch.randn(1, 5, 4, 2)
    got = WRITTEN.contract(x, w, (2,))
    assert got.shape == (3, 5, 1, 2)
    torch.testing.assert_close(got[:, :, 0], torch.einsum("mk,nkl->mnl", x[:, 0, :, 0], w[0]))
    batch = EXACT.contract(torch.randn(3, 1, 4), torch.randn(3, 5, 4), (2,))
    assert batch.shape == (3, 5, 1) and batch.dtype == torch.float64
    assert torch.equal(WRITTEN.contract(torch.ones(3, 1, 0), torch.ones(1, 2, 0), (2,)), torch.zeros(3, 2, 1))


def test_reductions() -> None:
    x = torch.randn(3, 4, 5)
    torch.testing.assert_close(WRITTEN.sum(x, (0, 2)), x.sum((0, 2), keepdim=True))
    torch.testing.assert_close(WRITTEN.mean(x, (1,)), x.mean(1, keepdim=True))
    assert torch.equal(WRITTEN.max(x, (1, 2)), x.amax((1, 2), keepdim=True))
    assert torch.equal(WRITTEN.min(x, (0,)), x.amin(0, keepdim=True))
    assert torch.equal(WRITTEN.amax(x, (2,)), x.abs().amax(2, keepdim=True))
    torch.testing.assert_close(WRITTEN.logsumexp(x, (2,)), x.logsumexp(2, keepdim=True))
    assert WRITTEN.sum(torch.ones(2, 3, dtype=torch.int32), (1,)).dtype == torch.int32
    assert torch.equal(WRITTEN.sum(x, ()), x)
    spoilt = x.clone()
    spoilt[1, 2, 3] = NAN
    for reduce in (WRITTEN.max, WRITTEN.min, WRITTEN.amax, WRITTEN.logsumexp):
        assert reduce(spoilt, (1, 2))[:, 0, 0].isnan().tolist() == [False, True, False]
    assert WRITTEN.logsumexp(torch.full((2, 3), -INF), (1,)).tolist() == [[-INF], [-INF]]


def test_reductions_over_nothing() -> None:
    nothing = torch.ones(2, 0)
    want = {"sum": 0.0, "max": -INF, "min": INF, "amax": 0.0, "logsumexp": -INF}
    for name, value in want.items():
        assert getattr(WRITTEN, name)(nothing, (1,)).tolist() == [[value], [value]], name
    assert WRITTEN.mean(nothing, (1,)).isnan().all()


def test_gather_outside_the_axis_is_nan() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    i = torch.tensor([1, -100, 4], dtype=torch.int64).reshape(3, 1)
    got = WRITTEN.gather(x, i, 1)
    assert got[0, 0] == 1.0 and got[1:].isnan().all() and got.shape == (3, 1)
    assert WRITTEN.gather(torch.arange(4.0).reshape(1, 4), i, 1)[0, 0] == 1.0
    assert WRITTEN.gather(torch.ones(3, 0), i, 1).isnan().all()


def test_lanes() -> None:
    x = torch.randn(3, 1, 2)
    a, b = WRITTEN.lane(x, 2, 0), WRITTEN.lane(x, 2, 1)
    assert torch.equal(WRITTEN.pack(2, a, b), x)
    assert WRITTEN.pack(2, a, 1.0).shape == (3, 1, 2)
    heads = torch.randn(3, 7, 1, 1)  # axes m, head, q, kv
    q, kv = WRITTEN.run(heads, 1, 0, 4, 2), WRITTEN.run(heads, 1, 4, 3, 3)
    assert q.shape == (3, 1, 4, 1) and kv.shape == (3, 1, 1, 3)
    assert torch.equal(WRITTEN.join(1, (2, 3), q, kv), heads)
    assert WRITTEN.rename(q, 2, 3).shape == (3, 1, 1, 4)
    assert WRITTEN.expand(q, 1, 6).shape == (3, 6, 4, 1)
    assert WRITTEN.index(1, 5, 3).tolist() == [[[0], [1], [2], [3], [4]]]


# --- device functions --------------------------------------------------------------------------------------------------


def arguments(fn) -> list[str]:
    return [name for name in inspect.signature(fn).parameters if name != "self"]


def test_device_functions_are_twins() -> None:
    device_fns = pytest.importorskip("coda_lang.backend_cute.device_fns", exc_type=ImportError)
    for name in torch_fns.NAMES:
        assert arguments(getattr(device_fns, name)) == arguments(getattr(WRITTEN, name)), name


def f32(x):
    return x.to(torch.float32).to(torch.float64)


def fma(a, b, c):
    return f32(a * b + c)


def horner(x, coefficients):
    value = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        value = fma(value, x, c)
    return value


def test_sine_in_emulated_f32_is_within_its_bound() -> None:
    d = pytest.importorskip("coda_lang.backend_cute.device_fns", exc_type=ImportError)
    torch.manual_seed(0)
    for reach in (1e-3, 1.0, 4.0, 1e3, 1e6, 2.0**21):
        x = f32((torch.rand(200_000, dtype=torch.float64) * 2 - 1) * reach)
        rounded = fma(x, d._TURN_HI, d._MAGIC)
        r = fma(x, d._TURN_LO, fma(x, d._TURN_HI, -f32(rounded - d._MAGIC)))
        s = f32(r * r)
        sine, cosine = f32(r * horner(s, d._SIN)), horner(s, d._COS)
        for ahead, want, op in ((0, torch.sin(x), ops.TABLE["sin"]), (1, torch.cos(x), ops.TABLE["cos"])):
            quadrant = (rounded - d._MAGIC).long() + ahead
            got = torch.where(quadrant % 2 == 0, sine, cosine) * torch.where(quadrant % 4 >= 2, -1.0, 1.0)
            assert float((got - want).abs().max()) < op.absolute


def test_gelu_in_emulated_f32_is_within_its_bound() -> None:
    d = pytest.importorskip("coda_lang.backend_cute.device_fns", exc_type=ImportError)
    x = f32(torch.linspace(-14, 14, 1_000_001, dtype=torch.float64))
    tail = f32(torch.exp2(horner(x.abs(), d._LOG2_TAIL)))
    got = f32(x * torch.where(x < 0, tail, f32(1 - tail)))
    want = EXACT.gelu(x)
    ulp = torch.ldexp(torch.ones_like(want), torch.frexp(want)[1] - 24)
    error = ((got - want).abs() - ops.TABLE["gelu"].absolute).clamp(min=0) / ulp
    assert float(error.max()) < ops.TABLE["gelu"].ulp - 1  # the exponential's own error comes on top


ROW = spec.Index("row")


def map_kernel(name: str, outputs: tuple[str, ...]) -> spec.Finish:
    roles = {"x": "work", "y": "in", "z": "in", **dict.fromkeys(outputs, "out")}
    vectors = tuple(spec.Tensor(v, "f32", (("n",),), role) for v, role in roles.items())
    ports = (spec.Load("y", "y", (ROW,)), spec.Load("z", "z", (ROW,)))
    return spec.Finish(name, vectors, (spec.Partial("x", "only"),), name, outputs, ("n",), ports)


@pytest.mark.slow
def test_device_functions_compile_without_local_memory(tmp_path: Path, monkeypatch) -> None:
    """All of them, a few to a kernel and some alone, on values and on a literal: no spills, no calls, nothing contracted."""
    pytest.importorskip("cutlass")
    from coda_lang.backend_cute import compile as compiler
    from coda_lang.backend_cute import sass

    if sass.nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path / "cache"))
    conditions = {"logical_and": ["f.gt(x, 0.0)", "True"], "logical_or": ["f.gt(x, 0.0)", "f.lt(y, z)"], "logical_not": ["f.gt(x, 0.0)"]}

    def expression(name: str) -> str:
        given = conditions.get(name) or ["x", "y", "2.5"][: len(arguments(getattr(WRITTEN, name)))]
        given[0] = "f.gt(x, 0.0)" if name == "where" else given[0]
        return f"f.f32(f.{name}({', '.join(given)})) * z + z"

    alone = [(name,) for name in ("relu", "gelu", "silu", "sin")]
    rest = [name for name in torch_fns.NAMES if (name,) not in alone]
    groups = {"_".join(g): tuple(g) for g in [*alone, *(rest[i : i + 9] for i in range(0, len(rest), 9))]}
    source = tmp_path / "scalars.py"
    source.write_text("".join(f"def {n}(f, x, y, z):\n    return ({', '.join(map(expression, g))},)\n\n\n" for n, g in groups.items()))
    found = importlib.util.spec_from_file_location("scalars_of_test", source)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    jobs = [compiler.job(map_kernel(n, tuple(f"{o}_out" for o in g)), None, vars(module)) for n, g in groups.items()]
    texts = {n: sass.instructions(sass.disassemble(path)) for n, path in zip(groups, compiler.objects_for(jobs))}
    for name, code in texts.items():
        kinds = [i.split(".")[0] for i in code]
        assert not {"STL", "LDL", "CALL"} & set(kinds), name
        assert kinds.count("FMUL") >= len(groups[name]), f"{name}: a product was contracted into an FFMA"
    assert any(i.startswith("FMNMX") and "NAN" in i for i in texts["relu"])
    assert [texts[n].count("MUFU.EX2") for n in ("gelu", "silu", "sin")] == [1, 1, 0]
    assert "MUFU.SIN" not in texts["sin"] and "MUFU.TANH" not in str(texts)
