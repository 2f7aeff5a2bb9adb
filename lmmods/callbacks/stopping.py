"""What Lightning's EarlyStopping lacks here: a count that every checkpoint holds, its reason told, its mistakes too."""

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from lmmods.console import say
from lmmods.errors import UserError


class Stopping(L.Callback):
    """Looks after the EarlyStopping callbacks of `trainer.callbacks`; stands before them in the list."""

    def __init__(self) -> None:
        self._patience: dict[EarlyStopping, int] = {}

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        for callback in trainer.early_stopping_callbacks:
            self._patience[callback] = callback.patience
            # Else it may count at the end of the epoch, when the checkpoint of this validation is written already.
            if callback._check_on_train_epoch_end is None and callback.monitor.startswith(("val/", "mmlu/")):
                callback._check_on_train_epoch_end = False

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """A run interrupted when it had stopped, or resumed after it, stays stopped, unless patience was raised."""
        for callback, patience in self._patience.items():
            callback.patience = patience  # a checkpoint brings its own
            out_of_patience = callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
            if callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED and not (
                    out_of_patience and callback.wait_count < patience):
                trainer.should_stop = True

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for callback in trainer.early_stopping_callbacks:
            if callback.monitor not in trainer.callback_metrics and trainer.state.fn == "fit" \
                    and callback.strict and not trainer.sanity_checking:
                raise UserError(f"EarlyStopping.monitor is {callback.monitor!r}, which this run does not log "
                                f"({', '.join(sorted(trainer.callback_metrics))}).")

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for callback in trainer.early_stopping_callbacks:
            if trainer.should_stop and callback.stopping_reason_message:
                say(callback.stopping_reason_message.removesuffix(" Signaling Trainer to stop."))
