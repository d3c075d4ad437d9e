"""Programs of several kernels: what they compute, where they are cut, what stands between, map kernels, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from test_emit import errors, module  # noqa: E402
from test_passes import SEVERAL  # noqa: E402

from coda_lang import driver, gradcheck, passes  # noqa: E402
from coda_lang.backend_cute import spec as s  # noqa: E402
from coda_lang.backend_cute import torch_fns, twin  # noqa: E402
from coda_lang.backend_cute.emit import emit  # noqa: E402
from coda_lang.backend_cute.lower import lower  # noqa: E402
from coda_lang.diagnostics.catalog import CATALOG  # noqa: E402
from coda_lang.diagnostics.model import CodaError  # noqa: E402
from coda_lang.ir import interp  # noqa: E402
from coda_lang.ir.graph import Program  # noqa: E402
from coda_lang.ir.kernels import Finish, Gemm, Plan  # noqa: E402
from coda_lang.passes import several  # noqa: E402
from coda_lang.source import Source  # noqa: E402

SPECS = Path(__file__).resolve().parent.parent / "specs"

PROGRAMS = {
    **{e.code: e.wrong for e in CATALOG.values() if e.kind == "reason"},
    **{name: "\n".join([head + outputs, *lines, ""]) for name, (_, head, outputs, *lines) in SEVERAL.items()},
    "mlp": "program p(x: bf16[m, k], w: bf16[n, k], v: bf16[j, n]) -> (y: bf16[m, j])\ny = relu(x @ w) @ v\n",
    "three products": """
program p(x: bf16[m, d], w: bf16[n, d], v: bf16[j, n], u: bf16[d, j]) -> (y: bf16[m, d], t: bf16[m, n])
t = tanh(x @ w)
y = relu(t @ v) @ u + x
""",
    "a norm between products": """
program p(a: bf16[m, h], w: bf16[d, h], g: bf16[d], v: bf16[n, d]) -> (x: bf16[m, d], y: bf16[m, n])
x = a @ w
y = (x * rsqrt(mean[d](x * x) + 1e-5) * g) @ v
""",
    "heads contracted": """
program p(x: bf16[m, d], w: bf16[head, hd=8, d], o: bf16[n, head, hd]) -> (y: bf16[m, n])
y = relu(x @ w) @ o
""",
    "heads contracted in another order": """
