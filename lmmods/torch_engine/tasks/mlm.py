"""Masked language modelling: from scratch, full or with adapters."""

from torch import Tensor

from lmmods.core.task_fields import MLMFields
from lmmods.torch_engine.nn.loss import LossSums
from lmmods.torch_engine.nn.mlm_head import MLMHead, masked_loss
from lmmods.torch_engine.tasks.base import TaskModule


class MLM(MLMFields, TaskModule):
    """Train an encoder to fill masked tokens; the data draws the masks. Loss and accuracy are over masked positions."""

    auto_class = "AutoModelForMaskedLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head: MLMHead | None = None

    def on_model_ready(self) -> None:
        self.head = MLMHead(self.model, plain=not self.fast_kernels)

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        return masked_loss(self.head, batch, count_correct)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        """Candidates [G, K], the likeliest first, and their probabilities [G, K], for the batch's gaps row by row.

        A gap is a mask token that the text of a prompt holds.
        """
        return self(self._fill, batch, batch["input_ids"] == self.trainer.datamodule.tokenizer.mask_token_id)

    def _fill(self, batch: dict[str, Tensor], gaps: Tensor) -> tuple[Tensor, Tensor]:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = self.head(self.head.encoder(**inputs).last_hidden_state[gaps])
        probabilities, tokens = logits.float().softmax(-1).topk(min(self.top_k, logits.shape[-1]))
        return tokens, probabilities
