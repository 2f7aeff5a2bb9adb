"""What may watch a run on JAX, under the names and fields of Lightning's callbacks."""

from lmmods.evaluation.early_stopping import EarlyStoppingRule


class EarlyStopping(EarlyStoppingRule):
    __doc__ = EarlyStoppingRule.__doc__
