"""Derivatives at run time, on programs by hand: what runs, what is saved, what autograd may do with it; both paths, without a GPU.

`planned` is the CPU's path, `kernels` the GPU's, with stand-ins for executables and poisoned buffers.
"""

from __future__ import annotations

import gc
import re

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from coda_lang.backend_cute import arguments, autograd, host, torch_fns  # noqa: E402
from coda_lang.backend_cute.derivative import NO, SUM, YES, Derivative  # noqa: E402
from coda_lang.backend_cute.errors import CallError  # noqa: E402
from coda_lang.backend_cute.selfcheck import error  # noqa: E402
from tests import handwritten as hw  # noqa: E402
from tests.handwritten.training import AFFINE, LINEAR_RESIDUAL, SWIGLU_TRAINED, TRAINED  # noqa: E402
from tests.standins import StandIns, poisoning  # noqa: E402

SIZES = {"m": 33, "d": 24, "n": 40, "f": 16}
PATHS = ("planned", "kernels")


class Kernels(StandIns):
    """Stand-ins for every program of a derivative; `calls` has what was launched, in order."""

    def __init__(self, functions, extents, fixed, calls):
        super().__init__(functions, extents, fixed)
        self.calls = calls

    def select(self, program, functions):
        return Kernels(functions, self.extents, self.fixed, self.calls)


@pytest.fixture
def path(request, monkeypatch):
    if request.param == "kernels":
        monkeypatch.setattr(host, "allocate", poisoning)
        monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
        monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    return request.param


both = pytest.mark.parametrize("path", PATHS, indirect=True)
kernels = pytest.mark.parametrize("path", ["kernels"], indirect=True)
planned = pytest.mark.parametrize("path", ["planned"], indirect=True)


def function(case, path, sizes=SIZES):
    """The callable, and the list that launched kernels are noted in."""
    fn, calls = case.function(), []
    if path == "kernels":
        fixed = {name: size for name, size in case.program.extents if size is not None}
        fn.objects = Kernels(fn.functions, {**{a: sizes.get(a, 5) for a, _ in case.program.extents}, **fixed}, fixed, calls)
    return fn, calls


def leaves(case, sizes=SIZES, needs=None, seed=0):
    """Inputs; those whose gradient is wanted (all that have one) require it."""
    names = [name for name, _ in case.gradients] if needs is None else needs
    made = hw.inputs(case.program, sizes, seed)
    return [t.requires_grad_(a.name in names) for a, t in zip(case.program.inputs, made, strict=True)]


def several(outputs):
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def cotangents(outputs, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(o.shape, generator=gen).to(o.dtype) for o in outputs]


def truth(case, tensors, given, precision=None):
    """Autograd's gradients of the reference; by default in float64."""
    f = precision or torch_fns.Exact()
    copies = [t.detach().to(f.dtype) if t.is_floating_point() and not f.rounds else t.detach().clone() for t in tensors]
    wanted = [c.requires_grad_() for c, t in zip(copies, tensors) if t.requires_grad]
    outs = case.reference(f, *copies)
    used = [(o, g.to(o.dtype)) for o, g in zip(outs, given) if g is not None]
    return torch.autograd.grad([o for o, _ in used], wanted, [g for _, g in used])


def gradients(fn, tensors, given=None, outs=None):
    outs = several(fn(*tensors)) if outs is None else outs
    given = cotangents(outs) if given is None else given
    return torch.autograd.grad(outs, [t for t in tensors if t.requires_grad], given), given


def agree(got, want, eager=None, bound=8e-3):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        limit = bound if eager is None else 2 * error(eager[i], w) + bound
        assert g.shape == w.shape and error(g, w) <= limit, (i, error(g, w), limit)


# --- values ------------------------------------------------------------------------------------------------------------

EXTENTS = (
    SIZES,
    {"m": 131, "d": 33, "n": 77, "f": 13},
    {"m": 1, "d": 1, "n": 1, "f": 1},
    {"m": 9, "d": 9, "n": 9, "f": 9},
    {**SIZES, "m": 0},
    {**SIZES, "d": 0},
    {**SIZES, "n": 0, "f": 0},
)


