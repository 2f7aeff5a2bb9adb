"""OLMo 2 (OLMo Team 2024): Llama with norms on the outputs of sublayers, and on whole query and key projections."""

from typing import Any

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture
from jax_engine.models.families.llama import MODULES, llama_family, llama_like

OUT_NORMS = {"layers.attn_out_norm": "layers.{}.post_attention_layernorm",
             "layers.mlp_out_norm": "layers.{}.post_feedforward_layernorm"}


def olmo2_like(config: PreTrainedConfig, **overrides: Any) -> Architecture:
    """Return the architecture of an OLMo 2-like network; `overrides` override fields."""
    return llama_like(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias, norm="rms_wide",
                      norms=("output",), qk_norm="projection", **overrides)


FAMILY = llama_family(olmo2_like, "Olmo2", qa_base=None, modules=MODULES | OUT_NORMS, labels=("sequence",))
