"""Mixtures of experts: their forms against each other, their files, their load against transformers' functions."""

import copy
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import FAMILIES, labels_of, our_loss
from safetensors.torch import load_file, save_file
from tested import WITH_EXPERTS
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from jax_engine.distributed.loss import LossSums
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.tree import flatten, merge, split, unflatten
from jax_engine.models import experts, hub, loading, mxfp4
from jax_engine.models.lora import adapter_settings, add_adapter
from jax_engine.models.network import Network
from jax_engine.tasks.expert_load import with_load
from jax_engine.tasks.sft import SFT
from lmmods.core import lazy_array
from lmmods.core.errors import UserError
from lmmods.core.experts import METRICS, Mixture, check_balance, note_quantized
from lmmods.core.hf_config import load_config
from lmmods.core.model_sizes import widths_of
from lmmods.core.settings import LoRA
from lmmods.torch_engine.nn import experts as on_torch
from lmmods.torch_engine.nn import export
from lmmods.torch_engine.nn import loss as torch_losses
from lmmods.torch_engine.nn.gradient_checkpointing import enable_checkpointing
from lmmods.torch_engine.nn.lm_head import LMHead, causal_loss
from lmmods.torch_engine.nn.loading import load_pretrained
from lmmods.torch_engine.nn.lora import add_lora
from lmmods.torch_engine.nn.summary import training_flops
from lmmods.torch_engine.tasks.sft import SFT as TorchSFT


def in_form(net, form):
    return Network(net.config, net.family, net.arch, net.head, dataclasses.replace(net.build, experts=form))


def with_adapters(ref):
    """The network with random adapters on its attention and experts, and its parameters."""
    net = hub.network(ref.net.config, "causal", lora=LoRA(rank=2, target_parameters=[
        "experts.gate_up_proj", "experts.down_proj"]))
    random = np.random.default_rng(0)
    return net, unflatten({path: random.normal(size=leaf.shape).astype(np.float32) if "lora" in path[-1] else leaf
                           for path, leaf in flatten(add_adapter(net, ref.params, 0)).items()})


@pytest.mark.parametrize(("name", "form"), [
    ("gpt_oss", "blocks"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (
        ("gpt_oss", "ragged"), ("mixtral", "blocks"), ("mixtral", "ragged")))])
def test_the_sorted_forms_are_the_dense_one(make_ref, name, form, monkeypatch):
    monkeypatch.setattr(experts, "BLOCK_SIZES", (2, 4))
    net, params = with_adapters(make_ref(name))
    batch = make_ref(name).batch()

    def gradients(net):
        run = jax.jit(jax.value_and_grad(lambda p: our_loss(net, p, batch, labels_of(batch))[0]))
        value, grads = run(params)
        return {"loss": value, **flatten(grads)}

    ours, dense = gradients(in_form(net, form)), gradients(in_form(net, "dense"))
    for path, leaf in dense.items():
        assert np.abs(ours[path] - leaf).max() <= 2e-5 * max(np.abs(leaf).max(), 1e-3), path


def test_all_tokens_may_like_one_expert_and_others_may_have_none():
    random = np.random.default_rng(0)
    tokens, shares = random.normal(size=(1, 7, 4)), random.uniform(size=(1, 7, 2))
    matrices = {"gate_up_proj": random.normal(size=(3, 6, 4)), "down_proj": random.normal(size=(3, 4, 3))}
    tokens, shares, matrices = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (tokens, shares, matrices))
    inner = lambda x: x[..., :3] * x[..., 3:]  # noqa: E731
    for chosen in ([[1, 1]] * 7, [[0, 2]] * 7, [[0, 1], [2, 1], [9, 2], [-1, 0], [2, 0], [1, 2], [2, 9]]):
        found = {form: experts._mix(inner, form, False, tokens, shares, jnp.array([chosen]), matrices)
                 for form in ("dense", "ragged", "blocks")}
        for form in ("ragged", "blocks"):
            assert np.allclose(found[form], found["dense"], atol=1e-5), (form, chosen)


