"""Random programs through the whole compiler: each pass keeps the float64 meaning, and the emitted module computes it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from strategies import Generated, programs  # noqa: E402

from coda_lang import passes  # noqa: E402
from coda_lang.backend_cute.emit import emit  # noqa: E402
from coda_lang.ir.interp import run  # noqa: E402
from coda_lang.ir.printer import to_text  # noqa: E402


def some(examples: int, derandomize: bool = True):
    """The same programs on every run; other ones each night."""
    return settings(max_examples=examples, derandomize=derandomize, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", passes.names())
@some(15)
@given(programs())
def test_each_pass_keeps_the_meaning(name, generated):
    program = passes.states(generated.program, name).program
    before, after = (run(p, generated.tensors(), torch, "exact") for p in (generated.program, program))
    for output in generated.errors:
        torch.testing.assert_close(after[output], before[output], rtol=1e-10, atol=1e-10, msg=lambda m: f"{m}\n{to_text(program)}")


def check_module(generated: Generated) -> None:
    """The emitted text, executed: reference and twin, exact to float64 and rounded within the program's error bounds."""
    program, namespace = generated.program, {"__name__": "kernel"}
    exec(compile(emit([passes.run(program)]), "kernel.py", "exec"), namespace)
    function, given_tensors = namespace[program.name], generated.tensors()
    tensors = [given_tensors[t.name] for t in program.inputs]
    exact, written = run(program, given_tensors, torch, "exact"), run(program, given_tensors, torch)
    for compute in (function.reference, function.reference_planned):
        for rounds in (False, True):
            results = compute(*tensors, exact=not rounds)
            for o, got in zip(program.outputs, results if isinstance(results, tuple) else (results,), strict=True):
                name, want = o.tensor.name, exact[o.tensor.name]
                assert got.shape == want.shape
                error = (got.double() - want).abs().max().item()
                what = f"{name} by {compute.__name__}\n{to_text(program)}"
                assert error <= (generated.errors[name] if rounds else 1e-9), what
                if rounds and got.numel() >= 8:  # rounded at the same places: most elements are those of the oracle but for f32 rounding
                    off = (got.double() - written[name].double()).abs() / written[name].double().abs().clamp(min=0.1)
                    assert off.median().item() <= 3e-5, what


@some(25)
@given(programs())
def test_the_emitted_module_computes_what_the_program_means(generated):
    check_module(generated)


@pytest.mark.slow
@some(200)
@given(programs(multiple=8))
def test_the_emitted_module_computes_what_larger_programs_mean(generated):
    check_module(generated)


@pytest.mark.nightly
@some(3000, derandomize=False)
@given(programs())
def test_the_emitted_module_computes_what_other_programs_mean_each_night(generated):
    check_module(generated)
