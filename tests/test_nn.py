"""Models of programs against plain PyTorch: values and every gradient in float64, and in bf16 within twice eager's error; checkpoints in
and out; what users pass: labels, masks, positions, reductions; autocast, copies, compiled graphs; refusals."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from exact_programs import on_stand_ins, planned  # noqa: E402

import coda_lang  # noqa: E402
from bench.plain_models import PlainGPT2, PlainLlama, loss  # noqa: E402
from coda_lang import nn  # noqa: E402
from coda_lang.backend_cute.selfcheck import error  # noqa: E402

SMALL = nn.LlamaConfig(
    vocab_size=203, hidden_size=72, intermediate_size=104, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
FULL = nn.LlamaConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
)
SMALL_GPT2 = nn.GPT2Config(vocab_size=203, n_positions=40, n_embd=48, n_layer=3, n_head=3)
FULL_GPT2 = nn.GPT2Config(vocab_size=1000, n_positions=64, n_embd=256, n_layer=4, n_head=4)
FAMILIES = {
    "llama": (nn.LlamaForCausalLM, PlainLlama, SMALL),
    "gpt2": (nn.GPT2LMHeadModel, PlainGPT2, SMALL_GPT2),
}
FULL_FAMILIES = {
    "llama": (nn.LlamaForCausalLM, PlainLlama, FULL),
    "gpt2": (nn.GPT2LMHeadModel, PlainGPT2, FULL_GPT2),
}
SHAPE = (2, 19)
both = pytest.mark.parametrize("family", FAMILIES)


def ids_of(config, shape=SHAPE, seed=0):
    return torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def randomised(model, seed=0):
    """Weights whose norms and biases matter, the same for equal shapes in equal order; products keep values near 1."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            drawn = torch.randn(p.shape, generator=gen)
            p.copy_((1 + 0.2 * drawn if name.endswith("norm.weight") or ".ln_" in name else 0.2 * drawn) if p.dim() == 1 else 0.08 * drawn)
    return model


def pair(family, families=FAMILIES, seed=0):
    """Ours and a plain model with the same bf16 weights, and ids."""
    ours, plain, config = families[family]
    model = randomised(ours(config), seed)
    other = plain(config).bfloat16()
    other.load_state_dict(model.state_dict())
    return model, other, ids_of(config, seed=seed)


