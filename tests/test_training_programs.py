"""Emitted derivatives at run time: every spec, the gallery and the rows of known failures, at ragged, tiny and empty extents.

The planned backward in float64 against autograd's of the reference in float64, then the way that CUDA tensors go, over poisoned buffers
with stand-ins for kernels. The gradients' side of rows 1 to 9, 13 and 14 of the list of known failures.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from bench import rows  # noqa: E402
from coda_lang import driver  # noqa: E402
from coda_lang.backend_cute import arguments, autograd, derivative, errors, host, load, torch_fns  # noqa: E402
from coda_lang.backend_cute.function import fixed  # noqa: E402
from coda_lang.backend_cute.selfcheck import error, inputs  # noqa: E402
from tests.autograd_cases import Kernels  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.test_host_programs import SOURCES, shapes  # noqa: E402

PROGRAMS = {**SOURCES, "rows": (ROOT / "bench" / "rows.coda").read_text(encoding="utf-8")}
EXACT = 1e-7  # constants are f32


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("emitted"), {}

    def functions(name):
        if name not in made:
            path = folder / f"{name}.py"
            path.write_text(driver.emit(PROGRAMS[name]))
            made[name] = [fn for fn in load.functions_of(load.import_file(path)) if fn.backward is not None]
        return made[name]

    return functions


def calls(fn):
    """Leaves at each extent that the program allows, with the binding."""
    names = [name for name, _ in fn.gradients]
    for extents in shapes(fn.program):
        tensors = inputs(fn.program, extents, 0, "cpu")
        try:
            binding = fn.bind(tensors)
        except errors.CallError as problem:
            assert {d.code for d in problem.diagnostics} == {errors.REQUIRE}, problem
            continue
        yield [t.requires_grad_(a.name in names) for a, t in zip(fn.program.inputs, tensors, strict=True)], binding


def cotangents(fn, binding, seed=1):
    gen = torch.Generator().manual_seed(seed)
    by_name = {o.name: o for o in fn.program.outputs}
    drawn = {name: torch.randn(binding.declared(by_name[name]), generator=gen) for name, _ in fn.cotangents}
    return {name: g.to(torch_fns.DTYPES[by_name[name].dtype]) for name, g in drawn.items()}


def autograd_of(fn, f, tensors, given):
    """Torch's gradients of the reference, by name; zeros where there is no path."""
    copies = [t.detach().to(f.dtype) if t.is_floating_point() and not f.rounds else t.detach().clone() for t in tensors]
    copies = [c.requires_grad_(t.requires_grad) for c, t in zip(copies, tensors)]
    results = fn._reference(f, *copies)
    outs = {o.name: r for o, r in zip(fn.program.outputs, results if isinstance(results, (tuple, list)) else (results,))}
    used = [(outs[name], g.to(outs[name].dtype)) for name, g in given.items() if outs[name].requires_grad]
    wanted = {a.name: c for a, c in zip(fn.program.inputs, copies) if c.requires_grad}
    found = torch.autograd.grad([o for o, _ in used], list(wanted.values()), [g for _, g in used], allow_unused=True)
    return {n: torch.zeros_like(c) if g is None else g for (n, c), g in zip(wanted.items(), found)}


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_planned_backward_is_the_derivative_in_float64(name, emitted):
    for fn in emitted(name):
        for tensors, binding in calls(fn):
            everything = cotangents(fn, binding)
            alone = [{n: g} for n, g in everything.items()] if len(everything) > 1 else []
            for given in (everything, *alone):  # where an output is not used, its cotangent is not read
                want = autograd_of(fn, torch_fns.Exact(), tensors, given)
                found = autograd.gradients_planned(fn, [t.detach() for t in tensors], given)
                assert found.keys() <= want.keys() == dict(fn.gradients).keys()
                for n, w in want.items():
                    got = found[n].reshape(w.shape) if n in found else torch.zeros_like(w)
                    assert error(got, w) < EXACT, (fn.program.name, n, binding.extents, list(given))


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_by_the_host(name, emitted, monkeypatch):
    monkeypatch.setattr(host, "allocate", rows.poisoning)
    monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    for fn in emitted(name):
        for tensors, binding in calls(fn):
            known = {**derivative.extents(fn.backward, binding.extents), **binding.extents}
            fn = type(fn)(
                fn.program, fn.functions, fn._reference, saving=fn.saving, backward=fn.backward, residuals=fn.residuals,
                cotangents=fn.cotangents, gradients=fn.gradients, objects=Kernels(fn.functions, known, fixed(fn.program), []),
            )  # fmt: skip
            outs = fn(*tensors)
            outs = dict(zip([o.name for o in fn.program.outputs], (outs,) if isinstance(outs, torch.Tensor) else outs))
            given = {n: g for n, g in cotangents(fn, binding).items() if outs[n].requires_grad}
            wanted = {a.name: t for a, t in zip(fn.program.inputs, tensors) if t.requires_grad}
            got = torch.autograd.grad([outs[n] for n in given], list(wanted.values()), list(given.values()), retain_graph=True)
            planned = autograd.gradients_planned(fn, [t.detach() for t in tensors], given, exact=False)
            for n, g in zip(wanted, got, strict=True):
                assert g.shape == wanted[n].shape and g.dtype == wanted[n].dtype
                torch.testing.assert_close(g, planned[n].reshape(g.shape), rtol=1e-2, atol=1e-5, equal_nan=True)
                (alone,) = torch.autograd.grad([outs[n] for n in given], [wanted[n]], list(given.values()), retain_graph=True)
                assert error(alone, g) <= (2.0**-8 if g.dtype in (torch.bfloat16, torch.float16) else 1e-5), n  # sums in other tiles
