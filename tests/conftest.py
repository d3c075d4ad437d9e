"""Shared by all tests: where the repository is, and which tests this machine can run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # `bench` is imported from the checkout


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where there is no Hopper GPU."""
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
