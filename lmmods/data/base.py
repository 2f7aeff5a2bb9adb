"""The DataModule that every task builds on: splits, loaders and report for the command line and the engines."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import lightning
import numpy as np
from torch.utils.data import Dataset

from lmmods.core import fingerprints
from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.core.hardware import REFERENCE, cache_folder
from lmmods.core.labels import IGNORED
from lmmods.core.redaction import redact
from lmmods.data.batches.collate import DRAWN, PLACES, SEEDS, Collator
from lmmods.data.batches.loader import Batch, EvaluationLoader, Shard, StatefulLoader, StepLoader, Widths
from lmmods.data.batches.mixing import Mixture
from lmmods.data.batches.on_policy import OnPolicyLoader, stand_ins
from lmmods.data.batches.packing import PackedSet
from lmmods.data.batches.sampler import BatchOrder, OrderRule, evaluation_order, mixed_order, training_order
from lmmods.data.batches.stream import StreamLoader, StreamSource, draw_number
from lmmods.data.encode.tokenizer import TokenizerOptions, encoding_state
from lmmods.data.hooks import TaskHooks
from lmmods.data.report import describe, describe_lost, misfit, render_table
from lmmods.data.sources.preferences import Answers
from lmmods.data.splits import STAGE_ROLES, Role, SourceStores, Splits
from lmmods.data.store.cache import fingerprint
from lmmods.data.store.references import ArrayStore
from lmmods.data.store.rows import RowSet
from lmmods.recipe.source import Source
from lmmods.recipe.trainer_fields import limited

# ---------------------------------------------------------------------------------------------------------------------
# Batches of each role: items built from rows, their order, the collator, and the loader of one data-parallel rank.


class Loaders:
    """Builds the loaders of a data module.

    Args:
        task: Batch sizes, orders, and how rows become items.
        rows: Returns the rows of a role. Raises UserError if there are none.
        sources: The training sources.
    """

    def __init__(self, task: TaskHooks, rows: Callable[[Role], RowSet], sources: list[Source]) -> None:
        self._task, self._rows, self._sources = task, rows, sources
        self._items: dict[Role, Any] = {}

    def items(self, role: Role) -> Any:
        """Items of batches: the task's arrangement of the kept rows, packed if requested."""
        if role not in self._items:
            self._items[role] = self._arranged(self._rows(role))
        return self._items[role]

    def _arranged(self, rows: RowSet) -> Any:
        task = self._task
        items = NumberedSet(task._arrange(rows), task._draws_by_epoch())
        if not task.packing:
            return items
        return PackedSet(items, task.max_length, task.seed, _source_sizes(items, rows) if task.parts_sources else None)

    @cached_property
    def mixture(self) -> Mixture | None:
        """Shares of the training sources; None if each row comes once. Raises UserError."""
        task = self._task
        if not task.parts_sources:
            return None
        sizes = _source_sizes(self.items("train"), self._rows("train"))
        return Mixture(task.mixing, sizes.tolist(), [source.weight for source in self._sources])

    def mixing_report(self) -> dict[str, Any] | None:
        """Shares of the training sources for the data report; None if each row comes once."""
        task, names = self._task, [redact(source.path) for source in self._sources]
        if not task.mixes:
            return None
        if self.mixture is not None:
            return self.mixture.describe(names, task.mixing.rule)
        shares = task.mixing.shares([source.times for source in self._sources])  # of a stream
        return {"rule": task.mixing.rule,
                "sources": [{"path": name, "share": share} for name, share in zip(names, shares, strict=True)]}

    def epoch_items(self, role: Role) -> Any:
        """Items of a role as the first epoch has them, for the data report: a data set with `lengths`."""
        items = self.items(role)
        if role != "train" or self.mixture is None:
            return items
        return Selected(items, self.mixture.epoch(0, self._task.seed) % len(items))

    def training(self, shard: Shard, overfit: int | float = 0) -> StatefulLoader:
        """Training batches from the cache.

        Args:
            overfit: Number of batches of each rank, or share of all, to repeat in each epoch; 0 is all.
        """
        task, items, mixture = self._task, self.items("train"), self.mixture
        lengths, on_policy = items.lengths, task.on_policy
        if on_policy is not None and task.longest_first:
            on_policy = on_policy._replace(share=1.0, draw=stand_ins)
            prompts = self._rows("train").column("prompt_length")
            lengths = np.where(on_policy.has_room(prompts), prompts + on_policy.max_new_tokens, lengths)

        def order_of(epoch: int, rule: OrderRule) -> BatchOrder:
            # To measure memory: the batch that needs the most comes first.
            if task.longest_first:
                return evaluation_order(lengths, task.batch_size)
            if mixture is not None:
                numbers = mixture.epoch(0 if overfit else epoch, task.seed, task.shuffle and not overfit)
                order = mixed_order(numbers, lengths, task.batch_size, [task.seed, epoch], rule,
                                    task.group_by_length and task.shuffle and not overfit)
            else:
                order = training_order(lengths, task.batch_size, [task.seed, epoch], rule,
                                       task.shuffle and not overfit, task.group_by_length)
            # A share is of all batches, a number is of each rank's.
            if overfit:
                whole = len(order) if isinstance(overfit, float) else shard.world_size
                order = order.first(max(int(overfit * whole), 1))
            # Row numbers count through the epochs; from the number an item finds its draw. Those of a mixture do so by
            # themselves, from pass to pass, unless each epoch repeats the first.
            draw = epoch if mixture is None else epoch * mixture.passes if overfit else 0
            return order.shifted(draw * len(lengths))

        grouped = task.group_by_length and task.shuffle and not overfit
        num_rows = None if mixture is None or task.longest_first else int(mixture.counts.sum())
        if on_policy is not None:
            return OnPolicyLoader(items, order_of, self.collator(seeded=True), shard, task.batch_size, on_policy,
                                  grouped, num_rows)
        return StatefulLoader(items, order_of, self.collator(seeded=True), shard, task.batch_size,
                              Widths(lengths, self._padded()), grouped, num_rows)

    def streaming(self, shard: Shard, sources: list[StreamSource]) -> StreamLoader:
        """Training batches of streams for this rank."""
        task = self._task

        def order_of(lengths: np.ndarray, epoch: int, buffer: int, rule: OrderRule, begun: int) -> BatchOrder:
            order = training_order(lengths, task.batch_size, [task.seed, epoch, buffer], rule, task.shuffle,
                                   task.group_by_length, begun)
            # As `training`, with a distinct draw for each buffer of each epoch.
            return order.shifted(draw_number(epoch, buffer) * len(lengths))

        settings = {"window_size": task.stream_window, "seed": task.seed}
        return StreamLoader(sources, self._arranged, order_of, self.collator(seeded=True), shard, task.batch_size,
                            settings, task.num_proc or 1, task.mixing.rule if task.mixing else "concat")

    def evaluation(self, role: Role, shard: Shard, collate: Callable[[list], Batch] | None = None) -> EvaluationLoader:
        """Batches without dropout seeds for this rank, as for validation and test; `collate` replaces the collator."""
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
        """Return the collator of items, with dropout seeds if `seeded`."""
        packed = ("position_ids", "segment_ids") if self._task.packing else ()
        # Dropout acts in training only.
        seeds = (SEEDS,) if seeded else ()
        places = (PLACES,) if self._task.keeps_teacher else ()
        drawn = (DRAWN,) if seeded and self._task.on_policy is not None else ()
        keys = (*self._task._batch_keys(), *packed, *places, *drawn, *seeds)
        return self._task._batch_collator(self._collator(keys, self._task._side()))

    def _padded(self) -> Callable[[int], int]:
        return self._collator((), "right").padded

    def _collator(self, keys: tuple[str, ...], side: str) -> Collator:
        task = self._task
        return Collator(keys, task.tokenizer.pad_token_id, task.pad_to_multiple_of, task.max_length, side,
                        task.run_seed)


