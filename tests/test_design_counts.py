"""Kernels and bytes of the feed-forward block and of a LLaMA layer, forward and backward, against those one would write by hand."""

from __future__ import annotations

from math import prod

import pytest
from conftest import ROOT
from test_laws import WRITTEN, only

from coda_lang import passes
from coda_lang.ir.kernels import Gemm, Plan
from coda_lang.passes.state import nominal

M, D, F, H, K = 8192, 4096, 14336, 4096, 1024  # rows, widths of the model and the block, of all heads of queries, of keys
BLOCK = WRITTEN.replace("(x2: bf16[m, d])\n", f"(x2: bf16[m, d])\nnominal m = {M}, d = {D}, f = {F}, h = {H}\n")
VECTORS = 1.001  # norms' weights, row sums and scales come on top


def gemms(plan: Plan) -> list[int]:
    """Products of each kernel; 0 is a map kernel."""
    return [len(next(k for k in part.launched if isinstance(k, Gemm)).products) for part in plan.parts]


def moved(plan: Plan) -> float:
    """Elements of 16 bits that kernels read and write."""
    size = nominal(plan.program)
    tensors = [t for part in plan.parts for t in (*part.program.inputs, *(o.tensor for o in part.program.outputs))]
    return sum(prod(size[a] for a in t.axes) * t.dtype.bits / 16 for t in tensors)


def saved(plan: Plan) -> float:
    assert plan.derived is not None
    size = nominal(plan.program)
    return sum(prod(size[a] for a in t.axes) * t.dtype.bits / 16 for t in plan.derived.residuals)


@pytest.fixture(scope="module")
def block() -> Plan:
    return passes.trained(only(BLOCK))


@pytest.fixture(scope="module")
def layer() -> Plan:
    return passes.trained(only((ROOT / "specs" / "llama" / "layer.coda").read_text(encoding="utf-8")))


def test_the_block_takes_nine_kernels_with_products_and_no_other(block: Plan) -> None:
    assert block.derived is not None
    assert gemms(block) == [1, 1, 1] and sorted(gemms(block.derived.backward)) == [1, 1, 1, 1, 1, 1, 2]


def test_the_block_moves_what_one_would_move_by_hand(block: Plan) -> None:
    assert block.derived is not None
    forward = (M * H + H * D + 3 * M * D) + (M * D + 2 * D * F + M * F) + (M * F + F * D + 2 * M * D)
    dz = (M * D + D * F + 2 * M * F) + (2 * M * F + M * F)  # reads dx2, wd, gate and up; writes their gradients, and y for wd's
    dx = (2 * M * F + 2 * F * D + 2 * M * D) + (
        M * D + M * D
    )  # reads dz, both weights, dx2 and x1; writes dx1, and the norm's operand again
    weights = (M * D + M * F + D * F) + 2 * (M * F + M * D + D * F) + (M * D + M * H + D * H)
    backward = dz + dx + weights + (M * D + D * H + M * H)
    assert forward <= moved(block) <= VECTORS * forward
    assert backward <= moved(block.derived.backward) <= VECTORS * backward
    assert M * (D + 2 * F) <= saved(block) <= VECTORS * M * (D + 2 * F), "x1, gate and up"


def test_a_layer_saves_no_more_than_the_block_in_it_and_rotates_in_one_pass(layer: Plan) -> None:
    assert layer.derived is not None
    assert M * (D + 2 * F) <= saved(layer) <= VECTORS * M * (D + 2 * F), "nothing of q, k and v"
    backward = gemms(layer.derived.backward)
    assert gemms(layer) == [1] * 6 and sum(backward) == 14 and backward.count(0) == 2, "one map kernel for queries, one for keys and values"
    maps = [part for part, count in zip(layer.derived.backward.parts, backward) if count == 0]
    size = nominal(layer.program)
    touched = [t for p in maps for t in (*p.program.inputs, *(o.tensor for o in p.program.outputs)) if len(t.axes) > 2]
    assert sum(prod(size[a] for a in t.axes) for t in touched) == 3 * M * (H + 2 * K), "each is read with its gradient and written, once"
