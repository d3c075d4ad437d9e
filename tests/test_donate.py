"""Saved tensors that a backward overwrites: which may be, when they are, and what that saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from test_memory import Watch  # noqa: E402

import coda_lang  # noqa: E402
from coda_lang.backend_cute import donate, host, nodes, spec  # noqa: E402
from coda_lang.backend_cute.spec import ColReduce, Index, Load, Matrix, Point, Store, Tile, Window  # noqa: E402
from tests.standins import StandIns  # noqa: E402

kernels = pytest.mark.parametrize("path", ["kernels"], indirect=True)
LOSS = """
program head(x: bf16[m, d], w: bf16[v, d], target: i64[m]) -> (loss: f32[])
logits: bf16 = x @ w
loss = mean_over[m](cross_entropy[v](logits, target), target != -100)
"""
BLOCK = """
program block(x: bf16[m, d], w: bf16[f, d], v: bf16[d, f]) -> (y: bf16[m, d])
z: bf16 = x @ w
y = silu(z) @ v
"""
SIZES = {"m": 64, "d": 32, "v": 512, "f": 256}


class Every(StandIns):
    """Stand-ins for every program of a function."""

    def __init__(self, fn, sizes=SIZES, calls=None):
        super().__init__(fn if isinstance(fn, dict) else fn.functions, sizes)
        self.calls = [] if calls is None else calls

    def select(self, program, functions):
        return Every(functions, self.extents, self.calls)


def compiled(text: str, sizes=SIZES):
    fn = coda_lang.compile(text)
    fn.objects = Every(fn, sizes)
    return fn


def leaves(fn, lead=(64,)):
    gen = torch.Generator().manual_seed(3)
    made = []
    for a in fn.program.inputs:
        shape = [n for x in a.axes for n in (lead if x == "m" else (SIZES[x],))]
        if a.dtype == "i64":
            made.append(torch.randint(0, SIZES["v"], shape, generator=gen))
        else:
            made.append((torch.randn(shape, generator=gen) / 4).bfloat16().requires_grad_())
    return made


def gradients(fn, tensors, **options):
    out = fn(*tensors)
    wanted = [t for t in tensors if t.requires_grad]
    return torch.autograd.grad(out, wanted, torch.ones_like(out), **options)


def taken(fn) -> list[dict[str, str]]:
    """What each kind of backward that was met overwrites."""
    steps = [s for kind in fn._training.kinds.values() for s in kind.steps.values()]
    return [s.donating.over if s.donating else {} for s in steps]


class Runs:
    """Counts runs of plans that overwrite."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, alone = 0, nodes.alone

        def counted(given, place):
            found = alone(given, place)
            self.count += found
            return found

        monkeypatch.setattr(nodes, "alone", counted)


# --- when ----------------------------------------------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("lead", [(64,), (4, 16)], ids=str)
def test_the_gradient_of_logits_takes_their_place(path, lead, monkeypatch) -> None:
    monkeypatch.setenv("CODA_DONATE", "0")
    plain = compiled(LOSS)
    want = gradients(plain, leaves(plain, lead))
    monkeypatch.delenv("CODA_DONATE")
    fn, runs = compiled(LOSS), Runs(monkeypatch)
    for _ in range(3):
        got = gradients(fn, leaves(fn, lead))
        assert all(map(torch.equal, got, want))
    assert taken(fn) == [{"d_logits_bf16": "logits"}] and taken(plain) == [{}]
    assert runs.count == 3, "at the first call too"


@kernels
def test_a_retained_graph_keeps_what_was_saved(path, monkeypatch) -> None:
    fn, runs = compiled(LOSS), Runs(monkeypatch)
    tensors = leaves(fn)
    loss = fn(*tensors)
    first = torch.autograd.grad(loss, tensors[:2], retain_graph=True)
    second = torch.autograd.grad(loss, tensors[:2], retain_graph=True)
    assert runs.count == 0
    third = torch.autograd.grad(loss, tensors[:2])
    assert runs.count == 1
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, third))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors[:2])


@kernels
def test_what_somebody_holds_is_not_overwritten(path, monkeypatch) -> None:
    fn, runs = compiled(LOSS), Runs(monkeypatch)
    want = gradients(fn, leaves(fn))
    assert runs.count == 1

    def kept_by(take) -> None:
        tensors = leaves(fn)
        loss = fn(*tensors)
        held = take(next(t for t in loss.grad_fn.saved_tensors if t.shape == (64, SIZES["v"])))
        before = held.clone()
        assert all(map(torch.equal, torch.autograd.grad(loss, tensors[:2]), want))
        assert torch.equal(held, before) and runs.count == 1

    kept_by(lambda t: t)  # the tensor itself
    kept_by(lambda t: t[3:5, ::2])  # a view
    kept_by(lambda t: t.detach())  # other memory management, the same memory