def _source_sizes(items: Any, rows: RowSet) -> np.ndarray:
    """Items of each source, int64, which come in the order of the sources.

    Raises:
        UserError: The items do not say it.
    """
    inner = items.items if isinstance(items, NumberedSet) else items
    if hasattr(inner, "source_sizes"):
        return inner.source_sizes
    if len(items) != len(rows):
        raise UserError(f"data.mixing: the items of {type(inner).__name__} are neither one for each row nor do they "
                        "have source_sizes, which says how many are of each source; add it, or set data.mixing to null")
    return rows.source_sizes


class Selected:
    """Lengths and tokens of selected items, which may come several times."""

    def __init__(self, items: Any, places: np.ndarray) -> None:
        self.lengths = items.lengths[places]
        self.tokens = getattr(items, "tokens", items.lengths)[places]
        self.num_answers = getattr(items, "num_answers", 1)

    def __len__(self) -> int:
        return len(self.lengths)


# ---------------------------------------------------------------------------------------------------------------------
# Single training rows as the model sees them: the first, the worst, or selected ones.

Which = Literal["first", "longest", "most_cut", "most_unknown"]


def shown_rows(items: Any, rows: RowSet, num_rows: int, which: Which | list[int], unknown_id: int | None,
               scored: Callable[[dict[str, Any], dict[str, Any]], str | None]) -> list[dict[str, Any]]:
    """Training rows as the model sees them, as plain lists: {index, input_ids, location}.

    Rows that have them also get the `labels` and `weights` of their tokens, `prompt_length`, and what is `scored` in
    words. A row of several answers comes as one row for each, by `name`.

    Args:
        items: Items of batches, a data set with `lengths` and `truncated`.
        rows: The rows that the items are built from.
        which: `first`, `longest`, `most_cut` (tokens removed), `most_unknown` (tokens not in the vocabulary), or row
            numbers.
        scored: See `TaskHooks._scored`.

    Raises:
        UserError: A row number does not exist.
    """
    shown = [items[place] for place in _places(items, num_rows, which, unknown_id)]
    return [_shown_row(row, rows, scored) for item in shown for row in _answers(item)]


