"""Cross-entropy programs against torch.nn.functional in float64, results and gradients (rows 7 and 19 to 21 of the list of known failures).

Every option of the prelude's family, as a program whose loss is one number and as one whose losses are one a row; vocabularies that no
tile divides, targets in the last columns, ignored rows, upstream gradients of their own for each row.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import coda_lang  # noqa: E402
from coda_lang.backend_cute import autograd  # noqa: E402

EXACT = 1e-12  # options below are exact in f32
SHAPES = ((5, 24, 7), (33, 8, 130), (140, 16, 261))  # m, d, v
HEAD = "(x: bf16[m, d], w: bf16[v, d], b: bf16[v], target: i64[m], weight: f32[m])"

# name: statements that give `l` a row, and the same by torch from z = x @ w.T + b; no ignored row is special
ROWS = {
    "plain": ("l = cross_entropy[v](x @ w, target)", lambda z, z_b, t: F.cross_entropy(z, t, reduction="none")),
    "bias": ("l = cross_entropy[v](x @ w + b, target)", lambda z, z_b, t: F.cross_entropy(z_b, t, reduction="none")),
    "smoothing": (
        "l = smoothed_cross_entropy[v](x @ w, target, 0.25)",
        lambda z, z_b, t: F.cross_entropy(z, t, reduction="none", label_smoothing=0.25),
    ),
    "z_loss": (
        "z = x @ w\nl = cross_entropy[v](z, target) + unless_ignored(z_loss[v](z, 0.125), target)",
        lambda z, z_b, t: F.cross_entropy(z, t, reduction="none") + torch.where(t == -100, 0.0, 0.125 * z.logsumexp(1).square()),
    ),
    "softcap": (
        "l = cross_entropy[v](softcap(x @ w + b, 2.0), target)",
        lambda z, z_b, t: F.cross_entropy(2 * torch.tanh(z_b / 2), t, reduction="none"),
    ),
    "ignore_index": (
        "l = cross_entropy[v](x @ w, target, ignore_index=3)",
        lambda z, z_b, t: F.cross_entropy(z, torch.where(t == -100, 3, t), reduction="none", ignore_index=3),
    ),
    "all of it": (
        "z = softcap(x @ w + b, 4.0)\nl = unless_ignored(smoothed_cross_entropy[v](z, target, 0.5) + z_loss[v](z, 0.25), target)",
        lambda z, z_b, t: (
            F.cross_entropy(4 * torch.tanh(z_b / 4), t, reduction="none", label_smoothing=0.5)
            + torch.where(t == -100, 0.0, 0.25 * (4 * torch.tanh(z_b / 4)).logsumexp(1).square())
        ),
    ),
}
REDUCTIONS = {
    "none": ("f32[m]", "l", lambda each, t, weight: each),
    "sum": ("f32[]", "sum[m](l)", lambda each, t, weight: each.sum()),
    "mean": ("f32[]", "mean_over[m](l, target != -100)", lambda each, t, weight: each.sum() / max(int((t != -100).sum()), 1)),
    "weighted": ("f32[m]", "weight * l", lambda each, t, weight: weight * each),
    "weighted mean": (
        "f32[]",
        "weighted_mean[m](l, unless_ignored(weight, target))",
        lambda each, t, weight: (weight * each).sum() / weight[t != -100].sum() if bool((t != -100).any()) else 0 * each.sum(),
    ),
}


def compiled(rows: str, reduction: str, more: str = ""):
    kind, expression, _ = REDUCTIONS[reduction]
    statements = ROWS[rows][0].replace("-100", "3") if rows == "ignore_index" else ROWS[rows][0]
    if rows == "ignore_index":
        expression = expression.replace("!= -100", "!= 3").replace("unless_ignored(weight, target)", "unless_ignored(weight, target, 3)")
    return coda_lang.compile(f"program p{HEAD} -> (loss: {kind})\n{statements}\nloss = {expression}\n{more}\n")


def drawn(m: int, d: int, v: int, ignored: str = "some"):
    """Inputs whose targets are the last columns now and then."""
    gen = torch.Generator().manual_seed(m)
    x, w = torch.randn(m, d, generator=gen).bfloat16(), (torch.randn(v, d, generator=gen) * d**-0.25).bfloat16()
    target = torch.randint(0, v, (m,), generator=gen)
    target[::4] = v - 1
    if ignored == "some":
        target[1::5] = -100
    elif ignored == "all":
        target[:] = -100
    return x, w, torch.randn(v, generator=gen).bfloat16(), target, torch.rand(m, generator=gen) + 0.5


def torchs(rows: str, reduction: str, tensors):
    """Loss and gradients in float64, with an upstream gradient of its own for each result."""
    x, w, b, target, weight = (t.double().requires_grad_() if t.is_floating_point() else t for t in tensors)
    z = x @ w.T
    if rows == "ignore_index":
        target = torch.where(target == 3, -100, target)
    loss = REDUCTIONS[reduction][2](ROWS[rows][1](z, z + b, target), target, weight)
    upstream = torch.randn(loss.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float32)
    found = torch.autograd.grad(loss, [x, w, b, weight], upstream.double(), allow_unused=True)
    zeros = [torch.zeros_like(t) if g is None else g for t, g in zip((x, w, b, weight), found)]
    return loss.detach(), upstream, dict(zip(("x", "w", "b", "weight"), zeros))


def held(fn, rows: str, reduction: str, tensors) -> None:
    """The reference, the plan and the planned backward against torch."""
    loss, upstream, gradients = torchs(rows, reduction, tensors)
    for got in (fn.reference(*tensors, exact=True), fn.reference_planned(*tensors, exact=True)):
        torch.testing.assert_close(got, loss, rtol=EXACT, atol=EXACT)
    found = autograd.gradients_planned(fn, tensors, {"loss": upstream})
    for name, want in gradients.items():
        got = found.get(name, torch.zeros_like(want))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=EXACT, msg=lambda text, name=name: f"gradient of {name}: {text}")


@pytest.mark.parametrize("rows", ROWS)
def test_a_loss_a_row(rows: str) -> None:
    fn = compiled(rows, "none")
    for shape in SHAPES:
        tensors = list(drawn(*shape))
        if rows == "ignore_index":
            tensors[3] = torch.where(tensors[3] == -100, 3, tensors[3])
        held(fn, rows, "none", tensors)


@pytest.mark.parametrize("reduction", ["sum", "mean", "weighted", "weighted mean"])
@pytest.mark.parametrize("rows", ["plain", "all of it"])
def test_reductions_by_composition(rows: str, reduction: str) -> None:
    fn = compiled(rows, reduction)
    for shape in SHAPES:
        held(fn, rows, reduction, drawn(*shape))


def test_the_mean_is_torchs() -> None:
    x, w, b, target, weight = drawn(33, 8, 130)
    fn = compiled("bias", "mean")
    want = F.cross_entropy(x.double() @ w.double().T + b.double(), target)
    torch.testing.assert_close(fn.reference(x, w, b, target, weight, exact=True), want, rtol=EXACT, atol=0)


@pytest.mark.parametrize("more", ["", "recompute z"])
def test_row_19_each_row_is_scaled_by_its_own_upstream_gradient(more: str) -> None:
    fn = coda_lang.compile(f"program p{HEAD} -> (loss: f32[m])\nz = x @ w + b\nloss = cross_entropy[v](z, target)\n{more}\n")
    tensors = drawn(33, 8, 130)
    upstream = torch.zeros(33)
    upstream[7] = 2.0
    found = autograd.gradients_planned(fn, tensors, {"loss": upstream})
    assert not found["x"][[i for i in range(33) if i != 7]].any() and found["x"][7].any()
    held(fn, "bias", "none", tensors)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", ["bias", "all of it"])
def test_row_20_all_rows_ignored(rows: str, reduction: str) -> None:
    """0, and gradients that are there and exactly 0; torch's mean is NaN."""
    fn = compiled(rows, reduction)
    tensors = [t.requires_grad_() if t.is_floating_point() else t for t in drawn(9, 16, 30, ignored="all")]
    loss = fn(*tensors)
    assert not loss.detach().any()
    loss.backward(torch.ones_like(loss))
    assert all(t.grad is not None and t.grad.shape == t.shape and not t.grad.any() for t in tensors[:3])


