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
from lmmods.torch_engine.nn.reference import eval_mode
from lmmods.torch_engine.tasks.base import TaskModule


class MLM(MLMFields, TaskModule):
    """Train an encoder to fill masked tokens; the data module masks them. Loss and accuracy are over masked tokens."""

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
        if self.teacher_head is not None:  # first, before the student's activations take memory
            with eval_mode(self.teacher_model):
                teacher = TeacherStates(self.teacher_head.hidden(batch), self.teacher_head)
        # Only evaluation counts correct tokens.
        loss = self.build_token_loss(teacher, is_training=not count_correct)
        return masked_loss(self.head, batch, count_correct, self.built_for, loss)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        """Return the top K tokens [G, K] and their probabilities [G, K] for the batch's G gaps, row by row.

        A gap is a mask token in a prompt.
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
    """Head of a masked LM: maps the encoder's hidden states to logits.

    The model's own forward runs with a stub instead of the encoder, so no architecture needs separate code.

    Args:
        model: A masked LM of transformers, with or without PEFT's wrapper.
        plain: Apply it to all positions, and leave the gradient to autograd.
    """

    def __init__(self, model: nn.Module, plain: bool = False):
        self.model, self.plain = model, plain
        network = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.encoder = network.base_model
        self.vocab_size = network.config.vocab_size
        in_encoder = {id(p) for p in self.encoder.parameters()}
        # A decoder tied to the embedding belongs to encoder and head.
        tied = {id(p) for p in network.get_output_embeddings().parameters()}
        # Store modules and names, as a sharding strategy replaces the parameters themselves.
        owners = {id(p): (module, name) for module in network.modules()
                  for name, p in module.named_parameters(recurse=False) if id(p) not in in_encoder or id(p) in tied}
        self._owners = list(owners.values())
        encoder_modules = set(self.encoder.modules())
        if any(isinstance(module, nn.Dropout) and module.p and module not in encoder_modules
               for module in network.modules()):
            say("Dropout is applied only in the encoder: the head runs on masked positions of many rows at once.")

    def hidden(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the encoder's hidden states [B, T, H]; `batch` as in `masked_loss`."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
        return self.encoder(**inputs).last_hidden_state

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] of hidden states [N, H]."""
        dropout = TokenDropout.from_model(self.model)
        # The N positions form one row of the head, [1, N, H]. Only the shape of the token ids matters.
        with _bypass_encoder(self.encoder, hidden.unsqueeze(0)), dropout.off() if dropout else nullcontext():
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            return self.model(input_ids=ids).logits.squeeze(0)

    def params(self) -> list[Tensor]:
        """Return the head's trainable parameters, including tied ones."""
        params = [getattr(module, name) for module, name in self._owners]
        return [p for p in params if p.requires_grad]


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
def _bypass_encoder(encoder: nn.Module, hidden: Tensor) -> Iterator[None]:
    """Make `encoder` return `hidden`, whatever its inputs."""
    original = encoder.__dict__.get("forward")
    encoder.forward = lambda *_, **__: BaseModelOutput(last_hidden_state=hidden)
    try:
        yield
    finally:
        if original is None:
            del encoder.forward
        else:
            encoder.forward = original
