"""Runs with frozen parameters and learning rates per layer, on both engines."""

import csv
import re

import pytest
import torch
from safetensors.torch import load_file

from lmmods.cli import main
from lmmods.runs.folder import RunFolder

MODEL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
# Train two of four layers without their norms, and the output layer, which is tied to the embedding.
CHANGES = {"model__init_args__quantize": None, "model__init_args__lora": None, "data__init_args__val_size": 0,
           "trainer__limit_val_batches": 0, "trainer__max_steps": 4, "trainer__gradient_clip_val": 0.5,
           "model__init_args__trainable_parameters": [r"layers\.[02]\.", "lm_head"],
           "model__init_args__frozen_parameters": ["norm"],
           "model__init_args__pretrained": None, "model__init_args__config": MODEL,
           "model__init_args__optimizer": {"lr": 1e-3, "weight_decay": 0.1, "layer_decay": 0.7}}


def read_losses(folder):
    with open(folder.metrics_csv, newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


@pytest.mark.slow
def test_engines_train_the_same_parameters_and_resume_each_others_runs(recipe, llama_folder, tmp_path, capsys):
    runs = {}
    for engine, other in (("torch", "jax"), ("jax", "torch")):
        root = tmp_path / engine
        arguments = {**CHANGES, "data__init_args__tokenizer": str(llama_folder), "trainer__default_root_dir": str(root)}
        assert main(["fit", *recipe(**arguments, engine=engine), "--stop_at", "2"]) == 0
        assert main(["fit", *recipe(**arguments, engine=other), "--ckpt_path", "last"]) == 0
        runs[engine] = RunFolder(root)
    assert read_losses(runs["torch"]) == pytest.approx(read_losses(runs["jax"]), rel=1e-5)
    exported = [load_file(runs[engine].model / "model.safetensors") for engine in runs]
    # Both start from the same random weights, so frozen parameters stay equal to the bit.
    frozen = {name for name, weight in exported[0].items() if "norm" in name or re.search(r"layers\.[13]\.", name)}
    assert {name for name in exported[0] if torch.equal(exported[0][name], exported[1][name])} == frozen
    for folder in runs.values():
        saved = load_file(folder.checkpoint("step=2") / "model.safetensors")
        assert {name.removeprefix("model.") for name in saved} == exported[0].keys() - frozen
    total, trained = (sum(weight.numel() for name, weight in exported[0].items() if name not in without)
                      for without in ((), frozen))
    assert capsys.readouterr().out.count(f"Parameters: {total:,}, of which {trained:,} train") == 4
