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
        self._whole, self._cut, self._cut_both = (Tokenizer.from_str(self.backend) for _ in range(3))
        for tokenizer in (self._whole, self._cut, self._cut_both):
            # Settings saved in tokenizer.json do not apply.
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokenizer.encode_special_tokens = True  # names of special tokens in a text stay text
        self._cut.enable_truncation(self.max_length, strategy="only_first")
        self._cut_both.enable_truncation(self.max_length, strategy="longest_first")

    def __reduce__(self):  # noqa: ANN204 - pickling would drop encode_special_tokens
        return ChoiceEncoder, astuple(self)

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """Columns with one entry per question.

        `input_ids` and `token_type_ids` concatenate the pairs; `sizes`, tokens of each; `longest`, of the longest;
        `choices`, their number; `answer`, the number of the right one (-100 if unknown, in predict only); `truncated`.
        """
        kept: list[tuple[int, Question, list[Encoding], int]] = []
        questions: list[tuple[int, Question]] = []
        dropped = []
        counts: Counter = Counter()
        for index, row in enumerate(rows):
            try:
                questions.append((index, self._read(row)))
            except RowProblem as problem:
                dropped.append((index, str(problem)))
        # The pairs of all questions are encoded in one call, in parallel.
        pairs = iter(self._whole.encode_batch([pair for _, question in questions for pair in _pairs(question)]))
        for index, question in questions:
            encodings = [next(pairs) for _ in question.choices]
            kept.append((index, question, *self._fit(question, encodings, counts)))
        columns = self._columns(kept)
        counts["tokens"] += len(columns["input_ids"].values)
        counts["unknown_tokens"] += int((columns["input_ids"].values == self.unknown_id).sum())
        return Encoded(columns, np.array([index for index, *_ in kept], np.int64), sorted(dropped), counts)

    def _read(self, row: dict[str, Any]) -> Question:
        try:
            question = read_question(row)
        except RowProblem:
            if not self.prompts_only:
                raise
            # An answer that is none of the choices matters to training and scores alone.
            question = read_question(row, with_answer=False)
        if question.answer is None and not self.prompts_only:
            raise RowProblem("the right choice is missing")
        return question

    def _fit(self, question: Question, encodings: list[Encoding], counts: Counter) -> tuple[list[Encoding], int]:
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
        return (self._cut_both if is_choice_cut else self._cut).encode_batch(_pairs(question)), sum(excess)

    def _columns(self, kept: list[tuple[int, Question, list[Encoding], int]]) -> dict[str, Any]:
        encodings = [encoding for _, _, row, _ in kept for encoding in row]
        sizes = [np.array([len(encoding.ids) for encoding in row], np.int32) for _, _, row, _ in kept]
        tokens = np.array([each.sum() for each in sizes], np.int64)

        def joined(values: list[list[int]]) -> Ragged:
            flat = [np.array(each, np.int32) for each in values]
            return Ragged(np.concatenate(flat) if flat else np.empty(0, np.int32), tokens)

        return {
            "input_ids": joined([encoding.ids for encoding in encodings]),
            "token_type_ids": joined([encoding.type_ids for encoding in encodings]),
            "sizes": Ragged.from_lists(sizes),
            "longest": np.array([each.max() for each in sizes], np.int64),
            "choices": np.array([len(each) for each in sizes], np.int64),
            "answer": np.array([IGNORED if question.answer is None else question.answer for _, question, *_ in kept],
                               np.int64),
            "truncated": np.array([removed for *_, removed in kept], np.int64)}


def _pairs(question: Question) -> list[tuple[str, str]]:
    return [(question.first, second) for second in question.seconds]
