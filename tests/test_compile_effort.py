"""How much work the compiler does for a program of many kernels, in counts that no busy machine changes; and that `check` refuses what
`plan` refuses, though it does less."""

from __future__ import annotations

from collections import Counter

import pytest
from conftest import ROOT
from gallery import PROGRAMS

from coda_lang import driver, passes
from coda_lang.backend_cute import configs, emit, lower
from coda_lang.diagnostics.model import CodaError, Diagnostic
from coda_lang.ir.graph import Program
from coda_lang.passes import saving, training
from coda_lang.source import Source

LAYER = ROOT / "specs" / "llama" / "layer.coda"  # five products, two norms, a gate and a rotation
AGREE = [*sorted((ROOT / "specs").glob("*.coda")), *sorted((ROOT / "specs").glob("*/*.coda"))]
PLAIN = "program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\ny = silu(x @ w)\n"


class Counted:
    """Calls of functions, by their arguments as far as those are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.calls = monkeypatch, dict[str, list]()

    def watch(self, module: object, name: str) -> None:
        real, seen = getattr(module, name), self.calls.setdefault(name, [])

        def counted(*args: object, **rest: object) -> object:
            seen.append(args)
            return real(*args, **rest)

        self.monkeypatch.setattr(module, name, counted)

    def __getitem__(self, name: str) -> int:
        return len(self.calls[name])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def layer() -> Program:
    (program,) = driver.programs(LAYER)
    return program


def test_checking_cuts_a_program_with_its_derivative_once(counted):
    counted.watch(saving, "cut")
    driver.check(LAYER)
    assert counted["cut"] == 1


def test_the_search_for_what_to_save_looks_at_a_few_dozen_ways(counted):
    counted.watch(saving, "cut")
    counted.watch(saving, "paired")
    passes.trained(layer())
    assert 10 < counted["cut"] <= 32 and 5 < counted["paired"] <= 20


@pytest.mark.parametrize("name", ["llama/layer", "qwen/qwen3"])
def test_no_use_of_laws_is_tried_twice(name, counted):
    counted.watch(saving, "paired")
    for program in driver.programs(ROOT / "specs" / f"{name}.coda"):
        counted.calls["paired"].clear()
        passes.trained(program)
        programs = Counter(derivative.program for (derivative,) in counted.calls["paired"])
        assert len(programs) > 2 and set(programs.values()) == {1}


def test_a_program_is_verified_after_the_pass_that_made_it_and_not_again(counted):
    counted.watch(passes, "verify_program")
    passes.run(layer())
    seen = [program for (program,) in counted.calls["verify_program"]]
    assert len(seen) > 8 and len({id(p) for p in seen}) == len(seen)


def test_emission_lowers_each_program_once_and_the_forward_for_those_that_run_with_it(counted):
    counted.watch(lower, "records")
    (plan,) = driver.plan(LAYER)
    emit.emit([plan])
    names = Counter(p.program.name for (p,) in counted.calls["records"])
    assert names == {"llama_layer": 2, "llama_layer_saving": 1, "llama_layer_backward": 1}


def test_whether_a_kernel_fits_takes_one_configuration_that_does(counted):
    plan = passes.checked(layer())
    counted.watch(configs, "budget")
    made = lower.records(plan)
    assert 0 < counted["budget"] <= 2 * len(made.kernels)


# --- what check refuses ------------------------------------------------------------------------------------------------------------


def test_check_falls_back_on_the_cheapest_way_where_the_plain_one_has_no_kernels(monkeypatch):
    tried: list[str] = []

    def no_kernels(*args):
        tried.append("plain")
        raise CodaError([Diagnostic("C0601", "too many at once")])

    monkeypatch.setattr(training, "plain", no_kernels)
    (plan,) = driver.check(Source("p.coda", PLAIN))
    assert tried == ["plain"] and plan.derived is not None


def test_check_and_plan_refuse_a_derivative_with_the_same_words(monkeypatch):
    def no_kernels(found):
        def refuse(*args, **rest):
            raise CodaError([Diagnostic("C0601", f"no kernels {found}")])

        return refuse

    monkeypatch.setattr(training, "plain", no_kernels("in the plain way"))
    monkeypatch.setattr(training, "joint", no_kernels("in the cheapest"))
    said = []
    for command in (driver.check, driver.plan):
        with pytest.raises(CodaError) as refused:
            command(Source("p.coda", PLAIN))
        said.append([(d.code, d.message, d.notes) for d in refused.value.diagnostics])
    assert said[0] == said[1] and "in the plain way" in str(said[0])


@pytest.mark.slow
@pytest.mark.parametrize("source", [*AGREE, *PROGRAMS], ids=lambda x: x if isinstance(x, str) else x.stem)
def test_check_and_plan_agree(source):
    """Which programs there are, in how many kernels, and what is refused."""

    def said(command) -> object:
        text = PROGRAMS[source] if isinstance(source, str) else source.read_text(encoding="utf-8")
        try:
            return [(p.program.name, len(p.launched)) for p in command(Source("p.coda", text))]
        except CodaError as e:
            return [(d.code, d.message, d.span, d.notes) for d in e.diagnostics]

    assert said(driver.check) == said(driver.plan)
