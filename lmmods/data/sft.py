"""Supervised fine-tuning: conversations with a loss on the responses."""

from typing import Any

from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.data.batch.loader import StatefulLoader
from lmmods.data.batch.stream import StreamLoader
from lmmods.data.conversations import ConversationCodec, ConversationSettings
from lmmods.data.images import ImageCodec, ImageData
from lmmods.data.on_policy import OnPolicy
from lmmods.data.read.formats import detect_format
from lmmods.data.read.readers import Row
from lmmods.recipe.tasks.sft import SFTDataFields, TrainOn

NO_ROOM = "no_room"  # a warning that has been given


class SFTSettings(SFTDataFields, ConversationSettings):
    """See `Settings`."""

    train_on: TrainOn


class SFTCodec(ConversationCodec):
    """Conversations with chosen turns as targets; one row of a batch is one conversation."""

    settings: SFTSettings

    def __init__(self, settings: SFTSettings, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self.train_on, self.turns = settings.train_on, settings.turns

    def encoding_settings(self) -> dict[str, Any]:
        return {**super().encoding_settings(), "train_on": self.train_on, "turns": self.turns}


class ImageSFTCodec(ImageCodec, SFTCodec):
    """`SFTCodec` with images."""


class SFTData(SFTDataFields, ImageData):
    """Conversations for supervised fine-tuning."""

    codec_class, image_codec_class = SFTCodec, ImageSFTCodec

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        """See `DataModule`. Raises UserError: the layout is unknown, as no other task recognised the rows."""
        return f"the layout of the rows is {detect_format(row.values, f'{row.file}:{row.line}')}"

    def train_batches(self) -> StatefulLoader | StreamLoader:
        """See `DataModule`. Raises UserError if answers are sampled and the trainer takes parts of epochs."""
        if isinstance(self._row_source, OnPolicy):
            self._check_on_policy(self._row_source)
        return super().train_batches()

    def _check_on_policy(self, on_policy: OnPolicy) -> None:
        """Report how many rows leave no space for a sampled answer. Raises UserError."""
        for key, name, allowed in (("overfit_batches", "overfit_batches", (None, 0)),
                                   ("limit_train_batches", "train_limit", (None, 1.0))):
            if (value := getattr(self.trainer, name, None)) not in allowed:
                raise UserError(f"trainer.{key} is {value}, but model.teacher.on_policy samples answers for whole "
                                "epochs. Remove it, and limit the rows with data.source.limit")
        prompts, max_new_tokens = self.rows("train").column("prompt_length"), on_policy.max_new_tokens
        full = int((~on_policy.has_space(prompts)).sum())
        space = (f"space for an answer of model.teacher.max_new_tokens {max_new_tokens} tokens within data.max_length "
                 f"{self.max_length}")
        if full == len(prompts):
            raise UserError(f"model.teacher.on_policy is {on_policy.fraction}, but none of the {len(prompts)} training "
                            f"rows has {space}. Lower max_new_tokens or raise max_length.")
        if full and NO_ROOM not in self._warned and getattr(self.trainer, "is_global_zero", True):
            warn(f"{full:,} of {len(prompts):,} training rows do not have {space}. They keep their given answers.")
        self._warned.add(NO_ROOM)
