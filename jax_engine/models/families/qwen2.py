"""Qwen2 (Yang et al. 2024): Llama with biases on queries, keys and values."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture
from jax_engine.models.families.llama import layer_windows, llama_family, llama_like


def architecture(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, qkv_bias=True, windows=layer_windows(config))


FAMILY = llama_family(architecture, "Qwen2")
