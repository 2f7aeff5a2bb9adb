"""Rows of conversations to ids and labels. Free of torch, so that worker processes start fast."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lmmods.core.labels import IGNORED
from lmmods.data.encode.encoder import Encoded, Ragged, RowError
from lmmods.data.encode.templates import Renderer
from lmmods.data.encode.text_encoder import Run, TextEncoder
from lmmods.data.sources.conversation import RowProblem
from lmmods.data.sources.formats import Roles, check_unicode, find_format, read_conversation


@dataclass
class Limits:
    """Length policy of a row, in tokens; None is no limit of that kind. `on_overflow` is as SFTDataFields has it."""

    max_length: int
    source_max_length: int | None
    target_max_length: int | None
    on_overflow: str


class Truncation(NamedTuple):
    """Tokens to remove: from the beginning of a prompt, from its end, and from the end of its answer."""

    left: int = 0
    right: int = 0
    answer: int = 0


@dataclass
class SFTEncoder:
    """Rows of one format to ids, labels, and the length of the prompt of the last response.

    Args:
        dataset_format: Name of the rows' format.
        renderer: Messages to segments.
        text: Segments to ids.
        limits: Length policy.
        train_on_prompt: Score every token.
        train_on_last: Score the last response only.
        roles: Further names of roles.
        prompts_only: Rows may lack a response, and end where it is to begin.
    """

    dataset_format: str
    renderer: Renderer
    text: TextEncoder
    limits: Limits
    train_on_prompt: bool = False
    train_on_last: bool = False
    roles: Roles = field(default_factory=dict)
    prompts_only: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """Columns `input_ids`, `labels`, `prompt_length`. Raises RowError under on_overflow: error."""
        places, runs, dropped = [], [], []
        counts: Counter = Counter()
        for place, row in enumerate(rows):
            try:
                runs.append(self._runs(row, counts))
                places.append(place)
            except RowProblem as problem:
                dropped.append((place, str(problem)))
        kept, ids, labels, prompts, truncated = [], [], [], [], []
        encoded = self.text.encode_rows(runs, self.renderer.apart)
        for place, (row_ids, response) in zip(places, encoded, strict=True):
            try:
                row_ids, row_labels, prompt, num_truncated = self._fit(row_ids, response, place, counts)
            except RowProblem as problem:
                dropped.append((place, str(problem)))
                continue
            kept.append(place)
            ids.append(row_ids)
            labels.append(row_labels)
            prompts.append(prompt)
            truncated.append(num_truncated)
        columns = {"input_ids": Ragged.of(ids), "labels": Ragged.of(labels),
                   "prompt_length": np.array(prompts, np.int64), "truncated": np.array(truncated, np.int64)}
        self._count(columns, counts)
        return Encoded(columns, np.array(kept, np.int64), dropped, counts)

    def _runs(self, row: dict[str, Any], counts: Counter) -> list[Run]:
        messages = read_conversation(self.dataset_format, row, self.roles).messages
        for message in messages:
            for text in message.values():
                check_unicode(text)
        answered = next((n for n in range(len(messages), 0, -1) if messages[n - 1]["role"] == "assistant"), 0)
        if self.prompts_only:
            messages = messages[:-1] if answered == len(messages) else messages
            segments = self.renderer.render(messages, open_response=True)
        else:
            if not answered:
                raise RowProblem("no response")
            if messages[0]["role"] == "assistant" and find_format(self.dataset_format).template is None:
                raise RowProblem("the conversation begins with the assistant")
            if any(m["role"] == "assistant" and not m["content"].strip() for m in messages[:answered]):
                raise RowProblem("empty response")
            counts["turns_without_response"] += len(messages) - answered
            segments = self.renderer.render(messages[:answered])
        return self.text.runs(segments)

    def _fit(self, ids: np.ndarray, response: np.ndarray, place: int, counts: Counter
             ) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Apply the length policy and make the labels of one row. Raises RowProblem when the row is dropped."""
        last = response.max(initial=-1)
        prompt = len(ids) if self.prompts_only else int(np.argmax(response == last))
        removed = self._truncation(prompt, len(ids) - prompt, place)
        if any(removed):
            counts["rows_cut"] += 1
            counts["tokens_cut"] += sum(removed)
            ids, response = self._shortened(ids, response, prompt, removed)
        scored = response == last if self.train_on_last else response >= 0
        labels = ids if self.train_on_prompt and not self.prompts_only else np.where(scored, ids, IGNORED)
        if not self.prompts_only and not (labels[1:] != IGNORED).any():
            raise RowProblem("nothing left to learn after cutting")
        counts["responses_complete"] += int(not removed.answer and not self.prompts_only)
        return ids, labels, prompt - removed.left - removed.right, sum(removed)

    def _shortened(self, ids: np.ndarray, response: np.ndarray, prompt: int, removed: "Truncation"
                   ) -> tuple[np.ndarray, np.ndarray]:
        """Without what is truncated; the begin token stays."""
        first, left = int(ids[0] == self.text.bos_id), removed.left
        if left and response[first + left] == response[first + left - 1]:
            response = np.where(response == response[first + left], -1, response)  # its beginning is gone
        keep = np.r_[:first, first + left : prompt - removed.right, prompt : len(ids) - removed.answer]
        return ids[keep], response[keep]

    def _truncation(self, prompt: int, answer: int, place: int) -> "Truncation":
        """Tokens to remove from a prompt and its answer. Raises RowProblem when the row is dropped."""
        limits = self.limits
        source = max(0, prompt - (limits.source_max_length or prompt))
        target = max(0, answer - (limits.target_max_length or answer))
        total = max(0, prompt - source + answer - target - limits.max_length + int(self.prompts_only))
        if not source + target + total:
            return Truncation()
        if limits.on_overflow == "error":
            raise RowError(place, f"{prompt} prompt and {answer} response tokens are more than max_length "
                                  f"{limits.max_length} / source_max_length {limits.source_max_length} / "
                                  f"target_max_length {limits.target_max_length}; raise the limit or set "
                                  "data.on_overflow")
        if limits.on_overflow == "skip":
            raise RowProblem("longer than the limits")
        if limits.on_overflow == "truncate_ends":
            return Truncation(right=source + (total if self.prompts_only else 0),
                              answer=0 if self.prompts_only else target + total)
        if limits.on_overflow == "truncate" and not self.prompts_only:
            return Truncation(left=source, answer=target + total)
        if target or source + total >= prompt - 1:
            raise RowProblem("response longer than the limits")
        return Truncation(left=source + total)

    def _count(self, columns: dict[str, Any], counts: Counter) -> None:
        labels = columns["labels"].values
        counts["tokens"] += len(labels)
        counts["labelled_tokens"] += int((labels != IGNORED).sum())
        counts["unknown_tokens"] += int((columns["input_ids"].values == self.text.unk_id).sum())
        counts["terminators_labelled"] += int(np.isin(labels, self.stop_token_ids).sum())

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a response: the template's terminator and the tokenizer's end token."""
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        last = self.text.runs(self.renderer.render(probe))
        ends = [run.content for run in last if run.response >= 0 and isinstance(run.content, int)]
        return sorted({*ends[-1:], *([self.text.eos_id] if self.text.eos_id is not None else [])})
