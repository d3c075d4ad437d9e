"""The operator table: every op that may stand in `Eqn.op`, one entry each. See `spec.Op` for the facets.

In: nothing. Out: `TABLE` (IR name → Op), look-up by what a source writes, `page` (documentation of one op), and the structural ops that
the front end and the passes build by meaning rather than by name (`CAST`, `CONTRACT`, …). Needs no torch.
"""

from __future__ import annotations

from . import contraction, lanes, move, pointwise, reductions  # noqa: F401  (each registers its entries)
from .spec import TABLE, Attrs, Domain, Laws, Op, TypeProblem, op, unify

CAST, WHERE = TABLE["cast"], TABLE["where"]
ADD, SUB, MUL, NEG = TABLE["add"], TABLE["sub"], TABLE["mul"], TABLE["neg"]
CONTRACT = TABLE["contract"]
SUM, MEAN, DEVIATION, GATHER = TABLE["sum"], TABLE["mean"], TABLE["deviation"], TABLE["gather"]
DIV, SQUARE, POWER = TABLE["div"], TABLE["square"], TABLE["pow"]
LANE, PACK, RUN, JOIN = TABLE["lane"], TABLE["pack"], TABLE["run"], TABLE["join"]
RENAME, EXPAND, INDEX, SIZE, STOP = TABLE["rename"], TABLE["expand"], TABLE["index"], TABLE["size"], TABLE["stop_gradient"]

__all__ = ["TABLE", "Attrs", "Domain", "Laws", "Op", "TypeProblem", "by_symbol", "find", "names", "op", "unify"]


def by_symbol(symbol: str, arity: int) -> Op | None:
    """The op a source writes as the operator `symbol` with that many operands (`-` has two meanings)."""
    return next((o for o in TABLE.values() if o.symbol == symbol and o.accepts(arity)), None)


def find(surface: str, brackets: str = "none") -> Op | None:
    """The op a source calls as `surface`, with brackets "none", "axes" (one or several names) or "arrow".

    `min` and `max` without brackets are element-wise, with brackets they reduce; `split` and `pack` mean lanes, with an arrow runs.
    """
    wanted = ("axes", "axis") if brackets in ("axes", "axis") else (brackets,)
    return next((o for o in TABLE.values() if o.surface == surface and o.brackets in wanted), None)


def names() -> tuple[str, ...]:
    """Every name a source may call, sorted: for suggestions and highlighting."""
    return tuple(sorted({o.surface for o in TABLE.values() if o.surface is not None}))
