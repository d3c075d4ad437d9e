"""`passes.normalise`: each use of a law keeps the float64 meaning; where it applies and where not; what falls out of it in the backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_stages import assert_same, doubles, programs, tidy

from coda_lang import passes
from coda_lang.ir import interp
from coda_lang.ir.graph import Program
from coda_lang.ir.verify import verify
from coda_lang.passes.differentiate import differentiate
from coda_lang.passes.laws import scale_out
from coda_lang.passes.stages import Stages

torch = pytest.importorskip("torch")

MLP_BLOCK = """
program mlp_block(a: bf16[m, h], x0: bf16[m, d], wo: bf16[d, h], g: bf16[d], w: bf16[lane=2, f, d], wd: bf16[d, f]) -> (x2: bf16[m, d])
x1: bf16 = a @ wo + x0
gate, up = rmsnorm[d](x1, g, 1e-5) @ w
x2 = (silu(gate) * up) @ wd + x1
"""
LM_HEAD = """
program lm_head(x: bf16[m, d], g: bf16[d], w: bf16[v, d], target: i64[m]) -> (loss: f32[m])
z = rmsnorm[d](x, g, 1e-5) @ w
loss = where(target == -100, 0.0, logsumexp[v](z) - gather[v](z, target))
"""
DEQUANTISE = "program p(x: bf16[m, k], s: f32[m], w: bf16[n, k], c: f32[n]) -> (y: bf16[m, n])\ny = bf16(x * s) @ bf16(c * w)\n"
QUOTIENT = "program p(x: bf16[m, k], g: f32[k], s: f32[m], w: bf16[n, k]) -> (y: bf16[m, n])\ny = (x * g / (1.0 + s * s)) @ w\n"
SHIFTED = "program p(x: bf16[m, k], s: f32[m], w: bf16[n, k]) -> (y: bf16[m, n])\ny = (x * s + 1.0) @ w\n"
CONTRACTED = "program p(x: bf16[m, k], g: f32[k], w: bf16[n, k]) -> (y: bf16[m, n])\ny = (x * g) @ w\n"
SHOWN = "program p(x: bf16[m, k], s: f32[m], w: bf16[n, k]) -> (y: bf16[m, n], n: bf16[m, k])\nn = x * s\ny = n @ w\n"
HALF = "program p(x: f16[m, k], s: f32[m], w: f16[n, k]) -> (y: f16[m, n])\ny = (x * s) @ w\n"

SUMMED = """
program lora(x: bf16[m, k], w: bf16[n, k], a: bf16[r, k], b: bf16[n, r]) -> (y: bf16[m, n])
y = x @ w + (2.0 * (x @ a)) @ b
"""

SIZES = {"r": 2, "m": 5, "h": 4, "d": 6, "k": 7, "n": 3, "f": 8, "v": 9}


def moved(text: str) -> tuple[Program, Program, tuple]:
    program = tidy(programs(text)[0])
    out, uses = scale_out.rewrite(program)
    return program, verify(tidy(out)), uses


def sizes(program: Program) -> dict[str, int]:
    return {a.name: a.extent or SIZES.get(a.name, 4) for a in program.axes}


def stages(text: str) -> tuple[Stages, Stages, Program]:
    """The forward's stages, and those of forward and backward together, after the laws."""
    _, program, _ = moved(text)
    derived = differentiate(program)
    both = tidy(replace(derived.program, outputs=(*program.outputs, *derived.program.outputs)))
    late = frozenset(c for _, c in derived.cotangents)
    return assert_same(program, doubles(program, sizes(program))), assert_same(both, doubles(both, sizes(both)), late), both


def products(stage: Program) -> int:
    return sum(e.op == "contract" for e in stage.eqns)


@pytest.mark.parametrize("text", [MLP_BLOCK, LM_HEAD, DEQUANTISE, QUOTIENT])
def test_a_moved_scale_keeps_the_meaning_and_every_gradient(text: str) -> None:
    before, after, uses = moved(text)
    assert uses
    given = doubles(before, sizes(before))
    for name, value in interp.run(before, given, torch, "exact").items():
        torch.testing.assert_close(interp.run(after, given, torch, "exact")[name], value)
    first, second = differentiate(before), differentiate(after)
    given = doubles(first.program, sizes(before))
    whole = interp.run(second.program, given, torch, "exact")
    for name, value in interp.run(first.program, given, torch, "exact").items():
        torch.testing.assert_close(whole[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("text", "factors"), [(MLP_BLOCK, 1), (DEQUANTISE, 2), (QUOTIENT, 1)])
def test_each_use_says_what_moved_and_what_is_rounded_now(text: str, factors: int) -> None:
    _, _, (use,) = moved(text)
    assert use.law.name == "scale moves out" and len(use.moved) == factors and use.rounds


def test_a_stored_operand_left_alone_by_its_scale_is_used_as_it_is() -> None:
    _, program, _ = moved(DEQUANTISE)
    (product,) = [e for e in program.eqns if e.op == "contract"]
    assert [a.name for a in product.args] == ["x", "w"]


REFUSED = {"sum": SHIFTED, "contracted axis": CONTRACTED, "stored product": SHOWN, "f16": HALF, "two products": SUMMED}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_no_scale_moves_where_the_law_does_not_hold_or_gains_nothing(text: str) -> None:
    program, after, uses = moved(text)
    assert not uses and after == program


def test_strict_moves_nothing() -> None:
    (program,) = programs(MLP_BLOCK)
    assert passes.prepared(program, strict=True) == tidy(program) != passes.prepared(program)
    loose, strict = passes.trained(program), passes.trained(program, strict=True)
    assert any(n.startswith("scale moves out") for n in loose.notes) and not any(n.startswith("scale moves out") for n in strict.notes)
    assert len(strict.parts) > len(loose.parts) == 3 and loose.written == strict.program


def test_the_mlp_block_is_nine_products_and_no_pass_beside_them() -> None:
    forward, both, _ = stages(MLP_BLOCK)
    assert [products(s) for s in forward.programs] == [1, 1, 1]
    assert [products(s) for s in both.programs] == [1] * 9, "three forward, a dgrad and a wgrad for each of three weights"


def test_the_backward_of_the_norm_falls_out_where_dz_is_made() -> None:
    _, both, _ = stages(MLP_BLOCK)
    of_dz = next(s for s in both.programs if any(t.name == "d_x2" for t in s.inputs) and any(t.name == "wd" for t in s.inputs))
    rows = [o for o in of_dz.outputs if o.tensor.axes == ("m",)]
    assert len(rows) == 1, "the row sums of z * dz leave the GEMM that makes dz"
    of_dx = next(s for s in both.programs if any(o.tensor.name == "d_g" for o in s.outputs))
    assert {"d_x0", "d_g"} <= {o.tensor.name for o in of_dx.outputs} and any(t.name == rows[0].tensor.name for t in of_dx.inputs)