def results(logits, value, model):
    """What is compared: logits, loss, gradients by name."""
    value.backward()
    return {"logits": logits.detach(), "loss": value.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def of_ours(model, ids, **options):
    out = model(ids, labels=ids, return_logits=True, **options)
    return results(out.logits, out.loss, model)


def of_plain(model, ids):
    logits = model(ids)
    return results(logits, loss(logits, ids), model)


def in_float64(family, families):
    model, plain, ids = pair(family, families)
    got, want = of_ours(planned(model, exact=True), ids), of_plain(plain.double(), ids)
    assert set(got) == set(want)
    wrong = {n: error(got[n], want[n]) for n in want if error(got[n], want[n]) > 1e-6}
    assert not wrong, wrong


def in_bf16(family, families):
    """Over two draws together: in a single one eager may be lucky with a bias's gradient, and with the one number that is the loss."""
    off, may = {}, {}
    for seed in (0, 1):
        model, plain, ids = pair(family, families, seed)
        truth = of_plain(copy.deepcopy(plain).double(), ids)
        got, eager = of_ours(planned(model, exact=False), ids), of_plain(plain, ids)
        for name, true in truth.items():
            off[name] = off.get(name, 0.0) + error(got[name], true) ** 2
            may[name] = may.get(name, 0.0) + error(eager[name], true) ** 2
    assert off.pop("loss") ** 0.5 < 2e-3
    wrong = {n: (off[n] ** 0.5, may[n] ** 0.5) for n in off if off[n] ** 0.5 > 2 * may[n] ** 0.5 + 1e-6}
    assert not wrong, wrong


@both
def test_values_and_gradients_in_float64(family):
    in_float64(family, FAMILIES)


@both
def test_values_and_gradients_in_bf16_by_twice_eagers_error(family):
    in_bf16(family, FAMILIES)


@pytest.mark.slow
@both
def test_the_full_small_model_in_float64(family):
    """4 layers, width 256, 1000 words, grouped queries."""
    in_float64(family, FULL_FAMILIES)


@pytest.mark.slow
@both
def test_the_full_small_model_in_bf16(family):
    in_bf16(family, FULL_FAMILIES)


@both
def test_a_plain_call_runs_the_reference_on_a_cpu(family):
    model, plain, ids = pair(family)
    got, eager = of_ours(model, ids), of_plain(plain, ids)
    assert model.last_path == "reference"
    for name in eager:
        assert got[name].dtype == eager[name].dtype or name == "loss", name
        assert error(got[name], eager[name]) < 0.06, name


@pytest.mark.parametrize("path", ["kernels"], indirect=True)
@both
def test_steps_the_way_that_cuda_tensors_go(family, path):
    """Plans, strides, buffers that start as NaN, kernels' stand-ins; the first step decides, the next ones take what it decided."""
    model, plain, ids = pair(family)
    model = on_stand_ins(model, ids.numel())
    eager = of_plain(plain, ids)
    first = of_ours(model, ids)
    assert model.last_path == "kernels"
    for _ in range(2):
        model.zero_grad()
        again = of_ours(model, ids)
        assert all(torch.equal(again[n], first[n]) for n in first)
    for name in eager:
        assert again[name].shape == eager[name].shape and error(again[name], eager[name]) < 0.06, name
    for _ in range(2):  # without logits another program is chosen
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        assert all(torch.equal(p.grad, first[n]) for n, p in model.named_parameters())


# --- checkpoints ------------------------------------------------------------------------------------------------------------------


@both
def test_state_dicts_go_both_ways_without_a_change(family):
    ours, plain, config = FAMILIES[family]
    theirs = randomised(plain(config).bfloat16(), seed=3).state_dict()
    model = ours(config)
    assert set(model.state_dict()) == set(theirs)
    model.load_state_dict(theirs)
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name]) and value.shape == theirs[name].shape, name
    again = plain(config).bfloat16()
    again.load_state_dict(model.state_dict())
    model.load_state_dict(theirs, assign=True)  # not even a copy
    first = next(iter(theirs))
    assert model.state_dict()[first].data_ptr() == theirs[first].data_ptr()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({n: v for n, v in theirs.items() if "layers.1" not in n and "h.1" not in n})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**theirs, "else.weight": torch.zeros(1)})


def test_what_checkpoints_vary_in_is_taken():
    """Buffers of older ones, tied weights stored once, a GPT-2 without its head."""
    llama = PlainLlama(SMALL).state_dict()
    nn.LlamaForCausalLM(SMALL).load_state_dict({**llama, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    tied = nn.LlamaConfig.of(SMALL, tie_word_embeddings=True)
    model = nn.LlamaForCausalLM(tied)
    model.load_state_dict({n: v for n, v in llama.items() if n != "lm_head.weight"})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, llama["model.embed_tokens.weight"].bfloat16())
    gpt2 = PlainGPT2(SMALL_GPT2).transformer.state_dict()
    model = nn.GPT2LMHeadModel(SMALL_GPT2)
    model.load_state_dict({**gpt2, "h.0.attn.bias": torch.ones(1, 1, 40, 40)})
    assert torch.equal(model.transformer.h[2].mlp.c_fc.weight, gpt2["h.2.mlp.c_fc.weight"].bfloat16())
    nn.GPT2Model(SMALL_GPT2).load_state_dict(gpt2)


def test_a_tied_weight_gets_both_gradients():
    config = nn.LlamaConfig.of(SMALL, tie_word_embeddings=True)
    model = randomised(nn.LlamaForCausalLM(config))
    plain = PlainLlama(config).bfloat16()
    plain.load_state_dict(model.state_dict())
    ids = ids_of(config)
    got, want = of_ours(planned(model, exact=True), ids), of_plain(plain.double(), ids)
    assert error(got["model.embed_tokens.weight"], want["model.embed_tokens.weight"]) < 1e-6 and "lm_head.weight" not in got


def test_the_package_offers_its_models():
    code = "import sys, coda_lang; assert 'torch' not in sys.modules; coda_lang.nn.LlamaConfig; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_copies_and_pickles():
    model, _, ids = pair("llama")
    want = model(ids).logits
    assert torch.equal(copy.deepcopy(model)(ids).logits, want)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(ids).logits, want) and again.model.programs.layer is model.model.programs.layer


