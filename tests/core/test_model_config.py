"""A model's configuration with changes of a recipe, and errors for fields that transformers rejects."""

import json

import pytest

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.core.hf_config import known_fields, load_config, parts_left_out, saved_quantization, text_name
from tests.image_models import KINDS


@pytest.mark.parametrize(("fields", "message"), [
    ({"model_type": "gpt2", "n_head": "abc"}, "GPT2Config.*n_head.*expected int, got str"),
    ({"model_type": "bert", "max_position_embeddings": {"a": 1}}, "max_position_embeddings.*expected int, got dict"),
    ({"model_type": "llama", "hidden_size": -5}, "hidden size .-5. is not a multiple"),
    ({"model_type": "llama", "num_attention_heads": 0}, "LlamaConfig does not accept these fields"),
    ({"model_type": "llama", "tie_word_embeddings": 1.5}, "tie_word_embeddings.*expected bool"),
    ({"model_type": ["llama"]}, "model_type is ..llama.., which transformers does not support"),
    ({"model_type": "llama", 7: 3}, "LlamaConfig has no field 7"),
    ({"hidden_size": 64}, "model_type is None"),
])
def test_invalid_configuration_fields_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        load_config(fields)


@pytest.mark.parametrize(("overrides", "message"), [
    ({"hidden_size": "x"}, "model.config_overrides.hidden_size.*expected int, got str"),
    ({"hidden_size": None}, "got NoneType"),
    ({"hiden_size": 1}, "model.config_overrides: LlamaConfig has no field 'hiden_size'. Did you mean hidden_size"),
])
def test_invalid_configuration_overrides_are_named(overrides, message, llama_folder):
    with pytest.raises(UserError, match=message):
        load_config(str(llama_folder), overrides)


# The models of these families read `head_dim`, but their configurations do not declare it.
@pytest.mark.parametrize("model_type", ["granite", "olmo2", "phi3", "qwen2", "qwen3_moe", "smollm3", "starcoder2"])
def test_an_undeclared_field_that_the_model_reads_may_be_set(model_type, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    fields = {"model_type": model_type, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0,
              "bos_token_id": 1, "eos_token_id": 2}
    load_config(fields).save_pretrained(tmp_path)
    for config in (load_config({**fields, "head_dim": 16}), load_config(str(tmp_path), {"head_dim": 16})):
        with torch.device("meta"):
            attention = AutoModelForCausalLM.from_config(config).model.layers[0].self_attn
        assert attention.o_proj.weight.shape == (32, 4 * 16)
    with pytest.raises(UserError, match="has no field 'head_dims'. Did you mean head_dim?"):
        load_config({**fields, "head_dims": 16})


@pytest.mark.parametrize(("fields", "is_read"), [
    ({"model_type": "llama", "classifier_dropout": 0.5}, True),  # read by a shared head
    ({"model_type": "bert", "head_dim": 16}, False), ({"model_type": "gpt2", "head_dim": 16}, False),
    ({"model_type": "bert", "hidden_dropout": 0.5}, False)])
def test_a_field_that_only_other_models_read_is_rejected(fields, is_read):
    if is_read:
        assert load_config(fields).classifier_dropout == 0.5
    else:
        with pytest.raises(UserError, match="has no field"):
            load_config(fields)


@pytest.mark.parametrize(("fields", "rope"), [
    ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 50.0}},
     {"rope_theta": 50.0, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}),
])
def test_rope_settings_of_a_recipe_are_normalised(fields, rope, llama_folder):
    names = ("rope_theta", *rope)
    assert {name: load_config({"model_type": "llama", **fields}).rope_parameters[name] for name in names} == rope
    changed = load_config(str(llama_folder), fields).rope_parameters
    limit = {"original_max_position_embeddings": load_config(str(llama_folder)).max_position_embeddings}
    assert {name: changed[name] for name in names} == rope | (limit if "yarn" in rope.values() else {})


def test_rope_overrides_apply_to_full_attention_layers_only(tmp_path):
    load_config({"model_type": "gemma3_text", "num_hidden_layers": 2}).save_pretrained(tmp_path)
    for overrides, full in (({"rope_theta": 7.0}, {"rope_type": "default", "rope_theta": 7.0}),
                            ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
                             {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0})):
        changed = load_config(str(tmp_path), overrides).rope_parameters
        assert changed["full_attention"] == full
        assert changed["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    override = {"sliding_attention": {"rope_type": "default", "rope_theta": 3.0}}
    assert load_config(str(tmp_path), {"rope_parameters": override}).rope_parameters == {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6}, **override}


