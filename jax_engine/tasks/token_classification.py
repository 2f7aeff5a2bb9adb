"""Token classification on JAX, such as named entities and parts of speech."""

import numpy as np

from jax_engine.tasks.by_row import LabelTask
from lmmods.recipe.tasks.token_classification import TokenClassificationFields


class TokenClassification(TokenClassificationFields, LabelTask):
    """Tag each word of a text. Loss and metrics are over labelled tokens."""

    head = "token"
    auto_class = "AutoModelForTokenClassification"

    def row_output(self, scores: np.ndarray, row: dict[str, np.ndarray]) -> np.ndarray:
        """Return the logits of the row's real tokens, [t, K]."""
        return scores[row["attention_mask"] > 0]
