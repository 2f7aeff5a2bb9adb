"""Qwen2-VL (Wang et al. 2024): a vision transformer for images of any size, and Qwen2."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, PatchImages, refuse
from jax_engine.models.families import qwen2
from jax_engine.models.families.idefics3 import with_images
from jax_engine.models.families.llama import layer_windows, llama_like
from jax_engine.models.families.qwen3_vl import LAYERS, patch_images, tower
from jax_engine.models.rope import image_rope_of

PATCHES = {"images.patches": "visual.patch_embed.proj"}
MERGER = {f"images.merger.{module}": f"visual.merger.{name}" for module, name in (
    ("norm", "ln_q"), ("up", "mlp.0"), ("down", "mlp.2"))}
MODULES = {**PATCHES, **LAYERS, "image_layers.mlp.up": "visual.blocks.{}.mlp.fc1",
           "image_layers.mlp.down": "visual.blocks.{}.mlp.fc2", **MERGER}
# transformers writes the names of the first files, which have no prefix for the tower and another for the text.
IN_FILES = {"visual.": "model.visual."} | {
    f"model.{part}.": f"model.language_model.{part}." for part in ("embed_tokens", "layers", "norm")}


def with_text(config: PreTrainedConfig, images: PatchImages) -> Architecture:
    """Return the architecture of Qwen2 with images."""
    text = config.text_config
    refuse(text, model_type=f"{config.model_type}_text")
    return llama_like(text, qkv_bias=True, windows=layer_windows(text), images=images,
                      rope=image_rope_of(text, interleaved=False), tied=config.tie_word_embeddings)


def architecture(config: PreTrainedConfig) -> Architecture:
    vision = config.vision_config
    size = vision.embed_dim
    return with_text(config, patch_images(config, tower(vision, size, mlp_size=int(size * vision.mlp_ratio))))


FAMILY = with_images(qwen2.FAMILY, "language_model", MODULES, "Qwen2VLForConditionalGeneration",
                     architecture=architecture, in_files=IN_FILES)
