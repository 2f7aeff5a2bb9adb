"""Sampling of answers with the network in training."""

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
    """The network in training as a `Sampler`. Processes that share micro-batches sample the same answers."""

    def __init__(self, task: CausalModule) -> None:
        self._task, trainer = task, task.trainer
        self.rank, self.num_ranks = trainer.data_rank, trainer.num_data_ranks

    def draw(self, prompts: Sequence[Sequence[int]], uniforms: np.ndarray | None, temperature: float,
             max_new_tokens: int, ends: Sequence[int]) -> list[SampledAnswer]:
        """Sample answers; see `Sampler`."""
        task, data = self._task, self._task.trainer.datamodule
        # Batch prompts of similar length, which saves padding. Equal prompts stay neighbours, as the sort is stable.
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        size = data.eval_batch_size * task.rows_per_prompt
        settings = Generation(do_sample=uniforms is not None, temperature=temperature if uniforms is not None else 1.0,
                              top_k=0, max_new_tokens=max_new_tokens)
        config = generation_config(settings, data.tokenizer, list(ends))
        answers: dict[int, SampledAnswer] = {}
        for start in range(0, self._max_num_rows(len(order), size), size):
            indices = order[start : start + size]
            # A dummy prompt if other processes have more, as each step gathers sharded parameters from all of them.
            rows = [prompts[index] for index in indices] or [[data.tokenizer.pad_token_id]]
            batch_uniforms = None if uniforms is None else uniforms[indices] if indices else uniforms[:0]
            batch_answers = self._sample(rows, batch_uniforms, config, ends)
            answers |= dict(zip(indices, batch_answers, strict=False))
        return [answers[index] for index in range(len(prompts))]

    def _sample(self, rows: list[Sequence[int]], uniforms: np.ndarray | None, config: "GenerationConfig",
                ends: Sequence[int]) -> list[SampledAnswer]:
        from lmmods.torch_engine.nn.capturing import choose_capture
        from lmmods.torch_engine.nn.decoding import Record, generate

        task, max_new_tokens = self._task, config.max_new_tokens
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), config.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, width - len(row) :], mask[index, width - len(row) :] = torch.tensor(row), 1
        if uniforms is not None and not len(uniforms):
            uniforms = np.zeros((len(rows), max_new_tokens), np.float32)
        device_uniforms = None if uniforms is None else torch.from_numpy(uniforms).to(task.device)
        record = Record(len(rows), max_new_tokens, task.device)
        with task.inference():
            tokens = task(generate, task.model, ids.to(task.device), mask.to(task.device), config,
                          task.device_mesh is not None, device_uniforms, record,
                          choose_capture(task.cuda_graphs, task.device))[:, width:]
        tokens, logps, entropies = tokens.cpu().numpy(), record.logps.cpu().numpy(), record.entropies.cpu().numpy()
        answers = []
        for index, row in enumerate(tokens[:, :max_new_tokens]):
            is_end = np.isin(row, list(ends))
            length = int(is_end.argmax()) + 1 if is_end.any() else len(row)
            answers.append(SampledAnswer(row[:length].astype(np.int32), logps[index, :length].copy(),
                                         entropies[index, :length].copy(), bool(is_end.any())))
        return answers

    def gather(self, parts: dict[int, Any]) -> dict[int, Any]:
        """Merge the mappings of all processes; see `Sampler`."""
        return gather(parts, self._task.trainer.world_size)

    def _max_num_rows(self, num_rows: int, size: int) -> int:
        """Return the maximum of `num_rows` over processes if all of them take part in each pass, else `num_rows`."""
        trainer = self._task.trainer
        if self._task.device_mesh is None:
            return num_rows
        max_num_rows = torch.tensor(float(num_rows), device=self._task.device)
        return int(trainer.strategy.reduce(max_num_rows, reduce_op="max"))
