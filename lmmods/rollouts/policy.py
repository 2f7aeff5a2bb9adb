"""What the rollouts of a run ask of an engine: drawing answers, and scoring tokens that were drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np


class SampledAnswer(NamedTuple):
    """An answer as drawn.

    Args:
        tokens: [T] int32, with the end token if it was drawn.
        logps: [T] float32, log-probability of each token under the policy that drew it, at its temperature.
        entropies: [T] float32, entropy in nats of the distribution that each token was drawn from; NaN if unknown.
        ended: True if it ends in an end token; False if it was cut off.
    """

    tokens: np.ndarray
    logps: np.ndarray
    entropies: np.ndarray
    ended: bool


class Row(NamedTuple):
    """A prompt with its answer, whose answer is scored.

    Args:
        ids: [T] int32, prompt and answer.
        labels: [T] int32, the id where a token was drawn by the policy, else IGNORED.
    """

    ids: np.ndarray
    labels: np.ndarray


class Sampler(Protocol):
    """The network in training, as it stands, drawing. In several processes every method is called by all of them alike.

    Args:
        rank: Number of this process.
        num_ranks: Number of processes.
    """

    rank: int
    num_ranks: int

    def draw(self, prompts: Sequence[Sequence[int]], numbers: np.ndarray | None, temperature: float,
             max_new_tokens: int, ends: Sequence[int]) -> list[SampledAnswer]:
        """Answer prompts, equal ones of which are computed once. This process's own; other processes have others.

        Args:
            prompts: Token ids of N prompts; may be empty in some processes.
            numbers: [N, max_new_tokens] uniform numbers in [0, 1) that decide the tokens; None is greedy.
            ends: Tokens that end an answer.
        """

    def gather(self, parts: dict[int, Any]) -> dict[int, Any]:
        """Merge the mappings of all processes, on every process."""


class Policy(Sampler, Protocol):
    """A sampler that also scores answers, as reinforcement learning needs it."""

    def logps(self, rows: Sequence[Row], temperature: float, reference: bool = False) -> list[np.ndarray]:
        """Return the log-probabilities [T] float32 of the labelled tokens of each row, 0 elsewhere.

        Args:
            reference: Under the reference instead of the policy.
        """

    def export(self, folder: Path) -> None:
        """Write the network, or its adapter, as a folder that from_pretrained / PeftModel reads."""
