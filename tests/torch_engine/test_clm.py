"""Causal language modelling from random weights."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmmods.cli import main

LLAMA = {"model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "n_head": 4, "n_positions": 64}


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(f"the quick brown fox jumps over {n} lazy dogs" for n in range(60)))
    return path


@pytest.fixture
def clm(recipe, texts, tokenizer_folder):
    def write(**changes):
        return recipe(**{
            "model": {"class_path": "CLM", "init_args": {"config": LLAMA, "optimizer": {"lr": 0.01}}},
            "data": {"class_path": "CLMData", "init_args": {
                "tokenizer": str(tokenizer_folder), "source": str(texts), "documents": "paragraph", "max_length": 32,
                "batch_size": 4, "val_size": 0.1}},
            "trainer__max_steps": 30, "trainer__val_check_interval": 15, **changes})

    return write


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_model_trained_from_scratch_learns_and_loads(clm, tmp_path, config):
    assert main(["fit", *clm(model__init_args__config=config, model__init_args__save_dtype="bfloat16")]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["val/loss"] < 3.5 and metrics["train/loss"] < 3.5  # ln(320) = 5.8
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert next(model.parameters()).dtype == torch.bfloat16
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "run" / "model"))
    if config is LLAMA:
        assert model.config.head_dim == 12
    else:
        assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()


@pytest.mark.parametrize(("changes", "message"), [
    ({"model__init_args__config": {**LLAMA, "model_type": "lama"}}, "model_type is 'lama'"),
    ({"model__init_args__config": {**LLAMA, "hidden_sice": 3}}, "no field 'hidden_sice'"),
    ({"model__init_args__config": None}, "set one of them"),
    ({"model__init_args__pretrained": "x"}, "set one of them"),
])
def test_invalid_model_configs_are_rejected_by_name(clm, capsys, changes, message):
    assert main(["fit", *clm(**changes)]) == 2
    assert message in capsys.readouterr().err


def test_a_config_comes_from_a_folder_with_overrides(clm, llama_folder, tmp_path):
    assert main(["fit", *clm(model__init_args__config=str(llama_folder), trainer__max_steps=1,
                             model__init_args__config_overrides={"num_hidden_layers": 1})]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config.num_hidden_layers == 1