@both
@pytest.mark.parametrize("sizes", EXTENTS, ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_those_of_the_program(name, sizes, path):
    case = TRAINED[name]
    fn, _ = function(case, path, sizes)
    tensors = leaves(case, sizes)
    got, given = gradients(fn, tensors)
    for t, g in zip([t for t in tensors if t.requires_grad], got, strict=True):
        assert g.shape == t.shape and g.dtype == t.dtype
    agree(got, truth(case, tensors, given), truth(case, tensors, given, torch_fns.Written()))
    assert (fn.last_path, fn.last_backward) == (("kernels", "kernels") if path == "kernels" else ("reference", "planned"))


@pytest.mark.parametrize("name", TRAINED)
def test_planned_gradients_are_exact_in_float64(name):
    case = TRAINED[name]
    tensors = leaves(case)
    outs = [o.detach() for o in several(case.function()(*tensors))]
    given = cotangents(outs)
    names = [o.name for o in case.program.outputs]
    found = autograd.gradients_planned(case.function(), [t.detach() for t in tensors], dict(zip(names, given)))
    for (name_, _), want in zip(case.gradients, truth(case, tensors, given), strict=True):
        assert error(found[name_], want) < 1e-12, name_


@both
@pytest.mark.parametrize("name", TRAINED)
def test_outputs_have_the_same_bits_with_and_without_gradients(name, path):
    fn, _ = function(TRAINED[name], path)
    tensors = leaves(TRAINED[name])
    with torch.no_grad():
        plain = several(fn(*tensors))
    for a, b in zip(several(fn(*tensors)), plain, strict=True):
        assert a.requires_grad and not b.requires_grad and torch.equal(a, b)


@both
def test_two_runs_give_the_same_bits(path):
    """Row 28: column sums are ordered partials."""
    fn, _ = function(AFFINE, path)
    tensors = leaves(AFFINE)
    first, given = gradients(fn, tensors)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(fn, tensors, given)[0]))


def test_a_weight_gradient_over_many_rows_is_summed_in_f32():
    """Row 22: ones over 10⁵ rows; a bf16 sum would stop growing at 256."""
    fn, rows = LINEAR_RESIDUAL.function(), 100_000
    x, w, r = torch.ones(rows, 8).bfloat16(), torch.zeros(8, 8).bfloat16().requires_grad_(), torch.zeros(rows, 8).bfloat16()
    fn(x, w, r).backward(torch.ones(rows, 8).bfloat16())
    assert torch.equal(w.grad, torch.full((8, 8), float(rows)).bfloat16())


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_come_through(path, value):
    """Row 13, the gradient's side."""
    fn, _ = function(AFFINE, path)
    tensors = leaves(AFFINE)
    outs = several(fn(*tensors))
    given = cotangents(outs)
    given[0][3, 4] = value
    got, _ = gradients(fn, tensors, given, outs)
    want = truth(AFFINE, tensors, given)
    for g, w in zip(got, want):
        assert torch.equal(torch.isfinite(g), torch.isfinite(w)) and not torch.isfinite(g).all()


# --- only what is needed -------------------------------------------------------------------------------------------------


