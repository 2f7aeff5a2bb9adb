"""SmolLM3 (Hugging Face 2025): Llama with some layers without positions (NoPE)."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture
from jax_engine.models.families.llama import layer_windows, llama_family, llama_like
from jax_engine.models.rope import rope_of


def architecture(config: PreTrainedConfig) -> Architecture:
    rope = rope_of(config)
    ropes = tuple(rope if has_rope else rope.without_rotation()
                  for has_rope in config.no_rope_layers[:config.num_hidden_layers])
    return llama_like(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias,
                      mlp_bias=config.mlp_bias, ropes=ropes, windows=layer_windows(config))


FAMILY = llama_family(architecture, "SmolLM3")
