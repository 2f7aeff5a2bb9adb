"""A Gemma 4 checkpoint with images and experts: both engines train and export its text model."""

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
def test_both_engines_train_and_save_the_text_model(recipe, tmp_path, tokenizer_folder):
    """Full fine-tuning with per-layer embeddings, experts and new tokens; the layer scalars must stay.

    With SGD, as AdamW turns rounding errors of small gradients into full steps.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    save_image_model("gemma4", tmp_path / "base", len(tokenizer) - 3)
    tokenizer.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    scalars = {name: torch.tensor([0.6 + 0.1 * index]) for index, name in enumerate(
        name for name in sorted(weights) if name.endswith("layer_scalar"))}
    # Smaller query norms: with random queries, float32 gradients would have only three correct digits.
    scaled_norms = {name: value / 8 for name, value in weights.items() if name.endswith("q_norm.weight")}
    save_file(weights | scalars | scaled_norms, file, {"format": "pt"})
    metrics_by_engine = {}
    for engine in ("torch", "jax"):
        run = tmp_path / engine
        assert main(["fit", *recipe(engine=engine, trainer__max_steps=2, trainer__limit_val_batches=0,
                                    model__init_args__optimizer={"name": "sgd", "lr": 0.001},
                                    trainer__default_root_dir=str(run), model__init_args__pretrained=str(file.parent),
                                    model__init_args__quantize=None, model__init_args__lora=None)]) == 0
        with (run / "metrics.csv").open() as metrics:
            rows = [row for row in csv.DictReader(metrics) if row["train/loss"]]
        metrics_by_engine[engine] = [[float(row[name]) for name in ("train/loss", *LOADS)] for row in rows]
        model, loading_info = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
        assert not any(loading_info.values()) and type(model).__name__ == "Gemma4ForCausalLM"
        saved = {name: value for name, value in model.named_buffers() if name.endswith("layer_scalar")}
        assert [value.item() for _, value in sorted(saved.items())] == [value.item() for value in scalars.values()]
    assert len(metrics_by_engine["torch"]) == 2 and metrics_by_engine["torch"][0][1] > 1.99
    np.testing.assert_allclose(metrics_by_engine["jax"], metrics_by_engine["torch"], rtol=1e-5)
