"""Extractive question answering: SQuAD files as published, or flat rows, encoded as overlapping windows."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.core.text_metrics import best_threshold, exact_match, squad_scores, token_f1
from lmmods.data.base import DataModule
from lmmods.data.codec import NumbersCodec, Predictions, Settings, can_score
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.tokenizer import distinguishes_texts
from lmmods.data.encode.windows import WindowEncoder, flat_questions, gold_answers
from lmmods.data.read.cells import as_text
from lmmods.data.read.conversation import RowProblem
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.scoring import Answers, SpanSettings, WindowLogits, choose_answer
from lmmods.data.store.rows import IndexedRows, RowSet
from lmmods.recipe.tasks.qa import QADataFields


class QASettings(QADataFields, Settings):
    """See `Settings`."""


class QACodec(NumbersCodec):
    """Questions on contexts; one row of a batch is a window of one question.

    `index` of a batch counts the windows of its set; `window` returns details of one. A window without the whole answer
    is labelled with the position of CLS. If an answer cannot be found in its context, the labels are -100.
    """

    settings: QASettings

    def __init__(self, settings: QASettings, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self.spans = SpanSettings(settings.n_best_size, settings.max_answer_length, settings.null_score_diff_threshold,
                                  settings.version_2_with_negative)

    # From records to rows

    def make_encoder(self, reader: SourceReader, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        layout = "squad" if {"paragraphs", "qas"} & set(first.values) else "flat"
        missing = [name for name in ("question", "context") if name not in first.values]
        if layout == "flat" and missing:
            raise UserError(f"{first.file}:{first.line}: no column {missing[0]!r}; the columns are "
                            f"{', '.join(first.values)}. Map yours with data.columns, or use SQuAD JSON")
        tokenizer, settings = self.tokenizer, self.settings
        specials = tokenizer.num_special_tokens_to_add(pair=True)
        # Windows overlap by `stride` tokens, so one must hold more than that to advance.
        context_length = settings.max_length - settings.question_max_length - specials
        if context_length <= settings.stride:
            raise UserError(f"data.max_length {settings.max_length} leaves {context_length} tokens for the context "
                            f"next to a question of {settings.question_max_length}, but data.stride is "
                            f"{settings.stride}. Raise data.max_length, or lower data.stride")
        encoder = WindowEncoder(tokenizer.backend_tokenizer.to_str(), tokenizer.cls_token_id, tokenizer.unk_token_id,
                                settings.max_length, settings.stride, settings.question_max_length,
                                tokenizer.padding_side == "right", prompts_only)
        return encoder, {"format": layout}

    def encoding_settings(self) -> dict[str, Any]:
        settings = self.settings
        return {"max_length": settings.max_length, "stride": settings.stride,
                "question_max_length": settings.question_max_length, "side": self.tokenizer.padding_side}

    def regroup(self, records: Iterable[Row], info: dict[str, Any]) -> Iterator[Row]:
        return flat_questions(records)

    def list_texts(self, record: dict[str, Any], info: dict[str, Any]) -> list[str]:
        return [as_text(record.get(name), name) for name in ("question", "context")]

    # From rows to batches

    def make_items(self, rows: RowSet, by_source: bool) -> IndexedRows:
        return IndexedRows(rows, are_whole=True)

    def make_prompts(self, rows: RowSet) -> IndexedRows:
        return IndexedRows(rows, are_whole=True)

    def batch_columns(self, sets: Sequence[RowSet]) -> tuple[str, ...]:
        return (*self.prompt_columns, "start_positions", "end_positions")

    @property
    def prompt_columns(self) -> tuple[str, ...]:
        """Columns of a predict batch besides `attention_mask`."""
        types = ("token_type_ids",) if self.model.token_types and distinguishes_texts(self.tokenizer) else ()
        return ("input_ids", *types, "index")

    @property
    def side(self) -> str:
        """Padding side, which is the tokenizer's."""
        return self.tokenizer.padding_side

    @property
    def prompt_side(self) -> str:
        """Padding side in predict, which is the tokenizer's."""
        return self.tokenizer.padding_side

    def is_scored(self, item: dict[str, Any], role: str) -> bool:
        return role == "test" or item["start_positions"] != IGNORED  # a test is scored by the texts of answers too

    def describe_scored(self, item: dict[str, Any], record: dict[str, Any], info: dict[str, Any]) -> str:
        start, end = int(item["start_positions"]), int(item["end_positions"])
        if start == IGNORED:
            return "nothing: its answer was not found"
        if start == item["cls_position"]:
            return "no answer: this window does not contain it"
        return f"start and end of {self.tokenizer.decode(item['input_ids'][start:end + 1])}"

    # From outputs to predictions

    def window(self, rows: RowSet, index: int) -> dict[str, Any]:
        """Return details of the window with this `index` of a batch.

        Returns:
            `question`: index of the question as read; `offsets` [T, 2]: first and last character of each token in the
            context, -1 outside it; `cls_position`.
        """
        row = rows[index]
        assert row is not None
        return {"question": row["index"], "offsets": row["offsets"].reshape(-1, 2),
                "cls_position": int(row["cls_position"])}

    def golds(self, record: dict[str, Any]) -> list[str]:
        """Return the texts of the gold answers; empty for none. Raises RowProblem if they are damaged."""
        return [text for text, _ in gold_answers(record)]

    def is_labelled(self, record: dict[str, Any]) -> bool:
        """Return whether a record has the right answer, or states that there is none."""
        with suppress(RowProblem):  # damaged answers count as missing
            self.golds(record)
            return record.get("answers") is not None or bool(record.get("is_impossible"))
        return False

    def example(self, rows: RowSet, index: int) -> dict[str, Any]:
        """Return the question behind `index` of a predict batch."""
        return rows.source_row(self.window(rows, index)["question"])

    def evaluate(self, role: str, rows: RowSet, outputs: dict[int, tuple[np.ndarray, np.ndarray]]) -> Predictions:
        """Return answers, scores and files of an evaluation or of predict.

        Args:
            outputs: Start and end logits [T] by window. Questions without any window here are omitted.

        Returns:
            Scores in percent, by the evaluation of SQuAD v1.1 or, with version_2_with_negative, v2.0 with the best
            thresholds; none unless all questions are labelled. Files: predictions.json, nbest_predictions.json,
            null_odds.json.
        """
        windows: dict[int, list[WindowLogits]] = {}
        for index, (start, end) in sorted(outputs.items()):
            window = self.window(rows, index)
            length = len(window["offsets"])
            # Without the padding of the batch.
            inside = slice(len(start) - length, None) if self.side == "left" else slice(length)
            logits = WindowLogits(start[inside], end[inside], window["offsets"], window["cls_position"])
            windows.setdefault(window["question"], []).append(logits)
        records = {question: rows.source_row(question) for question in sorted(windows)}
        keys, warnings = self._name_questions(role, rows, records)
        predictions, answers = [], Answers()
        for question, record in records.items():
            context = as_text(record["context"], "context")
            answers.add(keys[question], *choose_answer(context, windows[question], self.spans))
            predictions.append({**record, "prediction": answers.predictions[keys[question]]})
        scores: dict[str, float] = {}
        is_scored, more = can_score(role, [self.is_labelled(record) for record in records.values()])
        if is_scored:
            golds = {keys[question]: self.golds(record) for question, record in records.items()}
            scores, exclusions = self._scores(role, answers, golds)
            more = (*more, *exclusions)
        files = {"predictions.json": answers.predictions, "nbest_predictions.json": answers.nbest}
        if self.spans.version_2_with_negative:
            files["null_odds.json"] = answers.null_odds
        return Predictions(predictions, scores, files, (*warnings, *more))

    def _name_questions(self, role: str, rows: RowSet, records: dict[int, dict[str, Any]]
                        ) -> tuple[dict[int, str], tuple[str, ...]]:
        """Return the names of questions in answer files, and warnings: the id, or the number if the id is missing or
        empty.

        These files contain one answer per id, like SQuAD's; a duplicate id is followed by the number.
        """
        keys: dict[int, str] = {}
        used_keys: set[str] = set()
        repeated = []
        for question, record in records.items():
            key = str(question if record.get("id") in (None, "") else record["id"])
            if key in used_keys:
                repeated.append(f"{key} ({rows.location(question)})")
                key = f"{key}#{question}"
            used_keys.add(key)
            keys[question] = key
        warnings = (f"{len(repeated)} questions of {role} share the id of another one, the first is {repeated[0]}. "
                    "Each is answered and scored separately; predictions.json names them ID#ROW.",) if repeated else ()
        return keys, warnings

    def _scores(self, role: str, answers: Answers, golds: dict[str, list[str]]
                ) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return scores and warnings."""
        if not self.spans.version_2_with_negative:
            answerable = {key: texts for key, texts in golds.items() if texts}  # v1.1 has no others
            warnings = (f"The scores of {role} exclude {len(golds) - len(answerable)} of {len(golds)} questions, "
                        "which have no answer. Set data.version_2_with_negative to score them.",
                        ) if len(answerable) < len(golds) else ()
            scores = squad_scores(answers.predictions, answerable, version_2=False) if answerable else {}
            return scores, warnings
        scores = squad_scores(answers.predictions, golds, version_2=True)
        for name, score in (("exact_match", exact_match), ("f1", token_f1)):
            threshold, best = best_threshold(answers.best_non_null, golds, answers.null_odds, score)
            scores |= {f"best_{name}": best, f"best_{name}_threshold": threshold}
        return scores, ()


class QAData(QADataFields, DataModule):
    """Questions on contexts."""

    codec_class = QACodec

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        columns = row.values.keys()
        is_known = {"paragraphs", "qas"} & columns or {"question", "context", "answers"} <= columns
        return "the rows are questions on contexts" if is_known else None
