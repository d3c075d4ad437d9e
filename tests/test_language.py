"""The language as it is described, rule by rule: what is printed there builds, and means in float64 what PyTorch written by hand says.

Rules are numbered as in docs/language.md. What a rule says about calling a compiled function (merged and split axes) is in
test_binding.py and test_function.py; every error's place is in test_build.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from meaning import built, inputs, means, only  # noqa: E402

from coda_lang.diagnostics.model import CodaError  # noqa: E402
from coda_lang.ir.interp import run  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def refused(text: str) -> set[str]:
    """The codes with which a source is refused."""
    with pytest.raises(CodaError) as raised:
        built(text)
    return {d.code for d in raised.value.diagnostics}


def written(text: str, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    """The outputs as the program is written: f32, rounded where it says so."""
    return run(only(text), given, torch)


# --- the printed examples -------------------------------------------------------------------------------------------------


def test_example_swiglu() -> None:
    text = """
program swiglu(x: bf16[m, d], w: bf16[f, lane=2, d]) -> (y: bf16[m, f])

gate, up = x @ w
y = silu(gate) * up
"""
    means(text, lambda x, w: F.silu(x @ w[:, 0].T) * (x @ w[:, 1].T), {"m": 3, "d": 4, "f": 5})


MLP_BLOCK = """
program mlp_block(a: bf16[m, h], x0: bf16[m, d], wo: bf16[d, h], g: bf16[d],
                  wg: bf16[f, d], wu: bf16[f, d], wd: bf16[d, f]) -> (x2: bf16[m, d])
param eps = 1e-5

x1: bf16 = a @ wo + x0
n        = rmsnorm[d](x1, g, eps)
x2       = (silu(n @ wg) * (n @ wu)) @ wd + x1
"""


def test_example_mlp_block() -> None:
    def eager(a, x0, wo, g, wg, wu, wd):
        x1 = a @ wo.T + x0
        n = F.rms_norm(x1, g.shape, g, eps=1e-5)
        return (F.silu(n @ wg.T) * (n @ wu.T)) @ wd.T + x1

    means(MLP_BLOCK, eager, {"m": 3, "h": 4, "d": 5, "f": 6}, tolerance=1e-9)


def test_example_mlp_block_rounds_where_it_says() -> None:
    """x1 and the operands n and silu(…)·… are rounded, and nothing else: contractions in f32 over bf16 values, one rounding of x2."""
    p = only(MLP_BLOCK)
    casts = {e.args[0].name: e.out.name for e in p.eqns if e.op == "cast"}
    assert "x1" in casts.values() and "x2" in casts.values() and len(casts) == 4
    assert "n" in casts, "the norm is f32; its rounding is that of the products' operand, once for both"

    given = {k: v.bfloat16() for k, v in inputs(p, {"m": 3, "h": 4, "d": 5, "f": 6}).items()}
    up = {k: v.float() for k, v in given.items()}
    x1 = (up["a"] @ up["wo"].T + up["x0"]).bfloat16().float()
    n = (x1 * torch.rsqrt(x1.square().mean(1, keepdim=True) + 1e-5) * up["g"]).bfloat16().float()
    h = (F.silu(n @ up["wg"].T) * (n @ up["wu"].T)).bfloat16().float()
    torch.testing.assert_close(run(p, given, torch)["x2"], (h @ up["wd"].T + x1).bfloat16(), rtol=2**-7, atol=1e-5)


def test_example_lm_head() -> None:
    text = """
program lm_head(x: bf16[m, d], g: bf16[d], w: bf16[v, d], target: i64[m]) -> (loss: f32[m])
param eps = 1e-5, ignore_index = -100

z    = rmsnorm[d](x, g, eps) @ w
nll  = logsumexp[v](z) - gather[v](z, target)
loss = where(target == ignore_index, 0.0, nll)
"""

    def eager(x, g, w, target):
        target = torch.where(target == 0, -100, target)
        return F.cross_entropy(F.rms_norm(x, g.shape, g, eps=1e-5) @ w.T, target, reduction="none", ignore_index=-100)

    p = only(text)
    given = inputs(p, {"m": 8, "d": 4, "v": 6}, {"target": (0, 6)})
    given["target"] = torch.where(given["target"] == 0, -100, given["target"])
    assert (given["target"] == -100).any()
    torch.testing.assert_close(run(p, given, torch, precision="exact")["loss"], eager(**given), rtol=1e-9, atol=1e-9)


def test_example_qkv_rope() -> None:
    text = """
