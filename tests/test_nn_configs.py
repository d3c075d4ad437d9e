"""Configurations of models: what is read from files, mappings and objects, what is refused; the angles that they ask for."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import coda_lang
from coda_lang import nn


def test_configurations_of_hugging_face_are_taken_or_refused():
    c = nn.LlamaConfig.of({"hidden_size": 64, "num_attention_heads": 4, "torch_dtype": "bfloat16", "hidden_act": "silu", "head_dim": None})
    assert c.head_dim == 16 and c.num_key_value_heads == 4
    with pytest.raises(coda_lang.CodaError, match="C0716") as raised:
        nn.LlamaConfig.of({"hidden_act": "gelu", "attention_bias": True})
    assert len(raised.value.diagnostics) == 2
    odd = {"num_attention_heads": 3, "num_key_value_heads": 2}
    for wrong in (odd, {"head_dim": 15}, {"hidden_size": 0}, {"rope_scaling": {"type": "yarn"}}):
        with pytest.raises(coda_lang.CodaError, match="C0716"):
            nn.LlamaConfig.of(wrong)
    with pytest.warns(UserWarning, match="no dropout"):
        nn.GPT2Config.of({"resid_pdrop": 0.1, "n_embd": 48, "n_head": 3})
    with pytest.raises(coda_lang.CodaError, match="activation_function"):
        nn.GPT2Config.of({"activation_function": "gelu"})


def test_a_configuration_is_read_from_its_file_or_folder(tmp_path):
    said = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300, "rms_norm_eps": 1e-5}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(said))
    for given in (file, str(file), tmp_path, str(tmp_path)):
        assert nn.LlamaConfig.of(given) == nn.LlamaConfig.of(said)
        assert nn.LlamaConfig.of(given, hidden_size=128).hidden_size == 128
        with pytest.raises(coda_lang.CodaError, match="C0716.*model_type='llama'"):
            nn.GPT2Config.of(given)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "cut.json").write_text('{"hidden_size": 6')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name, why in (("none.json", "No such file"), ("list.json", "not the options"), ("cut.json", "no JSON"), ("bytes.json", "no JSON")):
        with pytest.raises(coda_lang.CodaError, match=f"C0716.*{name}.*{why}") as raised:
            nn.LlamaConfig.of(tmp_path / name)
        assert raised.value.diagnostics[0].help


@pytest.mark.parametrize("config", [nn.LlamaConfig, nn.GPT2Config])
def test_what_is_no_configuration_is_refused(config):
    for given in (None, 7, {}, {"vocab_size": 300}, [("hidden_size", 64)], object(), config, "no/such/model"):
        with pytest.raises(coda_lang.CodaError, match=f"C0716: {config.__name__}.of") as raised:
            config.of(given)
        assert "config.json" in raised.value.diagnostics[0].help
    other = {nn.LlamaConfig: nn.GPT2Config(), nn.GPT2Config: nn.LlamaConfig()}[config]
    for given in (other, vars(other)):
        with pytest.raises(coda_lang.CodaError, match="C0716"):
            config.of(given)
    with pytest.raises(coda_lang.CodaError, match="C0716.*'hiden_size'"):
        config.of({"hidden_size": 64, "n_embd": 48}, hiden_size=64)


def test_rope_parameters_of_newer_configurations_are_taken():
    """There the base of the angles stands beside their scaling."""
    scaled = {"rope_type": "linear", "factor": 2.0}
    want = nn.LlamaConfig(rope_theta=500000.0, rope_scaling=scaled).frequencies()
    said = {"hidden_size": 4096, "rope_parameters": {"rope_theta": 500000.0, **scaled}}
    assert nn.LlamaConfig.of(said).frequencies() == want == nn.LlamaConfig.of(SimpleNamespace(**said)).frequencies()
    assert nn.LlamaConfig.of(said, rope_scaling=None, rope_theta=7.0).frequencies() == nn.LlamaConfig(rope_theta=7.0).frequencies()
    for partial in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}):
        with pytest.raises(coda_lang.CodaError, match="C0716.*partial_rotary_factor"):
            nn.LlamaConfig.of(partial)


def test_llama3_frequencies():
    """High frequencies stay, low ones are divided, those between are interpolated."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    c = nn.LlamaConfig(head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    plain = nn.LlamaConfig(head_dim=128, rope_theta=500000.0).frequencies()
    for f, scaled in zip(plain, c.frequencies()):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            assert scaled == pytest.approx(f)
        elif wavelength > 8192:
            assert scaled == pytest.approx(f / 8)
        else:
            assert f / 8 < scaled < f
    assert nn.LlamaConfig(rope_scaling={"type": "linear", "factor": 2.0}).frequencies()[3] == pytest.approx(
        nn.LlamaConfig().frequencies()[3] / 2
    )
