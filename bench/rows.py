"""What went wrong for users of systems like this one, as checks of this one: one function a row, on the CPU and on a GPU.

In: a `Room`, a device with the programs of rows.coda. Out: nothing, or AssertionError. On a GPU a call runs the kernels. On the CPU it
goes the host's whole way (plans, copies, poisoned buffers) with stand-ins for the kernels. The numbers are those of the list of known
failures; rows that need no tensors are in tests/test_known_failures.py only.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from coda_lang.backend_cute import eager, selfcheck
from coda_lang.backend_cute.torch_fns import DTYPES

RAGGED = (1, 7, 9, 15, 104, 4097)


def poisoning(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`host.allocate` whose buffers start as NaN (integers as 77), so that what nobody writes shows."""
    t = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    whole = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,))
    whole.fill_(math.nan if dtype.is_floating_point else 77)
    return t


@dataclass(frozen=True)
class Room:
    """Where rows are checked. `stand_in(fn, tensors)` makes a call where there is no GPU; gives the outputs."""

    device: torch.device
    functions: Mapping[str, Any]
    stand_in: Callable[[Any, tuple[Any, ...]], Any] | None = None

    @property
    def gpu(self) -> bool:
        return self.stand_in is None

    def call(self, name: str, *tensors: Any) -> tuple[torch.Tensor, ...]:
        """The outputs of a program's kernels."""
        fn = self.functions[name]
        if self.stand_in is not None:
            return tuple(self.stand_in(fn, tensors))
        result = fn(*tensors)
        assert fn.last_path == "kernels"
        return tuple(result) if isinstance(result, tuple) else (result,)

    def inputs(self, name: str, seed: int = 0, **extents: int) -> list[torch.Tensor]:
        """Random inputs of a program."""
        program = self.functions[name].program
        fixed = {axis: n for axis, n in program.extents if n is not None}
        return selfcheck.inputs(program, {**fixed, **extents}, seed, str(self.device))

    def right(self, name: str, tensors: list[Any], got: tuple[torch.Tensor, ...]) -> None:
        """Assert that `got` is what the program says: as exact as eager PyTorch in its precision, within a factor of two."""
        fn = self.functions[name]
        exact, baseline = fn.reference(*tensors, exact=True), fn.reference(*tensors, library=eager.Eager())
        if isinstance(exact, torch.Tensor):
            exact, baseline = (exact,), (baseline,)
        extents = fn.bind(tensors).extents
        for output, g, e, w in zip(fn.program.outputs, got, exact, baseline, strict=True):
            found, bound = selfcheck.error(g, e), eager.bound(selfcheck.error(w, e), fn.program, extents, str(self.device))
            assert g.dtype == DTYPES[output.dtype] and found <= bound, f"{name}.{output.name} is off by {found:.2e}, may be by {bound:.2e}"

    def check(self, name: str, *tensors: Any) -> tuple[torch.Tensor, ...]:
        """Call and compare."""
        got = self.call(name, *tensors)
        self.right(name, list(tensors), got)
        return got


# --- rows ----------------------------------------------------------------------------------------------------------------


def row_1_sizes_that_no_vector_width_divides(room: Room) -> None:
    for n in RAGGED:
        for k in RAGGED if room.gpu or n < 100 else (7,):
            room.check("raw_and_gelu", *room.inputs("raw_and_gelu", m=5, n=n, k=k))


def row_2_every_element_is_written(room: Room) -> None:
    for m, n in ((16, 104), (129, 257), (1, 1), (127, 8)):
        for output in room.check("four_biases", *room.inputs("four_biases", m=m, n=n, k=64)):
            assert not output.isnan().any()


def row_3_no_rows(room: Room) -> None:
    tensors = room.inputs("sums", m=0, n=24, k=16)
    z, lse, picked, total, peak = room.check("sums", *tensors)
    assert z.shape == (0, 24) and lse.shape == picked.shape == (0,)
    assert torch.equal(total, torch.zeros_like(total)) and total.shape == (24,) and peak == 0
    assert "sums" not in room.functions["sums"].explain(*tensors).launches


def row_3_no_columns(room: Room) -> None:
    z, lse, picked, total, peak = room.check("sums", *room.inputs("sums", m=9, n=0, k=16))
    assert z.shape == (9, 0) and total.shape == (0,) and bool((lse == -math.inf).all()) and bool(picked.isnan().all()) and peak == 0


def row_4_nothing_to_contract(room: Room) -> None:
    x, w, row, col, full, one = room.inputs("four_biases", m=33, n=40, k=0)
    a, b, c, d = room.check("four_biases", x, w, row, col, full, one)
    assert torch.equal(a, row.expand(33, 40)) and torch.equal(b, col[:, None].expand(33, 40))
    assert torch.equal(c, full.float()) and torch.equal(d, one.expand(33, 40))


