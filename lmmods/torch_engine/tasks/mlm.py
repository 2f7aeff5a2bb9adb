"""Masked language modelling: from scratch, full or with adapters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from lmmods.core.console import say
from lmmods.recipe.tasks.mlm import MLMFields
from lmmods.torch_engine.nn.distillation import TeacherStates
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.nn.loss import LossSums, token_loss
from lmmods.torch_engine.nn.reference import evaluating
from lmmods.torch_engine.tasks.base import TaskModule


class MLM(MLMFields, TaskModule):
    """Train an encoder to fill masked tokens; the data draws the masks. Loss and accuracy are over masked positions."""

    auto_class = "AutoModelForMaskedLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head: MLMHead | None = None
        self.teacher_head: MLMHead | None = None

    def on_model_ready(self) -> None:
        self.head = MLMHead(self.model, plain=not self.fast_kernels)
        if self.teacher_model is not None:
            self.teacher_head = MLMHead(self.teacher_model, plain=not self.fast_kernels)

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        teacher = None
        if self.teacher_head is not None:  # first, while there are no activations of the student
            with evaluating(self.teacher_model):
                teacher = TeacherStates(self.teacher_head.hidden(batch), self.teacher_head)
        # Evaluation counts.
        loss = self.loss_of_tokens(teacher, is_training=not count_correct)
        return masked_loss(self.head, batch, count_correct, self.built_for, loss)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        """Return candidates [G, K], likeliest first, and their probabilities [G, K], for the batch's gaps row by row.

        A gap is a mask token in the text of a prompt.
        """
        return self(self._fill, batch, batch["input_ids"] == self.trainer.datamodule.tokenizer.mask_token_id)

    def _fill(self, batch: dict[str, Tensor], gaps: Tensor) -> tuple[Tensor, Tensor]:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        # [B, T, H] -> [G, H] -> [G, V]: the head sees gaps only.
        logits = self.head(self.head.encoder(**inputs).last_hidden_state[gaps])
        probabilities, tokens = logits.float().softmax(-1).topk(min(self.top_k, logits.shape[-1]))
        return tokens, probabilities


# ---------------------------------------------------------------------------------------------------------------------
# An encoder split from its token head, so that the head is applied to masked positions only.

class MLMHead:
    """Head of a masked LM: maps its encoder's hidden states to logits.

    The model's own forward is run with a stub in place of the encoder, so no architecture needs code of its own.

    Args:
        model: A masked LM of transformers, also wrapped by PEFT.
        plain: Apply it to all positions, and leave the gradient to autograd.
    """

    def __init__(self, model: nn.Module, plain: bool = False):
        self.model, self.plain = model, plain
        network = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.encoder = network.base_model
        self.vocab_size = network.config.vocab_size
        inside = {id(p) for p in self.encoder.parameters()}
        # A decoder tied to the embedding is in both.
        tied = {id(p) for p in network.get_output_embeddings().parameters()}
        # Modules and names instead of the parameters themselves, which a sharding strategy replaces.
        places = {id(p): (module, name) for module in network.modules()
                  for name, p in module.named_parameters(recurse=False) if id(p) not in inside or id(p) in tied}
        self._places = list(places.values())
        in_encoder = set(self.encoder.modules())
        if any(isinstance(part, nn.Dropout) and part.p and part not in in_encoder for part in network.modules()):
            say("Dropout acts inside the encoder: the head, which sees masked positions of many rows, has none.")

    def hidden(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the encoder's hidden states [B, T, H]; `batch` as of `masked_loss`."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
        return self.encoder(**inputs).last_hidden_state

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, H]."""
        dropout = TokenDropout.from_model(self.model)
        # The N positions form one row of the head, [1, N, H]. Only the shape of the token ids matters.
        with _stepping_aside(self.encoder, hidden.unsqueeze(0)), dropout.off() if dropout else nullcontext():
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            return self.model(input_ids=ids).logits.squeeze(0)

    def params(self) -> list[Tensor]:
        """Return the head's trainable parameters, tied ones included."""
        found = [getattr(module, name) for module, name in self._places]
        return [p for p in found if p.requires_grad]


def masked_loss(head: MLMHead, batch: dict[str, Tensor], count_correct: bool = False,
                device: torch.device | None = None, loss: Callable[..., LossSums] = token_loss) -> LossSums:
    """Return the summed loss over the masked positions of a batch.

    Args:
        batch: `input_ids`, `attention_mask`, `labels` [B, T]; `token_type_ids` if the model has them.
        device: As in `token_loss`.
        loss: `token_loss`, or another function with its arguments.
    """
    # Labels of masked positions are not shifted.
    return loss(head.hidden(batch), batch["labels"], head, head.params(), head.vocab_size, count_correct, head.plain,
                device=device)


@contextmanager
def _stepping_aside(encoder: nn.Module, hidden: Tensor) -> Iterator[None]:
    """Make `encoder` return these hidden states, whatever its inputs."""
    before = encoder.__dict__.get("forward")
    encoder.forward = lambda *_, **__: BaseModelOutput(last_hidden_state=hidden)
    try:
        yield
    finally:
        if before is None:
            del encoder.forward
        else:
            encoder.forward = before
