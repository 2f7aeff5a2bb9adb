"""Programs that draw the answers of rollouts instead of the network in training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.recipe.reader import read_object
from lmmods.recipe.rewards import did_you_mean
from lmmods.recipe.trust import import_class
from lmmods.rollouts.policy import Policy, SampledAnswer
from lmmods.runs.folder import RunFolder
from lmmods.runs.run_files import delete, fresh_folder

KEY = "model.rollouts"
ARGS = f"{KEY}.init_args"
SERVERS = {"VLLMServer": "lmmods.rollouts.vllm.VLLMServer"}  # by short name


WEIGHTS = ".rollouts"  # folder in that of the run, with the weights that were handed over last


class RolloutServer(ABC):
    """Draws answers with weights that are handed over in files. One process of a run uses it."""

    @abstractmethod
    def check(self) -> None:
        """Raise UserError unless it can be reached and draws from the right model."""

    @abstractmethod
    def update(self, folder: Path, step: int) -> None:
        """Draw with other weights from now on; called before each rollout.

        Args:
            folder: An adapter in PEFT's format, or a whole model in that of transformers. It must stay until the next
                update.
            step: Optimiser steps that the weights have taken.

        Raises:
            UserError: The server did not take them.
        """

    @abstractmethod
    def draw(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float, max_new_tokens: int,
             ends: Sequence[int]) -> list[SampledAnswer]:
        """Answer prompts, with entropies that are NaN.

        Args:
            prompts: Token ids of N prompts.
            seeds: N seeds, from 0 to 2**63 - 1, of the draws of each answer.
            temperature: 0 is greedy.
            ends: Tokens that end an answer.

        Raises:
            UserError: The server does not answer, or not as is needed.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop the weights that were handed over."""


class ServedPolicy:
    """A policy whose answers a server draws; log-probabilities of training are its own.

    The first process asks for the answers to the prompts of all. Weights are handed over before the first draw after a
    step.

    Args:
        policy: The network in training.
        folder: The run folder.
        step: Returns the optimiser steps taken so far.
    """

    def __init__(self, policy: Policy, server: RolloutServer, folder: RunFolder, step: Callable[[], int]) -> None:
        self._server, self._folder, self._step = server, folder, step
        self.rank, self.num_ranks, self.logps = policy.rank, policy.num_ranks, policy.logps
        self.gather, self.export = policy.gather, policy.export
        self._handed_over: int | None = None

    def draw(self, prompts: Sequence[Sequence[int]], numbers: np.ndarray | None, temperature: float,
             max_new_tokens: int, ends: Sequence[int]) -> list[SampledAnswer]:
        """As of `Policy`, but the numbers only seed the server's own draws."""
        self._hand_over()
        seeds = [0] * len(prompts) if numbers is None else _seeds(numbers)
        everything = self.gather({self.rank: (prompts, seeds)})
        found = {}
        if self.rank == 0:
            every_prompt, every_seed = ([each for rank in sorted(everything) for each in everything[rank][part]]
                                        for part in (0, 1))
            drawn = self._server.draw(every_prompt, every_seed, 0.0 if numbers is None else temperature,
                                      max_new_tokens, ends)
            start = 0
            for rank in sorted(everything):
                found[rank] = drawn[start : start + len(everything[rank][0])]
                start += len(found[rank])
        return self.gather(found)[self.rank]

    def _hand_over(self) -> None:
        if self._handed_over == self._step():
            return
        if self.rank == 0:
            if self._handed_over is None:
                self._server.check()
            self._folder.files.claim(WEIGHTS)
        # Two folders in turn: the server may still read the last one.
        folder = self._folder.root / WEIGHTS / str(self._step() % 2)
        self.export(fresh_folder(folder) if self.rank == 0 else folder)
        if self.rank == 0:
            self._server.update(folder, self._step())
        self._handed_over = self._step()

    def close(self) -> None:
        """Drop the weights that were handed over."""
        if self.rank == 0 and self._handed_over is not None:
            self._server.close()
            delete(self._folder.root / WEIGHTS)


def _seeds(numbers: np.ndarray) -> list[int]:
    """Return a seed of 48 bits for each row of uniform numbers, from its first two."""
    bits = np.ldexp(numbers[:, :2].astype(np.float64), 24).astype(np.int64)  # float32 numbers have 24
    return [(int(row[0]) << 24) + int(row[-1]) for row in bits]


def read_server(settings: dict[str, Any]) -> RolloutServer:
    """Return the server that a recipe names by `class_path` and `init_args`; nothing is started or asked.

    Raises:
        UserError: There is no such class, the recipe may not name it, or its settings are wrong.
    """
    if not isinstance(settings, dict) or not isinstance(settings.get("class_path"), str):
        raise UserError(f"{KEY} must be {{class_path: VLLMServer, init_args: {{url: ..., model: ...}}}}, or null.")
    for key in settings.keys() - {"class_path", "init_args"}:
        raise UserError(f"{KEY}.{key} is not a key. Set it under {ARGS}.")
    path, arguments = settings["class_path"], settings.get("init_args") or {}
    if not isinstance(arguments, dict):
        raise UserError(f"{ARGS} must be a mapping of the settings of {path}.")
    if "." not in path and path not in SERVERS:
        raise UserError(f"{KEY}.class_path is {path}, but must be {', '.join(SERVERS)} or the import path of a class."
                        + did_you_mean(path, list(SERVERS)))
    return read_object(import_class(SERVERS.get(path, path), (RolloutServer,), f"{KEY}.class_path"), arguments, ARGS)


def sampler_weights(own_logps: np.ndarray, sampler_logps: np.ndarray, cap: float) -> np.ndarray:
    """Return the truncated importance weight min(exp(own - sampler), cap) of each token, float32 (Yao et al. 2025).

    It corrects the loss for answers that another program drew, whose probabilities differ from the trainer's by
    rounding even with the same weights. The cap bounds the variance.

    Args:
        own_logps: Log-probabilities under the network in training, when the answers were drawn.
        sampler_logps: Those under the program that drew them; NaN, where one is missing, stays NaN.
    """
    with np.errstate(over="ignore"):  # infinity is capped, too
        ratios = np.exp(np.asarray(own_logps, np.float64) - np.asarray(sampler_logps, np.float64))
    return np.minimum(ratios, cap).astype(np.float32)
