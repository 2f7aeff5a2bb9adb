"""Distribution of tokens over experts: load and balance against transformers, row by row, on both engines."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_reference import labels_of
from transformers import CONFIG_MAPPING
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from jax_engine.distributed.loss import LossSums
from jax_engine.tasks.causal_task import add_load
from jax_engine.tasks.sft import SFT
from lmmods.core.errors import UserError
from lmmods.core.experts import METRICS, Mixture, check_balance, mixture_of, note_quantized
from lmmods.core.hf_config import load_config
from lmmods.core.memory import widths_of
from lmmods.torch_engine.nn import experts as on_torch
from lmmods.torch_engine.nn import loss as torch_losses
from lmmods.torch_engine.nn.building import enable_checkpointing
from lmmods.torch_engine.nn.lm_head import LMHead, causal_loss
from lmmods.torch_engine.nn.summary import training_flops
from lmmods.torch_engine.tasks.sft import SFT as TorchSFT


def test_padding_affects_neither_tokens_nor_load(make_ref):
    ref = make_ref("mixtral")
    batch = ref.batch()
    real = batch["attention_mask"] > 0
    run = jax.jit(ref.net.hidden_and_load)
    hidden, load = run(ref.params, batch)
    other_hidden, other_load = run(ref.params, batch | {"input_ids": np.where(real, batch["input_ids"], 7)})
    assert np.array_equal(np.asarray(hidden)[real], np.asarray(other_hidden)[real])
    assert all(np.array_equal(a, b) for a, b in zip(load, other_load, strict=True))
    assert np.array_equal(load.counts.sum(-1), 2 * real.sum(1)[None].repeat(2, 0))
    packed = {"input_ids": batch["input_ids"], "segment_ids": real.astype(int)}
    assert np.array_equal(run(ref.params, packed)[1].num_tokens[0], real.sum(1))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", pytest.param("gemma4_text", marks=pytest.mark.slow)])
def test_balance_and_load_of_each_row_equal_transformers(make_ref, name):
    """Compare both engines with transformers' function for one row and layer, including gradients."""
    ref = make_ref(name)
    batch, coefficient = ref.batch(), 0.3
    real, weights = batch["attention_mask"], np.array([5.0, 0.0, 3.5, 7.0], np.float32)
    inputs = {key: torch.tensor(value) for key, value in batch.items()}
    ref.torch.zero_grad()
    outputs = ref.torch(**inputs, output_router_logits=True)
    probabilities = on_torch.router_probabilities(ref.torch, outputs)
    # Gemma 4 returns probabilities instead.
    logits = [layer.log() for layer in outputs.router_logits] if name == "gemma4_text" else outputs.router_logits
    num, by_layer = logits[0].shape[-1], [layer.view(*real.shape, -1) for layer in logits]
    expected = sum(weight * sum(load_balancing_loss_func((layer[row],), num, 2, inputs["attention_mask"][row:row + 1])
                                for layer in by_layer) / len(by_layer) for row, weight in enumerate(weights))
    (coefficient * expected).backward(retain_graph=True)
    expected_grads = {key: parameter.grad.clone() for key, parameter in ref.torch.named_parameters()
                      if parameter.grad is not None}
    indices = [layer.topk(2, -1).indices.numpy() for layer in by_layer]
    counts = np.array([[np.bincount(layer[row][real[row] > 0].ravel(), minlength=num) for row in range(4)]
                       for layer in indices]) / real.sum(1)[:, None] * num / 2
    values = [expected.item(), *(counts.max(-1).mean(0) @ weights, counts.min(-1).mean(0) @ weights)]

    ref.torch.zero_grad()
    zero = torch.zeros(())
    sums = on_torch.add_load(torch_losses.LossSums(zero, zero), probabilities, Mixture(num, 2),
                             inputs["attention_mask"] > 0, torch.tensor(weights), coefficient)
    sums.total.backward()
    assert np.allclose(sums.metrics.numpy(), np.stack([values, [weights.sum()] * 3], 1), rtol=1e-5)
    for key, gradient in expected_grads.items():
        assert torch.allclose(ref.torch.get_parameter(key).grad, gradient, rtol=1e-4, atol=1e-6), key

    def balance(params):
        _, load = ref.net.hidden_and_load(params, batch, True)
        losses_of_rows = add_load(LossSums(jnp.zeros(()), jnp.zeros(())), load, jnp.asarray(weights), coefficient)
        return losses_of_rows.total, losses_of_rows.metrics

    (total, metrics), grads = jax.jit(jax.value_and_grad(balance, has_aux=True))(ref.params)
    assert np.allclose(total, coefficient * values[0], rtol=1e-5) and tuple(metrics) == METRICS
    assert np.allclose([metrics[name] for name in METRICS], sums.metrics, rtol=1e-5)
    named, largest = ref.net.to_torch(grads), max(float(gradient.abs().max()) for gradient in expected_grads.values())
    for key, gradient in expected_grads.items():
        assert np.abs(named[key] - gradient.numpy()).max() <= 1e-4 * max(gradient.abs().max(), 1e-3 * largest), key


