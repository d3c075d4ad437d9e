"""Training with derived backwards: the curve of coda_lang stays as near to float64 as eager bf16 does."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytestmark = pytest.mark.slow

from bench import plot_mlp, train_mlp  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("curves") / "train_mlp.json"
    return train_mlp.compare("cpu", 60, path), path


def test_the_curve_is_within_the_noise_of_bf16(run):
    found, path = run
    assert found["ok"] and found["path"] == ["reference", "planned"], found
    curves = json.loads(path.read_text())["curves"]
    assert all(len(c) == 60 for c in curves.values())
    assert curves["coda_lang"][-1] < 0.5 * curves["coda_lang"][0] and found["accuracy"]["coda_lang"] > 0.8
    assert found["noise"]["coda_lang"] > 0  # it is bf16, not float64


def test_a_wrong_gradient_is_found():
    import coda_lang

    fn = coda_lang.compile(train_mlp.PROGRAM)

    class Wrong:
        """Its hidden layer never learns."""

        last_path, last_backward = "reference", "planned"

        def __call__(self, x, w1, b1, *rest):
            return fn(x, w1.detach(), b1.detach(), *rest)

    assert not train_mlp.compare("cpu", 25, fn=Wrong())["ok"]


def test_curves_are_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    plot_mlp.draw([json.loads(run[1].read_text())], tmp_path / "curves.svg")
    assert "distance from float64" in (tmp_path / "curves.svg").read_text()
