"""Reward models on JAX: a score for an answer, trained on pairs of a better and a worse one."""

from jax import Array

from jax_engine.distributed.loss import LossSums, pair_loss
from jax_engine.tasks.by_row import RowTask
from lmmods.recipe.tasks.reward import RewardFields


class Reward(RewardFields, RowTask):
    """Score better answers higher than worse ones. Rows are [N, 2, T], or [N, 1, T] in predict."""

    head = "sequence"
    auto_class = "AutoModelForSequenceClassification"

    def loss(self, scores: Array, rows: dict[str, Array]) -> LossSums:
        return pair_loss(scores, rows["margin"], self.center_rewards_coefficient)

    def has_loss(self, rows: dict[str, Array]) -> bool:
        return "margin" in rows and rows["input_ids"].shape[1] == 2
