"""Configurations: what is offered fits the hardware, the default is sensible, workspaces have the shapes the device code writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean

import pytest

pytest.importorskip("torch")  # the functions of hand-written programs stand beside torch references

import gemm_cases

from bench import gpu_configs
from coda_lang.backend_cute import configs, row_configs, spec

LINEAR = gemm_cases.ALL["linear"].gemm


TILES = [name for name, case in gemm_cases.ALL.items() if not row_configs.of_rows(case.gemm)]


@pytest.mark.parametrize("name", TILES)
def test_what_is_offered_fits(name):
    gemm = gemm_cases.ALL[name].gemm
    offered = configs.offered(gemm)
    assert offered and len(set(offered)) == len(offered)
    for config in offered:
        memory = configs.budget(gemm, config)
        assert memory is not None and memory.smem_bytes <= 227 * 1024
        assert memory.ab_stages >= 3 if gemm.products else memory.ab_stages == 0
        nb = configs.columns_per_segment(gemm, config)
        assert nb * gemm.segments == config.tile_n <= 256 and nb % gemm.granule == 0 and nb % (8 * config.cluster_m) == 0
        assert configs.accumulators(config) <= configs.max_accumulators(gemm) <= 208 and configs.warpgroup_rows(config) % 64 == 0
        assert (memory.store_stages >= 2) == bool(configs.tile_stores(gemm))
        assert (memory.tile_stages >= 2) == any(isinstance(p, spec.Tile) for p in gemm.ports)


def test_both_schedules_and_clusters_are_offered():
    kinds = {(c.pingpong, c.cluster_m, c.cluster_n) for c in configs.offered(LINEAR)}
    assert kinds == {(p, m, n) for p in (True, False) for m, n in ((1, 1), (2, 1), (1, 2))}


@pytest.mark.parametrize("granule", [8, 16, 24, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_whole_groups_fit_in_a_tile_or_nothing_is_offered(granule, segments):
    b = tuple(spec.Matrix("w", (0,), (1,)) for _ in range(segments))
    gemm = dataclasses.replace(LINEAR, products=(spec.Product(LINEAR.products[0].a, b),), granule=granule)
    offered = configs.offered(gemm)
    assert bool(offered) == (segments * granule <= 256)
    assert all(configs.columns_per_segment(gemm, c) % granule == 0 for c in offered)


def test_nothing_fits_is_said_by_name():
    gemm = dataclasses.replace(LINEAR, granule=512)
    with pytest.raises(ValueError, match="linear_k0.*512 columns"):
        configs.default(gemm, 128, 512, 128)


MEASURED = Path(__file__).parent.parent / "bench/results/configs_h200.jsonl"


def measured(few: bool) -> Iterator[tuple[float, float]]:
    """Of every measured shape of few rows, or of many: the time of what the model takes over torch.mm's, and over the fastest's."""
    for x in gpu_configs.judged(map(json.loads, MEASURED.read_text().splitlines())):
        if x.few == few and x.m * x.n > 1024 * 1024 * (not few):
            yield 1 / x.speed, x.ms[x.taken] / x.ms[x.best]


@pytest.mark.parametrize("few, beside_mm, beside_best, worst", [(False, 1.0, 1.01, 1.05), (True, 1.06, 1.02, 1.15)])
def test_the_model_takes_what_was_fast(few, beside_mm, beside_best, worst):
    """Beside torch.mm and the fastest configuration, in the geometric mean, and at worst beside the fastest."""
    peer, best = zip(*measured(few))
    assert len(peer) > 40
    assert geometric_mean(peer) < beside_mm and geometric_mean(best) < beside_best and max(best) < worst


@pytest.mark.parametrize("name", ["linear", "swiglu", "residual"])
def test_loads_are_ahead_of_the_products(name):
    """By 3000 cycles, unless not even the least staging of the epilogue leaves room for that; nothing that fits is left unused."""
    gemm = gemm_cases.ALL[name].gemm
    for config in configs.offered(gemm):
        found = configs.budget(gemm, config)
        wanted = min(-(-configs.AHEAD // configs.multiply_cycles(config)), configs.ENOUGH_AB_STAGES)
        assert found is not None
        stage = (config.tile_m + config.tile_n) * configs.TILE_K * 2
        assert found.ab_stages == configs.MAX_AB_STAGES or configs.SMEM_BYTES - found.smem_bytes < stage
        least = min(configs.step_columns(gemm, config), 16)
        assert found.ab_stages >= wanted or configs._divided(configs._needs(gemm), config, least, 2, 2, wanted) is None


@pytest.mark.parametrize("m,n", [(1, 1), (1, 4096), (64, 4096), (4096, 64), (1000, 1000)])
def test_small_problems_are_spread_over_the_multiprocessors(m, n):
    config = configs.default(LINEAR, m, n, 4096)
    tiles = -(-m // config.tile_m) * -(-n // config.tile_n)
    smallest = min(c.tile_m * c.tile_n for c in configs.offered(LINEAR))
    assert tiles >= min(100, -(-m * n // (4 * smallest))) or config.tile_m * config.tile_n <= 2 * smallest


def test_the_default_can_be_restricted():
    assert configs.default(LINEAR, 4096, 4096, 4096, among=("64x128_pp_c1x1",)).key == "64x128_pp_c1x1"
    with pytest.raises(ValueError):
        configs.default(LINEAR, 4096, 4096, 4096, among=("none",))


@pytest.mark.parametrize("key,rows,cols", [(spec.Config(128, 192, True), 128, 192), (spec.Config(256, 128, False), 128, 128)])
def test_workspaces_have_one_part_per_tile_or_warpgroup(key, rows, cols):
    row, col = spec.RowReduce("sum", "w"), spec.ColReduce("lse", "w")
    assert configs.partial_shape(LINEAR, key, row, 1000, 500) == (-(-500 // cols), 1000)
    assert configs.partial_shape(LINEAR, key, col, 1000, 500) == (2, -(-1000 // rows), 500)
    with pytest.raises(TypeError):
        configs.partial_shape(LINEAR, key, LINEAR.sinks[0], 1, 1)


def test_a_kernel_and_its_variant_with_more_sinks_reduce_in_the_same_order():
    """What is saved for the backward changes no bit of the outputs: the tile, and the steps that partials are combined by, are the same."""
    plain = gemm_cases.ALL["lm_head"].gemm
    saved = [spec.Tensor(name, "f32", (("m",), ("v",)), "out") for name in ("s0", "s1", "s2")]
    stores = [spec.Store(spec.Matrix(t.name, (0,), (1,))) for t in saved]
    whole = dataclasses.replace(plain, tensors=(*plain.tensors, *saved), sinks=(*plain.sinks, *stores))
    for size in ((7, 1000, 1000), (1000, 1003, 264), (8192, 8192, 4096)):
        less, more = configs.default(plain, *size, whole=whole), configs.default(whole, *size, whole=whole)
        assert dataclasses.replace(less, step=0) == more
        found = configs.budget(whole, more)
        assert found is not None and configs.step_columns(plain, less) == found.step_n
    assert configs.portfolio(plain, whole) and all(c.step for c in configs.portfolio(plain, whole))
    assert configs.candidates(LINEAR, LINEAR) == configs.offered(LINEAR)