def test_padding_reaches_neither_tokens_nor_load(make_ref):
    ref = make_ref("mixtral")
    batch = ref.batch()
    real = batch["attention_mask"] > 0
    run = jax.jit(ref.net.hidden_and_load)
    hidden, load = run(ref.params, batch)
    other, again = run(ref.params, batch | {"input_ids": np.where(real, batch["input_ids"], 7)})
    assert np.array_equal(np.asarray(hidden)[real], np.asarray(other)[real])
    assert all(np.array_equal(a, b) for a, b in zip(load, again, strict=True))
    assert np.array_equal(load.counts.sum(-1), 2 * real.sum(1)[None].repeat(2, 0))
    packed = {"input_ids": batch["input_ids"], "segment_ids": real.astype(int)}
    assert np.array_equal(run(ref.params, packed)[1].num_tokens[0], real.sum(1))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_balance_and_load_are_those_of_transformers_row_by_row(make_ref, name):
    """Logits from transformers' network and its function for one row and layer; both engines; their gradients."""
    ref = make_ref(name)
    batch, coefficient = ref.batch(), 0.3
    real, weights = batch["attention_mask"], np.array([5.0, 0.0, 3.5, 7.0], np.float32)
    inputs = {key: torch.tensor(value) for key, value in batch.items()}
    ref.torch.zero_grad()
    logits = ref.torch(**inputs, output_router_logits=True).router_logits
    num, by_layer = logits[0].shape[-1], [layer.view(*real.shape, -1) for layer in logits]
    expected = sum(weight * sum(load_balancing_loss_func((layer[row],), num, 2, inputs["attention_mask"][row:row + 1])
                                for layer in by_layer) / len(by_layer) for row, weight in enumerate(weights))
    (coefficient * expected).backward(retain_graph=True)
    wanted = {key: parameter.grad.clone() for key, parameter in ref.torch.named_parameters()
              if parameter.grad is not None}
    chosen = [layer.topk(2, -1).indices.numpy() for layer in by_layer]
    counts = np.array([[np.bincount(layer[row][real[row] > 0].ravel(), minlength=num) for row in range(4)]
                       for layer in chosen]) / real.sum(1)[:, None] * num / 2
    values = [expected.item(), *(counts.max(-1).mean(0) @ weights, counts.min(-1).mean(0) @ weights)]

    ref.torch.zero_grad()
    zero = torch.zeros(())
    sums = on_torch.with_load(torch_losses.LossSums(zero, zero), logits, Mixture(num, 2), inputs["attention_mask"] > 0,
                              torch.tensor(weights), coefficient)
    sums.total.backward()
    assert np.allclose(sums.metrics.numpy(), np.stack([values, [weights.sum()] * 3], 1), rtol=1e-5)
    for key, gradient in wanted.items():
        assert torch.allclose(ref.torch.get_parameter(key).grad, gradient, rtol=1e-4, atol=1e-6), key

    def ours(params):
        _, load = ref.net.hidden_and_load(params, batch, True)
        found = with_load(LossSums(jnp.zeros(()), jnp.zeros(())), load, jnp.asarray(weights), coefficient)
        return found.total, found.metrics

    (total, metrics), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(ref.params)
    assert np.allclose(total, coefficient * values[0], rtol=1e-5) and tuple(metrics) == METRICS
    assert np.allclose([metrics[name] for name in METRICS], sums.metrics, rtol=1e-5)
    named, largest = ref.net.to_torch(grads), max(float(gradient.abs().max()) for gradient in wanted.values())
    for key, gradient in wanted.items():
        assert np.abs(named[key] - gradient.numpy()).max() <= 1e-4 * max(gradient.abs().max(), 1e-3 * largest), key


MESHES = {
    "fsdp2-expert2": ({"fsdp": 2, "expert": 2}, "blocks", False, 4),
    "expert2-sequence3": ({"expert": 2, "sequence": 3}, "ragged", False, 6),
    "data2-expert2-tensor2-lora": ({"data": 2, "expert": 2, "tensor": 2}, "blocks", True, 4),
    "expert2-tensor4": ({"expert": 2, "tensor": 4}, "ragged", False, 2),  # four experts do not go eight ways
}


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "form", "adapts", "shards"), MESHES.values(), ids=MESHES)
def test_devices_that_share_experts_compute_what_one_does(make_ref, sizes, form, adapts, shards):
    """Loss, balance, load and gradients of packed rows; all parameters train, or adapters beside frozen experts."""
    ref, task = make_ref("qwen3_moe", num_hidden_layers=1), SFT(pretrained="-", balance_loss=0.3)
    net, params = with_adapters(ref) if adapts else (ref.net, ref.params)
    task.network = in_form(net, form)
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

    trees = split(params, task.network.trainable(params))
    placed = [mesh.put_state(tree) for tree in trees]
    held = merge(*placed)["layers"]["mlp"]["experts"]["down_proj"]
    assert held.addressable_shards[0].data.size * shards == held.size
    whole = jax.tree.leaves(mesh.fetch_state(placed))  # which is what a checkpoint holds
    assert all(np.array_equal(a, b) for a, b in zip(whole, jax.tree.leaves(trees), strict=True))
    step = mesh.compile(gradients, ("state", "state", "batch"), ("state", "scalar"))
    found, sums = step(*placed, mesh.put_batch(batch))
    wanted, one = jax.jit(gradients)(*trees, batch)
    assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(jax.tree.leaves(sums), jax.tree.leaves(one), strict=True))
    found, wanted = flatten(mesh.fetch_state(found)), flatten(wanted)
    largest = max(np.abs(leaf).max() for leaf in wanted.values())
    for path, leaf in wanted.items():
        assert np.abs(found[path] - leaf).max() <= 1e-5 * max(np.abs(leaf).max(), 0.01 * largest), path


