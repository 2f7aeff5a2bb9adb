"""Qwen3 (Yang et al. 2025): Llama with norms on queries and keys."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture
from jax_engine.models.families.llama import layer_windows, llama_family, llama_like


def architecture(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias, qk_norm="head",
                      windows=layer_windows(config))


FAMILY = llama_family(architecture, "Qwen3")
