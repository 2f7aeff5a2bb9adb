"""Extractive question answering: SQuAD files as published, or flat rows, encoded as overlapping windows."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.core.text_metrics import best_threshold, exact_match, squad_scores, token_f1
from lmmods.data.base import DataModule
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.tokenizer import tells_texts_apart
from lmmods.data.encode.windows import WindowEncoder, flat_questions, gold_answers
from lmmods.data.scoring import Answers, Predictions, SpanSettings, WindowLogits, choose_answer
from lmmods.data.sources.cells import as_text
from lmmods.data.sources.conversation import RowProblem
from lmmods.data.sources.readers import Row
from lmmods.data.splits import Role
from lmmods.data.store.rows import RowSet
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.qa import QADataFields


class QAData(QADataFields, DataModule):
    """Questions on contexts; one row of a batch is a window of one question.

    `index` of a batch counts the windows of its set; `window` returns details of one. A window without the whole answer
    is labelled with the position of CLS. If an answer cannot be found in its context, the labels are -100.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spans = SpanSettings(self.n_best_size, self.max_answer_length, self.null_score_diff_threshold,
                                  self.version_2_with_negative)
        self._told_ids: set[Role] = set()  # sets whose duplicate ids have been reported

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        columns = row.values.keys()
        is_ours = {"paragraphs", "qas"} & columns or {"question", "context", "answers"} <= columns
        return "the rows are questions on contexts" if is_ours else None

    def window(self, role: Role, index: int) -> dict[str, Any]:
        """Details of the window with this `index` of a batch.

        Args:
            role: Set the batch is of: train, val, test or predict.
            index: Number of the window.

        Returns:
            `question`: number of the question, as `question_row` takes it; `offsets` [T, 2]: first and last character
            of each token in the context, -1 outside it; `cls_position`.
        """
        row = self._rows(role)[index]
        assert row is not None
        return {"question": row["index"], "offsets": row["offsets"].reshape(-1, 2),
                "cls_position": int(row["cls_position"])}

    def question_row(self, role: Role, question: int) -> dict[str, Any]:
        """The row of a question: question, context, answers, id."""
        return self._rows(role).source_row(question)

    def golds(self, role: Role, question: int) -> list[str]:
        """Texts of the gold answers; empty for none. Raises RowProblem: they are damaged."""
        return [text for text, _ in gold_answers(self.question_row(role, question))]

    def is_labelled(self, role: Role, question: int) -> bool:
        """True if the data give the right answer, or say that there is none."""
        row = self.question_row(role, question)
        with suppress(RowProblem):  # of damaged answers, which are none
            self.golds(role, question)
            return row.get("answers") is not None or bool(row.get("is_impossible"))
        return False

    def answer(self, role: Role, logits: dict[int, tuple[np.ndarray, np.ndarray]]) -> Predictions:
        """Answers, scores and files of an evaluation or of predict.

        Args:
            logits: Start and end logits [T] by window. Questions without any window here are left out.

        Returns:
            Scores in percent, by the evaluation of SQuAD v1.1 or, with version_2_with_negative, v2.0 with the best
            thresholds; none unless all questions are labelled. Files: predictions.json, nbest_predictions.json,
            null_odds.json.
        """
        windows: dict[int, list[WindowLogits]] = {}
        for index, (start, end) in sorted(logits.items()):
            behind = self.window(role, index)
            length = len(behind["offsets"])
            # Without the padding of the batch.
            inside = slice(len(start) - length, None) if self._side() == "left" else slice(length)
            found = WindowLogits(start[inside], end[inside], behind["offsets"], behind["cls_position"])
            windows.setdefault(behind["question"], []).append(found)
        rows, chosen, keys = [], Answers(), self._keys(role, sorted(windows))
        for question, parts in sorted(windows.items()):
            row, key = self.question_row(role, question), keys[question]
            chosen.add(key, *choose_answer(as_text(row["context"], "context"), parts, self.spans))
            rows.append({**row, "prediction": chosen.predictions[key]})
        scores = {}
        if self._can_score(role, [self.is_labelled(role, question) for question in windows]):
            scores = self._scores(role, chosen, {key: self.golds(role, question) for question, key in keys.items()})
        files = {"predictions.json": chosen.predictions, "nbest_predictions.json": chosen.nbest}
        if self.spans.version_2_with_negative:
            files["null_odds.json"] = chosen.null_odds
        return Predictions(rows, scores, files)

    def _keys(self, role: Role, questions: list[int]) -> dict[int, str]:
        """Names of questions in answer files: the id, or the number if the id is missing or empty.

        These files hold one answer per id, like SQuAD's; a duplicate id is followed by the number.
        """
        keys: dict[int, str] = {}
        taken: set[str] = set()
        repeated = []
        for question in questions:
            row = self.question_row(role, question)
            key = str(question if row.get("id") in (None, "") else row["id"])
            if key in taken:
                repeated.append(f"{key} ({self._rows(role).location(question)})")
                key = f"{key}#{question}"
            taken.add(key)
            keys[question] = key
        if repeated and role not in self._told_ids and getattr(self.trainer, "is_global_zero", True):
            warn(f"{len(repeated)} questions of {self._splits.key(role)} have the id of another one, the first is "
                 f"{repeated[0]}. Each is answered and scored by itself; in predictions.json they are named ID#ROW.")
        self._told_ids.add(role)
        return keys

    def _scores(self, role: Role, chosen: Answers, golds: dict[str, list[str]]) -> dict[str, float]:
        if not self.spans.version_2_with_negative:
            answerable = {key: texts for key, texts in golds.items() if texts}  # v1.1 has no others
            if len(answerable) < len(golds):
                self._warn_once(f"The scores of {role} leave out {len(golds) - len(answerable)} of {len(golds)} "
                                "questions, which have no answer. Set data.version_2_with_negative to score them.")
            return squad_scores(chosen.predictions, answerable, version_2=False) if answerable else {}
        scores = squad_scores(chosen.predictions, golds, version_2=True)
        for name, score in (("exact_match", exact_match), ("f1", token_f1)):
            threshold, best = best_threshold(chosen.best_non_null, golds, chosen.null_odds, score)
            scores |= {f"best_{name}": best, f"best_{name}_threshold": threshold}
        return scores

    def outputs_by_index(self, batch: dict[str, Any], outputs: Any) -> dict[int, Any]:
        """Start and end logits [T] of each window; the network already returns them by window."""
        return outputs

    def predictions(self, outputs: dict[int, Any]) -> Predictions:
        """Answers to all questions of predict, from the logits of their windows."""
        return self.answer("predict", outputs)

    def example(self, index: int) -> dict[str, Any]:
        """The question behind `index` of a predict batch."""
        return self.question_row("predict", self.window("predict", index)["question"])

    def _regrouped(self, rows: Iterable[Row], info: dict[str, Any]) -> Iterator[Row]:
        return flat_questions(rows)

    def _texts(self, row: dict[str, Any], info: dict[str, Any]) -> list[str]:
        return [as_text(row.get(name), name) for name in ("question", "context")]

    def _encoding_settings(self) -> dict[str, Any]:
        return {"max_length": self.max_length, "stride": self.stride, "question_max_length": self.question_max_length,
                "side": self.tokenizer.padding_side}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        layout = "squad" if {"paragraphs", "qas"} & set(first.values) else "flat"
        missing = [name for name in ("question", "context") if name not in first.values]
        if layout == "flat" and missing:
            raise UserError(f"{first.file}:{first.line}: no column {missing[0]!r}; the columns are "
                            f"{', '.join(first.values)}. Map yours with data.columns, or give SQuAD JSON")
        tokenizer = self.tokenizer
        specials = tokenizer.num_special_tokens_to_add(pair=True)
        # Windows overlap by `stride` tokens, so one must hold more than that to advance.
        room = self.max_length - self.question_max_length - specials
        if room <= self.stride:
            raise UserError(f"data.max_length {self.max_length} leaves {room} tokens for the context next to a "
                            f"question of {self.question_max_length}; that must be more than data.stride {self.stride}")
        encoder = WindowEncoder(tokenizer.backend_tokenizer.to_str(), tokenizer.cls_token_id, tokenizer.unk_token_id,
                                self.max_length, self.stride, self.question_max_length,
                                tokenizer.padding_side == "right", prompts_only)
        return encoder, {"format": layout}

    def _arrange(self, rows: RowSet) -> "Windows":
        return Windows(rows)

    def _is_scored(self, item: dict[str, Any], role: str) -> bool:
        return role == "test" or item["start_positions"] != IGNORED  # a test is scored by the texts of answers too

    def _scored(self, item: dict[str, Any], source: dict[str, Any]) -> str:
        start, end = int(item["start_positions"]), int(item["end_positions"])
        if start == IGNORED:
            return "nothing: its answer was not found"
        if start == item["cls_position"]:
            return "no answer, as this window does not hold it"
        return f"start and end of {self.tokenizer.decode(item['input_ids'][start:end + 1])}"

    def _batch_keys(self) -> tuple[str, ...]:
        return (*self._prompt_keys(), "start_positions", "end_positions")

    def _prompt_keys(self) -> tuple[str, ...]:
        types = ("token_type_ids",) if self.token_types and tells_texts_apart(self.tokenizer) else ()
        return ("input_ids", *types, "index")

    def _prompts(self, rows: RowSet) -> "Windows":
        return Windows(rows)

    def _prompt_side(self) -> str:
        return self.tokenizer.padding_side

    def _side(self) -> str:
        return self.tokenizer.padding_side


class Windows:
    """Windows with `index`, their place in the set, and `source`, the number of their question as read.

    Item -1 is None, a padding row.
    """

    def __init__(self, rows: RowSet) -> None:
        self.rows = rows
        self.lengths = rows.lengths
        self.truncated = np.zeros(len(rows), np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any] | None:
        row = self.rows[number]
        return None if row is None else {**row, "index": number, "source": row["index"]}
