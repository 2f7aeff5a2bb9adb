"""Classification of texts or text pairs on JAX: one label, several labels or a value."""

from jax_engine.tasks.by_row import LabelTask
from lmmods.recipe.tasks.sequence_classification import SequenceClassificationFields


class SequenceClassification(SequenceClassificationFields, LabelTask):
    """Classify texts; the labels' dtype and shape choose the loss."""

    head = "sequence"
    auto_class = "AutoModelForSequenceClassification"
