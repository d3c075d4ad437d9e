"""Other schedules of a launch: parts along K and what adds them compute what the planned kernels compute, wherever they run."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import coda_lang  # noqa: E402
from coda_lang import driver, passes  # noqa: E402
from coda_lang.backend_cute import arguments, compile, configs, host, load, schedules, spec  # noqa: E402
from coda_lang.backend_cute.autograd import gradients_planned  # noqa: E402
from coda_lang.backend_cute.emit import emit  # noqa: E402
from coda_lang.backend_cute.function import Compiled, Function, fixed  # noqa: E402
from coda_lang.backend_cute.selfcheck import error, inputs  # noqa: E402
from coda_lang.source import Source  # noqa: E402
from tests import autograd_cases, gallery, gemm_cases, standins  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.handwritten.training import SWIGLU_TRAINED  # noqa: E402
from tests.strategies import programs  # noqa: E402
from tests.test_random_programs import some  # noqa: E402

SPECS = ("swiglu", "linear_residual", "lm_head_lse", "head_rmsnorm", "qkv_rope", "qkv_apart", "geglu")
COUNTS = (1, 2, 3, 4)


class Split(Compiled):
    """Executables that want every launch in `count` parts."""

    def __init__(self, fn, count):
        super().__init__(fn.program, fn.functions, fn.saving)
        self.count = count

    def parts(self, launch, extents, device):
        return self.count


class SplitStandIns(standins.StandIns):
    """Kernels' stand-ins, every launch in `count` parts; configurations as `Compiled` takes them."""

    def __init__(self, fn, extents, count):
        super().__init__(fn.functions, extents, fixed(fn.program))
        self.count, self.compiled = count, Compiled(fn.program, fn.functions, fn.saving)
        self.wholes = self.compiled.wholes

    def parts(self, launch, extents, device):
        return self.count

    def config(self, launch, extents, device):
        return self.compiled.config(launch, extents, device)

    def extended(self, made):
        more = super().extended(made)
        more.compiled = self.compiled.extended(made)
        return more

    def select(self, program, functions):
        more = copy.copy(self)
        more.functions, more.compiled, more.fixed = functions, self.compiled.select(program, functions), fixed(program)
        return more


def functions(text, folder):
    path = folder / "kernel.py"
    path.write_text(driver.emit(Source("p.coda", text)))
    return load.functions_of(load.import_file(path))


def text_of(name):
    return (ROOT / "specs" / f"{name}.coda").read_text(encoding="utf-8")


def several(results):
    return results if isinstance(results, tuple) else (results,)


def extents_of(fn, rows, cols, depth):
    """Rows, columns and what is contracted: an axis is contracted where no output has it."""
    kept = {a for o in fn.program.outputs for a in o.axes}
    same = {other: one for one, other in fn.program.equal}
    found = {}
    for axis, size in fn.program.extents:
        known = same.get(axis, axis)
        free = depth if known not in kept else rows if known in ("m", "b", "t") else cols
        found[axis] = size if size is not None else found.get(known, free)
    return found


def with_objects(fn, objects):
    """The function with other executables, and no plans yet."""
    return Function(
        fn.program, fn.functions, fn._reference, saving=fn.saving, backward=fn.backward, residuals=fn.residuals,
        cotangents=fn.cotangents, gradients=fn.gradients, objects=objects,
    )  # fmt: skip


def is_split(fn, extents):
    made = schedules.scheduled(fn.program, extents, torch.device("cpu"), fn.objects)
    return bool(made.splits)


