"""Words with tags: named entities, parts of speech."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.codec import Predictions, can_score
from lmmods.data.encode.encoder import Encoder, RowCounts
from lmmods.data.encode.labels import Labels, TokenEncoder, cell_list, first_token_positions, label_name, word_prefix
from lmmods.data.label_metrics import class_report, entity_scores, entity_spans, have_entities, tag_scores
from lmmods.data.labels import MOST_LABELS, LabelCodec, LabelData, LabelSettings, find_column, make_truncating_tokenizer
from lmmods.data.read.conversation import RowProblem
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.rows import RowSet
from lmmods.recipe.tasks.token_classification import TokenClassificationDataFields

TOKENS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "pos_tags", "chunk_tags")
OUTSIDE = "O"  # tag of words outside of entities
NO_TAG = -1
MOST_TAGS = 20  # with more of them than words, they are no tags


class TagSurvey:
    """The words and tags of the training rows, to find the labels and columns that contain something else.

    Args:
        tokens_column: Column of the words.
        tags_column: Column of their tags.
    """

    def __init__(self, tokens_column: str, tags_column: str) -> None:
        self._tokens_column, self._tags_column = tokens_column, tags_column
        self.words: set[str] = set()
        self.tags: set[str] = set()
        self.row_counts = RowCounts()  # rows whose tags cannot be read, by reason
        self._numbers_words = True  # True while the words of each row are 1, 2, 3 ...

    def add(self, row: Row, class_names: list[str] | None) -> None:
        """Add a row; `class_names` are the names that its numbers stand for."""
        self.row_counts.num_rows += 1
        try:
            tags = cell_list(row.values.get(self._tags_column), self._tags_column)
            names = {label_name(tag, class_names) for tag in tags}
        except RowProblem as problem:
            self.row_counts.drop(row, str(problem))
            return
        # Above the limit only their number matters.
        if len(self.tags) <= MOST_LABELS:
            self.tags |= names
        with suppress(RowProblem):  # counted when the rows are encoded
            words = list(map(str, cell_list(row.values.get(self._tokens_column), self._tokens_column)))
            if len(self.words) <= MOST_LABELS:
                self.words.update(words)
            self._numbers_words &= words == [str(index) for index in range(1, len(words) + 1)]

    def check(self) -> None:
        """Raise UserError if the columns seem to contain something else than words and their tags."""
        tokens, tags = repr(self._tokens_column), repr(self._tags_column)
        if self._numbers_words and len(self.words) > 1:
            raise UserError(f"data.source: the words in the column {tokens} are 1, 2, 3 and so on in every row. Set "
                            "data.tokens_column to the column with the words; from a CoNLL file, remove the numbers")
        are_swapped = have_entities(sorted(self.words)) and not have_entities(sorted(self.tags))
        if are_swapped or len(self.tags) > max(len(self.words), MOST_TAGS):
            raise UserError(f"data.source: the columns look swapped: {tokens} has {len(self.words)} different words "
                            f"({_some(self.words)}), {tags} has {len(self.tags)} different tags ({_some(self.tags)}). "
                            "Set data.tokens_column and data.tags_column (in a CoNLL file the first column is tokens, "
                            "the last is tags), or name the tags in data.labels")


def _some(names: set[str]) -> str:
    """Return a few names in their order."""
    return ", ".join(sorted(names)[:3]) + (" ..." if len(names) > 3 else "")


FOUND = ("labels", "tokens_column", "tags_column")


class TokenClassificationSettings(TokenClassificationDataFields, LabelSettings):
    """See `Settings`."""

    tokens_column: str
    tags_column: str


class TokenClassificationCodec(LabelCodec):
    """Tagged words; one row of a batch is a text.

    Batches have `labels` int64 [B, T], IGNORED where a token has no tag.
    """

    settings: TokenClassificationSettings
    found_fields: ClassVar[tuple[str, ...]] = FOUND

    def __init__(self, settings: TokenClassificationSettings, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self.labels, self._words, self._tags = settings.labels, settings.tokens_column, settings.tags_column

    # From records to rows

    def make_encoder(self, reader: SourceReader, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        find_column(first, self._words, (), "data.tokens_column")
        if not prompts_only:
            find_column(first, self._tags, (), "data.tags_column")
        labels = Labels(self.labels, reader.class_names(self._tags))
        tokenizer = make_truncating_tokenizer(self.tokenizer, self.settings.max_length)
        encoder = TokenEncoder(tokenizer, prompts_only, self._words, self._tags, labels, self.settings.label_all_tokens,
                               word_prefix(self.tokenizer.backend_tokenizer.to_str()))
        return encoder, {"format": "tagged words", "notes": [f"columns: {self._words}; {self._tags}"]}

    def encoding_settings(self) -> dict[str, Any]:
        return {**super().encoding_settings(), "label_all_tokens": self.settings.label_all_tokens}

    def list_texts(self, record: dict[str, Any], info: dict[str, Any]) -> list[str]:
        return [" ".join(map(str, cell_list(record.get(self._words), self._words)))]

    # From rows to batches

    def batch_columns(self, sets: Sequence[RowSet]) -> tuple[str, ...]:
        return (*self.prompt_columns, "labels")

    def count_labels(self, rows: RowSet) -> dict[str, int]:
        """Return how many tokens have each tag."""
        return dict(zip(self.labels, rows.counts("labels", len(self.labels)).tolist(), strict=True))

    def is_scored(self, item: dict[str, Any], role: str) -> bool:
        return bool((item["labels"] != IGNORED).any())  # the first token may be a word, too

    def describe_scored(self, item: dict[str, Any], record: dict[str, Any], info: dict[str, Any]) -> str:
        words = cell_list(record[self._words], self._words)
        firsts = first_token_positions(item["words"])
        return " ".join(f"{words[word]}/{self.labels[tag]}" for word, tag in zip(
            item["words"][firsts], item["labels"][firsts], strict=True))

    # From outputs to predictions

    def evaluate(self, role: str, rows: RowSet, outputs: dict[int, np.ndarray]) -> Predictions:
        """Return tags, scores and files of an evaluation or of predict.

        Args:
            outputs: Logits [t, K] of the tokens of each row by `index`, without padding.

        Returns:
            Records with `prediction`, a tag for each word, and `entities`, if the tags mark some. Words that the
            network did not see (truncated, or without a token) are O if tags mark entities, otherwise None, which is
            never right. Scores cover all words, if all records have tags; `words_not_seen` counts unseen words, if any.
        """
        records, predicted, gold = [], [], []
        marks_entities = have_entities(self.labels)
        unseen_name = OUTSIDE if marks_entities else None
        unseen = self.labels.index(OUTSIDE) if marks_entities and OUTSIDE in self.labels else NO_TAG
        num_unseen = 0
        for index in sorted(outputs):
            row, record = rows[index], self.example(rows, index)
            firsts = first_token_positions(row["words"])
            seen_words = row["words"][firsts]
            tag_indices = np.full(len(row["tags"]), unseen)  # [W]
            tag_indices[seen_words] = outputs[index][firsts].argmax(1)
            tags: list[Any] = [unseen_name] * len(tag_indices)
            for word in seen_words:
                tags[word] = self.labels[tag_indices[word]]
            words = cell_list(record[self._words], self._words)
            entities = {"entities": [
                {"type": entity_type, "start": start, "end": end, "text": " ".join(map(str, words[start:end]))}
                for entity_type, start, end in entity_spans(tags)]} if marks_entities else {}
            records.append({**record, "prediction": tags, **entities})
            predicted.append(tag_indices)
            gold.append(row["tags"])
            num_unseen += len(tag_indices) - len(seen_words)
        is_scored, warnings = can_score(role, [bool((tags != IGNORED).all()) for tags in gold])
        if not is_scored:
            return Predictions(records, {}, {}, warnings)
        scores, files = self._scores(predicted, gold, marks_entities)
        not_seen = {"words_not_seen": float(num_unseen)} if num_unseen else {}
        return Predictions(records, {**scores, **not_seen}, files, warnings)

    def _scores(self, predicted: list[np.ndarray], gold: list[np.ndarray], marks_entities: bool
                ) -> tuple[dict[str, float], dict[str, Any]]:
        """Return scores of each row's tags, as indices; NO_TAG for a word without one."""
        flat = np.concatenate(predicted), np.concatenate(gold)
        report = class_report(*flat, self.labels)
        if not marks_entities:
            return tag_scores(*flat, len(self.labels)), {"classes.json": report}
        tag_names = [[[OUTSIDE if index == NO_TAG else self.labels[index] for index in row] for row in rows]
                     for rows in (predicted, gold)]
        entities, by_type = entity_scores(*tag_names)
        scores = {"accuracy": float((flat[0] == flat[1]).mean()), **entities}
        return scores, {"classes.json": {**report, "entities": by_type}}