@pytest.mark.parametrize(("name", "says"), [
    ("llama", "llama has no experts"), ("mixtral", "mixtral has 5 experts .* 2 does not")])
def test_experts_that_devices_cannot_share_are_refused(make_ref, name, says):
    found = make_ref(name).net.arch.experts
    with pytest.raises(UserError, match=f"mesh size expert is 2, but {says}"):
        experts.check_shared(ShardedMesh(expert=2).expert_size, name, found)
    experts.check_shared(ShardedMesh().expert_size, name, found)


def rewritten(ref, folder, change):
    folder.mkdir(exist_ok=True)
    tensors = change(load_file(ref.folder / "model.safetensors"))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    return loading.load(ref.net, str(folder))


def test_stacked_files_and_renamed_modules_load_the_same_bits(make_ref, tmp_path):
    ref = make_ref("mixtral")
    assert any(".block_sparse_moe.experts.4.w2.weight" in key for key in load_file(ref.folder / "model.safetensors"))
    ref.torch.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in load_file(
        tmp_path / "stacked" / "model.safetensors"))
    stacked = loading.load(ref.net, str(tmp_path / "stacked"))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(stacked), jax.tree.leaves(ref.params), strict=True))


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: {k: v for k, v in t.items() if "0.mlp.experts.3.up_proj" not in k}, "layers.0.mlp.experts.gate_up_proj"),
    (lambda t: t | {"model.layers.0.mlp.experts.4.up_proj.weight": torch.ones(12, 16)}, "4.up_proj.weight .*4 experts"),
    (lambda t: t | {"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(11, 16)}, r"\(11, 16\).*\(12, 16\)"),
    (lambda t: t | {"layers.0.mlp.experts.0.up_proj.weight": torch.ones(12, 16)}, "a second time"),
    (lambda t: t | {"model.layers.0.mlp.experts.0.w1.weight": torch.ones(12, 16)}, "experts.0.w1.weight"),
])
def test_experts_that_do_not_fit_are_refused_by_name(make_ref, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        rewritten(make_ref("qwen3_moe"), tmp_path, change)


def test_mxfp4_codes_have_the_values_of_transformers():
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (3, 10, 2, 16), dtype=np.uint8)
    scales = random.integers(100, 140, (3, 10, 2), dtype=np.uint8)
    ours = mxfp4.values(lazy_array.of(blocks), lazy_array.of(scales), np.float32)
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    assert np.array_equal(ours, theirs)
    assert np.array_equal(ours[1:, 5:40, 2:3], theirs[1:, 5:40, 2:3])


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_all_linear_is_the_attention_on_both_engines(make_ref, name, tmp_path):
    ref, lora = make_ref(name), LoRA(rank=2)
    model = add_lora(copy.deepcopy(ref.torch), lora, [], torch.float32, "CAUSAL_LM")
    net = hub.network(ref.net.config, "causal", lora=lora)
    trained = {key for key, path, _ in net.names() if net.trains(path)}
    assert trained == {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".self_attn." in key for key in trained) and len(trained) == 16
    model.save_pretrained(tmp_path)
    assert adapter_settings(tmp_path).rank == 2  # of PEFT's folder


@pytest.mark.parametrize("target", ["gate", "gate_up_proj", "experts", "w1"])
def test_adapters_on_experts_are_refused_by_name(make_ref, target):
    ref, lora = make_ref("mixtral"), LoRA(targets=[target])
    for adapt in (lambda: hub.network(ref.net.config, "causal", lora=lora),
                  lambda: add_lora(ref.torch, lora, [], torch.float32)):
        with pytest.raises(UserError, match=f"'{target}'.*k_proj.*Experts and their router are no linear layers"):
            adapt()


