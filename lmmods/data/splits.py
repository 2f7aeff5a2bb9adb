"""Rows of each role: the encoded rows of its sources, without duplicates, divided into training and validation."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.hardware import cache_folder
from lmmods.data.batch.stream import StreamSource, first_usable_buffer
from lmmods.data.codec import Codec, Settings
from lmmods.data.encode.encoder import EXAMPLES_PER_REASON
from lmmods.data.encoded import EncodedSources
from lmmods.data.read.by_role import STAGE_ROLES, Role, Sources
from lmmods.data.store.cache import fingerprint
from lmmods.data.store.duplicates import Duplicates, find_duplicates, read_duplicates, write_duplicates
from lmmods.data.store.rows import RowSet, repeat_by_weight, split

FIRST_BUFFER = 1000  # rows of a stream that the report covers


class Splits:
    """Rows by role.

    Attributes:
        sets: Rows of the roles that have been opened.
        left_out: Report entries about duplicates, by store.
    """

    def __init__(self, settings: Settings, sources: Sources, codec: Codec) -> None:
        self._settings, self._sources, self._codec = settings, sources, codec
        self._encoded = EncodedSources(settings, sources, codec)
        self.sets: dict[Role, RowSet] = {}
        self.left_out: dict[str, dict[str, Any]] = {}
        self._duplicates: Duplicates | None = None

    def prepare(self, stage: str | None, is_first: bool) -> None:
        """Read, encode and write what a stage needs and the cache lacks. Raises UserError."""
        for role in STAGE_ROLES[stage]:
            origin = self._sources.origin(role)
            # A stream is never stored.
            if not self._settings.streaming or origin != "train":
                stores = [self._encoded.store(source, origin == "predict", is_first, origin == "train", prepares=True)
                          for source in self._sources.by_role.get(origin, [])]
                if origin == "train" and self._settings.deduplicate is not None:
                    self._find_duplicates(RowSet(stores), is_first)

    def open(self, stage: str | None, is_first: bool) -> None:
        """Open the stores that a stage needs. Raises UserError."""
        for role in STAGE_ROLES[stage]:
            if role not in self.sets:
                self._open(role, is_first)

    def _open(self, role: Role, is_first: bool) -> None:
        settings, origin = self._settings, self._sources.origin(role)
        if role == "predict" and origin != "predict":
            needed: Role = "test" if "test" in self._sources.by_role else "val"
            self.open({"test": "test", "val": "validate"}[needed], is_first)
            if needed in self.sets:
                self.sets[role] = self.sets[needed]
            return
        # Both sets of a split are opened together.
        if origin not in self._sources.by_role or (origin == "train" and "train" in self.sets):
            return
        if origin == "train" and settings.streaming:
            if role == "train":  # a sample for the report and inspection
                size = min(settings.stream_window, FIRST_BUFFER)
                rule = settings.mixing.rule if settings.mixing else "concat"
                self.sets["train"] = first_usable_buffer(self.streams, size, settings.seed, rule)
            return
        rows = RowSet([self._encoded.store(source, role == "predict", is_first, origin == "train")
                       for source in self._sources.by_role[origin]])
        if origin != "train":
            self.sets[role] = rows
            return
        # Duplicates before the split: a row and its repetition must not be in both sets.
        if settings.deduplicate is not None:
            rows = self._drop_duplicates(rows, is_first)
        # Split before weighting: a repeated row must not be in both sets.
        rows, held_out = split(rows, settings.val_size, settings.seed)
        if len(held_out):
            self.sets["val"] = held_out
        weights = [source.times for source in self._sources.by_role["train"]]
        # With mixing, weights are shares of batches, and each row occurs once.
        self.sets["train"] = rows if settings.mixes else repeat_by_weight(rows, weights, settings.seed)

    def _find_duplicates(self, rows: RowSet, is_first: bool) -> Duplicates:
        """Return which of the training rows as read repeat an earlier one, from the cache if possible."""
        if self._duplicates is not None:
            return self._duplicates
        settings, codec = self._settings, self._codec
        threshold = settings.minhash_threshold if settings.deduplicate == "minhash" else None
        # The names of stores stand for their contents and how they are encoded.
        key = fingerprint({"task": type(settings).__name__, "stores": [store.name for store in rows.stores],
                           "threshold": threshold, "compared": codec.comparison_settings()})
        path = cache_folder(settings.cache_dir) / f"duplicates-{key}.npz"
        duplicates = None if settings.rebuild_cache and is_first else read_duplicates(path)
        if duplicates is None:
            # Windows of one row as read have its texts.
            read = lru_cache(1)(lambda index: (rows.source_row(index), rows.info(index)))
            duplicates = find_duplicates(np.unique(rows.index).tolist(), lambda index: codec.list_texts(*read(index)),
                                         threshold, _encoded_of(rows), lambda index: codec.context_of(*read(index)))
            write_duplicates(path, duplicates)
        self._duplicates = duplicates
        return duplicates

    def _drop_duplicates(self, rows: RowSet, is_first: bool) -> RowSet:
        """Return the training rows without duplicates, and add the duplicates to `left_out`."""
        duplicates = self._find_duplicates(rows, is_first)
        for index, original, is_near in zip(duplicates.rows.tolist(), duplicates.of.tolist(), duplicates.near.tolist(),
                                            strict=True):
            report = self.left_out.setdefault(rows.store_of(index).name, {"dropped": {}})
            reason = f"{'nearly ' if is_near else ''}the same as an earlier row"
            entry = report["dropped"].setdefault(reason, {"rows": 0, "first": []})
            entry["rows"] += 1
            if len(entry["first"]) < EXAMPLES_PER_REASON:
                entry["first"].append(f"{rows.location(index)}, like {rows.location(original)}")
        unique_rows = rows.subset(np.flatnonzero(~np.isin(rows.index, duplicates.rows)))
        for store, size in zip(rows.stores, unique_rows.source_sizes.tolist(), strict=True):
            if store.name in self.left_out:
                report = self.left_out[store.name]
                report["rows_kept"] = report.get("rows_kept", 0) + size
        return unique_rows

    def rows(self, role: Role) -> RowSet:
        """Return the rows of a role that has been opened. Raises UserError if none are set."""
        if role not in self.sets:
            keys = {"val": "data.val_source or data.val_size", "test": "data.test_source",
                    "predict": "data.predict_source, data.test_source, data.val_source or data.val_size"}[role]
            raise UserError(f"there are no {role} rows. Set {keys}")
        return self.sets[role]

    @cached_property
    def streams(self) -> list[StreamSource]:
        """The training sources as streams. Raises UserError: one has no usable record."""
        streams = [self._encoded.stream(source) for source in self._sources.by_role["train"]]
        mixing = self._settings.mixing
        if mixing is None or not self._settings.mixes:
            return streams
        shares = mixing.shares([stream.weight for stream in streams])
        return [replace(stream, weight=share) for stream, share in zip(streams, shares, strict=True)]


def _encoded_of(rows: RowSet) -> Callable[[int], bytes]:
    """Return a function of the tokens and labels of a row as read, by its number: of all its windows."""
    index = rows.index  # ascending

    def encoded(source_index: int) -> bytes:
        start, stop = np.searchsorted(index, [source_index, source_index + 1])
        return b"".join(f"{name} {np.size(value)} ".encode() + np.asarray(value).tobytes()
                        for position in range(start, stop) for name, value in rows[position].items()
                        if name not in ("index", "weight", "truncated"))

    return encoded