def saved(fn, *tensors):
    """The outputs, and the data that autograd keeps."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outs = fn(*tensors)
    return several(outs), kept


@kernels
def test_a_frozen_weight_costs_nothing(path):
    fn, calls = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED, needs=["x"])
    (y,), kept = saved(fn, x, w)
    assert [t.data_ptr() for t in kept if t.data_ptr() in (x.data_ptr(), w.data_ptr())] == [w.data_ptr()] and len(kept) == 2
    y.backward(torch.ones_like(y))
    assert calls == ["swiglu_saving_k0", "swiglu_backward_k0", "swiglu_backward_k1"] and w.grad is None
    agree([x.grad], truth(SWIGLU_TRAINED, [x, w], [torch.ones_like(y)]))


@kernels
def test_a_frozen_input_costs_nothing(path):
    fn, calls = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED, needs=["w"])
    (y,), kept = saved(fn, x, w)
    assert w.data_ptr() not in [t.data_ptr() for t in kept] and len(kept) == 2
    y.backward(torch.ones_like(y))
    assert calls == ["swiglu_saving_k0", "swiglu_backward_k0", "swiglu_backward_k2"]


@kernels
def test_a_bias_alone_saves_little_and_launches_no_product(path):
    fn, calls = function(AFFINE, path)
    tensors = leaves(AFFINE, needs=["b"])
    outs, kept = saved(fn, *tensors)
    assert [t.data_ptr() for t in kept] == [outs[0].data_ptr()]  # u; not z, which only the scale's gradient needs
    got, given = gradients(fn, tensors, outs=outs)
    assert calls[:2] == ["affine_k0", "affine_k1"]
    assert calls[2].startswith("affine_backward_k0_only") and calls[3:] == ["affine_backward_k1"]
    agree(got, truth(AFFINE, tensors, given))


@kernels
def test_without_gradients_the_plain_forward_runs(path):
    fn, calls = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    with torch.no_grad():
        fn(x, w)
    with torch.inference_mode():
        fn(x.detach(), w.detach())
    y = fn(x.detach(), w.detach())
    assert calls == ["swiglu_k0"] * 3 and not y.requires_grad


@both
def test_a_constant_that_requires_a_gradient_gets_none(path):
    fn, calls = function(AFFINE, path)
    tensors = leaves(AFFINE, needs=[])
    tensors[-1].requires_grad_()
    assert not fn(*tensors).u.requires_grad
    tensors[2].requires_grad_()
    fn(*tensors).q.sum().backward()
    assert tensors[-1].grad is None and tensors[2].grad is not None


@kernels
def test_the_engine_is_asked_which_gradients_it_wants(path):
    """`torch.autograd.grad` by one input of several."""
    fn, calls = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    hidden = x * 1.0
    y = fn(hidden, w)
    del calls[:]
    torch.autograd.grad(y, [hidden], torch.ones_like(y), retain_graph=True)
    assert calls == ["swiglu_backward_k0", "swiglu_backward_k1"]
    del calls[:]
    torch.autograd.grad(y, [w], torch.ones_like(y), retain_graph=True)
    assert calls == ["swiglu_backward_k0", "swiglu_backward_k2"]
    del calls[:]
    torch.autograd.grad(y, [x], torch.ones_like(y))
    assert calls == ["swiglu_backward_k0", "swiglu_backward_k1"]


@kernels
def test_a_number_as_scalar_among_tensors(path):
    fn, calls = function(AFFINE, path)
    tensors = leaves(AFFINE, needs=["x", "b"])
    tensors[4] = 0.5
    outs = several(fn(*tensors))
    given = cotangents(outs)
    del calls[:]
    (d_b,) = torch.autograd.grad(outs, [tensors[2]], given, retain_graph=True)
    assert not any("dgrad" in c for c in calls)
    (d_x,) = torch.autograd.grad(outs, [tensors[0]], given)
    tensors[4] = torch.tensor(0.5)
    agree([d_x, d_b], truth(AFFINE, tensors, given))


# --- cotangents ------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("used", ["u", "q"])
def test_outputs_nobody_used(path, used):
    fn, _ = function(AFFINE, path)
    tensors = leaves(AFFINE)
    outs = fn(*tensors)
    output = getattr(outs, used)
    given = cotangents([output])
    got = torch.autograd.grad([output], [t for t in tensors if t.requires_grad], given)
    agree(got, truth(AFFINE, tensors, given if used == "u" else [None, *given]))


def test_a_gradient_that_no_cotangent_reaches_is_none():
    """Where only `y` is used, `b` of the other output gets none, as in eager PyTorch."""
    case = LINEAR_RESIDUAL
    derivative = Derivative(case.program, None, case.backward, case.functions, case.cotangents, case.gradients)
    step = derivative.step((YES, YES, YES), (False,))
    assert step.gives == (None, None, None) and not step.program.kernels and not step.reads


def shapes_of_memory(g):
    """The same cotangent in layouts that autograd brings."""
    yield "transposed", g.t().contiguous().t()
    padded = torch.empty(g.shape[0], g.shape[1] + 3, dtype=g.dtype)
    padded[:, 1:-2] = g
    yield "misaligned", padded[:, 1:-2]
    yield "sliced", torch.stack((g, g), 1)[:, 0]


@both
def test_cotangents_in_any_layout(path):
    fn, _ = function(LINEAR_RESIDUAL, path)
    tensors = leaves(LINEAR_RESIDUAL)
    y = fn(*tensors)
    want, (g,) = gradients(fn, tensors)
    for name, other in shapes_of_memory(g):
        before = other.clone()
        got = torch.autograd.grad(y, tensors, other, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want)), name
        assert torch.equal(other, before)


@both
def test_expanded_cotangents(path):
    fn, _ = function(LINEAR_RESIDUAL, path)
    tensors = leaves(LINEAR_RESIDUAL)
    want = torch.autograd.grad(fn(*tensors), tensors, torch.ones(33, 40).bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(fn(*tensors).sum(), tensors), want))
    row = torch.randn(40).bfloat16()
    want = torch.autograd.grad(fn(*tensors), tensors, row.expand(33, 40).contiguous())
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(fn(*tensors), tensors, row.expand(33, 40)), want))


@both
def test_a_cotangent_of_another_dtype_is_cast(path):
    fn, _ = function(LINEAR_RESIDUAL, path)
    tensors = leaves(LINEAR_RESIDUAL)
    g = torch.randn(33, 40)
    want = torch.autograd.grad(fn(*tensors), tensors, g.bfloat16())
    y = fn(*tensors)
    y.float().backward(g)
    assert all(torch.equal(t.grad, w) for t, w in zip(tensors, want))


@both
def test_nothing_given_is_written_to(path):
    for case in TRAINED.values():
        fn, _ = function(case, path)
        tensors = leaves(case)
        outs = several(fn(*tensors))
        given = cotangents(outs)
        everything = [*tensors, *outs, *given]
        before = [t.detach().clone() for t in everything]
        versions = [t._version for t in everything]
        gradients(fn, tensors, given, outs)
        assert all(torch.equal(a, b) for a, b in zip(everything, before)) and [t._version for t in everything] == versions


@both
def test_a_gradient_that_is_the_cotangent_can_be_changed(path):
    """`r.grad` must not be the caller's tensor."""
    fn, _ = function(LINEAR_RESIDUAL, path)
    tensors = leaves(LINEAR_RESIDUAL)
    g = torch.ones(33, 40).bfloat16()
    fn(*tensors).backward(g)
    tensors[2].grad.zero_()
    assert torch.equal(g, torch.ones(33, 40).bfloat16())