# --- what users pass --------------------------------------------------------------------------------------------------------------


@both
def test_ragged_sequences_padded_give_what_each_gives_alone(family):
    model, _, ids = pair(family)
    model = planned(model, exact=True)
    lengths = (19, 11)
    mask = torch.tensor([[i < n for i in range(19)] for n in lengths])
    labels = ids.masked_fill(~mask, -100)
    out = model(ids, labels=labels, attention_mask=mask, return_logits=True, reduction="sum")
    alone = [model(row[None, :n], labels=row[None, :n], return_logits=True, reduction="sum") for row, n in zip(ids, lengths)]
    for i, n in enumerate(lengths):
        torch.testing.assert_close(out.logits[i, :n], alone[i].logits[0])
    torch.testing.assert_close(out.loss, alone[0].loss + alone[1].loss)


@both
def test_packed_sequences_by_positions_and_a_mask(family):
    """Two sequences in one row: positions start anew, no token attends to the other sequence."""
    model, _, ids = pair(family)
    model = planned(model, exact=True)
    first, second = ids[:1, :12], ids[1:, :7]
    part = torch.tensor([0] * 12 + [1] * 7)
    mask = (part[:, None] == part) & torch.ones(19, 19, dtype=torch.bool).tril()
    pos = torch.cat([torch.arange(12), torch.arange(7)])[None]
    packed = model(torch.cat([first, second], 1), position_ids=pos, attention_mask=mask[None, None]).logits
    torch.testing.assert_close(packed, torch.cat([model(first).logits, model(second).logits], 1))


def test_reductions_and_ignored_labels():
    model, plain, ids = pair("llama")
    model = planned(model, exact=True)
    labels = ids.clone()
    labels[0, 3:9] = -100
    each = model(ids, labels=labels, reduction="none").loss
    counted = (labels[:, 1:] != -100).sum()
    assert each.shape == ids.shape and bool((each[:, -1] == 0).all()) and bool((each[0, 2:8] == 0).all())
    torch.testing.assert_close(model(ids, labels=labels, reduction="sum").loss, each.sum())
    torch.testing.assert_close(model(ids, labels=labels).loss, each.sum() / counted)
    torch.testing.assert_close(model(ids, labels=labels).loss, loss(plain.double()(ids), labels))
    with pytest.raises(coda_lang.CodaError, match="C0716.*reduction"):
        model(ids, labels=labels, reduction="average")


def test_all_labels_ignored_is_a_loss_of_0_with_gradients_of_0():
    model, _, ids = pair("llama")
    out = model(ids, labels=torch.full_like(ids, -100))
    out.loss.backward()
    assert out.loss == 0 and all(p.grad is not None and not p.grad.any() for p in model.parameters())