def row_5_any_strides(room: Room) -> None:
    x, w, row, col, full, one = room.inputs("four_biases", m=40, n=48, k=64)
    for change in (
        lambda: (x[:1].expand(40, 64), w, row, col, full, one),
        lambda: (x.T.contiguous().T, w.T.contiguous().T, row, col, full, one),
        lambda: (x, w[:, :1].expand(48, 64), row[:1].expand(48), col[:1].expand(40), full[:1, :1].expand(40, 48), one.expand(1)[0]),
        lambda: (x, w, row.repeat_interleave(2)[::2], torch.cat((col[:1], col))[1:], full.T.contiguous().T, one),
        lambda: (x.repeat(2, 1)[::2], w.repeat(1, 2)[:, ::2], row, col, full, one),
    ):
        room.check("four_biases", *change())


def row_6_offsets_beyond_32_bits(room: Room) -> None:
    x, w = room.inputs("raw_and_gelu", m=3, n=16, k=32)
    far = torch.empty_strided((3, 32), (1 << 30, 1), dtype=x.dtype, device=x.device).copy_(x)
    assert far.stride(0) * 2 >= 2**31
    room.check("raw_and_gelu", far, w)
    weights = torch.empty_strided((16, 32), (1 << 28, 1), dtype=x.dtype, device=x.device) if room.gpu else w
    room.check("raw_and_gelu", x, weights.copy_(w) if room.gpu else w)


def row_6_outputs_beyond_32_bits(room: Room) -> None:
    if not room.gpu:
        return
    m, n = 16392, 131080  # more than 2^31 elements
    x, w, r = room.inputs("round_then_add", m=m, n=n, k=8)
    outputs = room.call("round_then_add", x, w, r)
    for part in (slice(0, 8), slice(m - 8, m)):  # finite wrong values look plausible, so look at the last rows
        for piece, whole in zip(room.functions["round_then_add"].reference(x[part], w, r[part]), outputs, strict=True):
            assert selfcheck.error(whole[part], piece) < 1e-5


def row_7_padded_columns_take_no_part(room: Room) -> None:
    for n in (1, 129, 517, 4097 if room.gpu else 1001):
        x, w, _ = room.inputs("sums", m=37, n=n, k=64)
        target = torch.full((37,), n - 1, dtype=torch.int64, device=room.device)
        target[::5] = -100
        target[1::5] = n
        z, lse, picked, total, peak = room.check("sums", x, w - 4.0 if n == 129 else w, target)
        assert bool(picked[::5].isnan().all()) and bool(picked[1::5].isnan().all()) and bool(picked[2::5].isfinite().all())


