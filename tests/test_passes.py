"""The passes: which kernels a program becomes, where copies are needed, and what is refused, with which words."""

from __future__ import annotations

import pytest
from gallery import PROGRAMS

from coda_lang import driver, passes
from coda_lang.backend_cute.lower import lower
from coda_lang.diagnostics.catalog import CATALOG
from coda_lang.diagnostics.model import CodaError, InternalError
from coda_lang.ir.kernels import Finish, Gemm, Plan, Point, Read, Reduce, Store, to_text
from coda_lang.source import Source

SWIGLU = """
program swiglu(x: bf16[m, d], w: bf16[f, lane=2, d]) -> (y: bf16[m, f], z: bf16[m, f, lane])
z = x @ w
gate, up = z
y = silu(gate) * up
"""


def plan(text: str) -> Plan:
    """The plan of a source with one program."""
    (made,) = driver.plan(Source("p.coda", text))
    return made


def gallery(name: str) -> Plan:
    return plan(PROGRAMS[name])


# --- the pipeline ------------------------------------------------------------------------------------------------------


def test_the_pipeline_is_observable_by_name():
    assert passes.names() == ("simplify", "normalise", "cut", "chunks", "anchor", "place", "partition", "layout", "join")
    (program,) = driver.programs(Source("p.coda", SWIGLU))
    assert "rows (m) cols (f)" in passes.after(program, "anchor")
    assert "gate: tile(m, f)" in passes.after(program, "place")
    assert "phase 0" in passes.after(program, "partition")
    assert "storage" in passes.after(program, "layout")
    with pytest.raises(ValueError, match="there is no pass typo; the passes are simplify"):
        passes.after(program, "typo")


def test_a_pass_that_breaks_the_plan_is_a_bug_of_the_compiler(monkeypatch):
    from dataclasses import replace

    def vandal(state):
        gemm = replace(state.plan.gemm, sinks=())
        return replace(state, plan=replace(state.plan, kernels=(gemm,)))

    monkeypatch.setattr(passes, "PIPELINE", (*passes.PIPELINE, vandal))
    (program,) = driver.programs(Source("p.coda", SWIGLU))
    with pytest.raises(InternalError, match="after the pass vandal: outputs never written: y, z"):
        passes.run(program)


def test_swiglu_reads_as_a_person_would_write_it():
    assert to_text(plan(SWIGLU)) == """\
plan swiglu

gemm swiglu rows (m) cols (f)
  acc_gate, acc_up = x[m | d] @ w[f | d, lane=0], w[f | d, lane=1]
  phase 0
    gate: bf16 = cast{dtype=bf16}(acc_gate)  # p.coda:3
    t1: f32 = silu(gate)  # p.coda:5
    up: bf16 = cast{dtype=bf16}(acc_up)  # p.coda:3
    y: f32 = mul(t1, up)  # p.coda:5
  store y[m, f]: bf16 <- y
  store z[m, f, lane=*]: bf16 <- gate, up

storage
  x (m)(d)
  w (f)(lane)(d)
  y (m)(f)
  z (m)(f)(lane)
"""


# --- simplify ----------------------------------------------------------------------------------------------------------


def test_equal_expressions_are_computed_once_and_unused_ones_never():
    p = plan("""
program p(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
unused = exp(x @ w)
y = tanh(x @ w) * tanh(x @ w)
""")
    assert [e.op for e in p.gemm.phases[0].eqns] == ["tanh", "mul"]
    assert len(p.gemm.accumulators) == 1


def test_a_rounding_is_never_dropped():
    ops = [e.op for e in gallery("rounding_kept").gemm.phases[0].eqns]
    assert ops.count("cast") == 2


def test_an_output_is_rounded_by_its_store_unless_it_is_used_again():
    p = plan("""
program p(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], z: bf16[m, n])
y = x @ w
z = exp(x @ w)
""")
    assert [e.op for e in p.gemm.phases[0].eqns] == ["exp"]
    used = plan("""
program p(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], z: bf16[m, n])
y = x @ w
z = exp(y)
""")
    assert [e.op for e in used.gemm.phases[0].eqns] == ["cast", "exp"]


# --- the product -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "segments", "products"),
    [
        ("halves", 2, 1),
        ("three_lanes", 3, 1),
        ("four_segments", 4, 1),
        ("lora_swiglu", 2, 2),
        ("bias_between_products", 1, 2),
        ("same_rows_summed", 1, 2),
        ("contracted_group_apart", 1, 1),
        ("lane_of_input", 1, 1),
    ],
)
def test_segments(name, segments, products):
    gemm = gallery(name).gemm
    assert (len(gemm.accumulators), len(gemm.products)) == (segments, products)


def test_rows_and_columns_are_chosen_so_that_outputs_are_contiguous_along_columns():
    p = "program p(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[%s])\ny = x @ w\n"
    assert plan(p % "m, n").gemm.cols == ("n",)
    assert plan(p % "n, m").gemm.cols == ("m",)


