"""4-bit experts on JAX against the torch engine, which tests/torch_engine/test_packed_experts.py checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import labels_of, our_loss

from jax_engine.distributed.tree import flatten, merge, unflatten
from jax_engine.models import building, hub, loading
from jax_engine.models.lora import add_adapter, save_adapter
from jax_engine.models.quant import Quantized
from lmmods.commands.exported_model import copy_dequantized
from lmmods.core.settings import LoRA
from lmmods.torch_engine.nn.loading import load_pretrained
from lmmods.torch_engine.nn.lora import continue_adapter
from tests.closeness import assert_as_close, gradients, in_both

BOTH = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize(("name", "fast"), [
    ("gpt_oss", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("mixtral", "gemma4_text"))])
def test_an_adapter_on_4_bit_experts_loads_and_trains_as_on_torch(make_ref, name, fast, tmp_path):
    """Compare logits, loss and gradients of adapters on attention and experts; no matrix is saved for the backward."""
    ref = make_ref(name)
    # With this rank, no adapter has the shape of a matrix.
    net = hub.network(ref.net.config, "causal", lora=LoRA(rank=3, target_parameters=BOTH), fast_kernels=fast)
    random, base = np.random.default_rng(0), loading.load(ref.net, str(ref.folder), quantize="nf4")
    params = unflatten({path: random.normal(size=leaf.shape).astype(np.float32) / 4 if "lora" in path[-1] else leaf
                        for path, leaf in flatten(add_adapter(net, base, 0)).items()})
    expected = building.outline(net, "float32", "32-true", "nf4")
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), expected) == jax.tree.map(
        lambda leaf: (np.shape(leaf), leaf.dtype), params)
    save_adapter(net, params, tmp_path)
    codes, plain = (load_pretrained(transformers.AutoModelForCausalLM, str(ref.folder), quantize=kind, frozen=True)
                    for kind in ("nf4", None))
    copy_dequantized(codes, plain)
    batch, labels = ref.batch(), labels_of(ref.batch())
    real = batch["attention_mask"] > 0

    def run_torch(model):
        logits = model(**{key: torch.tensor(value) for key, value in batch.items()}).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(labels[:, 1:]).flatten(),
                                                 reduction="sum")
        return logits[torch.tensor(real)], loss, gradients(model, loss)

    reference = run_torch(continue_adapter(codes, str(tmp_path), torch.float32))
    _, exact = in_both(run_torch, continue_adapter(plain, str(tmp_path), torch.float32))
    trainable, frozen = net.split(params)

    def run(trainable):
        return our_loss(net, merge(trainable, frozen), batch, labels)

    pullback = jax.eval_shape(lambda trainable: jax.vjp(run, trainable)[1], trainable)
    stored = {leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.dtype == jnp.float32}
    assert stored and not {leaf.shape for leaf in flatten(frozen).values() if isinstance(leaf, Quantized)} & stored
    (value, logits), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(trainable)
    assert any(".experts." in key for key in exact[2])
    for actual in zip((logits[real], value, net.to_torch(grads)), reference, exact, strict=True):
        assert_as_close(*actual, terms=1024)  # layers forward and backward
