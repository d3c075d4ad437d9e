"""Types of a model's weights and of its angles: casts of the whole model, autocast, and what is said of weights that do not fit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from nn_cases import FAMILIES, SMALL, both, ids_of, of_ours, pair, results  # noqa: E402

import coda_lang  # noqa: E402
from coda_lang import nn  # noqa: E402
from coda_lang.backend_cute.selfcheck import error  # noqa: E402


def test_autocast_takes_f32_weights_and_gives_f32_gradients():
    model, _, ids = pair("llama")
    want = of_ours(model, ids)
    wide = nn.LlamaForCausalLM(SMALL, dtype=torch.float32)
    wide.load_state_dict(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        out = wide(ids, labels=ids, return_logits=True)
    got = results(out.logits, out.loss, wide)
    assert got["lm_head.weight"].dtype == torch.float32
    assert all(error(got[n], want[n]) < 0.02 for n in want)


CASTS = {
    "bfloat16": lambda m: m.bfloat16(),
    "to": lambda m: m.to(torch.bfloat16),
    "to a device": lambda m: m.to("cpu", torch.bfloat16),
    "half and back": lambda m: m.half().float().bfloat16(),
    "double and back": lambda m: m.double().bfloat16(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casts_of_a_model_leave_its_angles_alone(cast):
    model, _, ids = pair("llama")
    want, angles = model(ids).logits, model.model.freq.clone()
    model = cast(nn.LlamaForCausalLM(SMALL, dtype=torch.float32).float())
    model.load_state_dict(pair("llama")[0].state_dict())
    assert model.model.freq.dtype == torch.float32 and torch.equal(model.model.freq, angles)
    assert torch.equal(model(ids).logits, want)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids).logits, want)
    own = angles * 0.3
    model.model.freq = own
    assert torch.equal(cast(model).model.freq, own)


def test_a_model_without_storage_gets_its_angles_with_it():
    model, _, ids = pair("llama")
    late = nn.LlamaForCausalLM(SMALL, device="meta").bfloat16().to_empty(device="cpu")
    late.load_state_dict(model.state_dict())
    assert torch.equal(late(ids).logits, model(ids).logits)
    late.to_empty(device="cpu")
    assert torch.equal(late.model.freq, model.model.freq)
    assert late.to("meta").model.freq.is_meta


@pytest.mark.parametrize("way", ["written", "traced"])
def test_narrow_angles_are_refused_under_autocast_too(way):
    """Cast up again they would be others, silently."""
    model, _, ids = pair("llama")
    model.model.freq = model.model.freq.bfloat16()
    call = model if way == "written" else torch.compile(model, backend="eager")
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on), pytest.raises(Exception, match="C0703: llama_pre: argument 'freq'"):
            call(ids)


@both
def test_weights_of_another_type_are_named_as_the_models(family):
    ours, _, config = FAMILIES[family]
    ids = ids_of(config)
    for model, count, dtype in ((ours(config).float(), None, "f32"), (ours(config).half(), None, "f16"), (ours(config), 1, "float64")):
        names = list(dict(model.named_parameters()))
        if count:
            last = model.get_parameter(names[-2])
            last.data = last.data.double()
        for part, prefix in ((model, ""), (next(model.children()), next(n for n, _ in model.named_children()) + ".")):
            with pytest.raises(coda_lang.CodaError) as raised:
                part(ids)
            (found,) = raised.value.diagnostics
            total = len(list(part.parameters()))
            assert found.code == "C0703" and f"{type(part).__name__}: {count or total} of {total} weights are {dtype}" in found.message
            assert (names[-2] if count else names[0]).removeprefix(prefix) in found.message
            assert "model.bfloat16()" in found.help and "torch.autocast('cpu', torch.bfloat16)" in found.help
