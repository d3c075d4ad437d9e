"""Derivatives at run time, on programs by hand: values, what runs and is saved, cotangents; both paths, without a GPU."""

from __future__ import annotations

import copy
import inspect

import pytest

torch = pytest.importorskip("torch")


from coda_lang.backend_cute import autograd, host, torch_fns  # noqa: E402
from coda_lang.backend_cute.derivative import NO, SUM, YES, Derivative  # noqa: E402
from coda_lang.backend_cute.selfcheck import error  # noqa: E402
from tests.autograd_cases import (  # noqa: E402
    SIZES,
    agree,
    both,
    cotangents,
    function,
    gradients,
    kernels,
    leaves,
    saved,
    several,
    truth,
)
from tests.handwritten.training import AFFINE, LINEAR_RESIDUAL, SWIGLU_TRAINED, TRAINED  # noqa: E402

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
    assert decided == ["swiglu_saving", "swiglu_backward", "swiglu_backward"], "the backward as it is, and overwriting what it may"


@both
def test_a_buffer_is_not_touched_by_a_pass_for_other_inputs(path):
    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    into = torch.zeros(w.shape)
    y = fn(x, w, accumulate_into={"w": into})
    torch.autograd.grad(y, [x], torch.ones_like(y))
    assert not into.any()


@both
def test_explain_tells_what_is_kept_and_what_the_backward_launches(path):
    fn, calls = function(SWIGLU_TRAINED, path)
    text = str(fn.explain(*leaves(SWIGLU_TRAINED, needs=["x"])))
    assert f"for the gradients of x it keeps pre, w: {33 * 16 * 2 * 2} bytes besides inputs and outputs" in text
    assert "swiglu_backward_k0, swiglu_backward_k1" in text and "backward_k2" not in text and not calls
    assert "backward" not in str(fn.explain(*leaves(SWIGLU_TRAINED, needs=[])))


def test_copies_of_a_model_share_the_function():
    fn = SWIGLU_TRAINED.function()
    assert copy.deepcopy({"fn": fn})["fn"] is fn


@kernels
def test_a_cotangent_that_is_not_there_is_not_loaded(path):
    fn, calls = function(AFFINE, path)
    tensors = leaves(AFFINE)
    derivative = fn.training(autograd.Eager(fn)).derivative
    step = derivative.step((YES,) * 5 + (NO,), (True, False))
    names = [a.name for a in step.program.inputs]
    assert "d_q" not in names and "d_u" in names and "d_q = f.f32(0.0)" in inspect.getsource(
        step.functions[step.program.kernels[0].phases[0].fn]
    )
    output = fn(*tensors).u
    del calls[:]
    given = cotangents([output])
    got = torch.autograd.grad(output, [t for t in tensors if t.requires_grad], given)
    assert calls[0] == "affine_backward_k0_without3"
    agree(got, truth(AFFINE, tensors, given))
