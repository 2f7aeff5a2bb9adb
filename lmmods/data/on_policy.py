"""Batches with answers that the model in training samples before each optimiser step (GKD, on policy).

The run's seed, the epoch and the row alone determine which rows these are and which random numbers sample their tokens.
The weights are those before the step. So a run resumed inside a step samples the same answers again.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from lmmods.core.generation_config import sampling_uniforms
from lmmods.core.labels import IGNORED
from lmmods.data.batch.collate import DRAWN
from lmmods.data.batch.loader import Batch, SegmentLoader, Shard
from lmmods.data.loaders import Loaders
from lmmods.data.order.sampler import BatchOrder, OrderRule, batches_per_rank

# Returns the tokens, [T] int32 each, of answers to prompts, from uniform numbers in [0, 1) [N, max_new_tokens] that
# decide them. A collective call, which all processes make with the same arguments.
Draw = Callable[[list[np.ndarray], np.ndarray], list[np.ndarray]]


def make_stand_ins(prompts: list[np.ndarray], uniforms: np.ndarray) -> list[np.ndarray]:
    """Return answers of maximum length that repeat the prompts, for when nothing trains."""
    return [np.resize(prompt, uniforms.shape[1]) for prompt in prompts]


class OnPolicy(NamedTuple):
    """Which answers are sampled.

    Args:
        fraction: Fraction of the rows.
        max_new_tokens: Maximum answer length in tokens. Rows whose prompt leaves no space keep their given answer.
        max_length: Maximum length of a prompt with its answer, in tokens.
        seed: Seed of the run.
        draw: Samples the answers.
    """

    fraction: float
    max_new_tokens: int
    max_length: int
    seed: int
    draw: Draw

    def make_loader(self, loaders: Loaders, shard: Shard) -> "OnPolicyLoader":
        """Return training micro-batches with sampled answers."""
        items, rows, on_policy = loaders.items("train"), loaders.splits.rows("train"), self
        lengths = items.lengths
        if loaders.longest_first:
            on_policy = self._replace(fraction=1.0, draw=make_stand_ins)
            prompts = rows.column("prompt_length")
            lengths = np.where(on_policy.has_space(prompts), prompts + on_policy.max_new_tokens, lengths)
        order = loaders.order(lengths, shard)
        return OnPolicyLoader(items, order.of, loaders.collator(seeded=True, added=(DRAWN,)), shard,
                              loaders.settings.batch_size, on_policy, order.grouped, order.num_rows)

    def has_space(self, prompt_length: int | np.ndarray) -> Any:
        """Return whether a prompt of this many tokens leaves space for an answer."""
        return (prompt_length > 0) & (prompt_length + self.max_new_tokens <= self.max_length)


class SampledSet(Dataset):
    """Items of a `NumberedSet`, some of them with answers sampled for the current step.

    Items have `drawn`, 1 for those and else 0. All tokens of a sampled answer are targets, none of its prompt.

    Args:
        items: With `prompt_length`, the tokens before the last response.
    """

    def __init__(self, items: Any, on_policy: OnPolicy) -> None:
        self._items, self._on_policy = items, on_policy
        self._replaced: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        item = self._replaced.get(index) or self._items[index]
        return item and {DRAWN: 0, **item}

    def draw(self, indices: Iterable[int]) -> None:
        """Sample the answers of a step.

        Args:
            indices: Indices of all items of the step, as in a `NumberedSet`.
        """
        on_policy, selected, uniforms = self._on_policy, [], []
        for index in indices:
            epoch, row = divmod(index, len(self))
            # A row's first random number decides whether its answer is sampled; the others sample its tokens.
            [[first, *token_uniforms]] = sampling_uniforms(on_policy.seed, [row], 1 + on_policy.max_new_tokens,
                                                           step=epoch)
            if first < on_policy.fraction and on_policy.has_space(int((item := self._items[index])["prompt_length"])):
                selected.append((index, item))
                uniforms.append(token_uniforms)
        prompts = [item["input_ids"][: item["prompt_length"]] for _, item in selected]
        uniforms_of_tokens = np.array(uniforms, np.float32).reshape(-1, on_policy.max_new_tokens)
        # Every process selects the same rows.
        answers = on_policy.draw(prompts, uniforms_of_tokens) if selected else []
        self._replaced = {index: _replace_answer(item, prompt, answer)
                          for (index, item), prompt, answer in zip(selected, prompts, answers, strict=True)}


def _replace_answer(item: dict[str, Any], prompt: np.ndarray, answer: np.ndarray) -> dict[str, Any]:
    """Return an item with another answer."""
    return {**item, DRAWN: 1, "input_ids": np.concatenate([prompt, answer]).astype(np.int32),
            "labels": np.concatenate([np.full(len(prompt), IGNORED), answer]).astype(np.int32)}


class OnPolicyLoader(SegmentLoader):
    """Training batches read up to the end of an optimiser step, before which answers of its rows are sampled.

    Args:
        items: A `NumberedSet`; `order_of`, `grouped` and `num_rows` as in `StatefulLoader`.
    """

    def __init__(self, items: Any, order_of: Callable[[int, OrderRule], BatchOrder], collate: Callable[[list], Batch],
                 shard: Shard, batch_size: int, on_policy: OnPolicy, grouped: bool = True,
                 num_rows: int | None = None) -> None:
        self._sampled = SampledSet(items, on_policy)
        self._step: tuple[int, int] | None = None  # epoch and step in it whose answers are sampled
        shard = replace(shard, num_workers=0)  # workers would not see the answers
        super().__init__(self._sampled, order_of, collate, shard, batch_size, None, grouped, num_rows)

    def begin_segment(self) -> int:
        self._begin_epoch()
        size = self._shard.batches_per_step
        step = self._handed_out // size
        stop = min((step + 1) * size, self._num_batches)
        if self._step != (self._epoch, step):
            # All rows of the step, also where a resumed run has trained on some: the same calls give the same bits.
            order = self._order_of(self._epoch, self._rule)
            self._sampled.draw(row for batch in range(step * size, stop) for row in order[batch] if row >= 0)
            self._step = self._epoch, step
        return batches_per_rank(stop - self._handed_out, self._shard.world_size)
