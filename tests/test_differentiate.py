"""`passes.differentiate` against torch.autograd of the interpreter, in float64: curated programs, random ones, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import strategies
from hypothesis import given, settings

from coda_lang.diagnostics.model import CodaError
from coda_lang.ir import interp
from coda_lang.ir.build import build
from coda_lang.ir.graph import Program
from coda_lang.ir.verify import verify
from coda_lang.passes.differentiate import differentiate
from coda_lang.source import Source
from coda_lang.syntax.parse import parse

torch = pytest.importorskip("torch")
SPECS = sorted((Path(__file__).parent.parent / "specs").glob("*.coda"))
TOLERANCE = 2e-7  # constants of derivative rules are f32


def programs(text: str, file: str = "test.coda") -> tuple[Program, ...]:
    source = Source(file, text)
    return build(parse(source), (source,))


def one(text: str) -> Program:
    return programs(text)[0]


def gradients(program: Program, given: dict) -> dict[str, tuple]:
    """For each differentiable input: (the derived gradient, torch's)."""
    derived = differentiate(program)
    verify(derived.program)
    given = {k: v.double().requires_grad_() if v.is_floating_point() else v for k, v in given.items()}
    out = interp.run(program, given, torch, "exact")
    seeded = torch.Generator().manual_seed(1)
    cotangents = {c: torch.randn(out[o].shape, dtype=torch.float64, generator=seeded) for o, c in derived.cotangents}
    loss = sum((out[o] * cotangents[c]).sum() for o, c in derived.cotangents)
    leaves = [given[i] for i, _ in derived.gradients]
    reference = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    got = interp.run(derived.program, {**{k: v.detach() for k, v in given.items()}, **cotangents}, torch, "exact")
    return {i: (got[n], torch.zeros_like(leaf) if r is None else r) for (i, n), leaf, r in zip(derived.gradients, leaves, reference)}


def assert_equal(pairs: dict[str, tuple]) -> None:
    for name, (got, reference) in pairs.items():
        assert got.shape == reference.shape, name
        assert (got - reference).norm() <= TOLERANCE * reference.norm(), name


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_gradients_of_a_spec_are_torchs(path: Path) -> None:
    for program in programs(path.read_text(), path.name):
        sizes = {a.name: a.extent or {"m": 5, "d": 7}.get(a.name, 6) for a in program.axes}
        assert_equal(gradients(program, strategies.tensors(program, sizes)))


@given(strategies.programs())
@settings(deadline=None)
def test_gradients_of_random_programs_are_torchs(g: strategies.Generated) -> None:
    assert_equal(gradients(g.program, g.tensors()))


def test_each_operand_has_a_gradient_of_its_own_shape_and_dtype() -> None:
    signature = "program p(x: bf16[m, k], w: bf16[n, k], b: f32[n], c: f16[m], s: f32[], t: bf16[m, n]) -> (y: bf16[m, n])"
    p = one(f"{signature}\ny = (x @ w + b) * c * s + t\n")
    outputs = {o.tensor.name: o.tensor for o in differentiate(p).program.outputs}
    for t in p.inputs:
        assert (outputs[f"d_{t.name}"].dtype, outputs[f"d_{t.name}"].axes) == (t.dtype, t.axes)


def test_integers_const_and_stopped_values_have_no_gradient() -> None:
    signature = "program p(x: bf16[m, k], w: bf16[n, k], const c: f32[n], i: i32[m], s: f32[n]) -> (y: f32[m, n])"
    p = one(f"{signature}\ny = (x @ w) * c + i + stop_gradient(s)\n")
    derived = differentiate(p)
    assert [i for i, _ in derived.gradients] == ["x", "w", "s"]
    sizes = {"m": 3, "k": 4, "n": 5}
    assert gradients(p, strategies.tensors(p, sizes))["s"][0].abs().max() == 0


def test_an_input_used_twice_sums_its_gradients() -> None:
    p = one("program p(x: bf16[m, k], w: bf16[n, k], b: f32[n]) -> (y: f32[m, n], z: f32[m, n])\nv = x @ w + b\ny = v * b\nz = v + b\n")
    assert_equal(gradients(p, strategies.tensors(p, {"m": 3, "k": 4, "n": 5})))


def test_the_branch_not_taken_contributes_nothing_even_if_nan() -> None:
    p = one("program p(x: bf16[m, k], w: bf16[n, k], b: f32[n]) -> (y: f32[m, n])\nv = x @ w\ny = where(b > 0.0, v * log(b), v)\n")
    given = strategies.tensors(p, {"m": 3, "k": 4, "n": 6})
    given["b"] = torch.tensor([-1.0, 2.0, -3.0, 0.5, -0.25, 1.0])
    pairs = gradients(p, given)
    assert torch.isfinite(pairs["b"][0]).all() and torch.isfinite(pairs["x"][0]).all()


def test_operands_of_derived_products_are_rounded_to_the_forwards_type() -> None:
    p = one("program p(x: f16[m, k], w: f16[n, k]) -> (y: f32[m, n])\ny = tanh(x @ w)\n")
    products = [e for e in differentiate(p).program.eqns if e.op == "contract"]
    assert len(products) == 3 and all(a.ty.dtype.name == "f16" for e in products for a in e.args)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("C0511", "forward program p(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n"),
        ("C0512", "program p(const x: bf16[m, k], const w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n"),
        ("C0513", "program p(x: bf16[m, k], w: bf16[n, k]) -> (y: i32[m])\ny = index[m]\n"),
    ],
)
def test_refusals(code: str, text: str) -> None:
    with pytest.raises(CodaError) as e:
        differentiate(one(text))
    assert [d.code for d in e.value.diagnostics] == [code]
