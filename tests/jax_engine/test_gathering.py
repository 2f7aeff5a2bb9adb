"""Arrays that a step on a mesh gathers, read from the compiled program, and its results compared with one device."""

import math
import re
from functools import cache

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from jax_engine.distributed.interface import DATA_AXES
from jax_engine.distributed.loss import shift_labels, token_loss
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.tree import flatten, merge, unflatten
from jax_engine.models import hub
from jax_engine.models import lora as adapters
from jax_engine.models.quant import Quantized, quantize
from lmmods.core.hf_config import load_config
from lmmods.core.settings import LoRA
from tests.closeness import assert_as_close, gradients, in_both

V, WIDTH, INNER, LAYERS, ROWS, T = 96, 128, 256, 2, 8, 6
LLAMA = {"model_type": "llama", "vocab_size": V, "hidden_size": WIDTH, "intermediate_size": INNER,
         "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}


def find_collectives(compiled, kind: str) -> list[tuple[str, int]]:
    """Return dtype and size of the results of one kind of collective in a compiled program; loops count once."""
    lines = re.findall(rf"= (.*?) {kind}\(", compiled.as_text())
    return [(dtype, math.prod(map(int, filter(None, shape.split(",")))))
            for line in lines for dtype, shape in re.findall(r"\b([a-z]+\d+)\[([\d,]*)\]", line)]


@cache
def make_quantised_llama(kind: str, double: bool):
    """Return the network, its trainable parameters and its quantised ones; adapters do not start at zero."""
    bare, lora = (hub.network(load_config(LLAMA), "causal", lora=lora) for lora in (None, LoRA(rank=2)))
    params = flatten(adapters.add_adapter(lora, bare.init(0), 0))
    random = np.random.default_rng(0)
    for path, leaf in params.items():
        if path[-1] == "lora_B":
            params[path] = random.normal(0, 0.02, leaf.shape).astype(np.float32)
        if path[-1] == "weight" and ".".join(path[:-1]) in bare.linears():
            params[path] = jax.tree.map(lambda *layers: np.stack(layers),
                                        *(quantize(layer, kind, double) for layer in 4 * leaf))
    params = unflatten(params)
    return lora, *lora.split(params)


def make_batch():
    random = np.random.default_rng(1)
    ids = random.integers(0, V, (ROWS, T)).astype(np.int32)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids),
            "labels": np.where(random.random((ROWS, T)) < 0.6, ids, -100).astype(np.int32)}


def compile_gradient(network):
    """Return a compiled function of (trainable, frozen, rows) that returns the loss and its gradient."""
    def loss(trainable, frozen, rows):
        params = merge(trainable, frozen)
        return token_loss(network.hidden(params, rows), shift_labels(rows["labels"]),
                          lambda x: network.logits(params, x), network.config.vocab_size).total

    return jax.jit(jax.value_and_grad(loss))


def run_on_mesh(mesh: ShardedMesh, step, trainable, frozen):
    """Return the compiled step and its results."""
    rows = {name: jax.device_put(x, jax.NamedSharding(mesh.mesh, jax.P(DATA_AXES))) for name, x in make_batch().items()}
    args = (mesh.put_state(trainable), mesh.put_state(frozen), rows)
    with jax.set_mesh(mesh.mesh):
        compiled = step.lower(*args).compile()
        return compiled, compiled(*args)


def compute_transformers_loss(model):
    """Return the loss and its gradients by torch's names."""
    rows = {name: torch.tensor(x).long() for name, x in make_batch().items()}
    labels = rows.pop("labels")
    loss = F.cross_entropy(model(**rows).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss, gradients(model, loss)


@pytest.mark.parametrize(("kind", "double", "sizes"), [
    ("nf4", True, {"fsdp": 4, "tensor": 2}), pytest.param("nf4", False, {}, marks=pytest.mark.slow),
    pytest.param("int8", True, {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow)])
def test_quantised_weights_are_gathered_as_codes(kind, double, sizes):
    network, trainable, frozen = make_quantised_llama(kind, double)
    step = compile_gradient(network)
    expected = step(trainable, frozen, make_batch())
    mesh = ShardedMesh(**sizes)
    compiled, on_mesh = run_on_mesh(mesh, step, trainable, frozen)
    for actual, reference in zip(on_mesh, expected, strict=True):
        actual, reference = jax.tree.leaves(actual), jax.tree.leaves(reference)
        assert_as_close(actual, reference, reference, terms=4096)
    gathers, tensor = find_collectives(compiled, "all-gather"), mesh.mesh.shape["tensor"]
    matrices = [leaf for leaf in flatten(frozen["layers"]).values() if isinstance(leaf, Quantized)]
    codes = sum(leaf.size for matrix in matrices for leaf in jax.tree.leaves(matrix) if leaf.itemsize == 1) // LAYERS
    assert sum(size for dtype, size in gathers if dtype in ("u8", "s8")) == 2 * codes // tensor  # forwards, backwards
    whole = {matrix.size // LAYERS // tensor for matrix in matrices}  # sizes that no other array has
    assert not [size for dtype, size in gathers if dtype in ("f32", "bf16") and size in whole]
    # Adapters' outputs have the layout of the layer's output: no activations are resharded.
    largest = max(leaf.size for leaf in jax.tree.leaves(trainable["layers"])) // LAYERS
    assert all(size <= largest for _, size in find_collectives(compiled, "collective-permute"))


@pytest.mark.parametrize(("sizes", "changes"), [
    ({"data": 2, "fsdp": 4}, {"tie_word_embeddings": True}),
    pytest.param({"fsdp": 4, "tensor": 2}, {}, marks=pytest.mark.slow),
    pytest.param({"fsdp": 2, "sequence": 2, "tensor": 2}, {}, marks=pytest.mark.slow)])
def test_no_device_stores_a_whole_embedding_or_output_table(sizes, changes):
    """Nor their gradients; the results equal those of transformers."""
    wide = 2048
    config = load_config(LLAMA | {"vocab_size": wide, "num_hidden_layers": 1} | changes)
    network = hub.network(config, "causal")
    params = jax.tree.map(lambda leaf: 4 * leaf, network.init(0))
    compiled, (loss, grads) = run_on_mesh(ShardedMesh(**sizes), compile_gradient(network), params, {})
    model = LlamaForCausalLM(LlamaConfig(**config.to_dict()))
    model.load_state_dict({name: torch.tensor(x) for name, x in network.to_torch(params).items()}, strict=False)
    expected, exact = in_both(compute_transformers_loss, model)
    for triple in zip((loss, network.to_torch(grads)), expected, exact, strict=True):
        assert_as_close(*triple, terms=1024)
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"\bf32\[([\d,]+)\]", compiled.as_text())}
    assert max(map(math.prod, shapes)) < wide * WIDTH
