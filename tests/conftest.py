"""Shared by all tests: where the repository is, and which tests this machine can run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # `bench` is imported from the checkout


# Files that check numbers of many whole programs, or start processes: `make check` leaves them to `make test`, to stay under a minute on
# two cores.
WHOLE_PROGRAMS = {
    "test_batches", "test_chunks", "test_cli", "test_docs", "test_gpu_models", "test_gpu_pending", "test_gpu_specs", "test_gpu_training",
    "test_host_programs", "test_into", "test_laws", "test_load", "test_losses", "test_memory", "test_model_specs", "test_moments",
    "test_nn", "test_nn_sharded", "test_nn_types", "test_regressions", "test_rows", "test_selfcheck", "test_several", "test_theorem",
    "test_performance", "test_rivals", "test_together", "test_training", "test_tune",
}  # fmt: skip


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole programs are slow; tests marked `gpu` are skipped, with the reason, where there is no Hopper GPU."""
    for item in items:
        if item.path.stem in WHOLE_PROGRAMS:
            item.add_marker(pytest.mark.slow)
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    from bench.need_gpu import missing

    problem = missing()
    if problem:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=f"needs a Hopper GPU: {problem}"))


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which path a call takes (see tests/autograd_cases.py): "planned", or "kernels" with CPU tensors taken for a GPU's."""
    if request.param == "kernels":
        from coda_lang.backend_cute import arguments, host
        from tests.standins import poisoning

        monkeypatch.setattr(host, "allocate", poisoning)
        monkeypatch.setattr(arguments, "runs_kernels", lambda device: True)
        monkeypatch.setattr(arguments, "check_gpu", lambda *a: None)
    return request.param
