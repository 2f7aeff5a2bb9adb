"""Rollout servers: other programs that sample the answers instead of the network in training."""

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
WEIGHTS = ".rollouts"  # subfolder of the run folder with the weights that the server reads


class RolloutServer(ABC):
    """Samples answers with weights that it reads from files. One process of a run uses it."""

    @abstractmethod
    def check(self) -> None:
        """Raise UserError unless the server can be reached and serves the right model."""

    @abstractmethod
    def update(self, folder: Path, step: int) -> None:
        """Load new weights for the next answers; called before each rollout.

        Args:
            folder: An adapter in PEFT's format, or a full model in transformers' format. It exists until the next
                update.
            step: Number of optimiser steps that produced the weights.

        Raises:
            UserError: The server did not load them.
        """

    @abstractmethod
    def draw(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float, max_new_tokens: int,
             ends: Sequence[int]) -> list[SampledAnswer]:
        """Sample an answer to each prompt, with entropies that are NaN.

        Args:
            prompts: Token ids of N prompts.
            seeds: N sampling seeds, 0 to 2**63 - 1.
            temperature: 0 is greedy.
            ends: Ids of tokens that end an answer.

        Raises:
            UserError: The server does not respond, or its answers are incomplete.
        """

    @abstractmethod
    def close(self) -> None:
        """Unload the weights of the last update."""


class ServedPolicy:
    """A policy that samples answers from a server, and computes log-probabilities with the network in training.

    The first process requests the answers for all processes. The server gets new weights before the first sampling
    after an optimiser step.

    Args:
        policy: The network in training.
        folder: The run folder.
        step: Returns the number of optimiser steps so far.
    """

    def __init__(self, policy: Policy, server: RolloutServer, folder: RunFolder, step: Callable[[], int]) -> None:
        self._server, self._folder, self._step = server, folder, step
        self.rank, self.num_ranks, self.logps = policy.rank, policy.num_ranks, policy.logps
        self.gather, self.export = policy.gather, policy.export
        self._served_step: int | None = None

    def draw(self, prompts: Sequence[Sequence[int]], uniforms: np.ndarray | None, temperature: float,
             max_new_tokens: int, ends: Sequence[int]) -> list[SampledAnswer]:
        """See `Policy`; the uniform numbers only seed the server's sampling."""
        self._update_server()
        seeds = [0] * len(prompts) if uniforms is None else _make_seeds(uniforms)
        requests = self.gather({self.rank: (prompts, seeds)})
        answers = {}
        if self.rank == 0:
            all_prompts, all_seeds = ([item for rank in sorted(requests) for item in requests[rank][column]]
                                      for column in (0, 1))
            sampled = self._server.draw(all_prompts, all_seeds, 0.0 if uniforms is None else temperature,
                                        max_new_tokens, ends)
            start = 0
            for rank in sorted(requests):
                answers[rank] = sampled[start : start + len(requests[rank][0])]
                start += len(answers[rank])
        return self.gather(answers)[self.rank]

    def _update_server(self) -> None:
        if self._served_step == self._step():
            return
        if self.rank == 0:
            if self._served_step is None:
                self._server.check()
            self._folder.files.claim(WEIGHTS)
        # Two folders in turn, as the server may still read the last one.
        folder = self._folder.root / WEIGHTS / str(self._step() % 2)
        self.export(fresh_folder(folder) if self.rank == 0 else folder)
        if self.rank == 0:
            self._server.update(folder, self._step())
        self._served_step = self._step()

    def close(self) -> None:
        """Unload the weights from the server and delete their folder."""
        if self.rank == 0 and self._served_step is not None:
            self._server.close()
            delete(self._folder.root / WEIGHTS)


def _make_seeds(uniforms: np.ndarray) -> list[int]:
    """Return a 48-bit seed for each row of uniform numbers, from its first two."""
    bits = np.ldexp(uniforms[:, :2].astype(np.float64), 24).astype(np.int64)  # float32 numbers have 24
    return [(int(row[0]) << 24) + int(row[-1]) for row in bits]


def read_server(settings: dict[str, Any]) -> RolloutServer:
    """Return the server that a recipe names by `class_path` and `init_args`, without connecting to it.

    Raises:
        UserError: The class does not exist or is not trusted, or its settings are wrong.
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


def importance_weights(train_logps: np.ndarray, sampler_logps: np.ndarray, cap: float) -> np.ndarray:
    """Return the truncated importance weight min(exp(train - sampler), cap) of each token, float32 (Yao et al. 2025).

    It corrects the loss for answers that another program sampled. Its probabilities differ from the trainer's by
    rounding, even with the same weights. The cap limits the variance.

    Args:
        train_logps: Log-probabilities under the network in training, with the weights that sampled the answers.
        sampler_logps: Log-probabilities under the program that sampled the answers; a missing one is NaN and stays so.
    """
    with np.errstate(over="ignore"):  # infinity is capped
        ratios = np.exp(np.asarray(train_logps, np.float64) - np.asarray(sampler_logps, np.float64))
    return np.minimum(ratios, cap).astype(np.float32)
