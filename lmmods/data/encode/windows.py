"""Encoding of questions on long contexts to windows with answer positions.

Does not import torch, so that worker processes start fast.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from lmmods.core.labels import IGNORED
from lmmods.data.encode.encoder import Encoded, Ragged
from lmmods.data.read.cells import as_text, check_unicode
from lmmods.data.read.conversation import RowProblem
from lmmods.data.read.readers import Row
from lmmods.data.read.trees import as_list

FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": None}
NEARBY = 32  # characters around a wrong offset in which the answer is searched
LISTS = ("input_ids", "token_type_ids", "offsets")  # columns with a value for each token
Answer = tuple[int, int]  # characters of the context: [start, end)


def flat_questions(rows: Iterable[Row]) -> Iterator[Row]:
    """Flatten SQuAD articles or paragraphs to one row per question; in flat rows, parse text cells of CSV files."""
    for row in rows:
        if "paragraphs" in row.values or "qas" in row.values:
            yield from _questions_of(row)
        else:
            yield row._replace(values={name: _from_cell(name, value) for name, value in row.values.items()})


def _from_cell(name: str, value: Any) -> Any:
    """Parse `answers` from JSON and `is_impossible` from a word; an empty cell is None, all else is unchanged."""
    if name not in ("answers", "is_impossible") or not isinstance(value, str):
        return value
    if name == "is_impossible":
        return FLAGS.get(value.strip().lower(), value)
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def _questions_of(row: Row) -> Iterator[Row]:
    article = row.values
    for paragraph in as_list(article.get("paragraphs")) if "paragraphs" in article else [article]:
        questions = as_list(paragraph.get("qas")) if isinstance(paragraph, dict) else []
        if not questions or not all(isinstance(question, dict) for question in questions):
            yield row._replace(values={"question": None, "context": None})  # counted as a damaged row
            continue
        for question in questions:
            values = {"title": article.get("title"), "context": paragraph.get("context"), **question}
            # SQuAD 2.0 lists wrong answers to unanswerable questions here.
            yield row._replace(values={key: value for key, value in values.items() if key != "plausible_answers"})


def gold_answers(row: dict[str, Any]) -> list[tuple[str, int]]:
    """(text, offset) of each answer, from SQuAD's list of objects or the flat form of lists.

    Raises:
        RowProblem: They are neither.
    """
    answers, is_impossible = row.get("answers"), row.get("is_impossible")
    if isinstance(is_impossible, str):
        raise RowProblem("is_impossible is neither true nor false")
    # No answers: a valid label, unlike damaged ones.
    if answers is None or is_impossible:
        return []
    if isinstance(answers, str):
        raise RowProblem("answers is text, but not JSON")
    try:
        if isinstance(answers, dict):
            if not isinstance(answers["text"], list):
                raise TypeError("a string instead of a list of strings")
            pairs = list(zip(answers["text"], answers["answer_start"], strict=True))
        else:
            pairs = [(answer["text"], answer["answer_start"]) for answer in answers]
        return [(as_text(text, "answers.text"), int(start)) for text, start in pairs]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RowProblem("answers are not {text, answer_start}") from error


def locate(context: str, text: str, start: int) -> Answer | None:
    """Find the answer: at its offset, else at the nearest occurrence around it, else None.

    Differences in white space (double spaces, line ends) are ignored.
    """
    # A wrong offset may lie outside the context.
    start = min(max(start, 0), len(context))
    text = text.strip() if context[start : start + len(text)] != text else text
    if text and context[start : start + len(text)] == text:
        return start, start + len(text)
    words = text.split()
    if not words:
        return None
    low = max(0, start - NEARBY)
    pattern = re.compile(r"\s+".join(map(re.escape, words)))
    matches = list(pattern.finditer(context, low, min(len(context), start + len(text) + NEARBY + 8)))
    nearest = min(matches, key=lambda match: abs(match.start() - start), default=None)
    return nearest.span() if nearest else None


@dataclass
class WindowEncoder:
    """Encodes rows {question, context, answers} as overlapping windows.

    Args:
        backend: JSON of the tokenizer's backend.
        cls_id: Token whose position means "no answer here".
        unknown_id: Id of the unknown token.
        question_first: True if the question precedes the context.
        prompts_only: Rows need no answers.
    """

    backend: str
    cls_id: int | None
    unknown_id: int | None
    max_length: int
    stride: int
    question_max_length: int
    question_first: bool
    prompts_only: bool

    def __post_init__(self) -> None:
        self._plain, self._windows = Tokenizer.from_str(self.backend), Tokenizer.from_str(self.backend)
        # `_plain` measures questions, `_windows` cuts contexts; settings saved in tokenizer.json apply to neither.
        for tokenizer in (self._plain, self._windows):
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokenizer.encode_special_tokens = True  # names of special tokens in a text stay text
        strategy = "only_second" if self.question_first else "only_first"
        self._windows.enable_truncation(self.max_length, stride=self.stride, strategy=strategy)

    def __reduce__(self):  # noqa: ANN204 - pickling would drop encode_special_tokens
        return WindowEncoder, astuple(self)

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """Columns with one entry per window.

        `input_ids`, `token_type_ids`, `offsets` (start and end character of each token in turn, -1 outside the
        context), `start_positions`, `end_positions`, `cls_position`.
        """
        readable, dropped = [], []
        counts: Counter = Counter()
        for index, row in enumerate(rows):
            try:
                readable.append((index, *self._read(row, counts)))
            except RowProblem as problem:
                dropped.append((index, str(problem)))
        questions = self._short([question for _, question, _, _ in readable], counts)
        contexts = [context for _, _, context, _ in readable]
        sides = (questions, contexts) if self.question_first else (contexts, questions)
        pairs = list(zip(*sides, strict=True))
        columns: dict[str, list] = {name: [] for name in (*LISTS, "start_positions", "end_positions", "cls_position")}
        positions = []
        # Pairs are encoded in one call, in parallel. A long context gives its first window as `encoding`, the others as
        # `overflowing`.
        for (index, _, _, answer), encoding in zip(readable, self._windows.encode_batch(pairs), strict=True):
            windows = [self._window(window, answer) for window in (encoding, *encoding.overflowing)]
            for window in windows:
                for name, value in window.items():
                    columns[name].append(value)
            # All windows of a question point to its row.
            positions += [index] * len(windows)
            counts["questions"] += 1
            counts["questions_of_several_windows"] += len(windows) > 1
        arrays: dict[str, Any] = {
            name: Ragged.from_lists(column) if name in LISTS else np.array(column, np.int64)
            for name, column in columns.items()}
        counts["tokens"] += len(arrays["input_ids"].values)
        counts["unknown_tokens"] += int((arrays["input_ids"].values == self.unknown_id).sum())
        return Encoded(arrays, np.array(positions, np.int64), dropped, counts)

    def _read(self, row: dict[str, Any], counts: Counter) -> tuple[str, str, Answer | None | str]:
        """Return question, context, and the answer: characters, None for no answer, or "unknown"."""
        texts = []
        for column in ("question", "context"):
            if column not in row:
                raise RowProblem(f"{column} is missing")
            texts.append(as_text(row[column], column))
            check_unicode(texts[-1])
            if not texts[-1].strip():
                raise RowProblem(f"empty {column}")
        if self.prompts_only:
            return texts[0].lstrip(), texts[1], "unknown"
        if "answers" not in row and not row.get("is_impossible"):
            raise RowProblem("answers is missing")
        answers = gold_answers(row)
        if not answers:
            counts["questions_without_answer"] += 1
            return texts[0].lstrip(), texts[1], None
        # Trained on the first answer, like the original implementation; scores use all of them.
        text, start = answers[0]
        span = locate(texts[1], text, start)
        if span is None:
            counts["answers_not_in_context"] += 1
            return texts[0].lstrip(), texts[1], "unknown"
        counts["answers_moved_to_their_place"] += span[0] != start or texts[1][slice(*span)] != text
        return texts[0].lstrip(), texts[1], span

    def _short(self, questions: list[str], counts: Counter) -> list[str]:
        for index, encoding in enumerate(self._plain.encode_batch(questions, add_special_tokens=False)):
            if len(encoding.ids) > self.question_max_length:
                # Cut the text after the last token that is kept.
                questions[index] = questions[index][: encoding.offsets[self.question_max_length - 1][1]]
                counts["questions_cut"] += 1
        return questions

    def _window(self, encoding: Encoding, answer: Answer | None | str) -> dict[str, Any]:
        ids = np.array(encoding.ids, np.int32)
        # [T]: sequence 0 or 1 of the pair, None for special tokens.
        in_context = np.array([sequence == int(self.question_first) for sequence in encoding.sequence_ids])
        offsets = np.where(in_context[:, None], np.array(encoding.offsets, np.int32).reshape(-1, 2), -1)  # [T, 2]
        # Tokenizers without CLS: position 0 means no answer.
        cls = int(np.argmax(ids == self.cls_id)) if self.cls_id is not None else 0
        start, end = (IGNORED, IGNORED) if answer == "unknown" else _span(offsets, answer, cls)
        return {"input_ids": ids, "token_type_ids": np.array(encoding.type_ids, np.int32), "offsets": offsets.ravel(),
                "start_positions": start, "end_positions": end, "cls_position": cls}


def _span(offsets: np.ndarray, answer: Any, cls: int) -> tuple[int, int]:
    """Return the first and last token of the answer, or the CLS position if it is not entirely in the window."""
    context = np.flatnonzero(offsets[:, 1] > offsets[:, 0])  # context tokens with text
    if answer is None or not len(context):
        return cls, cls
    start, end = answer
    if offsets[context[0], 0] > start or offsets[context[-1], 1] < end:
        return cls, cls
    # The tokens that overlap the answer, which may start or end inside one.
    first = context[np.flatnonzero(offsets[context, 1] > start)[0]]
    last = context[np.flatnonzero(offsets[context, 0] < end)[-1]]
    return int(first), int(last)
