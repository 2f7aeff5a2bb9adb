"""Model families that train on images: what their processors return, and what their networks need besides it."""

import re
from dataclasses import dataclass
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.labels import PER_ROW

IMAGES_AUTO_CLASS = "AutoModelForImageTextToText"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# Parameters and modules of the language model, by their names; the others see images.
LANGUAGE = r"(^|\.)(language_model|text_model|lm_head)(\.|$)"
OTHERS = rf"(?!.*{LANGUAGE}).*"
COUNT = f"{PER_ROW}num_"  # name of the column that counts each row's entries of an input


@dataclass(frozen=True)
class ImageFamily:
    """How a family's image inputs belong to rows.

    Args:
        whole_rows: Inputs [B, N, ...], padded with zeros; others are [n, ...], the entries of all rows in order.
        token_types: Input [B, T] that is 1 for image tokens; None if the network has none.
        in_both_directions: True if the tokens of an image attend to later ones of it.
        can_pack: False if data.packing is not supported.
    """

    whole_rows: tuple[str, ...] = ()
    token_types: str | None = None
    in_both_directions: bool = False
    can_pack: bool = True


IDEFICS = ImageFamily(("pixel_values", "pixel_attention_mask"))
TYPED = ImageFamily(token_types="mm_token_type_ids")
NOT_PACKED = ImageFamily(token_types="mm_token_type_ids", can_pack=False)
IMAGE_FAMILIES = {
    "smolvlm": IDEFICS, "idefics3": IDEFICS,
    "gemma3": ImageFamily(token_types="token_type_ids", in_both_directions=True), "gemma4": NOT_PACKED,
    "qwen2_vl": TYPED, "qwen2_5_vl": TYPED, "qwen3_vl": TYPED, "qwen3_vl_moe": TYPED,
    "qwen3_5": NOT_PACKED, "qwen3_5_moe": NOT_PACKED, "llava": ImageFamily(), "llava_next": ImageFamily(),
    "internvl": ImageFamily(), "llava_onevision": ImageFamily(),
}


def find_image_family(model_type: str) -> ImageFamily:
    """Return the family of a model type. Raises UserError if it is not supported."""
    if model_type not in IMAGE_FAMILIES:
        raise UserError(f"model.images: a model of type {model_type} cannot be trained on images. Use one of the types "
                        f"{', '.join(IMAGE_FAMILIES)}, or set model.images to false to train the text model alone.",
                        "model.images")
    return IMAGE_FAMILIES[model_type]


def is_of_language_model(name: str) -> bool:
    """Return True if a parameter or module of this name belongs to the language model."""
    return re.search(LANGUAGE, name) is not None


def has_other_parts(model: Any) -> bool:
    """Return True if a network has parts besides its language model."""
    return model.config.model_type in IMAGE_FAMILIES


def check_image_tokens(ids: list[int], expected: int) -> None:
    """Raise UserError unless the tokenizer's tokens of images include the one that the model replaces."""
    if expected not in ids:
        raise UserError(f"model.images: images have the token {ids} in the tokenizer, but {expected} in the model. "
                        "Use the model's own tokenizer.", "data.tokenizer")


def image_token(config: Any) -> int:
    """Return the id of the token whose embeddings a network replaces by image features."""
    token = getattr(config, "image_token_id", None)
    return config.image_token_index if token is None else token