program p(x: bf16[m, d], w: bf16[head, hd=8, d], o: bf16[n, hd, head]) -> (y: bf16[m, n])
y = relu(x @ w) @ o
""",
    "an activation": "program p(x: bf16[m, k], b: bf16[k]) -> (y: bf16[m, k])\ny = silu(x + b)\n",
    "one axis": "program p(x: f32[m]) -> (y: f32[m], s: f32[])\ny = exp(x)\ns = sum[m](y)\n",
    "scalars": "program p(a: f32[], b: f32[]) -> (c: f32[])\nc = a * b + 1.0\n",
    "softmax": "program p(x: f32[m, n]) -> (y: bf16[m, n])\ny = softmax[n](x)\n",
    "rmsnorm": "program p(x: bf16[m, d], g: bf16[d]) -> (y: bf16[m, d])\ny = rmsnorm[d](x, g, 1e-5)\n",
    "layernorm": "program p(x: bf16[m, d], g: bf16[d], b: bf16[d]) -> (y: bf16[m, d])\ny = layernorm[d](x, g, b, 1e-5)\n",
    "a norm within a tile": "program p(x: bf16[m, d=64], g: bf16[d]) -> (y: bf16[m, d])\ny = rmsnorm[d](x, g, 1e-5)\n",
    "cross-entropy": "program p(z: bf16[m, v], t: i64[m]) -> (l: f32[m])\nl = cross_entropy[v](z, t)\n",
    "heads summed": "program p(x: bf16[m, head, hd=8]) -> (s: f32[hd], t: f32[m, head], u: f32[m, hd])\n"
    "s = sum[m, head](x)\nt = sum[hd](x)\nu = max[head](x)\n",
    "lanes of a column sum": "program p(x: bf16[m, f, lane=2]) -> (s: f32[f, lane], g: f32[lane])\na, b = x\n"
    "s = sum[m](pack[lane](a * b, a))\ng = sum[f](s)\n",
    "runs of an input": "program p(x: bf16[m, head=6, hd=8]) -> (q: bf16[m, a=4, hd], k: bf16[m, b=2, hd])\n"
    "q0, k0 = split[head -> a, b](x)\nq = relu(q0)\nk = tanh(k0)\n",
    "transposed": "program p(x: bf16[m, n]) -> (y: bf16[n, m])\ny = x\n",
    "passed on": "program p(x: bf16[m, d], v: bf16[n, d], w: bf16[e, n]) -> (y: bf16[m, e], x2: bf16[m, d])\ny = (x @ v) @ w\nx2 = x\n",
}


def only(text: str) -> Program:
    (program,) = driver.programs(Source("p.coda", text))
    return program


def plan(name: str) -> Plan:
    return passes.run(only(PROGRAMS[name]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_several_kernels_compute_what_the_program_means(name: str, tmp_path: Path) -> None:
    program = only(PROGRAMS[name])
    fn = getattr(module(emit([passes.run(program)]), tmp_path), program.name)
    for (output, way, exact), error in errors(program, fn, (5, 7, 24, 3)).items():
        assert error <= (1e-12 if exact else 2**-7), f"{output} by {way}, exact={exact}: off by {error}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_between_kernels_is_copied(name: str) -> None:
    made = plan(name)
    temps = {t.name for t in made.temps}
    assert not [x.tensor for x in made.layouts if x.copy and x.tensor in temps]


# --- between kernels -------------------------------------------------------------------------------------------------------


def test_what_stands_between_is_in_the_record() -> None:
    record = lower(plan("mlp"))
    (temp,) = record.temps
    assert (temp.dtype, len(record.kernels)) == ("bf16", 2)
    writer, reader = record.kernels
    assert isinstance(writer, s.Gemm) and isinstance(reader, s.Gemm)
    assert [t.role for t in writer.tensors if t.name == temp.name] == ["temp"] == [t.role for t in reader.tensors if t.name == temp.name]
    assert reader.products[0].a.tensor == temp.name


def test_contracted_axes_are_stored_as_the_other_operand_has_them() -> None:
    for name, order in (("heads contracted", ("head", "hd")), ("heads contracted in another order", ("hd", "head"))):
        (temp, *more) = plan(name).temps
        inner = (temp, *more)[-1].axes[-2:]
        assert inner == order


def test_outputs_that_are_inputs_have_no_kernel() -> None:
    made = plan("passed on")
    assert made.same == (("x2", "x"),) and lower(made).same == made.same
    assert len(plan("transposed").kernels) == 1, "another order is another tensor"


def test_a_program_that_one_kernel_computes_is_one() -> None:
    for text in ("y = silu(x @ w)", "y = rmsnorm[n](x @ w, b, 1e-5)"):
        made = passes.run(only(f"program p(x: bf16[m, k], w: bf16[n=64, k], b: bf16[n]) -> (y: bf16[m, n])\n{text}\n"))
        assert not made.stages and not made.why


# --- map kernels -----------------------------------------------------------------------------------------------------------


def test_a_map_kernel_has_tiles_in_place_of_the_accumulator() -> None:
    (kernel,) = lower(plan("an activation")).kernels
    assert isinstance(kernel, s.Gemm) and kernel.products == () and kernel.segments == 1
    assert [type(p).__name__ for p in kernel.ports] == ["Tile", "Load"] and (kernel.rows, kernel.cols) == (("m",), ("k",))


def test_a_single_axis_has_no_tiles() -> None:
    for kernel in lower(plan("one axis")).kernels:
        assert not any(isinstance(p, s.Tile) for p in kernel.ports)
        assert isinstance(kernel, s.Finish) or kernel.rows == ()
    assert all(isinstance(k, Finish) for k in plan("scalars").launched)


def test_columns_of_a_map_kernel_are_contiguous() -> None:
    made = passes.run(only("program p(x: bf16[b, t, d]) -> (y: bf16[b, t, d])\ny = exp(x)\n"))
    assert made.gemm.cols[-1] == "d" and not any(x.copy for x in made.layouts)


def test_a_sum_over_rows_and_heads_is_finished_in_two_steps() -> None:
    finishers = [k for k in plan("heads summed").kernels if isinstance(k, Finish)]
    assert ("hd",) in [k.axes for k in finishers]


LANES = ", ".join(f"a{i}" for i in range(64))
PAIRS = " + ".join(f"a{2 * i} * a{2 * i + 1}" for i in range(32))
WIDE = {
    "64 accumulators": f"forward program p(x: bf16[m, d], w: bf16[f, lane=64, d]) -> (y: bf16[m, f])\n{LANES} = x @ w\ny = {PAIRS}\n",
    "64 tiles": f"forward program p(x: bf16[m, lane=64, f]) -> (y: bf16[m, f])\n{LANES} = x\ny = {PAIRS}\n",
}
BOTH_WAYS = {
    "a product of a lane's weight": """
