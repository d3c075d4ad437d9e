"""Training a LLaMA of programs on text: the curve stays as near to float64 as eager bf16 does; a wrong gradient would show."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from bench import plot_mlp, train_llama  # noqa: E402

STEPS = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("curves") / "train_llama.json"
    return train_llama.compare("cpu", STEPS, "tiny", path), path


def test_the_curve_is_within_the_noise_of_bf16(run):
    found, path = run
    assert found["ok"] and found["path"] == ["reference", "planned"], found
    curves = json.loads(path.read_text())["curves"]
    assert all(len(c) == STEPS for c in curves.values())
    assert curves["coda_lang"][-1] < curves["coda_lang"][0] - 0.3 and found["unseen"]["coda_lang"] < curves["coda_lang"][0]
    assert found["noise"]["coda_lang"] > 0  # it is bf16, not float64


def test_a_wrong_gradient_is_found():
    """The second layer's norm and queries never learn."""

    def wrong(loss):
        return lambda weights, ids: loss({n: w.detach() if "layers.1" in n else w for n, w in weights.items()}, ids)

    assert not train_llama.compare("cpu", STEPS, "tiny", changed=wrong)["ok"]


def test_curves_are_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    plot_mlp.draw([json.loads(run[1].read_text())], tmp_path / "curves.svg")
    assert "distance from float64" in (tmp_path / "curves.svg").read_text()