@pytest.mark.parametrize(("name", "checkpointing"), [
    ("qwen3_moe", False), ("qwen3_moe", True), ("gemma4_text", True)])
def test_losses_of_rows_add_up_on_torch_also_with_gradient_checkpointing(make_ref, name, checkpointing):
    """Loss and gradient with the balance loss are the same for four rows at once and one by one."""
    ref = make_ref(name)
    model = copy.deepcopy(ref.torch).train()
    mixture = on_torch.routed_mixture(model)
    if checkpointing:
        enable_checkpointing(model)
    batch = {key: torch.tensor(value) for key, value in ref.batch().items()}
    batch["labels"] = torch.tensor(labels_of(ref.batch()))
    head = LMHead(model)

    def gradients(chunks):
        model.zero_grad()
        sums = [causal_loss(model, head, chunk, mixture=mixture, balance_loss=0.3) for chunk in chunks]
        sum(part.total for part in sums).backward()
        grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        return sum(part.total.item() for part in sums), sum(part.metrics for part in sums), grads

    total, metrics, whole = gradients([batch])
    sum_of_rows, row_metrics, by_row = gradients([
        {key: value[row:row + 1] for key, value in batch.items()} for row in range(4)])
    assert sum_of_rows == pytest.approx(total, rel=1e-5) and torch.allclose(row_metrics, metrics, rtol=1e-4)
    plain = causal_loss(model, head, batch)
    assert total == pytest.approx(plain.total.item() + 0.3 * metrics[0, 0].item(), rel=1e-5)
    for name, gradient in whole.items():
        assert torch.allclose(by_row[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max()), name
    routers = [gradient for key, gradient in whole.items() if key.endswith(("mlp.gate.weight", "router.proj.weight"))]
    assert routers and all(gradient.abs().max() > 0 for gradient in routers)


def test_flops_count_only_the_experts_that_a_token_uses(make_ref):
    ref = make_ref("qwen3_moe")
    task = SFT(pretrained=str(ref.folder))
    task.network = ref.net
    sizes = {name: parameter.numel() for name, parameter in ref.torch.named_parameters()}
    active = sum(size // 2 if ".experts." in name else size for name, size in sizes.items())  # two of four
    expected = 6 * active - 6 * sizes["model.embed_tokens.weight"]
    assert task.flops_per_token(ref.params, {}) == training_flops(ref.torch) == expected
    assert widths_of(ref.config).wide == 2 * 12


def test_experts_next_to_an_mlp_add_to_its_sizes(make_ref):
    """Dense Gemma 4 models may also have numbers of experts in their configuration."""
    config = make_ref("gemma4_text").config
    assert mixture_of(config) == Mixture(5, 2, has_mlp=True) and widths_of(config).wide == 2 * 12 + 20
    dense = CONFIG_MAPPING["gemma4_text"](num_experts=5, top_k_experts=2, moe_intermediate_size=12)
    assert mixture_of(dense) is None and widths_of(dense).wide == dense.intermediate_size


def test_only_balance_loss_switches_the_balance_on(make_ref, capsys):
    folder = str(make_ref("mixtral").folder)
    for field, value in (("output_router_logits", True), ("router_aux_loss_coef", 0.02)):
        for task in (SFT, TorchSFT):
            with pytest.raises(UserError, match=f"{field} is {value}, which sets.*model.balance_loss"):
                task(pretrained=folder, config_overrides={field: value})
    with pytest.raises(UserError, match="model.balance_loss is 0.1, but llama has no experts"):
        check_balance(make_ref("llama").config, 0.1, False)
    check_balance(load_config(folder, {"output_router_logits": True}), 0.0, True)
    assert "ignored here" in capsys.readouterr().out
    for name, kind, in_files in (("mixtral", "nf4", False), ("llama", "int8", False), ("mixtral", None, False),
                                 ("mixtral", "int8", False), ("mixtral", "nf4", True)):
        note_quantized(make_ref(name).config, kind, in_files)
    assert capsys.readouterr().out == (
        "model.quantize: experts are not stored in int8: set nf4 or fp4 to quantise them.\n"
        "model.pretrained: experts are not stored in nf4: the files have them unquantised.\n")
