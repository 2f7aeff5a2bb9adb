"""Batches of each role: items made from rows, their order, the collator, and the loader of one data-parallel rank."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.redaction import redact
from lmmods.data.batch.collate import SEEDS, Collate, Collator
from lmmods.data.batch.loader import EvaluationLoader, Shard, StatefulLoader, Widths
from lmmods.data.batch.numbered import NumberedSet
from lmmods.data.batch.packing import PackedSet
from lmmods.data.batch.stream import StreamLoader, draw_number
from lmmods.data.codec import Codec, Settings
from lmmods.data.order.mixing import Mixture
from lmmods.data.order.sampler import BatchOrder, OrderRule, evaluation_order, mixed_order, training_order
from lmmods.data.read.by_role import Role, Sources
from lmmods.data.splits import Splits
from lmmods.data.store.rows import RowSet


class Order(NamedTuple):
    """Order of training items, as `StatefulLoader` takes it.

    Args:
        of: Maps an epoch and the run's order rule to the global micro-batches.
        grouped: True if it groups items by length.
        num_rows: Items of an epoch, where sources have shares; None is all of them.
    """

    of: Callable[[int, OrderRule], BatchOrder]
    grouped: bool
    num_rows: int | None


class Loaders:
    """Makes the loaders of a data module.

    Args:
        seed: Seed of the run, for dropout.
        longest_first: Train on the longest items first, to measure the memory of the largest batch.
    """

    def __init__(self, settings: Settings, sources: Sources, splits: Splits, codec: Codec, seed: int,
                 longest_first: bool = False) -> None:
        self.settings, self.splits, self.codec, self.longest_first = settings, splits, codec, longest_first
        self._sources, self._seed = sources.by_role["train"], seed
        self._items: dict[Role, Any] = {}
        self._added: list[str] = []  # columns of batches that are not the task's

    def items(self, role: Role) -> Any:
        """Return the items of batches, packed if requested: a dataset with `lengths`. Raises UserError: no rows."""
        if role not in self._items:
            self._items[role] = self._arrange(self.splits.rows(role))
        return self._items[role]

    def _arrange(self, rows: RowSet) -> Any:
        settings = self.settings
        items = NumberedSet(self.codec.make_items(rows, self._by_source), self.codec.draws_by_epoch)
        if not settings.packing:
            return items
        return PackedSet(items, settings.max_length, settings.seed,
                         _source_sizes(items, rows) if self._by_source else None)

    @property
    def _by_source(self) -> bool:
        """True if each source has its share of the items, so that none is made from rows of two."""
        return self.settings.mixes and not self.settings.streaming

    # Columns that are not the task's

    def add_column(self, name: str) -> None:
        """Let batches contain a further column, unknown until `fill_column`."""
        if name not in self._added:
            self._added.append(name)

    def numbered(self, role: Role) -> NumberedSet:
        """Return the items of a role before packing."""
        items = self.items(role)
        return items.items if isinstance(items, PackedSet) else items

    def fill_column(self, role: Role, name: str, make: Callable[[int, dict[str, Any]], np.ndarray]) -> None:
        """Set a column of the items of a role.

        Args:
            make: Returns its value for an item, from the item's number in its set, before packing, and the item.
        """
        self.numbered(role).columns[name] = make

    # Shares of the sources

    @cached_property
    def mixture(self) -> Mixture | None:
        """Shares of the training sources; None if each row comes once. Raises UserError."""
        mixing = self.settings.mixing
        if mixing is None or not self._by_source:
            return None
        sizes = _source_sizes(self.items("train"), self.splits.rows("train"))
        return Mixture(mixing, sizes.tolist(), [source.weight for source in self._sources])

    def describe_mixing(self) -> dict[str, Any] | None:
        """Return the shares of the training sources for the data report; None if each row comes once."""
        mixing, names = self.settings.mixing, [redact(source.path) for source in self._sources]
        if mixing is None or not self.settings.mixes:
            return None
        if self.mixture is not None:
            return self.mixture.describe(names, mixing.rule)
        shares = mixing.shares([source.times for source in self._sources])  # of a stream
        return {"rule": mixing.rule,
                "sources": [{"path": name, "share": share} for name, share in zip(names, shares, strict=True)]}

    def epoch_items(self, role: Role) -> Any:
        """Return the items of a role that the first epoch has, for the data report: a dataset with `lengths`."""
        items = self.items(role)
        if role != "train" or self.mixture is None:
            return items
        return Selected(items, self.mixture.epoch(0, self.settings.seed) % len(items))

    # Loaders

    def order(self, lengths: np.ndarray, shard: Shard, overfit: int | float = 0) -> Order:
        """Return the order of training items.

        Args:
            lengths: Tokens of each item.
            overfit: Number of batches of each rank, or fraction of all, to repeat in each epoch; 0 is all.
        """
        settings, mixture = self.settings, self.mixture

        def order_of(epoch: int, rule: OrderRule) -> BatchOrder:
            # To measure memory: the batch that needs the most comes first.
            if self.longest_first:
                return evaluation_order(lengths, settings.batch_size)
            if mixture is not None:
                indices = mixture.epoch(0 if overfit else epoch, settings.seed, settings.shuffle and not overfit)
                order = mixed_order(indices, lengths, settings.batch_size, [settings.seed, epoch], rule,
                                    settings.group_by_length and settings.shuffle and not overfit)
            else:
                order = training_order(lengths, settings.batch_size, [settings.seed, epoch], rule,
                                       settings.shuffle and not overfit, settings.group_by_length)
            # A fraction is of all batches, a number is of each rank's.
            if overfit:
                num_batches = len(order) if isinstance(overfit, float) else shard.world_size
                order = order.first(max(int(overfit * num_batches), 1))
            # Row indices count through the epochs, so that an item finds its draw. A mixture's items already count from
            # pass to pass, unless each epoch repeats the first.
            draw = epoch if mixture is None else epoch * mixture.passes if overfit else 0
            return order.shifted(draw * len(lengths))

        grouped = settings.group_by_length and settings.shuffle and not overfit
        num_rows = None if mixture is None or self.longest_first else int(mixture.counts.sum())
        return Order(order_of, grouped, num_rows)

    def training(self, shard: Shard, overfit: int | float = 0) -> StatefulLoader | StreamLoader:
        """Return training micro-batches of stored rows, or of a stream.

        Args:
            overfit: See `order`.
        """
        settings = self.settings
        if not settings.streaming:
            items = self.items("train")
            order = self.order(items.lengths, shard, overfit)
            return StatefulLoader(items, order.of, self.collator(seeded=True), shard, settings.batch_size,
                                  self._widths(items), order.grouped, order.num_rows)

        def order_of(lengths: np.ndarray, epoch: int, buffer: int, rule: OrderRule, rows_before: int) -> BatchOrder:
            order = training_order(lengths, settings.batch_size, [settings.seed, epoch, buffer], rule,
                                   settings.shuffle, settings.group_by_length, rows_before)
            # As `order`, with a distinct draw for each buffer of each epoch.
            return order.shifted(draw_number(epoch, buffer) * len(lengths))

        window = {"window_size": settings.stream_window, "seed": settings.seed}
        return StreamLoader(self.splits.streams, self._arrange, order_of, self.collator(seeded=True), shard,
                            settings.batch_size, window, settings.num_proc or 1,
                            settings.mixing.rule if settings.mixing else "concat")

    def evaluation(self, role: Role, shard: Shard, added: Sequence[str] = (), collate: Collate | None = None
                   ) -> EvaluationLoader:
        """Return batches without dropout seeds, as for validation and test.

        Args:
            added: Further columns, besides those of `add_column`.
            collate: Replaces the collator.
        """
        items = self.items(role)
        order = evaluation_order(items.lengths, self.settings.eval_batch_size)
        widths = None if collate or added else self._widths(items)
        return EvaluationLoader(items, order, collate or self.collator(added=added), shard, widths)

    def _widths(self, items: Any) -> Widths:
        return Widths(items.lengths, self.base_collator.pad_length, getattr(items, "outline", None))

    def predict(self, shard: Shard) -> EvaluationLoader:
        """Return prompts with `index`. Raises UserError without rows to predict."""
        prompts = self.codec.make_prompts(self.splits.rows("predict"))
        order = evaluation_order(prompts.lengths, self.settings.eval_batch_size)
        shard = replace(shard, num_workers=0)  # workers would need a copy of the codec
        return EvaluationLoader(prompts, order, self.codec.make_prompt_collator(self.base_collator, self._sets), shard)

    def collator(self, seeded: bool = False, added: Sequence[str] = ()) -> Collate:
        """Return the collator of items.

        Args:
            seeded: With dropout seeds, as dropout acts in training only.
            added: Further columns.
        """
        packed = ("position_ids", "segment_ids") if self.settings.packing else ()
        return self.codec.make_collator(self.base_collator, self._sets, (
            *packed, *self._added, *added, *((SEEDS,) if seeded else ())))

    @property
    def base_collator(self) -> Collator:
        """Return a collator without columns."""
        settings = self.settings
        return Collator((), self.codec.tokenizer.pad_token_id, settings.pad_to_multiple_of, settings.max_length,
                        seed=self._seed)

    @property
    def _sets(self) -> list[RowSet]:
        return list(self.splits.sets.values())


class RowSource(Protocol):
    """Source of training rows that replace the stored ones, such as the model in training."""

    def make_loader(self, loaders: Loaders, shard: Shard) -> StatefulLoader:
        """Return training micro-batches of one rank. Raises UserError: the recipe does not allow it."""


def _source_sizes(items: Any, rows: RowSet) -> np.ndarray:
    """Return the items of each source, int64, which come in the order of the sources.

    Raises:
        UserError: The items do not have the number of items per source.
    """
    inner = items.items if isinstance(items, NumberedSet) else items
    if hasattr(inner, "source_sizes"):
        return inner.source_sizes
    if len(items) != len(rows):
        raise UserError(f"data.mixing: {type(inner).__name__} has neither one item per row nor source_sizes, the "
                        "number of items per source. Add source_sizes, or set data.mixing to null")
    return rows.source_sizes


class Selected:
    """Lengths and tokens of selected items, which may come several times."""

    def __init__(self, items: Any, indices: np.ndarray) -> None:
        self.lengths = items.lengths[indices]
        self.tokens = getattr(items, "tokens", items.lengths)[indices]
        self.num_answers = getattr(items, "num_answers", 1)

    def __len__(self) -> int:
        return len(self.lengths)
