"""Log-probabilities of all answers under the network as it stands before the first step, computed once and kept."""

from typing import Any

import numpy as np

from lmmods.core.console import say
from lmmods.data.store.references import COMPUTING
from lmmods.runs.model_facts import first_weights
from lmmods.torch_engine.nn.gradient_accumulation import gather
from lmmods.torch_engine.nn.micro_batching import split_rows
from lmmods.torch_engine.nn.reference import evaluating


def cache_references(task: Any) -> None:
    """Give the batches of a preference task their `reference_logps`, computed where the cache lacks them.

    All processes must call this, once the network stands. Raises UserError: the data are a stream.
    """
    data, strategy = task.trainer.datamodule, task.trainer.strategy
    network = first_weights(task, task.trainer.precision, data.run_seed)
    stage = task.trainer.state.fn
    for role in data.begin_references(stage.value) if stage else []:  # none looks at a network that stands still
        store = data.reference_store(role, network)
        found = strategy.broadcast(store.read() if task.trainer.is_global_zero else None)
        if found is None:
            if task.trainer.is_global_zero:
                say(COMPUTING.format(rows=store.shape[0], role=role))
            found = _computed(task, role, store.shape)
            if task.trainer.is_global_zero:
                store.write(found)
        data.adopt_references(role, found)


def _computed(task: Any, role: str, shape: tuple[int, int]) -> np.ndarray:
    """Log-probabilities [rows, answers] of a set."""
    trainer, size = task.trainer, task.piece_size()
    found = {}
    for batch in trainer.datamodule.reference_loader(role):
        batch = trainer.strategy.batch_to_device(batch)
        for piece in split_rows(batch, size) if size else [batch]:
            with evaluating(task.model), trainer.precision_plugin.forward_context():
                logps, _ = task(task.answer_logps, piece)
            found |= dict(zip(piece["index"].tolist(), logps.float().cpu().numpy(), strict=True))
    logps = np.zeros(shape, np.float32)
    for number, values in gather(found, trainer.world_size).items():
        if number >= 0:
            logps[number] = values
    return logps
