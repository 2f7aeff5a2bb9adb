"""Supervised fine-tuning: conversations with a loss on the responses."""

from collections.abc import Iterable, Iterator
from typing import Any

from lmmods.core.errors import UserError
from lmmods.data.base import DataModule
from lmmods.data.checks import check_range
from lmmods.data.encode.conversations import Limits, Overflow, SFTEncoder
from lmmods.data.encode.encoded import Encoder
from lmmods.data.encode.encoding import TextEncoder
from lmmods.data.encode.templates import ChatTemplateRenderer, TemplateRenderer
from lmmods.data.sources.formats import RowProblem, detect_format, find_format
from lmmods.data.sources.readers import Row
from lmmods.data.sources.sources import Source


class SFTData(DataModule):
    """Conversations for supervised fine-tuning; one row of a batch is one conversation.

    Args:
        source: Where the training rows come from: file, folder, glob, URL, hub id, a set of qlora's by name, a mapping
            {path, name, split, revision, columns, limit, weight, format}, or a list of these.
        template: How conversations are written: alpaca, chatml, llama2, llama3, mistral, gemma, vicuna, zephyr, plain,
            qlora-alpaca or qlora-plain. null takes the tokenizer's chat template if it has one, else alpaca.
        dataset_format: Layout of the rows (alpaca, messages, prompt-completion, ...); null detects it from the columns.
        roles: Names of roles in the file -> system, user, assistant or tool, beside the usual names.
        train_on_prompt: Score every token, not only responses.
        train_on_last: Score only the last response of a conversation.
        source_max_length: Longest prompt (all before the last response) in tokens.
        target_max_length: Longest last response in tokens.
        on_overflow: What happens to a row over a limit. `error` stops; `skip` drops it; `truncate_prompt` cuts the
            oldest part of the prompt and drops rows whose response alone is too long; `truncate` cuts the end of the
            response, which then has no end token, and the oldest part of a prompt over `source_max_length`;
            `truncate_ends` cuts the ends of both. All of it is counted in the report.
        **common: Fields of every data module.
    """

    _adds_padding = False  # a row more in the output head changes every probability

    def __init__(
        self,
        source: str | Source | list[str | Source],
        *,
        template: str | None = None,
        dataset_format: str | None = None,
        roles: dict[str, str] | None = None,
        train_on_prompt: bool = False,
        train_on_last: bool = False,
        source_max_length: int | None = None,
        target_max_length: int | None = None,
        on_overflow: Overflow = "truncate_prompt",
        **common: Any,
    ) -> None:
        super().__init__(source, **common)
        check_range(source_max_length=(source_max_length, 1), target_max_length=(target_max_length, 1))
        if dataset_format is not None:
            find_format(dataset_format)
        self.template = template
        self.dataset_format = dataset_format
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

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Token ids of user turns in the template of the training rows, up to where the response begins.

        Raises:
            UserError: The template cannot render one.
        """
        encoder = self._sft_encoder(self._rows("train").info(0)["format"], prompts_only=True)
        try:
            rendered = [encoder.renderer.render([{"role": "user", "content": text}], open_response=True)
                        for text in texts]
        except RowProblem as problem:
            raise UserError(f"samples.prompts: {problem}") from problem
        return [ids.tolist() for ids, _ in encoder.text.encode_rows([encoder.text.runs(row) for row in rendered])]

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
        names = (
            "template",
            "dataset_format",
            "roles",
            "train_on_prompt",
            "train_on_last",
            "source_max_length",
            "target_max_length",
            "on_overflow",
            "max_length",
        )
        return {name: getattr(self, name) for name in names}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        detected = (
            detect_format(first.values, f"{first.file}:{first.line}", prompts_only)
            if not (source.format or self.dataset_format)
            else ""
        )
        layout = source.format or self.dataset_format or detected
        encoder = self._sft_encoder(layout, prompts_only)
        template = find_format(layout).template or self._template_name()
        return encoder, {"format": layout, "template": template, "notes": encoder.renderer.notes}

    def _regrouped(self, rows: Iterable[Row], info: dict[str, Any]) -> Iterator[Row]:
        return find_format(info["format"]).regroup(rows)

    def _sft_encoder(self, layout: str, prompts_only: bool) -> SFTEncoder:
        tokenizer = self.tokenizer
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-text token, so no response could end; name one with data.eos_token"
            )
        text = TextEncoder(tokenizer)
        name = find_format(layout).template or self._template_name()
        renderer = (
            ChatTemplateRenderer(tokenizer, text, tokenizer.eos_token)
            if name == "tokenizer"
            else TemplateRenderer(name, text, tokenizer.eos_token, tokenizer.bos_token)
        )
        limits = Limits(self.max_length, self.source_max_length, self.target_max_length, self.on_overflow)
        return SFTEncoder(
            layout, renderer, text, limits, self.train_on_prompt, self.train_on_last, self.roles, prompts_only
        )

    def _template_name(self) -> str:
        return self.template or ("tokenizer" if self.tokenizer.chat_template else "alpaca")

    def _batch_keys(self) -> tuple[str, ...]:
        return ("input_ids", "labels")

    def _prompt(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"][: row["prompt_length"]], "index": row["index"]}
