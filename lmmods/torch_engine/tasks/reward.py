"""Reward models: scores of answers, trained on pairs of a better and a worse answer."""

from torch import Tensor

from lmmods.recipe.tasks.reward import RewardFields
from lmmods.torch_engine.nn.classifier import reward_loss
from lmmods.torch_engine.nn.loss import LossSums
from lmmods.torch_engine.tasks.classifier_task import ClassifierModule


class Reward(RewardFields, ClassifierModule):
    """Score answers, higher for better ones."""

    auto_class = "AutoModelForSequenceClassification"
    task_type = "SEQ_CLS"

    def outputs(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the score of each answer, [B, A]."""
        # [B, A, T] -> [B * A, T]
        rows = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "token_type_ids")
                if name in batch}
        return super().outputs(rows).view(batch["input_ids"].shape[:2])

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> LossSums:
        return reward_loss(outputs, batch["margin"], self.center_rewards_coefficient)

    def target_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return self.scored_rows(batch).sum()

    def scored_rows(self, batch: dict[str, Tensor]) -> Tensor:
        return ~batch["margin"].isnan()
