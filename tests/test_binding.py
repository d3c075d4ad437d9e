"""Shapes and arguments of a call: what is accepted in which form, and what every refusal says."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from coda_lang.backend_cute import spec  # noqa: E402
from coda_lang.backend_cute.binding import bind, extents_in  # noqa: E402
from coda_lang.backend_cute.errors import CallError  # noqa: E402
from coda_lang.diagnostics.model import CodaError  # noqa: E402
from tests import handwritten as hw  # noqa: E402
from tests.standins import check, run  # noqa: E402


def test_extents_of_a_command_line():
    assert extents_in(" m = 64,,d=0, ") == {"m": 64, "d": 0} and extents_in("") == {}


@pytest.mark.parametrize("text", ["m", "=", "=3", "m=", "m=1e9", "m=x", "m=-3", "m=2147483648", "m=" + "9" * 5000, "m=3,m=4", "m=3=4"])
def test_what_is_no_extent_is_said(text):
    with pytest.raises(ValueError, match="--shape"):
        extents_in(text)


def test_merged_arguments_and_split_leading_axes():
    x, w, pos, freq = hw.inputs(hw.ROPE.program, {"m": 6, "d": 16, "head": 3})
    plain = run(hw.ROPE, x, w, pos, freq)[0][0]
    merged = run(hw.ROPE, x.view(2, 3, 16), w.reshape(3 * 2 * 64, 16), pos.view(2, 3), freq)[0][0]
    assert merged.shape == (2, 3, 3, 2, 64) and torch.equal(merged.flatten(0, 1), plain)
    half = run(hw.ROPE, x, w.reshape(3, 128, 16), pos, freq)[0][0]
    assert torch.equal(half, plain)


def test_a_split_leading_axis_that_is_no_view_is_copied():
    x, w = hw.inputs(hw.LINEAR.program, {"m": 6, "d": 16, "n": 8})
    three = x.view(2, 3, 16).transpose(0, 1).contiguous().transpose(0, 1)
    got, plan = run(hw.LINEAR, three, w)
    assert got[0].shape == (2, 3, 8) and "no view" in plan.copies[0]
    check(hw.LINEAR, (x, w), [got[0]])


WRONG = {
    "an axis": (lambda x, w, p, q: (x, w[..., :15], p, q), "C0707", "axis 'd' (dim 3) has extent 15, expected 16 as in argument 'x'"),
    "a fixed axis": (lambda x, w, p, q: (x, w, p, q[:63]), "C0707", "axis 'pair' (dim 0) has extent 63, expected 64 as in the declaration"),
    "rank": (lambda x, w, p, q: (x[0], w, p, q), "C0706", "shape [16] cannot be read as [m, d]"),
    "merged": (lambda x, w, p, q: (x, w.reshape(384, 16)[:383], p, q), "C0706", "[383, 16] cannot be read as [head, lane=2, pair=64, d]"),
    "free with free": (lambda x, w, p, q: (x, w.flatten(), p, q), "C0706", "cannot be read as"),
    "two splits": (lambda x, w, p, q: (x.view(2, 3, 16), w, p.view(3, 2), q), "C0707", "axis 'm' arrives as [3, 2]"),
    "dtype": (lambda x, w, p, q: (x.half(), w, p, q), "C0703", "got dtype f16, expected bf16"),
    "index dtype": (lambda x, w, p, q: (x, w, p.long(), q), "C0703", "got dtype i64, expected i32"),
    "device": (lambda x, w, p, q: (x, w.to("meta"), p, q), "C0704", "several devices"),
    "meta": (lambda x, w, p, q: tuple(t.to("meta") for t in (x, w, p, q)), "C0704", "on meta, expected a CUDA device or the CPU"),
    "none": (lambda x, w, p, q: (x, w, p, None), "C0702", "got None, expected a torch.Tensor"),
    "list": (lambda x, w, p, q: (x, w, p, q.tolist()), "C0702", "got builtins.list"),
    "sparse": (lambda x, w, p, q: (x.to_sparse(), w, p, q), "C0702", "layout"),
}


@pytest.mark.parametrize("argument, dtype", [(2, torch.float32), (0, torch.float64), (0, torch.int32), (2, torch.uint8)])
def test_no_declaration_is_offered_that_the_program_could_not_have(argument, dtype):
    tensors = list(hw.inputs(hw.ROPE.program, {"m": 6, "d": 16, "head": 3}))
    tensors[argument] = tensors[argument].to(dtype)
    with pytest.raises(CodaError, match="C0703") as caught:
        hw.ROPE.function()(*tensors)
    assert "help: pass " in str(caught.value) and "declare" not in str(caught.value)


def test_elements_that_no_reshape_can_fit_name_the_odd_dim():
    program = spec.Program(
        "p",
        (spec.Argument("x", "bf16", ("m", "d")), spec.Argument("w", "bf16", ("f", "lane", "d"))),
        (spec.Argument("y", "bf16", ("m", "f")),),
        (("m", None), ("d", None), ("f", None), ("lane", 2)),
        (),
    )
    with pytest.raises(CodaError, match=r"(?s)C0706: .*help: dim 0 is 15, no multiple of lane=2: pass a tensor of \[f, lane=2, d\]"):
        bind(program, ((8, 16), (15, 16)))


HELP = {
    "merged": "dim 0 is 383, no multiple of lane=2 * pair=64: pass a tensor of [head, lane=2, pair=64, d]",
    "rank": "reshape 'x' to [m, d]",
    "dtype": "pass x.to(torch.bfloat16), or declare x: f16[m, d] in the program",
    "index dtype": "pass pos.to(torch.int32), or declare pos: i64[m] in the program",
    "none": "every input is needed: pass a tensor of f32[pair]",
    "list": "as by torch.as_tensor",
    "meta": "pass real tensors",
    "device": "pass real tensors",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_names_program_argument_axis_and_remedy(what):
    change, code, words = WRONG[what]
    fn = hw.ROPE.function()
    tensors = hw.inputs(hw.ROPE.program, {"m": 6, "d": 16, "head": 3})
    with pytest.raises(CodaError) as caught:
        fn(*change(*tensors))
    text = str(caught.value)
    help = HELP.get(what, "")
    assert help in text.partition("\n  help: ")[2]
    assert text.startswith(f"{code}: rope: ") and words in text and "\n  help: " in text


def test_all_problems_are_told_at_once():
    fn = hw.ROPE.function()
    x, w, pos, freq = hw.inputs(hw.ROPE.program, {"m": 6, "d": 16, "head": 3})
    with pytest.raises(CallError) as caught:
        fn(x, w[..., :15], pos[:5], freq[:63])
    assert [d.code for d in caught.value.diagnostics] == ["C0707"] * 3


def test_requirements_are_checked_with_their_extents():
    fn = hw.REARRANGED.function()
    x, w, scale = hw.inputs(hw.REARRANGED.program, {"m": 6, "d": 16, "head": 3})
    with pytest.raises(CallError, match=r"C0709: rearranged: the shape condition `hd == head \* 8` does not hold: got head=3, hd=23"):
        fn(x, w, scale[:23])


def test_a_shape_with_several_readings_is_refused_unless_it_is_as_declared():
    program = hw.program("p", ["x f32 a l b"], ["y f32 a"], [], l=2)
    assert bind(program, [(4, 2, 6)]).extents == {"a": 4, "l": 2, "b": 6}
    with pytest.raises(CallError, match="C0708"):
        bind(program, [(4, 6)])


def test_extents_past_32_bits_are_refused():
    program = hw.program("p", ["x f32 a"], ["y f32 a"], [])
    with pytest.raises(CallError, match="C0710"):
        bind(program, [(2**31,)])


@st.composite
def forms(draw):
    """A signature of one argument, extents, and a legal other form of its shape."""
    axes = [f"a{i}" for i in range(draw(st.integers(1, 5)))]
    extents = {a: draw(st.integers(1, 5)) for a in axes}
    fixed = {a: extents[a] for a in axes if draw(st.booleans())}
    shape: list[int] = []
    group: list[str] = []
    alone = True  # the first axis has a dim of its own
    for a in axes:  # merge while at most one axis of the group is free
        if group and (sum(x not in fixed for x in [*group, a]) > 1 or draw(st.booleans())):
            shape.append(math.prod(extents[x] for x in group))
            group = []
        group.append(a)
        alone = alone and (shape or group == axes[:1])
    shape.append(math.prod(extents[x] for x in group))
    if alone and axes[0] not in fixed and draw(st.booleans()):
        shape = [1, *shape] if draw(st.booleans()) else [*shape[:1], 1, *shape[1:]]
    return hw.program("p", [f"x f32 {' '.join(axes)}"], [f"y f32 {' '.join(axes)}"], [], **fixed), extents, tuple(shape)


@given(forms())
def test_any_legal_form_is_read_as_meant_or_refused_as_ambiguous(form):
    program, extents, shape = form
    try:
        found = bind(program, [shape])
    except CallError as problem:
        assert [d.code for d in problem.diagnostics] == ["C0708"]
        return
    assert math.prod(found.extents.values()) == math.prod(extents.values())
    if len(shape) == len(extents) and all(n == dict(program.extents)[a] for a, n in zip(extents, shape) if dict(program.extents)[a]):
        assert found.declared(program.inputs[0]) == shape  # what is as declared is never read otherwise
    assert math.prod(found.returned(program.outputs[0])) == math.prod(shape)


@given(forms())
def test_a_second_argument_with_one_dim_per_axis_settles_the_first(form):
    program, extents, shape = form
    assume(len(shape) != len(extents) or shape == tuple(extents.values()))  # of the declared rank, it is read as declared
    both = dataclasses.replace(program, inputs=(*program.inputs, dataclasses.replace(program.inputs[0], name="full")))
    found = bind(both, [shape, tuple(extents.values())])
    assert found.extents == extents
