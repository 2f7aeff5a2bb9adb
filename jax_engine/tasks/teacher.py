"""The teacher of distillation on JAX: a frozen network with its own parameters, next to the one in training."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.distributed import devices as machines
from jax_engine.distributed.devices import call_on_first
from jax_engine.distributed.distillation import TeacherStates, group_others
from jax_engine.distributed.interface import num_visible_ranks
from jax_engine.distributed.loss import CHUNK_BYTES
from jax_engine.distributed.steps import Steps
from jax_engine.distributed.tree import Tree
from jax_engine.models.architecture import Head
from jax_engine.models.building import build_network
from jax_engine.models.network import Network
from jax_engine.tasks.running import Run
from lmmods.core.console import say
from lmmods.core.hardware import Target
from lmmods.data.base import DataModule
from lmmods.data.batch.collate import PLACES
from lmmods.data.teacher import COMPUTING, TeacherTopKTable, gather_top_k, number_targets, teacher_store
from lmmods.recipe.tasks.base import TokenLossFields
from lmmods.runs.model_card import describe_initial_weights

TEACHER = "teacher"  # key of its parameters in the tree of frozen parameters
TEACHER_IDS, TEACHER_LOGPS = "teacher_ids", "teacher_logps"  # columns of batches (see `TeacherTopKTable`)


class TeacherNetwork:
    """Network of `model.teacher`."""

    def __init__(self, network: Network):
        self.network = network

    @classmethod
    def build(cls, fields: TokenLossFields, head: Head, datamodule: DataModule, precision: str, seed: int,
              abstract: bool, on: Target | None) -> tuple["TeacherNetwork", Tree]:
        """Return a task's teacher and its entry in the frozen parameters, on the host.

        Args:
            fields: Fields of the task; the other arguments are as for `build_network`.

        Raises:
            UserError: The teacher cannot be built.
        """
        network, params, _ = build_network(fields.teacher_fields, head, datamodule, precision=precision, seed=seed,
                                           frozen=True, abstract=abstract, on=on)
        return cls(network), {TEACHER: params}

    def states(self, params: Tree, rows: dict[str, Array]) -> TeacherStates:
        """Return the teacher's hidden states and head for a batch's rows.

        Args:
            params: Parameters of the network in training and of the teacher.
        """
        own_params = jax.lax.stop_gradient(params[TEACHER])
        return TeacherStates(self.network.hidden(own_params, rows), lambda x: self.network.logits(own_params, x))

    def compute_top_k(self, size: int, top_k: int, params: Tree, rows: dict[str, Array]) -> tuple[Array, Array]:
        """Return the most likely tokens [N, T, k] after each position, and the log-probabilities [N, T, k + 1].

        Args:
            size: Number of tokens in the distributions.
            params: Parameters of the teacher alone.
        """
        hidden = self.network.hidden(params, rows)
        num_rows, length = hidden.shape[:2]
        # Number of positions per row whose logits are computed at once.
        width = min(max(CHUNK_BYTES // (4 * size * -(-num_rows // num_visible_ranks())), 1), length)
        hidden = jnp.pad(hidden, ((0, 0), (0, -length % width), (0, 0)))
        chunks = hidden.reshape(num_rows, -1, width, hidden.shape[-1]).swapaxes(0, 1)

        def find_in(chunk: Array) -> tuple[Array, Array]:
            log_probs = jax.nn.log_softmax(self.network.logits(params, chunk)[..., :size])
            ids = jax.lax.top_k(log_probs, top_k)[1].reshape(-1, top_k)
            logps = group_others(log_probs.reshape(-1, size), ids)
            return ids.reshape(num_rows, width, -1), logps.reshape(num_rows, width, -1)

        # [chunks, N, width, ...] -> [N, T, ...]
        return tuple(x.swapaxes(0, 1).reshape(num_rows, -1, x.shape[-1])[:, :length]
                     for x in jax.lax.map(find_in, chunks))


def without_teacher(frozen: Tree) -> Tree:
    """Return the frozen parameters of the network in training."""
    return {name: part for name, part in frozen.items() if name != TEACHER}


# ---------------------------------------------------------------------------------------------------------------------
# A teacher's most likely tokens for all target tokens, computed before training and cached.


def cached_teacher(run: Run, size: int) -> TeacherTopKTable:
    """Return the most likely tokens of a task's teacher, from the cache if it has them.

    All processes must call this.

    Args:
        run: A `Run`.
        size: Number of tokens in the distributions.

    Raises:
        UserError: The data are a stream, or the teacher cannot be built.
    """
    task, data = run.task, run.data
    teacher, trainer, compute_role, parts, start = task.teacher, data.trainer, None, [], 0
    facts = describe_initial_weights(task.teacher_fields, trainer.precision, 0)
    for role, count in number_targets(data, trainer.state.fn.value).items():
        store = teacher_store(data, role, facts, count, teacher.top_k, size)
        top_k = call_on_first(store.read)
        if top_k is None:
            if run.is_first:
                say(COMPUTING.format(top_k=teacher.top_k, teacher=teacher.pretrained, tokens=count, role=role))
            compute_role = compute_role or _build_scorer(run, size)
            top_k = gather_top_k(compute_role(role), start, count, teacher.top_k)
            call_on_first(lambda store=store, top_k=top_k: store.write(top_k))
        parts.append(top_k)
        start += count
    return TeacherTopKTable(parts, teacher.top_k)


def _build_scorer(run: Run, size: int) -> Callable[[str], Iterator[tuple[np.ndarray, ...]]]:
    """Build a task's teacher. Return a function that yields positions, tokens and log-probabilities of a set's rows."""
    task, data = run.task, run.data
    teacher, params = TeacherNetwork.build(task, task.head, data, data.trainer.precision, data.run_seed, False,
                                           task.built_for)
    params, predict = run.parallel.put_state(params[TEACHER]), partial(teacher.compute_top_k, size, task.teacher.top_k)
    steps = Steps(run.parallel, predict, None, predict=predict)

    def compute_role(role: str) -> Iterator[tuple[np.ndarray, ...]]:
        batches = run.batches(data.evaluation_loader(role), data.eval_batch_size, math.inf)
        results = [(batch.host[PLACES], steps.fetch_rows(steps.predict_step(params, {}, {
            name: array for name, array in batch.arrays.items() if name not in (TEACHER_IDS, TEACHER_LOGPS)})))
            for batch in batches]
        # A position predicts the token after it.
        parts = {(jax.process_index(), index): (positions[..., 1:], ids[..., :-1, :], logps[..., :-1, :])
                 for index, (positions, (ids, logps)) in enumerate(results)}
        yield from machines.gather(parts).values()

    return compute_role
