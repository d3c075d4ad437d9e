"""Adapters do the work that they say they do. Libraries that need a GPU are stood for by torch, with their own signatures and layouts."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from bench import gpu_rivals, protocol, rivals, works  # noqa: E402
from tests.clocks import AnyClock  # noqa: E402

SIZES = {"m": 24, "n": 40, "k": 32, "d": 32, "f": 16, "v": 72}


# --- stand-ins, each as its library documents it: gate and up in adjacent columns, B as (k, n) ------------------------------------


def gated(z):
    pair = z.float().unflatten(1, (-1, 2))
    return (F.silu(pair[..., 0]) * pair[..., 1]).bfloat16()


def quack_act(a, b, rstd=None, activation=None, store_preact=False):
    assert activation == "swiglu" and store_preact
    z = a @ b if rstd is None else (a @ b) * rstd[:, None].bfloat16()
    return z, gated(z)


def quack_rms(a, b, C=None, norm_weight=None, premult_out=None, eps=1e-6):
    h = a @ b + C
    premult_out.copy_(h)
    return h * norm_weight, torch.rsqrt(h.float().square().mean(-1) + eps)


def backward_of_pairs(dx, w, z):
    dz, y, rows = works.swiglu_backward(dx, w, works.halves(z))
    return works.pairs(dz).flatten(1), rows, y


def quack_dgated(dx, w, z, dz, y, activation=None, colvec_reduce=False):
    a, _, b = backward_of_pairs(dx, w, z)
    dz.copy_(a), y.copy_(b)
    return (y.float() * (dx @ w).float()).sum(-1)


def quack_lse(a, b, rstd):
    z, lse = works.rmsnorm_lse(a, b.mT, rstd)
    return {"D": z, "lse": lse}


def swiglu_of_pairs(x, w):
    return works.linear_swiglu(x, works.row_halves(w))


def liger_loss(x, w, target):
    return works.linear_cross_entropy(x, w, target), None


def kernels_loss(x, w, target):
    assert target.dtype == torch.int32
    return works.linear_cross_entropy(x, w, target.long())


def kernels_residual(a, b, c, w, eps):
    h, post, rstd = works.residual_rms(a, b.mT, c, w)
    return h, post, rstd


STANDINS = {
    "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": SimpleNamespace(apply=lambda x, g, eps, *rest: F.rms_norm(x, g.shape, g, eps))},
    "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": SimpleNamespace(apply=lambda a, b: F.silu(a) * b)},
    "liger_kernel.ops.fused_linear_cross_entropy": {"LigerFusedLinearCrossEntropyFunction": SimpleNamespace(apply=liger_loss)},
    "quack.gemm_interface": {
        "gemm": torch.mm, "gemm_act": quack_act, "gemm_norm_act": quack_act, "gemm_rms": quack_rms, "gemm_dgated_out": quack_dgated,
    },
    "quack.linear_cross_entropy": {
        "chunked_linear_cross_entropy": lambda x, w, t, reduction: F.cross_entropy((x @ w.mT).float(), t, reduction=reduction)
    },
    "quack.rmsnorm": {"rmsnorm": lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps)},
    "quack.epilogue.library": {"rstd_lse_epi": quack_lse},
    "coda.core.gemm.functional": {
        "gemm": torch.mm, "gemm_swiglu": lambda a, b: (a @ b, gated(a @ b)), "gemm_residual_partial_rmsnorm": kernels_residual,
        "gemm_rmsnorm_swiglu": lambda a, b, rstd: quack_act(a, b, rstd, "swiglu", True),
        "gemm_swiglu_bwd_zdz": lambda a, b, z: backward_of_pairs(a, b.mT, z),
        "gemm_rmsnorm_lse": lambda a, b, rstd: works.rmsnorm_lse(a, b.mT, rstd),
    },
    "coda.kernels.functional.swiglu": {"linear_swiglu": swiglu_of_pairs},
    "coda.kernels.functional.cross_entropy": {"linear_cross_entropy": kernels_loss},
}  # fmt: skip


@pytest.fixture
def libraries(monkeypatch):
    """Modules by name; a test may change them."""
    made = {}
    for name, content in STANDINS.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(content)
        parts = name.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
        monkeypatch.setitem(sys.modules, name, made[name])
    return made


def all_peers(only=()):
    return rivals.peers(a for a in rivals.ADAPTERS.values() if not only or a.name in only)


@pytest.mark.parametrize("name", list(works.WORKS))
def test_every_method_gives_the_works_outputs(libraries, name):
    peers = all_peers()
    assert not peers.missing
    clock = AnyClock({})
    found = gpu_rivals.measured(peers, name, SIZES, clock, "cpu")
    who = [a.name for a in rivals.ADAPTERS.values() if name in a.builds]
    assert found["ok"] and "raised" not in found and sorted(found["ms"]) == sorted(who), found
    assert set(found["distance"]) == set(who) - {"gemm"} and max(found["distance"].values()) < 1e-2, found["distance"]
    assert set(found.get("without", {})) <= ({"quack"} if name == "swiglu_backward" else set())


@pytest.mark.parametrize(
    "module, what, broken",
    [
        ("quack.gemm_interface", "gemm_norm_act", lambda a, b, **more: quack_act(a, works.halves(b).contiguous(), **more)),
        ("coda.core.gemm.functional", "gemm_rmsnorm_swiglu", lambda a, b, rstd: quack_act(a, b, None, "swiglu", True)),
        ("coda.core.gemm.functional", "gemm_rmsnorm_swiglu", lambda a, b, rstd: (a @ b, gated(a @ b)[:, :-1])),
    ],
    ids=["columns in another order", "no norm", "another shape"],
)
def test_a_library_that_computes_something_else_is_not_timed(libraries, module, what, broken):
    setattr(libraries[module], what, broken)
    found = gpu_rivals.measured(all_peers(), "rmsnorm_swiglu", SIZES, AnyClock({}), "cpu")
    name = "quack" if module.startswith("quack") else "coda_kernels"
    assert not found["ok"] and found["wrong"] == [name] and name not in found["ms"] and "coda" in found["ms"]


def test_a_training_step_with_a_wrong_gradient_is_not_timed(libraries):
    def wrong(x, w):
        return swiglu_of_pairs(x, w.detach()) + 0 * w.sum()

    libraries["coda.kernels.functional.swiglu"].linear_swiglu = wrong
    found = gpu_rivals.measured(all_peers(), "linear_swiglu", SIZES, AnyClock({}), "cpu")
    assert found["wrong"] == ["coda_kernels"] and "coda_kernels" not in found["ms"]


def test_what_does_not_import_is_told_with_the_reason(monkeypatch):
    for name in ("liger_kernel", "quack", "coda"):
        monkeypatch.setitem(sys.modules, name, None)
    missing = all_peers().missing
    assert set(missing) == {"liger", "quack", "coda_kernels"}
    real = importlib.import_module

    def refuse(name):
        if name.startswith("quack"):
            raise TypeError("no key for this object")
        if name.startswith("coda.core"):
            raise ModuleNotFoundError("No module named 'fla'", name="fla")
        return real(name)

    monkeypatch.setattr(rivals.importlib, "import_module", refuse)
    missing = all_peers().missing
    assert missing["quack"] == "quack-kernels does not import: TypeError: no key for this object"
    assert missing["coda_kernels"] == "coda-kernels does not import: No module named 'fla'"
    monkeypatch.setattr(rivals.importlib, "import_module", lambda name: exec("raise ModuleNotFoundError('', name=n)", {"n": name}))
    assert all_peers().missing["liger"] == "liger-kernel is not installed"


def test_quack_works_without_its_library_of_epilogues(libraries, monkeypatch):
    real = importlib.import_module

    def refuse(name):
        if name == "quack.epilogue.library":
            raise RuntimeError("fingerprint")
        return real(name)

    monkeypatch.setattr(rivals.importlib, "import_module", refuse)
    peers = all_peers(("coda", "quack"))
    assert not peers.missing
    assert "quack" in gpu_rivals.measured(peers, "gemm", SIZES, AnyClock({}), "cpu")["ms"]
    found = gpu_rivals.measured(peers, "rmsnorm_lse", SIZES, AnyClock({}), "cpu")
    assert "fingerprint" in found["raised"]["quack"] and found["ok"] and [*found["ms"]] == ["coda"]


def test_products_are_those_of_the_work(monkeypatch):
    real, seen = torch.mm, []
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append((*a.shape, b.shape[1])) or real(a, b))
    for work in (w for w in works.WORKS.values() if w.product):
        seen.clear()
        case = works.Case(work, SIZES, "cpu")
        case.products()()
        m, n, k = (case.extent(s) for s in work.product)
        assert seen[0] == (m, k, n) and len(seen) == (3 if work.training else 1)
        assert all(a * b * c == m * n * k for a, b, c in seen)


def test_the_shapes_that_were_asked_for_are_there():
    found = [*works.cases()]
    assert len(found) == len({json.dumps(c) for c in found})
    gemms = [s for name, _, s in found if name == "gemm"]
    assert {n for s in gemms if len(set(s.values())) == 1 for n in s.values()} == {2048, 4096, 8192}
    assert {s["m"] for s in gemms} >= {8192, 16384} and {s["n"] for s in gemms} >= {32768, 128256}
    for name in works.WORKS:
        places = [of for n, of, _ in found if n == name]
        assert {"cube", "ragged"} <= set(places) and {p.split()[0] for p in places} >= {"1B", "8B", "70B"}
    assert [c for c in works.cases(["swiglu"], ["8B"], [8192])][0][2] == {"m": 8192, "d": 4096, "f": 14336}


def test_our_kernels_are_compiled_before_a_case(monkeypatch):
    from coda_lang.backend_cute import compile

    asked = []
    monkeypatch.setattr(compile, "objects_for", lambda jobs, workers=None: asked.extend(jobs))
    gpu_rivals.objects([(name, "cube", SIZES) for name in works.WORKS])
    names = {j.kernel.name for j in asked}
    assert {"gemm", "swiglu", "rmsnorm_swiglu", "residual_rms", "rmsnorm_lse"} <= names and any("backward" in n for n in names)


@pytest.fixture
def on_cpu(monkeypatch):
    """gpu_rivals.run, on the CPU with a clock that stands still."""
    real = gpu_rivals.measured
    monkeypatch.setattr(gpu_rivals, "measured", lambda peers, name, sizes: real(peers, name, SIZES, AnyClock({}), "cpu"))
    monkeypatch.setattr(gpu_rivals, "objects", lambda cases: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def options(path, **changed):
    default = {"only": ["gemm"], "models": ["8B"], "tokens": [8192], "adapters": ["coda", "gemm", "quack"], "out": path, "limit": 1e9}
    return argparse.Namespace(**{**default, **changed})


def test_a_run_is_written_down_gone_on_with_and_made_a_table(on_cpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", None)
    path = tmp_path / "rivals.jsonl"
    assert gpu_rivals.run(options(path, limit=-1.0)) == 1 and "10 cases are left" in capsys.readouterr().out
    assert gpu_rivals.run(options(path)) == 0
    assert "quack is left out: quack-kernels is not installed" in capsys.readouterr().out
    lines = path.read_text().splitlines()
    head, *records = map(json.loads, lines)
    assert len(records) == 10 and head["missing"]["quack"] and all(r["ok"] and r["ms"] == {"coda": 1.0, "gemm": 1.0} for r in records)
    assert gpu_rivals.run(options(path)) == 0 and path.read_text().splitlines() == lines
    table = gpu_rivals.table([head, *records, {**records[0], "ms": {"coda": 2.0, "gemm": 1.0, "quack": 3.0}, "wrong": ["compile"]}])
    rows = table.splitlines()
    assert len(rows) == 13 and len({row.count("|") for row in rows}) == 1 and rows[-1].endswith("| 1.500 |") and "| gemm |" in rows[-1]


def test_what_a_case_raises_is_kept(on_cpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_rivals, "measured", lambda *a: 1 / 0)
    path = tmp_path / "rivals.jsonl"
    assert gpu_rivals.run(options(path)) == 1
    assert "ZeroDivisionError" in json.loads(path.read_text().splitlines()[1])["raised"]["all"]


def test_the_list_names_works_adapters_and_shapes(capsys):
    text = gpu_rivals.listing(options(None))
    assert "gemm: y = x wᵀ" in text and "quack" in text and "m 8192, n 128256, k 4096" in text


def test_distances_of_rivals_are_held_to_less_than_those_of_layers():
    assert gpu_rivals.FAR < protocol.FAR
