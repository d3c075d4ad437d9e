"""`chunk v by 4096`: the same results as without, to the order of a sum; what is in memory; what cannot be chunked; the launcher's way."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import strategies  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import coda_lang  # noqa: E402
from bench import rows  # noqa: E402
from coda_lang import driver, gradcheck, passes  # noqa: E402
from coda_lang.backend_cute import arguments, autograd, derivative, host, loops, spec, torch_fns, twin  # noqa: E402
from coda_lang.backend_cute.binding import Binding  # noqa: E402
from coda_lang.backend_cute.function import fixed  # noqa: E402
from coda_lang.diagnostics.model import CodaError  # noqa: E402
from coda_lang.ir.printer import to_text  # noqa: E402
from coda_lang.ops import RENAME  # noqa: E402
from coda_lang.passes import report, training, training_report  # noqa: E402
from coda_lang.passes.memory import peak  # noqa: E402
from coda_lang.source import Source  # noqa: E402
from tests.autograd_cases import Kernels  # noqa: E402

HEAD = "(x: bf16[m, d], w: bf16[v, d], b: bf16[v], target: i64[m], weight: f32[m])"
PROGRAMS = {
    "mean": f"""
program p{HEAD} -> (loss: f32[])
loss = mean_over[m](cross_entropy[v](x @ w + b, target), target != -100)
""",
    "a row": f"""
program p{HEAD} -> (loss: f32[m], lse: f32[m])
z = softcap(x @ w + b, 4.0)
lse = logsumexp[v](z)
loss = weight * smoothed_cross_entropy[v](z, target, 0.25) + z_loss[v](z, 0.125)
""",
    "rounded logits": f"""
program p{HEAD} -> (loss: f32[m])
z: bf16 = x @ w
loss = weight * cross_entropy[v](z + b, target)
""",
    "a norm before": """
program p(x: bf16[m, d], g: f32[d], w: bf16[v, d], target: i64[m]) -> (loss: f32[])
z = rmsnorm[d](x, g, 1e-5) @ w
loss = sum[m](cross_entropy[v](z, target))
""",
    "f32 gradients": """
program p(x: f32[m, d], w: bf16[v, d], b: f32[v], target: i64[m]) -> (loss: f32[m])
loss = cross_entropy[v](bf16(x) @ w + b, target)
""",
}
ROWS = {  # chunks of rows, in forward and backward
    "mlp": """
program p(x: bf16[m, d], w: bf16[v, d], u: bf16[d, v], r: bf16[m, d]) -> (y: bf16[m, d], peak: f32[m])
h = silu(x @ w)
y = h @ u + r
peak = max[v](h)
""",
    "softmax": """
program p(x: bf16[m, d], w: bf16[v, d], u: bf16[d, v]) -> (y: bf16[m, d])
y = softmax[v](x @ w) @ u
""",
    "positions": """
program p(x: bf16[m, d], w: bf16[v, d], u: bf16[d, v]) -> (y: bf16[m, d], s: f32[v])
h = where(index[v] <= index[m], x @ w, 0.0) / f32(size[m])
y = h @ u
s = mean[m](h)
""",
    "rows in two axes": """
