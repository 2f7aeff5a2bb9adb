"""Reward models: score answers, trained on pairs of a better and a worse one."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lmmods.core.errors import UserError
from lmmods.core.settings import require
from lmmods.recipe.tasks.base import ConversationFields, TaskFields, Usual


@dataclass(kw_only=True, eq=False, repr=False)
class RewardFields(TaskFields):
    """Train a model to score answers, the better one of a pair higher; predict scores chats.

    The loss of a pair is -log σ(s_w - s_l - margin), s_w being the score of the better answer (Bradley and Terry 1952;
    margin: Touvron et al. 2023, section 3.2.2).

    Args:
        center_rewards_coefficient: Weight of (s_w + s_l)^2 in the loss of a pair, which keeps scores near 0 (Eisenstein
            et al. 2023, with 0.01). 0 is none.
    """

    takes: ClassVar[str] = "RewardData"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    pipeline_tag: ClassVar[str] = "text-classification"
    trains_full_head: ClassVar[bool] = True
    adapter_has_dropout: ClassVar[bool] = False
    accuracy: ClassVar[str] = "val/accuracy"
    usual: ClassVar[Usual] = Usual(epochs=1, rows=32, lr=1e-5, small_lr=1e-4, adapter_lr=1e-4)

    center_rewards_coefficient: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.center_rewards_coefficient >= 0, "model.center_rewards_coefficient",
                self.center_rewards_coefficient, "0 or more")
        for key, fields in (("config", self.config), ("config_overrides", self.config_overrides)):
            labels = fields.get("num_labels", 1) if isinstance(fields, dict) else 1
            require(labels == 1, f"model.{key}.num_labels", labels, "1 for a reward model, whose score is one number")

    @classmethod
    def method(cls, settings: dict[str, Any]) -> tuple[list[str], str]:
        weight = settings.get("center_rewards_coefficient")
        coefficient = f", center_rewards_coefficient {weight}" if weight else ""
        return ["reward-trainer"], f"Trained as a reward model on pairs of answers{coefficient}."

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields changed in the configuration: one label, and no dropout unless the recipe sets a rate.

        The answers of a pair are compared, so different dropout in each would be noise in the loss. Raises UserError
        for an unknown model.
        """
        return {**self._without_dropout(), "num_labels": 1}


@dataclass(kw_only=True, eq=False, repr=False)
class RewardDataFields(ConversationFields):
    """Pairs of answers to a prompt, or of texts; one row of a batch is a pair.

    Args:
        source: Training rows: file, folder, glob, URL, hub id, a mapping {path, name, split, revision, columns, limit,
            weight, format}, or a list of these. Rows are pairs (chosen, rejected) of chats or texts, or lists of
            answers with scores.
        max_length: Maximum length of a prompt with one of its answers, in tokens. Default: 1024, or the model's limit
            if that is lower.
        batch_size: Pairs per micro-batch and device in training.
        margin_column: Column with the minimum difference of a pair's scores; 0 for rows without it.
    """

    kind: ClassVar[str] = "RewardData"

    margin_column: str = "margin"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise UserError("data.packing is not supported for reward models, where the answers of a pair stay "
                            "together; use data.group_by_length to save most of the padding", "data.packing")
