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
    objects = standins.StandIns(fn.functions, binding.extents, fixed(fn.program), fn.program.loops)
    return host.plan(fn.program, binding, tensors, device, objects).run(tensors)


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


ELEMENTS = """
program p(x: bf16[m, d], w: bf16[n, d], s: bf16[m, l=3], c: f32[n], i: i64[m]) -> (y: bf16[m, n])
a, b, e = s
y = (x @ w) * a + b * c + e * i
"""


def test_what_is_read_by_elements_is_never_copied(monkeypatch, tmp_path):
    """Vectors and few lanes, whatever their strides but the last, wherever they begin; row 5 of known failures for those."""
    monkeypatch.setattr(host, "allocate", rows.poisoning)
    (tmp_path / "p.py").write_text(driver.emit(ELEMENTS))
    (fn,) = load.functions_of(load.import_file(tmp_path / "p.py"))
    gen = torch.Generator().manual_seed(0)
    x, w = torch.randn(9, 16, generator=gen).bfloat16(), torch.randn(24, 16, generator=gen).bfloat16()
    wide = torch.randn(9, 7, generator=gen).bfloat16()
    ways = {
        "contiguous": wide[:, :3].contiguous(),
        "a part of wider rows": wide[:, :3],
        "from the second column": wide[:, 1:4],
        "every other row": torch.randn(18, 3, generator=gen).bfloat16()[::2],
        "one row for all": torch.randn(1, 3, generator=gen).bfloat16().expand(9, 3),
    }
    for name, s in ways.items():
        tensors = (x, w, s, torch.randn(25, generator=gen)[1:], torch.arange(10)[1:])
        binding = bind(fn.program, arguments.shapes(tensors))
        plan = host.plan(fn.program, binding, tensors, x.device, standins.StandIns(fn.functions, binding.extents, fixed(fn.program)))
        assert plan.copies == [], name
        torch.testing.assert_close(plan.run(tensors)[0], fn.reference(*tensors), rtol=2e-2, atol=1e-2)
    transposed = torch.randn(3, 9, generator=gen).bfloat16().T
    binding = bind(fn.program, arguments.shapes((x, w, transposed, tensors[3], tensors[4])))
    given = (x, w, transposed, *tensors[3:])
    plan = host.plan(fn.program, binding, given, x.device, standins.StandIns(fn.functions, binding.extents, fixed(fn.program)))
    assert plan.copies == ["input 's' is copied: the stride of axis 'l' is 9, not 1"]
