"""generation_config.json of exported models: transformers reads the same settings from it, without warnings."""

import json
import logging

import pytest
from huggingface_hub import constants
from transformers import GenerationConfig

from lmmods.core.generation_config import GENERATION_CONFIG, exported_generation
from lmmods.core.settings import Generation
from lmmods.runs.model_card import base_generation

QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05,
        "bos_token_id": 11, "eos_token_id": [12, 11], "pad_token_id": 11, "transformers_version": "4.37.0"}
LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "bos_token_id": 1,
         "eos_token_id": [2, 8, 9]}
CARELESS = {"temperature": 0.9, "top_p": 0.6, "length_penalty": 2.0, "_from_model_config": True, "eos_token_id": 2}
ENDS = {"bos_token_id": 1, "pad_token_id": 0}
CASES = {
    "no settings": ({}, {}, {"max_new_tokens": 256, "eos_token_id": [2, 7]}),
    "settings of the base": ({}, QWEN, {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
                                        "repetition_penalty": 1.05, "eos_token_id": [2, 7, 12, 11],
                                        "max_new_tokens": 256}),
    "max_length of the base": ({}, LLAMA, {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096,
                                           "eos_token_id": [2, 7, 8, 9]}),
    "the recipe overrides the base": (
        {"max_new_tokens": 32, "do_sample": True, "temperature": 0.5, "no_repeat_ngram_size": 3}, LLAMA,
        {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 32, "no_repeat_ngram_size": 3,
         "eos_token_id": [2, 7, 8, 9]}),
    "beams do not sample": (
        {"num_beams": 4, "length_penalty": 0.5}, QWEN,
        {"num_beams": 4, "length_penalty": 0.5, "do_sample": False, "repetition_penalty": 1.05,
         "eos_token_id": [2, 7, 12, 11], "max_new_tokens": 256}),
    "options removed from transformers": (
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, {},
        {"num_beams": 4, "do_sample": False, "eos_token_id": [2, 7], "max_new_tokens": 256}),
    "contrastive search": (
        {"penalty_alpha": 0.6, "top_k": 4}, QWEN,
        {"do_sample": False, "repetition_penalty": 1.05, "eos_token_id": [2, 7, 12, 11], "max_new_tokens": 256}),
    "unused options": ({"top_k": 5, "use_cache": False}, CARELESS, {"use_cache": False, "eos_token_id": [2, 7],
                                                                    "max_new_tokens": 256}),
}


@pytest.fixture
def log_records(monkeypatch):
    """Return the log records of transformers."""
    records = []
    monkeypatch.setattr(logging.getLogger("transformers.generation.configuration_utils"), "handle", records.append)
    return records


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_the_recipe_over_the_base(name, tmp_path, log_records, recwarn):
    settings, base, expected = CASES[name]
    content = exported_generation(Generation(**settings), base, [2, 7], 1, 0)
    assert content == expected | ENDS
    (tmp_path / GENERATION_CONFIG).write_text(json.dumps(content))
    config = GenerationConfig.from_pretrained(tmp_path)
    config.validate(strict=True)
    assert not log_records and not recwarn.list
    assert {key: getattr(config, key) for key in expected} == expected


def test_the_defaults_of_recipes_are_those_of_transformers():
    """So a missing key means the same. The length is always written."""
    expected = GenerationConfig._get_default_generation_params()
    defaults = {key: value for key, value in vars(Generation()).items() if key != "max_new_tokens"}
    assert {key: expected.get(key) for key in defaults} == defaults


def test_special_tokens_of_the_base_stay_if_the_tokenizer_has_none():
    assert exported_generation(Generation(), QWEN, [12], None, 4)["bos_token_id"] == 11


def test_generation_settings_of_the_base_are_read_from_folder_or_hub_cache(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "bos_token_id": 6, "temperature": 0.1}')
    assert base_generation(str(tmp_path), None) == {"eos_token_id": 5}
    (tmp_path / GENERATION_CONFIG).write_text('{"top_k": 3}')
    assert base_generation(str(tmp_path), None) == {"top_k": 3}
    (tmp_path / GENERATION_CONFIG).write_text("{")
    assert base_generation(str(tmp_path), None) == {}
    assert "cannot be read" in capsys.readouterr().out
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--someone--chat" / "snapshots" / "a1"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("a1")
    (snapshot / GENERATION_CONFIG).write_text('{"top_k": 4}')
    assert base_generation("someone/chat", None) == {"top_k": 4}
    assert base_generation("someone/other", None) == base_generation(None, None) == {}
