"""Qwen3-VL (Qwen Team 2025): a vision transformer for images of any size, and Qwen3."""

from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, PatchImages, plain_layers, refuse
from jax_engine.models.families import qwen3
from jax_engine.models.families.idefics3 import with_images
from jax_engine.models.families.llama import llama_like
from jax_engine.models.linear import check_activation
from jax_engine.models.rope import Rope, image_rope_of

LAYERS = {f"image_layers.{module}": f"visual.blocks.{{}}.{name}" for module, name in (
    ("attn_norm", "norm1"), ("mlp_norm", "norm2"), ("attn.qkv", "attn.qkv"), ("attn.o", "attn.proj"))}
MERGER = (("norm", "norm"), ("up", "linear_fc1"), ("down", "linear_fc2"))
MODULES = {"images.patches": "visual.patch_embed.proj", "images.positions": "visual.pos_embed", **LAYERS,
           "image_layers.mlp.up": "visual.blocks.{}.mlp.linear_fc1",
           "image_layers.mlp.down": "visual.blocks.{}.mlp.linear_fc2",
           **{f"images.merger.{module}": f"visual.merger.{name}" for module, name in MERGER},
           **{f"image_mergers.{module}": f"visual.deepstack_merger_list.{{}}.{name}" for module, name in MERGER}}


def tower(config: PreTrainedConfig, size: int, **fields: Any) -> Architecture:
    """Return the architecture of a vision transformer's layers.

    Args:
        size: Features of a patch.
        fields: Fields of Architecture to override.
    """
    refuse(config, rope_parameters={**config.rope_parameters, "rope_type": "axial"})
    head_dim, std = size // config.num_heads, config.initializer_range
    # Half of the pairs of features have a patch's row as their position, half its column.
    powers = np.arange(0, head_dim // 2, 2, dtype=np.float32) / (head_dim // 2)
    frequencies = tuple((1.0 / np.float32(config.rope_parameters["rope_theta"]) ** powers).tolist())
    rope = Rope(2 * frequencies, axes=(0,) * len(frequencies) + (1,) * len(frequencies))
    return Architecture(**{
        "vocab_size": 0, "hidden_size": size, "num_layers": config.depth, "num_heads": config.num_heads,
        "num_kv_heads": config.num_heads, "head_dim": head_dim, "activation": check_activation(config.hidden_act),
        "norm_eps": 1e-6, "init_std": std, "layer_std": std, "residual_std": std, "causal": False, "qkv": "fused",
        "positions": "rope", "ropes": (rope,) * config.depth, **plain_layers(config.depth, head_dim**-0.5), **fields})


def patch_images(config: PreTrainedConfig, tower: Architecture, **fields: Any) -> PatchImages:
    """Return the encoder of a network's images; `fields` are further fields of PatchImages."""
    vision = config.vision_config
    return PatchImages(tower=tower, token=config.image_token_id, patch=vision.patch_size, channels=vision.in_channels,
                       factor=vision.spatial_merge_size, frames=vision.temporal_patch_size, **fields)


def architecture(config: PreTrainedConfig) -> Architecture:
    text, vision = config.text_config, config.vision_config
    refuse(text, model_type="qwen3_vl_text")
    images = patch_images(config, tower(vision, vision.hidden_size, mlp_size=vision.intermediate_size), patch_bias=True,
                          side=int(vision.num_position_embeddings**0.5), taps=tuple(vision.deepstack_visual_indexes))
    return llama_like(text, qkv_bias=text.attention_bias, out_bias=text.attention_bias, qk_norm="head", images=images,
                      rope=image_rope_of(text, interleaved=True), tied=config.tie_word_embeddings)


FAMILY = with_images(qwen3.FAMILY, "language_model", MODULES, "Qwen3VLForConditionalGeneration",
                     architecture=architecture)
