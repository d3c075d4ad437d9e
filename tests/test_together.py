"""Several Gemms in one launch: which run together, in what order, with what configuration; the same numbers; how a kernel walks them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as every
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from bench import rows  # noqa: E402
from coda_lang import driver, passes  # noqa: E402
from coda_lang.backend_cute import arguments, configs, host, load, together, torch_fns, twin  # noqa: E402
from coda_lang.backend_cute import spec as s  # noqa: E402
from coda_lang.backend_cute.binding import bind  # noqa: E402
from coda_lang.backend_cute.function import fixed  # noqa: E402
from coda_lang.backend_cute.lower import lower, records  # noqa: E402
from coda_lang.backend_cute.prune import prune, used, written  # noqa: E402
from coda_lang.backend_cute.selfcheck import error, inputs  # noqa: E402
from coda_lang.source import Source  # noqa: E402
from tests import gallery, standins  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.test_several import PROGRAMS as SEVERAL  # noqa: E402

QKV = (ROOT / "specs" / "qkv_apart.coda").read_text(encoding="utf-8")
# Depths of their own, a reduction over rows, one over columns, another axis of rows, a residual tile.
MIXED = """
program mixed(x: bf16[m, d], w: bf16[a, d], u: bf16[p, e], v: bf16[b, e], r: bf16[m, a], o: bf16[c, d])
    -> (y: bf16[m, a], ms: f32[m], z: bf16[p, b], top: f32[b], t: f32[m, c])
