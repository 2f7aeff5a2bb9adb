"""Interfaces that engines implement for rollouts: sampling answers, and log-probabilities of sampled tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np


class SampledAnswer(NamedTuple):
    """An answer sampled from a policy.

    Args:
        tokens: [T] int32, with the end token if it was sampled.
        logps: [T] float32, log-probability of each token under that policy, at the sampling temperature.
        entropies: [T] float32, entropy in nats of the distribution that each token was sampled from; NaN if unknown.
        ended: True if the answer ends with an end token; False if it is truncated.
    """

    tokens: np.ndarray
    logps: np.ndarray
    entropies: np.ndarray
    ended: bool


class Row(NamedTuple):
    """A prompt with its answer.

    Args:
        ids: [T] int32, token ids of prompt and answer.
        labels: [T] int32, the token id where the policy sampled it, IGNORED elsewhere.
    """

    ids: np.ndarray
    labels: np.ndarray


class Sampler(Protocol):
    """Samples answers from the network in training, with its current weights. All methods are collective calls.

    Args:
        rank: Index of this process.
        num_ranks: Number of processes.
    """

    rank: int
    num_ranks: int

    def draw(self, prompts: Sequence[Sequence[int]], uniforms: np.ndarray | None, temperature: float,
             max_new_tokens: int, ends: Sequence[int]) -> list[SampledAnswer]:
        """Sample an answer to each of this process's prompts. Equal prompts are computed once.

        Args:
            prompts: Token ids of N prompts. Processes have different prompts, and may have none.
            uniforms: [N, max_new_tokens] random numbers in [0, 1) that determine the tokens; None is greedy.
            ends: Ids of tokens that end an answer.
        """

    def gather(self, parts: dict[int, Any]) -> dict[int, Any]:
        """Merge the mappings of all processes, on every process."""


class Policy(Sampler, Protocol):
    """A sampler that also computes log-probabilities, for reinforcement learning."""

    def logps(self, rows: Sequence[Row], temperature: float, reference: bool = False) -> list[np.ndarray]:
        """Return the log-probabilities [T] float32 of the labelled tokens of each row, 0 elsewhere.

        Args:
            reference: Use the reference model instead of the policy.
        """

    def export(self, folder: Path) -> None:
        """Write the network or its adapter as a folder for from_pretrained / PeftModel."""
