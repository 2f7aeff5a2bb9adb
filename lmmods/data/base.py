"""The DataModule that every task builds on: puts splits, loaders and report together for the command line and the
engines."""

import json
from dataclasses import replace
from typing import Any

import lightning

from lmmods.core import fingerprints
from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.data.batches.loader import EvaluationLoader, Shard, StatefulLoader
from lmmods.data.batches.stream import StreamLoader
from lmmods.data.encode.tokenizer import TokenizerOptions, encoding_state
from lmmods.data.hooks import TaskHooks
from lmmods.data.inspection import Which, shown_rows
from lmmods.data.loaders import Loaders
from lmmods.data.report import describe, misfit, render_table
from lmmods.data.sources.preferences import Answers
from lmmods.data.splits import Role, SourceStores, Splits
from lmmods.data.store.rows import RowSet

DEFAULT_MAX_LENGTH = 1024
NEW_PADDING = "new_padding"  # in a checkpoint: whether a missing padding token was added
WHOLE_WORDS = "whole_words"  # and whether added tokens are whole in texts


class DataModule(TaskHooks, lightning.LightningDataModule):
    """Text in, batches out. Abstract: each task says how rows are encoded.

    Its fields are those of DataFields; a task adds to them as `class SFTData(SFTDataFields, DataModule)` does. What a
    task may override is in TaskHooks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        lightning.LightningDataModule.__init__(self)
        self.eval_batch_size = self.eval_batch_size or self.batch_size
        self._tokenizer = replace(self._tokenizer, pad_token=self.pad_token, bos_token=self.bos_token,
                                  eos_token=self.eos_token, add_tokens=self.add_tokens,
                                  options=self.tokenizer_options, new_padding=self._adds_padding)
        self.contents: dict[str, str | None] = {}  # hashes of sources, made once a start by one process
        self._splits = Splits(self, SourceStores(self, self.contents))
        self.described_sources = self._splits.described  # for a manifest
        self._loaders = Loaders(self, self._rows)
        self._checked: set[Role] = set()
        self._warned: set[str] = set()
        self._report: dict[str, Any] | None = None
        self._loader: StatefulLoader | StreamLoader | None = None
        self._position: dict[str, Any] | None = None

    # Settings that the model and the run have a say in

    def connect(self, *, pretrained: str | None = None, revision: str | None = None, trust_remote_code: bool = False,
                seed: int | None = None, max_positions: int | None = None, token_types: bool = True,
                answers: Answers = "pair") -> None:
        """Fill in what the user left unset with what the model and the run know.

        Args:
            pretrained: Folder or hub id of the model, for its tokenizer.
            trust_remote_code: Whether code of the repository may run.
            max_positions: Longest row the model can take.
            token_types: Whether the model tells kinds of token apart.
            answers: What a row of preferences is to its loss.

        Raises:
            UserError: `max_length` is more than the model can take.
        """
        if self._tokenizer.path is None and pretrained is not None:
            self._tokenizer = replace(self._tokenizer, path=pretrained, revision=revision)
        self._tokenizer = replace(self._tokenizer, trust_remote_code=trust_remote_code)
        if self._seed is None:
            self._seed = seed
        self.run_seed = seed or 0
        self.token_types, self.answers = token_types, answers
        if max_positions is not None and (self.max_length or 0) > max_positions:
            raise UserError(f"data.max_length is {self.max_length}, but the model takes at most {max_positions} tokens")
        if self.max_length is None:
            self.max_length = min(DEFAULT_MAX_LENGTH, max_positions or DEFAULT_MAX_LENGTH)
            self.check_tokens()

    def go_on_from(self, checkpoint: dict[str, Any]) -> None:
        """Pad and read added tokens as the run of a checkpoint does, whose network has a row for [PAD] or has none.

        Args:
            checkpoint: What it holds beside arrays. Where it does not say, [PAD] was added to any vocabulary, and added
                tokens were whole in templates only.
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
        """Ids that the vocabulary on disk does not hold and whose embeddings must be trained: all but padding."""
        return self._tokenizer.loaded.trainable_new_tokens

    # Rows

    def prepare_data(self) -> None:
        """Read, encode and write what the stage needs and the cache lacks. Run by one process. Raises UserError."""
        self.max_length = self.max_length or DEFAULT_MAX_LENGTH
        stage = getattr(getattr(self.trainer, "state", None), "fn", None)
        self._splits.prepare(str(stage.value) if stage else None, self._shard().rank == 0)

    def setup(self, stage: str | None = None) -> None:
        """Open the stores that `stage` (fit, validate, test, predict; None is all) needs. Raises UserError."""
        self.max_length = self.max_length or DEFAULT_MAX_LENGTH
        strategy = getattr(self.trainer, "strategy", None)
        if not self._splits.sets and hasattr(strategy, "broadcast"):  # the JAX trainer hands them over itself
            self.adopt_contents(strategy.broadcast(self.contents))
        self._report = None
        self._splits.open(stage, self._shard().rank == 0)
        self._check_splits()

    def _check_splits(self) -> None:
        """Warn where the vocabulary does not fit. Raises UserError: the loss of a split has nothing to measure."""
        for role in [role for role in self._splits.sets if role not in self._checked]:
            self._checked.add(role)
            found = [problem for store in self._splits.sets[role].stores if (problem := misfit(store.info))]
            items = self._loaders.items(role) if role != "predict" else ()
            if items and not any(self._is_scored(items[number], role) for number in range(len(items))):
                raise UserError(f"{self._splits.key(role)}: in its rows ({len(items)}) no token is scored, so "
                                f"{role}/loss has nothing to measure. "
                                + (found[0] if found else "Rows of one token, of special tokens alone or, in masked "
                                   "language modelling, without a mask score none: add longer ones"))
            for problem in found:
                if problem not in self._warned and getattr(self.trainer, "is_global_zero", True):
                    warn(f"{problem}.")
                self._warned.add(problem)

    def adopt_contents(self, contents: dict[str, str | None]) -> None:
        """Take `contents` of the first process, so that the others need not read all sources too."""
        self.contents |= contents

    def _rows(self, role: Role) -> RowSet:
        """Kept rows of a role. Raises UserError where there are none."""
        if role not in self._splits.sets:
            self.setup({"train": "fit", "val": "validate"}.get(role, role))
        return self._splits.rows(role)

    def example(self, index: int) -> dict[str, Any]:
        """The row as read behind `index` of a predict batch."""
        return self._rows("predict").source_row(index)

    # Batches

    def train_dataloader(self) -> StatefulLoader | StreamLoader:
        """Training batches of this rank; continues at a loaded position. Raises UserError."""
        if not self.streaming:
            self._loader = self._loaders.training(self._shard(), getattr(self.trainer, "overfit_batches", 0))
        elif self.trainer is not None and self.trainer.max_steps == -1:
            raise UserError("data.streaming never ends; set trainer.max_steps")
        else:
            self._loader = self._loaders.streaming(self._shard(), self._splits.streams())
        if self._position is not None:
            self._loader.load_state_dict(self._position)
            self._position = None
        return self._loader

    def val_dataloader(self) -> EvaluationLoader | list:
        """Validation batches of this rank; an empty list without a validation set."""
        return self._loaders.evaluation("val", self._shard()) if "val" in self._splits.sets else []

    def test_dataloader(self) -> EvaluationLoader:
        """Test batches of this rank. Raises UserError without a test set."""
        return self._loaders.evaluation("test", self._shard())

    def predict_dataloader(self) -> EvaluationLoader:
        """Prompts of this rank, padded on the left, with `index`. Raises UserError without rows to predict."""
        return self._loaders.predict(self._shard())

    def _shard(self) -> Shard:
        trainer = self.trainer
        if trainer is None:
            rank, num_ranks, batches_per_step = 0, 1, 1
        elif hasattr(trainer, "data_rank"):
            rank, num_ranks, batches_per_step = trainer.data_rank, trainer.num_data_ranks, trainer.batches_per_step
        else:  # Lightning's own Trainer, each process of which has rows of its own
            rank, num_ranks = trainer.global_rank, trainer.world_size
            batches_per_step = num_ranks * trainer.accumulate_grad_batches
        return Shard(rank, num_ranks, self.num_workers, batches_per_step, getattr(trainer, "fed_ranks", None))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the data where the training loader stands; plain JSON."""
        return self.state_at(self._loader.state_dict()) if self._loader is not None else {}

    def state_at(self, position: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of the data: a loader's position, and how the tokenizer was repaired."""
        return {**position, NEW_PADDING: self._tokenizer.new_padding, WHOLE_WORDS: self._tokenizer.whole_words}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue training at a saved position. Raises UserError when it belongs to other data."""
        if self._loader is not None:
            self._loader.load_state_dict(state_dict)
        elif state_dict:
            self._position = dict(state_dict)

    # Report

    @property
    def report(self) -> dict[str, Any]:
        """What was read, dropped and truncated, and how full batches are; plain JSON, after `setup`."""
        if self._report is None:
            self._report = describe(self, self._splits.sets, self._loaders.items, self._tokenizer.loaded.notes,
                                    self._shard().batches_per_step)
        return self._report

    def report_table(self) -> str:
        """The report as a short table."""
        return render_table(self.report)

    def identity(self) -> dict[str, Any]:
        """What decides about rows and tokens and is in no recipe, by the key it belongs to; before `prepare_data` too.

        Raises:
            UserError: A source or the tokenizer cannot be read.
        """
        state = json.dumps(encoding_state(self.tokenizer), sort_keys=True, default=str)
        return {**self._splits.identity(), "tokenizer": fingerprints.joined([state]),
                "max_length": self.max_length or DEFAULT_MAX_LENGTH}

    def rows_for_inspection(self, num_rows: int, which: Which | list[int] = "first") -> list[dict[str, Any]]:
        """Training rows as the model sees them, see `shown_rows`."""
        return shown_rows(self._loaders.items("train"), self._rows("train"), num_rows, which,
                          self.tokenizer.unk_token_id)
