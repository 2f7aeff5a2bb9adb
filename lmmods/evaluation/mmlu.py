"""MMLU evaluation during training: multiple-choice questions scored by the most likely letter, for both engines."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lmmods.core.console import say, warn
from lmmods.core.errors import UserError
from lmmods.core.hf_config import TEXT_WRITERS
from lmmods.core.text_metrics import CHOICE_SCORES, choice_scores
from lmmods.data.base import DataModule
from lmmods.data.encode.encoder import TextEncoder
from lmmods.data.order.sampler import batches_of_rank, evaluation_order
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.recipe.block_fields import MMLUFields
from lmmods.recipe.source import as_sources

LETTERS = "ABCDEFGHIJ"
NO_SUBJECT = "all"
TAIL = 8  # characters at a prompt's end that decide how the letter after it is tokenised


class MMLUEvaluator(MMLUFields):
    """Evaluator of multiple-choice questions during training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choice_ids = np.zeros(0, np.int64)  # [K] token ids that stand for a letter after some prompt
        self.latest_step: int | None = None  # step of the last evaluation in this process

    @property
    def is_on(self) -> bool:
        """True if questions are configured."""
        return self.source is not None

    @property
    def at_validation(self) -> bool:
        """True if the evaluation runs at each validation."""
        return self.is_on and self.every_n_steps is None

    def is_due(self, step: int, ends: bool = False) -> bool:
        """Return True if an evaluation outside validation is due after `step` steps; `ends`: last step of the run."""
        by_steps = self.every_n_steps is not None and step % self.every_n_steps == 0
        return self.is_on and step != self.latest_step and (ends or by_steps)

    # Questions -------------------------------------------------------------------------------------------------------

    def prepare(self, datamodule: DataModule, model: Any) -> None:
        """Read and encode the questions.

        Raises:
            UserError: The task does not predict next tokens, a row is not a question, or a letter is not one token.
        """
        if not self.is_on:
            return
        if model.auto_class not in TEXT_WRITERS:
            raise UserError(f"mmlu.source: {type(model).__name__} does not predict next tokens, so it cannot answer "
                            "questions. Set mmlu.source to null.")
        # `as_sources` rejects `weight` in keys other than data.source: it applies to training rows only.
        readers = [SourceReader(source) for source in as_sources(self.source, "mmlu.source")]
        questions = [_parse_question(row) for reader in readers for row in reader]
        num_choices = 1 + max((answer for _, answer, _ in questions), default=0)
        if num_choices < 2:
            raise UserError(f"mmlu.source {', '.join(reader.source.path for reader in readers)}: "
                            f"{'every answer is A' if questions else 'there are no rows'}. Use questions with at least "
                            "two different answers.")
        if self.limit is not None and self.limit < len(questions):
            # Evenly spaced, since the rows may be sorted by subject.
            questions = [questions[index * len(questions) // self.limit] for index in range(self.limit)]
        prompts, answers, self._subjects = (list(column) for column in zip(*questions, strict=True))
        self._answers = np.array(answers)
        text = TextEncoder(datamodule.tokenizer)
        model_limit = model.max_positions()
        self.max_length = min(self.max_length, model_limit) if model_limit is not None else self.max_length
        self._encode(prompts, text)
        self._find_choices(prompts, datamodule.tokenizer, text, LETTERS[:num_choices])

    def _encode(self, prompts: list[str], text: TextEncoder) -> None:
        """Tokenise the prompts; long ones are truncated on the left, as the question is at the end."""
        prefix = [text.bos_id] if text.uses_bos else []
        bodies = text.encode_texts(prompts, [False] * len(prompts))
        budget = self.max_length - len(prefix)
        self.prompt_ids = [np.array(prefix + ids[-budget:], np.int64) for ids in bodies]
        num_truncated = sum(len(ids) > budget for ids in bodies)
        if num_truncated:
            warn(f"mmlu: {num_truncated} of {len(bodies)} prompts have more than {self.max_length} tokens; their "
                 "beginning is truncated.")

    def _find_choices(self, prompts: list[str], tokenizer: Any, text: TextEncoder, letters: str) -> None:
        """Find the letters' tokens after each prompt, as columns of `choice_ids`."""
        # Once per distinct tail, of which there are few: finding the tokens takes several tokenizer calls.
        by_tail: dict[str, list[int]] = {}
        for prompt in prompts:
            if prompt[-TAIL:] not in by_tail:
                by_tail[prompt[-TAIL:]] = find_choice_tokens(tokenizer, text, prompt, letters)
        # [K], the union over all tails, so that every prompt needs the same logits.
        self.choice_ids = np.unique(list(by_tail.values()))
        columns = {tail: np.searchsorted(self.choice_ids, tokens) for tail, tokens in by_tail.items()}
        self._columns = np.stack([columns[prompt[-TAIL:]] for prompt in prompts])  # [N, number of letters]

    def batches(self, datamodule: DataModule, rank: int, world_size: int) -> Iterator[dict[str, Any]]:
        """Yield this process's batches: `input_ids` padded on the right, `attention_mask`, `index` (-1: padding).

        All processes get the same number. A torch DataLoader would consume the random state of training.
        """
        from lmmods.data.batch.collate import Collator  # imports torch, not needed by the command line

        order = evaluation_order(np.array([len(ids) for ids in self.prompt_ids]), datamodule.eval_batch_size)
        collator = Collator(("input_ids", "index"), datamodule.tokenizer.pad_token_id, datamodule.pad_to_multiple_of,
                            self.max_length)
        for indices in batches_of_rank(order, 0, rank, world_size):
            yield collator([None if index < 0 else {"input_ids": self.prompt_ids[index], "index": index}
                            for index in indices])

    # Answers ---------------------------------------------------------------------------------------------------------

    def score(self, step: int, logits: dict[int, np.ndarray]) -> dict[str, float]:
        """Return and print the metrics after `step` optimiser steps, by full name.

        Args:
            logits: For each prompt's index, [K] logits of `choice_ids` after it.
        """
        self.latest_step = step
        rows = np.stack([logits[index] for index in range(len(self.prompt_ids))]).astype(np.float64)  # [N, K]
        scores = choice_scores(np.take_along_axis(rows, self._columns, axis=1), self._answers, self._subjects)
        summary = "  ".join(f"{name} {scores[name]:.4g}" for name in CHOICE_SCORES)
        say(f"mmlu/{self.name}, {len(rows)} questions: {summary}")
        return {f"mmlu/{self.name}/{name}": value for name, value in scores.items() if name != NO_SUBJECT}


def _parse_question(row: Row) -> tuple[str, int, str]:
    """Return (prompt, index of the correct letter, subject). Trailing spaces are dropped: they belong to the answer."""
    where = f"mmlu.source {row.file}:{row.line}"
    if row.problem is not None:
        raise UserError(f"{where} is not valid: {row.problem}. Remove it.")
    prompt, output, subject = (row.values.get(name) for name in ("input", "output", "subject"))
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f"{where}: input is {'missing' if prompt is None else repr(prompt)}, but must be the prompt, "
                        f"including the words before the letter. The columns are {', '.join(row.values)}.")
    letter = output.strip() if isinstance(output, str) else ""
    if len(letter) != 1 or letter not in LETTERS:
        raise UserError(f"{where}: output is {'missing' if output is None else repr(output)}, but must be the letter "
                        f"of the correct answer, from {LETTERS[0]} to {LETTERS[-1]}.")
    if subject is not None and not isinstance(subject, str) or subject in CHOICE_SCORES:
        raise UserError(f"{where}: subject is {subject!r}, but must be a string other than {', '.join(CHOICE_SCORES)}, "
                        "which are names of other metrics.")
    return prompt.rstrip(" "), LETTERS.index(letter), subject or NO_SUBJECT


def find_choice_tokens(tokenizer: Any, text: TextEncoder, prompt: str, letters: str) -> list[int]:
    """Return the letters' tokens directly after a prompt: " A" as one token, or "A" (tried first after a newline).

    Appending the letter may change the prompt's tokens after its last visible character, as with line breaks in many
    tokenizers; it must not change the prompt's text.

    Raises:
        UserError: Neither form is a single token for each letter.
    """
    for space in ("", " ") if prompt[-1:].isspace() else (" ", ""):
        # Encode prompt and letter together, like a text in training, instead of the letter alone.
        prompt_ids, *full_ids = text.encode_texts([prompt, *(prompt + space + letter for letter in letters)],
                                                  [False] * (1 + len(letters)))
        prompt_text, *prefix_texts = (tokenizer.decode(ids, clean_up_tokenization_spaces=False)
                                      for ids in (prompt_ids, *(ids[:-1] for ids in full_ids)))
        tokens = [ids[-1] for ids in full_ids]
        # The last token is the letter alone if the tokens before it decode to the prompt.
        if all(prefix_text == prompt_text for prefix_text in prefix_texts) and len(set(tokens)) == len(letters):
            return tokens
    raise UserError(f"mmlu.source: after {prompt[-40:]!r} this tokenizer does not encode each of the letters "
                    f"{', '.join(letters)} as one token, so they cannot be compared. End the prompts differently, or "
                    "set mmlu.source to null.")