# --- autograd's other uses ---------------------------------------------------------------------------------------------------


@both
def test_tied_weights_and_repeated_use_add_up(path):
    sizes = {"m": 16, "d": 16, "n": 16}
    fn, _ = function(LINEAR_RESIDUAL, path, sizes)
    x, w, r = leaves(LINEAR_RESIDUAL, sizes)
    w2 = w.detach().clone().requires_grad_()
    fn(x, w, fn(x, w2, r)).sum().backward()
    apart = w.grad + w2.grad
    w.grad = w2.grad = None
    fn(x, w, fn(x, w, r)).sum().backward()
    torch.testing.assert_close(w.grad, apart, rtol=1e-2, atol=1e-2)
    x.grad = None
    fn(x, x, r).sum().backward()  # one tensor as two arguments
    ones = torch.ones(16, 16)
    want = ones @ x.detach().float() + ones.T @ x.detach().float()
    torch.testing.assert_close(x.grad.float(), want, rtol=2e-2, atol=2e-2)


@both
def test_a_graph_kept_can_be_walked_twice_and_not_a_third_time(path):
    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    y = fn(x, w)
    first = torch.autograd.grad(y, [x, w], torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, [x, w], torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, [x, w], torch.ones_like(y))


@both
def test_a_second_derivative_is_refused_when_it_is_asked_for(path):
    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    y = fn(x, w)
    (g,) = torch.autograd.grad(y, [x], torch.ones_like(y), create_graph=True)
    assert torch.equal(g, torch.autograd.grad(y, [x], torch.ones_like(y), retain_graph=True)[0])
    penalty = g.float().square().sum()
    with pytest.raises(CallError, match="C0514: swiglu: the gradient of a gradient was asked for"):
        penalty.backward()


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(path, reentrant):
    fn, calls = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    want, given = gradients(fn, [x, w])
    y = checkpoint(fn, x, w, use_reentrant=reentrant)
    y.backward(given[0])
    assert torch.equal(x.grad, want[0]) and torch.equal(w.grad, want[1])


