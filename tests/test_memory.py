"""What a call holds: the host drops what is dead, in launch order, the backward saved tensors too; `codac plan` says how much."""

from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch")

from test_laws import WRITTEN, only  # noqa: E402

from coda_lang import gradcheck, passes  # noqa: E402
from coda_lang.backend_cute import configs, host, selfcheck, spec, together  # noqa: E402
from coda_lang.backend_cute.binding import Binding  # noqa: E402
from coda_lang.backend_cute.derivative import extents as sizes_of  # noqa: E402
from coda_lang.ir.kernels import Plan  # noqa: E402
from coda_lang.passes.memory import moments, peak  # noqa: E402
from coda_lang.passes.training_report import text  # noqa: E402
from tests.autograd_cases import function, kernels, leaves  # noqa: E402
from tests.handwritten.training import SWIGLU_TRAINED  # noqa: E402

NOMINAL = {"m": 1024, "d": 128, "h": 128, "f": 512}
SIZED = WRITTEN.replace("(x2: bf16[m, d])\n", "(x2: bf16[m, d])\nnominal m = 1024, d = 128, h = 128, f = 512\n")


class Watch:
    """Buffers that the host allocates, and given tensors, while they live."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def hold(self, t: torch.Tensor) -> torch.Tensor:
        size = t.untyped_storage().nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(t.untyped_storage(), self.drop, size)
        return t

    def drop(self, size: int) -> None:
        self.now -= size


class Idle:
    """Executables that do nothing but tell what is held when they are launched."""

    whole = False

    def __init__(self, watch: Watch) -> None:
        self.watch, self.held = watch, dict[str, int]()

    def config(self, launch: spec.Launch, extents: dict[str, int], device: torch.device) -> spec.Config:
        return configs.choose(launch, extents)

    def executables(self, wanted, device):
        return [lambda *_, name=kernel.name: self.held.__setitem__(name, self.watch.now) for kernel, _ in wanted]


@pytest.fixture(autouse=True)
def one_gemm_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "MOST", 1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return passes.trained(only(SIZED))


def run_backward(plan: Plan, monkeypatch: pytest.MonkeyPatch, owned: bool) -> tuple[Idle, list[torch.Tensor]]:
    """The backward's launches with everything but the saved tensors given by somebody else."""
    watch, fn, plain = Watch(), gradcheck.function_of(plan), host.allocate
    assert plan.derived is not None
    saved = {t.name for t in plan.derived.residuals}
    binding = Binding(dict(sizes_of(fn.backward, NOMINAL)))
    given = selfcheck.inputs(fn.backward, dict(binding.extents), 0, "cpu")
    given = [watch.hold(t.clone()) if a.name in saved else t for a, t in zip(fn.backward.inputs, given, strict=True)]
    monkeypatch.setattr(host, "allocate", lambda *args: watch.hold(plain(*args)))
    idle = Idle(watch)
    made = host.plan(fn.backward, binding, given, torch.device("cpu"), idle)
    results = made.consume(given) if owned else made.run(given)
    assert not given if owned else given
    return idle, results


def test_the_host_holds_what_the_plan_says(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    idle, results = run_backward(plan, monkeypatch, owned=True)
    expected = {m.kernel: m.total for m in moments(plan)}
    assert set(expected) <= set(idle.held) and len(results) == 7
    for kernel, size in expected.items():
        assert size <= idle.held[kernel] <= 1.05 * size + 64 * 1024, f"{kernel}: partial results and vectors apart, no more is held"
    most = peak(plan)
    assert most is not None and idle.watch.most <= 1.05 * most.total + 64 * 1024


def test_launches_of_several_hold_little_more(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    most = peak(plan)
    for gemms in (1, 4):
        monkeypatch.setattr(together, "MOST", gemms)
        idle, _ = run_backward(plan, monkeypatch, owned=True)
        assert any("+" in name for name in idle.held) == (gemms > 1)
        assert most is not None and idle.watch.most <= together.MEMORY * 1.05 * most.total + 64 * 1024


def test_saved_tensors_stay_where_somebody_else_holds_them(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    last = moments(plan)[-1].kernel
    owned, kept = (run_backward(plan, monkeypatch, o)[0] for o in (True, False))
    assert plan.derived is not None
    wide = sum(2 * NOMINAL["m"] * NOMINAL[t.axes[1]] for t in plan.derived.residuals if len(t.axes) == 2)
    assert kept.held[last] >= owned.held[last] + wide


@kernels
def test_a_backward_drops_saved_tensors_as_it_goes_unless_the_graph_is_retained(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_DONATE", "0")  # what is overwritten stays
    fn, _ = function(SWIGLU_TRAINED, path)
    there = dict[str, bool]()

    class Noting(list):
        def append(self, name: str) -> None:
            there[name] = residual() is not None

    fn.objects.calls = Noting()
    x, w = leaves(SWIGLU_TRAINED)
    for retained in (False, False, True, False):  # the first two decide how calls of this kind are made
        residual = lambda: None  # noqa: E731
        y = fn(x, w)
        (residual,) = [weakref.ref(t) for t in y.grad_fn.saved_tensors if t.data_ptr() not in (x.data_ptr(), w.data_ptr())]
        y.backward(torch.ones_like(y), retain_graph=retained)
        assert there["swiglu_backward_k0"] and (residual() is not None) == retained
        if retained:
            assert there["swiglu_backward_k2"]
            y.backward(torch.ones_like(y))
            assert residual() is None
        del y
    assert not there["swiglu_backward_k2"], "dropped before the last kernel, which does not read it"


def test_the_report_says_how_much_is_held(plan: Plan) -> None:
    most = peak(plan)
    assert most is not None and f"the backward holds at most {most.total / 1e6:.1f} MB of its own, in `{most.kernel}`" in text(plan)


def test_a_forward_drops_what_stands_between_its_kernels(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, fn, plain = Watch(), gradcheck.function_of(plan), host.allocate
    given = selfcheck.inputs(fn.program, NOMINAL, 0, "cpu")
    monkeypatch.setattr(host, "allocate", lambda *args: watch.hold(plain(*args)))
    results = host.plan(fn.program, Binding(dict(sizes_of(fn.program, NOMINAL))), given, torch.device("cpu"), Idle(watch)).run(given)
    assert watch.now == sum(t.untyped_storage().nbytes() for t in results)
