"""Training on images: fields of the tasks that can, and of their data."""

from dataclasses import dataclass
from typing import Any

from lmmods.core.hf_config import load_config
from lmmods.core.image_models import IMAGES_AUTO_CLASS, LANGUAGE, find_image_family
from lmmods.core.settings import require
from lmmods.recipe.tasks.base import CausalFields, ConversationFields, DataFields, ReadScorer, check_range

MAX_IMAGE_PIXELS = 89_478_485  # from which PIL warns of decompression bombs; it refuses twice as many


@dataclass(kw_only=True, eq=False, repr=False)
class ImageFields(CausalFields):
    """A causal LM that may see images.

    Args:
        images: Train a vision-language model on images and text. false trains its text model alone and
            drops rows with images. See docs/images.md.
    """

    images: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.images:
            return
        for key in ("teacher", "best_of", "compile", "neftune_alpha", "max_memory"):
            value = getattr(self, key, None)
            require(not value, f"model.{key}", value, f"{'false' if value is True else 'null'} with model.images",
                    "model.images")
        require(self.gradient_checkpointing != "offload", "model.gradient_checkpointing", "offload",
                "true or false with model.images", "model.images")
        require(not self.lora or not self.lora.is_principal, "model.lora.init", "pissa", "default with model.images",
                "model.images")
        require(not isinstance(self.config, dict), "model.config", self.config, "a folder or hub id with model.images, "
                "whose processor is read from the same place", "model.images")
        self.auto_class = IMAGES_AUTO_CLASS  # type: ignore[misc]  # it depends on a field here
        if not self.trains_adapter and self.trainable_parameters is None:
            self.trainable_parameters = [LANGUAGE]

    @property
    def all_parts(self) -> bool:
        return self.images

    def data_facts(self, command: str, read_scorer: ReadScorer) -> dict[str, Any]:
        # A tokenizer of its own does not replace the processor.
        return {**super().data_facts(command, read_scorer), "image_model": self.image_model}

    @property
    def image_model(self) -> tuple[str, str] | None:
        """Path and type of the model with `images`. Raises UserError: its type is not supported."""
        if not self.images:
            return None
        path = self._pretrained_or_config
        assert isinstance(path, str), "checked by __post_init__"
        model_type = load_config(path, None, self.revision, self.trust_remote_code, all_parts=True).model_type
        find_image_family(model_type)
        return path, model_type

    def check_data(self, data: DataFields) -> None:
        super().check_data(data)
        options, max_pixels = (getattr(data, key, None) for key in ("image_options", "max_image_pixels"))
        if self.images:
            require(max_pixels is not None, "data.class_path", type(data).__name__.removesuffix("Fields"),
                    f"{self.takes} with model.images", "model.images")
            on_overflow = getattr(data, "on_overflow", None)
            require(on_overflow in (None, "error", "skip", "truncate_turns"), "data.on_overflow", on_overflow,
                    "error, skip or truncate_turns with model.images, as an image cannot be truncated", "model.images")
        else:
            require(not options, "data.image_options", options, "null without model.images", "model.images")
            require(max_pixels in (None, MAX_IMAGE_PIXELS), "data.max_image_pixels", max_pixels,
                    f"{MAX_IMAGE_PIXELS}, its default, without model.images", "model.images")


@dataclass(kw_only=True, eq=False, repr=False)
class ImageDataFields(ConversationFields):
    """Conversations that may have images.

    Args:
        image_options: Fields of the model's image processor to override, such as `{size: {longest_edge: 512}}`. See
            docs/images.md.
        max_image_pixels: Maximum number of pixels in an image; rows with larger images are dropped.
    """

    image_options: dict[str, Any] | None = None
    max_image_pixels: int = MAX_IMAGE_PIXELS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(max_image_pixels=(self.max_image_pixels, 1, 2 * MAX_IMAGE_PIXELS))