class TokenClassificationData(TokenClassificationDataFields, LabelData):
    """Tagged words."""

    codec_class = TokenClassificationCodec
    found_fields: ClassVar[tuple[str, ...]] = FOUND
    text_files = "conll"

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        lists: list[Any] = [next((row.values[name] for name in names if isinstance(row.values.get(name), list)), None)
                            for names in (TOKENS, TAGS)]
        are_tagged = None not in lists and len(lists[0]) == len(lists[1])
        return "the rows are words with tags" if are_tagged else None

    # Labels ----------------------------------------------------------------------------------------------------------

    def _facts(self, readers: list[SourceReader]) -> dict[str, Any]:
        first = self._first_row(readers)
        tokens = find_column(first, self.tokens_column, TOKENS, "data.tokens_column")
        tags = find_column(first, self.tags_column, TAGS, "data.tags_column")
        class_names = [reader.class_names(tags) for reader in readers]
        survey = TagSurvey(tokens, tags)
        if self._explicit["labels"] is None and not self.streaming:
            for reader, names_of_classes in zip(readers, class_names, strict=True):
                for row in self._sampled(reader):
                    survey.add(row, names_of_classes)
            survey.check()
        labels = self._known_labels(survey.tags, class_names, tags, survey.row_counts)
        if len(labels) < 2:
            raise UserError(f"data.source: all words have the tag {labels[0]!r} in the column {tags!r}, so there is "
                            "nothing to learn. Add rows with other tags")
        return {"labels": labels, "tokens_column": tokens, "tags_column": tags}