def test_lanes_make_the_columns():
    assert gallery("lanes_on_the_left").gemm.rows == ("n",)


# --- storage -----------------------------------------------------------------------------------------------------------


COPIED = {"lane_innermost_of_weight": ["w"], "three_lanes": ["z"], "rope_f32_out": ["y"]}


@pytest.mark.parametrize("name", PROGRAMS)
def test_copies_are_said_and_are_few(name):
    made = gallery(name)
    assert [x.tensor for x in made.layouts if x.copy] == COPIED.get(name, [])
    text = passes.report(made)
    for tensor in COPIED.get(name, []):
        assert f"{tensor}: copied at every call (" in text


def test_axes_merge_as_far_as_every_use_allows():
    layouts = {x.tensor: x.modes for x in gallery("row_groups").layouts}
    assert layouts["x"] == (("b", "t"), ("k",)) and layouts["r"] == (("b", "t"), ("n",))
    layouts = {x.tensor: x.modes for x in gallery("subset_of_columns").layouts}
    assert layouts["w"] == (("head", "pair"), ("d",)) and layouts["q"] == (("m",), ("pair",))


def test_adjacent_lanes_of_two_bytes_travel_as_pairs():
    made = gallery("lane_without_product")
    assert [p.access.packed for p in made.gemm.ports if isinstance(p, Read)] == ["lane", None, None]
    assert [s.access.packed for s in made.gemm.sinks if isinstance(s, Store)] == ["lane"]


def test_a_lane_between_columns_is_pinned_and_splits_them():
    made = lower(gallery("rope_table"))
    (gemm,) = made.kernels
    assert isinstance(gemm.products[0].b[0].rows, tuple)
    assert [(b.rows, b.at) for b in gemm.products[0].b] == [((0, 2), ((1, 0),)), ((0, 2), ((1, 1),))]
    assert gemm.granule == 8


# --- phases, finishers -------------------------------------------------------------------------------------------------


PHASES = {"head_norm_and_statistic": 2, "head_layernorm": 3, "head_softmax": 2, "whole_row_in_tile": 2}


@pytest.mark.parametrize(("name", "phases"), PHASES.items())
def test_statistics_of_a_group_make_phases(name, phases):
    gemm = gallery(name).gemm
    assert len(gemm.phases) == phases
    assert all(p.statistics for p in gemm.phases[:-1]) and not gemm.phases[-1].statistics


def test_a_statistic_is_stored_by_the_first_column_of_its_group():
    (point,) = [s for s in gallery("head_norm_and_statistic").gemm.sinks if isinstance(s, Point)]
    assert str(point).startswith("point r[m, head] <- r if ")


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("row_means", ["row"]),
        ("column_sums", ["col"]),
        ("loss_mean", ["row", ""]),
        ("loss_scaled_by_total", ["row", "", "row"]),
        ("two_k_segments_reduced", ["row", "col", ""]),
        ("runs", ["row"]),
        ("head_extremes", []),
    ],
)
def test_finishers_level_by_level(name, levels):
    assert [k.over for k in gallery(name).kernels if isinstance(k, Finish)] == levels


def test_a_reduction_is_left_and_read_once():
    made = plan("""
program p(x: bf16[m, k], w: bf16[n, k]) -> (a: f32[m], b: f32[m], top: f32[])
z = x @ w
a = amax[n](z)
b = 2.0 * amax[n](z)
top = amax[m, n](z)
""")
    assert sum(isinstance(s, Reduce) for s in made.gemm.sinks) == 1


def test_a_run_is_reduced_within_its_window():
    (gemm, _) = lower(gallery("runs")).kernels
    windows = [s.window for s in gemm.sinks]
    assert [(w.start, w.size) for w in windows] == [(0, 24), (24, 16), (40, 8)]


# --- refusals ----------------------------------------------------------------------------------------------------------


def refused(text: str):
    """What is wrong with a source."""
    with pytest.raises(CodaError) as caught:
        driver.check(Source("p.coda", text))
    return caught.value.diagnostics


ENTRIES = [e for e in CATALOG.values() if e.code[:3] in ("C04", "C06")]
REFUSED = ("C0404", "C0415", "C0416", "C0601")


@pytest.mark.parametrize("code", REFUSED)
def test_every_refusal_says_what_where_why_and_what_else(code):
    (found,) = refused(CATALOG[code].wrong)
    assert found.code == code
    assert found.span is not None and found.message and found.label and found.notes and found.help
    assert driver.check(Source("p.coda", CATALOG[code].right))


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.code not in REFUSED], ids=lambda e: e.code)
def test_what_one_kernel_cannot_do_several_do_and_the_plan_says_why(entry):
    (made,) = driver.check(Source("p.coda", entry.wrong))
    assert len(made.stages) > 1 and [reason.split(":")[0] for reason in made.why] == [entry.code]
    assert f"several kernels, because:\n  {made.why[0]}" in passes.report(made)
    assert all(len(p.stages) < 2 for p in driver.check(Source("p.coda", entry.right)))


