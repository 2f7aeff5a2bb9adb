"""Multiple choice on JAX: which of several continuations or answers is right."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.distributed.loss import LossSums, label_loss
from jax_engine.tasks.by_row import RowTask
from lmmods.recipe.tasks.multiple_choice import MultipleChoiceFields


class MultipleChoice(MultipleChoiceFields, RowTask):
    """Choose among a row's choices, which are scored separately. Rows are [N, C, T]."""

    head = "choice"
    auto_class = "AutoModelForMultipleChoice"

    def loss(self, scores: Array, rows: dict[str, Array]) -> LossSums:
        # Missing choices are padding and get the smallest finite number, since -inf would give NaN gradients.
        is_missing = jnp.arange(scores.shape[1]) >= rows["choices"][:, None]
        return label_loss(jnp.where(is_missing, jnp.finfo(jnp.float32).min, scores), rows["labels"])

    def row_output(self, scores: np.ndarray, row: dict[str, np.ndarray]) -> np.ndarray:
        """Return the scores of the row's own choices, [C]."""
        return scores[:row["choices"]]
