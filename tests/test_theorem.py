"""The claims of docs/theorem.md, each on the plans that the compiler makes: curated programs and random ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import strategies  # noqa: E402
from conftest import ROOT  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402

from coda_lang import driver, gradcheck, passes  # noqa: E402
from coda_lang.backend_cute import torch_fns, twin  # noqa: E402
from coda_lang.ir import interp  # noqa: E402
from coda_lang.ir.graph import Program, Tensor  # noqa: E402
from coda_lang.ir.kernels import Finish, Gemm, Read, Reduce  # noqa: E402
from coda_lang.passes import training, training_report  # noqa: E402
from coda_lang.passes.alike import alike  # noqa: E402
from coda_lang.passes.state import State  # noqa: E402
from coda_lang.source import Source  # noqa: E402

NAMES = ("swiglu", "geglu", "head_rmsnorm", "qkv_rope", "lm_head_lse", "linear_bias_gelu", "attention_in", "residual_sumsq")


def programs() -> list[Program]:
    return [
        p for name in NAMES for p in driver.programs(Source(f"{name}.coda", (ROOT / "specs" / f"{name}.coda").read_text(encoding="utf-8")))
    ]


EACH = pytest.mark.parametrize("program", programs(), ids=lambda p: p.name)
some = settings(max_examples=15, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def local(state: State, size: dict[str, int], given: dict) -> int:
    """Claim 1 of one kernel: changing its accumulators (without a product: its tiles) at one row and group changes no value elsewhere.

    How many values were looked at.
    """
    place, program = state.placement, state.program
    assert place is not None
    anchor = place.anchor
    sums = {a.var.name: a.var for a in anchor.accumulators}
    inputs = [Tensor(n, v.ty.dtype, v.ty.axes) for n, v in sums.items()]
    open_ = replace(program, inputs=(*program.inputs, *inputs), eqns=tuple(e for e in program.eqns if e.out.name not in sums))
    wide = (
        {t.name for t in program.inputs if {*anchor.rows, *anchor.cols} <= set(t.axes) and t.dtype.kind == "float"} if not sums else set()
    )
    values = {
        t.name: given[t.name] if t.name in given else torch.rand([size[a] for a in t.axes], dtype=torch.float64) for t in open_.inputs
    }
    row = {a: size[a] - 1 for a in anchor.rows}
    group = frozenset().union(*place.suffixes) if place.suffixes else frozenset()
    col = {a: size[a] - 1 for a in anchor.cols if a not in group}

    def here(axes: tuple[str, ...]) -> tuple:
        fixed = row | col
        return tuple(fixed.get(a, slice(None)) for a in axes)

    changed = dict(values)
    for t in open_.inputs:
        if t.name in sums or t.name in wide:
            changed[t.name] = values[t.name].clone()
            changed[t.name][here(t.axes)] += 0.37
    before, after = (interp.values(open_, v, torch, "exact", size) for v in (values, changed))
    frame = interp.frame_of(open_, values, size)
    checked = 0
    for e in open_.eqns:
        p = place.places.get(e.out.name)
        if p is None or p.level != "tile":
            continue
        along = p.along()
        if any(at.start or size[a] != size[at.axis] for a, at in along.items()) or not set(anchor.rows) <= {
            at.axis for at in along.values()
        }:
            continue  # a run has other coordinates
        full = [before[e.out.name], after[e.out.name]]
        axes = e.out.ty.axes
        one, two = (frame.take(x, axes).clone() for x in full)
        fixed = {a: (row | col).get(along[a].axis) for a in axes if a in along}
        index = tuple(slice(None) if fixed.get(a) is None else fixed[a] for a in axes)
        one[index] = two[index] = 0
        assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(two)), f"{e.out.name} changed elsewhere"
        checked += 1
    return checked


def doubles(given: dict) -> dict:
    return {k: v.double() if v.is_floating_point() else v for k, v in given.items()}


def kernels(program: Program) -> list[State]:
    """The placed kernels of a program."""
    state = passes.states(program, "place")
    return list(state.stages or (state,))


@EACH
def test_claim_1_a_value_of_the_tile_depends_on_its_own_group_only(program: Program) -> None:
    size = gradcheck.default_extents(program)
    given = doubles(gradcheck.inputs(program, size))
    for state in kernels(program):
        local(state, size, given)


def test_claim_1_is_checked_on_many_values() -> None:
    found = []
    for program in programs():
        size = gradcheck.default_extents(program)
        found += [local(state, size, doubles(gradcheck.inputs(program, size))) for state in kernels(program)]
    assert sum(found) > 30


@some
@given(strategies.programs())
def test_claim_1_of_random_programs(g: strategies.Generated) -> None:
    for state in kernels(g.program):
        local(state, dict(g.extents), doubles(g.tensors()))


@EACH
def test_claim_2_the_gradient_of_the_product_is_of_the_tile(program: Program) -> None:
    plan = passes.trained(program)
    assert plan.derived is not None
    backward = plan.derived.backward.program
    size = gradcheck.default_extents(program) | {a.name: a.extent for a in backward.axes if a.extent}
    given = doubles(gradcheck.inputs(backward, {a.name: size[a.name] for a in backward.axes}))
    for part in plan.derived.backward.parts:
        local(passes.states(part.program, "place"), {a.name: size[a.name] for a in part.program.axes}, given)


@EACH
def test_claim_3_gradients_of_vectors_are_partial_sums_and_finishers(program: Program) -> None:
    plan = passes.trained(program)
    assert plan.derived is not None
    gradients = dict(plan.derived.gradients)
    matrices = {o.tensor for p in plan.parts for k in p.kernels if isinstance(k, Gemm) for x in k.products for o in (x.a, *x.b)}
    for t in program.inputs:
        tile = any(set(t.axes) == set(o.value.ty.axes) for o in program.outputs)
        if t.name not in gradients or t.name in matrices or tile:
            continue
        part = next(p for p in plan.derived.backward.parts if any(o.tensor.name == gradients[t.name] for o in p.program.outputs))
        partials = [s for k in part.kernels if isinstance(k, Gemm) for s in k.sinks if isinstance(s, Reduce)]
        assert partials and all(s.kind == "sum" for s in partials)
        assert any(isinstance(k, Finish) and any(r.tensor == gradients[t.name] for r in k.results) for k in part.kernels)


def test_claim_3_a_head_norms_weight_is_summed_over_rows_and_heads() -> None:
    (program,) = [p for p in programs() if p.name == "head_rmsnorm"]
    plan = passes.trained(program)
    assert plan.derived is not None
    finishers = [k for k in plan.derived.backward.kernels if isinstance(k, Finish)]
    assert [k.over for k in finishers] == ["col", "part"]


def assert_boundaries(program: Program) -> None:
    """Claim 4: no Gemm or map kernel reads a work tensor, and what stands between kernels has one of the three reasons."""
    plan = passes.trained(program)
    for made in (plan, plan.derived.backward) if plan.derived else (plan,):
        works = {s.work for k in made.kernels if isinstance(k, Gemm) for s in k.sinks if isinstance(s, Reduce)}
        for part in made.parts:
            for k in part.launched:
                reads = {p.access.tensor for p in k.ports if isinstance(p, Read)}
                if isinstance(k, Gemm):
                    assert not reads & works
            written = {o.tensor.name for o in part.program.outputs}
            assert not written & {t.name for t in part.program.inputs}
        for t in made.temps:
            assert any(x.name == t.name for p in made.parts for x in p.program.inputs), f"{t.name} is stored for nobody"


@EACH
def test_claim_4_a_kernel_ends_where_a_whole_reduction_is_used(program: Program) -> None:
    assert_boundaries(program)


@pytest.mark.slow
@some
@given(strategies.programs())
def test_claim_4_of_random_programs(g: strategies.Generated) -> None:
    assert_boundaries(g.program)


@EACH
def test_claim_5_saving_changes_no_bit(program: Program) -> None:
    plan = passes.trained(program)
    assert plan.derived is not None
    if plan.derived.saving is None:
        return
    assert alike(plan, plan.derived.saving)
    fn = gradcheck.function_of(plan)
    given = gradcheck.inputs(program, gradcheck.default_extents(program))
    one = twin.run(fn.program, fn.functions, given, f=torch_fns.Written())
    two = twin.run(fn.saving, fn.functions, given, f=torch_fns.Written())
    for name, value in one.items():
        assert torch.equal(value.nan_to_num(3.0), two[name].nan_to_num(3.0))


def test_the_plan_gives_each_decision_with_its_reason() -> None:
    (program,) = [p for p in programs() if p.name == "head_rmsnorm"]
    plan = passes.trained(program)
    found = {d.value: d for d in training_report.decisions(plan)}
    assert {d.where for d in found.values()} >= {training_report.MAP, training_report.PARTIAL, training_report.PRODUCT}
    assert found["d_g"].where == training_report.PARTIAL and found["d_x"].where == training_report.EPILOGUE
    text = training_report.text(plan)
    assert "saved for the backward: " in text and "PyTorch's autograd of the program, op by op, would save" in text
    assert "computing it again instead costs" in text and "give the value a name" in text and training.differentiable(program)