def _answers(item: dict[str, Any]) -> list[dict[str, Any]]:
    """The sequences of an item: one, or one for each answer."""
    return [{**item, **answer} for answer in item["answers"]] if "answers" in item else [item]


def _places(items: Any, num_rows: int, which: Which | list[int], unknown_id: int | None) -> list[int]:
    if isinstance(which, list):
        wrong = [place for place in which if not 0 <= place < len(items)]
        if wrong:
            raise UserError(f"row {wrong[0]} does not exist; the training set has rows 0 to {len(items) - 1}")
        return which
    if which == "first":
        return list(range(min(num_rows, len(items))))
    if which == "most_unknown":
        measure = np.array([(items[place]["input_ids"] == unknown_id).sum() for place in range(len(items))])
    else:
        measure = items.lengths if which == "longest" else items.truncated
    return np.argsort(-measure, kind="stable")[:num_rows].tolist()


def _shown_row(row: dict[str, Any], rows: RowSet, scored: Callable[[dict[str, Any], dict[str, Any]], str | None]
               ) -> dict[str, Any]:
    # Where `index` numbers the items themselves, `source` is the number of the row as read.
    ids, index = row["input_ids"].tolist(), int(row.get("source", row["index"]))
    labels = {"labels": row["labels"].tolist()} if "labels" in row else {}
    prompt = {"prompt_length": int(row["prompt_length"])} if "prompt_length" in row else {}
    weights = {"weights": np.unique(row["weight"]).tolist()} if "weight" in row else {}
    name = {"name": row["name"]} if "name" in row else {}
    words = scored(row, rows.source_row(index))
    return {"index": index, "input_ids": ids, "location": rows.location(index), **labels, **prompt, **weights, **name,
            **({"scored": words} if words else {})}


DEFAULT_MAX_LENGTH = 1024
NEW_PADDING = "new_padding"  # in a checkpoint: true if a missing padding token was added
WHOLE_WORDS = "whole_words"  # in a checkpoint: true if added tokens are matched whole in texts


