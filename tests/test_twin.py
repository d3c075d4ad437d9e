"""The twin executes hand-written records to the meaning of their references, rounds where kernels do, and has the kernels' partials."""

from __future__ import annotations

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")

from coda_lang.backend_cute import spec as s  # noqa: E402
from coda_lang.backend_cute import torch_fns, twin  # noqa: E402
from tests import handwritten as hw  # noqa: E402

SIZES = (
    {"m": 5, "d": 16, "n": 24, "f": 24, "v": 40, "head": 3, "rank": 4},
    {"m": 300, "d": 33, "n": 301, "f": 131, "v": 517, "head": 2, "rank": 7},
)
EMPTY = ({"m": 0}, {"n": 0, "f": 0, "v": 0, "head": 0}, {"d": 0, "rank": 0})


def planned(case, tensors, f=None, **kw):
    names = [a.name for a in case.program.inputs]
    return tuple(twin.run(case.program, case.functions, dict(zip(names, tensors)), f=f, **kw).values())


@pytest.mark.parametrize("sizes", [*SIZES, *EMPTY], ids=str)
@pytest.mark.parametrize("name", hw.ALL)
def test_exact_twin_is_the_reference(name, sizes):
    case = hw.ALL[name]
    tensors = hw.inputs(case.program, sizes)
    f = torch_fns.Exact()
    got, want = planned(case, tensors, f), case.reference(f, *tensors)
    assert len(got) == len(want) == len(case.program.outputs)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.float64
        torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("name", hw.ALL)
def test_planned_twin_rounds_once_at_the_store(name):
    case = hw.ALL[name]
    tensors = hw.inputs(case.program, SIZES[1])
    got, want = planned(case, tensors), case.reference(torch_fns.Exact(), *tensors)
    for g, w, out in zip(got, want, case.program.outputs, strict=True):
        assert g.dtype == torch_fns.DTYPES[out.dtype]
        error = (g.double() - w).norm() / w.norm()
        assert error < 4e-3
    rounded = want[0].to(got[0].dtype)
    assert (got[0] == rounded).double().mean() > 0.98  # equal but where f32 accumulation crosses a rounding boundary


@pytest.mark.parametrize("config", [s.Config(64, 64), s.Config(128, 128), s.Config(256, 192, pingpong=False)], ids=lambda c: c.key)
@pytest.mark.parametrize("name", ["residual", "lm_head", "qkv"])
def test_the_partition_does_not_change_the_meaning(name, config):
    case = hw.ALL[name]
    tensors = hw.inputs(case.program, SIZES[1])
    f = torch_fns.Exact()
    for g, w in zip(planned(case, tensors, f, config=config), case.reference(f, *tensors), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11)


def test_partials_have_the_kernels_shapes():
    case = hw.RESIDUAL
    config = s.Config(256, 192, pingpong=False)
    tensors = dict(zip([a.name for a in case.program.inputs], hw.inputs(case.program, {"m": 300, "n": 301, "d": 8, "rank": 8})))
    extents = twin.bind(case.program, tensors)
    twin.launch(case.program.kernels[0], case.functions, tensors, extents, {}, torch_fns.Written(), config)
    assert tensors["ms_work"].shape == (2, 300)
    assert tensors["total_work"].shape == (3, 301)  # two warpgroups share the 256 rows


def test_infinities_and_nan_pass_through_logsumexp():
    inf = math.inf
    rows = [[-inf, -inf, -inf], [inf, 0.0, 1.0], [math.nan, 0.0, 1.0], [inf, inf, -inf], [1.0, -inf, 2.0]]
    values = torch.tensor(rows, dtype=torch.float64)
    kernel = hw.LM_HEAD.program.kernels[0]
    for tile in (64, 128):
        run = twin._Run(kernel, {}, {}, {"m": 5, "v": 3}, {}, torch_fns.Exact())
        run.size = (5, 3)
        work = run.partials(kernel, s.RowReduce("lse", "lse_work"), values, s.Config(tile, tile))
        torch.testing.assert_close(twin.combine("lse", work), torch.logsumexp(values, 1), equal_nan=True)
    pieces = torch.stack([torch.stack((v, torch.where(v.isneginf(), 0.0, 1.0))) for v in values.unbind(1)], 1)
    torch.testing.assert_close(twin.combine("lse", pieces), torch.logsumexp(values, 1), equal_nan=True)


def test_gather_outside_the_axis_is_nan():
    x, w, target = hw.inputs(hw.LM_HEAD.program, {"m": 4, "d": 8, "v": 9})
    target = torch.tensor([8, 9, -1, -100])
    loss = planned(hw.LM_HEAD, (x, w, target))[1]
    assert loss.isfinite().tolist() == [True, False, False, True] and loss[3] == 0


def test_a_missing_sink_is_a_bug_and_says_so():
    gemm = hw.BIAS_GELU.program.kernels[0]
    broken = dataclasses.replace(hw.BIAS_GELU.program, kernels=(dataclasses.replace(gemm, sinks=gemm.sinks[:1]),))
    tensors = dict(zip("x w b alpha".split(), hw.inputs(broken, SIZES[0])))
    with pytest.raises(ValueError, match="have no sink"):
        twin.run(broken, hw.BIAS_GELU.functions, tensors)
