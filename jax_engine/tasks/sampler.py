"""Sampling answers from the network in training."""

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

# Maximum fraction of a device's memory for the answers being sampled: their keys and values, and a number of float32
# arrays as large as their logits.
MEMORY_FRACTION, LOGITS_COPIES = 1 / 4, 4


def answers_at_once(network: Network, length: int, memory: float) -> int:
    """Return how many answers to sample at once: a power of two, so that few shapes are compiled.

    Args:
        length: Maximum length in tokens of a prompt with its answer.
        memory: A device's memory in bytes.
    """
    cache = sum(math.prod(leaf.shape) * leaf.dtype.itemsize
                for leaf in jax.tree.leaves(jax.eval_shape(lambda: network.init_cache(1, length))))
    logits = 4 * LOGITS_COPIES * network.arch.vocab_size
    return 1 << int(math.log2(max(MEMORY_FRACTION * memory / (cache + logits), 1)))


class JaxSampler:
    """The network in training as `lmmods.rollouts.policy.Sampler`.

    Answers are sampled on one device of each process, or on all devices of a one-process mesh.

    Args:
        run: A `Run`.
    """

    def __init__(self, run: Run):
        self._run, self.rank, self.num_ranks = run, jax.process_index(), jax.process_count()

    def draw(self, prompts: Sequence[Sequence[int]], numbers: np.ndarray | None, temperature: float,
             max_new_tokens: int, ends: Sequence[int]) -> list[SampledAnswer]:
        run, network = self._run, self._run.task.network
        # A collective call, so before anything that depends on the prompts. The replica is freed afterwards.
        frozen = without_teacher(without_copies(run.weights.frozen))
        params = Weights(run.parallel, run.weights.trainable, frozen).replica
        length, answers = max((len(prompt) for prompt in prompts), default=0) + max_new_tokens, []
        at_once = answers_at_once(network, length, present_target().memory)
        for start in range(0, len(prompts), at_once):
            part = slice(start, start + at_once)
            answers += sample_answers(network, params, prompts[part], None if numbers is None else numbers[part],
                                      temperature, max_new_tokens, ends, run.data.tokenizer.pad_token_id)
        return answers

    def gather(self, parts: dict[int, Any]) -> dict[int, Any]:
        return machines.gather(parts)
