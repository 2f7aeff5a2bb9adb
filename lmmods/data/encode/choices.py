"""Encoding of questions with several choices to pairs of texts. Does not import torch, so that workers start fast."""

from collections import Counter
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from lmmods.core.labels import IGNORED
from lmmods.data.encode.encoder import Encoded, Ragged
from lmmods.data.read.choices import Question, read_question
from lmmods.data.read.conversation import RowProblem


@dataclass
class ChoiceEncoder:
    """Encodes rows of multiple choice: of each choice the text before it and the choice, in the tokenizer's pair form.

    Args:
        backend: JSON of the tokenizer's backend.
        unknown_id: Id of the unknown token.
        max_length: Maximum length of a pair in tokens.
        prompts_only: Rows need no answers.
    """

    backend: str
    unknown_id: int | None
    max_length: int
    prompts_only: bool

    def __post_init__(self) -> None:
        self._full, self._truncated, self._both_truncated = (Tokenizer.from_str(self.backend) for _ in range(3))
        for tokenizer in (self._full, self._truncated, self._both_truncated):
            # Settings saved in tokenizer.json do not apply.
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokenizer.encode_special_tokens = True  # names of special tokens in a text stay text
        self._truncated.enable_truncation(self.max_length, strategy="only_first")
        self._both_truncated.enable_truncation(self.max_length, strategy="longest_first")

    def __reduce__(self):  # noqa: ANN204 - pickling would drop encode_special_tokens
        return ChoiceEncoder, astuple(self)

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """Return columns with one entry per question.

        `input_ids` and `token_type_ids` concatenate the pairs; `sizes`, tokens of each; `longest`, of the longest;
        `choices`, their number; `answer`, the number of the right one (-100 if unknown, in predict only); `truncated`.
        """
        fitted: list[tuple[int, Question, list[Encoding], int]] = []
        questions: list[tuple[int, Question]] = []
        dropped = []
        counts: Counter = Counter()
        for index, row in enumerate(rows):
            try:
                questions.append((index, self._read(row)))
            except RowProblem as problem:
                dropped.append((index, str(problem)))
        # The pairs of all questions are encoded in one call, in parallel.
        pairs = iter(self._full.encode_batch([pair for _, question in questions for pair in _pairs(question)]))
        for index, question in questions:
            encodings = [next(pairs) for _ in question.choices]
            fitted.append((index, question, *self._truncate(question, encodings, counts)))
        columns = self._columns(fitted)
        counts["tokens"] += len(columns["input_ids"].values)
        counts["unknown_tokens"] += int((columns["input_ids"].values == self.unknown_id).sum())
        return Encoded(columns, np.array([index for index, *_ in fitted], np.int64), sorted(dropped), counts)

    def _read(self, row: dict[str, Any]) -> Question:
        try:
            question = read_question(row)
        except RowProblem:
            if not self.prompts_only:
                raise
            # Only training and scores need an answer that is one of the choices.
            question = read_question(row, with_answer=False)
        if question.answer is None and not self.prompts_only:
            raise RowProblem("the right choice is missing")
        return question

    def _truncate(self, question: Question, encodings: list[Encoding], counts: Counter) -> tuple[list[Encoding], int]:
        """Return the pairs within `max_length`, and the number of removed tokens."""
        excess = [max(len(encoding.ids) - self.max_length, 0) for encoding in encodings]
        if not any(excess):
            return encodings, 0
        counts["rows_cut"] += 1
        counts["tokens_cut"] += sum(excess)
        # A question with a choice that leaves no space is kept: dropping it would hide an unsolved question.
        is_choice_cut = any(removed >= max(encoding.sequence_ids.count(0), 1)
                            for removed, encoding in zip(excess, encodings, strict=True))
        counts["choices_cut"] += is_choice_cut
        return (self._both_truncated if is_choice_cut else self._truncated).encode_batch(_pairs(question)), sum(excess)

    def _columns(self, fitted: list[tuple[int, Question, list[Encoding], int]]) -> dict[str, Any]:
        encodings = [encoding for _, _, row, _ in fitted for encoding in row]
        sizes = [np.array([len(encoding.ids) for encoding in row], np.int32) for _, _, row, _ in fitted]
        tokens = np.array([row_sizes.sum() for row_sizes in sizes], np.int64)

        def concatenate(values: list[list[int]]) -> Ragged:
            flat = [np.array(ids, np.int32) for ids in values]
            return Ragged(np.concatenate(flat) if flat else np.empty(0, np.int32), tokens)

        return {
            "input_ids": concatenate([encoding.ids for encoding in encodings]),
            "token_type_ids": concatenate([encoding.type_ids for encoding in encodings]),
            "sizes": Ragged.from_lists(sizes),
            "longest": np.array([row_sizes.max() for row_sizes in sizes], np.int64),
            "choices": np.array([len(row_sizes) for row_sizes in sizes], np.int64),
            "answer": np.array([IGNORED if question.answer is None else question.answer for _, question, *_ in fitted],
                               np.int64),
            "truncated": np.array([removed for *_, removed in fitted], np.int64)}


def _pairs(question: Question) -> list[tuple[str, str]]:
    return [(question.first, second) for second in question.seconds]