@kernels
def test_hooks_on_saved_tensors(path, monkeypatch) -> None:
    fn, runs = compiled(LOSS), Runs(monkeypatch)
    want = gradients(fn, leaves(fn))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or len(kept) - 1, lambda i: kept[i]):
        tensors = leaves(fn)
        loss = fn(*tensors)
    copies = [t.clone() for t in kept]
    assert all(map(torch.equal, torch.autograd.grad(loss, tensors[:2]), want))
    assert all(map(torch.equal, kept, copies)) and runs.count == 1, "the hook's owner still holds them"
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone()):
        tensors = leaves(fn)
        loss = fn(*tensors)
    assert all(map(torch.equal, torch.autograd.grad(loss, tensors[:2]), want))
    assert runs.count == 2, "a copy is nobody else's"


@kernels
def test_checkpoints_and_a_gradient_of_one_input(path, monkeypatch) -> None:
    from torch.utils.checkpoint import checkpoint

    fn, runs = compiled(LOSS), Runs(monkeypatch)
    want = gradients(fn, leaves(fn))
    tensors = leaves(fn)
    checkpoint(fn, *tensors, use_reentrant=False).backward()
    assert torch.equal(tensors[0].grad, want[0]) and torch.equal(tensors[1].grad, want[1])
    tensors = leaves(fn)
    (only,) = torch.autograd.grad(fn(*tensors), tensors[:1])
    assert torch.equal(only, want[0]) and runs.count >= 2


@kernels
def test_without_torchs_private_counts_nothing_is_overwritten(path, monkeypatch) -> None:
    for name in ("_keeps", "_LONE"):
        with monkeypatch.context() as without:
            without.setattr(nodes, name, None)
            fn, runs = compiled(LOSS), Runs(without)
            gradients(fn, leaves(fn))
            assert runs.count == 0 and fn.last_backward == "kernels"


# --- what it saves -----------------------------------------------------------------------------------------------------------------


@kernels
def test_logits_and_their_gradient_are_one_buffer(path, monkeypatch) -> None:
    """At the peak of a step there are the logits and the results, not the logits twice."""
    plain, size = host.allocate, 2 * SIZES["m"] * SIZES["v"]
    results = 2 * SIZES["d"] * (SIZES["m"] + SIZES["v"])
    peaks = {}
    for donated in ("0", ""):
        monkeypatch.setenv("CODA_DONATE", donated)
        fn = compiled(LOSS)
        for first in (True, False):
            watch = Watch()
            monkeypatch.setattr(host, "allocate", lambda *args, watch=watch: watch.hold(plain(*args)))
            gradients(fn, leaves(fn))
            peaks[donated, first] = watch.most
    assert min(peaks["0", first] for first in (True, False)) >= 2 * size
    assert max(peaks["", first] for first in (True, False)) <= 1.01 * (size + results), "at the first step too"


# --- which -------------------------------------------------------------------------------------------------------------------------

R, T = (spec.Tensor(name, "bf16", (("m",), ("n",))) for name in "rt")
PLAIN = Matrix("r", (0,), (1,))
MAP = spec.Gemm(
    "k", (R, T), (), (spec.Phase("f"),), ports=(Tile("r", PLAIN),), sinks=(Store(replace(PLAIN, tensor="t")),), extents=("m", "n"),
    rows=("m",), cols=("n",),
)  # fmt: skip
VECTOR = Load("v", "r", (Index("row"), Index("fixed")))
PRODUCT = spec.Product(Matrix("r", (0,), (1,)), (Matrix("w", (0,), (1,)),))


def test_a_map_kernel_may_write_over_the_tiles_it_reads() -> None:
    assert donate.may_overwrite(MAP, "r", "t") and donate.kind(MAP) == donate.MAP
    assert not donate.may_overwrite(MAP, "t", "r") and not donate.may_overwrite(MAP, "r", "r") and not donate.may_overwrite(MAP, "x", "t")


