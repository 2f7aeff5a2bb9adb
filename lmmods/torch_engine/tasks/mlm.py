"""Masked language modelling: from scratch, full or with adapters."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from lmmods.core.console import say
from lmmods.core.task_fields import MLMFields
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.nn.loss import LossSums, token_loss
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


# ---------------------------------------------------------------------------------------------------------------------
# An encoder with a token head taken apart, so that only masked positions reach the head.

class MLMHead:
    """What a masked-LM architecture does between its encoder's hidden states and its logits.

    The model's own forward is run with the encoder stepping aside, so any architecture's head is right without code.

    Args:
        model: A masked LM of transformers, also wrapped by PEFT.
        plain: Let it see all positions, and autograd differentiate it.
    """

    def __init__(self, model: nn.Module, plain: bool = False):
        self.model, self.plain = model, plain
        network = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.encoder = network.base_model
        self.vocab_size = network.config.vocab_size
        inside = {id(p) for p in self.encoder.parameters()}
        tied = {id(p) for p in network.get_output_embeddings().parameters()}
        # Where the parameters lie rather than themselves: a sharding strategy puts others in their place.
        places = {id(p): (module, name) for module in network.modules()
                  for name, p in module.named_parameters(recurse=False) if id(p) not in inside or id(p) in tied}
        self._places = list(places.values())
        in_encoder = set(self.encoder.modules())
        if any(isinstance(part, nn.Dropout) and part.p and part not in in_encoder for part in network.modules()):
            say("Dropout acts inside the encoder: the head, which sees masked positions of many rows, has none.")

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, H]."""
        dropout = TokenDropout.of(self.model)
        with _stepping_aside(self.encoder, hidden.unsqueeze(0)), dropout.off() if dropout else nullcontext():
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            return self.model(input_ids=ids).logits.squeeze(0)

    def params(self) -> list[Tensor]:
        """Trainable parameters of the head, tied ones included."""
        found = [getattr(module, name) for module, name in self._places]
        return [p for p in found if p.requires_grad]


def masked_loss(head: MLMHead, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
    """Summed loss over the masked positions of a batch.

    Args:
        batch: `input_ids`, `attention_mask`, `labels` [B, T]; `token_type_ids` where the model has them.
    """
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
    hidden = head.encoder(**inputs).last_hidden_state
    return token_loss(hidden, batch["labels"], head, head.params(), head.vocab_size, count_correct, head.plain)


@contextmanager
def _stepping_aside(encoder: nn.Module, hidden: Tensor) -> Iterator[None]:
    """Let `encoder` answer with these hidden states, whatever it is asked."""
    before = encoder.__dict__.get("forward")
    encoder.forward = lambda *_, **__: BaseModelOutput(last_hidden_state=hidden)
    try:
        yield
    finally:
        if before is None:
            del encoder.forward
        else:
            encoder.forward = before
