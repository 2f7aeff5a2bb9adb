"""Supervised fine-tuning on instructions and chats."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lmmods.core.errors import UserError
from lmmods.core.hf_config import load_config
from lmmods.core.image_models import IMAGES_AUTO_CLASS, LANGUAGE, find_image_family
from lmmods.core.settings import TokenLoss, require
from lmmods.recipe.tasks.base import (
    CausalFields,
    ConversationFields,
    DataFields,
    ReadScorer,
    SamplingLoad,
    TokenLossFields,
    Usual,
    check_range,
)

TrainOn = Literal["responses", "all", "last"]
MAX_IMAGE_PIXELS = 89_478_485  # from which PIL warns of decompression bombs; it refuses twice as many


@dataclass(kw_only=True, eq=False, repr=False)
class SFTFields(TokenLossFields, CausalFields):
    """Fine-tune a causal LM on instructions or chats; predict generates answers.

    Args:
        dft: Dynamic fine-tuning: weight each token's training loss by its probability. See docs/techniques.md.
        images: Train a vision-language model on images and text. false trains its text model alone and
            drops rows with images. See docs/images.md.
    """

    takes: ClassVar[str] = "SFTData"
    usual: ClassVar[Usual] = Usual(prompt="Name three fruits.")

    dft: bool = False
    images: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images:
            self._check_images()
        require(not self.dft or self.label_smoothing == 0, "model.label_smoothing", self.label_smoothing,
                "0 with model.dft, which weights only the target", "model.dft")
        require(not self.dft or self.teacher is None or self.teacher.ratio < 1, "model.teacher.ratio", 1,
                "less than 1 with model.dft, which changes only the cross-entropy", "model.dft")

    def _check_images(self) -> None:
        """Set what depends on `images`. Raises UserError: another key cannot be combined with it."""
        for key in ("teacher", "best_of", "compile", "neftune_alpha", "max_memory"):
            value = getattr(self, key)
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
        facts = super().data_facts(command, read_scorer)
        if not self.images:
            return facts
        model_type = load_config(self._pretrained_or_config, None, self.revision, self.trust_remote_code,
                                 all_parts=True).model_type
        find_image_family(model_type)
        # A tokenizer of its own does not replace the processor.
        return {**facts, "image_model": (self._pretrained_or_config, model_type)}

    def check_data(self, data: DataFields) -> None:
        super().check_data(data)
        options, max_pixels = (getattr(data, key, None) for key in ("image_options", "max_image_pixels"))
        if self.images:
            require(max_pixels is not None, "data.class_path", type(data).__name__.removesuffix("Fields"),
                    "SFTData with model.images", "model.images")
            for key in ("packing", "streaming"):
                require(not getattr(data, key), f"data.{key}", True, "false with model.images", "model.images")
            on_overflow = getattr(data, "on_overflow", None)
            require(on_overflow in (None, "error", "skip", "truncate_turns"), "data.on_overflow", on_overflow,
                    "error, skip or truncate_turns with model.images, as an image cannot be truncated", "model.images")
        else:
            require(not options, "data.image_options", options, "null without model.images", "model.images")
            require(max_pixels in (None, MAX_IMAGE_PIXELS), "data.max_image_pixels", max_pixels,
                    f"{MAX_IMAGE_PIXELS}, its default, without model.images", "model.images")
        if not self.on_policy:
            return
        require(not data.packing, "data.packing", data.packing, "false with model.teacher.on_policy, as the lengths "
                "of sampled answers are not known in advance. Use data.group_by_length to save some of the padding",
                "model.teacher.on_policy")
        require(not data.streaming, "data.streaming", data.streaming, "false with model.teacher.on_policy, which "
                "chooses rows by index", "model.teacher.on_policy")

    def sampling_load(self, rows: int, eval_batch_size: int) -> SamplingLoad | None:
        if self.teacher is None or not self.on_policy:
            return None
        return SamplingLoad(math.ceil(rows * self.on_policy), eval_batch_size, 1, self.teacher.max_new_tokens)

    def describe_training(self, rows: int, num_rows: int | None) -> list[str]:
        if self.teacher is None or not self.on_policy:
            return []
        return [f"On-policy: before each step the student samples answers for {self.on_policy:.0%} of the rows, about "
                f"{rows * self.on_policy:.3g} of {rows}, with at most {self.teacher.max_new_tokens} tokens."]

    @property
    def token_loss(self) -> TokenLoss:
        return super().token_loss._replace(dft=self.dft)


@dataclass(kw_only=True, eq=False, repr=False)
class SFTDataFields(ConversationFields):
    """Conversations for supervised fine-tuning; one row of a batch is one conversation.

    Args:
        train_on: Target tokens: `responses` of the assistant, `all` tokens, or the `last` response. Default: responses.
        train_on_prompt: Same as `train_on: all`.
        train_on_last: Same as `train_on: last`.
        turns: Rows per conversation. `all`: one row with every response; or one row per response, as with `split`,
            where the chat template renders earlier turns differently from inference (Qwen3 drops their reasoning).
            `last`: one row that ends in the last response, its only target.
        image_options: Fields of the model's image processor to override, such as `{size: {longest_edge: 512}}`. See
            docs/images.md.
        max_image_pixels: Maximum number of pixels in an image; rows with larger images are dropped.
    """

    kind: ClassVar[str] = "SFTData"
    generality: ClassVar[int] = 2

    train_on: TrainOn | None = None
    train_on_prompt: bool = False
    train_on_last: bool = False
    turns: Literal["all", "last", "split"] = "all"
    image_options: dict[str, Any] | None = None
    max_image_pixels: int = MAX_IMAGE_PIXELS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(max_image_pixels=(self.max_image_pixels, 1, 2 * MAX_IMAGE_PIXELS))
        shorthand: TrainOn | None = "all" if self.train_on_prompt else "last" if self.train_on_last else None
        if shorthand and self.train_on not in (None, shorthand):
            key = "train_on_prompt" if self.train_on_prompt else "train_on_last"
            raise UserError(f"data.train_on is {self.train_on}, but data.{key} means {shorthand}; keep one of them",
                            "data.train_on", f"data.{key}")
        self.train_on = self.train_on or shorthand or "responses"