program p(x: bf16[m, d], w: bf16[f, lane=2, d]) -> (y: bf16[m, lane, d])
g, u = x @ w
y = matmul[f](silu(g) * u, w)
""",
    "a minimum, then a product": """
program p(x: bf16[m, d], w: bf16[h, e, d], v: bf16[n, e]) -> (y: bf16[m, n])
y = matmul[e](min[h](x @ w), v)
""",
    "a maximum over a run": """
program p(x: bf16[m, k], w: bf16[head=12, hd=64, k]) -> (y: f32[m, qh], z: bf16[m, kh, hd])
q, z = split[head -> qh=8, kh=4](x @ w)
y = max[hd](q)
""",
    "64 lanes in a column": """
program p(x: bf16[m, d], w: bf16[f, lane=64, d], g: f32[lane]) -> (y: bf16[m, f, lane])
y = rmsnorm[lane](x @ w, g, 1e-5)
""",
}


@pytest.mark.parametrize("name", WIDE)
def test_what_no_tile_holds_is_done_in_parts(name: str) -> None:
    program = only(WIDE[name])
    made = passes.run(program)
    lower(made)
    assert len(made.parts) > 1
    fn, given = gradcheck.function_of(made), gradcheck.inputs(program, gradcheck.default_extents(program))
    doubles = {name: t.double() for name, t in given.items()}
    expected = interp.run(program, doubles, torch, "exact")
    found = twin.run(fn.program, fn.functions, doubles, f=torch_fns.Exact(), extents=gradcheck.default_extents(program))
    torch.testing.assert_close(found["y"], expected["y"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_what_runs_forward_runs_backward(name: str) -> None:
    found = list(gradcheck.check(only(BOTH_WAYS[name]), most=3))
    assert found and all(f.good for f in found), "\n".join(str(f) for f in found if not f.good)


def test_a_refusal_names_the_kernel_that_fails_and_says_why_there_are_several() -> None:
    packed = ", ".join(f"silu(a{i}) * a{63 - i}" for i in range(64))
    text = f"{LANES} = x\ny = pack[lane]({packed})\nz = a0 @ w\n"
    with pytest.raises(CodaError) as e:
        passes.run(only(f"program p(x: bf16[m, lane=64, d], w: bf16[n, d]) -> (y: bf16[m, lane, d], z: bf16[m, n])\n{text}"))
    (problem,) = e.value.diagnostics
    assert problem.code == "C0601" and problem.notes[-1].startswith("the program takes 2 kernels: ")


# --- what is said ----------------------------------------------------------------------------------------------------------


def test_the_text_after_each_pass_has_all_stages() -> None:
    program = only(PROGRAMS["a norm between products"])
    for name in passes.names()[passes.names().index("cut") :]:
        text = passes.after(program, name)
        assert "p_x" in text and "p_y" in text, name


def test_the_report_says_what_is_stored_and_for_whom() -> None:
    text = passes.report(plan("mlp"))
    assert "several kernels, because:\n  C0401" in text and "an operand of p_y" in text and "leaves " in text


def test_kernels_are_named_after_what_they_write() -> None:
    made = plan("a norm between products")
    names = [k.name for k in made.kernels]
    assert len(set(names)) == len(names) and names[0].startswith("p_x") and names[-1] == "p_y"
    assert isinstance(made.kernels[-1], Gemm)


@pytest.mark.slow
def test_statistics_stand_apart_where_a_tile_would_hold_too_much():
    """The gradient of a joined projection selects among runs, each with a statistic of its own: every element of every run would stay in
    registers from the statistic to its use. Two passes over memory are faster."""
    (plan,) = driver.plan(SPECS / "attention_in.coda")
    stages = plan.derived.backward.stages
    joined = next(p for p in stages if any(e.op == "join" for e in p.program.eqns))
    assert len(joined.gemm.phases) == 1 and len(joined.gemm.ports) > 12
    assert all(several._held(p.program) <= several.MOST_HELD for p in stages if not p.gemm.products)
    source = (SPECS / "head_rmsnorm.coda").read_text()  # within the limit: one pass
    (norm,) = driver.plan(Source("head_rmsnorm.coda", source))
    assert any(len(p.gemm.phases) > 1 for p in norm.derived.backward.stages)
