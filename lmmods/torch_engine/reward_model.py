"""Score texts and chats with a trained reward model."""

import contextlib
from functools import cached_property

import numpy as np
import torch

from lmmods.core.errors import UserError
from lmmods.data.batch.collate import Collator
from lmmods.data.order.sampler import evaluation_order
from lmmods.data.read.conversation import Conversation
from lmmods.data.reward import RewardData
from lmmods.recipe.tasks.reward import RewardFields
from lmmods.torch_engine.answering import choose_device, choose_precision
from lmmods.torch_engine.nn.building import build_network
from lmmods.torch_engine.nn.classifier import Classifier
from lmmods.torch_engine.nn.loading import COMPUTE_DTYPES
from lmmods.torch_engine.tasks.reward import Reward


class RewardModel:
    """A reward model for texts and for conversations that end in an answer, like predict of its task.

    The network is loaded at the first call, on a GPU if there is one.

    Args:
        name: Name of the model in messages.
        fields: Fields of the task that describe the network.
        data: The data module, which renders and truncates conversations.
        precision: Lightning's name of the precision. Default: the choice of `auto`.
        frozen: As in `build_network`.
    """

    def __init__(self, name: str, fields: RewardFields, data: RewardData, precision: str | None = None,
                 frozen: bool = False):
        self.name, self.data, self._fields, self._frozen = name, data, fields, frozen
        self._device = choose_device("auto")
        self._precision = precision or choose_precision(self._device)

    @torch.no_grad()
    def __call__(self, answers: list[str | Conversation]) -> list[float | None]:
        """Return the score of each answer in float32, None for one that cannot be scored (`encode_answers`).

        Raises:
            UserError: The network cannot be loaded, or a score is not a number.
        """
        rows = self.data.codec.encode_answers(answers)
        encoded = [index for index, ids in enumerate(rows) if ids is not None]
        scores: list[float | None] = [None] * len(rows)
        collate = Collator(("input_ids",), self.data.tokenizer.pad_token_id, self.data.pad_to_multiple_of,
                           self.data.max_length)
        order = evaluation_order(np.array([len(rows[index]) for index in encoded], np.int64), self.data.eval_batch_size)
        for batch_index in range(len(order)):
            indices = [encoded[index] for index in order[batch_index] if index >= 0]
            batch = collate([{"input_ids": rows[index]} for index in indices])
            with self._autocast():
                outputs = self._classifier({name: values.to(self._device) for name, values in batch.items()})  # [B, 1]
            for index, score in zip(indices, outputs.squeeze(1).tolist(), strict=True):
                scores[index] = score
        if not np.isfinite([score for score in scores if score is not None]).all():
            raise UserError(f"{self.name} computes scores that are not finite. Use another reward model.")
        return scores

    @cached_property
    def _classifier(self) -> Classifier:
        network = build_network(self._fields, Reward.auto_class, Reward.task_type, self.data,
                                precision=self._precision, device=self._device, seed=0, frozen=self._frozen)
        if self._fields.max_memory is None:
            torch.nn.Module.to(network, self._device)  # transformers' own `to` rejects quantised models
        return Classifier(network.eval())

    def _autocast(self) -> contextlib.AbstractContextManager:
        if not self._precision.endswith("mixed"):
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, COMPUTE_DTYPES[self._precision])
