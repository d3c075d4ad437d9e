"""Holding a source's meaning against PyTorch: build it, run it in float64 by the interpreter, compare with a function written by hand.

In: `.coda` text, extents, an eager function over its inputs. Out: an assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from coda_lang.ir.build import build
from coda_lang.ir.graph import Program
from coda_lang.ir.interp import run
from coda_lang.ir.printer import to_text
from coda_lang.ir.reader import from_text
from coda_lang.ir.verify import verify
from coda_lang.source import Source
from coda_lang.syntax.parse import parse

DTYPES = {"i32": torch.int32, "i64": torch.int64, "bool": torch.bool}


def built(text: str, **options: Any) -> dict[str, Program]:
    """The programs of a source by name, verified, each the same after printing and reading back."""
    source = Source("test.coda", text)
    programs = build(parse(source), (source,), **options)
    for p in programs:
        verify(p)
        assert from_text(to_text(p)) == p
    return {p.name: p for p in programs}


def only(text: str, **options: Any) -> Program:
    """The one program of a source."""
    (program,) = built(text, **options).values()
    return program


def inputs(
    program: Program, extents: Mapping[str, int], integers: Mapping[str, tuple[int, int]] = {}, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random inputs: normal float64, and integers from the ranges given by name (default 0 to 4)."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {a.name: a.extent for a in program.axes} | dict(extents)
    made = {}
    for t in program.inputs:
        shape = [sizes[a] for a in t.axes]
        if t.dtype.kind == "float":
            made[t.name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            low, high = integers.get(t.name, (0, 4 if t.dtype.kind == "int" else 2))
            made[t.name] = torch.randint(low, high, shape, generator=generator).to(DTYPES[t.dtype.name])
    return made


def means(
    program: Program | str,
    eager: Callable[..., Any],
    extents: Mapping[str, int],
    integers: Mapping[str, tuple[int, int]] = {},
    tolerance: float = 1e-10,
) -> None:
    """Asserts that the program in float64 is `eager(**inputs)`: a tensor, or a tuple in the order of the outputs; shapes are part of it."""
    program = only(program) if isinstance(program, str) else program
    given = inputs(program, extents, integers)
    got = run(program, given, torch, precision="exact")
    want = eager(**given)
    want = want if isinstance(want, tuple) else (want,)
    assert len(want) == len(program.outputs)
    for output, expected in zip(program.outputs, want):
        value = got[output.tensor.name]
        assert value.shape == expected.shape, f"{output.tensor.name}: {tuple(value.shape)}, not {tuple(expected.shape)}"
        check = {"rtol": tolerance, "atol": tolerance, "equal_nan": True, "check_dtype": expected.is_floating_point()}
        torch.testing.assert_close(value, expected, **check)
