"""Derivatives at run time: autograd's other uses, autocast, checkpoints, gradient buffers; both paths, without a GPU."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from coda_lang.backend_cute import torch_fns  # noqa: E402
from coda_lang.backend_cute.errors import CallError  # noqa: E402
from coda_lang.backend_cute.selfcheck import error  # noqa: E402
from tests import handwritten as hw  # noqa: E402
from tests.autograd_cases import (  # noqa: E402
    agree,
    both,
    cotangents,
    function,
    gradients,
    leaves,
    planned,
    saved,
    several,
    truth,
)
from tests.handwritten.training import AFFINE, LINEAR_RESIDUAL, SWIGLU_TRAINED, TRAINED  # noqa: E402

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
def test_a_cotangent_marked_as_negated(path):
    """As those of imaginary parts of conjugates are; kernels read memory, which has the other sign."""
    fn, _ = function(AFFINE, path)
    tensors = leaves(AFFINE)
    wanted = [t for t in tensors if t.requires_grad]
    for _ in range(2):  # the second time of a known kind
        (name, given), *_ = [(n, o) for n, o in zip(fn(*tensors)._fields, fn(*tensors)) if o.dtype == torch.float32]
        ones = torch.ones_like(given)
        want = torch.autograd.grad(getattr(fn(*tensors), name), wanted, -ones, allow_unused=True)
        got = torch.autograd.grad(getattr(fn(*tensors), name), wanted, torch._neg_view(ones), allow_unused=True)
        assert all(a is b or torch.equal(a, b) for a, b in zip(got, want))


@both
def test_dims_merged_and_split(path):
    """`[b, t, d]` for `[m, d]`, and a weight with its lane merged: gradients come in the dims of their inputs."""
    fn, _ = function(SWIGLU_TRAINED, path)
    x, w = leaves(SWIGLU_TRAINED)
    want, given = gradients(fn, [x, w])
    x3, w2 = x.detach().reshape(3, 11, 24).requires_grad_(), w.detach().reshape(32, 24).requires_grad_()
    for _ in range(3):  # decided at the first call of a kind, remembered for the next
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
