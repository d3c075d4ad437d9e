"""Models of programs against plain PyTorch: values and every gradient in float64, and in bf16 within twice eager's error; checkpoints in
and out; what users pass: labels, masks, positions, reductions; copies, compiled graphs; refusals."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from exact_programs import on_stand_ins, planned  # noqa: E402
from nn_cases import FAMILIES, FULL_FAMILIES, SMALL, SMALL_GPT2, both, ids_of, of_ours, of_plain, pair, randomised  # noqa: E402

import coda_lang  # noqa: E402
from bench.plain_models import PlainGPT2, PlainLlama, loss  # noqa: E402
from coda_lang import nn  # noqa: E402
from coda_lang.backend_cute.selfcheck import error  # noqa: E402


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


OTHER_FAMILIES = [
    ("self_attn.q_proj.bias", "qwen2"),
    ("self_attn.q_norm.weight", "qwen3"),
    ("pre_feedforward_layernorm.weight", "gemma2"),
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name, family", OTHER_FAMILIES)
def test_checkpoints_of_other_families_are_told(name, family, strict):
    model = nn.LlamaForCausalLM(SMALL)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    state = {**PlainLlama(SMALL).state_dict(), f"model.layers.1.{name}": torch.zeros(64)}
    with pytest.raises(coda_lang.CodaError, match=f"C0716.*layers.1.{name}.*LlamaModel has no .*{family}.coda") as raised:
        model.load_state_dict(state, strict=strict)
    assert "specs/" in raised.value.diagnostics[0].help and all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


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


@both
def test_masks_positions_and_labels_that_do_not_fit_are_refused(family):
    model, _, ids = pair(family)
    masks = [torch.ones(s, dtype=torch.bool) for s in ((2, 18), (3, 19), (19,), (2, 19, 19), (2, 1, 18, 18), (3, 1, 19, 19))]
    places = [torch.arange(18), torch.zeros(3, 19, dtype=torch.int64), torch.zeros(2, 1, 19, dtype=torch.int64), torch.zeros(2, 19)]
    for name, wrong in [("attention_mask", m) for m in masks] + [("position_ids", p) for p in places]:
        with pytest.raises(coda_lang.CodaError, match=f"C0707: {name} of shape .*ids of shape") as raised:
            model(ids, **{name: wrong})
        assert "[2, 19]" in raised.value.diagnostics[0].help
    with pytest.raises(coda_lang.CodaError, match="C0702: labels of dtype torch.float32"):
        model(ids, labels=ids.float())
    want = model(ids, labels=ids).loss
    assert torch.equal(model(ids.int(), labels=ids.int(), position_ids=torch.arange(19)).loss, want)
    for fits in (torch.ones(2, 19), torch.ones(1, 1, 19, 19, dtype=torch.bool).tril()):
        torch.testing.assert_close(model(ids, labels=ids, attention_mask=fits).loss, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("keep", [True, False])
def test_labels_outside_the_vocabulary_give_nan_and_not_a_number_that_looks_right(keep):
    model, _, ids = pair("llama")
    model.keep_logits = keep
    labels = ids.clone()
    labels[0, 4], labels[1, 4], labels[1, 7] = 203, -1, -100
    each = model(ids, labels=labels, reduction="none").loss
    assert each.isnan().nonzero().tolist() == [[0, 3], [1, 3]] and model(ids, labels=labels).loss.isnan()


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
