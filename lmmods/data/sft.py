"""Supervised fine-tuning: conversations with a loss on the responses."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lmmods.data.base import DataModule
from lmmods.data.collate import NOT_SCORED
from lmmods.data.encoding import Run, TextEncoder
from lmmods.data.formats import Message, Roles, RowProblem, detect_format, find_format
from lmmods.data.readers import Row
from lmmods.data.sources import Source
from lmmods.data.store import Encoded, Encoder, Ragged, RowError
from lmmods.data.templates import ChatTemplateRenderer, Renderer, TemplateRenderer
from lmmods.errors import UserError

Overflow = Literal["error", "skip", "truncate_prompt", "truncate"]


@dataclass
class Limits:
    """Length policy of a row, in tokens; None is no limit of that kind."""

    max_length: int
    source_max_length: int | None
    target_max_length: int | None
    on_overflow: Overflow


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
        kept, ids, labels, prompts, cuts = [], [], [], [], []
        for place, (row_ids, response) in zip(places, self.text.encode_rows(runs)):
            try:
                row_ids, row_labels, prompt, cut = self._fit(row_ids, response, place, counts)
            except RowProblem as problem:
                dropped.append((place, str(problem)))
                continue
            kept.append(place)
            ids.append(row_ids)
            labels.append(row_labels)
            prompts.append(prompt)
            cuts.append(cut)
        columns = {"input_ids": Ragged.of(ids), "labels": Ragged.of(labels),
                   "prompt_length": np.array(prompts, np.int64), "cut": np.array(cuts, np.int64)}
        self._count(columns, counts)
        return Encoded(columns, np.array(kept, np.int64), dropped, counts)

    def _runs(self, row: dict[str, Any], counts: Counter) -> list[Run]:
        messages = find_format(self.dataset_format).convert(row, self.roles)
        _check_unicode(messages)
        answered = next((n for n in range(len(messages), 0, -1) if messages[n - 1]["role"] == "assistant"), 0)
        if self.prompts_only:
            messages = messages[:-1] if answered == len(messages) else messages
            segments = self.renderer.render(messages, open_response=True)
        else:
            if not answered:
                raise RowProblem("no response")
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
        left, right = self._cuts(prompt, len(ids) - prompt, place)
        if left or right:
            counts["rows_cut"] += 1
            counts["tokens_cut"] += left + right
        has_bos = int(len(ids) > 0 and ids[0] == self.text.bos_id)
        keep = np.r_[:has_bos, has_bos + left : len(ids) - right] if left else slice(len(ids) - right)
        if left and response[has_bos + left] == response[has_bos + left - 1]:
            response = np.where(response == response[has_bos + left], -1, response)  # its beginning is gone
        ids, response = ids[keep], response[keep]
        scored = response == last if self.train_on_last else response >= 0
        labels = ids if self.train_on_prompt and not self.prompts_only else np.where(scored, ids, NOT_SCORED)
        if not self.prompts_only and not (labels[1:] != NOT_SCORED).any():
            raise RowProblem("nothing left to learn after cutting")
        counts["responses_complete"] += int(not right and not self.prompts_only)
        return ids, labels, prompt - left, left + right

    def _cuts(self, prompt: int, answer: int, place: int) -> tuple[int, int]:
        """Tokens to cut from the left of a prompt and from the right of its answer."""
        limits = self.limits
        source = max(0, prompt - (limits.source_max_length or prompt))
        target = max(0, answer - (limits.target_max_length or answer))
        total = max(0, prompt - source + answer - target - limits.max_length + int(self.prompts_only))
        if not source + target + total:
            return 0, 0
        if limits.on_overflow == "error":
            raise RowError(place, f"{prompt} prompt and {answer} response tokens are more than max_length "
                           f"{limits.max_length} / source_max_length {limits.source_max_length} / target_max_length "
                           f"{limits.target_max_length}; raise the limit or set data.on_overflow")
        if limits.on_overflow == "skip":
            raise RowProblem("longer than the limits")
        if limits.on_overflow == "truncate" and not self.prompts_only:
            return source, target + total
        if target or source + total >= prompt - 1:
            raise RowProblem("response longer than the limits")
        return source + total, 0

    def _count(self, columns: dict[str, Any], counts: Counter) -> None:
        labels = columns["labels"].values
        counts["tokens"] += len(labels)
        counts["labelled_tokens"] += int((labels != NOT_SCORED).sum())
        counts["terminators_labelled"] += int(np.isin(labels, self.stop_token_ids).sum())

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a response: the template's terminator and the tokenizer's end token."""
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        last = self.text.runs(self.renderer.render(probe))
        ends = [run.content for run in last if run.response >= 0 and isinstance(run.content, int)]
        return sorted({*ends[-1:], *([self.text.eos_id] if self.text.eos_id is not None else [])})


def _check_unicode(messages: list[Message]) -> None:
    for message in messages:
        try:
            for text in message.values():
                text.encode()
        except UnicodeEncodeError as error:
            raise RowProblem("text with a lone surrogate (half of a character)") from error


