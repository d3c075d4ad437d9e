"""What once went wrong, each with the input that showed it: whatever names, shapes and numbers a program has, it means what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import coda_lang  # noqa: E402
from coda_lang import cli, driver, gradcheck, passes  # noqa: E402
from coda_lang.diagnostics.model import CodaError  # noqa: E402
from coda_lang.ir.reader import from_text  # noqa: E402
from coda_lang.passes import saving  # noqa: E402
from coda_lang.source import Source  # noqa: E402

X, W = torch.randn(5, 16).bfloat16(), torch.randn(8, 16).bfloat16()
PRODUCT = X.double() @ W.double().T


def close(value: Any, expected: Any, tolerance: float = 1e-2) -> None:
    """Equal in float64 but for what bf16 rounds away."""
    torch.testing.assert_close(value.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def both(fn: Any, *tensors: Any, **named: Any) -> tuple[Any, Any]:
    """What the program computes as written, and as its kernels do."""
    return fn.reference(*tensors, **named), fn.reference_planned(*tensors, **named)


@pytest.mark.parametrize("name", ["f", "size", "inf_", "nan"])
def test_two_values_are_two_variables_of_the_emitted_text(name: str) -> None:
    """`f` is the function library in the text, so the value was written `f_`, over a value called `f_`."""
    text = "program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\n"
    text += f"{name} = x @ w\n{name}_ = exp(-abs({name}))\ny = {name} * {name}_ + {name}_\n"
    expected = (PRODUCT + 1) * torch.exp(-PRODUCT.abs())
    for y in both(coda_lang.compile(text), X, W):
        close(y, expected)
    text = f"program p(x: bf16[m, d], w: bf16[n, d], {name}: f32[n], {name}_: f32[m]) -> (y: bf16[m, n])\ny = (x @ w + {name}) * {name}_\n"
    a, b = torch.randn(8), torch.randn(5)
    for y in both(coda_lang.compile(text), X, W, a, b):
        close(y, (PRODUCT + a) * b[:, None], 0.05)


@pytest.mark.parametrize("name", ["range", "print", "torch", "tuple", "M", "acc"])
def test_a_value_may_have_the_name_of_anything_in_python(name: str) -> None:
    text = f"program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\n{name} = x @ w\ny = {name} + f32(index[m])\n"
    for y in both(coda_lang.compile(text), X, W):
        close(y, PRODUCT + torch.arange(5)[:, None])


@pytest.mark.parametrize(
    "names",
    [
        "p p_reference",
        "p P",
        "P p",
        "p_rows p",
        "p_phase0 p",
        "s spec",
        "s s_",
        "function function_",
        "range torch",
        "nan nan_",
        "p p_RECORD",
    ],
)
def test_programs_of_one_module_have_parts_of_their_own(names: str) -> None:
    """The parts of a program (record, reference, scalar functions) are named after it; another program may have that name."""
    one, other = names.split()
    signature = "(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n], r: f32[m])\n"
    text = f"program {one}{signature}y = x @ w\nr = sum[n](y)\n\nprogram {other}{signature}y = (x @ w) * 2.0\nr = sum[n](y)\n"
    found = coda_lang.compile(text)
    for name, factor in ((one, 1), (other, 2)):
        fn = getattr(found, name)
        assert fn.program.name == name
        for y, r in both(fn, X, W):
            close(y, PRODUCT * factor)
            close(r, y.double().sum(1), 1e-3)


def test_kernels_of_one_module_have_names_of_their_own() -> None:
    """Kernels name the files of a build: the second kernel of `a` and the only one of `a_b` were both called `a_b`."""
    text = "program a(x: bf16[m, d], w: bf16[n, d], v: bf16[k, n]) -> (b: bf16[m, k])\nb = silu(x @ w) @ v\n\n"
    text += "program a_b(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\ny = x @ w\n"
    found = coda_lang.compile(text)
    kernels = [k.name for fn in (found.a, found.a_b) for k in fn.program.kernels]
    assert len(set(kernels)) == len(kernels) == 3


@pytest.mark.parametrize("name", ["self", "outputs", "exact", "accumulate_into"])
def test_an_input_is_not_called_as_an_argument_of_every_call(name: str) -> None:
    """`fn(outputs=…)` chose outputs, and the input called so could not be given."""
    with pytest.raises(CodaError) as e:
        coda_lang.compile(f"program p({name}: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\ny = {name} @ w\n")
    assert [d.code for d in e.value.diagnostics] == ["C0107"]
    coda_lang.compile(f"program p({name}_: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\n{name} = {name}_ @ w\ny = {name}\n")


def test_gather_along_the_only_axis() -> None:
    """A map kernel of one axis has no rows, so the element that `gather` takes has no coordinate."""
    text = "program p(x: bf16[m, d], w: bf16[n, d], i: i32[]) -> (top: f32[m], a: f32[], b: f32[])\n"
    fn = coda_lang.compile(text + "top = max[n](x @ w)\na = gather[m](top, i)\nb = gather[m](gather[n](x @ w, 3), 1)\n")
    for i in (0, 4, 5, -1):
        for _, a, b in both(fn, X, W, torch.tensor(i, dtype=torch.int32)):
            close(a, PRODUCT.amax(1)[i] if 0 <= i < 5 else torch.tensor(float("nan")))
            close(b, PRODUCT[1, 3])


def test_numbers_take_part_where_tensors_are_meant() -> None:
    """`expand`, `pack` and reductions of a number, which has no axes of its own."""
    text = "program p(x: bf16[m, d], w: bf16[n, d]) -> (one: f32[m], s: f32[m], z: bf16[m, lane=2], t: f32[], y: bf16[m, n])\n"
    text += "y = x @ w\none = expand[m](exp(1.0))\ns = sum[n](expand[n](0.5) + y * 0.0)\n"
    text += "z = pack[lane](expand[m](2.0), 3.0)\nt = f32(size[n])\n"
    for one, s, z, t, _ in both(coda_lang.compile(text), X, W):
        close(one, torch.full((5,), 2.71828), 1e-4)
        close(s, torch.full((5,), 4.0))
        close(z, torch.tensor([2.0, 3.0]).expand(5, 2))
        close(t, torch.tensor(8.0))


@pytest.mark.parametrize("body", ["y = expand[k](x)", "y = x * index[k]"])
def test_every_extent_comes_from_an_input(body: str) -> None:
    with pytest.raises(CodaError) as e:
        coda_lang.compile(f"program p(x: f32[m]) -> (y: f32[m, k])\n{body}\n")
    assert [(d.code, "`k`" in d.message) for d in e.value.diagnostics] == [("C0203", True)]
    fn = coda_lang.compile(f"program p(x: f32[m]) -> (y: f32[m, k=3])\n{body}\n")
    for y in both(fn, torch.ones(4)):
        assert y.shape == (4, 3)


def test_a_program_without_inputs_is_refused() -> None:
    with pytest.raises(CodaError) as e:
        coda_lang.compile("program p() -> (y: f32[])\ny = 1.0\n")
    assert [d.code for d in e.value.diagnostics] == ["C0118"]


@pytest.mark.parametrize("word", ["compile", "frobnicate"])
def test_a_word_that_is_no_command_is_not_taken_for_a_file(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`codac compile FILE` asked for the option -o, which belongs to the default command."""
    assert cli.main([word, "linear.coda"]) == cli.USAGE
    said = capsys.readouterr().err
    assert f"there is no command and no file {word}" in said and "-o" not in said


