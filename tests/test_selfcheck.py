"""`python kernel.py` passes for right text and fails, by exit status, for an error planted in any epilogue line or record."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from coda_lang import driver  # noqa: E402
from coda_lang.backend_cute import selfcheck  # noqa: E402
from coda_lang.backend_cute import spec as s  # noqa: E402
from coda_lang.backend_cute.function import Function  # noqa: E402
from tests import handwritten as hw  # noqa: E402
from tests.handwritten.training import TRAINED  # noqa: E402


@pytest.mark.parametrize("name", [n for n in hw.ALL if n != "rearranged"])
def test_right_programs_pass(name, capsys):
    assert selfcheck.main([hw.ALL[name].function()], []) == 0
    text = capsys.readouterr().out
    assert "FAIL" not in text and text.count("ok   ") == 6 * len(hw.ALL[name].program.outputs)


def gelu_slightly_off(f, z, b, alpha):
    u = z * alpha + b
    return (z, f.gelu(u) * 1.0001)


def mean_of_one_too_few(f, total, n):
    return (total / (f.f32(n) - 1.0),)


def eps_off(f, z, g, total):
    return (z * f.rsqrt(total / 64.0 + 1.1e-5) * g,)


def off_by_one(f, z, target, v):
    return (z, z, z, f.eq(v, target + 1))


@pytest.mark.parametrize(
    "case, planted",
    [
        (hw.BIAS_GELU, {"bias_gelu_phase0": gelu_slightly_off}),
        (hw.RESIDUAL, {"residual_mean": mean_of_one_too_few}),
        (hw.HEAD_NORM, {"head_norm_phase1": eps_off}),
        (hw.LM_HEAD, {"lm_head_phase0": off_by_one}),
        (hw.SWIGLU, {"swiglu_phase0": lambda f, gate, up: (f.silu(up) * gate,)}),
    ],
    ids=lambda x: x.program.name if isinstance(x, hw.Case) else next(iter(x)),
)
def test_a_planted_error_fails(case, planted, capsys):
    assert selfcheck.main([case.function(**planted)], []) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_wrong_record_fails(capsys):
    gemm = hw.ROPE.program.kernels[0]
    swapped = dataclasses.replace(gemm, sinks=gemm.sinks[::-1])
    program = dataclasses.replace(hw.ROPE.program, kernels=(swapped,))
    assert selfcheck.main([Function(program, hw.ROPE.functions, hw.ROPE.stored)], []) == 1


def test_an_unwritten_output_fails(capsys):
    gemm = hw.QKV.program.kernels[0]
    narrow = tuple(dataclasses.replace(k, window=s.Window(128, 32)) if isinstance(k, s.RowReduce) else k for k in gemm.sinks)
    program = dataclasses.replace(hw.QKV.program, kernels=(dataclasses.replace(gemm, sinks=narrow), *hw.QKV.program.kernels[1:]))
    assert selfcheck.main([Function(program, hw.QKV.functions, hw.QKV.stored)], []) == 1


def test_one_number_may_have_been_lucky_in_eager_pytorch(capsys):
    """A loss behind a norm whose scale moved: rounded elsewhere than as written, its error is a draw of its own."""
    fn = coda_lang.compile(
        "forward program p(x: bf16[m, d], w: bf16[v, d], target: i64[m], g: f32[d]) -> (loss: f32[])\n"
        "loss = mean_over[m](cross_entropy[v](rmsnorm[d](x, g, 1e-5) @ w, target), target != -100)\n"
    )
    for seed in range(6):
        assert selfcheck.check(fn, {"m": 133, "d": 72, "v": 97}, seed, "cpu"), capsys.readouterr().out


def test_shapes_can_be_given(capsys):
    assert selfcheck.main([hw.LINEAR.function()], ["--shape", "m=3,d=5"]) == 0
    text = capsys.readouterr().out
    assert "linear(m=3, d=5, n=95)" in text
    with pytest.raises(SystemExit, match="no free axis 'q'"):
        selfcheck.main([hw.LINEAR.function()], ["--shape", "q=3"])
    assert selfcheck.main([hw.LINEAR.function(), hw.ROPE.function()], ["--shape", "m=3,n=5,head=2"]) == 0, "ROPE has no n"
    with pytest.raises(SystemExit) as ended:
        selfcheck.main([hw.LINEAR.function()], ["--shape", "m:3"])
    assert ended.value.code == 2


def test_errors_count_where_nan_and_infinity_stand():
    nan, inf = float("nan"), float("inf")
    a = torch.tensor([1.0, nan, inf])
    assert selfcheck.error(a, a) == 0
    for wrong in ([1.0, 2.0, inf], [1.0, nan, -inf], [nan, nan, inf], [1.0, nan, nan]):
        assert selfcheck.error(torch.tensor(wrong), a) == inf
    assert selfcheck.error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


@pytest.mark.slow
def test_the_emitted_script_checks_itself(tmp_path, root):
    """The whole way: text from a spec, run as a script; then with one epilogue line changed."""
    text = driver.emit(str(root / "specs" / "swiglu.coda"))
    path = tmp_path / "kernel.py"
    for planted in (False, True):
        line = next(x for x in text.splitlines() if "f.silu(" in x and "phase" not in x)
        path.write_text(text.replace(line, line.replace("f.silu(", "1.001 * f.silu("), 1) if planted else text)
        done = subprocess.run(
            [sys.executable, str(path), "--shape", "m=9"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)}
        )
        assert done.returncode == int(planted), done.stdout + done.stderr
        assert ("SOME OUTPUTS ARE WRONG" in done.stdout) == planted


# --- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_right_derivatives_pass(name, capsys):
    case = TRAINED[name]
    assert selfcheck.main([case.function()], []) == 0
    text = capsys.readouterr().out
    assert text.count("gradient of") == 3 * len(case.gradients) and "FAIL" not in text


def slope_off(f, d_y, gate, up):
    half = f.sigmoid(gate)
    return (d_y * up * (half + gate * half * (1.0 - half)) * 1.0001, d_y * f.silu(gate))


@pytest.mark.parametrize(
    "case, planted",
    [
        (TRAINED["swiglu"], {"swiglu_backward_phase0": slope_off}),
        (TRAINED["swiglu"], {"swiglu_saving_phase0": lambda f, gate, up: (f.silu(gate) * up, up, gate)}),
        (TRAINED["affine"], {"affine_total": lambda f, total: (total * 1.0001,)}),
        (TRAINED["linear_residual"], {"gradient_phase0": lambda f, z: (-z,)}),
    ],
    ids=lambda x: "" if isinstance(x, hw.Case) else next(iter(x)),
)
def test_an_error_planted_in_a_derivative_fails(case, planted, capsys):
    assert selfcheck.main([case.function(**planted)], []) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_condition_that_no_shape_tried_satisfies_asks_for_one(capsys):
    fn = coda_lang.compile("program p(x: bf16[m, d]) -> (y: bf16[m, d])\nrequire m % 7 == 3 and m > 100000\ny = x\n")
    assert selfcheck.main([fn], []) == 2
    assert "choose some, --shape m=…,d=…" in capsys.readouterr().err