@pytest.mark.parametrize("rows", [r for r in ROWS if r not in ("plain", "ignore_index")])
def test_row_21_every_option_has_an_effect(rows: str) -> None:
    tensors = drawn(33, 8, 130)
    plain = compiled("plain", "none").reference(*tensors, exact=True)
    with_option = compiled(rows, "none").reference(*tensors, exact=True)
    kept = tensors[3] != -100
    assert (plain - with_option)[kept].abs().min() > 1e-6
    assert not with_option[~kept].any()


def test_distillation() -> None:
    text = "program p(x: bf16[m, d], w: bf16[v, d], p: f32[m, v]) -> (l: f32[m])\nl = soft_cross_entropy[v](x @ w, p)\n"
    fn, gen = coda_lang.compile(text), torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 24, generator=gen).bfloat16(), torch.randn(130, 24, generator=gen).bfloat16()
    p = torch.softmax(torch.randn(5, 130, generator=gen), 1)
    leaves = [t.double().requires_grad_() for t in (x, w, p)]
    want = -(leaves[2] * F.log_softmax(leaves[0] @ leaves[1].T, 1)).sum(1)
    torch.testing.assert_close(fn.reference(x, w, p, exact=True), want.detach(), rtol=1e-12, atol=1e-12)
    found = autograd.gradients_planned(fn, (x, w, p), {"l": torch.ones(5)})
    for name, g in zip("xwp", torch.autograd.grad(want.sum(), leaves)):
        torch.testing.assert_close(found[name], g, rtol=1e-10, atol=1e-12)


