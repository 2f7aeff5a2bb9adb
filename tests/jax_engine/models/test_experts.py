"""Mixtures of experts: implementations against each other, experts divided over devices, adapters."""

import copy
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_reference import labels_of, our_loss
from tested import WITH_EXPERTS

from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.tree import flatten, merge, unflatten
from jax_engine.models import experts, hub, loading
from jax_engine.models.lora import adapter_settings, add_adapter
from jax_engine.models.network import Network
from jax_engine.tasks.sft import SFT
from lmmods.core.errors import UserError
from lmmods.core.settings import LoRA
from lmmods.torch_engine.nn.lora import add_lora
from tests.closeness import assert_as_close


def use_implementation(net, form):
    return Network(net.config, net.family, net.arch, net.head, dataclasses.replace(net.build, experts=form))


def add_random_adapters(ref, quantize=None):
    """Return the network with random adapters on its attention and experts, and its parameters."""
    net = hub.network(ref.net.config, "causal", lora=LoRA(rank=2, target_parameters=[
        "experts.gate_up_proj", "experts.down_proj"]))
    random = np.random.default_rng(0)
    base = loading.load(ref.net, str(ref.folder), quantize=quantize)
    return net, unflatten({path: random.normal(size=leaf.shape).astype(np.float32) / 8 if "lora" in path[-1] else leaf
                           for path, leaf in flatten(add_adapter(net, base, 0)).items()})


@pytest.mark.parametrize(("name", "form"), [
    ("gpt_oss", "blocks"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (
        ("gpt_oss", "ragged"), ("mixtral", "ragged")))])
def test_sorted_implementations_equal_the_dense_one(make_ref, name, form, monkeypatch):
    monkeypatch.setattr(experts, "BLOCK_SIZES", (2, 4))
    net, params = add_random_adapters(make_ref(name))
    batch = make_ref(name).batch()

    def gradients(net):
        run = jax.jit(jax.value_and_grad(lambda p: our_loss(net, p, batch, labels_of(batch))[0]))
        value, grads = run(params)
        return {"loss": value, **flatten(grads)}

    actual, dense = gradients(use_implementation(net, form)), gradients(use_implementation(net, "dense"))
    for path, leaf in dense.items():
        assert np.abs(actual[path] - leaf).max() <= 2e-5 * max(np.abs(leaf).max(), 1e-3), path


def test_all_tokens_may_use_one_expert_and_some_experts_none():
    random = np.random.default_rng(0)
    tokens, weights = random.normal(size=(1, 7, 4)), random.uniform(size=(1, 7, 2))
    matrices = {"gate_up_proj": random.normal(size=(3, 6, 4)), "down_proj": random.normal(size=(3, 4, 3))}
    tokens, weights, matrices = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (tokens, weights, matrices))
    inner = lambda x: x[..., :3] * x[..., 3:]  # noqa: E731
    up, down = (np.asarray(matrices[name], np.float64) for name in ("gate_up_proj", "down_proj"))
    for indices in ([[1, 1]] * 7, [[0, 2]] * 7, [[0, 1], [2, 1], [9, 2], [-1, 0], [2, 0], [1, 2], [2, 9]]):
        dense, *sorted_forms = (
            experts._apply_experts(inner, form, False, tokens, weights, jnp.array([indices]), matrices)
            for form in ("dense", "ragged", "blocks"))
        exact = np.zeros(tokens.shape)
        for (token, rank), expert in np.ndenumerate(indices):
            if 0 <= expert < 3:
                exact[0, token] += float(weights[0, token, rank]) * down[expert] @ inner(up[expert] @ tokens[0, token])
        for actual in sorted_forms:
            assert_as_close(actual, dense, exact)


MESHES = {
    "expert2-sequence3": ({"expert": 2, "sequence": 3}, "ragged", None, 6),
    "data2-expert2-tensor2-lora": ({"data": 2, "expert": 2, "tensor": 2}, "blocks", "lora", 4),
    "fsdp2-expert2-tensor2-nf4": ({"fsdp": 2, "expert": 2, "tensor": 2}, "blocks", "nf4", 8),
    "expert2-tensor4": ({"expert": 2, "tensor": 4}, "ragged", None, 2),  # eight does not divide four experts
}

SMALL = {"qwen3_moe": {"num_hidden_layers": 1},
         "gemma4_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
                         "num_kv_shared_layers": 0, "num_experts": 4}}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "form", "adapts", "shards"), [
    *(pytest.param("qwen3_moe", *case, id=key) for key, case in MESHES.items()),
    pytest.param("gemma4_text", {"fsdp": 2, "expert": 2}, "blocks", None, 4, id="gemma4_text")])
