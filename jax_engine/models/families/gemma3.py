"""Gemma 3 (Gemma Team 2025): a SigLIP whose patches are averaged, and Gemma 3's decoder."""

from dataclasses import replace

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, PaddedImages, refuse
from jax_engine.models.families import gemma3_text
from jax_engine.models.families.idefics3 import TOWER, siglip, with_images

LAYER = ("attn_norm", "attn.k", "attn.v", "attn.q", "attn.o", "mlp_norm", "mlp.up", "mlp.down")  # in torch's order
ORDER = ("images.patches", "images.positions", *(f"image_layers.{module}" for module in LAYER), "images.norm")
MODULES = {module: f"vision_tower.{TOWER[module]}" for module in ORDER} | {
    "images.project": "multi_modal_projector", "images.project_norm": "multi_modal_projector.mm_soft_emb_norm"}


def architecture(config: PreTrainedConfig) -> Architecture:
    vision = config.vision_config
    refuse(config.text_config, model_type="gemma3_text")
    refuse(vision, vision_use_head=False)
    side = vision.image_size // vision.patch_size
    images = PaddedImages(tower=siglip(vision), token=config.image_token_id, size=vision.image_size,
                          patch=vision.patch_size, channels=vision.num_channels, projector="pool",
                          factor=side // int(config.mm_tokens_per_image**0.5), in_both_directions=True,
                          may_start_random=False)
    return replace(gemma3_text.architecture(config.text_config), images=images, tied=config.tie_word_embeddings)


FAMILY = with_images(
    gemma3_text.FAMILY, "language_model", MODULES, "Gemma3ForConditionalGeneration", architecture=architecture,
    in_files={"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
              "multi_modal_projector.": "model.multi_modal_projector.", "vision_tower.": "model.vision_tower."},
    older={"model.vision_tower.vision_model.": "model.vision_tower."})
