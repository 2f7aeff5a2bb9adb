"""Batches of each role: items made of rows, their order, the collator, and the loader of one data-parallel rank."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lmmods.data.batches.collate import SEEDS, Collator
from lmmods.data.batches.loader import Batch, EvaluationLoader, Shard, StatefulLoader, Widths
from lmmods.data.batches.numbering import NumberedSet
from lmmods.data.batches.packing import PackedSet
from lmmods.data.batches.sampler import BatchOrder, OrderRule, evaluation_order, training_order
from lmmods.data.batches.stream import StreamLoader, StreamSource, draw_number
from lmmods.data.hooks import TaskHooks
from lmmods.data.splits import Role
from lmmods.data.store.rows import RowSet


class Loaders:
    """Makes the loaders of a data module.

    Args:
        task: Sizes and orders of batches, and what its rows become.
        rows: Role -> its rows. Raises UserError where there are none.
    """

    def __init__(self, task: TaskHooks, rows: Callable[[Role], RowSet]) -> None:
        self._task, self._rows = task, rows
        self._items: dict[Role, Any] = {}

    def items(self, role: Role) -> Any:
        """Rows of batches: the task's arrangement of the kept rows, packed if asked for."""
        if role not in self._items:
            self._items[role] = self._arranged(self._rows(role))
        return self._items[role]

    def _arranged(self, rows: RowSet) -> Any:
        items = NumberedSet(self._task._arrange(rows), self._task._draws_by_epoch())
        return PackedSet(items, self._task.max_length, self._task.seed) if self._task.packing else items

    def training(self, shard: Shard, overfit: int | float = 0) -> StatefulLoader:
        """Training batches from the cache.

        Args:
            overfit: So many batches of each rank, or this share of all, in each epoch the same; 0 is all.
        """
        task, items = self._task, self.items("train")
        lengths = items.lengths

        def order_of(epoch: int, rule: OrderRule) -> BatchOrder:
            if task.longest_first:
                return evaluation_order(lengths, task.batch_size)
            order = training_order(lengths, task.batch_size, [task.seed, epoch], rule,
                                   task.shuffle and not overfit, task.group_by_length)
            if overfit:
                whole = len(order) if isinstance(overfit, float) else shard.world_size
                order = order.first(max(int(overfit * whole), 1))
            return order.shifted(epoch * len(lengths))

        return StatefulLoader(items, order_of, self.collator(seeded=True), shard, task.batch_size,
                              Widths(lengths, self._padded()),
                              grouped=task.group_by_length and task.shuffle and not overfit)

    def streaming(self, shard: Shard, sources: list[StreamSource]) -> StreamLoader:
        """Training batches of streams, those of this rank."""
        task = self._task

        def order_of(lengths: np.ndarray, epoch: int, buffer: int, rule: OrderRule, begun: int) -> BatchOrder:
            order = training_order(lengths, task.batch_size, [task.seed, epoch, buffer], rule, task.shuffle,
                                   task.group_by_length, begun)
            return order.shifted(draw_number(epoch, buffer) * len(lengths))

        settings = {"window_size": task.stream_window, "seed": task.seed}
        return StreamLoader(sources, self._arranged, order_of, self.collator(seeded=True), shard, task.batch_size,
                            settings, task.num_proc or 1)

    def evaluation(self, role: Role, shard: Shard, collate: Callable[[list], Batch] | None = None) -> EvaluationLoader:
        """Batches without dropout, as of validation and test, those of this rank; `collate` makes other batches."""
        items = self.items(role)
        order = evaluation_order(items.lengths, self._task.eval_batch_size)
        widths = None if collate else Widths(items.lengths, self._padded())
        return EvaluationLoader(items, order, collate or self.collator(), shard, widths)

    def predict(self, shard: Shard) -> EvaluationLoader:
        """Prompts of this rank with `index`."""
        task = self._task
        prompts = task._prompts(self._rows("predict"))
        order = evaluation_order(prompts.lengths, task.eval_batch_size)
        shard = replace(shard, num_workers=0)  # workers would need a copy of the data module
        return EvaluationLoader(prompts, order, self._collator(task._prompt_keys(), task._prompt_side()), shard)

    def collator(self, seeded: bool = False) -> Callable[[list], Batch]:
        """Items to batches, with the seeds of dropout or without."""
        packed = ("position_ids", "segment_ids") if self._task.packing else ()
        seeds = (SEEDS,) if seeded else ()
        keys = (*self._task._batch_keys(), *packed, *seeds)
        return self._task._batch_collator(self._collator(keys, self._task._side()))

    def _padded(self) -> Callable[[int], int]:
        return self._collator((), "right").padded

    def _collator(self, keys: tuple[str, ...], side: str) -> Collator:
        task = self._task
        return Collator(keys, task.tokenizer.pad_token_id, task.pad_to_multiple_of, task.max_length, side,
                        task.run_seed)
