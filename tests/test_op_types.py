"""Types of applications, what a written number becomes, look-up by what a source writes, and the operators' documentation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from optable import AXES, Case, out_type, ty  # noqa: E402

from coda_lang import listing, ops  # noqa: E402
from coda_lang.backend_cute import torch_fns  # noqa: E402
from coda_lang.ir.graph import Lit, Var  # noqa: E402
from coda_lang.ir.types import BF16, BOOL, F16, F32, I32, I64, Ty  # noqa: E402
from coda_lang.ops import TABLE, TypeProblem  # noqa: E402
from coda_lang.ops.builder import EqnBuilder, literal  # noqa: E402

inf = math.inf

# --- types -------------------------------------------------------------------------------------------------------------

WRONG = [
    (Case("add", (ty(F32, "m"), ty(BOOL, "m"))), 1, "bool"),
    (Case("add", (ty(F32, "m"), ty(I32, "m"))), 1, "needs its y as f32"),
    (Case("add", (ty(F32, "m"),)), None, "takes 2 arguments, not 1"),
    (Case("silu", (ty(BOOL, "m"),)), 0, "takes numbers"),
    (Case("silu", (ty(I32, "m"),)), 0, "as f32, not i32"),
    (Case("and", (ty(BOOL), ty(F32))), 1, "needs a bool"),
    (Case("where", (ty(F32), ty(F32), ty(F32))), 0, "needs a bool"),
    (Case("cast", (ty(F32),), {"dtype": "i32"}), 0, "no rounding to integers"),
    (Case("cast", (ty(I64),), {"dtype": "i32"}), 0, "may not fit"),
    (Case("cast", (ty(F32),), {"dtype": "bool"}), None, "cannot convert to bool"),
    (Case("cast", (ty(F32),), {"dtype": "fp8"}), None, "cannot convert to fp8"),
    (Case("sum", (ty(F32, "m"),), {"axes": ("n",)}), 0, "cannot reduce over n"),
    (Case("sum", (ty(F32, "m"),), {"axes": ()}), None, "at least one axis"),
    (Case("sum", (ty(F32, "m"),), {"axes": ("m", "m")}), None, "named twice"),
    (Case("sum", (ty(F32, "m"),), {}), None, "attributes"),
    (Case("gather", (ty(F32, "m"), ty(I32, "m")), {"axis": "n"}), 0, "cannot gather along n"),
    (Case("gather", (ty(F32, "m n"), ty(I32, "n")), {"axis": "n"}), 1, "has the axis n"),
    (Case("gather", (ty(F32, "m n"), ty(F32, "m")), {"axis": "n"}), 1, "needs an integer"),
    (Case("contract", (ty(F32, "m k"), ty(BF16, "n k")), {"axes": ("k",), "batch": ()}), 0, "must be bf16 or f16"),
    (Case("contract", (ty(F16, "m k"), ty(BF16, "n k")), {"axes": ("k",), "batch": ()}), 1, "differ in type"),
    (Case("contract", (ty(BF16, "m k"), ty(BF16, "n")), {"axes": ("k",), "batch": ()}), 1, "axis k is not on both sides"),
    (Case("contract", (ty(BF16, "m k"), ty(BF16, "n k")), {"axes": (), "batch": ()}), None, "needs an axis that both sides have"),
    (Case("contract", (ty(BF16, "m k b"), ty(BF16, "n k b")), {"axes": ("k",), "batch": ()}), None, "either contracted or a batch"),
    (Case("contract", (ty(BF16, "k"), ty(BF16, "n k")), {"axes": ("k",), "batch": ()}), 0, "an axis of its own"),
    (Case("lane", (ty(F32, "m n"),), {"axis": "n", "index": 0}), None, "no fixed extent"),
    (Case("lane", (ty(F32, "m n"),), {"axis": "lane", "index": 0}), 0, "no axis lane"),
    (Case("lane", (ty(F32, "m lane"),), {"axis": "lane", "index": 2}), None, "which has 2"),
    (Case("pack", (ty(F32, "m"),), {"axis": "lane"}), None, "has 2 lanes, but 1"),
    (Case("pack", (ty(F32, "m lane"), ty(F32, "m")), {"axis": "lane"}), 0, "already has the axis"),
    (Case("pack", (ty(F32, "m"), ty(BOOL, "m")), {"axis": "lane"}), 1, "side by side"),
    (Case("run", (ty(F32, "m head"),), {"axis": "head", "start": 3, "to": "kh"}), None, "which has 5"),
    (Case("run", (ty(F32, "m"),), {"axis": "head", "start": 0, "to": "kh"}), 0, "no axis head"),
    (Case("join", (ty(F32, "qh"), ty(F32, "lane")), {"axis": "head", "of": ("qh", "lane")}), None, "together have 4"),
    (Case("join", (ty(F32, "qh"),), {"axis": "head", "of": ("qh", "kh")}), None, "2 axes are named for 1"),
    (Case("rename", (ty(F32, "m"),), {"axis": "n", "to": "p"}), 0, "no axis n"),
    (Case("rename", (ty(F32, "n p"),), {"axis": "n", "to": "p"}), 0, "already has the axis p"),
    (Case("rename", (ty(F32, "n"),), {"axis": "n", "to": "lane"}), None, "differ in extent"),
    (Case("rename", (ty(F32, "n"),), {"axis": "n", "to": "zz"}), None, "unknown axis zz"),
    (Case("expand", (ty(F32, "n"),), {"axes": ("n",)}), 0, "already has the axis n"),
    (Case("expand", (ty(F32, "n"),), {"axes": ("zz",)}), None, "unknown axis zz"),
    (Case("index", (), {"axis": "zz"}), None, "unknown axis zz"),
    (Case("size", (), {"axes": ("zz",)}), None, "unknown axis zz"),
]


@pytest.mark.parametrize("case,arg,words", WRONG, ids=[str(w[0]) for w in WRONG])
def test_wrong_applications_say_which_argument_and_why(case, arg, words):
    with pytest.raises(TypeProblem) as caught:
        out_type(case)
    assert words in caught.value.message
    assert caught.value.arg_index == arg


RIGHT = [
    (Case("add", (ty(BF16, "n"), ty(F16, "m"))), Ty(F32, ("m", "n"))),
    (Case("add", (ty(I32, "n"), ty(I32, "m"))), Ty(I32, ("m", "n"))),
    (Case("div", (ty(F32), ty(F32))), Ty(F32)),
    (Case("lt", (ty(I64, "m"), ty(I64))), Ty(BOOL, ("m",))),
    (Case("pack", (ty(BF16, "m"), ty(BF16, "n")), {"axis": "lane"}), Ty(BF16, ("m", "n", "lane"))),
    (Case("pack", (ty(BF16, "m"), ty(F32, "n")), {"axis": "lane"}), Ty(F32, ("m", "n", "lane"))),
    (Case("run", (ty(BF16, "head m"),), {"axis": "head", "start": 2, "to": "kh"}), Ty(BF16, ("m", "kh"))),
    (Case("index", (), {"axis": "n"}), Ty(I32, ("n",))),
    (Case("size", (), {"axes": ("n",)}), Ty(I32)),
    (Case("contract", (ty(F16, "m b k"), ty(F16, "k n b")), {"axes": ("k",), "batch": ("b",)}), Ty(F32, ("m", "n", "b"))),
]


@pytest.mark.parametrize("case,expected", RIGHT, ids=[str(r[0]) for r in RIGHT])
def test_types_of_results(case, expected):
    assert out_type(case) == expected


@pytest.mark.parametrize(
    "value,beside,expected",
    [
        (2, (), Lit(2, I32)),
        (2**40, (), Lit(2**40, I64)),
        (0.1, (), Lit(0.10000000149011612, F32)),
        (2, (F32,), Lit(2.0, F32)),
        (2, (BF16, I32), Lit(2.0, F32)),
        (2.0, (I32,), Lit(2, I32)),
        (2.5, (I32,), Lit(2.5, F32)),
        (-100, (I64,), Lit(-100, I64)),
        (2**40, (I32,), Lit(2**40, I64)),
        (True, (F32,), Lit(True, BOOL)),
        (-inf, (F32,), Lit(-inf, F32)),
        (-inf, (I32,), Lit(-inf, F32)),
    ],
)
def test_a_number_takes_the_type_beside_it_where_exact(value, beside, expected):
    got = literal(value, beside)
    assert got == expected and type(got.value) is type(expected.value)


@pytest.mark.parametrize("value,beside", [(2**24 + 1, (F32,)), (2**70, ()), (1e39, ()), (2**200, (F32,))])
def test_a_number_that_no_type_holds_is_refused(value, beside):
    with pytest.raises(TypeProblem):
        literal(value, beside)


def test_integers_meet_floats_by_casts_that_stand_in_the_program():
    b = EqnBuilder(AXES, ["x", "i", "j"])
    x, i, j = Var("x", ty(F32, "m")), Var("i", ty(I32, "m")), Var("j", ty(I64, "n"))
    assert b.mul(x, i).ty.dtype is F32 and [e.op for e in b.eqns] == ["cast", "mul"]
    assert b.eq(i, j).ty == Ty(BOOL, ("m", "n")) and dict(b.eqns[-2].attrs) == {"dtype": "i64"}
    assert (b.value(i) + 1).ty.dtype is I32
    assert (b.value(i) / 2).ty.dtype is F32
    assert (b.value(i) * 0.5).ty.dtype is F32
    assert b.apply("add", (1, 0.5)).ty == Ty(F32)


# --- look-up and documentation -----------------------------------------------------------------------------------------

PRIMITIVES = """+ - * / ** == != < <= > >= and or not @ where abs min max clamp floor round fma exp exp2 log log1p sqrt rsqrt square
reciprocal erf tanh sigmoid softplus sin cos relu relu2 silu gelu gelu_tanh quick_gelu sum mean amax logsumexp gather index size pack
split rename expand stop_gradient matmul""".split()


@pytest.mark.parametrize("name", PRIMITIVES)
def test_every_primitive_of_the_language_is_there(name):
    assert any(name in (op.surface, op.symbol) for op in TABLE.values())


def test_look_up_by_what_a_source_writes():
    assert ops.by_symbol("-", 1).name == "neg" and ops.by_symbol("-", 2).name == "sub" and ops.by_symbol("%", 2) is None
    assert ops.find("min").name == "minimum" and ops.find("min", "axes").name == "min"
    assert ops.find("pack", "axis").name == "pack" and ops.find("pack", "arrow").name == "join"
    assert ops.find("split", "axis").name == "lane" and ops.find("split", "arrow").name == "run"
    assert ops.find("contract") is None and ops.find("matmul", "axes") is ops.CONTRACT
    assert set(ops.names()) >= {"silu", "split", "min"} and list(ops.names()) == sorted(set(ops.names()))


@pytest.mark.parametrize("op", list(TABLE.values()), ids=lambda op: op.name)
def test_entries_are_documented(op):
    assert op.doc.endswith(".") and op.derivative.endswith(".")
    assert (op.vjp is None) == (op.derivative.startswith(("none", "dx = 0.")) and op.name not in ("logsumexp",))
    if op.emit is not None:
        calls = {name for name in torch_fns.NAMES if f"f.{name}(" in op.emit}
        assert calls or not op.emit.startswith("f.") or op.attrs, f"{op.emit} names no function of the libraries"


def test_the_page_of_operators_is_current():
    page = Path(__file__).parent.parent / "docs" / "operators.md"
    assert page.read_text(encoding="utf-8") == listing.markdown(), "run: python -m coda_lang.listing > docs/operators.md"


@pytest.mark.parametrize("op", [op for op in TABLE.values() if op.user], ids=lambda op: op.name)
def test_each_callable_op_has_a_page_with_its_facets(op):
    page = listing.page(op.surface)
    assert op.doc in page and op.derivative in page
    if op.kind == "map":
        assert (f"at most {op.ulp} f32 ulp" if op.ulp else "exact or correctly rounded") in page