@both
def test_a_saved_tensor_changed_in_place_is_noticed(path):
    for change in (0, 1):
        fn, _ = function(SWIGLU_TRAINED, path)
        tensors = leaves(SWIGLU_TRAINED)
        y = fn(*tensors)
        with torch.no_grad():
            tensors[change].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    fn, _ = function(AFFINE, path)
    outs = fn(*leaves(AFFINE))
    with torch.no_grad():
        outs.u.zero_()  # an output that the backward reads
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outs.q.sum().backward()


@both
def test_a_graph_holds_nothing_after_it_is_gone(path):
    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    (y,), kept = saved(fn, x, w)
    pre = [t for t in kept if t.shape == (33, 16, 2)]
    assert len(pre) == 1
    import weakref

    gone = weakref.ref(pre[0])
    y.sum().backward()
    del y, kept, pre
    gc.collect()
    assert gone() is None


@both
def test_dims_merged_and_split(path):
    """`[b, t, d]` for `[m, d]`, and a weight with its lane merged: gradients come in the dims of their inputs."""
    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    want, given = gradients(fn, [x, w])
    x3, w2 = x.detach().reshape(3, 11, 24).requires_grad_(), w.detach().reshape(32, 24).requires_grad_()
    y = fn(x3, w2)
    assert y.shape == (3, 11, 16)
    got = torch.autograd.grad(y, [x3, w2], given[0].reshape(3, 11, 16))
    assert all(torch.equal(a, b.reshape(a.shape)) for a, b in zip(got, want))
    assert got[0].shape == x3.shape and got[1].shape == w2.shape


@both
@pytest.mark.parametrize("wanted", ["u", "q"])
def test_chosen_outputs(path, wanted):
    fn, calls = function(AFFINE, path)
    tensors = leaves(AFFINE)
    output = fn(*tensors, outputs=wanted)
    assert isinstance(output, torch.Tensor)
    given = cotangents([output])
    got = torch.autograd.grad(output, [t for t in tensors if t.requires_grad], given)
    agree(got, truth(AFFINE, tensors, given if wanted == "u" else [None, *given]))


@planned
def test_arguments_in_other_layouts(path):
    """Rows 5 and 6: transposed, expanded and far-strided inputs, as in the forward."""
    fn, _ = function(LINEAR_RESIDUAL, path)
    x, w, r = (t.detach() for t in leaves(LINEAR_RESIDUAL))
    wide = torch.empty(33, 24 * 7).bfloat16()[:, ::7].copy_(x)
    variants = [wide.requires_grad_(), w.t().contiguous().t().requires_grad_(), r[:1].expand(33, 40)]
    plain = [x.clone().requires_grad_(), w.clone().requires_grad_(), r[:1].expand(33, 40).contiguous()]
    for a, b in zip(gradients(fn, variants)[0], gradients(fn, plain)[0]):
        assert torch.equal(a, b)


# --- refusals ----------------------------------------------------------------------------------------------------------------


def test_programs_without_a_derivative_refuse():
    fn = hw.LINEAR.function()
    x, w = hw.inputs(hw.LINEAR.program, {"m": 4, "d": 8, "n": 8})
    with pytest.raises(CallError, match="C0501: linear: argument 'w' requires a gradient"):
        fn(x, w.requires_grad_())
    with pytest.raises(CallError, match="C0501: linear has no derivative"):
        fn(x, w.detach(), accumulate_into={"w": torch.zeros_like(w)})


@both
def test_forward_mode_is_refused(path):
    import torch.autograd.forward_ad as forward_ad

    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = (t.detach() for t in leaves(SWIGLU_TRAINED))
    with forward_ad.dual_level():
        with pytest.raises(CallError, match="C0515: swiglu: argument 'x' carries a forward-mode tangent"):
            fn(forward_ad.make_dual(x, torch.ones_like(x)), w)
        assert torch.equal(fn(x, w), fn(x, w))


