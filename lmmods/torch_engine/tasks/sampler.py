"""Drawing answers with the network in training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmmods.core.settings import Generation
from lmmods.rollouts.policy import SampledAnswer
from lmmods.torch_engine.nn.micro_batches import gather
from lmmods.torch_engine.tasks.causal_task import CausalModule, generation_config

if TYPE_CHECKING:
    from transformers import GenerationConfig


class TorchSampler:
    """The network in training as a `Sampler`. Processes that share micro-batches draw the same answers."""

    def __init__(self, task: CausalModule) -> None:
        self._task, trainer = task, task.trainer
        self.rank, self.num_ranks = trainer.data_rank, trainer.num_data_ranks

    def draw(self, prompts: Sequence[Sequence[int]], numbers: np.ndarray | None, temperature: float,
             max_new_tokens: int, ends: Sequence[int]) -> list[SampledAnswer]:
        """As of `Sampler`."""
        task, data = self._task, self._task.trainer.datamodule
        # Prompts of similar length together: less padding. Equal ones stay neighbours, as the sort is stable.
        order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
        size = data.eval_batch_size * task.rows_per_prompt
        settings = Generation(do_sample=numbers is not None, temperature=temperature if numbers is not None else 1.0,
                              top_k=0, max_new_tokens=max_new_tokens)
        config = generation_config(settings, data.tokenizer, list(ends))
        found: dict[int, SampledAnswer] = {}
        for start in range(0, self._most(len(order), size), size):
            places = order[start : start + size]
            # Other processes may have more prompts, and each step gathers sharded parameters from all.
            rows = [prompts[place] for place in places] or [[data.tokenizer.pad_token_id]]
            chosen = None if numbers is None else numbers[places] if places else numbers[:0]
            drawn = self._sample(rows, chosen, config, ends)
            found |= dict(zip(places, drawn, strict=False))
        return [found[place] for place in range(len(prompts))]

    def _sample(self, rows: list[Sequence[int]], numbers: np.ndarray | None, config: "GenerationConfig",
                ends: Sequence[int]) -> list[SampledAnswer]:
        from lmmods.torch_engine.nn.decoding import Record, generate

        task, most = self._task, config.max_new_tokens
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), config.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, width - len(row) :], mask[place, width - len(row) :] = torch.tensor(row), 1
        if numbers is not None and not len(numbers):
            numbers = np.zeros((len(rows), most), np.float32)
        draws = None if numbers is None else torch.from_numpy(numbers).to(task.device)
        record = Record(len(rows), most, task.device)
        with task.inference():
            tokens = task(generate, task.model, ids.to(task.device), mask.to(task.device), config,
                          task.device_mesh is not None, draws, record)[:, width:]
        tokens, logps, entropies = tokens.cpu().numpy(), record.logps.cpu().numpy(), record.entropies.cpu().numpy()
        found = []
        for place, row in enumerate(tokens[:, :most]):
            is_end = np.isin(row, list(ends))
            length = int(is_end.argmax()) + 1 if is_end.any() else len(row)
            found.append(SampledAnswer(row[:length].astype(np.int32), logps[place, :length].copy(),
                                       entropies[place, :length].copy(), bool(is_end.any())))
        return found

    def gather(self, parts: dict[int, Any]) -> dict[int, Any]:
        """As of `Sampler`."""
        return gather(parts, self._task.trainer.world_size)

    def _most(self, num_rows: int, size: int) -> int:
        """Return the rows to go through: the most of any process where all must take part in each pass, else its own.
        """
        trainer = self._task.trainer
        if self._task.device_mesh is None:
            return num_rows
        most = torch.tensor(float(num_rows), device=self._task.device)
        return int(trainer.strategy.reduce(most, reduce_op="max"))
