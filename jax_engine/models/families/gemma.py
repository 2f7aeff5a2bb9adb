"""Gemma (Gemma Team 2024): Llama with scaled embedding and norms that multiply by 1 + weight."""

import math

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, refuse
from jax_engine.models.families.llama import llama_family, llama_like


def architecture(config: PreTrainedConfig) -> Architecture:
    refuse(config, use_bidirectional_attention=False)
    return llama_like(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias, norm="rms_plus_one",
                      embedding_scale=math.sqrt(config.hidden_size), scales_in_table=True)


FAMILY = llama_family(architecture, "Gemma", qa_base=None)
