"""The DataModule that every task builds on: sources to stores, stores to loaders, counts to the report."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import lightning
import numpy as np

from lmmods.core import fingerprints
from lmmods.core.errors import UserError
from lmmods.core.redaction import redact
from lmmods.data.batches.collate import Collator
from lmmods.data.batches.loader import EvaluationLoader, Share, StatefulLoader
from lmmods.data.batches.packing import PackedSet
from lmmods.data.batches.sampler import BatchOrder, evaluation_order, training_order
from lmmods.data.batches.stream import StreamLoader, StreamSource, draw_number, first_usable_window
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.tokenizer import RepairedTokenizer, load_tokenizer
from lmmods.data.fields import DataFields
from lmmods.data.inspection import Which, choose_rows, shown_row
from lmmods.data.report import describe_rows, describe_source, render_table
from lmmods.data.scoring.predictions import Predictions
from lmmods.data.sources.readers import Row
from lmmods.data.sources.source import Source, as_sources
from lmmods.data.sources.source_reader import SourceReader
from lmmods.data.store.arrow_store import Store
from lmmods.data.store.cache import Cache
from lmmods.data.store.rows import PromptSet, RowSet, split, weighted

Role = Literal["train", "val", "test", "predict"]
DEFAULT_MAX_LENGTH = 1024
NEW_PADDING = "new_padding"  # in a checkpoint: whether a missing padding token was added
FIRST_WINDOW = 1000  # rows of a stream that the report looks at
STREAM_NOTE = "a stream: these counts are of its beginning; what is dropped later is told as it comes"
STAGE_ROLES: dict[str | None, tuple[Role, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
    None: ("train", "val", "test", "predict"),
}


class DataModule(DataFields, lightning.LightningDataModule, ABC):
    """Text in, batches out. Abstract: each task says how rows are encoded.

    Its fields are those of DataFields; a task adds to them as `class SFTData(SFTDataFields, DataModule)` does.
    """

    eval_batch_size: int  # settled here
    max_length: int  # by connect or setup

    def __post_init__(self) -> None:
        super().__post_init__()
        lightning.LightningDataModule.__init__(self)
        self.eval_batch_size = self.eval_batch_size or self.batch_size
        self._sources: dict[Role, list[Source]] = {
            role: as_sources(value, key, self.columns)
            for role, key, value in (
                ("train", "source", self.source),
                ("val", "val_source", self.val_source),
                ("test", "test_source", self.test_source),
                ("predict", "predict_source", self.predict_source),
            )
            if value is not None
        }
        self._pretrained: dict[str, Any] = {}
        self.token_types = True  # settled by connect
        self._repaired: RepairedTokenizer | None = None
        self._sets: dict[Role, RowSet] = {}
        self._arranged: dict[Role, Any] = {}
        self._streams: list[StreamSource] | None = None
        self.contents: dict[str, str | None] = {}  # hashes of sources, made once a start by one process
        self._readers: dict[str, SourceReader] = {}
        self._report: dict[str, Any] | None = None
        self._cache = Cache(self.cache_dir, self.num_proc)
        self._loader: StatefulLoader | StreamLoader | None = None
        self._position: dict[str, Any] | None = None

    # What a task supplies

    _adds_padding = True  # whether a tokenizer without padding token gets a new one, and the network a row for it

    @abstractmethod
    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        """Encoder of a source whose first row is given, and what was found out about the source, for the report."""

    @abstractmethod
    def _encoding_settings(self) -> dict[str, Any]:
        """All settings that change what the encoder makes of a row."""

    @abstractmethod
    def _batch_keys(self) -> tuple[str, ...]:
        """Columns of a training batch beside attention_mask."""

    def _regrouped(self, rows: Iterable[Row], info: dict[str, Any]) -> Iterable[Row]:
        """Rows as read -> rows as encoded. Default: the same."""
        return rows

    def _arrange(self, rows: RowSet) -> Any:
        """Training or evaluation items made of kept rows: a map-style data set with `lengths`. Default: the rows."""
        return rows

    def _prompt(self, row: dict[str, Any]) -> dict[str, Any]:
        """What predict gets of a kept row: `input_ids` and `index`."""
        return {"input_ids": row["input_ids"], "index": row["index"]}

    def _draws_by_epoch(self) -> bool:
        """Whether item number + draw * len is a row drawn anew, in each epoch and in each window of a stream."""
        return False

    def _prompts(self, rows: RowSet) -> Any:
        """What predict reads: a map-style data set with `lengths`. Default: `_prompt` of each kept row."""
        return PromptSet(rows, self._prompt)

    def _side(self) -> str:
        """Side of the padding in training and evaluation."""
        return "right"

    def _prompt_keys(self) -> tuple[str, ...]:
        """Columns of a predict batch beside attention_mask."""
        return ("input_ids", "index")

    def _prompt_side(self) -> str:
        """Side of the padding in predict; on the left, so that generation goes on behind the last token."""
        return "left"

    # What the CLI and the engines call

    def connect(
        self,
        *,
        pretrained: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        seed: int | None = None,
        max_positions: int | None = None,
        token_types: bool = True,
    ) -> None:
        """Fill in what the user left unset with what the model and the run know.

        Args:
            pretrained: Folder or hub id of the model, for its tokenizer.
            revision: Its revision.
            trust_remote_code: Whether code of the repository may run.
            seed: Seed of the run.
            max_positions: Longest row the model can take.
            token_types: Whether the model tells kinds of token apart.

        Raises:
            UserError: `max_length` is more than the model can take.
        """
        if self._tokenizer_path is None and pretrained is not None:
            self._tokenizer_path = pretrained
            self._pretrained = {"revision": revision}
        self._pretrained["trust_remote_code"] = trust_remote_code
        if self._seed is None:
            self._seed = seed
        self.token_types = token_types
        if max_positions is not None and (self.max_length or 0) > max_positions:
            raise UserError(f"data.max_length is {self.max_length}, but the model takes at most {max_positions} tokens")
        if self.max_length is None:
            self.max_length = min(DEFAULT_MAX_LENGTH, max_positions or DEFAULT_MAX_LENGTH)

    def go_on_from(self, checkpoint: dict[str, Any]) -> None:
        """Pad as the run of a checkpoint does, whose network has a row for [PAD] or has none.

        Args:
            checkpoint: What it holds beside arrays. Where it does not say, [PAD] was added to any vocabulary.
        """
        self._adds_padding = checkpoint.get(type(self).__qualname__, {}).get(NEW_PADDING, True)
        self._repaired = None

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
        return self._load_tokenizer().tokenizer

    @tokenizer.setter
    def tokenizer(self, path: str | None) -> None:
        """The field: folder or hub id."""
        self._tokenizer_path = path

    @property
    def new_tokens(self) -> list[int]:
        """Ids that the vocabulary on disk does not hold."""
        return self._load_tokenizer().new_tokens

    @property
    def trainable_new_tokens(self) -> list[int]:
        """Those of `new_tokens` whose embeddings must be trained: all but padding."""
        return self._load_tokenizer().trainable_new_tokens

    def _load_tokenizer(self) -> RepairedTokenizer:
        if self._repaired is None:
            if self._tokenizer_path is None:
                raise UserError(
                    "no tokenizer is named; set data.tokenizer, or model.pretrained to a folder that has one"
                )
            self._repaired = load_tokenizer(self._tokenizer_path, **self._pretrained,
                                            pad_token=self.pad_token, bos_token=self.bos_token,
                                            eos_token=self.eos_token, add_tokens=self.add_tokens,
                                            new_padding=self._adds_padding)
        return self._repaired

    def prepare_data(self) -> None:
        """Read, encode and write what the stage needs and the cache lacks. Run by one process. Raises UserError."""
        self.max_length = self.max_length or DEFAULT_MAX_LENGTH
        for role in STAGE_ROLES[self._stage()]:
            if self.streaming and self._origin(role) == "train":
                continue
            for source in self._sources.get(self._origin(role), []):
                self._store(source, prompts_only=self._origin(role) == "predict", prepares=True)

    def setup(self, stage: str | None = None) -> None:
        """Open the stores that `stage` (fit, validate, test, predict; None is all) needs. Raises UserError."""
        self.max_length = self.max_length or DEFAULT_MAX_LENGTH
        if not self._sets and hasattr(self.trainer, "strategy"):  # the JAX trainer hands the contents over itself
            self.adopt_contents(self.trainer.strategy.broadcast(self.contents))
        self._report = None
        for role in STAGE_ROLES[stage]:
            if role not in self._sets:
                self._open(role)

    def _stage(self) -> str | None:
        return (
            str(self.trainer.state.fn.value)
            if self.trainer is not None and getattr(self.trainer, "state", None) and self.trainer.state.fn
            else None
        )

    def _origin(self, role: Role) -> Role:
        """The role whose sources hold the rows of `role`."""
        if role == "val" and "val" not in self._sources:
            return "train"
        if role == "predict" and "predict" not in self._sources:
            return "test" if "test" in self._sources else self._origin("val")
        return role

    def _open(self, role: Role) -> None:
        origin = self._origin(role)
        if role == "predict" and origin != "predict":
            needed: Role = "test" if "test" in self._sources else "val"
            self.setup({"test": "test", "val": "validate"}[needed])
            if needed in self._sets:
                self._sets[role] = self._sets[needed]
            return
        if origin not in self._sources or (origin == "train" and "train" in self._sets):
            return
        if origin == "train" and self.streaming:
            if role == "train":
                self._sets["train"] = first_usable_window(self._stream_sources(),
                                                          min(self.stream_window, FIRST_WINDOW), self.seed)
            return
        stores = [self._store(source, prompts_only=role == "predict") for source in self._sources[origin]]
        rows = RowSet(stores)
        if origin == "train":
            rows, held_out = split(rows, self.val_size, self.seed)
            if len(held_out):
                self._sets["val"] = held_out
            self._sets["train"] = weighted(rows, [source.weight for source in self._sources["train"]], self.seed)
        else:
            self._sets[role] = rows

    def _store(self, source: Source, prompts_only: bool, prepares: bool = False) -> Store:
        """The store of a source, built when the cache lacks it."""
        reader = self._hashed_reader(source)
        settings = {
            "task": type(self).__name__,
            "settings": self._encoding_settings(),
            "prompts_only": prompts_only,
            **self._tokenizer_settings(),
        }
        is_first = self._share().rank == 0  # the other processes read what the first one wrote or checked
        return self._cache.store(reader, settings, lambda: self._prepared(reader, prompts_only),
                                 rebuild=self.rebuild_cache and is_first, contents=prepares or is_first)

    def _tokenizer_settings(self) -> dict[str, Any]:
        """All of the tokenizer that a token could depend on."""
        return {
            "tokenizer": self.tokenizer.backend_tokenizer.to_str(),
            "chat_template": self.tokenizer.chat_template,
            "special": self.tokenizer.special_tokens_map,
        }

    def _prepared(self, reader: SourceReader, prompts_only: bool) -> tuple[Iterable[Row], Encoder, dict[str, Any]]:
        """Rows of a source, their encoder, and what its first row tells. Raises UserError when there is none."""
        reader.check_adopted()
        first = next(iter(reader), None)
        if first is None:
            raise UserError(f"{reader.source.path}: the data set is empty, no row was found")
        encoder, found = self._encoder(reader.source, first, prompts_only)
        info = {"path": redact(reader.source.path), "replaced": reader.replaced, **found}
        return self._regrouped(reader, found), encoder, info

    def _stream_sources(self) -> list[StreamSource]:
        if self._streams is None:
            self._streams = []
            for source in self._sources["train"]:
                reader = self._reader(source, streaming=True)
                _, encoder, info = self._prepared(reader, prompts_only=False)
                info["notes"] = [*info.get("notes", []), STREAM_NOTE]
                rows = lambda reader=reader, info=info: iter(self._regrouped(reader, info))  # noqa: E731
                self._streams.append(StreamSource(rows, encoder, source.weight, info))
        return self._streams

    def _reader(self, source: Source, streaming: bool = False) -> SourceReader:
        return SourceReader(source, streaming=streaming)

    def _hashed_reader(self, source: Source) -> SourceReader:
        """The reader of a source whose content is known, here or from the process that has prepared the data."""
        key = repr(source)
        reader = self._readers[key] = self._readers.get(key) or self._reader(source)
        if key in self.contents:
            reader.adopt(self.contents[key])
        else:
            self.contents[key] = reader.content
        return reader

    def adopt_contents(self, contents: dict[str, str | None]) -> None:
        """Take `contents` of the first process, so that the others need not read all sources too."""
        self.contents |= contents

    # Loaders

    def train_dataloader(self) -> StatefulLoader | StreamLoader:
        """Training batches of this rank; continues at a loaded position. Raises UserError."""
        self._loader = self._stream_loader() if self.streaming else self._stateful_loader()
        if self._position is not None:
            self._loader.load_state_dict(self._position)
            self._position = None
        return self._loader

    def _stateful_loader(self) -> StatefulLoader:
        items = self._items("train")
        lengths = items.lengths
        overfit = getattr(self.trainer, "overfit_batches", 0)  # so many, or this share, in each epoch the same
        share = self._share()

        def order_of(epoch: int) -> BatchOrder:
            order = training_order(lengths, self.batch_size, [self.seed, epoch], self.shuffle and not overfit,
                                   self.group_by_length)
            if overfit:
                whole = len(order) if isinstance(overfit, float) else share.world_size
                order = order.first(max(int(overfit * whole), 1))
            return order.shifted(epoch * len(lengths)) if self._draws_by_epoch() else order

        return StatefulLoader(items, order_of, self._collator(self._item_keys()), share, self.batch_size)

    def _stream_loader(self) -> StreamLoader:
        if self.trainer is not None and self.trainer.max_steps == -1:
            raise UserError("data.streaming never ends; set trainer.max_steps")

        def order_of(lengths: np.ndarray, epoch: int, window: int) -> BatchOrder:
            order = training_order(
                lengths, self.batch_size, [self.seed, epoch, window], self.shuffle, self.group_by_length
            )
            return order.shifted(draw_number(epoch, window) * len(lengths)) if self._draws_by_epoch() else order

        settings = {"batch_size": self.batch_size, "window_size": self.stream_window, "seed": self.seed}
        return StreamLoader(
            self._stream_sources(),
            self._arranged_items,
            order_of,
            self._collator(self._item_keys()),
            self._share(),
            settings,
            self.num_proc or 1,
        )

    def val_dataloader(self) -> EvaluationLoader | list:
        """Validation batches of this rank; an empty list without a validation set."""
        return self._evaluation_loader("val") if "val" in self._sets else []

    def test_dataloader(self) -> EvaluationLoader:
        """Test batches of this rank. Raises UserError without a test set."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> EvaluationLoader:
        """Prompts of this rank, padded on the left, with `index`. Raises UserError without rows to predict."""
        prompts = self._prompts(self._rows("predict"))
        collator = self._collator(self._prompt_keys(), self._prompt_side())
        share = replace(self._share(), num_workers=0)  # workers would need a copy of this module
        return EvaluationLoader(prompts, evaluation_order(prompts.lengths, self.eval_batch_size), collator, share)

    def _evaluation_loader(self, role: Role) -> EvaluationLoader:
        items = self._items(role)
        order = evaluation_order(items.lengths, self.eval_batch_size)
        return EvaluationLoader(items, order, self._collator(self._item_keys()), self._share())

    def _rows(self, role: Role) -> RowSet:
        if role not in self._sets:
            self.setup({"train": "fit", "val": "validate"}.get(role, role))
        if role not in self._sets:
            wanted = {
                "val": "data.val_source or data.val_size",
                "test": "data.test_source",
                "predict": "data.predict_source, data.test_source, data.val_source or data.val_size",
            }[role]
            raise UserError(f"no rows for {role}; set {wanted}")
        return self._sets[role]

    def _items(self, role: Role) -> Any:
        """Rows of batches: the task's arrangement of the kept rows, packed if asked for."""
        if role not in self._arranged:
            self._arranged[role] = self._arranged_items(self._rows(role))
        return self._arranged[role]

    def _arranged_items(self, rows: RowSet) -> Any:
        items = self._arrange(rows)
        return PackedSet(items, self.max_length, self.seed) if self.packing else items

    def _item_keys(self) -> tuple[str, ...]:
        return (*self._batch_keys(), *(("position_ids", "segment_ids") if self.packing else ()))

    def _collator(self, keys: tuple[str, ...], side: str | None = None) -> Collator:
        return Collator(
            keys, self.tokenizer.pad_token_id, self.pad_to_multiple_of, self.max_length, side or self._side()
        )

    def _share(self) -> Share:
        trainer = self.trainer
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        return Share(rank, world_size, self.num_workers)

    # Position, report, single rows

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the data where the training loader stands; plain JSON."""
        return self.state_at(self._loader.state_dict()) if self._loader is not None else {}

    def state_at(self, position: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of the data: a loader's position, and whether a missing padding token was added."""
        return {**position, NEW_PADDING: self._adds_padding}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue training at a saved position. Raises UserError when it belongs to other data."""
        if self._loader is not None:
            self._loader.load_state_dict(state_dict)
        elif state_dict:
            self._position = dict(state_dict)

    @property
    def report(self) -> dict[str, Any]:
        """What was read, dropped and cut, and how full batches are; plain JSON, after `setup`."""
        self._report = self._report or self._describe()
        return self._report

    def _describe(self) -> dict[str, Any]:
        stores = {store.name: store for rows in self._sets.values() for store in rows.stores}
        sources: dict[str, Any] = {}
        for store in stores.values():
            path = store.info["path"]
            sources[path if path not in sources else f"{path} ({store.name})"] = describe_source(store.info)
        splits = {
            role: describe_rows(
                self._items(role),
                self.batch_size if role == "train" else self.eval_batch_size,
                self.pad_to_multiple_of,
                self.max_length,
                self.seed,
            )
            for role in self._sets
            if role != "predict"
        }
        return {
            "sources": sources,
            "splits": splits,
            "max_length": self.max_length,
            "tokenizer": self._load_tokenizer().notes,
        }

    def identity(self) -> dict[str, Any]:
        """What decides about rows and tokens and is in no recipe, by the key it belongs to; before `prepare_data` too.

        Raises:
            UserError: A source or the tokenizer cannot be read.
        """
        return {
            **{
                key: [self._reader(source, streaming=True).sampled_content() if self.streaming and role == "train"
                      else self._hashed_reader(source).content for source in self._sources.get(role, [])]
                for role, key in (("train", "source"), ("val", "val_source"))
            },
            "tokenizer": fingerprints.joined([json.dumps(self._tokenizer_settings(), sort_keys=True, default=str)]),
            "max_length": self.max_length or DEFAULT_MAX_LENGTH,
        }

    def report_table(self) -> str:
        """The report as a short table."""
        return render_table(self.report)

    def example(self, index: int) -> dict[str, Any]:
        """The row as read behind `index` of a predict batch."""
        return self._rows("predict").source_row(index)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens on which generation must stop."""
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    def reference(self, index: int) -> str | None:
        """The text that the data give as the right answer, where there is one."""
        return None

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Token ids of prompts, as the model sees a row of predict, to generate from. Raises UserError."""
        raise UserError(f"samples.prompts: {type(self).__name__} is of a task that generates no text; set "
                        "samples.prompts to null")

    def outputs_by_index(self, batch: dict[str, Any], outputs: Any) -> dict[int, Any]:
        """Outputs of a predict batch by its `index`, without padding rows: here (prompt, generated text).

        Args:
            batch: The batch, with `input_ids` [B, T].
            outputs: Generated tokens [B, T_new].
        """
        prompts = self.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return {index: pair for index, *pair in zip(batch["index"].tolist(), prompts, texts) if index >= 0}

    def predictions(self, outputs: dict[int, Any]) -> Predictions:
        """Rows, scores and files of all outputs of predict, by index."""
        rows = [
            {**self.example(index), "prediction_with_input": prompt + text, "prediction": text.strip()}
            for index, (prompt, text) in sorted(outputs.items())
        ]
        return Predictions(rows, self.score({index: text for index, (_, text) in outputs.items()}), {})

    def score(self, predictions: dict[int, str]) -> dict[str, float]:
        """Metrics of generated texts by `index`; empty where the data hold no answers."""
        return {}

    def rows_for_inspection(self, num_rows: int, which: Which | list[int] = "first") -> list[dict[str, Any]]:
        """Training rows as the model sees them: {index, input_ids, labels, location}.

        Args:
            num_rows: How many.
            which: `first`, `longest`, `most_cut` (tokens cut off), `most_unknown` (tokens the vocabulary lacks), or
                numbers of training rows.
        """
        items = self._items("train")
        places = choose_rows(items, num_rows, which, self.tokenizer.unk_token_id)
        return [shown_row(items[place], self._rows("train")) for place in places]