nominal m = 256, d = 256, a = 256, p = 128, e = 64, b = 256, c = 128
h = x @ w + r
y = h
ms = mean[a](h * h)
z = relu(u @ v)
top = max[p](u @ v)
t = x @ o
"""
CHAIN = """
program chain(x: bf16[m, d], w: bf16[f, d], v: bf16[d2, f], u: bf16[n, d]) -> (y: bf16[m, d2], t: bf16[m, n])
nominal m = 64, d = 64, f = 64, d2 = 64, n = 8
y = relu(x @ w) @ v
t = x @ u
"""


def functions(text, folder):
    path = folder / "kernel.py"
    path.write_text(driver.emit(Source("p.coda", text)))
    return load.functions_of(load.import_file(path))


def function(text, folder):
    (fn,) = functions(text, folder)
    return fn


def names(kernel):
    return [gemm.name for gemm in s.gemms(kernel)]


# --- the pass --------------------------------------------------------------------------------------------------------------


def test_query_key_and_value_are_one_launch(tmp_path):
    fn = function(QKV, tmp_path)
    (launch,) = fn.program.kernels
    assert isinstance(launch, s.Together) and names(launch) == ["qkv_apart_q", "qkv_apart_k", "qkv_apart_v"]
    assert launch.name == "qkv_apart_q+k+v" and launch.tensors == tuple(t for gemm in launch.gemms for t in gemm.tensors)
    assert [gemm.segments for gemm in launch.gemms] == [2, 2, 1]
    backward = [k for k in s.launches(fn.backward) if isinstance(k, s.Together)]
    assert {"qkv_apart_backward_d_wq", "qkv_apart_backward_d_wk", "qkv_apart_backward_d_wv"} <= set(names(backward[0]))


def test_what_waits_for_another_does_not_run_with_it(tmp_path):
    fn = function(CHAIN, tmp_path)
    first, second = fn.program.kernels
    assert len(names(first)) + len(names(second)) == 3 and [len(names(k)) for k in (first, second)] in ([2, 1], [1, 2])
    assert not any("chain_y" in names(k) and set(names(k)) - {"chain_y", "chain_t"} for k in (first, second))


TEXTS = {"qkv": QKV, "mixed": MIXED, "chain": CHAIN, **SEVERAL, **gallery.PROGRAMS}


@pytest.mark.parametrize("name", TEXTS)
def test_everything_is_written_before_it_is_read(name):
    """Forward, saving forward and backward: the kernels of one launch wait for nothing of each other, and none is lost."""
    for program in driver.programs(Source("p.coda", TEXTS[name])):
        try:
            plan = passes.trained(program)
        except Exception:  # no derivative: other tests say why
            plan = passes.run(program)
        plans = [plan] if plan.derived is None else [plan, plan.derived.backward]
        for each in plans:
            made, apart = lower(each), records(each)
            assert sorted(g.name for k in made.kernels for g in s.members(k)) == sorted(k.name for k in apart.kernels)
            done = {a.name for a in made.inputs}
            for kernel in made.kernels:
                works = {t.name for k in made.kernels for t in k.tensors if t.role == "work"}
                for part in s.members(kernel):
                    assert used(part) - written(part) <= done | (works & written(part)), part.name
                done |= written(kernel)
                if isinstance(kernel, s.Together):
                    assert sum(len(written(g)) for g in kernel.gemms) == len(written(kernel)), "two write one tensor"
                    assert all(g.products for g in kernel.gemms) and len(kernel.gemms) <= together.MOST and configs.offered(kernel)


def test_gemms_without_a_common_operand_must_gain_more_than_the_model_may_be_wrong_by():
    (program,) = driver.programs(Source("p.coda", MIXED))
    apart = records(passes.run(program))
    small, large = dict(program.nominal), dict.fromkeys((a.name for a in program.axes), 8192)
    pair = [(k,) for k in s.launches(apart) if k.name in ("mixed_y", "mixed_z")]
    assert together.measured(pair, together.costs(small)).worthwhile and not together.measured(pair, together.costs(large)).worthwhile
    assert [names(k) for k in s.launches(together.together(apart, small))] == [["mixed_y", "mixed_t", "mixed_z"]]
    assert ["mixed_z"] in map(names, s.launches(together.together(apart, large)))


def test_what_cannot_share_a_tile_does_not_run_together():
    (program,) = driver.programs(Source("p.coda", MIXED))
    apart = records(passes.run(program))
    kernels = tuple(replace(k, granule=56 if k.name == "mixed_z" else 72) if isinstance(k, s.Gemm) else k for k in apart.kernels)
    made = together.together(replace(apart, kernels=kernels), dict(program.nominal))
    pair = [(k,) for k in kernels if k.name in ("mixed_y", "mixed_z")]
    assert together.measured(pair, together.costs(dict(program.nominal))) is None
    assert any(names(k) == ["mixed_z"] for k in s.launches(made))


def test_plan_reports_the_launch():
    (plan,) = driver.plan(Source("p.coda", QKV))
    said = driver.launches(plan)
    assert said.startswith("one launch: qkv_apart_q, qkv_apart_k, qkv_apart_v, which share x\n") and "in launches of their own" in said
    assert "qkv_apart_backward_d_wq" in driver.launches(plan, backward=True)
    assert driver.launches(driver.plan(Source("p.coda", SEVERAL["mlp"]))[0]) == ""


# --- configurations ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launches")
    made = {}
    for name, text in {"qkv": QKV, "mixed": MIXED}.items():
        (folder / name).mkdir()
        made[name] = s.launches(function(text, folder / name).program)[0]
    return made


@pytest.mark.parametrize("name", ["qkv", "mixed"])
def test_every_configuration_serves_every_gemm(name, launches):
    launch = launches[name]
    offered = configs.offered(launch)
    assert offered
    for config in offered:
        whole = configs.budget(launch, config)
        assert whole.smem_bytes <= configs.SMEM_BYTES
        for gemm in launch.gemms:
            assert config.tile_n % (gemm.segments * gemm.granule) == 0
            assert configs.accumulators(config) <= configs.max_accumulators(gemm)
            assert configs.columns_per_segment(gemm, config) % whole.step_n == 0 and gemm.granule % 8 == 0
            alone = configs.budget(gemm, config)
            assert alone is not None and alone.step_n >= whole.step_n


def test_one_gemm_costs_what_it_costs():
    gemm = s.launches(records(passes.run(driver.programs(Source("p.coda", MIXED))[0])))[0]
    for config, size in every(configs.offered(gemm), ((1000, 700, 64), (8192, 4096, 4096))):
        once = configs.cycles(gemm, config, [size])
        twice = configs.cycles(s.Together("t", (gemm, gemm)), config, [size, size])
        assert once <= twice <= 2 * once * 1.0001


# --- numbers -----------------------------------------------------------------------------------------------------------------

SHAPES = {
    "qkv": [{"m": 37, "d": 40, "head": 3, "kv": 2}, {"m": 130, "d": 264, "head": 1, "kv": 3}, {"m": 1, "d": 1, "head": 1, "kv": 1}],
    "mixed": [dict(m=37, d=40, a=29, p=130, e=72, b=5, c=300), dict(m=1, d=8, a=1, p=257, e=1, b=300, c=7)],
    "chain": [dict(m=37, d=40, f=29, d2=130, n=72)],
}
CASES = [(name, extents) for name, found in SHAPES.items() for extents in found]


@pytest.mark.parametrize("name, extents", CASES, ids=lambda x: x if isinstance(x, str) else "_".join(map(str, x.values())))
def test_by_the_host_and_in_float64(name, extents, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "allocate", rows.poisoning)
    fn = function(TEXTS[name], tmp_path)
    tensors = inputs(fn.program, {**fixed(fn.program), **extents}, 3, "cpu")
    binding = bind(fn.program, arguments.shapes(tensors))
    stand = standins.StandIns(fn.functions, binding.extents, fixed(fn.program))
    got = host.plan(fn.program, binding, tensors, torch.device("cpu"), stand).run(tensors)
    assert stand.calls[0] == fn.program.kernels[0].name and any("+" in call for call in stand.calls)
    exact = fn.reference(*tensors, exact=True)
    for value, planned, truth in zip(got, fn.reference_planned(*tensors, exact=True), exact, strict=True):
        assert error(planned, truth) < 1e-12 and error(value.reshape(truth.shape), truth) < 2**-7


@pytest.mark.parametrize("empty", ["m", "head", "kv", "d"])
def test_a_gemm_without_rows_or_columns_leaves_the_others_to_run_alone(empty, tmp_path):
    fn = function(QKV, tmp_path)
    tensors = inputs(fn.program, {**fixed(fn.program), "m": 5, "d": 8, "head": 2, "kv": 3, empty: 0}, 3, "cpu")
    plan = fn.explain(*tensors)
    want = {"m": (), "head": ("qkv_apart_k", "qkv_apart_v"), "kv": ("qkv_apart_q",), "d": ("qkv_apart_q+k+v",)}
    assert plan.launches == want[empty]


NORMED = """
program normed(x: bf16[m, d], wq: bf16[h, hd=32, d], wk: bf16[g, hd, d], wv: bf16[c, d])
    -> (q: bf16[m, h, hd], k: f32[m], v: bf16[m, c])