def test_an_infinite_logit_of_a_masked_column_costs_nothing() -> None:
    """Columns masked with -inf take part in no logsumexp; label smoothing over them is infinite, as in torch."""
    text = "program p(x: bf16[m, d], w: bf16[v, d], t: i64[m]) -> (l: f32[m])\n"
    fn = coda_lang.compile(text + "l = cross_entropy[v](where(index[v] < 100, x @ w, -inf), t)\n")
    x, w, _, target, _ = drawn(33, 8, 130)
    target = torch.where(target >= 100, 99, target)
    a, c = x.double().requires_grad_(), w.double().requires_grad_()
    z = (a @ c.T).masked_fill(torch.arange(130) >= 100, -torch.inf)
    want = F.cross_entropy(z, target, reduction="none")
    torch.testing.assert_close(fn.reference_planned(x, w, target, exact=True), want.detach(), rtol=1e-12, atol=1e-12)
    found = autograd.gradients_planned(fn, (x, w, target), {"l": torch.ones(33)})
    for name, g in zip("xw", torch.autograd.grad(want.sum(), [a, c])):
        torch.testing.assert_close(found[name], g, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["lm_mean_loss", "lm_weighted_loss"])
def test_recomputed_logits_are_not_stored(name: str, root) -> None:
    fn = vars(coda_lang.compile(root / "specs" / "lm_mean_loss.coda"))[name]
    both = {"m", "v"}
    assert all(not both <= set(o.axes) for p in (fn.program, fn.saving) if p for o in (*p.outputs, *p.temps))
    (temporary,) = [t for t in fn.backward.temps if both <= set(t.axes)]
    assert temporary.dtype == "bf16"  # their gradient, the operand of two products


def test_recompute_reaches_the_product_that_a_value_is_made_of() -> None:
    """Else what it is made of would be saved in its place."""
    text = f"program p{HEAD} -> (loss: f32[m])\nz = softcap(x @ w + b, 30.0)\nloss = cross_entropy[v](z, target)\n"
    saved, again = coda_lang.compile(text), coda_lang.compile(text + "recompute z\n")
    assert any({"m", "v"} <= set(o.axes) for o in saved.saving.outputs)
    assert not any({"m", "v"} <= set(o.axes) for o in again.saving.outputs)
    kept = coda_lang.compile(text.replace("z =", "y = x @ w + b\nz =").replace("x @ w + b, 30", "y, 30") + "save y\nrecompute z\n")
    assert any({"m", "v"} <= set(o.axes) for o in kept.saving.outputs)