def test_transforms_are_refused():
    fn = SWIGLU_TRAINED.function()
    x, w = leaves(SWIGLU_TRAINED)
    with pytest.raises(CallError, match="C0702: swiglu: argument 'x': got a tensor without storage"):
        torch.func.vmap(lambda row: fn(row[None], w.detach()))(x.detach())
    with pytest.raises(CallError, match="C07|C0515"):
        torch.func.grad(lambda t: fn(t, w.detach()).sum())(x.detach())
    with pytest.raises(CallError, match="C0515: swiglu cannot be differentiated inside a torch.func transform"):
        torch.func.vmap(lambda row: row * fn(x, w).sum())(x.detach())
    with pytest.raises(CallError, match="C07|C0515"):
        torch.func.jvp(lambda t: fn(t, w.detach()), (x.detach(),), (x.detach(),))
    y = fn(x, w)
    with pytest.raises(CallError, match="C0702: swiglu_backward: argument 'd_y'"):
        torch.autograd.grad(y, [x], torch.ones(2, *y.shape).bfloat16(), is_grads_batched=True)


# --- autocast ------------------------------------------------------------------------------------------------------------------


@planned
def test_autocast_casts_to_the_declared_types(path):
    """Row 23: a bf16 hidden state times an f32 weight."""
    fn, _ = function(LINEAR_RESIDUAL, path)
    x, w, r = leaves(LINEAR_RESIDUAL)
    w32 = w.detach().float().requires_grad_()
    with pytest.raises(CallError, match=r"C0703: linear_residual: argument 'w': got dtype f32, expected bf16\n  help: pass w.to"):
        fn(x, w32, r)
    with pytest.raises(CallError, match="C0703"):
        fn(x.detach(), w32.detach(), r.detach())
    want, given = gradients(fn, [x, w, r])
    with torch.autocast("cpu", torch.bfloat16):
        y = fn(x, w32, r)
        assert torch.equal(fn(x.detach(), w32.detach(), r.detach()), y)
    assert y.dtype == torch.bfloat16 and torch.equal(y, fn(x, w, r))
    got = torch.autograd.grad(y, [x, w32, r], given)
    assert got[1].dtype == torch.float32
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(got, want))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CallError, match="C0703"):
        fn(x, w32.detach().double(), r)


