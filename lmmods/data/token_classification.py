"""Words with tags: named entities, parts of speech."""

from typing import Any, ClassVar

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.labels import Labels, TokenEncoder, cell_list, first_tokens, label_name, word_prefix
from lmmods.data.label_metrics import class_report, entity_scores, entity_spans, have_entities, tag_scores
from lmmods.data.labels import MOST_LABELS, LabelData, find_column
from lmmods.data.scoring import Predictions
from lmmods.data.sources.conversation import RowProblem
from lmmods.data.sources.readers import Row
from lmmods.data.sources.source_reader import SourceReader
from lmmods.data.splits import Role
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.token_classification import TokenClassificationDataFields

TOKENS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "pos_tags", "chunk_tags")


class TokenClassificationData(TokenClassificationDataFields, LabelData):
    """Tagged words; one row of a batch is a text, and `index` its number in its set.

    Batches have `labels` int64 [B, T], IGNORED where a token bears no tag.
    """

    found_fields: ClassVar[tuple[str, ...]] = ("labels", "tokens_column", "tags_column")
    text_files: ClassVar[str] = "conll"

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        lists = [next((row.values[name] for name in names if isinstance(row.values.get(name), list)), None)
                 for names in (TOKENS, TAGS)]
        are_tagged = None not in lists and len(lists[0]) == len(lists[1])
        return "the rows are words with tags" if are_tagged else None

    # Labels ----------------------------------------------------------------------------------------------------------

    def _facts(self, readers: list[SourceReader]) -> dict[str, Any]:
        first = self._first_row(readers)
        tokens = find_column(first, self.tokens_column, TOKENS, "data.tokens_column")
        tags = find_column(first, self.tags_column, TAGS, "data.tags_column")
        class_names = [reader.class_names(tags) for reader in readers]
        names: set[str] = set()
        if self._given["labels"] is None and not self.streaming:
            for reader, known in zip(readers, class_names, strict=True):
                for row in self._sampled(reader):
                    names |= self._names(row, tags, known) if len(names) <= MOST_LABELS else set()
        labels = self._known_labels(names, class_names, tags)
        if len(labels) < 2:
            raise UserError(f"data.source: all words have the tag {labels[0]!r} in the column {tags!r}, so there is "
                            "nothing to tell apart. Add rows with other tags")
        return {"labels": labels, "tokens_column": tokens, "tags_column": tags}

    def _names(self, row: Row, column: str, known: list[str] | None) -> set[str]:
        try:
            return {label_name(tag, known) for tag in cell_list(row.values.get(column), column)}
        except RowProblem:
            return set()  # counted when the rows are encoded

    def label_counts(self, role: Role) -> dict[str, int]:
        """Tokens of a role that bear each tag."""
        return dict(zip(self.labels, self._rows(role).counts("labels", len(self.labels)).tolist(), strict=True))

    # Rows ------------------------------------------------------------------------------------------------------------

    def _texts(self, row: dict[str, Any], info: dict[str, Any]) -> list[str]:
        self.find_labels()
        return [" ".join(map(str, cell_list(row.get(self.tokens_column), self.tokens_column)))]

    def _encoding_settings(self) -> dict[str, Any]:
        return {**super()._encoding_settings(), "label_all_tokens": self.label_all_tokens}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        self.find_labels()
        find_column(first, self.tokens_column, (), "data.tokens_column")
        if not prompts_only:
            find_column(first, self.tags_column, (), "data.tags_column")
        labels = Labels(self.labels, self._class_names(source, self.tags_column))
        encoder = TokenEncoder(self._cutting_tokenizer(), prompts_only, self.tokens_column, self.tags_column, labels,
                               self.label_all_tokens, word_prefix(self.tokenizer.backend_tokenizer.to_str()))
        return encoder, {"format": "tagged words", "notes": [f"columns: {self.tokens_column}; {self.tags_column}"]}

    def _batch_keys(self) -> tuple[str, ...]:
        return (*self._prompt_keys(), "labels")

    def _scored(self, item: dict[str, Any], source: dict[str, Any]) -> str:
        words = cell_list(source[self.tokens_column], self.tokens_column)
        firsts = first_tokens(item["words"])
        return " ".join(f"{words[word]}/{self.labels[tag]}" for word, tag in zip(
            item["words"][firsts], item["labels"][firsts], strict=True))

    def _is_scored(self, item: dict[str, Any], role: str) -> bool:
        return bool((item["labels"] != IGNORED).any())  # the first token may be a word, too

    # Outputs ---------------------------------------------------------------------------------------------------------

    def answer(self, role: Role, outputs: dict[int, np.ndarray]) -> Predictions:
        """Tags, scores and files of an evaluation or of predict.

        Args:
            outputs: Logits [t, K] of the tokens of each row by `index`, without padding.

        Returns:
            Rows with `prediction`, a tag for each word, None for words that the network did not see: those cut off,
            and those without a token; and `entities`, if the tags mark some. Scores are over the words that it saw,
            as transformers' run_ner has it, if all rows have tags; so is classes.json.
        """
        rows, predicted, gold = [], [], []
        marks_entities = have_entities(self.labels)
        for index in sorted(outputs):
            row, source = self._rows(role)[index], self._example(role, index)
            firsts = first_tokens(row["words"])
            numbers = outputs[index][firsts].argmax(1)
            words = cell_list(source[self.tokens_column], self.tokens_column)
            tags: list[str | None] = [None] * len(words)
            for word, number in zip(row["words"][firsts], numbers, strict=True):
                tags[word] = self.labels[number]
            entities = {"entities": [
                {"type": kind, "start": start, "end": end, "text": " ".join(map(str, words[start:end]))}
                for kind, start, end in entity_spans([tag or "O" for tag in tags])]} if marks_entities else {}
            rows.append({**source, "prediction": tags, **entities})
            predicted.append(numbers)
            gold.append(row["labels"][firsts])
        if not gold or any((tags == IGNORED).any() for tags in gold):
            return Predictions(rows, {}, {})
        scores, files = self._scores(predicted, gold, marks_entities)
        return Predictions(rows, scores, files)

    def _scores(self, predicted: list[np.ndarray], gold: list[np.ndarray], marks_entities: bool
                ) -> tuple[dict[str, float], dict[str, Any]]:
        """Scores of the tags of each row, numbers."""
        flat = np.concatenate(predicted), np.concatenate(gold)
        report = class_report(*flat, self.labels)
        if not marks_entities:
            return tag_scores(*flat, len(self.labels)), {"classes.json": report}
        named = [[[self.labels[number] for number in row] for row in rows] for rows in (predicted, gold)]
        entities, by_type = entity_scores(*named)
        scores = {"accuracy": float((flat[0] == flat[1]).mean()), **entities}
        return scores, {"classes.json": {**report, "entities": by_type}}