program qkv_rope(x: bf16[m, d], w: bf16[head, lane=2, pair=64, d], pos: i32[m], const freq: f32[pair])
    -> (y: bf16[m, head, lane, pair])
a, b = x @ w                        # lane outside pair: the half-split convention of Hugging Face weights
c, s = cos(pos * freq), sin(pos * freq)
y = pack[lane](a * c - b * s, a * s + b * c)
"""

    def eager(x, w, pos, freq):
        z = torch.einsum("md,hlpd->mhlp", x, w)
        a, b = z[:, :, 0], z[:, :, 1]
        c, s = (pos[:, None] * freq).cos()[:, None], (pos[:, None] * freq).sin()[:, None]
        return torch.stack((a * c - b * s, a * s + b * c), dim=2)

    means(text, eager, {"m": 3, "d": 4, "head": 2}, {"pos": (0, 9)})


# --- 1. axes have names ----------------------------------------------------------------------------------------------------


def test_rule_1_axes_are_a_set_and_order_changes_nothing() -> None:
    """Every storage order of the tensors is the same mathematics."""
    eager = torch.einsum
    for x, w, y in (("md", "nd", "mn"), ("dm", "nd", "nm"), ("dm", "dn", "mn")):
        text = f"program p(x: bf16[{', '.join(x)}], w: bf16[{', '.join(w)}]) -> (y: bf16[{', '.join(y)}])\ny = x @ w"
        means(text, lambda **t: eager(f"{x},{w}->{y}", t["x"], t["w"]), {"m": 3, "n": 4, "d": 5})  # noqa: B023


def test_rule_1_a_bias_goes_by_name_even_where_extents_agree() -> None:
    for axis, view in (("n", (1, 3)), ("m", (3, 1))):
        text = f"program p(x: bf16[m, k], w: bf16[n, k], b: bf16[{axis}]) -> (y: bf16[m, n])\ny = x @ w + b"
        means(text, lambda x, w, b: x @ w.T + b.reshape(view), {"m": 3, "n": 3, "k": 4})  # noqa: B023


def test_rule_1_one_extent_per_name() -> None:
    assert only("program p(x: f32[a=2, b]) -> (y: f32[b, a])\ny = x").extent("a") == 2
    assert refused("program p(x: f32[a=2]) -> (y: f32[a=3])\ny = x") == {"C0310"}


def test_rule_1_halves_and_interleaved_rows() -> None:
    """A checkpoint's halves are [lane=2, f, d], interleaved rows [f, lane=2, d]."""
    body = "gate, up = x @ w\ny = silu(gate) * up"
    for axes, take in (("lane=2, f, d", lambda w, i: w[i]), ("f, lane=2, d", lambda w, i: w[:, i])):
        text = f"program p(x: bf16[m, d], w: bf16[{axes}]) -> (y: bf16[m, f])\n{body}"
        means(text, lambda x, w: F.silu(x @ take(w, 0).T) * (x @ take(w, 1).T), {"m": 3, "d": 4, "f": 5})  # noqa: B023


# --- 2. @ ------------------------------------------------------------------------------------------------------------------


def test_rule_2_at_contracts_a_group_that_all_hold_adjacently() -> None:
    text = "program p(x: bf16[m, a, b], w: bf16[n, a, b]) -> (y: bf16[m, n])\ny = x @ w"
    means(text, lambda x, w: x.flatten(1) @ w.flatten(1).T, {"m": 3, "n": 4, "a": 2, "b": 5})
    assert only(text).eqns[0].attr("axes") == ("a", "b")


def test_rule_2_a_computed_operand_imposes_no_order() -> None:
    text = "program p(x: bf16[m, b, a], w: bf16[n, a, b]) -> (y: bf16[m, n])\ny = silu(x) @ w"
    means(text, lambda x, w: torch.einsum("mba,nab->mn", F.silu(x), w), {"m": 3, "n": 4, "a": 2, "b": 5})
    assert refused(text.replace("silu(x)", "x")) == {"C0306"}


def test_rule_2_an_output_is_stored_too() -> None:
    text = "program p(x: bf16[m, b, a], w: bf16[n, a, b]) -> (y: bf16[m, n], h: bf16[m, {}])\nh = silu(x)\ny = h @ w"
    assert refused(text.format("b, a")) == {"C0306"}
    assert only(text.format("a, b"))


