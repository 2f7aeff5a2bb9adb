"""Token classification, such as named entities and parts of speech."""

import numpy as np

from lmmods.recipe.tasks.token_classification import TokenClassificationFields
from lmmods.torch_engine.tasks.classifier_task import LabelModule


class TokenClassification(TokenClassificationFields, LabelModule):
    """Tag each word of a text; loss and metrics are over labelled tokens."""

    auto_class = "AutoModelForTokenClassification"
    task_type = "TOKEN_CLS"
    row_columns = ("attention_mask",)

    def row_output(self, output: np.ndarray, row: dict[str, np.ndarray]) -> np.ndarray:
        """Return the logits of the row's real tokens, [t, K]."""
        return output[row["attention_mask"].astype(bool)]
