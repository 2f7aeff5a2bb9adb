"""Log-probabilities of all answers under the network as it stands before the first step, computed once and kept."""

import math
from typing import Any

import numpy as np

from jax_engine.distributed.devices import gather, on_first
from lmmods.core.console import say
from lmmods.data.store.references import COMPUTING
from lmmods.runs.model_facts import first_weights


def cache_references(run: Any) -> None:
    """Give the batches of a preference task their `reference_logps`, computed where the cache lacks them.

    All processes must call this. Raises UserError: the data are a stream.

    Args:
        run: A `Run` whose weights are the first ones.
    """
    data, trainer = run.data, run.data.trainer
    network = first_weights(run.task, trainer.precision, data.run_seed)
    for role in data.begin_references(trainer.state.fn.value):
        store = data.reference_store(role, network)
        found = on_first(store.read)
        if found is None:
            if run.is_first:
                say(COMPUTING.format(rows=store.shape[0], role=role))
            found = _computed(run, role, store.shape)
            on_first(lambda store=store, found=found: store.write(found))
        data.adopt_references(role, found)


def _computed(run: Any, role: str, shape: tuple[int, int]) -> np.ndarray:
    """Log-probabilities [rows, answers] of a set."""
    data, steps = run.data, run.steps
    batch_size = data.eval_batch_size
    found = [(group.host["index"], steps.predict_step(run.weights.trainable, run.weights.frozen, group.batch)["logps"])
             for group in run.batches(data.reference_loader(role), batch_size, math.inf)]
    parts = {(number, rank): (index[place], values[place]) for number, (index, rows) in enumerate(found)
             for values in [steps.fetch_rows(rows)] for place, rank in enumerate(steps.local_ranks)}
    logps = np.zeros(shape, np.float32)
    for index, values in gather(parts).values():
        logps[index[index >= 0]] = values[index >= 0]
    return logps