@pytest.mark.parametrize(("fields", "message"), [
    ({"rope_parameters": {"rope_type": "yarnn", "factor": 2.0}}, "'yarnn' is not a rope_type. Known: default, dynamic"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "factor"),
])
def test_invalid_rope_settings_are_rejected(fields, message, llama_folder):
    for source, overrides in (({"model_type": "llama", **fields}, None), (str(llama_folder), fields)):
        with pytest.raises(UserError, match=message):
            load_config(source, overrides)
    with pytest.raises(UserError, match="rope_scaling is 4.0, but must be a mapping"):
        load_config(str(llama_folder), {"rope_scaling": 4.0})
    with pytest.raises(UserError, match="BertConfig has no field 'rope_theta'"):
        load_config({"model_type": "bert", "rope_theta": 1.0})


@pytest.mark.parametrize("content", ["", "not json", "[]", "{}", '{"model_type": 3}', '{"model_type": "nothing"}',
                                     '{"model_type": "llama", "hidden_size": "x"}'])
def test_a_damaged_config_json_is_named(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=f"{tmp_path}/config.json cannot be used: ."):
        load_config(str(tmp_path))


def test_fields_missing_in_a_mapping_come_from_the_defaults(llama_folder):
    config = load_config({"model_type": "llama", "hidden_size": 64}, {"num_attention_heads": 2},
                         defaults={"vocab_size": 77, "pad_token_id": None, "hidden_size": 32})
    assert (config.vocab_size, config.hidden_size, config.num_attention_heads, config.head_dim) == (77, 64, 2, 32)
    assert load_config(str(llama_folder), defaults={"vocab_size": 1}).vocab_size > 300
    saved = json.loads((llama_folder / "config.json").read_text())
    assert known_fields(load_config(str(llama_folder)))["max_position_embeddings"] == saved["max_position_embeddings"]


def test_impossible_model_sizes_are_errors(recipe, llama_folder, capfd):
    sizes = {"model_type": "gpt2", "n_embd": -1, "n_head": 1, "n_layer": 1}
    arguments = recipe(model__init_args__pretrained=None, model__init_args__config=sizes,
                       model__init_args__quantize=None, model__init_args__lora=None,
                       data__init_args__tokenizer=str(llama_folder))
    assert main(["fit", *arguments]) == 2
    assert "model.config: no network can be made of these fields: Trying to create tensor" in capfd.readouterr().err


@pytest.mark.parametrize("key", ["mmlu.name", "samples.every_n_steps", "checkpoint.keep_last"])
def test_null_for_a_required_value_is_an_error(recipe, key, capfd):
    assert main(["fit", *recipe(**{key.replace(".", "__"): None})]) == 2
    assert f"{key} is " in (error := capfd.readouterr().err) and "but must be set" in error


def save_image_text_config(model_type, folder, **fields):
    """Save the configuration of an image-text model and return the folder."""
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING[model_type](**KINDS[model_type] | fields).save_pretrained(folder)
    return str(folder)


def test_the_text_part_of_an_image_text_configuration_is_read(tmp_path):
    codes = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    folder = save_image_text_config("qwen3_5", tmp_path, quantization_config=codes,
                                    architectures=["Qwen3_5ForCausalLM"])
    config = load_config(folder, {"num_hidden_layers": 3})
    assert (config.model_type, config.num_hidden_layers) == ("qwen3_5_text", 3)
    assert config.tie_word_embeddings and saved_quantization(config) == "nf4"
    assert parts_left_out(folder) == ["vision"]


@pytest.mark.parametrize(("model_type", "fields"), [
    ("gemma3", {"architectures": ["Gemma3ForSequenceClassification"]}),  # with a classification head
    ("llama", {}), ("qwen3_vl", {})])  # without other parts; without a text-only class
def test_configurations_without_a_text_model_are_read_as_they_are(model_type, fields, tmp_path):
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING[model_type](**fields).save_pretrained(tmp_path)
    assert load_config(str(tmp_path)).model_type == model_type and parts_left_out(str(tmp_path)) == []


@pytest.mark.parametrize(("name", "expected"), [
    ("language_model.model.norm.weight", "model.norm.weight"), ("language_model.lm_head.weight", "lm_head.weight"),
    ("model.language_model.norm.weight", "model.norm.weight"), ("lm_head.weight", "lm_head.weight"),
    ("model.visual.norm.weight", None), ("vision_tower.norm.weight", None), ("mtp.norm.weight", None)])
def test_parameter_names_map_to_those_of_the_text_model(name, expected):
    assert text_name(name) == expected