program p(x: bf16[n, m, d], w: bf16[v, d], u: bf16[d, v]) -> (y: bf16[n, m, d])
y = relu(x @ w) @ u
""",
}
CASES = {
    **{f"{name} by {size} of {axis}": (text, axis, size) for name, text in PROGRAMS.items() for axis, size in (("v", 16), ("m", 8))},
    **{f"{name} by 8 of m": (text, "m", 8) for name, text in ROWS.items()},
}
SHAPES = ({"m": 33, "d": 24, "v": 133, "n": 3}, {"m": 8, "d": 16, "v": 16, "n": 2}, {"m": 17, "d": 8, "v": 9, "n": 1})


@pytest.fixture(scope="module")
def compiled():
    made = {}

    def function(text, chunk=""):
        if (text, chunk) not in made:
            made[text, chunk] = coda_lang.compile(text + chunk)
        return made[text, chunk]

    return function


def drawn(fn, extents, seed=0):
    gen, made = torch.Generator().manual_seed(seed), []
    for a in fn.program.inputs:
        shape = [extents[x] for x in a.axes]
        if a.dtype == "i64":
            t = torch.randint(0, max(extents["v"], 1), shape, generator=gen)
            t[1::3] = -100
        else:
            t = (torch.randn(shape, generator=gen) * 0.5).to({"bf16": torch.bfloat16, "f32": torch.float32}[a.dtype])
        made.append(t)
    return made


def upstream(fn, binding, seed=1):
    gen = torch.Generator().manual_seed(seed)
    outputs = {o.name: o for o in fn.program.outputs}
    drawn = {name: torch.randn(binding.declared(outputs[name]), generator=gen) for name, _ in fn.cotangents}
    return {n: g.bfloat16() if outputs[n].dtype == "bf16" else g for n, g in drawn.items()}


@pytest.mark.parametrize("case", CASES)
def test_chunks_change_nothing_but_the_order_of_sums(case, compiled) -> None:
    text, axis, size = CASES[case]
    plain, chunked = compiled(text), compiled(text, f"chunk {axis} by {size}\n")
    assert chunked.backward.loops and not plain.backward.loops
    for extents in SHAPES:
        tensors = drawn(plain, extents)
        for one, other in zip(*(twin_outputs(fn, tensors) for fn in (plain, chunked))):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        given = upstream(plain, plain.bind(tensors))
        want, got = (autograd.gradients_planned(fn, tensors, given) for fn in (plain, chunked))
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-12)


def twin_outputs(fn, tensors):
    inputs = {a.name: t for a, t in zip(fn.program.inputs, tensors, strict=True)}
    return list(twin.run(fn.program, fn.functions, inputs, f=torch_fns.Exact()).values())


@pytest.mark.parametrize("case", CASES)
def test_by_the_host(case, compiled, monkeypatch) -> None:
    """Forward and backward as CUDA tensors go, over poisoned buffers, with stand-ins that refuse what a kernel could not take."""
    text, axis, size = CASES[case]
    monkeypatch.setattr(host, "allocate", rows.poisoning)
    monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    fn = compiled(text, f"chunk {axis} by {size}\n")
    for extents in SHAPES:
        tensors = [t.requires_grad_(t.is_floating_point()) for t in drawn(fn, extents)]
        binding = fn.bind(tensors)
        known = {**derivative.extents(fn.backward, binding.extents), **binding.extents}
        every = [loop for p in fn.programs for loop in p.loops]
        calls: list[str] = []
        run = type(fn)(
            fn.program, fn.functions, fn._reference, saving=fn.saving, backward=fn.backward, residuals=fn.residuals,
            cotangents=fn.cotangents, gradients=fn.gradients, objects=Kernels(fn.functions, known, fixed(fn.program), calls, every),
        )  # fmt: skip
        outs = run(*tensors)
        outs = dict(zip([o.name for o in fn.program.outputs], (outs,) if isinstance(outs, torch.Tensor) else outs))
        given = upstream(fn, binding)
        got = torch.autograd.grad([outs[n] for n in given], [t for t in tensors if t.requires_grad], list(given.values()))
        want = autograd.gradients_planned(fn, [t.detach() for t in tensors], given, exact=False)
        for name, g in zip([a.name for a, t in zip(fn.program.inputs, tensors) if t.requires_grad], got, strict=True):
            torch.testing.assert_close(g, want[name].reshape(g.shape), rtol=1e-2, atol=1e-5)
        (loop,) = fn.backward.loops
        assert calls.count(loop.kernels[0]) == len(list(loops.chunks(loop, known)))


# --- memory ------------------------------------------------------------------------------------------------------------

HEAD_LOSS = """
program head(x: bf16[m, d], w: bf16[v, d], target: i64[m]) -> (loss: f32[])
logits = x @ w
loss = mean_over[m](cross_entropy[v](logits, target), target != -100)
"""
TOKENS, WIDTH, WORDS = 8192, 4096, 128256


class Nothing:
    """Executables of a device without memory."""

    whole = False

    def config(self, launch, extents, device):
        return spec.Config()

    def executables(self, wanted, device):
        return [lambda *args: None for _ in wanted]


def called(program: spec.Program, extents) -> list:
    """The results of a call on a device without memory."""
    device, kinds = torch.device("meta"), {"bf16": torch.bfloat16, "f32": torch.float32, "i64": torch.int64}
    given = [torch.empty([extents[x] for x in a.axes], dtype=kinds[a.dtype], device=device) for a in program.inputs]
    return host.plan(program, Binding(dict(extents)), given, device, Nothing()).run(given)


def allocated(program: spec.Program, extents, monkeypatch) -> int:
    """Bytes of all buffers of a call: those that it returns, and those that it needs."""
    found = []

    def allocate(shape, strides, dtype, device):
        found.append(1 + sum((n - 1) * s for n, s in zip(shape, strides)) if 0 not in shape else 0)
        found[-1] *= dtype.itemsize
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    monkeypatch.setattr(host, "allocate", allocate)
    called(program, extents)
    return sum(found)


@pytest.mark.parametrize("chunk, most, dropped", [("", 7078, 6012), ("recompute logits\n", 3070, 3070), ("chunk v by 4096\n", 1194, 1194)])
def test_memory_of_a_large_vocabulary(chunk, most, dropped, compiled, monkeypatch) -> None:
    """What a training step holds at most besides its inputs, in MiB; the gradients alone are 1066. `most` where the graph is retained;
    `dropped`, as `codac plan` says, where saved tensors are dropped at their last use."""
    fn, extents = compiled(HEAD_LOSS, chunk), {"m": TOKENS, "d": WIDTH, "v": WORDS}
    forward, saved = held(fn.saving, extents, monkeypatch)
    backward, gradients = held(fn.backward, extents, monkeypatch)
    assert gradients == pytest.approx(2 * WIDTH * (TOKENS + WORDS), rel=1e-4)
    assert max(forward, saved + backward) / 2**20 == pytest.approx(most, abs=1)
    (plan,) = driver.plan(Source("head.coda", HEAD_LOSS + chunk + "nominal m = 8192, v = 128256, d = 4096\n"))
    assert peak(plan).total / 2**20 == pytest.approx(dropped, abs=1)


def held(program: spec.Program, extents, monkeypatch) -> tuple[int, int]:
    """Bytes of a call's buffers: the most at a time, and those that it returns."""
    now, most = 0, 0

    def allocate(shape, strides, dtype, device):
        nonlocal now, most
        t = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        size = t.untyped_storage().nbytes()
        now += size
        most = max(most, now)

        def drop() -> None:
            nonlocal now
            now -= size

        weakref.finalize(t.untyped_storage(), drop)
        return t

    monkeypatch.setattr(host, "allocate", allocate)
    kept = called(program, extents)
    return most, now if kept else 0


