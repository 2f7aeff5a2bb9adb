"""Gemma 4, text only (Google 2026): Gemma 3 with wider heads in layers without a window, normed values that may be the
keys, keys and values that later layers borrow, a separate input to each layer, and experts next to the MLP.
"""

import math

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Experts, WideHeads, refuse
from jax_engine.models.families.gemma2 import NORMS
from jax_engine.models.families.llama import MODULES, layer_windows, llama_family, llama_like
from jax_engine.models.rope import Rope, rope_of
from lmmods.core.errors import UserError

PARTS = {"q": "q_proj", "q_norm": "q_norm", "k_norm": "k_norm", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
GEMMA4_MODULES = {
    "embed.tokens": MODULES["embed.tokens"],
    **{f"layers.{attention}.{name}": f"layers.{{}}.self_attn.{torch_name}" for attention in ("attn", "full_attn")
       for name, torch_name in PARTS.items()},
    **{f"layers.{mlp}.{part}": f"layers.{{}}.mlp.{part}_proj" for mlp in ("mlp", "wide_mlp")
       for part in ("gate", "up", "down")},
    **NORMS,
    "layers.out": "layers.{}",
    "layers.input_gate": "layers.{}.per_layer_input_gate",
    "layers.input_project": "layers.{}.per_layer_projection",
    "layers.input_norm": "layers.{}.post_per_layer_input_norm",
    "layers.moe.router": "layers.{}.router",
    "layers.moe.router.proj": "layers.{}.router.proj",
    "layers.moe.experts": "layers.{}.experts",
    "layers.mlp.out_norm": "layers.{}.post_feedforward_layernorm_1",
    "layers.wide_mlp.out_norm": "layers.{}.post_feedforward_layernorm_1",
    "layers.moe.out_norm": "layers.{}.post_feedforward_layernorm_2",
    "layers.moe.norm": "layers.{}.pre_feedforward_layernorm_2",
    "norm": MODULES["norm"],
    "embed.layer_tokens": "embed_tokens_per_layer",
    "embed.layer_project": "per_layer_model_projection",
    "embed.layer_norm": "per_layer_projection_norm",
}


def architecture(config: PreTrainedConfig) -> Architecture:
    if config.use_bidirectional_attention == "all":  # other values affect only images, not text
        refuse(config, use_bidirectional_attention=None)
    if config.hidden_size_per_layer_input:
        refuse(config, vocab_size_per_layer_input=config.vocab_size)
    num, kinds = config.num_hidden_layers, config.layer_types
    if config.num_kv_shared_layers and set(kinds) != set(kinds[:num - config.num_kv_shared_layers]):
        raise UserError(f"model.config: gemma4_text with num_kv_shared_layers: {config.num_kv_shared_layers} has no "
                        "layer that computes keys and values for some layer_types. Lower num_kv_shared_layers.")
    parts = {kind: config.per_layer_config[kind] for kind in set(kinds)}
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    sizes = (parts["full_attention"].num_key_value_heads, parts["full_attention"].head_dim)
    experts = Experts(config.num_experts, config.top_k_experts, config.moe_intermediate_size, has_mlp=True,
                      scaled_router=True) if config.enable_moe_block else None
    ropes = {kind: _rope(part, kind) for kind, part in parts.items()}
    sliding = parts.get("sliding_attention", parts["full_attention"])
    return llama_like(
        sliding, activation=config.hidden_activation, rope=None, ropes=tuple(ropes[kind] for kind in kinds),
        qkv_bias=config.attention_bias, out_bias=config.attention_bias, norm="rms_wide", norms=("input", "output"),
        windows=layer_windows(config), attention_scales=(1.0,) * num, qk_norm="head", value_norm=True,
        wide_heads=WideHeads(full, *sizes, config.attention_k_eq_v), num_borrowing=config.num_kv_shared_layers,
        wide_mlp_size=2 * config.intermediate_size if config.use_double_wide_mlp else None,
        logit_cap=config.final_logit_softcapping, embedding_scale=math.sqrt(config.hidden_size), scales_in_table=True,
        experts=experts, layer_inputs=config.hidden_size_per_layer_input or 0, layer_scalar=True)


def _rope(config: PreTrainedConfig, kind: str) -> Rope:
    # transformers rotates whole heads unless the type is proportional, which sets some frequencies to 0.
    return rope_of(config, kind, partial=config.rope_parameters[kind].get("rope_type") == "proportional")


FAMILY = llama_family(architecture, "Gemma4", qa_base=None, labels=(), modules=GEMMA4_MODULES)
