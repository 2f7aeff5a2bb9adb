"""What may watch a run on JAX, under the names and fields of Lightning's callbacks."""

from abc import ABC, abstractmethod
from typing import Any

from lmmods.evaluation.early_stopping import EarlyStoppingRule


class Callback(ABC):
    """Watches a run; may set `trainer.should_stop`."""

    @property
    def state_key(self) -> str:
        return type(self).__name__

    @abstractmethod
    def on_train_start(self, trainer: Any) -> str:
        """Before the first step, after the state of a checkpoint is loaded. Returns why the run is over, else nothing.
        """

    @abstractmethod
    def on_check(self, trainer: Any, metrics: dict[str, float], validated: bool, epoch_ends: bool) -> None:
        """After each validation and at the end of each epoch, before the checkpoint of this moment is written."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know, as plain data."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""


class EarlyStopping(EarlyStoppingRule, Callback):
    __doc__ = EarlyStoppingRule.__doc__

    def on_train_start(self, trainer: Any) -> str:
        return self.begin(validates=trainer.plan.num_val_rounds > 0)

    def on_check(self, trainer: Any, metrics: dict[str, float], validated: bool, epoch_ends: bool) -> None:
        if self.is_due(validated, epoch_ends) and self.check(metrics):
            trainer.should_stop = True