@pytest.mark.parametrize(
    "changes",
    [
        {"ports": (*MAP.ports, VECTOR)},  # another block's element
        {"ports": (VECTOR,)},
        {"ports": (*MAP.ports, Tile("old", replace(PLAIN, tensor="t")))},  # added to
        {"sinks": (Store(replace(PLAIN, tensor="t"), Window(8, 8)),)},  # other columns
        {"sinks": (*MAP.sinks, Store(PLAIN))},
        {"sinks": (*MAP.sinks, Point("t", (Index("row"), Index("fixed"))))},
        {"sinks": (Store(Matrix("t", (1,), (0,))),)},  # transposed
        {"sinks": (Store(Matrix("t", (0,), (), at=((1, 0),))),)},
        {"tensors": (R, replace(T, dtype="f32"))},
        {"tensors": (R, replace(T, modes=(("m", "n"),)))},
        {"tensors": (replace(R, part=spec.Part(0, 0, 2, 64)), replace(T, part=spec.Part(0, 0, 2, 64)))},
        {"products": (PRODUCT,)},
    ],
    ids=str,
)
def test_what_other_blocks_read_or_lies_otherwise_is_not_overwritten(changes) -> None:
    assert not donate.may_overwrite(replace(MAP, **changes), "r", "t")


def test_rows_walked_again_are_not_overwritten() -> None:
    rows = replace(MAP, phases=(spec.Phase("s", (spec.Group("sum", 0),)), *MAP.phases))
    assert donate.may_overwrite(rows, "r", "t") and donate.kind(rows) == donate.ROWS
    assert not donate.may_overwrite(replace(rows, sinks=(*rows.sinks, ColReduce("sum", "work"))), "r", "t")


def program(*kernels, **more) -> spec.Program:
    arguments = tuple(spec.Argument(name, "bf16", ("m", "n")) for name in "ru")
    return spec.Program("p", arguments, (spec.Argument("t", "bf16", ("m", "n")),), (("m", None), ("n", None)), kernels, **more)


def test_what_is_read_later_or_beside_is_not_overwritten() -> None:
    u = spec.Tensor("u", "bf16", (("m",), ("n",)))
    reader = replace(MAP, name="reader", tensors=(R, u), sinks=(Store(replace(PLAIN, tensor="u")),))
    every = (donate.MAP,)
    assert donate.pairs(program(MAP), {"r"}, every) == {"t": "r"}
    assert donate.pairs(program(reader, MAP), {"r"}, every) == {"t": "r"}
    assert donate.pairs(program(MAP, reader), {"r"}, every) == {"u": "r"}, "the last who reads it"
    assert donate.pairs(program(spec.Together("both", (MAP, reader))), {"r"}, every) == {}
    assert donate.pairs(program(MAP), set(), every) == {} and donate.pairs(program(MAP), {"r"}, ()) == {}
    assert donate.pairs(program(MAP, same=(("o", "r"),)), {"r"}, every) == {}
    assert donate.pairs(program(MAP, into=(("t", "u"),)), {"r"}, every) == {}
    loop = spec.Loop("m", 8, ("k",), (), (), "start", "whole")
    assert donate.pairs(program(MAP, loops=(loop,)), {"r"}, every) == {}


def test_what_two_kernels_write_is_written_over_nothing() -> None:
    """Each a lane, say: the first would write where the second has yet to read."""
    other = replace(MAP, name="other", tensors=(replace(R, name="u"), T), ports=(Tile("u", replace(PLAIN, tensor="u")),))
    assert donate.pairs(program(MAP), ["r"], [donate.MAP]) == {"t": "r"}
    assert donate.pairs(program(MAP, other), ["r", "u"], [donate.MAP]) == {}


def test_products_are_left_to_who_asks(monkeypatch) -> None:
    fn = coda_lang.compile(BLOCK)
    tiles = {g.name: [p.matrix.tensor for p in g.ports if isinstance(p, Tile)] for k in fn.backward.kernels for g in spec.gemms(k)}
    (gemm,) = [g for k in fn.backward.kernels for g in spec.gemms(k) if "z" in tiles[g.name]]
    written = [s.matrix.tensor for s in gemm.sinks if isinstance(s, Store)]
    assert donate.kind(gemm) == donate.GEMM and any(donate.may_overwrite(gemm, "z", t) for t in written)
    assert donate.pairs(fn.backward, {"z"}, donate.wanted()) == {}
    monkeypatch.setenv("CODA_DONATE", "all")
    assert set(donate.pairs(fn.backward, {"z"}, donate.wanted()).values()) == {"z"}