def test_chunks_of_rows_hold_the_weights_gradient_in_f32(compiled, monkeypatch) -> None:
    """Why a head is better chunked along its vocabulary."""
    extents, gradients = {"m": TOKENS, "d": WIDTH, "v": WORDS}, 2 * WIDTH * (TOKENS + WORDS)
    taken = allocated(compiled(HEAD_LOSS, "chunk m by 2048\n").backward, extents, monkeypatch) - gradients
    assert taken == pytest.approx(4 * WORDS * WIDTH + 2 * 2048 * WORDS, rel=0.01)


def test_a_chunks_buffers_are_those_of_the_chunk_before(compiled, monkeypatch) -> None:
    """More chunks take no more memory."""
    fn = compiled(HEAD_LOSS, "chunk v by 64\n")
    sizes = [allocated(fn.backward, {"m": 128, "d": 64, "v": v}, monkeypatch) - 2 * 64 * (128 + v) for v in (64, 640, 650)]
    assert len(set(sizes)) == 1


# --- what is said about it -------------------------------------------------------------------------------------------------


def test_the_plan_says_what_runs_in_chunks() -> None:
    (plan,) = driver.plan(Source("head.coda", HEAD_LOSS + "nominal m = 8192, v = 128256\nchunk v by 4096\n"))
    text = report(plan) + training_report.text(plan)
    assert "in chunks of `v`, 4096 at a time: kernels 1 to 3" in text
    assert "for one chunk: d_logits_bf16, 67.1 MB" in text and "added up: d_x_sum" in text
    assert "as the program says: chunk v by 4096" in text
    assert "chunk v by 4096: no kernel leaves anything along `v`" in text  # the forward


@pytest.mark.parametrize(
    "text",
    [
        "program p(x: bf16[m, d], w: bf16[v, d], u: bf16[n, v]) -> (y: bf16[m, n])\ny = softmax[v](x @ w) @ u\nchunk v by 8\n",
        "forward program p(x: bf16[m, d], w: bf16[v, d], u: bf16[n, v]) -> (y: bf16[m, n], z: f32[v])\n"
        "h = relu(x @ w)\ny = h @ u\nz = max[m](h)\nchunk m by 8\n",
    ],
    ids=["a whole row in a chunk of it", "a maximum over chunks"],
)
def test_what_no_chunk_knows_is_refused(text) -> None:
    with pytest.raises(CodaError) as caught:
        coda_lang.compile(text)
    assert {d.code for d in caught.value.diagnostics} == {"C0415"}
    assert all(d.span and d.help for d in caught.value.diagnostics)


