"""Granite (IBM 2024): Llama with multipliers on embedding, scores, residual sums and logits."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture
from jax_engine.models.families.llama import llama_family, llama_like


def architecture(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias,
                      mlp_bias=config.mlp_bias, embedding_scale=config.embedding_multiplier,
                      attention_scales=(config.attention_multiplier,) * config.num_hidden_layers,
                      residual_scale=config.residual_multiplier, logit_scale=1 / config.logits_scaling)


FAMILY = llama_family(architecture, "Granite", qa_base=None, labels=())
