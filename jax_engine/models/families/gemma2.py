"""Gemma 2 (Gemma Team 2024): Gemma with soft-capped scores and logits, four norms per layer, alternating windows."""

import math
from typing import Any

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, refuse
from jax_engine.models.families.llama import MODULES, layer_windows, llama_family, llama_like

NORMS = {"layers.attn_norm": "layers.{}.input_layernorm",
         "layers.attn_out_norm": "layers.{}.post_attention_layernorm",
         "layers.mlp_norm": "layers.{}.pre_feedforward_layernorm",
         "layers.mlp_out_norm": "layers.{}.post_feedforward_layernorm"}
SANDWICHED = {name: torch_name for name, torch_name in MODULES.items() if name not in NORMS} | NORMS


def gemma2_like(config: PreTrainedConfig, **overrides: Any) -> Architecture:
    """Return the architecture of a Gemma 2-like network; `overrides` override fields."""
    refuse(config, use_bidirectional_attention=False)
    return llama_like(
        config, activation=config.hidden_activation, qkv_bias=config.attention_bias,
        out_bias=config.attention_bias, norm="rms_plus_one", norms=("input", "output"), windows=layer_windows(config),
        attention_scales=(config.query_pre_attn_scalar**-0.5,) * config.num_hidden_layers,
        attention_cap=config.attn_logit_softcapping, logit_cap=config.final_logit_softcapping,
        embedding_scale=math.sqrt(config.hidden_size), scales_in_table=True, **overrides)


FAMILY = llama_family(gemma2_like, "Gemma2", qa_base=None, modules=SANDWICHED)
