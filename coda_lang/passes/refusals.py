"""The refusals of `place`, each with the value, the axis, why no tile can know it, what was tried, and an edit that would make it legal.

In: an equation and what is known about it. Out: `Diagnostic`s with stable codes (C0406 to C0415). Non-goals: deciding.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..diagnostics.model import Diagnostic, Label
from ..ir.graph import Eqn, Program, Tensor, Var
from ..ir.kernels import Along
from .state import LANE, Anchor, Place, listed, say

WHOLE = "what no tile can know is stored and goes on in a kernel of its own"


def _labels(*pairs: tuple[Eqn | None, str]) -> tuple[Label, ...]:
    return tuple(Label(e.span, text) for e, text in pairs if e is not None and e.span is not None)


def _product(anchor: Anchor) -> Eqn | None:
    return anchor.accumulators[0].eqn if anchor.accumulators else None


def _axes(e: Eqn) -> tuple[str, ...]:
    over = dict(e.attrs).get("axes", dict(e.attrs).get("axis"))
    return tuple(over) if isinstance(over, tuple) else (str(over),)


def stuck(e: Eqn, late: Place, anchor: Anchor, program: Program, defs: dict[str, Eqn]) -> Diagnostic:
    """A result that needs all tiles meets a value of one tile."""
    because = late.because
    assert because is not None
    over = _axes(because)
    free = [a for a in over if program.extent(a) is None]
    tried = (
        f"tried: a statistic within the tile ({listed(free)} is free, so no tile holds all of it)"
        if free
        else "tried: a statistic within the tile (it would be wider than a tile)"
    )
    what = say(because.out, because)
    return Diagnostic(
        "C0406",
        f"{say(e.out, e)} needs {what} in the kernel that is still computing it",
        e.span,
        "a value of one tile meets a result of all tiles",
        _labels(
            (because, f"reduces over {listed(over)}: known only when every tile is done"),
            (_product(anchor), "the product whose tiles these are"),
        ),
        notes=(
            f"a tile holds some of {listed(over)}; {what} is complete after the kernel and its finisher",
            tried,
        ),
        help="store the value and the reduction as outputs (as specs/residual_sumsq.coda does) and apply the result in the next program "
        "(as specs/rowscale_linear.coda does)"
        if free
        else f"reduce over fewer axes than {listed(over)}",
    )


def elsewhere(e: Eqn, axis: str, one: Along | str, two: Along | str, defs: dict[str, Eqn]) -> Diagnostic:
    """Two values share an axis name but lie at different places of the product."""
    places = " and ".join(f"{x.start} of `{x.axis}`" if isinstance(x, Along) else "its lanes" for x in (one, two))
    args = [(defs.get(a.name), f"{say(a, defs.get(a.name))}") for a in e.args if isinstance(a, Var) and axis in a.ty.axes]
    return Diagnostic(
        "C0407",
        f"these values lie at different columns of the product: `{axis}` begins at {places}",
        e.span,
        "different tiles meet here",
        _labels(*((d, "this one" if text == "this expression" else text) for d, text in args)),
        notes=("a tile knows its own columns only", "tried: lanes (the axis was split into runs, not lanes)"),
        help="declare the weight with a lane axis (`[lane=2, head, …]`) and split that: its lanes are computed side by side",
    )


def join_moves(e: Eqn, axis: str) -> Diagnostic:
    return Diagnostic(
        "C0407",
        f"joining would move `{axis}` to other columns than those the product gave it",
        e.span,
        "columns would have to move between tiles",
        notes=("runs can be joined in the order in which they were split",),
        help="join in the order of the split, or store the parts as outputs of their own",
    )


def run_not_columns(e: Eqn, axis: str) -> Diagnostic:
    return Diagnostic(
        "C0407",
        f"`{axis}` cannot be split into runs here: it is not the outermost column axis of the product",
        e.span,
        "this split",
        notes=("a run must be a consecutive range of the product's columns, and a product can be split so along one axis",),
        help=f"declare {axis} on the weight, before its other axes; or split off lanes (`split[lane](…)`)",
    )


def free_run(e: Eqn, axis: str, free: tuple[str, ...]) -> Diagnostic:
    return Diagnostic(
        "C0407",
        f"`{axis}` cannot be split into runs while {listed(free)} is free",
        e.span,
        "this split",
        notes=("a run must begin at a column that is known when compiling",),
        help=f"fix it in the signature: {free[0]}=128",
    )


def unknown_axis(e: Eqn, axis: str, anchor: Anchor) -> Diagnostic:
    return Diagnostic(
        "C0408",
        f"{say(e.out, e)} has the axis `{axis}`, which is neither a row nor a column of the product",
        e.span,
        f"brings in `{axis}`",
        _labels((_product(anchor), f"rows {listed(anchor.rows)}, columns {listed(anchor.cols)}")),
        notes=(f"each element of the product would be used once for every position of `{axis}`, which is free",),
        help=f"fix its extent ({axis}=2) to make its positions lanes, or contract it before",
    )


def input_reduction(e: Eqn, axes: tuple[str, ...]) -> Diagnostic:
    return Diagnostic(
        "C0409",
        f"{say(e.out, e)} reduces over {listed(axes)} what no product made",
        e.span,
        "needs a kernel of its own, before this one",
        notes=("a kernel reduces values of its own product", "tried: lanes (the axes are not a few fixed positions)", WHOLE),
        help="compute it in an earlier program and make it an input",
    )


def input_gather(e: Eqn, axis: str) -> Diagnostic:
    return Diagnostic(
        "C0409",
        f"{say(e.out, e)} gathers along `{axis}` from what no product made",
        e.span,
        "needs a kernel of its own, before this one",
        notes=("a kernel picks elements of its own product", WHOLE),
        help="gather in an earlier program and make the result an input",
    )


def partial(e: Eqn, axes: tuple[str, ...], kept: dict, anchor: Anchor) -> Diagnostic:
    left = tuple(a for a, x in kept.items() if x != LANE)
    return Diagnostic(
        "C0410",
        f"{say(e.out, e)} reduces over {listed(axes)} but keeps {listed(left)}",
        e.span,
        "a partial reduction across tiles",
        _labels((_product(anchor), f"rows {listed(anchor.rows)}, columns {listed(anchor.cols)}")),
        notes=(
            "across tiles a reduction takes all rows or all columns of the product; within a tile it takes the innermost columns",
            "tried: a statistic within the tile; partial results and a finisher",
        ),
        help=f"reduce over all of the product's {'rows' if set(axes) & set(anchor.rows) else 'columns'}, "
        "or declare the weight with the reduced axes innermost",
    )


def partial_run(e: Eqn, defs: dict[str, Eqn]) -> Diagnostic:
    return Diagnostic(
        "C0410",
        f"{say(e.out, e)} is about a run of a split axis, which this reduction cannot take apart",
        e.span,
        "only part of the columns",
        notes=("over a run, sums per row and stores are compiled",),
        help="reduce before splitting, or over the whole axis",
    )


def late(e: Eqn) -> Diagnostic:
    return Diagnostic(
        "C0410",
        f"{say(e.out, e)} takes a logsumexp of results that are themselves reduced",
        e.span,
        "a second logsumexp",
        notes=("the finisher of finished rows sums, or takes the largest or smallest",),
        help="take the logsumexp over all axes at once",
    )


def free_group(e: Eqn, axes: tuple[str, ...], kept: dict, extents: dict[str, int | None]) -> Diagnostic:
    free = tuple(a for a in axes if extents.get(a) is None)
    left = tuple(a for a, x in kept.items() if x != LANE)
    return Diagnostic(
        "C0411",
        f"{say(e.out, e)} is a statistic over {listed(free or axes)}, whose extent is free",
        e.span,
        f"one for each {listed(left)}",
        notes=("a group must fit one tile, so its extent must be known when compiling",),
        help=f"fix it in the signature: {(free or axes)[0]}=128",
    )


def wide_group(e: Eqn, axes: tuple[str, ...], size: int, most: int) -> Diagnostic:
    wide = size > most
    return Diagnostic(
        "C0411",
        f"{say(e.out, e)} is a statistic over {listed(axes)}: {size} columns"
        + (f", but a tile has at most {most}" if wide else ", which do not divide a tile"),
        e.span,
        "wider than a tile" if wide else "groups would straddle tiles",
        notes=("a group has 1, 2, 4 or a multiple of 8 columns", "tried: partial results and a finisher (the statistic is per group)"),
        help="split the axis in the signature and take the statistic over the inner one"
        if wide
        else "choose an extent that is a multiple of 8",
    )


def crossing_groups(e: Eqn, axes: tuple[str, ...]) -> Diagnostic:
    return Diagnostic(
        "C0410",
        f"{say(e.out, e)} groups the columns by other axes than an earlier statistic does",
        e.span,
        f"over {listed(axes)}",
        notes=("the groups of one kernel are nested: each is the innermost column axes",),
        help="take one of the statistics in another program",
    )


def partial_gather(e: Eqn, axis: str) -> Diagnostic:
    return Diagnostic(
        "C0412",
        f"{say(e.out, e)} gathers along `{axis}`, which is not all of the product's columns (or rows)",
        e.span,
        "this gather",
        notes=("an element is picked where the position equals the index: one for each row, or one for each column",),
        help=f"gather where {axis} is the only column axis and the index has only row axes",
    )


def computed_index(e: Eqn, defs: dict[str, Eqn]) -> Diagnostic:
    return Diagnostic(
        "C0412",
        f"the index of {say(e.out, e)} depends on the product it gathers from",
        e.span,
        "this gather",
        _labels((defs.get(e.args[1].name) if isinstance(e.args[1], Var) else None, "the index")),
        notes=("the position must be known to every tile",),
        help="gather with an index computed from inputs",
    )


def outer(e: Eqn, late: Iterable[Place], defs: dict[str, Eqn]) -> Diagnostic:
    because = [p.because for p in late if p.because is not None]
    return Diagnostic(
        "C0413",
        f"{say(e.out, e)} spreads a finished reduction over rows and columns",
        e.span,
        "needs a kernel of its own, after the finisher",
        _labels(*[(b, f"{say(b.out, b)} is known only after the kernel") for b in because]),
        notes=("a finisher makes one value a row, one a column, or a scalar", WHOLE),
        help="output the reduction and do this step in the next program",
    )


def finished_output(tensor: Tensor, need: set[str]) -> Diagnostic:
    return Diagnostic(
        "C0414",
        f"output `{tensor.name}` must have exactly {listed(frozenset(need))} here",
        tensor.span,
        "this output",
        notes=("a finisher writes one value a row, one a column, or a scalar",),
        help="give the output the axes of the rows, or of the columns, or none",
    )


def output_axis(tensor: Tensor, axis: str, anchor: Anchor) -> Diagnostic:
    return Diagnostic(
        "C0408",
        f"output `{tensor.name}` has the axis `{axis}`, which is neither a row nor a column of the product",
        tensor.span,
        "this output",
        _labels((_product(anchor), f"rows {listed(anchor.rows)}, columns {listed(anchor.cols)}")),
        notes=("a kernel writes one element for each position of its product",),
        help=f"leave {axis} out of the output",
    )


def output_rows(tensor: Tensor, anchor: Anchor) -> Diagnostic:
    return Diagnostic(
        "C0414",
        f"output `{tensor.name}` has not all rows of the product ({listed(anchor.rows)})",
        tensor.span,
        "this output",
        notes=("a kernel writes one element for each row and column, or one for each row and column group",),
        help=f"reduce over {listed(anchor.rows)}, or keep all of them",
    )
