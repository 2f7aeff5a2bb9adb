"""Encoded sources: the records of a source as token ids, in the cache or as a stream."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

from lmmods.core.redaction import redact
from lmmods.data.batch.stream import StreamSource
from lmmods.data.codec import Codec
from lmmods.data.encode.encoder import Encoder, first_usable_row
from lmmods.data.encode.overlap import EvaluationNgrams
from lmmods.data.encode.tokenizer import encoding_state
from lmmods.data.read.by_role import Sources
from lmmods.data.read.conversation import RowProblem
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.arrow_store import Store
from lmmods.data.store.cache import Cache
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.base import DataFields

STREAM_NOTE = "a stream: these counts cover its start; rows dropped later are reported during training"


class EncodedSources:
    """Encodes single sources by the codec of a task."""

    def __init__(self, settings: DataFields, sources: Sources, codec: Codec) -> None:
        self._settings, self._sources, self._codec = settings, sources, codec
        self._cache = Cache(settings.cache_dir, settings.num_proc)

    def store(self, source: Source, prompts_only: bool, is_first: bool, trains: bool, prepares: bool = False) -> Store:
        """Return the store of a source, built if the cache lacks it.

        Args:
            prompts_only: Encode records only up to where a response starts.
            is_first: True in the first process of the run; the others read what it wrote or checked.
            trains: True for rows to train on, which must not repeat those of `data.decontaminate`.
            prepares: True in `prepare_data`, which one process of each machine runs.
        """
        reader, fields = self._sources.reader(source), self._settings
        settings = {"task": type(fields).__name__, "settings": self._codec.encoding_settings(),
                    "prompts_only": prompts_only, **encoding_state(self._codec.tokenizer)}
        if trains and self._sources.evaluation:
            evaluation = [self._sources.reader(other).fingerprint() for other in self._sources.evaluation]
            settings["decontaminate"] = [fields.decontaminate_ngram, *evaluation]
        return self._cache.store(reader, settings, lambda: self._prepare(reader, prompts_only, trains),
                                 rebuild=fields.rebuild_cache and is_first, contents=prepares or is_first)

    def stream(self, source: Source) -> StreamSource:
        """Return a source that is read and encoded during training."""
        reader = self._sources.stream(source)
        _, encoder, info = self._prepare(reader, prompts_only=False, trains=True)
        info["notes"] = [*info.get("notes", []), STREAM_NOTE]
        return StreamSource(lambda: self._regroup(reader, info, trains=True), encoder, source.times, info)

    def _prepare(self, reader: SourceReader, prompts_only: bool, trains: bool
                 ) -> tuple[Iterable[Row], Encoder, dict[str, Any]]:
        """Return the records of a source, their encoder, and facts about them. Raises UserError if there are none."""
        reader.check_adopted()
        # The first record without a problem decides on the encoder.
        first = first_usable_row(reader, reader.source.path)
        encoder, facts = self._codec.make_encoder(reader, first, prompts_only)
        info = {"path": redact(reader.source.path), "replaced": reader.replaced, **facts}
        if trains and self._sources.evaluation:
            info["notes"] = [*info.get("notes", []), *self._ngrams.notes]
        return self._regroup(reader, facts, trains), encoder, info

    @cached_property
    def _ngrams(self) -> EvaluationNgrams:
        """Return the n-grams of `data.decontaminate`. Raises UserError if a source cannot be read."""
        evaluation = ((redact(source.path), (row for row in self._sources.reader(source) if row.problem is None))
                      for source in self._sources.evaluation)
        return EvaluationNgrams(evaluation, self._settings.decontaminate_ngram)

    def _regroup(self, records: Iterable[Row], info: dict[str, Any], trains: bool) -> Iterator[Row]:
        """Yield records of one example each; those that were skipped during reading pass unchanged."""
        left_out: list[Row] = []
        # `append` returns None, so records with a problem are kept; the loop yields them before the next usable one.
        usable = (record for record in records
                  if record.problem is None or left_out.append(record))  # type: ignore[func-returns-value]  # see above
        for record in self._codec.regroup(usable, info):
            while left_out:
                yield left_out.pop(0)
            yield self._decontaminate(record, info) if trains and self._sources.evaluation else record
        yield from left_out

    def _decontaminate(self, record: Row, info: dict[str, Any]) -> Row:
        """Return a training record, without its values and with the reason if it repeats an evaluation record."""
        with suppress(RowProblem):  # the encoder drops such a record and reports why
            if (name := self._ngrams.source_of(self._codec.list_texts(record.values, info))) is not None:
                return record._replace(values={}, problem=f"{self._ngrams.size} consecutive words are also in {name}")
        return record
