"""Plans of calls, without a GPU: views, copies, empty extents, offsets; stand-ins hold the kernels' side of the contract."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from coda_lang.backend_cute import host  # noqa: E402
from coda_lang.backend_cute import spec as s  # noqa: E402
from coda_lang.backend_cute.errors import CallError  # noqa: E402
from tests import handwritten as hw  # noqa: E402
from tests.standins import check, poisoning, run  # noqa: E402


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setattr(host, "allocate", poisoning)


SIZES = (
    {"m": 8, "d": 16, "n": 24, "f": 24, "v": 40, "head": 3, "rank": 8},
    {"m": 131, "d": 33, "n": 301, "f": 13, "v": 517, "head": 2, "rank": 7},
    {"m": 1, "d": 1, "n": 1, "f": 1, "v": 1, "head": 1, "rank": 1},
    {"m": 9, "d": 9, "n": 9, "f": 9, "v": 9, "head": 1, "rank": 9},
    {"m": 0}, {"n": 0, "f": 0, "v": 0, "head": 0}, {"d": 0, "rank": 0}, {"rank": 0},
)  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", hw.ALL)
def test_every_program_at_every_size(name, sizes):
    case = hw.ALL[name]
    tensors = hw.inputs(case.program, sizes)
    got, plan = run(case, *tensors)
    check(case, tensors, got)
    if sizes == {"m": 0}:
        assert not any(k in plan.launches for k in (k.name for k in case.program.kernels if isinstance(k, s.Gemm)))


def test_aligned_tensors_are_not_copied():
    for name in ("linear", "swiglu", "swiglu_halves", "geglu", "residual", "lm_head", "head_norm", "qkv", "rope"):
        case = hw.ALL[name]
        assert run(case, *hw.inputs(case.program, SIZES[0]))[1].copies == [], name


def test_ragged_tensors_are_copied_and_said_to_be():
    copies = run(hw.LINEAR, *hw.inputs(hw.LINEAR.program, {"m": 5, "d": 7, "n": 9}))[1].copies
    assert copies == [
        "output 'y' is written to a temporary and copied: the stride of axis 'm' is 18 bytes, not a multiple of 16 above 0",
        "input 'x' is copied: the stride of axis 'm' is 14 bytes, not a multiple of 16 above 0",
        "input 'w' is copied: the stride of axis 'n' is 14 bytes, not a multiple of 16 above 0",
    ]


def layouts(t):
    """The same values in layouts a caller may have."""
    padded = torch.empty(t.shape[0] + 2, t.shape[1] + 9, dtype=t.dtype)
    padded[: t.shape[0], : t.shape[1]] = t
    yield "contiguous", t, False
    yield "a column block", padded[: t.shape[0], : t.shape[1]], t.shape[1] != 23
    wide = torch.empty(t.shape[0], t.shape[1] + 8, dtype=t.dtype)
    wide[:, : t.shape[1]] = t
    yield "a pitch of whole 16 bytes", wide[:, : t.shape[1]], False
    yield "transposed", t.T.contiguous().T, True
    flat = torch.empty(t.numel() + 1, dtype=t.dtype)[1:]
    yield "unaligned", flat.copy_(t.reshape(-1)).view(t.shape), True
    steps = torch.empty(2 * t.shape[0], t.shape[1], dtype=t.dtype)[::2]
    yield "every other row", steps.copy_(t), False
    cols = torch.empty(t.shape[0], 2 * t.shape[1], dtype=t.dtype)[:, ::2]
    yield "every other column", cols.copy_(t), True


@pytest.mark.parametrize("which", range(3))
def test_layouts_of_inputs_change_copies_not_values(which):
    tensors = hw.inputs(hw.RESIDUAL.program, SIZES[0])
    places = (0, 1, 4)[which]
    for label, t, copied in layouts(tensors[places]):
        call = [*tensors[:places], t, *tensors[places + 1 :]]
        got, plan = run(hw.RESIDUAL, *call)
        check(hw.RESIDUAL, tensors, got)
        assert bool(plan.copies) == copied, (label, plan.copies)


def test_expanded_operands_are_copied():
    x, w, t, b, r = hw.inputs(hw.RESIDUAL.program, SIZES[0])
    call = [x[:1].expand(8, 16), w[:, :1].expand(24, 16), t, b, r[:1, :1].expand(8, 24)]
    got, plan = run(hw.RESIDUAL, *call)
    check(hw.RESIDUAL, call, got)
    assert len(plan.copies) == 3 and all("stride" in c for c in plan.copies)


def test_offsets_beyond_32_bits_are_kept():
    """Strides are carried as they are; the largest offset here is past 2^31 elements of address space that is never touched in between."""
    pitch = 1 << 30
    try:
        store = torch.empty_strided((3, 16), (pitch, 1), dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("no address space for the test")
    x, w = hw.inputs(hw.LINEAR.program, {"m": 3, "d": 16, "n": 8})
    store.copy_(x)
    got, plan = run(hw.LINEAR, store, w)
    check(hw.LINEAR, (x, w), got)
    assert plan.copies == []


def test_a_plan_is_for_every_call_of_its_kind():
    tensors = hw.inputs(hw.GEGLU.program, SIZES[1])
    _, plan = run(hw.GEGLU, *tensors)
    for seed in (1, 2):
        others = hw.inputs(hw.GEGLU.program, SIZES[1], seed)
        check(hw.GEGLU, others, plan.run(others))


def test_a_number_stands_for_a_scalar():
    x, w, b, _ = hw.inputs(hw.BIAS_GELU.program, SIZES[0])
    got, _ = run(hw.BIAS_GELU, x, w, b, 0.5)
    check(hw.BIAS_GELU, (x, w, b, torch.tensor(0.5)), got)
    with pytest.raises(CallError, match="C0702.*argument 'b'"):
        run(hw.BIAS_GELU, x, w, 1.0, 0.5)


def test_an_unaligned_scalar_is_copied():
    x, w, b, _ = hw.inputs(hw.BIAS_GELU.program, SIZES[0])
    alpha = torch.arange(4.0)[3]
    got, plan = run(hw.BIAS_GELU, x, w, b, alpha)
    check(hw.BIAS_GELU, (x, w, b, alpha), got)
    assert "input 'alpha' is copied" in plan.copies[0]
