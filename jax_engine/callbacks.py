"""Callbacks of a JAX run, with the names and fields of Lightning's."""

from lmmods.evaluation.early_stopping import EarlyStoppingRule


class EarlyStopping(EarlyStoppingRule):
    __doc__ = EarlyStoppingRule.__doc__
