"""The device's arithmetic for moments, on numpy's f32 in place of a thread's registers: the same functions, traced over numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")

from coda_lang.backend_cute.gemm_sm90 import moments

F = np.float32


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """f32 additions and multiplications rounded one by one; the reciprocal off by a unit in the last place, as the hardware's may be."""
    arch = SimpleNamespace(fmax=lambda a, b, nan=False: a if nan and np.isnan(a) else max(a, b))
    math = SimpleNamespace(rcp=lambda x, approx: np.nextafter(F(1) / F(x), F(2)))
    monkeypatch.setattr(moments, "cute", SimpleNamespace(arch=arch, math=math))
    monkeypatch.setattr(moments, "Float32", F)
    monkeypatch.setattr(moments, "plus", lambda a, b: F(a) + F(b))
    monkeypatch.setattr(moments, "times", lambda a, b: F(a) * F(b))
    monkeypatch.setattr(moments, "select", lambda c, a, b: a if c else b)


def row(values: np.ndarray, lanes: int = 4, width: int = 8, tile: int = 128, late: bool = False) -> tuple:
    """A row as tiles leave it: lanes take pairs of columns, meet in a butterfly, tiles in order; columns past the end are masked."""
    parts = []
    for start in range(0, len(values), tile):
        closed = []
        for lane in range(lanes):
            state: tuple = (F(0),) * 4 if late else ()
            for first in range(start, start + tile, lanes * width):
                columns = [first + 2 * lane + 8 * (i // 2) + i % 2 for i in range(width)]
                inside = [c < len(values) for c in columns]
                given = [values[c] if ok else F(1e30) for c, ok in zip(columns, inside)]
                state = moments.absorb(state, given, inside, late=late)
            closed.append(moments.closed(state))
        for distance in (1, 2):
            closed = [moments.merge(*moments.ordered(closed[i], closed[i ^ distance], (i & distance) == 0)) for i in range(lanes)]
            pairs = [(closed[i], closed[i ^ distance]) for i in range(lanes)]
            assert all(a == b or any(map(np.isnan, a)) for a, b in pairs), "lanes that met have the same bits"
        parts.append(closed[0])
    total = parts[0]
    for part in parts[1:]:
        total = moments.merge(total, part)
    return total


@pytest.mark.parametrize("late", [False, True], ids=["first chunk first", "anchor to be found"])
@pytest.mark.parametrize("mean", [0.0, 30.0, 1000.0, -3e4])
@pytest.mark.parametrize("size", [1, 5, 100, 777, 4096])
def test_as_accurate_as_two_passes(size: int, mean: float, late: bool) -> None:
    rng = np.random.default_rng(size)
    worst = 0.0
    for _ in range(5):
        x = (rng.standard_normal(size) + mean).astype(F)
        count, anchor, offset, spread = row(x, late=late)
        exact = np.square(x.astype(float) - x.astype(float).mean()).sum()
        assert count == size
        assert abs(float(anchor) + float(offset) - x.astype(float).mean()) <= 1e-6 * x.astype(float).std() + 1e-7 * abs(mean)
        worst = max(worst, abs(float(spread) - exact) / max(exact, 1e-30)) if size > 1 else abs(float(spread))
    assert worst <= 2e-6


def test_an_outlier_as_anchor_costs_little() -> None:
    x = np.random.default_rng(0).standard_normal(4096).astype(F)
    x[0] = 3000.0  # the first value, which the thread measures distances from
    exact = np.square(x.astype(float) - x.astype(float).mean()).sum()
    bound = 32 * 4 * 2.0**-24  # a thread's values in a tile, each off by a few roundings of that distance
    assert abs(float(row(x)[3]) - exact) <= bound * exact
    x[1:] += F(500.0)
    exact = np.square(x.astype(float) - x.astype(float).mean()).sum()
    assert abs(float(row(x)[3]) - exact) <= bound * exact


def test_nothing_takes_no_part() -> None:
    nothing = moments.closed(())
    some = moments.closed(moments.absorb((), [F(3.0), F(5.0)]))
    assert nothing == (0.0,) * 4 and moments.merge(nothing, nothing) == nothing
    for total in (moments.merge(nothing, some), moments.merge(some, nothing)):
        assert total[0] == 2.0 and total[1] + total[2] == pytest.approx(4.0) and total[3] == pytest.approx(2.0)
    outside = moments.absorb((), [F(np.nan), F(np.inf)], [False, False])
    assert moments.closed(outside) == nothing


def test_nan_propagates() -> None:
    x = np.ones(300, dtype=F)
    x[137] = np.nan
    assert np.isnan(row(x)[3])
    x[137] = np.inf
    with np.errstate(invalid="ignore"):
        assert np.isnan(row(x)[3]), "the distance from an infinite mean"