def test_rule_2_anything_else_is_named() -> None:
    """matmul[k] contracts k; further shared axes are batch axes."""
    text = "program p(x: bf16[b, m, k], w: bf16[b, n, k]) -> (y: bf16[b, m, n])\ny = matmul[k](x, w)"
    means(text, lambda x, w: torch.bmm(x, w.mT), {"b": 2, "m": 3, "n": 4, "k": 5})
    assert only(text).eqns[0].attr("batch") == ("b",)
    apart = "program p(x: bf16[a, m, b], w: bf16[b, n, a]) -> (y: bf16[m, n])\ny = matmul[a, b](x, w)"
    means(apart, lambda x, w: torch.einsum("amb,bna->mn", x, w), {"a": 2, "b": 3, "m": 4, "n": 5})


def test_rule_2_each_side_keeps_an_axis() -> None:
    assert refused("program p(x: bf16[m, k], v: bf16[k]) -> (y: bf16[m])\ny = x @ v") == {"C0305"}
    assert refused("program p(x: bf16[b, k], w: bf16[b, n, k]) -> (y: bf16[b, n])\ny = matmul[k](x, w)") == {"C0305"}
    means("program p(x: bf16[m, k], v: bf16[k]) -> (y: bf16[m])\ny = sum[k](x * v)", lambda x, v: x @ v, {"m": 3, "k": 4})


def test_rule_2_at_binds_tighter_than_times_and_over() -> None:
    text = "program p(s: f32[m], x: bf16[m, k], w: bf16[n, k], t: f32[n]) -> (y: f32[m, n])\ny = s * x @ w / t"
    means(text, lambda s, x, w, t: s[:, None] * (x @ w.T) / t, {"m": 3, "n": 4, "k": 5})


def test_rule_2_rename() -> None:
    """A Gram matrix: the second copy of an axis needs a name of its own."""
    text = "program p(x: bf16[m, k]) -> (y: bf16[m, m2])\ny = x @ rename[m -> m2](x)"
    means(text, lambda x: x @ x.T, {"m": 3, "k": 4})


# --- 3. broadcasting ---------------------------------------------------------------------------------------------------------


def test_rule_3_union_of_axes() -> None:
    text = "program p(pos: i32[m], freq: f32[pair]) -> (y: f32[m, pair])\ny = pos * freq"
    means(text, lambda pos, freq: pos[:, None] * freq, {"m": 3, "pair": 4})


def test_rule_3_what_descends_from_a_product_does_not_gain_axes() -> None:
    start = "program p(x: bf16[m, k], w: bf16[n, k], r: bf16[m, q], s: f32[m]) -> (y: f32[m, n])\nz = x @ w\n"
    assert refused(start + "y = z + r") == {"C0302"}
    assert refused(start + "y = sum[n](z) * r") == {"C0302"}
    assert refused(start + "y = where(z > 0, z, r)") == {"C0302"}
    assert refused(start + "y = clamp(silu(z), 0.0, r)") == {"C0302"}
    assert only(start + "y = z * s + sum[q](r)")


def test_rule_3_a_norm_of_a_product_is_fine() -> None:
    text = "program p(x: bf16[m, k], w: bf16[n, k]) -> (y: f32[m, n])\nx1 = x @ w\ny = x1 * rsqrt(mean[n](x1 * x1))"
    means(text, lambda x, w: (lambda z: z * z.square().mean(1, keepdim=True).rsqrt())(x @ w.T), {"m": 3, "n": 4, "k": 5})


def test_rule_3_expand_says_that_an_outer_result_is_meant() -> None:
    start = "program p(x: bf16[m, k], w: bf16[n, k], r: f32[q]) -> (y: f32[m, n, q])\n"
    assert refused(start + "y = x @ w + r") == {"C0302"}
    means(start + "y = expand[q](x @ w) + r", lambda x, w, r: (x @ w.T)[..., None] + r, {"m": 3, "n": 4, "k": 5, "q": 2})


def test_rule_3_an_output_has_exactly_its_axes() -> None:
    assert refused("program p(x: f32[m]) -> (y: f32[m, n])\ny = x") == {"C0309"}
    assert refused("program p(x: f32[m, n]) -> (y: f32[m])\ny = x") == {"C0309"}


# --- 4. op[axes](args) -------------------------------------------------------------------------------------------------------


def test_rule_4_brackets_reduce() -> None:
    outs = ", ".join(f"y{i}: f32[m]" for i in range(7))
    calls = "\n".join(f"y{i} = {op}[a, b](x)" for i, op in enumerate(("sum", "mean", "max", "min", "amax", "logsumexp")))
    text = f"program p(x: f32[m, a, b]) -> ({outs})\n{calls}\ny6 = max[a](min[b](max(x, 0.25)))"

    def eager(x):
        z = x.flatten(1)
        smallest = x.clamp(min=0.25).amin(2).amax(1)
        return z.sum(1), z.mean(1), z.amax(1), z.amin(1), z.abs().amax(1), z.logsumexp(1), smallest

    means(text, eager, {"m": 3, "a": 4, "b": 5})


