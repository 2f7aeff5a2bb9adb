"""Masked language modelling: from scratch, full or with adapters."""

from torch import Tensor

from lmmods.modules.base import TaskModule
from lmmods.modules.encoder import TokenHead, masked_loss
from lmmods.modules.loss import LossSums


class MLM(TaskModule):
    """Train an encoder to fill masked tokens; the data draws the masks. Loss and accuracy are over masked positions."""

    auto_class = "AutoModelForMaskedLM"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head: TokenHead | None = None

    def on_model_ready(self) -> None:
        self.head = TokenHead(self.model)

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        return masked_loss(self.head, batch, count_correct)
