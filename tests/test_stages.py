"""`passes.stages`: running the stages one after the other is the program, in float64; what is stored between them, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import strategies
from hypothesis import given, settings

from coda_lang.ir import interp
from coda_lang.ir.build import build
from coda_lang.ir.graph import Program
from coda_lang.ir.verify import verify
from coda_lang.passes.differentiate import differentiate
from coda_lang.passes.fold import fold
from coda_lang.passes.simplify import common, live, side_by_side
from coda_lang.passes.stages import Stages, cut
from coda_lang.source import Source
from coda_lang.syntax.parse import parse

torch = pytest.importorskip("torch")
SPECS = sorted((Path(__file__).parent.parent / "specs").glob("*.coda"))


def programs(text: str) -> tuple[Program, ...]:
    source = Source("test.coda", text)
    return build(parse(source), (source,))


def tidy(program: Program) -> Program:
    return live(side_by_side(live(common(fold(common(program)))))[0])


def joint(program: Program) -> tuple[Program, frozenset[str]]:
    """Forward and backward as one program, and the inputs that arrive late."""
    derived = differentiate(program)
    both = replace(derived.program, outputs=(*program.outputs, *derived.program.outputs))
    return tidy(both), frozenset(c for _, c in derived.cotangents)


def assert_same(program: Program, given: dict, late: frozenset[str] = frozenset()) -> Stages:
    """Cuts, runs the stages one by one, compares with the whole."""
    stages = cut(program, late)
    known = {a: n for t in program.inputs for a, n in zip(t.axes, given[t.name].shape)}
    whole = interp.run(program, given, torch, "exact")
    held = {**given}
    for stage in stages.programs:
        verify(stage)
        held.update(interp.run(stage, {t.name: held[t.name] for t in stage.inputs}, torch, "exact", known))
    held.update({out: given[source] for out, source in stages.same})
    for name, value in whole.items():
        torch.testing.assert_close(held[name], value, rtol=1e-7, atol=1e-9, equal_nan=True)
    return stages


def doubles(program: Program, sizes: dict[str, int]) -> dict:
    return {k: v.double() if v.is_floating_point() else v for k, v in strategies.tensors(program, sizes).items()}


def stored(text: str, **sizes: int) -> list[list[str]]:
    """What each stage of forward and backward writes."""
    (program,) = programs(text)
    both, late = joint(program)
    sizes = {a.name: a.extent or sizes.get(a.name, 4) for a in both.axes}
    return [[o.tensor.name for o in s.outputs] for s in assert_same(both, doubles(both, sizes), late).programs]


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_the_stages_of_a_spec_and_its_derivative_are_the_program(path: Path) -> None:
    for program in programs(path.read_text()):
        sizes = {a.name: a.extent or {"m": 5, "d": 7}.get(a.name, 6) for a in program.axes}
        forward = assert_same(tidy(program), doubles(program, sizes))
        products = sum(e.op == "contract" for e in program.eqns)
        most = 2 if path.stem == "lm_mean_loss" else max(products, 1)  # which sums what a row was reduced to
        assert len(forward.programs) <= most, "one product is one stage"
        both, late = joint(program)
        assert_same(both, doubles(both, sizes), late)


@given(strategies.programs())
@settings(deadline=None)
def test_the_stages_of_random_programs_and_their_derivatives_are_the_program(g: strategies.Generated) -> None:
    both, late = joint(g.program)
    assert_same(tidy(g.program), {k: v.double() if v.is_floating_point() else v for k, v in g.tensors().items()})
    assert_same(both, doubles(both, g.extents), late)


def test_the_backward_reads_a_stored_preactivation_instead_of_saving_it_again() -> None:
    text = (Path(__file__).parent.parent / "specs" / "swiglu.coda").read_text()
    first, second, *products = stored(text)
    assert sorted(first) == ["y", "z"] and len(second) == 1 and sorted(p[0] for p in products) == ["d_w", "d_x"]


def test_fewer_bytes_win_between_values_and_the_accumulator_they_come_from() -> None:
    text = "program p(x: bf16[m, k], w: bf16[n, k], b: f32[n]) -> (y: bf16[m, n])\ny = silu(x @ w + b)\n"
    assert len(stored(text)[0]) == 2, "y and one pre-activation, not the three factors of its slope"


def test_a_gradient_that_is_its_cotangent_needs_no_kernel() -> None:
    both, late = joint(programs("program p(x: bf16[m, k], w: bf16[n, k], r: bf16[m, n]) -> (y: bf16[m, n])\ny = x @ w + r\n")[0])
    assert cut(both, late).same == (("d_r", "d_y"),)


def test_two_products_in_a_row_are_two_stages_with_the_rounded_value_between() -> None:
    text = "program p(x: bf16[m, k], w: bf16[n, k], v: bf16[j, n]) -> (y: bf16[m, j])\ny = relu(x @ w) @ v\n"
    (program,) = programs(text)
    stages = assert_same(tidy(program), doubles(program, {"m": 3, "k": 4, "n": 5, "j": 2})).programs
    assert len(stages) == 2 and [o.tensor.dtype.name for o in stages[0].outputs] == ["bf16"]


def test_a_norm_between_two_products_is_a_map_stage_without_laws() -> None:
    text = """
program p(a: bf16[m, h], w: bf16[d, h], g: bf16[d], v: bf16[n, d]) -> (x: bf16[m, d], y: bf16[m, n])
x = a @ w
y = (x * rsqrt(mean[d](x * x) + 1e-5) * g) @ v
"""
    (program,) = programs(text)
    stages = assert_same(tidy(program), doubles(program, {"m": 3, "h": 4, "d": 5, "n": 2})).programs
    assert [any(e.op == "contract" for e in s.eqns) for s in stages] == [True, False, True]