nominal m = 256, d = 8192, h = 8, g = 4, c = 128
q = x @ wq
t = tanh(x @ wk)
k = sum[g, hd](t * t)
v = relu(x @ wv)
"""


def test_with_and_without_gradients_the_same_kernels_run_together(tmp_path):
    """The forward that saves, the plain one and one of fewer outputs: the same tiles and steps, so reductions have the same bits."""
    fn = function(NORMED, tmp_path)
    assert fn.saving is not None
    groups = [{g.products for g in s.gemms(k)} for p in (fn.saving, fn.program) for k in s.launches(p)]
    assert groups[: len(groups) // 2] == groups[len(groups) // 2 :]
    known = configs.wholes(fn.saving)
    extents = {"m": 300, "d": 512, "h": 8, "g": 4, "c": 128, "hd": 32}
    (saving,) = [k for k in s.launches(fn.saving) if len(s.gemms(k)) > 1]
    chosen = configs.choose(saving, extents)
    for outputs in (("q", "k", "v"), ("k",), ("k", "v")):
        program, _ = prune(fn.program, fn.functions, outputs)
        launch = next(k for k in s.launches(program) if any(isinstance(x, s.RowReduce) for g in s.gemms(k) for x in g.sinks))
        found = configs.choose(launch, extents, whole=configs.whole_of(launch, known))
        assert replace(found, step=0) == chosen and found.step == configs.budget(saving, chosen).step_n
        assert configs.budget(launch, found) is not None


def test_gradients_not_asked_for_are_not_computed(tmp_path):
    fn = function(QKV, tmp_path)
    everything = {g.name for k in s.launches(fn.backward) for g in s.gemms(k)}
    assert {"qkv_apart_backward_d_x", "qkv_apart_backward_d_wv"} <= everything
    for wanted, launched in ((("wq", "wv"), 1), (("wv",), 1), (("x",), 1)):
        outputs = [dict(fn.gradients)[w] for w in wanted]
        program, scalar = prune(fn.backward, fn.functions, outputs)
        multiplied = [k for k in s.launches(program) if s.gemms(k)[0].products]
        assert len(multiplied) == launched and written(multiplied[0]) == set(outputs)
        assert isinstance(multiplied[0], s.Together) == (len(wanted) > 1)
        whole, _ = prune(fn.backward, fn.functions, outputs, whole=True)
        built = {k.name for k in s.built(fn.backward)}
        assert {k.name for k in whole.kernels} <= built and {x for k in whole.kernels for x in written(k)} >= set(outputs)
        shape = {"m": 21, "d": 24, "head": 2, "kv": 1}
        tensors = dict(zip([a.name for a in program.inputs], inputs(program, {**fixed(program), **shape}, 1, "cpu")))
        found = twin.run(program, scalar, tensors, f=torch_fns.Exact(), extents={**fixed(program), **shape})
        whole_found = twin.run(fn.backward, fn.functions, tensors, f=torch_fns.Exact(), extents={**fixed(program), **shape})
        for name in outputs:
            assert error(found[name], whole_found[name]) < 1e-14


def test_gradients_of_weights_apart(tmp_path, monkeypatch):
    """Through autograd, kernels' stand-ins on the CPU: all of them, and each alone."""
    fn = function(QKV, tmp_path)
    monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    shape = {**fixed(fn.program), "m": 21, "d": 24, "head": 2, "kv": 1}
    for needs in (("x", "wq", "wk", "wv"), ("wk",), ("x",), ("wq", "wv")):
        tensors = inputs(fn.program, shape, 5, "cpu")
        leaves = [t.requires_grad_(a.name in needs) for a, t in zip(fn.program.inputs, tensors, strict=True)]

        class Known(standins.StandIns):
            def select(self, program, functions):
                return Known({**self.functions, **functions}, shape, fixed(program))

        fn.objects, fn._training = Known(fn.functions, shape, fixed(fn.program)), None
        given = [torch.randn(o.shape).to(o.dtype) for o in fn(*leaves)]
        wanted = [t for t in leaves if t.requires_grad]
        found = torch.autograd.grad(list(fn(*leaves)), wanted, given, allow_unused=True)
        doubles = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in leaves]
        results = list(fn._reference(torch_fns.Exact(), *doubles))
        pairs = [(r, g.double()) for r, g in zip(results, given) if r.requires_grad]
        exact = torch.autograd.grad([r for r, _ in pairs], [t for t in doubles if t.requires_grad], [g for _, g in pairs])
        for got, truth in zip(found, exact, strict=True):
            assert error(got, truth) < 2**-7


