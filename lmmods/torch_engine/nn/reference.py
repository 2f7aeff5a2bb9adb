"""Reference model of preference optimisation: the network before training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lmmods.core.console import say
from lmmods.data.references import adopt_references, begin_references, reference_store
from lmmods.data.store.references import COMPUTING
from lmmods.runs.model_card import first_weights
from lmmods.torch_engine.compat.peft import adapters_off
from lmmods.torch_engine.nn import sharding
from lmmods.torch_engine.nn.micro_batches import gather, split_rows


class Reference:
    """Turns a network into its reference temporarily, so that frozen weights are in memory only once.

    Args:
        kind: `base` for the network without its adapter; `copy` for a copy of the trainable parameters, made now.
        trainable: Trainable parameters by name. Of sharded ones only this process's shards are copied.
    """

    def __init__(self, model: nn.Module, kind: Literal["base", "copy"], trainable: dict[str, nn.Parameter]) -> None:
        self._model, self._kind = model, kind
        # A base without adapter needs no copy: it does not train.
        params = [sharding.local(param.detach()) for param in trainable.values()] if kind == "copy" else []
        self._copies = [(param, param.clone()) for param in params]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Make the network the reference, without gradient and dropout. Must not be used within a forward pass."""
        with evaluating(self._model), self._weights():
            yield

    @contextmanager
    def _weights(self) -> Iterator[None]:
        if self._kind == "base":
            with adapters_off(self._model):
                yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        # In place, as optimiser and sharding hold these tensors.
        for param, copy in self._copies:
            _exchange(param, copy)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable gradient and dropout of a network temporarily."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def _exchange(one: Tensor, other: Tensor) -> None:
    before = one.clone()
    one.copy_(other)
    other.copy_(before)


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities of all answers under the initial network, computed once and cached.

def cache_references(task: Any) -> None:
    """Add `reference_logps` to the batches of a preference task, computed unless cached.

    A collective call, once the network is built. Raises UserError if the data is a stream.
    """
    data, strategy = task.trainer.datamodule, task.trainer.strategy
    network = first_weights(task, task.trainer.precision, data.run_seed)
    stage = task.trainer.state.fn
    for role in begin_references(data, stage.value) if stage else []:  # without a stage no loop reads them
        store = reference_store(data, role, network)
        found = strategy.broadcast(store.read() if task.trainer.is_global_zero else None)
        if found is None:
            if task.trainer.is_global_zero:
                say(COMPUTING.format(rows=store.shape[0], role=role))
            found = _compute(task, role, store.shape)
            if task.trainer.is_global_zero:
                store.write(found)
        adopt_references(data, role, found)


def _compute(task: Any, role: str, shape: tuple[int, int]) -> np.ndarray:
    """Compute the log-probabilities [rows, answers] of a set."""
    trainer, size = task.trainer, task.chunk_tokens()
    found = {}
    for batch in trainer.datamodule.evaluation_loader(role, "index"):
        batch = trainer.strategy.batch_to_device(batch)
        for chunk in split_rows(batch, size) if size else [batch]:
            with evaluating(task.model), trainer.precision_plugin.forward_context():
                logps, _ = task(task.answer_logps, chunk)
            found |= dict(zip(chunk["index"].tolist(), logps.float().cpu().numpy(), strict=True))  # [A] of each row
    logps = np.zeros(shape, np.float32)
    for number, values in gather(found, trainer.world_size).items():
        if number >= 0:  # negative numbers are filler rows that even out the processes
            logps[number] = values
    return logps
