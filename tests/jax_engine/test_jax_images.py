"""Training on images on JAX: logits, losses, gradients and generation against transformers, and runs against torch."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_reference import our_loss
from transformers import AutoModelForImageTextToText

from jax_engine.models import hub, loading
from lmmods.core.hf_config import load_config
from tests.closeness import assert_as_close, gradients, in_both
from tests.torch_engine.test_images import ROWS, accepted, make_batch, processed
from tests.vision_models import save_vision_model

FAMILIES = ("idefics3", "smolvlm", "gemma3")
OF = {"smolvlm": "idefics3"}  # of one architecture


@pytest.fixture
def model_folder(shared):
    def make(family):
        folder = shared(f"vision_{OF.get(family, family)}", lambda folder: save_vision_model(OF.get(family, family), folder))
        if family not in OF:
            return folder

        def rename(renamed):
            shutil.copytree(folder, renamed, dirs_exist_ok=True)
            config = json.loads((folder / "config.json").read_text())
            config |= {"model_type": family, "architectures": ["SmolVLMForConditionalGeneration"]}
            config["vision_config"]["model_type"] = f"{family}_vision"
            (renamed / "config.json").write_text(json.dumps(config))

        return shared(f"vision_{family}", rename)

    return make


def on_jax(folder):
    network = hub.network(load_config(str(folder), all_parts=True), "causal")
    return network, loading.load(network, str(folder))


def pad_images(batch, more):
    """Return a batch with further rows of blank images."""
    padded = {}
    for name, x in batch.items():
        x = np.asarray(x)
        shape = [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)] if name.startswith("per_row/") and x.ndim > 1 else 0
        padded[name] = np.pad(x, shape) if shape else x
    return padded


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_all_gradients_are_those_of_transformers(family, model_folder, tmp_path):
    """Of every parameter, also with blank images that only pad the batch."""
    folder = model_folder(family)
    data, batch = make_batch(model_folder(OF.get(family, family)), tmp_path)
    labels = batch["labels"].numpy()
    inputs = processed(OF.get(family, family), tmp_path, ROWS[:6])
    length = inputs["input_ids"].shape[1]
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    real = inputs["attention_mask"] > 0

    def run_torch(model):
        given = {name: value.to(next(model.parameters()).dtype) if value.is_floating_point() else value
                 for name, value in inputs.items()}
        logits = model(**accepted(model, given)).logits
        targets = torch.tensor(labels[:, 1:length])
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        grads = gradients(model, loss)
        return logits[real], loss, {name: grads.get(name, torch.zeros(param.shape))
                                    for name, param in model.named_parameters()}

    expected, exact = in_both(run_torch, model)
    assert list(exact[2]) == [name for name, _ in model.named_parameters()]
    network, params = on_jax(folder)
    for more in (0, 2):
        padded = pad_images(batch, more)
        (loss, logits), grads = jax.jit(jax.value_and_grad(
            lambda params, batch=padded: our_loss(network, params, batch, labels), has_aux=True))(params)
        named = network.to_torch(grads)
        assert list(named) == list(exact[2])
        actual = (np.asarray(logits)[:, :length][real.numpy()], loss, named)
        for compared in zip(actual, expected, exact, strict=True):
            assert_as_close(*compared, terms=1024)
    assert all(grad.any() for name, grad in exact[2].items() if "vision" in name and "k_proj.bias" not in name)
