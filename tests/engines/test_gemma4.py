"""A checkpoint of Gemma 4 with images and experts: the run of its text on both engines, and what it leaves."""

import csv

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmmods.cli import main
from lmmods.core.experts import METRICS
from tests.image_models import save_image_model

LOADS = tuple(f"train/{name}" for name in METRICS)


@pytest.mark.slow
def test_both_engines_train_and_save_the_text(recipe, tmp_path, tokenizer_folder):
    """In full, its per-layer embeddings and experts included; each layer's constant is kept. New tokens are added.

    By gradient descent: AdamW turns the rounding of small gradients into steps of full size.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    save_image_model("gemma4", tmp_path / "base", len(tokenizer) - 3)
    tokenizer.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    scalars = {name: torch.tensor([0.6 + 0.1 * place]) for place, name in enumerate(
        name for name in sorted(weights) if name.endswith("layer_scalar"))}
    # Softer attention: with random queries of full length, float32 has gradients of three digits.
    softer = {name: value / 8 for name, value in weights.items() if name.endswith("q_norm.weight")}
    save_file(weights | scalars | softer, file, {"format": "pt"})
    found_metrics = {}
    for engine in ("torch", "jax"):
        run = tmp_path / engine
        assert main(["fit", *recipe(engine=engine, trainer__max_steps=2, trainer__limit_val_batches=0,
                                    model__init_args__optimizer={"name": "sgd", "lr": 0.001},
                                    trainer__default_root_dir=str(run), model__init_args__pretrained=str(file.parent),
                                    model__init_args__quantize=None, model__init_args__lora=None)]) == 0
        with (run / "metrics.csv").open() as metrics:
            rows = [row for row in csv.DictReader(metrics) if row["train/loss"]]
        found_metrics[engine] = [[float(row[name]) for name in ("train/loss", *LOADS)] for row in rows]
        model, found = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
        assert not any(found.values()) and type(model).__name__ == "Gemma4ForCausalLM"
        kept = {name: value for name, value in model.named_buffers() if name.endswith("layer_scalar")}
        assert [value.item() for _, value in sorted(kept.items())] == [value.item() for value in scalars.values()]
    assert len(found_metrics["torch"]) == 2 and found_metrics["torch"][0][1] > 1.99
    np.testing.assert_allclose(found_metrics["jax"], found_metrics["torch"], rtol=1e-5)