class SFTData(DataModule):
    """Conversations for supervised fine-tuning; one row of a batch is one conversation.

    Args:
        source: Where the training rows come from: file, folder, glob, URL, hub id, a set of qlora's by name, a mapping
            {path, name, split, revision, columns, limit, weight, format}, or a list of these.
        template: How conversations are written: alpaca, chatml, llama2, llama3, mistral, gemma, vicuna, zephyr or plain.
            null takes the tokenizer's chat template if it has one, else alpaca.
        dataset_format: Layout of the rows (alpaca, messages, prompt-completion, ...); null detects it from the columns.
        columns: Names in the file -> names that the format expects, for all sources that do not map their own.
        roles: Names of roles in the file -> system, user, assistant or tool, beside the usual names.
        train_on_prompt: Score every token, not only responses.
        train_on_last: Score only the last response of a conversation.
        source_max_length: Longest prompt (all before the last response) in tokens.
        target_max_length: Longest last response in tokens.
        on_overflow: What happens to a row over a limit. `error` stops; `skip` drops it; `truncate_prompt` cuts the oldest
            part of the prompt and drops rows whose response alone is too long; `truncate` cuts the end of the response,
            which then has no end token. All of it is counted in the report.
        **common: Fields of every data module.
    """

    def __init__(
        self,
        source: str | Source | list[str | Source],
        *,
        template: str | None = None,
        dataset_format: str | None = None,
        columns: dict[str, str] | None = None,
        roles: dict[str, str] | None = None,
        train_on_prompt: bool = False,
        train_on_last: bool = False,
        source_max_length: int | None = None,
        target_max_length: int | None = None,
        on_overflow: Overflow = "truncate_prompt",
        **common: Any,
    ) -> None:
        super().__init__(source, **common)
        for key, value in (("source_max_length", source_max_length), ("target_max_length", target_max_length)):
            if value is not None and value < 1:
                raise UserError(f"data.{key} is {value}, but must be 1 or more")
        if dataset_format is not None:
            find_format(dataset_format)
        self.template = template
        self.dataset_format = dataset_format
        self.columns = columns
        self.roles = roles or {}
        self.train_on_prompt = train_on_prompt
        self.train_on_last = train_on_last
        self.source_max_length = source_max_length
        self.target_max_length = target_max_length
        self.on_overflow = on_overflow

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens on which generation must stop: the tokenizer's end token and the template's terminator."""
        return self._sft_encoder("messages", prompts_only=False).stop_token_ids

    def reference(self, index: int) -> str | None:
        """The response that the data give for a row of predict, or None."""
        row = self.example(index)
        layout = self._rows("predict").info(index)["format"]
        try:
            messages = find_format(layout).convert(row, self.roles)
        except RowProblem:
            return None
        return messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else None

    def score(self, predictions: dict[int, str]) -> dict[str, float]:
        """Share of predictions equal to their reference, spaces around them apart; empty without references."""
        pairs = [(text, self.reference(index)) for index, text in predictions.items()]
        hits = [text.strip() == wanted.strip() for text, wanted in pairs if wanted is not None]
        return {"exact_match": sum(hits) / len(hits)} if hits else {}

    def _encoding_settings(self) -> dict[str, Any]:
        names = ("template", "dataset_format", "roles", "train_on_prompt", "train_on_last", "source_max_length",
                 "target_max_length", "on_overflow", "max_length")
        return {name: getattr(self, name) for name in names}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        detected = detect_format(first.values, f"{first.file}:{first.line}", prompts_only) \
            if not (source.format or self.dataset_format) else ""
        layout = source.format or self.dataset_format or detected
        encoder = self._sft_encoder(layout, prompts_only)
        template = find_format(layout).template or self._template_name()
        return encoder, {"format": layout, "template": template, "notes": encoder.renderer.notes}

    def _regrouped(self, rows: Iterable[Row], info: dict[str, Any]) -> Iterator[Row]:
        return find_format(info["format"]).regroup(rows)

    def _sft_encoder(self, layout: str, prompts_only: bool) -> SFTEncoder:
        tokenizer = self.tokenizer
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-text token, so no response could end; name one with "
                            "data.eos_token")
        text = TextEncoder(tokenizer)
        name = find_format(layout).template or self._template_name()
        renderer = (ChatTemplateRenderer(tokenizer, text, tokenizer.eos_token) if name == "tokenizer"
                    else TemplateRenderer(name, text, tokenizer.eos_token, tokenizer.bos_token))
        limits = Limits(self.max_length, self.source_max_length, self.target_max_length, self.on_overflow)
        return SFTEncoder(layout, renderer, text, limits, self.train_on_prompt, self.train_on_last,
                          self.roles, prompts_only)

    def _template_name(self) -> str:
        return self.template or ("tokenizer" if self.tokenizer.chat_template else "alpaca")

    def _batch_keys(self) -> tuple[str, ...]:
        return ("input_ids", "labels")

    def _prompt(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"][: row["prompt_length"]], "index": row["index"]}
