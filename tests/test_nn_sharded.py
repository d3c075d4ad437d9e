"""Row 29 of the known failures, and row 15: models under DDP and FSDP, sharded weights refused with the remedy; who rounds the residual."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")

import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh  # noqa: E402

import coda_lang  # noqa: E402
from coda_lang import nn  # noqa: E402
from coda_lang.backend_cute.selfcheck import error  # noqa: E402

CONFIG = nn.LlamaConfig(
    vocab_size=203, hidden_size=72, intermediate_size=104, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    if not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('gloo') / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def case():
    """A model, ids, its loss and gradients."""
    torch.manual_seed(0)
    model, ids = nn.LlamaForCausalLM(CONFIG), torch.randint(0, 203, (2, 9))
    single = copy.deepcopy(model)
    value = single(ids, labels=ids).loss
    value.backward()
    return model, ids, value.detach(), {n: p.grad for n, p in single.named_parameters()}


def test_row_29_data_parallel(mesh, case):
    model, ids, want, grads = case
    ours = copy.deepcopy(model)
    value = torch.nn.parallel.DistributedDataParallel(ours)(ids, labels=ids).loss
    value.backward()
    assert torch.equal(value, want) and all(torch.equal(p.grad, grads[n]) for n, p in ours.named_parameters())


def test_row_29_fsdp_of_the_whole_model(mesh, case):
    """Weights are gathered before the forward; gradients come back as shards."""
    model, ids, want, grads = case
    ours = copy.deepcopy(model)
    fully_shard(ours, mesh=mesh)
    value = ours(ids, labels=ids).loss
    value.backward()
    assert torch.equal(value, want)
    assert all(torch.equal(p.grad.full_tensor(), grads[n]) for n, p in ours.named_parameters())


def test_row_29_fsdp_layer_by_layer_is_refused_with_the_remedy(mesh, case):
    model, ids, *_ = case
    ours = copy.deepcopy(model)
    for layer in ours.model.layers:
        fully_shard(layer, mesh=mesh)
    with pytest.raises(coda_lang.CodaError, match=r"(?s)C0702: a layer's weights are shards.*help: fully_shard\(model\) as a whole"):
        ours(ids)


def test_row_29_one_sharded_weight_is_refused_by_name(mesh, case):
    model, ids, *_ = case
    ours = copy.deepcopy(model)
    up = ours.model.layers[1].mlp.up_proj
    up.weight = torch.nn.Parameter(distribute_tensor(up.weight.data, mesh, [Shard(0)]))
    with pytest.raises(coda_lang.CodaError, match=r"(?s)C0702: llama_layer: argument 'wu': got a sharded DTensor.*full_tensor"):
        ours(ids)


ROUNDED = """
program p(a: bf16[m, k], w: bf16[d, k], r: bf16[m, d], g: bf16[d]) -> (n: f32[m, d])
{x} = a @ w + r
n = rmsnorm[d](x, g, 1e-5)
"""


def test_row_15_the_program_says_whether_the_norm_reads_the_rounded_residual():
    gen = torch.Generator().manual_seed(0)
    a, w, r, g = (torch.randn(s, generator=gen).bfloat16() for s in ((33, 24), (40, 24), (33, 40), (40,)))
    x = a.double() @ w.double().T + r.double()
    norms = {}
    for name, value in (("x: bf16", x.bfloat16().double()), ("x", x)):
        fn = coda_lang.compile(ROUNDED.format(x=name))
        want = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-5) * g.double()
        for how in (fn(a, w, r, g), fn.reference_planned(a, w, r, g)):
            assert error(how, want) < 1e-5, name
        norms[name] = want
    assert error(norms["x"], norms["x: bf16"]) > 1e-3  # the two are not the same