@planned
def test_autocast_does_not_reach_inside(path):
    """f32 arithmetic of reference and twin stays f32."""
    fn, _ = function(AFFINE, path)
    tensors = leaves(AFFINE)
    want, given = gradients(fn, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        outs = several(fn(*tensors))
        got = torch.autograd.grad(outs, [t for t in tensors if t.requires_grad], given)
        reference = fn.reference(*[t.detach() for t in tensors])
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert torch.equal(reference.q, fn.reference(*[t.detach() for t in tensors]).q)


# --- accumulate_into ---------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_added_to_buffers(path, name, dtype):
    case = TRAINED[name]
    fn, _ = function(case, path)
    tensors = leaves(case)
    names = [n for n, _ in case.gradients]
    start = {n: torch.randn(t.shape).to(dtype) for n, t in zip(names, [t for t in tensors if t.requires_grad])}
    into = {n: b.clone() for n, b in start.items()}
    outs = several(fn(*tensors, accumulate_into=into))
    given = cotangents(outs)
    found = torch.autograd.grad(outs, [t for t in tensors if t.requires_grad], given, retain_graph=True, allow_unused=True)
    assert all(g is None for g in found)
    want = dict(zip(names, truth(case, tensors, given)))
    eager = dict(zip(names, truth(case, tensors, given, torch_fns.Written())))
    for n, b in into.items():
        total = start[n].double() + want[n]
        bound = 2 * error(start[n].double() + eager[n].double(), total) + (1e-6 if dtype == torch.float32 else 4e-3)
        assert b.dtype == dtype and error(b, total) <= bound, n
    torch.autograd.backward(outs, given)
    assert all(t.grad is None for t in tensors)
    for n, b in into.items():
        assert error(b, start[n].double() + 2 * want[n]) < 1.5e-2, n


@both
def test_a_buffer_gets_the_sum_before_it_is_rounded(path):
    """Gradients whose bf16 values would be off by more than the f32 buffer's own rounding."""
    fn, _ = function(LINEAR_RESIDUAL, path)
    tensors = leaves(LINEAR_RESIDUAL, needs=["x", "w"])
    given = cotangents([fn(*tensors)])
    want = truth(LINEAR_RESIDUAL, tensors, given)
    into = {"x": torch.zeros(33, 24), "w": torch.zeros(40, 24)}
    fn(*tensors, accumulate_into=into).backward(given[0])
    assert error(into["x"], want[0]) < 1e-6 and error(into["w"], want[1]) < 1e-6
    assert error(into["w"].bfloat16(), want[1]) > 1e-4


@both
def test_some_into_buffers_and_others_returned(path):
    fn, calls = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    into = torch.zeros(16, 2, 24)
    y = fn(x, w, accumulate_into={"w": into})
    y.backward(torch.ones_like(y))
    assert w.grad is None
    want = truth(SWIGLU_TRAINED, [x, w], [torch.ones_like(y)])
    agree([x.grad, into], want)


def test_wrong_buffers_are_refused_before_anything_runs():
    fn = AFFINE.function()
    tensors = leaves(AFFINE, needs=["x", "w"])
    w = tensors[1]
    good = torch.zeros(w.shape)
    for name, buffer, words in (
        ("v", good, "the program has no such input"),
        ("c", good, "this input never has a gradient"),
        ("b", torch.zeros(40), "the argument 'b' does not require a gradient"),
        ("w", torch.zeros(3), r"got a tensor \[3\] on cpu, expected \[40, 24\] on cpu"),
        ("w", good.double(), "got dtype torch.float64"),
        ("w", good.clone().requires_grad_(), "requires a gradient"),
        ("w", torch.zeros(24).expand(40, 24), "expanded"),
        ("w", w.detach(), "shares memory with an argument"),
        ("w", [0.0], "got list"),
    ):
        with pytest.raises(CallError, match=rf"C0516: affine: accumulate_into\['{name}'\]: .*{words}"):
            fn(*tensors, accumulate_into={name: buffer})
    with torch.no_grad():  # nothing to add, nothing wrong
        fn(*tensors, accumulate_into={"w": good})
    assert not good.any()


# --- registered operators --------------------------------------------------------------------------------------------------------------


@planned
@pytest.mark.parametrize("name", TRAINED)
def test_opcheck(path, name):
    fn, _ = function(TRAINED[name], path)
    fn.prepare()
    tensors = leaves(TRAINED[name])
    for given in (tensors, [t.detach() for t in tensors]):
        result = torch.library.opcheck(fn.operator.forward, tuple(given))
        assert set(result.values()) == {"SUCCESS"} and len(result) == 4


@planned
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", TRAINED)
def test_torch_compile_without_a_break(path, name, backend):
    """Row 27."""
    torch._dynamo.reset()
    case = TRAINED[name]
    fn, _ = function(case, path)
    compiled = torch.compile(lambda *t: [o * 2 for o in several(fn(*t))], fullgraph=True, backend=backend)
    for m in (33, 34, 70):  # the third with a symbolic extent
        tensors = leaves(case, {**SIZES, "m": m})
        outs, want = compiled(*tensors), [o * 2 for o in several(fn(*tensors))]
        assert all(torch.equal(a, b) for a, b in zip(outs, want))
        wanted, given = [t for t in tensors if t.requires_grad], cotangents(outs)
        for a, b in zip(torch.autograd.grad(outs, wanted, given), torch.autograd.grad(want, wanted, given)):
            assert torch.equal(a, b)
    frozen = leaves(case, needs=["x"])
    assert torch.equal(gradients(compiled, frozen)[0][0], gradients(lambda *t: [o * 2 for o in several(fn(*t))], frozen)[0][0])
    with torch.no_grad():
        assert torch.equal(compiled(*frozen)[0], 2 * several(fn(*frozen))[0])


@planned
def test_torch_compile_by_name_with_chosen_outputs_numbers_and_autocast(path):
    torch._dynamo.reset()
    fn, _ = function(AFFINE, path)
    x, w, b, r, _, c = leaves(AFFINE)
    compiled = torch.compile(lambda x, w, b, r, c: fn(x, w, b=b, r=r, s=0.5, c=c, outputs="q"), fullgraph=True, backend="aot_eager")
    q, want = compiled(x, w, b, r, c), fn(x, w, b, r, 0.5, c, outputs="q")
    assert torch.equal(q, want)
    for a, e in zip(torch.autograd.grad(q.sum(), [x, w, b]), torch.autograd.grad(want.sum(), [x, w, b])):
        assert torch.equal(a, e)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x.detach().float(), w, b, r, c), want)


