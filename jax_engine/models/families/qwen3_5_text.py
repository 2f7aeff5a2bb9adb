"""Qwen3.5, text only (Qwen Team 2026): Qwen3 with gated attention in every fourth layer, and Gated DeltaNet in the
others.
"""

from dataclasses import replace

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, LinearHeads
from jax_engine.models.families.llama import llama_family, llama_like, with_modules
from jax_engine.models.rope import rope_of
from lmmods.core.errors import UserError

LINEAR = {"layers.linear_attn": "layers.{}.linear_attn"} | {
    f"layers.linear_attn.{name}": f"layers.{{}}.linear_attn.{torch_name}" for name, torch_name in (
        ("conv", "conv1d"), ("norm", "norm"), ("o", "out_proj"), ("qkv", "in_proj_qkv"), ("z", "in_proj_z"),
        ("b", "in_proj_b"), ("a", "in_proj_a"))}


def architecture(config: PreTrainedConfig) -> Architecture:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise UserError(f"model.config: qwen3_5_text with linear_num_value_heads: {values}, which is not a multiple of "
                        f"linear_num_key_heads: {keys}. Change one of them.")
    layers = tuple(layer for layer, kind in enumerate(config.layer_types) if kind == "linear_attention")
    # In text, the positions in an image's three dimensions are equal, so the sections of the rope are one rope.
    return llama_like(
        config, rope=rope_of(config, partial=True), norm="rms_plus_one", qk_norm="head", output_gate=True,
        qkv_bias=config.attention_bias, out_bias=config.attention_bias,
        linear_heads=LinearHeads(layers, keys, values, config.linear_key_head_dim, config.linear_value_head_dim,
                                 config.linear_conv_kernel_dim) if layers else None)


QWEN35 = llama_family(architecture, "Qwen3_5", qa_base=None, labels=("sequence",), modules=with_modules(
    "embed.tokens", "layers.attn.q", LINEAR))
# The class name without Text belongs to the model that also reads images.
FAMILY = replace(QWEN35, classes=QWEN35.classes | {"sequence": "Qwen3_5TextForSequenceClassification"})