def test_the_stuck_value_is_named_with_its_axis_and_both_places():
    (program,) = driver.programs(Source("p.coda", """
program p(x: bf16[m, k], w: bf16[d, k], g: bf16[d]) -> (y: bf16[m, d])
z = x @ w
r = rsqrt(mean[d](z * z) + 1e-5)
y = z * r * g
"""))
    (found,) = passes.states(program, "cut").why
    assert found.code == "C0406" and found.span.line == 5
    assert "`d`" in found.secondary[0].text and found.secondary[0].span.line == 4
    assert found.secondary[1].span.line == 3
    assert any("tried: a statistic within the tile (`d` is free" in n for n in found.notes)


HEADER = "program p(x: bf16[m, d], w: bf16[head=6, hd=8, d], v: bf16[n, d], r: bf16[m, n]) -> "
PAIR = "program p(x: bf16[m, d], v: bf16[n, d], t: bf16[m, r], u: bf16[n, r]) -> "
CHAIN = "program p(x: bf16[m, d], v: bf16[n, d], w: bf16[e, n]) -> "

SEVERAL = {
    "softmax over all columns": ("C0406", HEADER, "(y: bf16[m, n])", "y = softmax[n](x @ v)"),
    "centred columns": ("C0406", HEADER, "(y: bf16[m, n])", "z = x @ v", "y = z - mean[m](z)"),
    "scaled by a total": ("C0406", HEADER, "(y: bf16[m, n])", "z = x @ v", "y = z / amax[m, n](z)"),
    "runs added": ("C0407", HEADER, "(y: bf16[m, a=2, hd])", "a, b, c = split[head -> a, b=2, c=2](x @ w)", "y = a + rename[b -> a](b)"),
    "runs joined backwards": (
        "C0407", HEADER, "(y: bf16[m, head, hd])", "a, b = split[head -> a=2, b=4](x @ w)", "y = pack[b, a -> head](b, a)",
    ),
    "runs of two axes": (
        "C0407", HEADER, "(y: bf16[m, head, a=4], z: bf16[m, b=2, hd])", "t = x @ w", "y, rest = split[hd -> a, c=4](t)",
        "z, other = split[head -> b, e=4](t)",
    ),
    "products one after the other": ("C0401", CHAIN, "(y: bf16[m, e])", "y = (x @ v) @ w"),
    "a rounded product in a product": ("C0401", CHAIN, "(y: f32[m])", "y = sum[e](bf16(x @ v) @ w)"),
    "unrelated products": ("C0403", HEADER, "(y: bf16[m, n], q: bf16[m, head, hd])", "y = x @ v", "q = x @ w"),
    "a difference of products": ("C0403", PAIR, "(y: bf16[m, n])", "y = x @ v - t @ u"),
    "a sum of a rounded product": ("C0403", PAIR, "(y: bf16[m, n])", "y = bf16(x @ v) + t @ u"),
    "an operand of f32": ("C0405", "program p(x: f32[m, d], v: bf16[n, d]) -> ", "(y: bf16[m, n])", "y = x @ v"),
}  # fmt: skip


@pytest.mark.parametrize("what", SEVERAL)
def test_several(what):
    code, head, outputs, *lines = SEVERAL[what]
    (made,) = driver.check(Source("p.coda", "\n".join([head + outputs, *lines, ""])))
    assert len(made.stages) > 1 and [reason.split(":")[0] for reason in made.why] == [code]


def test_all_refusals_of_a_file_are_given_at_once():
    found = refused("""
program a(x: bf16[e, f, m, k], w: bf16[e, f, n, k]) -> (y: bf16[e, f, m, n])
y = matmul[k](x, w)

program b(x: bf16[e, f, m, k], w: bf16[e, f, n, k]) -> (y: bf16[e, f, m, n])
y = relu(matmul[k](x, w))
""")
    assert [d.code for d in found] == ["C0404", "C0404"]


# --- the report --------------------------------------------------------------------------------------------------------


def test_the_report_has_kernels_traffic_and_the_shape_contract():
    text = passes.report(gallery("lora_swiglu"))
    assert "gemm p: rows `m`, columns `f`, 2 accumulators side by side, 2 products into each" in text
    assert "unfused" in text and "shape contract:" in text and "free: m, k, f, r" in text


def test_nominal_extents_enter_the_report():
    text = "program p(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])\nnominal m = 8192, k = 1000, n = 2000\ny = x @ w\n"
    assert "memory: 53.2 MB" in passes.report(plan(text))
    assert isinstance(plan(text).gemm, Gemm)
