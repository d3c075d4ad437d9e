"""Emitted programs through the host, with stand-ins for kernels: every spec and the gallery, at ragged, tiny and empty extents."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from bench import rows  # noqa: E402
from coda_lang import driver  # noqa: E402
from coda_lang.backend_cute import arguments, errors, host, load  # noqa: E402
from coda_lang.backend_cute.binding import bind  # noqa: E402
from coda_lang.backend_cute.function import fixed  # noqa: E402
from coda_lang.backend_cute.selfcheck import inputs  # noqa: E402
from tests import gallery, standins  # noqa: E402
from tests.conftest import ROOT  # noqa: E402

SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "specs").glob("*.coda"))} | dict(gallery.PROGRAMS)
RAGGED = (37, 21, 13, 5, 3)


def stand_in(fn, tensors):
    device = arguments.check(fn.program, tensors)
    binding = bind(fn.program, arguments.shapes(tensors))
    return host.plan(fn.program, binding, tensors, device, standins.StandIns(fn.functions, binding.extents, fixed(fn.program))).run(tensors)


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("emitted"), {}

    def functions(name):
        if name not in made:
            path = folder / f"{name}.py"
            path.write_text(driver.emit(SOURCES[name]))
            made[name] = load.functions_of(load.import_file(path))
        return made[name]

    return functions


def shapes(program):
    """Ragged extents, ones, multiples of 8, and each free axis empty in turn."""
    free = [a for a, n in program.extents if n is None]
    same = {other: one for one, other in program.equal}
    inner = max([n for _, n in program.extents if n is not None], default=1)
    ragged = {a: (3 if inner > 16 and i > 1 else RAGGED[i % len(RAGGED)]) for i, a in enumerate(free)}
    for extents in (ragged, dict.fromkeys(free, 1), {a: 16 for a in free}, *({**ragged, a: 0} for a in free if a not in same)):
        yield {**{a: extents.get(same.get(a, a)) for a in free}, **fixed(program)}


@pytest.mark.parametrize("name", SOURCES)
def test_program_by_the_host(name, emitted, monkeypatch):
    monkeypatch.setattr(host, "allocate", rows.poisoning)
    checked = 0
    for fn in emitted(name):
        room = rows.Room(torch.device("cpu"), {fn.program.name: fn}, stand_in)
        for extents in shapes(fn.program):
            tensors = inputs(fn.program, extents, 0, "cpu")
            try:
                bind(fn.program, arguments.shapes(tensors))
            except errors.CallError as problem:
                assert {d.code for d in problem.diagnostics} == {errors.REQUIRE}, problem
                continue
            room.check(fn.program.name, *tensors)
            checked += 1
    assert checked >= 3
