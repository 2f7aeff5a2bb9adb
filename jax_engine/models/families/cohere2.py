"""Command R7B and A (Cohere 2024): parallel attention and MLP; layers without windows have no positions (NoPE)."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture
from jax_engine.models.families.llama import MODULES, layer_windows, llama_family, llama_like
from jax_engine.models.rope import rope_of


def architecture(config: PreTrainedConfig) -> Architecture:
    rope, windows = rope_of(config, interleaved=True), layer_windows(config)
    return llama_like(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias, norm="layer_no_bias",
                      norm_eps=config.layer_norm_eps, parallel=True,
                      shared_norm=True, windows=windows, logit_scale=config.logit_scale,
                      ropes=tuple(rope.without_rotation() if window is None else rope for window in windows))


FAMILY = llama_family(architecture, "Cohere2", qa_base=None, labels=(), modules={
    name: torch_name for name, torch_name in MODULES.items() if name != "layers.mlp_norm"})
