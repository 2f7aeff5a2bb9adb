"""A task that uses the next preference loss at each step, so that one run trains with all of them."""

from lmmods.core.preference_losses import METHODS, PreferenceLoss
from lmmods.torch_engine.tasks.preference import Preference

LOSSES = [PreferenceLoss(name, label_smoothing=0.1 if method.smooths else 0.0) for name, method in METHODS.items()
          if method.is_paired]


class LossesInTurn(Preference):
    """Preference optimisation with all paired losses, one after the other."""

    @property
    def preference_loss(self) -> PreferenceLoss:
        step = 0 if self._trainer is None else self.trainer.global_step
        return LOSSES[step % len(LOSSES)]