def test_experts_divided_over_devices_compute_the_same_as_on_one(make_ref, name, sizes, form, adapts, shards):
    """Compare loss, balance, load and gradients of packed rows; all parameters train, or adapters on frozen experts."""
    changes = {"hidden_size": 64, "moe_intermediate_size": 64} if adapts == "nf4" else {}  # rows of whole blocks
    ref, task = make_ref(name, **SMALL[name], **changes), SFT(pretrained="-", balance_loss=0.3)
    net, params = add_random_adapters(ref, "nf4" if adapts == "nf4" else None) if adapts else (ref.net, ref.params)
    task.network = use_implementation(net, form)
    mesh = ShardedMesh(**{"fsdp": 1} | sizes, devices=jax.devices()[:math.prod(sizes.values())])
    ranks, random = mesh.data_parallel_size, np.random.default_rng(3)
    real = np.arange(9) < random.integers(6, 10, (2 * ranks, 1))
    ids, texts = random.integers(4, 37, real.shape), np.where(np.arange(9) < 4, 1, 2)
    batch = {"input_ids": np.where(real, ids, 0), "attention_mask": real, "segment_ids": real * texts,
             "position_ids": np.arange(9) - np.where(texts == 2, 4, 0) + np.zeros_like(ids),
             "labels": np.where(real & (random.random(real.shape) < 0.8), ids, -100)}
    batch = {key: value.astype(np.int32).reshape(ranks, 2, 9) for key, value in batch.items()}

    def gradients(trainable, frozen, batch):
        def loss(trainable):
            rows = {key: value.reshape(-1, 9) for key, value in batch.items()}
            sums = task.batch_loss(merge(trainable, frozen), rows, True, False)
            return sums.total, (sums.total, sums.weight, sums.metrics)

        return jax.grad(loss, has_aux=True)(trainable)

    trees = task.network.split(params)
    placed = [mesh.put_state(tree) for tree in trees]
    leaf_on_mesh = merge(*placed)["layers"]["moe"]["experts"]["down_proj"]
    leaf_on_mesh = leaf_on_mesh.packed if adapts == "nf4" else leaf_on_mesh
    assert leaf_on_mesh.addressable_shards[0].data.size * shards == leaf_on_mesh.size
    whole = jax.tree.leaves(mesh.fetch_state(placed))  # as in a checkpoint
    assert all(np.array_equal(a, b) for a, b in zip(whole, jax.tree.leaves(trees), strict=True))
    step = mesh.compile(gradients, ("state", "state", "batch"), ("state", "scalar"))
    actual, sums = step(*placed, mesh.put_batch(batch))
    expected, reference = jax.jit(gradients)(*trees, batch)
    assert all(np.allclose(a, b, rtol=1e-5)
               for a, b in zip(jax.tree.leaves(sums), jax.tree.leaves(reference), strict=True))
    actual, expected = flatten(mesh.fetch_state(actual)), flatten(expected)
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for path, leaf in expected.items():
        assert np.abs(actual[path] - leaf).max() <= 1e-5 * max(np.abs(leaf).max(), 0.01 * largest), path


@pytest.mark.parametrize(("name", "message"), [
    ("llama", "llama has no experts"), ("mixtral", "mixtral has 5 experts .* 2 does not")])
def test_experts_that_devices_cannot_divide_are_rejected(make_ref, name, message):
    mixture = make_ref(name).net.arch.experts
    with pytest.raises(UserError, match=f"mesh size expert is 2, but {message}"):
        experts.check_expert_mesh(ShardedMesh(expert=2).expert_size, name, mixture)
    experts.check_expert_mesh(ShardedMesh().expert_size, name, mixture)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_all_linear_excludes_experts_and_routers_on_both_engines(make_ref, name, tmp_path):
    ref, lora = make_ref(name), LoRA(rank=2)
    model = add_lora(copy.deepcopy(ref.torch), lora, [], torch.float32, "CAUSAL_LM")
    net = hub.network(ref.net.config, "causal", lora=lora)
    trained = {key for key, path, _ in net.names() if net.trains(path)}
    assert trained == {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    if name == "gemma4_text":  # each layer has an MLP and an input; its router has a linear layer
        assert any(".mlp." in key for key in trained) and not any(
            ".router." in key or ".experts." in key for key in trained)
    else:
        assert all(".self_attn." in key for key in trained) and len(trained) == 16
    model.save_pretrained(tmp_path)
    assert adapter_settings(tmp_path, ref.net).rank == 2  # PEFT's folder is read, too


@pytest.mark.parametrize("target", ["gate", "gate_up_proj", "experts", "w1"])
def test_lora_targets_that_are_experts_are_rejected_by_name(make_ref, target):
    ref, lora = make_ref("mixtral"), LoRA(targets=[target])
    for adapt in (lambda: hub.network(ref.net.config, "causal", lora=lora),
                  lambda: add_lora(ref.torch, lora, [], torch.float32)):
        with pytest.raises(UserError, match=f"'{target}'.*k_proj.*Experts and their router are not linear layers"):
            adapt()