@pytest.fixture(scope="module")
def in_mxfp4(tmp_path_factory):
    """A folder of gpt-oss whose experts are in MXFP4, and the values of their codes by transformers."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("mxfp4")
    config = transformers.GptOssConfig(**FAMILIES["gpt_oss"] | {"hidden_size": 32, "intermediate_size": 64})
    model = transformers.GptOssForCausalLM(config)
    model.save_pretrained(folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name, sizes in (("gate_up_proj", (4, 128, 1, 16)), ("down_proj", (4, 32, 2, 16))):
        for layer in range(2):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = random.integers(0, 256, sizes, np.uint8), random.integers(118, 124, sizes[:3], np.uint8)
            tensors |= {f"{key}_blocks": torch.tensor(blocks), f"{key}_scales": torch.tensor(scales)}
            values[key] = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
            del tensors[key]
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder, values


def test_a_folder_in_mxfp4_is_read_into_plain_weights_on_both_engines(in_mxfp4, tmp_path):
    folder, values = in_mxfp4
    net = hub.network(load_config(str(folder)), "causal")
    params = loading.load(net, str(folder))
    model = load_pretrained(transformers.AutoModelForCausalLM, str(folder))
    ours, theirs = net.to_torch(params), dict(model.named_parameters())
    assert list(ours) == list(theirs) and all(torch.equal(theirs[key], value) for key, value in values.items())
    assert all(np.array_equal(ours[key], value.detach().numpy()) for key, value in theirs.items())
    hub.save(net, params, tmp_path / "jax")
    export.save(model, tmp_path / "torch", False, None, True)
    for engine in ("jax", "torch"):
        assert "quantization_config" not in json.loads((tmp_path / engine / "config.json").read_text())
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / engine)
        assert all(torch.equal(value, theirs[key]) for key, value in again.named_parameters())


def test_mxfp4_is_not_quantised_again_and_half_of_it_is_missing(in_mxfp4, tmp_path):
    folder, _ = in_mxfp4
    with pytest.raises(UserError, match="model.quantize is nf4, but .* is saved in mxfp4"):
        load_pretrained(transformers.AutoModelForCausalLM, str(folder), quantize="nf4", frozen=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    net = hub.network(load_config(str(folder)), "causal")
    with pytest.raises(UserError, match="Missing: model.layers.1.mlp.experts.down_proj"):
        loading.load(net, str(tmp_path))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_rows_of_a_batch_add_up_on_torch_also_under_checkpointing(make_ref, checkpointing):
    """Loss and gradient with the balance loss: of four rows at once as of each by itself."""
    ref, mixture = make_ref("qwen3_moe"), Mixture(4, 2)
    model = copy.deepcopy(ref.torch).train()
    if checkpointing:
        enable_checkpointing(model)
    batch = {key: torch.tensor(value) for key, value in ref.batch().items()}
    batch["labels"] = torch.tensor(labels_of(ref.batch()))
    head = LMHead(model)

    def gradients(pieces):
        model.zero_grad()
        sums = [causal_loss(model, head, piece, mixture=mixture, balance_loss=0.3) for piece in pieces]
        sum(part.total for part in sums).backward()
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        return sum(part.total.item() for part in sums), sum(part.metrics for part in sums), found

    total, metrics, whole = gradients([batch])
    cut, of_rows, by_row = gradients([{key: value[row:row + 1] for key, value in batch.items()} for row in range(4)])
    assert cut == pytest.approx(total, rel=1e-5) and torch.allclose(of_rows, metrics, rtol=1e-4)
    plain = causal_loss(model, head, batch)
    assert total == pytest.approx(plain.total.item() + 0.3 * metrics[0, 0].item(), rel=1e-5)
    for name, gradient in whole.items():
        assert torch.allclose(by_row[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max()), name
    assert whole["model.layers.0.mlp.gate.weight"].abs().max() > 0


def test_arithmetic_counts_the_experts_that_a_token_takes(make_ref):
    ref = make_ref("qwen3_moe")
    task = SFT(pretrained=str(ref.folder))
    task.network = ref.net
    sizes = {name: parameter.numel() for name, parameter in ref.torch.named_parameters()}
    active = sum(size // 2 if ".experts." in name else size for name, size in sizes.items())  # two of four
    for_step = 6 * active - 4 * sizes["model.embed_tokens.weight"]
    assert task.flops_per_token(ref.params, {}) == training_flops(ref.torch) == for_step
    assert widths_of(ref.config).wide == 2 * 12


def test_balance_is_asked_by_one_key_alone(make_ref, capsys):
    folder = str(make_ref("mixtral").folder)
    for field, value in (("output_router_logits", True), ("router_aux_loss_coef", 0.02)):
        for task in (SFT, TorchSFT):
            with pytest.raises(UserError, match=f"{field} is {value}, which asks.*model.balance_loss"):
                task(pretrained=folder, config_overrides={field: value})
    with pytest.raises(UserError, match="model.balance_loss is 0.1, but llama has no experts"):
        check_balance(make_ref("llama").config, 0.1, False)
    check_balance(load_config(folder, {"output_router_logits": True}), 0.0, True)
    assert "It is off." in capsys.readouterr().out
    note_quantized(make_ref("mixtral").config, "nf4")
    note_quantized(make_ref("llama").config, "nf4")
    assert capsys.readouterr().out.count("experts are not stored in nf4") == 1