def row_8_vectors_go_by_name_where_shapes_agree(room: Room) -> None:
    x, w, row, col, full, one = room.inputs("four_biases", m=64, n=64, k=32)
    a, b, c, d = room.check("four_biases", x, w, row, col, full, one)
    torch.testing.assert_close(a - row, b - col[:, None], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(c - full, d - one, rtol=1e-4, atol=1e-4)


def row_9_the_raw_product_and_what_is_made_of_it(room: Room) -> None:
    z, y = room.check("raw_and_gelu", *room.inputs("raw_and_gelu", m=130, n=72, k=64))
    torch.testing.assert_close(torch.nn.functional.gelu(z), y.float(), rtol=1e-2, atol=1e-3)


def row_12_two_gelus(room: Room) -> None:
    x, w = room.inputs("two_gelus", m=64, n=64, k=256)
    z = x.double() @ w.double().T
    erf_form, tanh_form = room.check("two_gelus", x, w)
    for got, form in ((erf_form, "none"), (tanh_form, "tanh")):
        torch.testing.assert_close(got.double(), torch.nn.functional.gelu(z, approximate=form), rtol=1e-4, atol=2e-5)
    assert float((erf_form - tanh_form).abs().max()) > 1e-5


def row_13_nan_and_infinity_pass(room: Room) -> None:
    x, w, v = room.inputs("propagate", m=40, n=24, k=16)
    x[3, 5], x[7, 2], x[9, 2] = math.nan, math.inf, -math.inf
    w[:, 2] = w[:, 2].abs() + 0.5  # so that rows 7 and 9 are infinite, not NaN
    v[4] = math.nan
    r, c, above, below, top = room.call("propagate", x, w, v)
    z = x.double() @ w.double().T
    for got, want in (
        (r, torch.relu(z)), (c, z.clamp(-1, 1)), (above, torch.maximum(z, v.double())), (below, torch.minimum(z, v.double())),
        (top, z.amax(1)),
    ):  # fmt: skip
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert bool(r[3].isnan().all()) and bool((r[7] == math.inf).all()) and bool((c[9] == -1).all()) and bool(above[:, 4].isnan().all())


def row_16_a_rounding_is_never_dropped(room: Room) -> None:
    x, w, r = room.inputs("round_then_add", m=64, n=64, k=64)
    rounded, plain = room.check("round_then_add", x, w, r)
    z = plain - r
    step = (rounded - r).bfloat16().float()
    torch.testing.assert_close(rounded - r, step, rtol=1e-4, atol=1e-4)  # a bf16 number, but for the rounding of the sum
    assert float((rounded - plain).abs().max()) > 1e-3 and float((step - z).abs().max()) < 2.0**-7 * float(z.abs().max())


def row_17_rotary_halves_and_pairs(room: Room) -> None:
    x, w, pos, freq = room.inputs("rope_halves", m=33, k=64, head=3)
    pos = torch.arange(33, dtype=torch.int32, device=room.device)
    (halves,) = room.check("rope_halves", x, w, pos, freq)
    (pairs,) = room.check("rope_adjacent", x, w.transpose(1, 2).contiguous(), pos, freq)
    torch.testing.assert_close(halves, pairs.transpose(2, 3), rtol=1e-5, atol=1e-5)
    (mixed_up,) = room.call("rope_adjacent", x, w.reshape(3, 32, 2, 64), pos, freq)
    assert not torch.allclose(halves.reshape(mixed_up.shape), mixed_up, atol=1e-2)
    (back,) = room.check("rope_halves", x, w, -pos, freq)
    assert not torch.allclose(halves, back, atol=1e-2)
    torch.testing.assert_close(halves.square().sum(2), back.square().sum(2), rtol=1e-4, atol=1e-4)


def row_18_mixed_types(room: Room) -> None:
    tensors = room.inputs("mixed", m=33, n=40, k=64)
    (y,) = room.check("mixed", *tensors)
    assert y.isfinite().all()


def row_24_another_device_than_the_current(room: Room) -> None:
    if not room.gpu or torch.cuda.device_count() < 2:
        return
    other = torch.device("cuda", 1)
    tensors = [t.to(other) for t in room.inputs("mixed", m=33, n=40, k=64)]
    with torch.cuda.device(0):
        (y,) = room.check("mixed", *tensors)
    assert y.device == other


def row_25_streams_and_graphs(room: Room) -> None:
    if not room.gpu:
        return
    for name, sizes in (("sums", {"m": 257, "n": 1001, "k": 72}), ("raw_and_gelu", {"m": 256, "n": 512, "k": 64})):
        tensors = room.inputs(name, **sizes)
        want = room.call(name, *tensors)
        side = torch.cuda.Stream()
        late = [t.clone() for t in tensors]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            for t, source in zip(late, room.inputs(name, seed=1, **sizes)):
                t.copy_(source)  # the kernels must see this, so run after it, on this stream
            got = room.call(name, *late)
        torch.cuda.current_stream().wait_stream(side)
        room.right(name, late, got)
        graph = torch.cuda.CUDAGraph()
        static = [t.clone() for t in tensors]
        with torch.cuda.graph(graph):
            outputs = room.call(name, *static)
        for seed in (2, 3):
            for t, source in zip(static, room.inputs(name, seed=seed, **sizes)):
                t.copy_(source)
            graph.replay()
            torch.cuda.synchronize()
            room.right(name, static, outputs)
            assert not torch.equal(outputs[0], want[0])


def row_28_the_same_bits_every_time(room: Room) -> None:
    tensors = room.inputs("sums", m=1000, n=520, k=64)
    first = room.call("sums", *tensors)
    for _ in range(3 if room.gpu else 1):
        for one, again in zip(first, room.call("sums", *tensors), strict=True):
            assert torch.equal(one.nan_to_num(7.0), again.nan_to_num(7.0))


def rows() -> dict[str, Callable[[Room], None]]:
    """All rows, by name."""
    return {name: value for name, value in globals().items() if name.startswith("row_")}


def run_all(room: Room) -> dict[str, str]:
    """What is wrong with each row; "" where nothing is."""
    found: dict[str, str] = {}
    for name, row in rows().items():
        try:
            with torch.no_grad():
                row(room)
            found[name] = ""
        except Exception as problem:
            frame = traceback.extract_tb(problem.__traceback__)[1]
            found[name] = f"line {frame.lineno}: {type(problem).__name__}: {problem}"[:500]
    return found