# --- the records -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_parts_are_whole_blocks_that_cover_a_mode_once(extent, of):
    spans = [spec.Part(0, i, of, configs.TILE_K).span(extent) for i in range(of)]
    assert [i for start, length in spans for i in range(start, start + length)] == list(range(extent))
    assert all(start % configs.TILE_K == 0 or start == extent for start, _ in spans)
    longest = max(length for _, length in spans)
    assert -(-longest // configs.TILE_K) == -(-extent // (of * configs.TILE_K)), "no part is a block longer than it must be"


@pytest.mark.parametrize("name", gemm_cases.ALL)
def test_every_hand_written_gemm_can_be_in_parts(name):
    """Each part stores its accumulators and nothing else; the sum has the ports, sinks and phases of the whole."""
    gemm = gemm_cases.ALL[name].gemm
    for count in COUNTS:
        made = schedules.split(gemm, count)
        assert (made is not None) == bool(gemm.products and gemm.rows)
        if made is None:
            continue
        (total,) = made.sums
        assert len(spec.gemms(made.parts)) == count and all(p.products == gemm.products for p in spec.gemms(made.parts))
        assert sorted(s.matrix.tensor for p in spec.gemms(made.parts) for s in p.sinks) == sorted(t.name for t in made.temps)
        assert len(made.temps) == count * gemm.segments
        assert not total.products and total.sinks == gemm.sinks and total.ports[count * gemm.segments :] == gemm.ports
        assert [p.groups for p in total.phases] == [p.groups for p in gemm.phases]
        assert {s for s in (*gemm.rows, *gemm.cols) if isinstance(s, str)} <= set(total.extents)
        assert configs.offered(made.parts) and configs.offered(total)


def test_what_cannot_be_cut_stays_whole():
    linear = gemm_cases.ALL["linear"].gemm
    ((a, (b,)),) = ((p.a, p.b) for p in linear.products)
    several_modes = replace(a, cols=(*a.cols, 5))
    crossed = spec.Matrix(a.tensor, a.cols, a.rows)  # a tensor whose rows are contracted on the other side
    for left, right in ((several_modes, b), (a, crossed), (replace(a, pack=2), b), (a, replace(a))):
        assert schedules.split(replace(linear, products=(spec.Product(left, (right,)),)), 2) is None
    assert schedules.split(linear, schedules.MOST + 1) is None and schedules.split(linear, 0) is None


def test_kernels_of_a_loop_stay_as_they_are(tmp_path):
    (fn,) = functions("program p(x: bf16[b, m, k], w: bf16[b, n, k]) -> (y: bf16[b, m, n])\ny = matmul[k](x, w)\n", tmp_path)
    assert fn.program.loops
    made = schedules.applied(fn.program, fn.functions, lambda launch: 2, {})
    looping = {name for loop in fn.program.loops for name in loop.kernels}
    assert looping <= {k.name for k in made.program.kernels} and not any(s.of.name in looping for s in made.splits)


# --- numbers, by the twin ----------------------------------------------------------------------------------------------------


def check(fn, extents, counts=COUNTS):
    """In float64 the split is exact; rounded it is as near as the planned kernels. Returns how many splits there were."""
    tensors, done = inputs(fn.program, extents, 3, "cpu"), 0
    truth, planned = several(fn.reference(*tensors, exact=True)), several(fn.reference_planned(*tensors))
    for count in counts:
        fn.objects = Split(fn, count)
        if not is_split(fn, extents):
            continue
        done += 1
        for name, exact, rounded, before, want in zip(
            [o.name for o in fn.program.outputs],
            several(fn.reference_planned(*tensors, exact=True)), several(fn.reference_planned(*tensors)), planned, truth, strict=True,
        ):  # fmt: skip
            assert error(exact, want) < 1e-12, (name, count, extents)
            assert error(rounded, want) <= 2 * error(before, want) + 1e-6, (name, count, extents)
    return done


SHAPES = ((1, 64, 320), (37, 72, 200), (5, 40, 24), (130, 96, 129))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.slow
def test_specs_in_parts(name, tmp_path):
    for fn in functions(text_of(name), tmp_path):
        for rows, cols, depth in SHAPES:
            assert check(fn, extents_of(fn, rows, cols, depth)) >= (1 if name == "qkv_apart" else len(COUNTS))


@pytest.mark.parametrize("name", gallery.PROGRAMS)
def test_the_gallery_in_parts(name, tmp_path):
    for fn in functions(gallery.PROGRAMS[name], tmp_path):
        check(fn, extents_of(fn, 7, 48, 136), (2, 3))


@pytest.mark.parametrize("name, count, least", [("llama/layer", 2, 3), ("gpt2/attn_out_mlp", 1, 4)])
@pytest.mark.slow
def test_whole_layers_in_parts(name, count, least, tmp_path):
    """Programs of many kernels: outputs, and gradients by the backward in parts, in float64."""
    sizes = {"m": 37, "head": 2, "kv": 1, "qh": 2, "kh": 1}
    (fn,) = functions(text_of(name), tmp_path)
    extents = {a: sizes.get(a, 136) if n is None else n for a, n in fn.program.extents}
    extents |= {other: extents[one] for one, other in fn.program.equal}
    tensors = inputs(fn.program, extents, 3, "cpu")
    planned = gradients_planned(fn, tensors, given := {o.name: torch.randn([extents[a] for a in o.axes]) for o in fn.program.outputs})
    cut = with_objects(fn, Split(fn, count))
    assert len(schedules.scheduled(fn.program, extents, torch.device("cpu"), cut.objects).splits) >= least
    found = gradients_planned(cut, tensors, given)
    assert found.keys() == planned.keys() and all(error(found[k], planned[k]) < 1e-12 for k in found)
    assert check(fn, extents, (count,)) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("random")


def check_random(generated, count, folder):
    """Written to a file: what is made of scalar functions is made of their source."""
    path = folder / f"kernel{len(list(folder.iterdir()))}.py"
    path.write_text(emit([passes.run(generated.program)]))
    (fn,) = load.functions_of(load.import_file(path))
    extents = {a.name: generated.extents.get(a.name, a.extent) for a in generated.program.axes}
    expected = any(schedules.split(launch, count) for launch in spec.launches(fn.program))
    assert check(fn, extents, (count,)) == expected


@some(25)
@given(generated=programs(), count=st.sampled_from(COUNTS))
def test_random_programs_in_parts(generated, count, folder):
    check_random(generated, count, folder)


@pytest.mark.slow
@some(60)
@given(generated=programs(multiple=40), count=st.sampled_from(COUNTS))
def test_larger_random_programs_in_parts(generated, count, folder):
    check_random(generated, count, folder)


# --- launches ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_the_gpu(monkeypatch):
    """Calls on the CPU run kernels' stand-ins, in buffers of NaN."""
    monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    monkeypatch.setattr(host, "allocate", standins.poisoning)


@pytest.mark.parametrize("name", ["swiglu", "lm_head_lse", "linear_residual"])
@pytest.mark.parametrize("sizes", [(37, 72, 200), (1, 40, 520), (3, 40, 64), (5, 40, 0), (0, 40, 64), (5, 0, 64)])
def test_kernels_get_their_parts_of_the_operands(name, sizes, tmp_path, on_the_gpu):
    """Views, not copies; parts of nothing, where K is short or empty, multiply zeros; nothing is launched over nothing."""
    for fn in functions(text_of(name), tmp_path):
        extents = extents_of(fn, *sizes)
        tensors = inputs(fn.program, {a: max(n, 1) for a, n in extents.items()}, 3, "cpu")
        tensors = [t[tuple(slice(0, extents[a]) for a in arg.axes)].contiguous() for t, arg in zip(tensors, fn.program.inputs, strict=True)]
        want = several(fn.reference(*tensors))
        for count in (1, 2, 4):
            cut = with_objects(fn, SplitStandIns(fn, extents, count))
            got = several(cut(*tensors))
            for g, w in zip(got, want, strict=True):
                assert torch.equal(g.isnan(), w.isnan()) and error(g.nan_to_num(), w.nan_to_num()) < 8e-3
            if schedules.computes(fn.program.kernels[0], extents):
                names = [k.name for k in schedules.split(fn.program.kernels[0], count).kernels]
                assert cut.objects.calls[: len(names)] == names and not cut.explain(*tensors).copies
            else:
                assert not any("_sum" in call for call in cut.objects.calls)


def test_operands_that_no_view_serves_are_copied_once(tmp_path, on_the_gpu):
    (fn,) = functions("program p(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])\ny = x @ w\n", tmp_path)
    x, w = torch.randn(9, 331).bfloat16()[:, 1:], torch.randn(40, 330).bfloat16()
    fn.objects = SplitStandIns(fn, {"m": 9, "k": 330, "n": 40}, 3)
    assert error(fn(x, w), fn.reference(x, w)) < 8e-3
    copies = fn.explain(x, w).copies
    assert len([c for c in copies if "'x'" in c]) == 1 == len([c for c in copies if "'w'" in c])


@pytest.mark.parametrize("name", ["swiglu", "lm_head_lse", "lm_head_logits"])
def test_outputs_have_the_same_bits_with_and_without_gradients(name, tmp_path, on_the_gpu):
    """The forward that saves and the one that does not take the same schedule, and reduce in the same order."""
    for fn in functions(text_of(name.replace("_logits", "_lse")), tmp_path):
        extents = extents_of(fn, 70, 328, 200)
        fn.objects = SplitStandIns(fn, extents, 3)
        tensors = inputs(fn.program, extents, 3, "cpu")
        with torch.no_grad():
            plain = several(fn(*tensors))
        leaves = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
        saving = several(fn(*leaves))
        assert fn.objects.calls and all(torch.equal(a, b) for a, b in zip(plain, saving, strict=True))
        truth = several(fn.reference(*leaves))
        cotangents = [torch.randn(o.shape).to(o.dtype) for o in saving]
        wanted = [t for t in leaves if t.requires_grad]
        got = torch.autograd.grad(saving, wanted, cotangents)
        want = torch.autograd.grad(truth, wanted, cotangents)
        assert all(error(g, w) < 2e-2 for g, w in zip(got, want, strict=True))
        assert sum("_sum3" in call for call in fn.objects.calls) >= 3, "the backward's products are in parts as well"


def test_a_sum_adds_to_a_buffer(tmp_path, on_the_gpu):
    """`accumulate_into`: the kernel that adds the parts adds to the buffer as well."""
    (fn,) = functions(text_of("linear_residual"), tmp_path)
    extents = {"m": 130, "k": 72, "n": 48}
    fn.objects = SplitStandIns(fn, extents, 2)
    tensors = [t.requires_grad_() for t in inputs(fn.program, extents, 3, "cpu")]
    buffer = torch.full((48, 72), 0.5)
    y = fn(*tensors, accumulate_into={"w": buffer})
    y.backward(given := torch.randn(y.shape).bfloat16())
    (want,) = torch.autograd.grad(fn.reference(*tensors), [tensors[1]], given)
    assert error(buffer - 0.5, want) < 8e-3 and tensors[1].grad is None
    assert any("_into_" in call and call.endswith("_sum2") for call in fn.objects.calls)


def test_a_variant_takes_the_tiles_of_the_whole_sum():
    fn = SWIGLU_TRAINED.function()
    extents = {a: autograd_cases.SIZES.get(a, n or 5) for a, n in fn.program.extents}
    (saving,) = [k for k in fn.saving.kernels if isinstance(k, spec.Gemm)]
    many = replace(saving, sinks=(*saving.sinks, spec.RowReduce("sum", "r"), spec.ColReduce("moments", "c")))
    plain = replace(saving, sinks=many.sinks[-2:], name="plain")
    objects = Compiled(fn.program, fn.functions)
    objects.wholes = {many.products: many}
    made = schedules.applied(replace(fn.program, kernels=(plain,)), fn.functions, lambda launch: 2, objects.wholes)
    (total,) = made.splits[0].sums
    whole = schedules.split(many, 2).sums[0]
    more = objects.extended(made)
    config = more.config(total, extents, torch.device("cpu"))
    assert config.step and replace(config, step=0) == replace(configs.choose(whole, extents), step=0)
    assert more.config(made.splits[0].parts, extents, torch.device("cpu")).step == 0


# --- builds ahead of time -----------------------------------------------------------------------------------------------------


def test_a_build_in_parts_runs_without_the_compiler(tmp_path, monkeypatch, on_the_gpu):
    """`codac build --parts`: the manifest says in which parts each launch can be; a loaded function takes what the model takes of those."""
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "objects_for", lambda jobs, workers=None: [object_file(tmp_path, job) for job in jobs])
    made = driver.build(text_of("linear_residual"), tmp_path / "build", configs=("64x32_pp_c1x1",), parts=(2, 3))
    assert made.parts["linear_residual"] == [2, 3]
    names = {e.kernel for e in made.entries}
    assert {"linear_residual_k2_0+1", "linear_residual_sum2", "linear_residual_k3_0+1+2", "linear_residual_sum3"} <= names
    assert "linear_residual_k2_0" not in names, "no call wants one part"
    fn = coda_lang.load(tmp_path / "build")
    few, many = ({"m": m, "k": 8192, "n": 2048} for m in (64, 8192))
    (launch,) = fn.program.kernels
    assert fn.objects.parts(launch, few, torch.device("cpu")) == 3 and fn.objects.parts(launch, many, torch.device("cpu")) == 0
    found = host.plan(fn.program, coda_lang_binding(fn, few), blanks(fn, few), torch.device("cpu"), without_loading(fn, monkeypatch))
    assert found.launches == ["linear_residual_k3_0+1+2", "linear_residual_sum3"]


def object_file(folder, job):
    path = folder / f"{job.key}.so"
    path.write_bytes(b"not machine code")
    return path


def coda_lang_binding(fn, extents):
    from coda_lang.backend_cute.binding import bind

    return bind(fn.program, [tuple(extents[a] for a in arg.axes) for arg in fn.program.inputs])


def blanks(fn, extents):
    return [torch.empty([extents[a] for a in arg.axes], dtype=torch.bfloat16) for arg in fn.program.inputs]


def without_loading(fn, monkeypatch):
    """The build's executables, each found in the manifest under the digest of its record and functions, none loaded."""
    monkeypatch.setattr(compile, "load", lambda path: lambda *args: None)
    return fn.objects
