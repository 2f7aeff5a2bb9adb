"""Rows of each role: its sources, their stores, and the division into training and validation rows."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.hardware import cache_folder
from lmmods.core.redaction import redact
from lmmods.data.batches.stream import StreamSource, first_usable_buffer
from lmmods.data.encode.encoder import EXAMPLES_PER_REASON, Encoder, first_usable_row
from lmmods.data.encode.overlap import EvaluationNgrams
from lmmods.data.encode.tokenizer import encoding_state
from lmmods.data.hooks import TaskHooks
from lmmods.data.sources.conversation import RowProblem
from lmmods.data.sources.readers import Row
from lmmods.data.sources.source_reader import SourceReader
from lmmods.data.store.arrow_store import Store
from lmmods.data.store.cache import Cache, fingerprint
from lmmods.data.store.duplicates import Duplicates, find_duplicates, read_duplicates, write_duplicates
from lmmods.data.store.rows import RowSet, split, weighted
from lmmods.recipe.source import Source, as_sources

Role = Literal["train", "val", "test", "predict"]
FIRST_BUFFER = 1000  # rows of a stream that the report covers
STREAM_NOTE = "a stream: these counts are of its beginning; what is dropped later is reported as it comes"
STAGE_ROLES: dict[str | None, tuple[Role, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
    None: ("train", "val", "test", "predict"),
}


class SourceStores:
    """The rows of single sources: encoded in the cache, or as a stream.

    Args:
        contents: Known hashes of sources; those computed here are added.
    """

    def __init__(self, task: TaskHooks, contents: dict[str, str | None]) -> None:
        self._task, self._contents = task, contents
        self._cache = Cache(task.cache_dir, task.num_proc)
        self._readers: dict[str, SourceReader] = {}
        # Without data.columns, which is of the task's own rows.
        self.evaluation = [] if task.decontaminate is None else as_sources(task.decontaminate, "decontaminate")

    def store(self, source: Source, prompts_only: bool, is_first: bool, trains: bool, prepares: bool = False) -> Store:
        """Return the store of a source, built if the cache lacks it.

        Args:
            prompts_only: Encode rows only up to where a response begins.
            is_first: True in the first process of the run; the others read what it wrote or checked.
            trains: True for rows to train on, which must not repeat those of `data.decontaminate`.
            prepares: True in `prepare_data`, which one process of each machine runs.
        """
        reader = self.reader(source)
        settings = {"task": type(self._task).__name__, "settings": self._task._encoding_settings(),
                    "prompts_only": prompts_only, **encoding_state(self._task.tokenizer)}
        if trains and self.evaluation:
            settings["decontaminate"] = [self._task.decontaminate_ngram,
                                         *(self.reader(each).fingerprint() for each in self.evaluation)]
        return self._cache.store(reader, settings, lambda: self._prepared(reader, prompts_only, trains),
                                 rebuild=self._task.rebuild_cache and is_first, contents=prepares or is_first)

    def reader(self, source: Source) -> SourceReader:
        """Return the reader of a source with its content hash, computed here or by the preparing process."""
        key = repr(source)
        reader = self._readers[key] = self._readers.get(key) or self._task._reader(source)
        # Another process has hashed the files, which may be large.
        if key in self._contents:
            reader.adopt(self._contents[key])
        else:
            self._contents[key] = reader.content
        return reader

    def stream(self, source: Source) -> StreamSource:
        """Return a source that is read and encoded during training."""
        reader = self._task._reader(source, streaming=True)
        _, encoder, info = self._prepared(reader, prompts_only=False, trains=True)
        info["notes"] = [*info.get("notes", []), STREAM_NOTE]
        return StreamSource(lambda: self._regrouped(reader, info, trains=True), encoder, source.times, info)

    def _prepared(self, reader: SourceReader, prompts_only: bool, trains: bool
                  ) -> tuple[Iterable[Row], Encoder, dict[str, Any]]:
        """Rows of a source, their encoder, and facts from its first row. Raises UserError if there is none."""
        reader.check_adopted()
        # The first row without a problem decides on the encoder.
        first = first_usable_row(reader, reader.source.path)
        encoder, found = self._task._encoder(reader.source, first, prompts_only)
        info = {"path": redact(reader.source.path), "replaced": reader.replaced, **found}
        if trains and self.evaluation:
            info["notes"] = [*info.get("notes", []), *self._ngrams.notes]
        return self._regrouped(reader, found, trains), encoder, info

    @cached_property
    def _ngrams(self) -> EvaluationNgrams:
        """N-grams of `data.decontaminate`. Raises UserError: a source cannot be read."""
        sources = ((redact(source.path), (row for row in self.reader(source) if row.problem is None))
                   for source in self.evaluation)
        return EvaluationNgrams(sources, self._task.decontaminate_ngram)

    def _decontaminated(self, row: Row, info: dict[str, Any]) -> Row:
        """Return a training row, without its values and with the reason if it repeats an evaluation row."""
        with suppress(RowProblem):  # the encoder drops such a row, and says why
            if (name := self._ngrams.source_of(self._task._texts(row.values, info))) is not None:
                return row._replace(values={}, problem=f"{self._ngrams.size} words in a row are also in {name}")
        return row

    def _regrouped(self, rows: Iterable[Row], info: dict[str, Any], trains: bool) -> Iterator[Row]:
        """Yield rows of one example each; rows that were skipped during reading pass unchanged."""
        left_out: list[Row] = []
        # `append` returns None, so a row with a problem is set aside; the loop yields it before the next usable one.
        usable = (row for row in rows if row.problem is None or left_out.append(row))
        for row in self._task._regrouped(usable, info):
            while left_out:
                yield left_out.pop(0)
            yield self._decontaminated(row, info) if trains and self.evaluation else row
        yield from left_out


class Splits:
    """Rows by role."""

    def __init__(self, task: TaskHooks, stores: SourceStores) -> None:
        self._task, self._stores = task, stores
        self.sources: dict[Role, list[Source]] = {
            role: as_sources(value, key, task.columns)
            for role, key, value in (("train", "source", task.source), ("val", "val_source", task.val_source),
                                     ("test", "test_source", task.test_source),
                                     ("predict", "predict_source", task.predict_source))
            if value is not None
        }
        self.sets: dict[Role, RowSet] = {}  # opened ones
        self.left_out: dict[str, dict[str, Any]] = {}  # by store: what the report says of its duplicates
        self._duplicates: Duplicates | None = None
        self._streams: list[StreamSource] | None = None
        self._hashed_readers: dict[str, list[tuple[SourceReader, str | None]]] | None = None

    def prepare(self, stage: str | None, is_first: bool) -> None:
        """Read, encode and write what a stage needs and the cache lacks. Raises UserError."""
        for role in STAGE_ROLES[stage]:
            origin = self._origin(role)
            # A stream is never stored.
            if not self._task.streaming or origin != "train":
                stores = [self._stores.store(source, origin == "predict", is_first, origin == "train", prepares=True)
                          for source in self.sources.get(origin, [])]
                if origin == "train" and self._task.deduplicate is not None:
                    self._find_duplicates(RowSet(stores), is_first)

    def open(self, stage: str | None, is_first: bool) -> None:
        """Open the stores that a stage needs. Raises UserError."""
        for role in STAGE_ROLES[stage]:
            if role not in self.sets:
                self._open(role, is_first)

    def _origin(self, role: Role) -> Role:
        """Return the role whose sources hold the rows of `role`."""
        if role == "val" and "val" not in self.sources:
            return "train"
        if role == "predict" and "predict" not in self.sources:
            # Without sources of its own, predict takes test rows, else validation rows.
            return "test" if "test" in self.sources else self._origin("val")
        return role

    def _open(self, role: Role, is_first: bool) -> None:
        origin = self._origin(role)
        if role == "predict" and origin != "predict":
            needed: Role = "test" if "test" in self.sources else "val"
            self.open({"test": "test", "val": "validate"}[needed], is_first)
            if needed in self.sets:
                self.sets[role] = self.sets[needed]
            return
        # Both sets of a split are opened together.
        if origin not in self.sources or (origin == "train" and "train" in self.sets):
            return
        if origin == "train" and self._task.streaming:
            if role == "train":  # a sample for the report and inspection
                size = min(self._task.stream_window, FIRST_BUFFER)
                rule = self._task.mixing.rule if self._task.mixing else "concat"
                self.sets["train"] = first_usable_buffer(self.streams(), size, self._task.seed, rule)
            return
        rows = RowSet([self._stores.store(source, role == "predict", is_first, origin == "train")
                       for source in self.sources[origin]])
        if origin == "train":
            # Duplicates before the split: a row and its repetition must not be in both sets.
            if self._task.deduplicate is not None:
                rows = self._without_duplicates(rows, is_first)
            # Split before weighting: a repeated row must not be in both sets.
            rows, held_out = split(rows, self._task.val_size, self._task.seed)
            if len(held_out):
                self.sets["val"] = held_out
            weights = [source.times for source in self.sources["train"]]
            # With mixing, weights make shares of batches, and each row is there once.
            self.sets["train"] = rows if self._task.mixes else weighted(rows, weights, self._task.seed)
        else:
            self.sets[role] = rows

    def _find_duplicates(self, rows: RowSet, is_first: bool) -> Duplicates:
        """Return which of the training rows as read repeat an earlier one, from the cache if it knows."""
        if self._duplicates is not None:
            return self._duplicates
        task = self._task
        threshold = task.minhash_threshold if task.deduplicate == "minhash" else None
        # The names of stores stand for their contents and how they are encoded.
        key = fingerprint({"task": type(task).__name__, "stores": [store.name for store in rows.stores],
                           "threshold": threshold, "compared": task._compared_settings()})
        path = cache_folder(task.cache_dir) / f"duplicates-{key}.npz"
        found = None if task.rebuild_cache and is_first else read_duplicates(path)
        if found is None:
            # Windows of one row as read are one text.
            read = lru_cache(1)(lambda number: (rows.source_row(number), rows.info(number)))
            found = find_duplicates(np.unique(rows.index).tolist(), lambda number: task._texts(*read(number)),
                                    threshold, _encoded_of(rows), lambda number: task._context(*read(number)))
            write_duplicates(path, found)
        self._duplicates = found
        return found

    def _without_duplicates(self, rows: RowSet, is_first: bool) -> RowSet:
        """Return the training rows that repeat no other one, and note the others in `left_out`."""
        found = self._find_duplicates(rows, is_first)
        for number, of, near in zip(found.rows.tolist(), found.of.tolist(), found.near.tolist(), strict=True):
            noted = self.left_out.setdefault(rows.store_of(number).name, {"dropped": {}})
            reason = f"{'nearly ' if near else ''}the same as an earlier row"
            entry = noted["dropped"].setdefault(reason, {"rows": 0, "first": []})
            entry["rows"] += 1
            if len(entry["first"]) < EXAMPLES_PER_REASON:
                entry["first"].append(f"{rows.location(number)}, like {rows.location(of)}")
        kept = rows.subset(np.flatnonzero(~np.isin(rows.index, found.rows)))
        for store, size in zip(rows.stores, kept.source_sizes.tolist(), strict=True):
            if noted := self.left_out.get(store.name):
                noted["rows_kept"] = noted.get("rows_kept", 0) + size
        return kept

    def readers(self, role: Role) -> list[SourceReader]:
        """Return the readers of the sources of a role, those of a stream unhashed."""
        is_stream = self._task.streaming and role == "train"
        return [self._task._reader(source, streaming=True) if is_stream else self._stores.reader(source)
                for source in self.sources.get(role, [])]

    def key(self, role: Role) -> str:
        """Return the recipe key that the rows of a role come from."""
        names = {"train": "source", "val": "val_source" if "val" in self.sources else "val_size"}
        return f"data.{names.get(role, f'{role}_source')}"

    def rows(self, role: Role) -> RowSet:
        """Rows of a role that has been opened. Raises UserError if none are set."""
        if role not in self.sets:
            wanted = {"val": "data.val_source or data.val_size", "test": "data.test_source",
                      "predict": "data.predict_source, data.test_source, data.val_source or data.val_size"}[role]
            raise UserError(f"no rows for {role}; set {wanted}")
        return self.sets[role]

    def streams(self) -> list[StreamSource]:
        """The training sources as streams."""
        if self._streams is None:
            self._streams = [self._stores.stream(source) for source in self.sources["train"]]
            if self._task.mixes:
                shares = self._task.mixing.shares([stream.weight for stream in self._streams])
                self._streams = [replace(stream, weight=share)
                                 for stream, share in zip(self._streams, shares, strict=True)]
        return self._streams

    def identity(self) -> dict[str, list[str | None]]:
        """Content hashes of the sources that decide on training and validation, by key. Raises UserError."""
        return {key: [content for _, content in readers] for key, readers in self._hashed().items()}

    def described(self) -> dict[str, list[dict[str, Any]]]:
        """Manifest entries of the sources that decide on training and validation, by key. Raises UserError."""
        return {key: [reader.described() for reader, _ in readers] for key, readers in self._hashed().items()}

    def _hashed(self) -> dict[str, list[tuple[SourceReader, str | None]]]:
        """Readers and content hashes by key; for streams, the hash covers sampled blocks of their files."""
        if self._hashed_readers is None:
            def hashed(source: Source, role: Role) -> tuple[SourceReader, str | None]:
                if self._task.streaming and role == "train":
                    reader = self._task._reader(source, streaming=True)
                    return reader, reader.sampled_content()
                reader = self._stores.reader(source)
                return reader, reader.content

            self._hashed_readers = {key: [hashed(source, role) for source in self.sources.get(role, [])]
                                    for role, key in (("train", "source"), ("val", "val_source"))}
            if self._stores.evaluation:
                readers = [self._stores.reader(source) for source in self._stores.evaluation]
                self._hashed_readers["decontaminate"] = [(reader, reader.content) for reader in readers]
        return self._hashed_readers


def _encoded_of(rows: RowSet) -> Callable[[int], bytes]:
    """Return a function of the tokens and labels of a row as read, by its number: of all its windows."""
    index = rows.index  # ascending

    def encoded(number: int) -> bytes:
        start, stop = np.searchsorted(index, [number, number + 1])
        return b"".join(f"{name} {np.size(value)} ".encode() + np.asarray(value).tobytes()
                        for place in range(start, stop) for name, value in rows[place].items()
                        if name not in ("index", "weight", "truncated"))

    return encoded
