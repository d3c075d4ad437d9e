"""What kernels move and multiply: counts by hand, products counted by torch, floors from the peaks of a card."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import coda_lang  # noqa: E402
from coda_lang import benchmark, driver, tables  # noqa: E402
from coda_lang.backend_cute import configs, roofline, selfcheck, spec  # noqa: E402
from coda_lang.backend_cute.derivative import extents as backward_extents  # noqa: E402

H200 = roofline.peak("NVIDIA H200")


def counts(fn, program, **extents):
    known = roofline.complete(fn.program, extents)
    return {c.kernel: c for c in roofline.of_program(program, backward_extents(program, known) if program is fn.backward else known)}


def test_every_tensor_counts_once(root):
    fn = coda_lang.compile(root / "specs" / "swiglu.coda")
    m, d, f = 8192, 4096, 14336
    (found,) = counts(fn, fn.program, m=m, d=d, f=f).values()
    assert found.bytes == 2 * (m * d + 2 * f * d + m * f + 2 * m * f) and found.flops == 2 * m * 2 * f * d and found.times == 1


def test_partial_results_count_where_they_are_written_and_where_they_are_read(root):
    fn = coda_lang.compile(root / "specs" / "residual_sumsq.coda")
    m, k, d = 1000, 264, 520
    main, rows = counts(fn, fn.program, m=m, k=k, d=d).values()
    parts = -(-d // int(main.config.split("_")[0].split("x")[1]))
    assert parts > 1 and main.bytes == 2 * (m * k + d * k + m * d + d + 2 * m * d) + 4 * parts * m
    assert rows.config == "" and rows.flops == 0 and rows.bytes == 4 * parts * m + 4 * m


def test_only_lanes_that_are_touched_count():
    text = "program p(x: bf16[m, d], w: bf16[n, d], z: bf16[lane=2, m, n]) -> (y: bf16[m, n])\na, b = z\ny = x @ w + {0}\n"
    one, both = (coda_lang.compile(text.format(what)) for what in ("a", "a * b"))
    m, n, d = 256, 384, 128
    found = [next(iter(counts(fn, fn.program, m=m, n=n, d=d).values())).bytes for fn in (one, both)]
    assert found[1] - found[0] == 2 * m * n and found[0] == 2 * (m * d + n * d + 2 * m * n)


def test_a_tensor_that_gemms_of_one_launch_share_counts_once(root):
    fn = coda_lang.compile(root / "specs" / "qkv_apart.coda")
    (launch,) = [k for k in fn.program.kernels if isinstance(k, spec.Together)]
    sizes = {"m": 512, "d": 256, "head": 4, "kv": 2, "lane": 2, "pair": 64, "e": 128}
    known = roofline.complete(fn.program, {a: sizes.get(a, 8) for a, n in fn.program.extents if n is None})
    shared = [t for i, t in enumerate(launch.tensors) if t.name in {other.name for other in launch.tensors[:i]}]
    assert [t.name for t in shared].count("x") == 2
    apart = sum(roofline.of_kernel(g, known, None).bytes for g in launch.gemms)
    again = sum(math.prod(spec.mode_shape(t, known)) * configs.BYTES[t.dtype] for t in shared)
    assert apart - roofline.of_kernel(launch, known, None).bytes == again


def test_a_loop_counts_all_of_its_chunks():
    text = "program p(h: bf16[m, d], w: bf16[v, d]) -> (s: f32[m])\nchunk v by 64\nz: bf16 = h @ w\ns = sum[v](z * z)\n"
    fn = coda_lang.compile(text)
    (loop,) = fn.backward.loops
    found = counts(fn, fn.backward, m=96, d=32, v=200)
    looped = [found[name] for name in loop.kernels]
    assert {c.times for c in looped} == {-(-200 // loop.size)} and loop.size < 200
    products = [c for c in looped if c.flops]
    assert products and all(c.flops % (2 * 96 * 200 * 32) == 0 for c in products)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["swiglu", "residual_sumsq", "qkv_rope", "linear_residual", "lora_linear", "llama/layer", "mlp/gated:swiglu_mlp"]
)
def test_products_are_those_that_torch_counts(root, name):
    path, _, program = name.partition(":")
    fn = coda_lang.compile(root / "specs" / f"{path}.coda")
    fn = getattr(fn, program) if program else fn
    sizes = {"m": 33, "d": 48, "f": 40, "n": 72, "k": 56, "h": 24, "qh": 4, "kh": 2, "pair": 8, "r": 8, "head": 3}
    known = {a: n if n is not None else sizes.get(a, 16) for a, n in fn.program.extents}
    known |= {other: known[one] for one, other in fn.program.equal}
    with FlopCounterMode(display=False) as counter:
        fn.reference(*selfcheck.inputs(fn.program, known, 0, "cpu"))
    assert sum(c.flops for c in roofline.of_program(fn.program, known)) == counter.get_total_flops() > 0


def test_a_plan_at_a_shape_shows_its_roofline(root):
    (plan,) = driver.plan(root / "specs" / "residual_sumsq.coda")
    known = {"m": 4096, "k": 1024, "d": 2048}
    forward, backward = (driver.schedules(plan, known, backward=b) for b in (False, True))
    fn = coda_lang.compile(root / "specs" / "residual_sumsq.coda")
    for text, program in ((forward, fn.program), (backward, fn.backward)):
        rows = {line.split()[0]: line.split() for line in text.split("\n\n")[0].splitlines()[2:]}
        found = counts(fn, program, **known)
        assert set(rows) == set(found) and f"roofline of {program.name}, NVIDIA H200" in text
        assert all(f"{c.bytes / 1e6:.1f}" in rows[name] and f"{c.flops / 1e9:.1f}" in rows[name] for name, c in found.items())
        total = sum(H200.floor_ms(c.bytes, c.flops) for c in found.values()) * 1e3
        assert f": {total:.1f} us at least" in text


def test_floors_are_the_slower_of_memory_and_tensor_cores():
    assert H200.floor_ms(4.8e9, 1) == pytest.approx(1.0) and H200.bound(4.8e9, 1) == "memory"
    assert H200.floor_ms(1, 989e9) == pytest.approx(1.0) and H200.bound(1, 989e9) == "tensor cores"


def test_a_card_that_is_not_listed_has_no_floor():
    assert roofline.peak("NVIDIA H100 80GB HBM3").bytes_per_second < H200.bytes_per_second
    assert roofline.peak("NVIDIA H200 NVL").flops_per_second < H200.flops_per_second
    assert roofline.peak("NVIDIA A100-SXM4-80GB") is None
    count = roofline.Count("k", "", 100, 200)
    known, unknown = benchmark.roof(count, 2.0, H200), benchmark.roof(count, 2.0, None)
    assert known.distance == pytest.approx(2.0 / known.floor_ms) and unknown.floor_ms is None and unknown.distance is None
    report = benchmark.Report("p", {"m": 1}, "a card", {}, {"coda_lang": 2.0}, 1.0, 0.1, {}, (known, unknown))
    lines = tables.reports([report]).splitlines()
    assert any("memory" in line for line in lines) and any(line.split() == ["k", "0.0", "0.0", "2.0000"] for line in lines)
