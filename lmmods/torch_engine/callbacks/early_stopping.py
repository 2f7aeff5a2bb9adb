"""Early stopping on Lightning."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping

from lmmods.evaluation.early_stopping import EarlyStoppingRule
from lmmods.torch_engine.compat.lightning import checks_at_epoch_end

_FIELDS = ("monitor", "patience", "verbose", "mode", "strict", "check_finite", "stopping_threshold",
           "divergence_threshold")


class SharedEarlyStopping(L.Callback):
    """Early stopping by the rule shared with the JAX engine, so that both engines stop at the same step."""

    def __init__(self, rule: EarlyStoppingRule) -> None:
        self.rule = rule

    @classmethod
    def replace(cls, callback: L.Callback) -> L.Callback:
        """Replace Lightning's EarlyStopping by this class; return other callbacks, subclasses included, as they are."""
        if type(callback) is not EarlyStopping:
            return callback
        # Lightning has negated min_delta for mode "min": undo that.
        sign = 1 if callback.mode == "max" else -1
        return cls(EarlyStoppingRule(min_delta=sign * callback.min_delta,
                                     check_on_train_epoch_end=checks_at_epoch_end(callback),
                                     **{name: getattr(callback, name) for name in _FIELDS}))

    @property
    def state_key(self) -> str:
        return self.rule.state_key

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rule.load_state_dict(state)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.rule.begin(trainer.has_validation):
            trainer.should_stop = True

    def check(self, trainer: L.Trainer, validated: bool) -> None:
        """Check the metrics if due, after a validation or at the end of an epoch without one."""
        if self.rule.is_due(validated, trainer.is_last_batch) and not trainer.fast_dev_run:
            must_stop = self.rule.check({name: value.item() for name, value in trainer.callback_metrics.items()})
            # All processes stop together, even if their metrics differ by rounding.
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(must_stop, all=False) or trainer.should_stop