@pytest.mark.parametrize("path", ["kernels"], indirect=True)
def test_chunks_of_one_size_are_decided_once(path) -> None:
    sizes, asked = {"m": 16, "d": 16, "v": 85}, []

    class Counting(Kernels):
        def select(self, program, functions):
            return Counting(functions, self.extents, self.fixed, self.calls, program.loops)

        def config(self, launch, extents, device):
            asked.append(launch.name)
            return super().config(launch, extents, device)

    fn = coda_lang.compile(HEAD_LOSS + "chunk v by 8\n")
    fn.objects = Counting(fn.functions, sizes, {}, [])
    x, w = (torch.randn(sizes[a], 16).bfloat16().requires_grad_() for a in "mv")
    fn(x, w, torch.zeros(16, dtype=torch.int64)).backward()
    looping = fn.backward.loops[0].kernels
    assert asked and max(map(asked.count, looping)) == 2, "those of 8 columns, and the last of 5"


def test_other_ways_to_save_that_have_no_chunks_are_left_out() -> None:
    text = (
        "program p(x: bf16[m, d], w: bf16[v, d], target: i64[m], g: f32[d]) -> (loss: f32[])\n"
        "loss = mean_over[m](cross_entropy[v](rmsnorm[d](x, g, 1e-5) @ w, target), target != -100)\nchunk v by 8\n"
    )
    (program,) = driver.programs(Source("<test>", text))
    findings = list(gradcheck.check(program))
    assert findings and all(f.good for f in findings) and "recompute all" not in {f.way for f in findings}


@pytest.mark.parametrize("wanted", ["x", "w", "b"])
def test_one_gradient_alone(wanted, compiled) -> None:
    """Pruned kernels stay in the loop, under their new names."""
    text = PROGRAMS["mean"]
    fn, plain = compiled(text, "chunk v by 16\n"), compiled(text)
    tensors = drawn(fn, SHAPES[0])
    grads = []
    for one in (fn, plain):
        leaves = [t.clone().requires_grad_(a.name == wanted) for a, t in zip(one.program.inputs, tensors)]
        grads.append(torch.autograd.grad(one(*leaves), [t for t in leaves if t.requires_grad])[0])
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-5)
    step = fn.training(autograd.Eager(fn)).derivative.step([int(a.name == wanted) for a in fn.program.inputs], [True])
    names = {k.name for k in step.program.kernels}
    assert all(set(loop.kernels) <= names for loop in step.program.loops) and step.program.loops


def test_gradients_into_buffers(compiled) -> None:
    """A sum over chunks goes on in f32 into the buffer."""
    fn = compiled(PROGRAMS["mean"], "chunk v by 16\n")
    tensors = [t.requires_grad_(t.is_floating_point()) for t in drawn(fn, SHAPES[0])]
    buffer = torch.zeros(tensors[0].shape)
    fn(*tensors, accumulate_into={"x": buffer}).backward()
    want = autograd.gradients_planned(fn, [t.detach() for t in tensors], {"loss": torch.ones(())})["x"]
    assert (buffer - want).norm() < 1e-2 * want.norm()
    assert (buffer != buffer.bfloat16()).any()


def test_what_the_plan_says_a_backward_holds_is_one_chunk() -> None:
    text = HEAD_LOSS + "nominal m = 8192, v = 128256, d = 4096\n"
    (plain,), (chunked,) = (driver.plan(Source("head.coda", text + more)) for more in ("recompute logits\n", "chunk v by 4096\n"))
    most = peak(plain), peak(chunked)
    assert most[0].between == pytest.approx(2 * TOKENS * WORDS)
    assert most[1].between == pytest.approx(2 * TOKENS * 4096 + 4 * TOKENS * WIDTH)


# --- random programs -------------------------------------------------------------------------------------------------------


def test_random_programs_in_chunks() -> None:
    """Forward and backward of random programs, two positions of a random axis at a time, against autograd of the program in float64."""
    looped: list[bool] = []

    @settings(max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategies.programs(), st.integers(0, 7))
    def each(drawn: strategies.Generated, choice: int) -> None:
        free = [a.name for a in drawn.program.axes if a.extent is None]
        renamed = {a for e in drawn.program.eqns if e.op == RENAME.name for a in (e.attr("axis"), e.attr("to"))}
        axes = [a for a in free if a not in renamed]
        if not axes or not training.differentiable(drawn.program):
            return
        program = replace(drawn.program, chunk=((axes[choice % len(axes)], 2),))
        try:
            plan = passes.trained(program)
            looped.append(bool(plan.loops or plan.derived and plan.derived.backward.loops))
            for finding in gradcheck.check(program, drawn.extents, given=drawn.tensors(), most=1):
                assert finding.good, (str(finding), to_text(program))
        except CodaError as refusal:
            assert {d.code for d in refusal.diagnostics} == {"C0415"}, (str(refusal), to_text(program))

    each()
    assert sum(looped) > 10, f"{sum(looped)} of {len(looped)} had anything to chunk"
