"""The language as it is described, rules 5 to 10: rounding, defs, gradients' marks, params, modules, values. See test_language.py."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from meaning import built, inputs, means, only  # noqa: E402
from test_language import refused, written  # noqa: E402

from coda_lang.ir.build_scope import prelude  # noqa: E402
from coda_lang.ir.interp import run  # noqa: E402
from coda_lang.passes.differentiate import differentiate  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
FINE = torch.tensor([1.0 + 2.0**-12, 3.0 - 2.0**-14, -0.3, 1e-8])  # f32 values that bf16 cannot hold


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


# --- 5. rounding -----------------------------------------------------------------------------------------------------------


def test_rule_5_a_cast_rounds() -> None:
    for text in ("y = bf16(x) * 2", "h: bf16 = x\ny = h * 2"):
        y = written(f"program p(x: f32[m]) -> (y: f32[m])\n{text}", x=FINE)["y"]
        assert torch.equal(y, bf16(FINE) * 2) and not torch.equal(y, FINE * 2)


def test_rule_5_a_name_in_the_signature_is_rounded_everywhere() -> None:
    got = written("program p(x: f32[m]) -> (h: bf16[m], y: f32[m])\nh = x * 3\ny = h - x * 3", x=FINE)
    assert torch.equal(got["y"], bf16(FINE * 3) - FINE * 3) and got["y"].any()


def test_rule_5_a_name_of_its_own_keeps_the_f32_value() -> None:
    got = written("program p(x: f32[m]) -> (h: bf16[m], y: f32[m])\nt = x * 3\nh = t\ny = t - x * 3", x=FINE)
    assert torch.equal(got["y"], torch.zeros(4)) and torch.equal(got["h"], (FINE * 3).bfloat16())


def test_rule_5_everything_else_is_f32() -> None:
    x = FINE.bfloat16()
    y = written("program p(x: bf16[m]) -> (y: f32[m])\ny = x * x / 3 + x", x=x)["y"]
    assert torch.equal(y, x.float() * x.float() / 3 + x.float())


def test_rule_5_an_operand_of_a_product_is_rounded_to_the_others_type() -> None:
    x, w = FINE[:, None], torch.tensor([[1.0], [2.0]])
    y = written("program p(x: f32[m, k], w: bf16[n, k]) -> (y: f32[m, n])\ny = x @ w", x=x, w=w)["y"]
    assert torch.equal(y, bf16(x) @ w.T)
    y = written("program p(x: f32[m, k], w: f16[n, k]) -> (y: f32[m, n])\ny = (x * 2) @ w", x=x, w=w)["y"]
    assert torch.equal(y, (x * 2).half().float() @ w.T)


def test_rule_5_two_f32_operands_are_an_error() -> None:
    start = "program p(x: f32[m, k], w: f32[n, k]) -> (y: f32[m, n])\n"
    assert refused(start + "y = x @ w") == {"C0307"}
    means(start + "y = bf16(x) @ w", lambda x, w: x @ w.T, {"m": 2, "n": 3, "k": 4})


def test_rule_5_the_logsumexp_of_stored_logits_is_of_the_rounded_ones() -> None:
    z = torch.linspace(-9, 9, 40).reshape(2, 20)
    got = written("program p(x: f32[m, v]) -> (z: bf16[m, v], l: f32[m])\nz = x\nl = logsumexp[v](z)", x=z)
    assert torch.equal(got["l"], bf16(z).logsumexp(1)) and not torch.equal(got["l"], z.logsumexp(1))


# --- 6. def ------------------------------------------------------------------------------------------------------------------


def test_rule_6_defaults_and_keywords() -> None:
    text = "def f(x, a=2, b=a + 1) = a * x + b\nprogram p(x: f32[m]) -> (u: f32[m], v: f32[m], w: f32[m])\n"
    text += "u = f(x)\nv = f(x, b=7)\nw = f(b=1, x=x, a=5)"
    means(text, lambda x: (2 * x + 3, 2 * x + 7, 5 * x + 1), {"m": 3})


def test_rule_6_one_bracket_name_binds_all_axes_given() -> None:
    text = "def total[d](x) = sum[d](x) / size[d]\nprogram p(x: f32[m, a, b=2]) -> (y: f32[m])\ny = total[a, b](x)"
    means(text, lambda x: x.mean((1, 2)), {"m": 3, "a": 4})


def test_rule_6_several_bracket_names_bind_one_axis_each() -> None:
    text = "def f[r, c](x) = sum[r, c](x) * sum[c](x * index[c])\nprogram p(x: f32[m, n]) -> (y: f32[m])\ny = f[m, n](x)"
    means(text, lambda x: x.sum() * (x * torch.arange(4)).sum(1), {"m": 3, "n": 4})


def test_rule_6_a_body_may_be_a_block() -> None:
    text = """