# --- how a kernel walks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pingpong", [True, False])
@pytest.mark.parametrize(
    "tiles, depths", [((5,), (3,)), ((5, 1, 7), (3, 4, 1)), ((1, 1, 1), (2, 5, 7)), ((0, 9, 2), (4, 1, 3)), ((16, 3), (1, 9))]
)
def test_every_role_finds_the_same_stage(pingpong, tiles, depths, monkeypatch):
    """What the loading warp puts into the ring is what the multiplying warpgroup takes out, whichever problem a tile is of."""
    pytest.importorskip("cutlass")
    from coda_lang.backend_cute.gemm_sm90 import scheduler

    blocks_in_launch = 4
    monkeypatch.setattr(scheduler, "Int32", int)
    monkeypatch.setattr(scheduler, "cutlass", SimpleNamespace(max=max, min=min))
    shapes = [scheduler.Shape(1, 1, 1, (1, 1), blocks_in_launch) for _ in tiles]
    sizes = [(n, 1) for n in tiles]
    seen = []
    for block in range(blocks_in_launch):
        arch = SimpleNamespace(block_idx=lambda block=block: (0, 0, block), grid_dim=lambda: (1, 1, blocks_in_launch))
        monkeypatch.setattr(scheduler, "cute", SimpleNamespace(arch=arch))
        loaded, position = {}, 0
        for problem, share in enumerate(scheduler.shares(shapes, sizes, depths)):
            for work in range(share.first, share.end, share.step):
                loaded[problem, work - share.start] = position
                position += depths[problem]
        seen += loaded
        taken = {}
        for group in range(2):
            cursor, order = 0, []
            for problem, share in enumerate(scheduler.shares(shapes, sizes, depths, group if pingpong else None)):
                cursor = share.before if pingpong else cursor
                for work in range(share.first, share.end, share.step):
                    order.append((problem, work - share.start))
                    taken.setdefault(group, {})[order[-1]] = cursor
                    cursor += depths[problem] * (2 if pingpong else 1)
        if pingpong:  # the two take turns, first the one, then the other
            turns = [g for tile in loaded for g in taken if tile in taken[g]]
            assert turns == [i % 2 for i in range(len(loaded))]
            assert {**taken.get(0, {}), **taken.get(1, {})} == loaded
        else:
            assert all(taken[g] == loaded for g in taken) and len(taken) in (0, 2)
    assert sorted(seen) == [(p, t) for p, n in enumerate(tiles) for t in range(n)]
