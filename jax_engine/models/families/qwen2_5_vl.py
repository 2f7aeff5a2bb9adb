"""Qwen2.5-VL (Bai et al. 2025): Qwen2-VL with attention in windows of the image."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture
from jax_engine.models.families import qwen2, qwen2_vl
from jax_engine.models.families.idefics3 import with_images
from jax_engine.models.families.qwen3_vl import LAYERS, patch_images, tower

MLP = {f"image_layers.mlp.{name}": f"visual.blocks.{{}}.mlp.{name}_proj" for name in ("gate", "up", "down")}
MODULES = {**qwen2_vl.PATCHES, **LAYERS, **MLP, **qwen2_vl.MERGER}


def architecture(config: PreTrainedConfig) -> Architecture:
    vision = config.vision_config
    layers = tower(vision, vision.hidden_size, mlp_size=vision.intermediate_size, norm="rms", gated=True)
    # Whole squares.
    window = vision.window_size // vision.spatial_merge_size // vision.patch_size * vision.spatial_merge_size
    return qwen2_vl.with_text(config, patch_images(
        config, layers, window=window, full_layers=tuple(vision.fullatt_block_indexes)))


FAMILY = with_images(qwen2.FAMILY, "language_model", MODULES, "Qwen2_5_VLForConditionalGeneration",
                     architecture=architecture, in_files=qwen2_vl.IN_FILES)
