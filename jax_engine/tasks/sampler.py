"""Drawing answers with the network in training."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_engine.distributed import devices as machines
from jax_engine.distributed.target import present_target
from jax_engine.models.generate import sample_answers
from jax_engine.models.network import Network
from jax_engine.tasks.base import Weights
from jax_engine.tasks.reference import without_copies
from jax_engine.tasks.running import Run
from jax_engine.tasks.teacher import without_teacher
from lmmods.rollouts.policy import SampledAnswer

# Share of a device's memory that the answers being drawn may take: their keys and values, and float32 arrays as large
# as their logits.
SHARE, LOGITS = 1 / 4, 4


def answers_at_once(network: Network, length: int, memory: float) -> int:
    """Return how many answers to draw at once: a power of two, so that few shapes are compiled.

    Args:
        length: Longest prompt with its answer in tokens.
        memory: Bytes of a device.
    """
    cache = sum(math.prod(leaf.shape) * leaf.dtype.itemsize
                for leaf in jax.tree.leaves(jax.eval_shape(lambda: network.init_cache(1, length))))
    logits = 4 * LOGITS * network.config.vocab_size
    return 1 << int(math.log2(max(SHARE * memory / (cache + logits), 1)))


class JaxSampler:
    """The network of a run in training, as `lmmods.rollouts.policy.Sampler`.

    Answers are drawn on one device of each process, or on all that a mesh of one process has.

    Args:
        run: A `Run`.
    """

    def __init__(self, run: Run):
        self._run, self.rank, self.num_ranks = run, jax.process_index(), jax.process_count()

    def draw(self, prompts: Sequence[Sequence[int]], numbers: np.ndarray | None, temperature: float,
             max_new_tokens: int, ends: Sequence[int]) -> list[SampledAnswer]:
        run, network = self._run, self._run.task.network
        # A collective call, so before anything that depends on the prompts. The replica is freed afterwards.
        own = without_teacher(without_copies(run.weights.frozen))
        params = Weights(run.parallel, run.weights.trainable, own).replica
        length, found = max((len(prompt) for prompt in prompts), default=0) + max_new_tokens, []
        at_once = answers_at_once(network, length, present_target().memory)
        for start in range(0, len(prompts), at_once):
            part = slice(start, start + at_once)
            found += sample_answers(network, params, prompts[part], None if numbers is None else numbers[part],
                                    temperature,
                                    max_new_tokens, ends, run.data.tokenizer.pad_token_id)
        return found

    def gather(self, parts: dict[int, Any]) -> dict[int, Any]:
        return machines.gather(parts)
