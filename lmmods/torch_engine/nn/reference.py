"""Reference model of preference optimisation and GRPO: the network before training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lmmods.core.console import say
from lmmods.data.references import adopt_references, begin_references, reference_store
from lmmods.data.store.references import COMPUTING
from lmmods.runs.model_card import describe_initial_weights
from lmmods.torch_engine.compat.peft import disable_adapters
from lmmods.torch_engine.nn import sharding
from lmmods.torch_engine.nn.micro_batches import gather, split_rows


class Reference:
    """The reference weights of a network, which replace its own temporarily, so that frozen weights exist only once.

    Args:
        kind: `base` for the network without its adapter; `copy` for a copy of the current trainable parameters.
        trainable: Trainable parameters by name. If they are sharded, only this process's shards are copied.
    """

    def __init__(self, model: nn.Module, kind: Literal["base", "copy"], trainable: dict[str, nn.Parameter]) -> None:
        self._model, self._kind = model, kind
        # The base under an adapter does not train, so it needs no copy.
        params = [sharding.local(param.detach()) for param in trainable.values()] if kind == "copy" else []
        self._copies = [(param, param.clone()) for param in params]

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Use the reference weights, without gradient and dropout. Must not be entered within a forward pass."""
        with eval_mode(self._model), self._reference_weights():
            yield

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self._kind == "base":
            with disable_adapters(self._model):
                yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        # In place, as optimiser and sharding refer to these tensors.
        for param, copy in self._copies:
            _exchange(param, copy)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Disable gradient and dropout of a network temporarily."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def _exchange(one: Tensor, other: Tensor) -> None:
    old = one.clone()
    one.copy_(other)
    other.copy_(old)


# ---------------------------------------------------------------------------------------------------------------------
# Cache of the log-probabilities of all answers under the initial network.

def cache_references(task: Any) -> None:
    """Add `reference_logps` to the batches of a preference task; compute them unless they are cached.

    A collective call, for use once the network is built. Raises UserError if the data is a stream.
    """
    data, strategy = task.trainer.datamodule, task.trainer.strategy
    network = describe_initial_weights(task, task.trainer.precision, data.run_seed)
    stage = task.trainer.state.fn
    for role in begin_references(data, stage.value) if stage else []:  # without a stage no rows are read
        store = reference_store(data, role, network)
        logps = strategy.broadcast(store.read() if task.trainer.is_global_zero else None)
        if logps is None:
            if task.trainer.is_global_zero:
                say(COMPUTING.format(rows=store.shape[0], role=role))
            logps = _compute(task, role, store.shape)
            if task.trainer.is_global_zero:
                store.write(logps)
        adopt_references(data, role, logps)


def _compute(task: Any, role: str, shape: tuple[int, int]) -> np.ndarray:
    """Return the log-probabilities [rows, answers] of the rows of a role."""
    trainer, size = task.trainer, task.chunk_tokens()
    row_logps = {}
    for batch in trainer.datamodule.evaluation_loader(role, "index"):
        batch = trainer.strategy.batch_to_device(batch)
        for chunk in split_rows(batch, size) if size else [batch]:
            with eval_mode(task.model), trainer.precision_plugin.forward_context():
                logps, _ = task(task.answer_logps, chunk)
            row_logps |= dict(zip(chunk["index"].tolist(), logps.float().cpu().numpy(), strict=True))  # [A] of each row
    logps = np.zeros(shape, np.float32)
    for index, values in gather(row_logps, trainer.world_size).items():
        if index >= 0:  # negative indices are filler rows that give all processes equally many
            logps[index] = values
    return logps