def both[d](x, s) =
    c = x - mean[d](x)
    h: bf16 = c * s
    h, c

program p(x: f32[m, d]) -> (y: f32[m, d], z: f32[m, d])
y, z = both[d](x, 3)
"""
    got = written(text, x=torch.stack((FINE, FINE * 7)))
    c = torch.stack((FINE, FINE * 7))
    c = c - c.mean(1, keepdim=True)
    assert torch.equal(got["y"], bf16(c * 3)) and torch.equal(got["z"], c)


def test_rule_6_a_def_sees_its_arguments_and_axes_only() -> None:
    program = "program p(x: f32[m, d]) -> (y: f32[m])\nlocal = 1\ny = f[d](x)"
    for body in ("x + local", "x + eps", "x + y"):
        assert refused(f"param eps = 1\ndef f[d](x) = sum[d]({body})\n{program}") == {"C0201"}
    assert refused(f"def f[d](x) = sum[d](x) + sum[m](x)\n{program}") == {"C0203"}


def test_rule_6_axes_and_values_are_separate() -> None:
    means("program p(m: f32[m, d], d: f32[d]) -> (y: f32[m, d])\ny = m * d", lambda m, d: m * d, {"m": 3, "d": 4})


def test_rule_6_yours_shadow_the_preludes() -> None:
    text = "def softmax[v](z) = z / sum[v](z)\nprogram p(z: f32[m, v]) -> (y: f32[m, v])\ny = softmax[v](z)"
    means(text, lambda z: z / z.sum(1, keepdim=True), {"m": 3, "v": 4})


def test_rule_6_defs_may_call_each_other_in_any_order_but_not_themselves() -> None:
    means("def f(x) = g(x) + 1\ndef g(x) = 2 * x\nprogram p(x: f32[m]) -> (y: f32[m])\ny = f(x)", lambda x: 2 * x + 1, {"m": 3})
    assert refused("def f(x) = g(x)\ndef g(x) = f(x)\nprogram p(x: f32[m]) -> (y: f32[m])\ny = f(x)") == {"C0209"}


def rope(x, pos, freq, sign):
    a, b = x.unbind(1)
    c, s = (pos[:, None] * freq).cos(), sign * (pos[:, None] * freq).sin()
    return torch.stack((a * c - b * s, a * s + b * c), dim=1)


SMOOTH = "smoothed_cross_entropy[v](x, i, 0.25, ignore_index=2)"
PRELUDE = {
    "rmsnorm": ("rmsnorm[v](x, g, 1e-5)", lambda x, g, **_: F.rms_norm(x, g.shape, g, eps=1e-5)),
    "rmsnorm_offset": ("rmsnorm_offset[v](x, g, 1e-5)", lambda x, g, **_: F.rms_norm(x, g.shape, 1 + g, eps=1e-5)),
    "layernorm": ("layernorm[v](x, g, b, 1e-5)", lambda x, g, b, **_: F.layer_norm(x, g.shape, g, b, eps=1e-5)),
    "l2norm": ("l2norm[v](x, 1e-5)", lambda x, **_: x / (x.square().sum(1, keepdim=True) + 1e-5).sqrt()),
    "log_softmax": ("log_softmax[v](x)", lambda x, **_: F.log_softmax(x, 1)),
    "softmax": ("softmax[v](x)", lambda x, **_: F.softmax(x, 1)),
    "softmax_statistics": ("top, lse = softmax_statistics[v](x)\ny = top - lse", lambda x, **_: F.log_softmax(x, 1).amax(1)),
    "cross_entropy": ("cross_entropy[v](x, i)", lambda x, i, **_: F.cross_entropy(x, i, reduction="none")),
    "smoothed_cross_entropy": (
        SMOOTH,
        lambda x, i, **_: F.cross_entropy(x, i, reduction="none", label_smoothing=0.25, ignore_index=2),
    ),
    "soft_cross_entropy": ("soft_cross_entropy[v](x, x * x)", lambda x, **_: -(x * x * F.log_softmax(x, 1)).sum(1)),
    "unless_ignored": ("unless_ignored(mean[v](x), i, 2)", lambda x, i, **_: torch.where(i == 2, 0.0, x.mean(1))),
    "mean_over": ("mean_over[m](sum[v](x), i < 3)", lambda x, i, **_: x.sum(1)[i < 3].mean()),
    "weighted_mean": ("weighted_mean[m](sum[v](x), f32(i))", lambda x, i, **_: (x.sum(1) * i).sum() / i.sum()),
    "z_loss": ("z_loss[v](x, 0.5)", lambda x, **_: 0.5 * x.logsumexp(1).square()),
    "swiglu": ("swiglu(x, g)", lambda x, g, **_: F.silu(x) * g),
    "swiglu_clamped": (
        "swiglu_clamped(x, g, limit=0.5, alpha=1.5)",
        lambda x, g, **_: x.clamp(max=0.5) * torch.sigmoid(1.5 * x.clamp(max=0.5)) * (g.clamp(-0.5, 0.5) + 1),
    ),
    "geglu": ("geglu(x, g)", lambda x, g, **_: F.gelu(x) * g),
    "geglu_tanh": ("geglu_tanh(x, g)", lambda x, g, **_: F.gelu(x, approximate="tanh") * g),
    "reglu": ("reglu(x, g)", lambda x, g, **_: F.relu(x) * g),
    "relu2glu": ("relu2glu(x, g)", lambda x, g, **_: F.relu(x).square() * g),
    "glu": ("glu(x, g)", lambda x, g, **_: F.sigmoid(x) * g),
    "rotate": ("rotate[lane](q, cos(i * f), sin(i * f))", lambda q, i, f, **_: rope(q, i, f, 1)),
    "rope": ("rope[lane](q, i, f)", lambda q, i, f, **_: rope(q, i, f, 1)),
    "rope_clockwise": ("rope_clockwise[lane](q, i, f)", lambda q, i, f, **_: rope(q, i, f, -1)),
    "rope_exact": ("rope_exact[lane](q, i, f, 0.001 * f)", lambda q, i, f, **_: rope(q, i, 2.002 * math.pi * f, 1)),
    "angle": ("cos(angle(i, f))", lambda i, f, **_: (i[:, None] * f).cos()),
    "angle_of_turns": ("sin(angle_of_turns(i, f, 0.0))", lambda i, f, **_: (i[:, None] * (2 * math.pi * f)).sin()),
    "fraction_of_turn": ("fraction_of_turn(x, 0.25)", lambda x, **_: 2 * math.pi * (x - x.round() + 0.25)),
    "lora": ("lora(bf16(x), u, o, 2.0)", lambda x, u, o, **_: 2 * x @ u.T @ o.T),
    "softcap": ("softcap(x, 30)", lambda x, **_: 30 * (x / 30).tanh()),
    "mse": ("mse[v](x, g)", lambda x, g, **_: (x - g).square().mean(1)),
}


RESULTS = {  # axes, where they are neither those of x nor of q
    "m": ("softmax_statistics", "cross_entropy", "smoothed_cross_entropy", "soft_cross_entropy", "unless_ignored", "z_loss", "mse"),
    "": ("mean_over", "weighted_mean"),
    "m, p": ("angle", "angle_of_turns", "lora"),
}


@pytest.mark.parametrize("name", PRELUDE)
def test_rule_6_prelude(name: str) -> None:
    call, eager = PRELUDE[name]
    reads = eager.__code__.co_varnames
    axes = "m, lane, p" if "q" in reads else next((a for a, names in RESULTS.items() if name in names), "m, v")
    signature = "(x: f32[m, v], g: f32[v], b: f32[v], i: i64[m], q: f32[m, lane=2, p], f: f32[p], u: bf16[r, v], o: bf16[p, r])"
    body = call if "\n" in call else f"y = {call}"
    sizes = {"m": 4, "v": 5, "p": 3, "r": 2}
    means(f"program p{signature} -> (y: f32[{axes}])\n{body}", eager, sizes, {"i": (0, 5)}, tolerance=1e-8)


def test_rule_6_the_whole_prelude_is_tested_and_printed() -> None:
    source, library = prelude()
    assert set(library.defs) == set(PRELUDE)
    assert all(d.doc for d in library.defs.values())
    page = (ROOT / "docs" / "prelude.md").read_text(encoding="utf-8")
    assert source.text in page, "docs/prelude.md prints coda_lang/prelude.coda: copy it there"


def test_rule_6_ignored_targets_give_exactly_zero() -> None:
    """Their logit lies outside the axis, so gather gives NaN, which `where` drops."""
    text = "program p(x: f32[m, v], i: i64[m]) -> (y: f32[m])\ny = cross_entropy[v](x, i)"
    y = written(text, x=torch.randn(3, 4), i=torch.tensor([1, -100, 3]))["y"]
    assert y[1] == 0 and torch.isfinite(y).all() and (y[0::2] > 0).all()


# --- 7. gradients: what a source says of them ----------------------------------------------------------------------------------


def test_rule_7_marks() -> None:
    text = "forward program p(x: f32[m], const c: f32[m]) -> (y: f32[m])\nh = stop_gradient(x) * c\ny = h\nsave h"
    p = only(text)
    assert (p.forward_only, p.inputs[1].const, p.save) == (True, True, (p.outputs[0].value.name,))
    means(p, lambda x, c: x * c, {"m": 3})


# --- 8 and 9. params, modules --------------------------------------------------------------------------------------------------


def test_rule_8_params_and_run_time_scalars() -> None:
    text = "param a = 2, b = -1e2\nprogram p(x: f32[m], s: f32[]) -> (y: f32[m])\ny = s * x + a * b"
    means(text, lambda x, s: s * x - 200, {"m": 3})
    means(only(text, params={"b": 0.5}), lambda x, s: s * x + 1, {"m": 3})


def test_rule_9_several_programs_share_params_and_defs() -> None:
    p, q = (f"program {name}(x: f32[m]) -> (y: f32[m])\ny = " for name in "pq")
    programs = built(f"param a = 3\ndef f(x, k) = k * x\n{p}f(x, a)\n{q}x + a")
    means(programs["p"], lambda x: 3 * x, {"m": 3})
    means(programs["q"], lambda x: x + 3, {"m": 3})


def test_rule_9_generic_programs() -> None:
    text = "type T = bf16 | f16\nprogram p(x: T[m, k], w: T[n, k]) -> (y: T[m, n])\nh: T = x @ w\ny = T(h) + h"
    for program in built(text).values():
        means(program, lambda x, w: 2 * (x @ w.T), {"m": 2, "n": 3, "k": 4})


def test_rule_9_a_program_needs_no_product() -> None:
    text = "program norm(x: bf16[m, d], g: bf16[d]) -> (y: bf16[m, d])\ny = rmsnorm[d](x, g, 1e-6)"
    means(text, lambda x, g: F.rms_norm(x, g.shape, g, eps=1e-6), {"m": 3, "d": 4}, tolerance=1e-9)


def test_rule_9_conditions() -> None:
    p = only("program p(x: f32[m, d]) -> (y: f32[m])\nrequire d % 8 == 0 and m > 1\nnominal m = 4096\ny = sum[d](x)")
    assert eval(p.requires[0], {"d": 16, "m": 2}) and not eval(p.requires[0], {"d": 12, "m": 2})
    assert p.nominal == (("m", 4096),)


def test_rule_9_lines_go_on_before_an_operator() -> None:
    means("program p(x: f32[m])\n    -> (y: f32[m])\ny = x\n    * 2\n    + 1", lambda x: 2 * x + 1, {"m": 3})


# --- 10. values ----------------------------------------------------------------------------------------------------------------


def test_rule_10_numbers() -> None:
    start = "program p(x: f32[m], i: i32[m], j: i64[m]) -> (y: f32[m])\n"
    for body, eager in {
        "y = i / 2": lambda x, i, j: i.double() / 2,
        "y = i * x": lambda x, i, j: i * x,
        "y = f32(i + j * 2)": lambda x, i, j: (i + 2 * j).double(),
        "y = -x ** 2": lambda x, i, j: -(x**2),
        "y = x * i - -j": lambda x, i, j: x * i + j,
        "y = where(x < inf and not (i == 2 or j != 1), x, -1.5)": lambda x, i, j: torch.where(~((i == 2) | (j != 1)), x, -1.5),
        "y = max(x, 0.25) - min(x, i)": lambda x, i, j: x.clamp(min=0.25) - torch.minimum(x, i.double()),
        "y = clamp(x, -0.5, hi=0.5)": lambda x, i, j: x.clamp(-0.5, 0.5),
        "y = floor(x) + round(x) + fma(x, x, 1)": lambda x, i, j: x.floor() + x.round() + x * x + 1,
        "y = where(i > 1, 1, 0)": lambda x, i, j: torch.where(i > 1, 1.0, 0.0).double(),
    }.items():
        means(start + body, eager, {"m": 40})


def test_rule_10_bools_and_numbers_do_not_mix() -> None:
    start = "program p(x: f32[m], c: bool[m]) -> (y: f32[m])\n"
    assert refused(start + "y = x + c") == {"C0301"}
    assert refused(start + "y = where(x, x, x)") == {"C0301"}
    assert refused(start + "y = c") == {"C0308"}
    means(start + "y = where(c, x, 0.0)", lambda x, c: torch.where(c, x, 0.0), {"m": 9})


def test_rule_10_reductions_to_a_scalar() -> None:
    text = "program p(x: f32[m, n]) -> (a: f32[], b: f32[])\na = sum[m, n](x)\nb = max[n](mean[m](x))"
    means(text, lambda x: (x.sum(), x.mean(0).amax()), {"m": 3, "n": 4})


NAN, INF = float("nan"), float("inf")


def test_rule_10_nan_and_infinity_propagate() -> None:
    x = torch.tensor([NAN, INF, -INF])
    outs = ", ".join(f"y{i}: f32[m]" for i in range(4))
    got = written(f"program p(x: f32[m]) -> ({outs})\ny0 = relu(x)\ny1 = max(x, 0)\ny2 = min(x, 0)\ny3 = clamp(x, -1, 1)", x=x)
    for y in got.values():
        assert math.isnan(y[0])
    assert got["y0"][1] == INF and got["y1"][1] == INF and got["y2"][2] == -INF and got["y3"][1] == 1
    top = written("program p(x: f32[m]) -> (a: f32[], b: f32[])\na = max[m](x)\nb = amax[m](x)", x=x)
    assert math.isnan(top["a"]) and math.isnan(top["b"])


def test_rule_10_gather_outside_gives_nan() -> None:
    text = "program p(z: f32[m, v], i: i32[m]) -> (y: f32[m])\ny = gather[v](z, i)"
    y = written(text, z=torch.ones(4, 3), i=torch.tensor([0, 3, -1, 2]))["y"]
    assert torch.isnan(y).tolist() == [False, True, True, False]


def test_rule_10_logsumexp_of_minus_infinity() -> None:
    y = written("program p(z: f32[m, v]) -> (y: f32[m])\ny = logsumexp[v](z)", z=torch.full((2, 3), -INF))["y"]
    assert (y == -INF).all()


# --- chunks ----------------------------------------------------------------------------------------------------------------


CHUNKED = "program p(x: bf16[m, d=8], w: bf16[v, d]) -> (y: f32[m])\ny = sum[v](x @ w)\n"


def test_chunk_is_noted() -> None:
    assert only(CHUNKED + "chunk v by 64").chunk == (("v", 64),)
    assert only(CHUNKED).chunk == ()


@pytest.mark.parametrize(
    "text, code",
    [
        ("chunk q by 64", "C0203"),
        ("chunk d by 8", "C0321"),
        ("chunk v by 60", "C0321"),
        ("chunk v by 64\nchunk m by 8", "C0321"),
        ("z = rename[v -> u](sum[m](x @ w))\nchunk v by 64", "C0321"),
        ("chunk v by 0", "C0133"),
        ("chunk v by 2.5", "C0133"),
        ("chunk v = 64", "C0132"),
        ("chunk v of 64", "C0132"),
        ("chunk v", "C0132"),
    ],
)
def test_what_cannot_be_chunked(text: str, code: str) -> None:
    assert refused(CHUNKED + text) == {code}


@pytest.mark.parametrize("name", PRELUDE)
def test_rule_7_gradients_of_the_prelude_are_torchs(name: str) -> None:
    """Derived from the def, against autograd of what PyTorch has for it."""
    call, eager = PRELUDE[name]
    reads = eager.__code__.co_varnames
    axes = "m, lane, p" if "q" in reads else next((a for a, names in RESULTS.items() if name in names), "m, v")
    signature = "(x: f32[m, v], g: f32[v], b: f32[v], i: i64[m], q: f32[m, lane=2, p], f: f32[p], u: bf16[r, v], o: bf16[p, r])"
    program = only(f"program p{signature} -> (y: f32[{axes}])\n" + (call if "\n" in call else f"y = {call}"))
    given = inputs(program, {"m": 4, "v": 5, "p": 3, "r": 2}, {"i": (0, 5)})
    given = {k: t.requires_grad_(t.is_floating_point()) for k, t in given.items()}
    value = eager(**given)
    upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted = [k for k, t in given.items() if t.requires_grad]
    want = torch.autograd.grad(value, [given[k] for k in wanted], upstream, allow_unused=True)
    derived = differentiate(program)
    got = run(derived.program, {**{k: t.detach() for k, t in given.items()}, derived.cotangents[0][1]: upstream}, torch, precision="exact")
    for (k, gradient), w in zip(derived.gradients, want, strict=True):
        expected = torch.zeros_like(given[k]) if w is None else w
        torch.testing.assert_close(got[gradient], expected, rtol=1e-7, atol=1e-7)
