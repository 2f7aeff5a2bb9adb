"""The DataModule that every task builds on: it wires the stages of data for the command line and the engines.

A row of data passes five stages, each of which knows only those before it:

    read      read/        sources to records, each with its file and line
    encode    encode/      records to rows of token ids, by the task's codec (codec.py)
    store     store/       rows in the cache (encoded.py), and which of them train or validate (splits.py)
    order     order/       numbers of items: shuffled, grouped, mixed (sampler.py, mixing.py)
    batch     batch/       items, packed or not, to batches, and these to optimiser steps (loaders.py, loader.py)
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

import lightning
import numpy as np

from lmmods.core import fingerprints
from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.data.batch.collate import Collate
from lmmods.data.batch.loader import EvaluationLoader, Shard, StatefulLoader, StepLoader
from lmmods.data.batch.stream import StreamLoader
from lmmods.data.best_of import BestOf, Scorer
from lmmods.data.codec import Codec, ModelFacts, NumbersCodec, Predictions, Settings
from lmmods.data.encode.tokenizer import TokenizerOptions, encoding_state
from lmmods.data.loaders import Loaders, RowSource
from lmmods.data.read.by_role import STAGE_ROLES, Role, Sources
from lmmods.data.read.readers import Row
from lmmods.data.report import describe, describe_lost, describe_unknown_tokens, render_table
from lmmods.data.shown_rows import Which, show_rows
from lmmods.data.splits import Splits
from lmmods.data.store.rows import RowSet
from lmmods.recipe.tasks.base import DataFields
from lmmods.recipe.trainer_fields import limit_batches

DEFAULT_MAX_LENGTH = 1024
NEW_PADDING = "new_padding"  # in a checkpoint: true if a missing padding token was added
WHOLE_WORDS = "whole_words"  # in a checkpoint: true if added tokens are matched whole in texts


class Stages(NamedTuple):
    """The stages after reading, which depend on the tokenizer and the model."""

    codec: Codec
    splits: Splits
    loaders: Loaders


class DataModule(DataFields, lightning.LightningDataModule):
    """Text in, batches out. Abstract: each task names its codec.

    Its fields are those of DataFields; a task adds to them as `class SFTData(SFTDataFields, DataModule)` does.
    """

    codec_class: ClassVar[type[Codec]]
    adds_padding = True  # give a tokenizer without padding token a new one, and the model a row for it
    text_files = "file"  # how text files are read, as in `read_file`
    _tokenizer: TokenizerOptions
    _seed: int | None
    run_seed = 0  # seeds all but the data: initial weights, dropout, sampled text

    def __post_init__(self) -> None:
        super().__post_init__()
        # The __init__ that dataclasses generate does not call Lightning's.
        lightning.LightningDataModule.__init__(self)
        self.eval_batch_size = self.eval_batch_size or self.batch_size
        self._tokenizer = replace(self._tokenizer, pad_token=self.pad_token, bos_token=self.bos_token,
                                  eos_token=self.eos_token, add_tokens=self.add_tokens,
                                  options=self.tokenizer_options, new_padding=self.adds_padding)
        self.sources = Sources(self, self.text_files)
        self._model = ModelFacts()
        self._reward_model: Scorer | None = None
        self._longest_first = False
        self._row_source: RowSource | None = None
        self._stages: Stages | None = None
        self._checked: set[Role] = set()
        self._warned: set[str] = set()
        self._report: dict[str, Any] | None = None
        self._loader: StatefulLoader | StreamLoader | None = None
        self._position: dict[str, Any] | None = None

    # What `new` asks

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        """Return why a source with this first row is data of this task; None if it does not look like it."""
        return None

    @classmethod
    def model_settings(cls, row: Row) -> dict[str, tuple[Any, str]]:
        """Return keys of `model` that such rows decide: value and comment."""
        return {}

    # Settings that depend on the model and the run

    def connect(self, *, pretrained: str | None = None, revision: str | None = None, trust_remote_code: bool = False,
                seed: int | None = None, max_positions: int | None = None, reward_model: Scorer | None = None,
                longest_first: bool = False, **model: Any) -> None:
        """Fill in what depends on the model and the run, once and before rows are read.

        Args:
            pretrained: Folder or hub id of the model, for its tokenizer.
            revision: Revision of that hub model.
            trust_remote_code: True if code of the repository may run.
            seed: Seed of the run.
            max_positions: Maximum sequence length of the model.
            reward_model: Reward model that picks one of several answers in predict.
            longest_first: Train on the longest rows first, to measure the memory of the largest batch.
            model: See `ModelFacts`.

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
        self._model, self._reward_model, self._longest_first = ModelFacts(**model), reward_model, longest_first
        self._stages = None
        if max_positions is not None and (self.max_length or 0) > max_positions:
            raise UserError(f"data.max_length is {self.max_length}, but the model takes at most {max_positions} tokens")
        if self.max_length is None:
            self.max_length = min(DEFAULT_MAX_LENGTH, max_positions or DEFAULT_MAX_LENGTH)
            self.check_tokens()
        if longest_first and self.streaming:  # the longest rows of a stream are unknown
            self.pad_to_multiple_of = self.max_length

    def resume_from(self, checkpoint: dict[str, Any]) -> None:
        """Treat padding and added tokens as the run of a checkpoint did, whose model may or may not have a row for
        [PAD].

        Args:
            checkpoint: Content of the checkpoint without arrays. Checkpoints without these keys added [PAD] to any
                vocabulary, and matched added tokens whole in templates only.
        """
        state = checkpoint.get(type(self).__qualname__, {})
        self._tokenizer = replace(self._tokenizer, new_padding=state.get(NEW_PADDING, True),
                                  whole_words=state.get(WHOLE_WORDS, False))
        self._stages = None

    def take_rows_from(self, source: RowSource | None) -> None:
        """Take training rows from another source than the store. Call it before batches are requested."""
        self._row_source = source

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
        self._tokenizer, self._stages = TokenizerOptions(path), None

    @property
    def trainable_new_tokens(self) -> list[int]:
        """Ids missing from the vocabulary on disk whose embeddings must be trained: all but padding."""
        return self._tokenizer.loaded.trainable_new_tokens

    # Stages

    def make_codec(self) -> Codec:
        """Return the codec of the task. Raises UserError: the tokenizer cannot be read."""
        return self.codec_class(cast(Settings, self), self.tokenizer, self._model)

    @property
    def _built(self) -> Stages:
        if self._stages is None:
            self.max_length = self.max_length or DEFAULT_MAX_LENGTH
            codec = self.make_codec()
            splits = Splits(codec.settings, self.sources, codec)
            loaders = Loaders(codec.settings, self.sources, splits, codec, self.run_seed, self._longest_first)
            self._stages = Stages(codec, splits, loaders)
        return self._stages

    @property
    def codec(self) -> Codec:
        """How the task converts records and outputs. Raises UserError: the tokenizer cannot be read."""
        return self._built.codec

    @property
    def sets(self) -> dict[Role, RowSet]:
        """Rows of the roles that have been set up."""
        return {} if self._stages is None else self._stages.splits.sets

    def rows(self, role: Role) -> RowSet:
        """Return the rows of a role. Raises UserError if there are none."""
        if role not in self.sets:
            self.setup({"train": "fit", "val": "validate"}.get(role, role))
        return self._built.splits.rows(role)

    def items(self, role: Role) -> Any:
        """Return the items of batches of a role, a dataset with `lengths`. Raises UserError if there are no rows."""
        self.rows(role)
        return self._built.loaders.items(role)

    def collator(self, seeded: bool = False) -> Collate:
        """Return the collator of items; `seeded` adds the dropout seeds of training."""
        return self._built.loaders.collator(seeded)

    def prepare_data(self) -> None:
        """Read, encode and write what the stage needs and the cache lacks. Runs in one process. Raises UserError."""
        stage = getattr(getattr(self.trainer, "state", None), "fn", None)
        self._built.splits.prepare(str(stage.value) if stage else None, self.shard().rank == 0)

    def setup(self, stage: str | None = None) -> None:
        """Open the stores that `stage` (fit, validate, test, predict; None is all) needs. Raises UserError."""
        strategy: Any = getattr(self.trainer, "strategy", None)
        if not self.sets and hasattr(strategy, "broadcast"):  # the JAX trainer broadcasts them itself
            self.adopt_contents(strategy.broadcast(self.sources.contents))
        self._report = None
        self._built.splits.open(stage, self.shard().rank == 0)
        self._check_splits(stage)

    def _check_splits(self, stage: str | None) -> None:
        """Warn if the vocabulary does not fit, or if an evaluation does not see all of its rows; `fit` has these in its
        data report. Raises UserError: a split has no target token.
        """
        for role in [role for role in self.sets if role not in self._checked]:
            self._checked.add(role)
            stores = self.sets[role].stores
            problems = [problem for store in stores if (problem := describe_unknown_tokens(store.info))]
            if role != "train" and stage != "fit" and role in STAGE_ROLES[stage]:
                problems += [line for store in stores for line in describe_lost(role, store.info)]
            items = self.items(role) if role != "predict" else ()
            if items and not any(self.codec.is_scored(items[index], role) for index in range(len(items))):
                raise UserError(f"{self.sources.key(role)}: none of its {len(items)} rows has a target token, so "
                                f"{role}/loss is undefined. "
                                + (problems[0] if problems else "Add longer rows: one token, special tokens alone or, "
                                   "in masked language modelling, no mask give no target"))
            for problem in problems:
                self._warn_once(f"{problem}.")

    def _warn_once(self, message: str) -> None:
        """Warn in the first process, and only once per message."""
        if message not in self._warned and getattr(self.trainer, "is_global_zero", True):
            warn(message)
        self._warned.add(message)

    def adopt_contents(self, contents: dict[str, str | None]) -> None:
        """Adopt the content hashes of the first process, so that other processes need not read all sources."""
        self.sources.contents |= contents

    # Batches

    def train_dataloader(self) -> StepLoader:
        """Return the optimiser steps of this rank, lists of micro-batches, from a loaded position if there is one.

        Raises:
            UserError: There is nothing to train on.
        """
        batches, shard = self.train_batches(), self.shard()
        trainer: Any = self.trainer
        num_batches = limit_batches(len(batches), getattr(trainer, "train_limit", None), "train")
        # Lightning knows how far a resumed run is in its epoch, which may be a part of the loader's.
        steps_done = (lambda: trainer.fit_loop.batch_idx + 1) if hasattr(trainer, "fit_loop") else lambda: 0
        return StepLoader(batches, shard.batches_per_step // shard.world_size, num_batches, steps_done)

    def train_batches(self) -> StatefulLoader | StreamLoader:
        """Return training micro-batches of this rank, from a loaded position if there is one. Raises UserError."""
        if self.streaming and self.trainer is not None and self._max_steps() == -1:
            raise UserError("data.streaming never ends. Set trainer.max_steps")
        self.rows("train")
        if self._row_source is not None:
            self._loader = self._row_source.make_loader(self._built.loaders, self.shard())
        else:
            self._loader = self._built.loaders.training(self.shard(), getattr(self.trainer, "overfit_batches", 0))
        if self._position is not None:
            self._loader.load_state_dict(self._position)
            self._position = None
        return self._loader

    def _max_steps(self) -> int:
        # The torch engine ends its runs itself: Lightning's own `max_steps` is not set there.
        trainer: Any = self.trainer
        return trainer.length[0] if hasattr(trainer, "length") else trainer.max_steps

    def val_dataloader(self) -> EvaluationLoader | list:
        """Return validation batches of this rank; an empty list without a validation set."""
        return self._built.loaders.evaluation("val", self.shard()) if "val" in self.sets else []

    def test_dataloader(self) -> EvaluationLoader:
        """Return test batches of this rank. Raises UserError without a test set."""
        return self.evaluation_loader("test")

    def evaluation_loader(self, role: Role, *added: str) -> EvaluationLoader:
        """Return batches with each row of a set once over all ranks, with further columns if named."""
        self.rows(role)
        return self._built.loaders.evaluation(role, self.shard(), added)

    def predict_dataloader(self) -> EvaluationLoader:
        """Prompts of this rank with `index`. Raises UserError without rows to predict."""
        self.rows("predict")
        return self._built.loaders.predict(self.shard())

    def add_column(self, name: str) -> None:
        """Let batches contain a further column, which is unknown until `fill_column`."""
        self._built.loaders.add_column(name)

    def fill_column(self, role: Role, name: str, make: Callable[[int, dict[str, Any]], np.ndarray]) -> None:
        """Set a further column of the rows of a role; see `Loaders.fill_column`."""
        self._built.loaders.fill_column(role, name, make)

    def unpacked_items(self, role: Role) -> Any:
        """Return the items of a role before packing. Raises UserError if there are no rows."""
        self.rows(role)
        return self._built.loaders.numbered(role)

    def shard(self) -> Shard:
        """Return which batches are this process's."""
        trainer: Any = self.trainer
        if trainer is None:
            rank, num_ranks, batches_per_step = 0, 1, 1
        elif hasattr(trainer, "data_rank"):
            rank, num_ranks, batches_per_step = trainer.data_rank, trainer.num_data_ranks, trainer.batches_per_step
        else:  # Lightning's own Trainer: each process has its own rows
            rank, num_ranks = trainer.global_rank, trainer.world_size
            batches_per_step = num_ranks * trainer.accumulate_grad_batches
        return Shard(rank, num_ranks, self.num_workers, batches_per_step, getattr(trainer, "fed_ranks", None))

    @property
    def sequences_per_row(self) -> int:
        """Sequences of a batch that a training row is, such as the answers of a pair; after `setup`."""
        return self.codec.sequences_per_row(list(self.sets.values()))

    # Position

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

    # Outputs of the model

    @property
    def _decoder(self) -> Codec | BestOf:
        return self.codec if self._reward_model is None else BestOf(self.codec, self._reward_model)

    def outputs_by_index(self, batch: dict[str, Any], outputs: Any) -> dict[int, Any]:
        """Return the outputs of a predict batch by `index`, without padding rows; see `Codec.decode_batch`."""
        return self._decoder.decode_batch(batch, outputs)

    def complete(self, outputs: dict[int, Any]) -> dict[int, Any]:
        """Return all predict outputs of this process, with results that need all of them."""
        return self._decoder.complete(self.rows("predict"), outputs)

    def predictions(self, outputs: dict[int, Any]) -> Predictions:
        """Return rows, scores and files from all outputs of predict, by `index`."""
        return self._report_warnings(self._decoder.predict(self.rows("predict"), outputs))

    def answer(self, role: Role, outputs: dict[int, Any]) -> Predictions:
        """Return rows, scores and files from all outputs of an evaluation, by `index`; for a `NumbersCodec`."""
        codec = cast(NumbersCodec, self.codec)
        return self._report_warnings(codec.evaluate(role, self.rows(role), outputs))

    def _report_warnings(self, predictions: Predictions) -> Predictions:
        for message in predictions.warnings:
            self._warn_once(message)
        return predictions

    def example(self, index: int) -> dict[str, Any]:
        """Return the source row behind `index` of a predict batch."""
        return self.codec.example(self.rows("predict"), index)

    # What the rows decide, and how they are rendered

    @property
    def network_fields(self) -> dict[str, Any]:
        """Fields of transformers' configuration that the rows decide, such as `id2label`; after `prepare_data`, or from
        a checkpoint. Default: none.
        """
        return {}

    @property
    def chat_template(self) -> str | None:
        """Jinja template that renders conversations as in training; None if the rows are not conversations."""
        return self.codec.chat_template(self.rows("train"))

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Return token ids of prompts to generate from, encoded like training rows. Raises UserError."""
        return self.codec.encode_prompts(texts, lambda: self.rows("train"))

    def inference_prompts(self, index: int) -> list[list[int]]:
        """Token ids of the prompts that transformers' `apply_chat_template` makes from training source row `index`."""
        return self.codec.inference_prompts(self.rows("train"), index)

    # Report

    @property
    def report(self) -> dict[str, Any]:
        """Counts of rows read, dropped and truncated, and the fill of batches; plain JSON, after `setup`."""
        if self._report is None:
            codec, splits, loaders = self._built
            self._report = describe(codec.settings, codec, splits.sets, loaders.epoch_items,
                                    self._tokenizer.loaded.notes, self.shard().batches_per_step,
                                    loaders.describe_mixing() if "train" in splits.sets else None, splits.left_out)
        return self._report

    def report_table(self) -> str:
        """Return the report as a short table."""
        return render_table(self.report)

    def identity(self) -> dict[str, Any]:
        """Return facts that determine rows and tokens but are not in the recipe, by key. Works before `prepare_data`.

        Raises:
            UserError: A source or the tokenizer cannot be read.
        """
        state = json.dumps(encoding_state(self.tokenizer), sort_keys=True, default=str)
        return {**self.sources.identity(), "tokenizer": fingerprints.combine_fingerprints([state]),
                "max_length": self.max_length or DEFAULT_MAX_LENGTH}

    def rows_for_inspection(self, num_rows: int, which: Which | list[int] = "first") -> list[dict[str, Any]]:
        """Return training rows as the model sees them; see `show_rows`."""
        return show_rows(self.items("train"), self.rows("train"), num_rows, which, self.tokenizer.unk_token_id,
                         self.codec)