def test_rule_4_gather_index_size() -> None:
    text = """program p(z: f32[m, v], i: i64[m]) -> (a: f32[m], b: f32[m, v], c: f32[])
a = gather[v](z, i)
b = z * index[v]
c = size[v] * size[m, v]
"""

    def eager(z, i):
        return z.gather(1, i[:, None])[:, 0], z * torch.arange(5), torch.tensor(5.0 * 15, dtype=torch.float64)

    means(text, eager, {"m": 3, "v": 5}, {"i": (0, 5)})


def test_rule_4_gather_from_a_table() -> None:
    text = "program p(e: bf16[v, d], i: i64[m]) -> (y: bf16[m, d])\ny = gather[v](e, i)"
    means(text, lambda e, i: e[i], {"m": 6, "v": 5, "d": 3}, {"i": (0, 5)})


def test_rule_4_split_and_pack_are_inverses() -> None:
    text = "program p(x: bf16[lane=3, m]) -> (y: bf16[m, lane])\na, b, c = split[lane](x)\ny = pack[lane](a, b, c)"
    means(text, lambda x: x.T, {"m": 4})


def test_rule_4_short_split_where_exactly_one_axis_fits() -> None:
    means("program p(x: f32[m, lane=2]) -> (y: f32[m])\na, b = x\ny = a - b", lambda x: x[:, 0] - x[:, 1], {"m": 3})
    assert refused("program p(x: f32[m]) -> (y: f32[m])\na, b = x\ny = x") == {"C0311"}
    assert refused("program p(x: f32[a=2, b=2]) -> (y: f32[a])\ny, z = x") == {"C0311"}


QKV = "program p(x: bf16[m, d], w: bf16[head=48, d]) -> (q: bf16[m, qh], k: bf16[m, kh], v: bf16[m, vh])\n"


def test_rule_4_runs_of_a_fixed_axis() -> None:
    text = QKV + "q, k, v = split[head -> qh=32, kh=8, vh=8](x @ w)"
    means(text, lambda x, w: tuple((x @ w.T).split([32, 8, 8], dim=1)), {"m": 3, "d": 4})
    assert refused(QKV + "q, k, v = split[head -> qh=32, kh=8, vh=9](x @ w)") == {"C0312"}


def test_rule_4_pack_with_the_reversed_bracket_joins_runs() -> None:
    text = "program p(x: bf16[m, head=6]) -> (y: bf16[m, head])\na, b = split[head -> c=2, e=4](x)\ny = pack[e, c -> head](b, a)"
    means(text, lambda x: x.roll(-2, dims=1), {"m": 3})
    new = """program p(a: bf16[m, c=2], b: bf16[m, e=4]) -> (y: bf16[m, c])
u, v, w = split[whole -> c, x=2, z=2](pack[c, e -> whole](a, b))
y = u + rename[x -> c](v)
"""
    means(new, lambda a, b: a + b[:, :2], {"m": 3})


def test_rule_4_two_values_are_two_assignments() -> None:
    text = "program p(x: f32[m, lane=2], z: f32[m, lane]) -> (y: f32[m, lane])\na, b = x * z, x + z\ny = a / b"
    means(text, lambda x, z: (x * z) / (x + z), {"m": 3})


def test_rule_4_a_lane_is_logical() -> None:
    """Innermost, outermost, or two separate tensors: the same program."""
    body = "y = silu(gate) * up"
    halves = only(f"program p(x: bf16[m, d], w: bf16[lane=2, f, d]) -> (y: bf16[m, f])\ngate, up = x @ w\n{body}")
    rows = only(f"program p(x: bf16[m, d], w: bf16[f, lane=2, d]) -> (y: bf16[m, f])\ngate, up = x @ w\n{body}")
    two = only(f"program p(x: bf16[m, d], wg: bf16[f, d], wu: bf16[f, d]) -> (y: bf16[m, f])\ngate, up = x @ wg, x @ wu\n{body}")
    given = inputs(halves, {"m": 3, "d": 4, "f": 5})
    x, w = given["x"], given["w"]
    results = [
        run(halves, given, torch, precision="exact")["y"],
        run(rows, {"x": x, "w": w.transpose(0, 1)}, torch, precision="exact")["y"],
        run(two, {"x": x, "wg": w[0], "wu": w[1]}, torch, precision="exact")["y"],
    ]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])