@both
def test_no_tokens_and_one_token(family):
    """Row 3 of the known failures: empty outputs, gradients of zeros."""
    model, _, ids = pair(family)
    for some in (ids[:, :0], ids[:0], ids[:1, :1]):
        model.zero_grad()
        out = model(some, labels=some, return_logits=True)
        out.loss.backward()
        assert out.logits.shape == (*some.shape, 203) and out.loss == 0
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_calls_that_do_not_fit_are_refused():
    model, _, ids = pair("gpt2")
    for wrong, code in (((ids[0],), "C0702"), ((ids.float(),), "C0702"), ((ids, ids[:, 1:]), "C0707"), ((ids.repeat(1, 3),), "C0707")):
        with pytest.raises(coda_lang.CodaError, match=code) as raised:
            model(*wrong)
        assert all(d.help for d in raised.value.diagnostics)


def test_another_ignore_index():
    model, plain, ids = pair("llama")
    other = nn.LlamaForCausalLM(SMALL, ignore_index=7)
    other.load_state_dict(model.state_dict())
    labels = ids.clone()
    labels[:, 5] = 7
    want = model(ids, labels=labels.masked_fill(labels == 7, -100)).loss
    assert torch.equal(other(ids, labels=labels).loss, want)


def test_logits_need_not_be_kept():
    model, _, ids = pair("llama")
    want = of_ours(model, ids)
    model.zero_grad()
    model.keep_logits = False
    out = model(ids, labels=ids)
    out.loss.backward()
    assert out.logits is None and error(out.loss.detach(), want["loss"]) < 1e-3  # of f32 logits, not bf16
    for name, p in model.named_parameters():
        assert error(p.grad, want[name]) < 0.03, name


def test_linear_cross_entropy_is_torchs():
    h, w = torch.randn(3, 8, 24).bfloat16().requires_grad_(), torch.randn(50, 24).bfloat16().requires_grad_()
    target = torch.randint(0, 50, (3, 8))
    target[0, :3] = -100
    for reduction in ("mean", "sum", "none"):
        z = (h.double() @ w.double().T).bfloat16().double()  # logits are rounded, the loss is not
        want = torch.nn.functional.cross_entropy(z.flatten(0, 1), target.flatten(), reduction=reduction)
        got = nn.linear_cross_entropy(h, w, target, reduction=reduction)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want.view(got.shape), rtol=1e-4, atol=1e-4)


def test_a_vocabulary_of_several_chunks_gives_the_same_gradients():
    gen = torch.Generator().manual_seed(0)
    h, w = (torch.randn(s, generator=gen).bfloat16().requires_grad_() for s in ((9, 16), (16421, 16)))
    target = torch.randint(0, 16421, (9,), generator=gen)
    target[4] = -100
    value = nn.linear_cross_entropy(h, w, target, keep_logits=False)
    value.backward()
    exact = [t.detach().double().requires_grad_() for t in (h, w)]
    want = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, target)
    want.backward()
    assert error(value.detach(), want.detach()) < 1e-6
    for t, e in zip((h, w), exact):
        assert error(t.grad, e.grad) < 6e-3


# --- how torch runs it -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
@both
def test_one_graph_under_torch_compile(family):
    model, _, ids = pair(family)
    want = of_ours(model, ids)
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    out = compiled(ids, labels=ids, return_logits=True)
    out.loss.backward()
    assert error(out.logits, want["logits"]) == 0
    assert all(error(p.grad, want[n]) == 0 for n, p in model.named_parameters())


def test_checkpointed_layers_and_frozen_weights():
    model, _, ids = pair("llama")
    want = of_ours(model, ids)
    model.zero_grad()
    for name, p in model.named_parameters():
        p.requires_grad_("layers.1" in name)
    value = torch.utils.checkpoint.checkpoint(lambda x: model(x, labels=x).loss, ids, use_reentrant=False)
    value.backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, want[name]) if "layers.1" in name else p.grad is None, name


def test_without_gradients_the_same_bits():
    model, _, ids = pair("llama")
    with torch.no_grad():
        quiet = model(ids).logits
    assert torch.equal(quiet, model(ids).logits) and nn.LlamaForCausalLM(SMALL).model.last_path in (None, "reference")