@pytest.mark.slow
def test_a_standalone_module_needs_no_cache_folder(tmp_path: Path) -> None:
    source = tmp_path / "p.coda"
    source.write_text("program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\ny = x @ w\n")
    module = tmp_path / "kernel.py"
    module.write_text(driver.emit(source, standalone=True))
    environment = {**os.environ, "CODA_CACHE_DIR": os.devnull, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-I", str(module), "--shape", "m=5,d=16,n=8"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "all outputs agree" in done.stdout, done.stderr


@pytest.mark.parametrize("options", [{"e": 10**400}, {"types": "f16"}, {"strict": 2.0}])
def test_options_of_compile_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(CodaError):
        coda_lang.compile("program p(x: f32[m]) -> (y: f32[m])\nparam e = 1.0\ny = x * e\n", **options)


def test_a_nested_tensor_is_refused() -> None:
    fn = coda_lang.compile("program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\ny = x @ w\n")
    with pytest.raises(CodaError, match="nested"):
        fn(torch.nested.nested_tensor([X[:2], X[2:]]), W)


@pytest.mark.parametrize("result", ["b40", "softmax[n](b40)"])
def test_values_used_often_take_no_longer(result: str) -> None:
    """Cutting into kernels walked every path to a value; here there are 2^40."""
    chain = "".join(f"b{i + 1} = sin(b{i}) * b{i}\n" for i in range(40))
    text = f"program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\nb0 = x @ w\n{chain}y = {result}\n"
    started = time.process_time()
    driver.emit(text)
    assert time.process_time() - started < 20


@pytest.mark.slow
def test_a_program_of_a_thousand_lines() -> None:
    """Deeper than Python's stack."""
    chain = "".join(f"b{i + 1} = b{i} * 1.5 + 1.0\n" for i in range(1000))
    assert driver.check(f"program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\nb0 = x @ w\n{chain}y = b1000\n")


@pytest.mark.parametrize("orders", ["fg fg fg gf", "fg gf gf fg", "gf fg gf gf", "gf gf fg fg"])
def test_summed_products_contract_their_groups_each_in_one_order(orders: str) -> None:
    """Two products into one accumulator: an operand's group of contracted axes was read in the order of the other product's."""
    a, b, c, e = orders.split()
    axes = {x: ", ".join(x) for x in ("fg", "gf")}
    text = (
        f"forward program p(a: bf16[m, {axes[a]}], b: bf16[n, {axes[b]}], c: bf16[m, {axes[c]}], e: bf16[n, {axes[e]}]) -> (y: f32[m, n])\n"
    )
    fn = coda_lang.compile(text + "y = matmul[f, g](a, b) + matmul[f, g](c, e)\n")
    size = {"m": 5, "n": 6, "f": 3, "g": 4}
    tensors = [torch.randn([size[x] for x in "m" + a]), torch.randn([size[x] for x in "n" + b])]
    tensors += [torch.randn([size[x] for x in "m" + c]), torch.randn([size[x] for x in "n" + e])]
    tensors = [t.bfloat16() for t in tensors]
    one, two = (torch.einsum(f"m{p},n{q}->mn", s.double(), t.double()) for p, q, s, t in ((a, b, *tensors[:2]), (c, e, *tensors[2:])))
    for y in both(fn, *tensors):
        close(y, one + two, 1e-4)


def test_what_a_cotangent_is_divided_by_is_known_before_it() -> None:
    """The count of ties was finished by the forward's last kernel, which then divided the cotangent that comes after it."""
    text = "program p(x: bf16[m, d], w: bf16[n, d]) -> (y: f32[m], z: f32[n, m])\na = x @ w\ny = max[n](a)\nz = softmax[n](a)\n"
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y, z = coda_lang.compile(text)(x, w)
    (y.sum() * 2 + (z * z).sum()).backward()
    x64, w64 = X.double().requires_grad_(), W.double().requires_grad_()
    a = x64 @ w64.T
    (a.amax(1).sum() * 2 + a.softmax(1).square().sum()).backward()
    close(x.grad, x64.grad, 0.03)
    close(w.grad, w64.grad, 0.03)


@pytest.mark.parametrize("value", ["stop_gradient(x @ w)", "round(x @ w)"])
def test_a_gradient_that_is_zero_is_there(value: str) -> None:
    """The backward reads nothing, so it was called without a tensor."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    coda_lang.compile(f"program p(x: bf16[m, d], w: bf16[n, d]) -> (y: f32[m, n])\ny = {value}\n")(x, w).sum().backward()
    assert x.grad is not None and not x.grad.any() and w.grad is not None and not w.grad.any()


@pytest.mark.parametrize(
    "line, help",
    [
        ("y = size * (x @ w)", "call it: `size[axis]`"),
        ("y = max", "call it: `max(…)` or `max[axis](…)`"),
        ("y = softmax", "call it: `softmax(…)`"),
        ("z: f64 = x @ w\ny = x @ w", "write `f32`"),
    ],
)
def test_remedies_that_can_be_followed(line: str, help: str) -> None:
    with pytest.raises(CodaError) as e:
        driver.check(f"program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\n{line}\n")
    assert e.value.diagnostics[0].help == help


@pytest.mark.parametrize("order", ["b t lane", "t b lane", "b lane t", "t lane b", "lane t b"])
def test_reductions_with_lanes_are_stored_in_any_order(order: str) -> None:
    """What the first finisher left was read in the order of the output's axes, not of its own."""
    axes = order.split()
    text = f"program p(x: bf16[b, t, d], w: bf16[f, lane=2, d]) -> (s: f32[{', '.join(axes)}])\ns = sum[f](x @ w)\n"
    x, w = torch.randn(2, 3, 16).bfloat16(), torch.randn(5, 2, 16).bfloat16()
    expected = torch.einsum("btd,fld->btl", x.double(), w.double()).permute([("b", "t", "lane").index(a) for a in axes])
    for s in both(coda_lang.compile(text), x, w):
        close(s, expected, 1e-4)


def test_a_forward_that_saves_may_be_the_only_one() -> None:
    """Its kernels reduce in another order than those of the forward alone: then every call runs them (this was an internal error)."""
    text = "program p(x: bf16[m, d], w: bf16[d, n], v: bf16[h, n, e=3]) -> (top: f32[h, e], y: bf16[h, e, m])\n"
    text += "a = bf16(x @ w)\nz = matmul[n](a * 0.3, v)\ntop = amax[m](z)\ny = l2norm[h](z, 1e-3)\n"
    fn = coda_lang.compile(text)
    x, w, v = X, torch.randn(16, 12).bfloat16(), torch.randn(4, 12, 3).bfloat16()
    z = torch.einsum("mn,hne->mhe", (x.double() @ w.double()) * 0.3, v.double())
    for top, y in both(fn, x, w, v):
        close(top, z.abs().amax(0), 0.05)
        close(y, (z * (z.square().sum(1, keepdim=True) + 1e-3).rsqrt()).permute(1, 2, 0), 0.02)


def test_a_run_of_a_stored_axis_beside_another_is_loaded_from_its_own_columns() -> None:
    """A kernel over b and qh read t[…, b, head] as if head were as wide as its run qh."""
    text = "program p(x: f16[k, t, b], w: f16[k, head=24], u: f16[b, t, r], v: f16[r, head])\n"
    text += "    -> (y0: f16[b, qh, t], y1: f16[t, b], y2: f16[b, t], y3: f16[t, kh, b])\n"
    text += "q, p = split[head -> qh=16, kh=8](matmul[k](x, w) + matmul[r](u, v))\n"
    text += "y0 = max(q, q)\ny1 = sum[qh](q)\ny2 = logsumexp[qh](q)\ny3 = p + p\n"
    (program,) = driver.programs(Source("p.coda", text))
    found = list(gradcheck.check(program, extents={"b": 4, "t": 2, "k": 2, "r": 3}, most=3))
    assert found and all(f.good for f in found), "\n".join(str(f) for f in found if not f.good)


def test_a_run_whose_gradient_is_the_same_all_along_it_is_joined_with_others() -> None:
    """The mean's gradient, spread over `kh` within the tile, had no place along the axis that it is a run of."""
    text = (
        "program p(x: bf16[m, k], w: bf16[head=24, k], u: bf16[m, r], v: bf16[head, r])\n"
        "    -> (y0: bf16[qh, m], y1: bf16[m, qh], y2: bf16[m, qh], y3: f32[m])\n"
        "a, b = split[head -> qh=16, kh=8](x @ w + u @ v)\n"
        "y0, y1 = erf(a), erf(a)\ny2 = max(a, a)\ny3 = square(mean[kh](b))\n"
    )
    (program,) = driver.programs(Source("p.coda", text))
    found = list(gradcheck.check(program, most=1))
    assert found and all(f.good for f in found), "\n".join(str(f) for f in found if not f.good)


@pytest.mark.parametrize("word", ["save", "recompute"])
@pytest.mark.parametrize("read", ["silu(a) + silu(b)", "silu(a)"], ids=["equal to another", "not used"])
def test_what_is_said_of_a_value_outlives_it(word: str, read: str) -> None:
    """Equal values become one, and dead ones go: what is said of either holds for the value that is left."""
    text = f"program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\na = x @ w\nb = x @ w\ny = {read}\n{word} b\n"
    (plan,) = driver.check(Source("p.coda", text), driver.Options())
    kept = plan.derived is not None and any(t.axes == ("m", "n") for t in plan.derived.residuals)
    assert kept == (word == "save")


RUNS = """program p(x: bf16[m, head={}, n]) -> (k: bf16[m, qh={}, n], q: bf16[m, kh={}, n])
k0, q0 = split[head -> qh, kh](x)
k = relu(k0)
q = q0 * 2.0
"""

ROWS_OF_RUNS = """program p(x: bf16[b, t, k], w: bf16[head=24, k]) -> (y0: f32[b, t, qh=16], y1: f32[b, t, kh=8])
y0, y1 = split[head -> qh, kh](x @ w)
"""


def test_stored_runs_are_joined_as_lanes_or_refused():
    """The gradient of a split input is whole again. While an axis inside is free, no run but the first begins at a known column."""
    (program,) = driver.programs(Source("p.coda", RUNS.format(8, 6, 2)))
    found = list(gradcheck.check(program))
    assert found and all(f.good for f in found)
    driver.check(Source("p.coda", ROWS_OF_RUNS))
    with pytest.raises(CodaError) as refused:
        driver.check(Source("p.coda", RUNS.format(48, 32, 16)))
    assert [d.code for d in refused.value.diagnostics] == ["C0407"] and "n=128" in refused.value.diagnostics[0].help


def test_a_value_that_is_saved_does_not_turn_the_order_of_a_sum() -> None:
    """The sum over n and hd ran along hd first where t5 was stored, n first where it was not: other bits with gradients than without."""
    program = from_text("""program p(x: bf16[m, k], w: bf16[hd, k, n]) -> (y: f32[m] = t7, z: f32[hd, n] = t9) {
  axes m, k, n, hd=8
  t0: f32[m, n, hd] = contract(x, w) axes=[k] batch=[]
  t5: f32[m, n, hd] = gelu(t0)
  t6: f32[m, n, hd] = minimum(t0, t5)
  t7: f32[m] = sum(t5) axes=[n, hd]
  t9: f32[n, hd] = sum(t6) axes=[m]
}
""")
    found = [f for f in gradcheck.check(program, extents={"m": 3, "k": 4, "n": 2}, seed=351) if f.how == "bits"]
    assert any("t5" in f.way for f in found) and all(f.good for f in found)


def test_a_way_to_save_that_no_tile_holds_is_left_out() -> None:
    """Only when records are made is it known that eight lanes of four tiles and two results have no room."""
    text = "program p(x: bf16[m, k], w: bf16[h=8, k, n], v: bf16[h]) -> (y: bf16[n, m, h], z: bf16[m, n, h])\n"
    (program,) = driver.programs(Source("p.coda", text + "a = x @ w\ny = min(a, v)\nz = softplus(clamp(a, -4.0, 0.0))\n"))
    ways = {f.way for f in gradcheck.check(program, extents={"m": 3, "k": 4, "n": 2})}
    assert ways and saving.PLANNED in ways
    assert len(ways) < len(list(saving.ways(passes.prepared(program))))
