"""Networks from configurations, saved folders, and every architecture or field that is not supported."""

import json

import numpy as np
import pytest
import torch
import transformers
from hf_reference import FAMILIES
from safetensors.torch import load_file
from test_jax_families import CHECKS
from tested import PAGE, PAIRS, TESTED, features, table, table_of_page

from jax_engine.models import hub
from lmmods.core.errors import UserError
from lmmods.core.hf_config import load_config


def test_saving_in_another_dtype_rounds_once(make_ref, tmp_path):
    ref = make_ref("gpt2", "causal")
    hub.save(ref.net, ref.params, tmp_path, dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    for key, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(value, ref.torch.get_parameter(key).bfloat16())
    turned = {k: np.asarray(v).T if v.ndim == 2 else np.asarray(v) for k, v in ref.net.to_torch(ref.params).items()}
    hub.write_shards(turned, tmp_path)  # transposed views are not contiguous
    for key, value in load_file(tmp_path / "model.safetensors").items():
        assert np.array_equal(value.numpy(), turned[key])


def test_configurations_load_from_mappings_and_with_overrides(make_ref):
    config = load_config({"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6},
                             {"num_hidden_layers": 1})
    assert config.head_dim == 8 and config.num_hidden_layers == 1
    config = load_config(str(make_ref("llama", "causal").folder), {"attention_dropout": 0.5})
    assert hub.network(config, "causal").arch.attention_dropout == 0.5
    with pytest.raises(UserError, match="no field 'hiden_size'"):
        load_config({"model_type": "llama", "hiden_size": 48})
    with pytest.raises(UserError, match="'lama'.*gpt2, llama"):
        load_config({"model_type": "lama"})


@pytest.mark.parametrize(("config", "head", "message"), [
    ({"model_type": "opt"}, "causal", "'opt'.*albert, bert.*qwen3, qwen3_5_text, qwen3_moe, roberta"),
    ({"model_type": "bert"}, "causal", "no causal head for 'bert'.*gpt2, .*llama"),
    ({"model_type": "gpt2"}, "masked", "no masked head for 'gpt2'"),
    ({"model_type": "gemma"}, "qa", "no qa head for 'gemma'"),
    ({"model_type": "bert", "is_decoder": True}, "masked", "is_decoder: True"),
    ({"model_type": "bert", "tie_word_embeddings": False}, "masked", "tie_word_embeddings: False"),
    ({"model_type": "llama", "hidden_act": "mish"}, "causal", "'mish'.*gelu_new"),
    ({"model_type": "openai-gpt", "afn": "tanh"}, "causal", "afn: 'tanh'"),
    ({"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}, "causal",
     "whole heads"),
    ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "causal", "attn_logit_softcapping: 50.0"),
    ({"model_type": "qwen3_5_text", "linear_num_value_heads": 24}, "causal", "24, which is not a multiple of .*: 16"),
    ({"model_type": "gemma", "use_bidirectional_attention": True}, "causal", "use_bidirectional_attention"),
    ({"model_type": "gpt2", "add_cross_attention": True}, "causal", "add_cross_attention"),
    ({"model_type": "roberta", "pad_token_id": None}, "masked", "pad_token_id"),
    ({"model_type": "bert", "num_labels": 3}, "qa", "num_labels: 3"),
    ({"model_type": "electra", "summary_type": "last"}, "choice", "summary_type: 'last'"),
    ({"model_type": "deberta-v2", "pooler_hidden_size": 7}, "sequence", "pooler_hidden_size: 7"),
    ({"model_type": "gpt2"}, "choice", "no choice head for 'gpt2'"),
    ({"model_type": "granite"}, "sequence", "no sequence head for 'granite'"),
    ({"model_type": "deberta-v2", "conv_kernel_size": 4}, "masked", "conv_kernel_size: 4"),
    ({"model_type": "deberta-v2", "legacy": False}, "masked", "legacy: False"),
    ({"model_type": "modernbert", "tie_word_embeddings": False}, "masked", "tie_word_embeddings: False"),
    ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "causal", "quantised with gptq"),
])
def test_unsupported_architectures_and_fields_are_rejected_by_name(config, head, message):
    kind, fields = config["model_type"], {k: v for k, v in config.items() if k != "model_type"}
    with pytest.raises(UserError, match=message):
        hub.network(transformers.CONFIG_MAPPING[kind](**fields), head)


def test_all_supported_families_are_tested():
    assert hub.list_supported() == sorted(FAMILIES)
    heads = {name: {head for family, head in PAIRS if family == name} for name in FAMILIES}
    assert heads == {name: set(hub.find_family(transformers.CONFIG_MAPPING[name](), next(iter(tested))).classes)
                     for name, tested in heads.items()}


def test_the_jax_page_has_the_table_of_tested_families():
    page = PAGE.read_text()
    assert table_of_page(page)[0] == table(), "run python tests/jax_engine/tested.py"
    all_families, causal = {name for name, _ in PAIRS}, {name for name, head in PAIRS if head == "causal"}
    assert features() == {"quantize": all_families, "lora": all_families, "mesh": all_families, "packing": causal,
                          "generation": causal}
    sentence = ("All families support `model.quantize`, `model.lora` and meshes; those with CLM also packing and "
                "generation.")
    assert sentence in " ".join(page.split())
    assert CHECKS.keys() - {"all"} == TESTED.keys() and all(CHECKS.values())