class DataModule(TaskHooks, lightning.LightningDataModule):
    """Text in, batches out. Abstract: each task says how rows are encoded.

    Its fields are those of DataFields; a task adds to them as `class SFTData(SFTDataFields, DataModule)` does. What a
    task may override is in TaskHooks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # The __init__ that dataclasses generate does not call Lightning's.
        lightning.LightningDataModule.__init__(self)
        self.eval_batch_size = self.eval_batch_size or self.batch_size
        self._tokenizer = replace(self._tokenizer, pad_token=self.pad_token, bos_token=self.bos_token,
                                  eos_token=self.eos_token, add_tokens=self.add_tokens,
                                  options=self.tokenizer_options, new_padding=self._adds_padding)
        self.contents: dict[str, str | None] = {}  # hashes of sources, computed by one process once per start
        self._splits = Splits(self, SourceStores(self, self.contents))
        self.described_sources = self._splits.described  # for a manifest
        self._loaders = Loaders(self, self._rows, self._splits.sources["train"])
        self._checked: set[Role] = set()
        self._warned: set[str] = set()
        self._report: dict[str, Any] | None = None
        self._loader: StatefulLoader | StreamLoader | None = None
        self._position: dict[str, Any] | None = None

    # Settings that depend on the model and the run

    def connect(self, *, pretrained: str | None = None, revision: str | None = None, trust_remote_code: bool = False,
                seed: int | None = None, max_positions: int | None = None, token_types: bool = True,
                answers: Answers = "pair", label_names: list[str] | None = None, new_tokens: int = 1,
                max_new_tokens: int | None = None) -> None:
        """Fill in fields that the user left unset from the model and the run.

        Args:
            pretrained: Folder or hub id of the model, for its tokenizer.
            revision: Revision of that hub model.
            trust_remote_code: True if code of the repository may run.
            seed: Seed of the run.
            max_positions: Longest row the model can take.
            token_types: True if the model uses token types.
            answers: What a row of preferences is to the loss.
            label_names: Labels of the pretrained model, in the order of its outputs; None if it names none.
            new_tokens: Tokens of an answer, for which a prompt leaves room.
            max_new_tokens: Maximum length of an answer in predict; None if it generates none.

        Raises:
            UserError: `max_length` is more than the model can take.
        """
        # A tokenizer that the recipe names comes before the model's.
        if self._tokenizer.path is None and pretrained is not None:
            self._tokenizer = replace(self._tokenizer, path=pretrained, revision=revision)
        self._tokenizer = replace(self._tokenizer, trust_remote_code=trust_remote_code)
        if self._seed is None:
            self._seed = seed
        self.run_seed = seed or 0
        self.token_types, self.answers, self.label_names = token_types, answers, label_names
        self.new_tokens, self.max_new_tokens = new_tokens, max_new_tokens
        if max_positions is not None and (self.max_length or 0) > max_positions:
            raise UserError(f"data.max_length is {self.max_length}, but the model takes at most {max_positions} tokens")
        if self.max_length is None:
            self.max_length = min(DEFAULT_MAX_LENGTH, max_positions or DEFAULT_MAX_LENGTH)
            self.check_tokens()

    def resume_from(self, checkpoint: dict[str, Any]) -> None:
        """Treat padding and added tokens as the run of a checkpoint did, whose network may or may not have a row for
        [PAD].

        Args:
            checkpoint: Its content without arrays. Checkpoints without these keys added [PAD] to any vocabulary, and
                matched added tokens whole in templates only.
        """
        state = checkpoint.get(type(self).__qualname__, {})
        self._tokenizer = replace(self._tokenizer, new_padding=state.get(NEW_PADDING, True),
                                  whole_words=state.get(WHOLE_WORDS, False))

    @property
    def seed(self) -> int:
        """Seed of splits and orders: the field, else the run's."""
        return self._seed or 0

    @seed.setter
    def seed(self, value: int | None) -> None:
        self._seed = value

    @property
    def tokenizer(self):  # noqa: ANN201 - transformers is imported only when used
        """The repaired transformers tokenizer of the folder or hub id that is set. Raises UserError."""
        return self._tokenizer.loaded.tokenizer

    @tokenizer.setter
    def tokenizer(self, path: str | None) -> None:
        self._tokenizer = TokenizerOptions(path)

    @property
    def trainable_new_tokens(self) -> list[int]:
        """Ids missing from the vocabulary on disk whose embeddings must be trained: all but padding."""
        return self._tokenizer.loaded.trainable_new_tokens

    # Rows

    def prepare_data(self) -> None:
        """Read, encode and write what the stage needs and the cache lacks. Runs in one process. Raises UserError."""
        self.max_length = self.max_length or DEFAULT_MAX_LENGTH
        stage = getattr(getattr(self.trainer, "state", None), "fn", None)
        self._splits.prepare(str(stage.value) if stage else None, self._shard().rank == 0)

    def setup(self, stage: str | None = None) -> None:
        """Open the stores that `stage` (fit, validate, test, predict; None is all) needs. Raises UserError."""
        self.max_length = self.max_length or DEFAULT_MAX_LENGTH
        strategy = getattr(self.trainer, "strategy", None)
        if not self._splits.sets and hasattr(strategy, "broadcast"):  # the JAX trainer broadcasts them itself
            self.adopt_contents(strategy.broadcast(self.contents))
        self._report = None
        self._splits.open(stage, self._shard().rank == 0)
        self._check_splits(stage)

    def _check_splits(self, stage: str | None) -> None:
        """Warn if the vocabulary does not fit, or if an evaluation does not see all of its rows; `fit` has these in its
        data report. Raises UserError: no token of a split is scored by its loss.
        """
        for role in [role for role in self._splits.sets if role not in self._checked]:
            self._checked.add(role)
            stores = self._splits.sets[role].stores
            found = [problem for store in stores if (problem := misfit(store.info))]
            if role != "train" and stage != "fit" and role in STAGE_ROLES[stage]:
                found += [line for store in stores for line in describe_lost(role, store.info)]
            items = self._loaders.items(role) if role != "predict" else ()
            if items and not any(self._is_scored(items[number], role) for number in range(len(items))):
                raise UserError(f"{self._splits.key(role)}: in its rows ({len(items)}) no token is scored, so "
                                f"{role}/loss has nothing to measure. "
                                + (found[0] if found else "Rows of one token, of special tokens alone or, in masked "
                                   "language modelling, without a mask score none: add longer ones"))
            for problem in found:
                self._warn_once(f"{problem}.")

    def _warn_once(self, message: str) -> None:
        """Warn in the first process, and not again of the same."""
        if message not in self._warned and getattr(self.trainer, "is_global_zero", True):
            warn(message)
        self._warned.add(message)

    def _can_score(self, role: Role, is_labelled: list[bool]) -> bool:
        """True if all rows of an evaluation have a right answer: a score over some of them would be taken for one over
        all. Warns if only some have one.
        """
        missing = is_labelled.count(False)
        if 0 < missing < len(is_labelled):
            self._warn_once(f"{role} has no scores: {missing} of {len(is_labelled)} rows have no right answer, or one "
                            "that training did not have. Complete or remove them.")
        return bool(is_labelled) and not missing

    def adopt_contents(self, contents: dict[str, str | None]) -> None:
        """Adopt the content hashes of the first process, so that other processes need not read all sources."""
        self.contents |= contents

    def _rows(self, role: Role) -> RowSet:
        """Kept rows of a role. Raises UserError if there are none."""
        if role not in self._splits.sets:
            self.setup({"train": "fit", "val": "validate"}.get(role, role))
        return self._splits.rows(role)

    def example(self, index: int) -> dict[str, Any]:
        """The source row behind `index` of a predict batch."""
        return self._rows("predict").source_row(index)

    # Batches

    def train_dataloader(self) -> StepLoader:
        """Optimiser steps of this rank, lists of micro-batches, from a loaded position if there is one.

        Raises:
            UserError: There is nothing to train on.
        """
        batches, shard, trainer = self.train_batches(), self._shard(), self.trainer
        num_batches = limited(len(batches), getattr(trainer, "train_limit", None), "train")
        # Lightning knows how far a resumed run is in its epoch, which may be a part of the loader's.
        steps_done = (lambda: trainer.fit_loop.batch_idx + 1) if hasattr(trainer, "fit_loop") else lambda: 0
        return StepLoader(batches, shard.batches_per_step // shard.world_size, num_batches, steps_done)

    def train_batches(self) -> StatefulLoader | StreamLoader:
        """Training micro-batches of this rank, from a loaded position if there is one. Raises UserError."""
        if not self.streaming:
            self._loader = self._loaders.training(self._shard(), getattr(self.trainer, "overfit_batches", 0))
        elif self.trainer is not None and self._max_steps() == -1:
            raise UserError("data.streaming never ends; set trainer.max_steps")
        else:
            self._loader = self._loaders.streaming(self._shard(), self._splits.streams())
        if self._position is not None:
            self._loader.load_state_dict(self._position)
            self._position = None
        return self._loader

    def _max_steps(self) -> int:
        # The torch engine ends its runs itself: Lightning's own `max_steps` says nothing there.
        return self.trainer.length[0] if hasattr(self.trainer, "length") else self.trainer.max_steps

    def val_dataloader(self) -> EvaluationLoader | list:
        """Validation batches of this rank; an empty list without a validation set."""
        return self._loaders.evaluation("val", self._shard()) if "val" in self._splits.sets else []

    def test_dataloader(self) -> EvaluationLoader:
        """Test batches of this rank. Raises UserError without a test set."""
        return self._loaders.evaluation("test", self._shard())

    def number_scored(self, stage: str) -> dict[Role, int]:
        """Number the scored tokens of the sets of a stage, one set after the other; return how many each has.

        Raises:
            UserError: Rows of a stream are not known before training.
        """
        if self.streaming and stage == "fit":
            raise UserError("model.teacher.top_k goes through all rows before training, which data.streaming does not "
                            "allow: set one of them to null, or false")
        counts: dict[Role, int] = {}
        for role in STAGE_ROLES[stage]:
            if role in self._splits.sets and role != "predict":
                counts[role] = self._numbered(role).number_scored(sum(counts.values()))
        return counts

    def _numbered(self, role: Role) -> "NumberedSet":
        items = self._loaders.items(role)
        return items.items if isinstance(items, PackedSet) else items

    def teacher_store(self, role: Role, network: dict[str, Any], count: int, top_k: int, size: int) -> ArrayStore:
        """The store of a teacher's likeliest tokens in the place of the scored tokens of a set.

        Args:
            network: All that determines the teacher's numbers.
            count: Scored tokens.
            size: Tokens that its distributions are over.
        """
        rows, items = self._rows(role), self._numbered(role)
        key = fingerprint({"teacher": network, "top_k": top_k, "size": size, "stores": [store.name for store in
                                                                                       rows.stores],
                           "rows": fingerprints.of_array(rows.chosen), "lengths": fingerprints.of_array(items.lengths),
                           "max_length": self.max_length, "parts": self.parts_sources})
        return ArrayStore(cache_folder(self.cache_dir) / f"{REFERENCE}-{key}",
                          {"ids": (count, top_k), "logps": (count, top_k + 1)}, "tokens of a teacher")

    def teacher_loader(self, role: Role) -> EvaluationLoader:
        """Each row of a set once over all ranks, with `teacher_places`."""
        return self._loaders.evaluation(role, self._shard())

    def predict_dataloader(self) -> EvaluationLoader:
        """Prompts of this rank, padded on the left, with `index`. Raises UserError without rows to predict."""
        return self._loaders.predict(self._shard())

    def _shard(self) -> Shard:
        trainer = self.trainer
        if trainer is None:
            rank, num_ranks, batches_per_step = 0, 1, 1
        elif hasattr(trainer, "data_rank"):
            rank, num_ranks, batches_per_step = trainer.data_rank, trainer.num_data_ranks, trainer.batches_per_step
        else:  # Lightning's own Trainer: each process has its own rows
            rank, num_ranks = trainer.global_rank, trainer.world_size
            batches_per_step = num_ranks * trainer.accumulate_grad_batches
        return Shard(rank, num_ranks, self.num_workers, batches_per_step, getattr(trainer, "fed_ranks", None))

    def state_dict(self) -> dict[str, Any]:
        """State of the data in a checkpoint, at the training loader's position; plain JSON."""
        return self.state_at(self._loader.state_dict()) if self._loader is not None else {}

    def state_at(self, position: dict[str, Any]) -> dict[str, Any]:
        """State of the data in a checkpoint: a loader's position, and how the tokenizer was repaired."""
        return {**position, NEW_PADDING: self._tokenizer.new_padding, WHOLE_WORDS: self._tokenizer.whole_words}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue training at a saved position. Raises UserError if it belongs to other data."""
        # Without a loader yet, the position is kept for `train_dataloader`.
        if self._loader is not None:
            self._loader.load_state_dict(state_dict)
        elif state_dict:
            self._position = dict(state_dict)

    # Report

    @property
    def report(self) -> dict[str, Any]:
        """Counts of rows read, dropped and truncated, and the fill of batches; plain JSON, after `setup`."""
        if self._report is None:
            self._report = describe(self, self._splits.sets, self._loaders.epoch_items, self._tokenizer.loaded.notes,
                                    self._shard().batches_per_step,
                                    self._loaders.mixing_report() if "train" in self._splits.sets else None,
                                    self._splits.left_out)
        return self._report

    def report_table(self) -> str:
        """The report as a short table."""
        return render_table(self.report)

    def identity(self) -> dict[str, Any]:
        """Facts that determine rows and tokens but are in no recipe, by recipe key. Works before `prepare_data`, too.

        Raises:
            UserError: A source or the tokenizer cannot be read.
        """
        state = json.dumps(encoding_state(self.tokenizer), sort_keys=True, default=str)
        return {**self._splits.identity(), "tokenizer": fingerprints.joined([state]),
                "max_length": self.max_length or DEFAULT_MAX_LENGTH}

    def rows_for_inspection(self, num_rows: int, which: Which | list[int] = "first") -> list[dict[str, Any]]:
        """Training rows as the model sees them; see `shown_rows`."""
        return shown_rows(self._loaders.items("train"), self._rows("train"), num_rows, which,
                          self.tokenizer.unk_token_id, self._scored)


# ---------------------------------------------------------------------------------------------------------------------
# Items with their number within the epoch and the epoch's number, which seed their dropout.

class NumberedSet(Dataset):
    """Items with `row`, their number, and `draw`. Item -1 is None, a padding row.

    Item number + draw * len(self) is item `number` of that draw: an epoch, or a buffer of a stream.

    Args:
        items: Data set of {input_ids, ...} with `lengths` and `truncated`.
        redrawn: True if the items themselves differ between draws and are indexed by such numbers.

    Attributes:
        starts: Scored tokens before each item; items then hold `teacher_places` [T], the numbers of scored tokens from
            1, 0 elsewhere. None numbers none.
    """

    starts: np.ndarray | None = None

    def __init__(self, items: Any, redrawn: bool) -> None:
        self.items, self.redrawn = items, redrawn

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item."""
        return self.items.lengths

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each item, summed over its answers."""
        return getattr(self.items, "tokens", self.items.lengths)

    @property
    def num_answers(self) -> int:
        """Sequences in a batch per item, none longer than its `lengths`."""
        return getattr(self.items, "num_answers", 1)

    @property
    def truncated(self) -> np.ndarray:
        """Tokens cut from each item."""
        return self.items.truncated

    def __getitem__(self, number: int) -> dict[str, Any] | None:
        if number < 0:
            return None
        # `row` and `draw` seed dropout, so they depend neither on the order nor on the batch.
        draw, place = divmod(number, len(self))
        item = self.items[number if self.redrawn else place]
        numbered = {} if self.starts is None else {PLACES: np.where(
            scored := is_scored(item["labels"]), self.starts[place] + np.cumsum(scored), 0)}
        return {**item, **numbered, "row": place, "draw": draw}

    def number_scored(self, begin: int) -> int:
        """Number the scored tokens of all items, from `begin` + 1 on; return how many there are."""
        sizes = np.fromiter((is_scored(self.items[place]["labels"]).sum() for place in range(len(self))), np.int64,
                            len(self))
        self.starts = begin + np.cumsum(sizes) - sizes
        return int(sizes.sum())


def is_scored(labels: np.ndarray) -> np.ndarray:
    """True where a causal LM is scored on a token: where it has a label, and is not the first."""
    return (labels != IGNORED) & (np.arange(len(labels)) > 0)
