"""`passes.laws`, law by law: what the record says of itself, and the float64 meaning of every program that it rewrites."""

from __future__ import annotations

import pytest
from gallery import PROGRAMS
from test_normalise import DEQUANTISE, LM_HEAD, MLP_BLOCK, QUOTIENT, sizes
from test_stages import doubles, programs, tidy

from coda_lang.ir import interp
from coda_lang.ir.verify import verify
from coda_lang.passes.laws import LAWS, Law

torch = pytest.importorskip("torch")

SOURCES = (*PROGRAMS.values(), MLP_BLOCK, LM_HEAD, DEQUANTISE, QUOTIENT)
EVERY = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)


def test_a_law_is_named_once() -> None:
    assert len({law.name for law in LAWS}) == len(LAWS)


@EVERY
def test_a_law_says_what_it_is_and_strict_forbids_what_moves_a_rounding(law: Law) -> None:
    assert law.name and law.statement and law.condition
    assert law.strict_forbids == bool(law.rounding)


@EVERY
def test_a_law_keeps_the_meaning_of_every_program_and_reports_each_change(law: Law) -> None:
    used = 0
    for program in [tidy(p) for text in SOURCES for p in programs(text)]:
        after, uses = law.rewrite(program)
        assert bool(uses) == (after != program)
        if uses:
            used += 1
            assert all(use.law is law and bool(use.rounds) == law.strict_forbids and str(use).startswith(law.name) for use in uses)
            given = doubles(program, sizes(program))
            before, now = (interp.run(p, given, torch, "exact") for p in (program, verify(after)))
            for name, value in before.items():
                torch.testing.assert_close(now[name], value, rtol=1e-9, atol=1e-9)
    assert used, "no program of the gallery uses this law"