@planned
def test_a_wrong_call_while_tracing_says_what_is_wrong(path):
    torch._dynamo.reset()
    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = (t.detach() for t in leaves(SWIGLU_TRAINED))
    compiled = torch.compile(fn, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="C0707: swiglu: argument 'w': axis 'd'"):
        compiled(x, w[:, :, 1:])


@planned
def test_fake_tensors_and_dispatch_modes_see_one_operator(path):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    want, given = gradients(fn, [x, w])
    with Watch():
        y = fn(x.detach(), w.detach())
    assert [s for s in seen if "coda_lang" in s] == [str(fn.operator.forward)] and torch.equal(y, fn(x, w))
    del seen[:]
    with Watch():
        got = torch.autograd.grad(fn(x, w), [x, w], given[0])
    assert sum("coda_lang" in s for s in seen) == 2 and all(torch.equal(a, b) for a, b in zip(got, want))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, w)]
        assert fn(*fakes).shape == (33, 16)
    assert fn(*fakes).shape == (33, 16)


def test_operator_names_are_stable_and_apart():
    a, b, c = SWIGLU_TRAINED.function(), SWIGLU_TRAINED.function(), hw.SWIGLU.function()
    for fn in (a, b, c, a):
        fn.prepare()
    names = [fn.operator.forward._schema.name for fn in (a, b, c)]
    digests = [re.fullmatch(r"coda_lang::swiglu_([0-9a-f]{8})(_[0-9]+)?", n)[1] for n in names]
    assert digests[0] == digests[1] != digests[2] and len(set(names)) == 3


@planned
def test_accumulate_into_is_refused_while_tracing(path):
    torch._dynamo.reset()
    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    into = torch.zeros(w.shape)
    with pytest.raises(Exception, match="accumulate_into"):
        torch.compile(lambda x, w: fn(x, w, accumulate_into={"w": into}), fullgraph=True, backend="eager")(x, w)


# --- what is decided, and once ----------------------------------------------------------------------------------------------------------


def test_steps_are_cut_and_kept():
    case = AFFINE
    derivative = Derivative(case.program, case.saving, case.backward, case.functions, case.cotangents, case.gradients)
    everything = derivative.saving((True,) * 6)
    assert everything.extra == ("z",) and set(everything.kept) == {"x", "w", "s", "u", "z"} and everything.asked == (YES,) * 5 + (NO,)
    assert derivative.saving((True,) * 6) is everything
    step = derivative.step((NO, SUM, NO, NO, NO, NO), (True, True))
    assert [o.dtype for o in step.program.outputs] == ["f32"] and step.gives == (None, 0, None, None, None, None)
    assert {k.name for k in step.program.kernels} == {"affine_backward_k0_only0", "affine_wgrad_f32_d_w"}
    assert derivative.step((NO, SUM, NO, NO, NO, NO), (True, True)) is step


@kernels
def test_a_known_kind_of_call_is_planned_once(path, monkeypatch):
    fn, _ = function(SWIGLU_TRAINED, path)
    tensors = leaves(SWIGLU_TRAINED)
    decided, decide = [], host.plan
    monkeypatch.setattr(host, "plan", lambda *a: decided.append(a[0].name) or decide(*a))
    for _ in range(3):
        gradients(fn, tensors)
    assert decided == ["swiglu_saving", "swiglu_backward"]
