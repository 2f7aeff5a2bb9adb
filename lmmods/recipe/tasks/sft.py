"""Supervised fine-tuning on instructions and chats."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from lmmods.core.errors import UserError
from lmmods.core.settings import TokenLoss, require
from lmmods.recipe.images import ImageDataFields, ImageFields
from lmmods.recipe.tasks.base import DataFields, SamplingLoad, TokenLossFields, Usual

TrainOn = Literal["responses", "all", "last"]


@dataclass(kw_only=True, eq=False, repr=False)
class SFTFields(TokenLossFields, ImageFields):
    """Fine-tune a causal LM on instructions or chats; predict generates answers.

    Args:
        dft: Dynamic fine-tuning: weight each token's training loss by its probability. See docs/techniques.md.
    """

    takes: ClassVar[str] = "SFTData"
    usual: ClassVar[Usual] = Usual(prompt="Name three fruits.")

    dft: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.dft or self.label_smoothing == 0, "model.label_smoothing", self.label_smoothing,
                "0 with model.dft, which weights only the target", "model.dft")
        require(not self.dft or self.teacher is None or self.teacher.ratio < 1, "model.teacher.ratio", 1,
                "less than 1 with model.dft, which changes only the cross-entropy", "model.dft")

    def check_data(self, data: DataFields) -> None:
        super().check_data(data)
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
class SFTDataFields(ImageDataFields):
    """Conversations for supervised fine-tuning; one row of a batch is one conversation.

    Args:
        train_on: Target tokens: `responses` of the assistant, `all` tokens, or the `last` response. Default: responses.
        train_on_prompt: Same as `train_on: all`.
        train_on_last: Same as `train_on: last`.
        turns: Rows per conversation. `all`: one row with every response; or one row per response, as with `split`,
            where the chat template renders earlier turns differently from inference (Qwen3 drops their reasoning).
            `last`: one row that ends in the last response, its only target.
    """

    kind: ClassVar[str] = "SFTData"
    generality: ClassVar[int] = 2

    train_on: TrainOn | None = None
    train_on_prompt: bool = False
    train_on_last: bool = False
    turns: Literal["all", "last", "split"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        shorthand: TrainOn | None = "all" if self.train_on_prompt else "last" if self.train_on_last else None
        if shorthand and self.train_on not in (None, shorthand):
            key = "train_on_prompt" if self.train_on_prompt else "train_on_last"
            raise UserError(f"data.train_on is {self.train_on}, but data.{key} means {shorthand}; keep one of them",
                            "data.train_on", f"data.{key}")
        self.train_on = self.train_on or shorthand or "responses"
