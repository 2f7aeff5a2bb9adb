"""Supervised fine-tuning: conversations with a loss on the responses."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.data.base import DataModule
from lmmods.data.batches.loader import StatefulLoader
from lmmods.data.batches.stream import StreamLoader
from lmmods.data.encode.chat_renderer import ChatTemplateRenderer, as_given, is_template_file, read_template_file
from lmmods.data.encode.chat_template import REFUSALS, bounded_rendering
from lmmods.data.encode.conversations import Choices, Limits, SFTEncoder
from lmmods.data.encode.encoder import Encoder, TextEncoder
from lmmods.data.encode.templates import TEMPLATES, TemplateRenderer, template_jinja
from lmmods.data.encode.words import texts_in
from lmmods.data.sources.conversation import Conversation, Message, RowProblem
from lmmods.data.sources.formats import detect_format, find_format, read_conversation
from lmmods.data.sources.readers import Row
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.base import ConversationFields
from lmmods.recipe.tasks.sft import SFTDataFields

NO_ROOM = "no_room"  # a warning that has been given

# ---------------------------------------------------------------------------------------------------------------------
# Conversations, shared by fine-tuning and preference optimisation.


class ConversationData(ConversationFields, DataModule):
    """Conversations in a template. Abstract: a task decides what is learned."""

    _adds_padding = False  # another row in the output head would change every probability

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_format is not None:
            find_format(self.dataset_format)
        self.roles = self.roles or {}
        self.turn_fields = self.turn_fields or {}
        # Part of the tokenizer's options: added tokens that occur in the template become special.
        named = TEMPLATES.get(self.template or "alpaca", "")
        self._tokenizer = replace(self._tokenizer, template=str(named))
        if is_template_file(self.template):
            self._tokenizer = replace(self._tokenizer, chat_template=read_template_file(self.template))

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens on which generation must stop: the tokenizer's end token and the template's terminator."""
        return self._sft_encoder("messages", prompts_only=False).stop_token_ids

    @property
    def chat_template(self) -> str | None:
        """Jinja template of the training rows, the tokenizer's own or a named one; None if all rows are plain texts."""
        layouts = [store.info["format"] for store in self._rows("train").stores]
        if all(find_format(layout).template for layout in layouts):
            return None
        renderer = self._sft_encoder("messages", prompts_only=False).renderer
        named = isinstance(renderer, TemplateRenderer)
        return template_jinja(renderer) if named else self.tokenizer.get_chat_template()

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Token ids of user turns in the template of the training rows, up to the response.

        Raises:
            UserError: The template cannot render one.
        """
        encoder = self.prompt_encoder(self._rows("train").info(0)["format"])
        try:
            return encoder.prompts([[{"role": "user", "content": text}] for text in texts])
        except RowProblem as problem:
            raise UserError(f"samples.prompts: {problem}") from problem

    def prompt_encoder(self, layout: str) -> SFTEncoder:
        """Encoder of conversations in the form of a layout's training rows, up to the response."""
        return self._sft_encoder(layout, prompts_only=True)

    def inference_prompts(self, index: int) -> list[list[int]]:
        """Token ids of the prompts of a training row's answers, as transformers renders them; [] if it refuses.

        Args:
            index: Number of the row among those read.
        """
        rows = self._rows("train")
        layout = rows.info(index)["format"]
        if find_format(layout).template:
            return []
        conversation = self._sft_encoder(layout, prompts_only=False).conversation(rows.source_row(index))
        given = {**(self.chat_template_kwargs or {}), **conversation.template_kwargs,
                 "tools": conversation.tools or None, "documents": conversation.documents or None}
        messages = [as_given(message) for message in conversation.messages]
        template = self.chat_template
        found = []
        for place, message in enumerate(messages):
            # Templates may refuse a conversation up to some turn; its prompt is then left out.
            if place and message["role"] == "assistant":
                with suppress(*REFUSALS), bounded_rendering():
                    found.append(list(self.tokenizer.apply_chat_template(
                        messages[:place], chat_template=template, add_generation_prompt=True, tokenize=True,
                        return_dict=False, **given)))
        return found

    def reference(self, index: int) -> str | None:
        """The response in the data for a row of predict, or None."""
        row = self.example(index)
        layout = self._rows("predict").info(index)["format"]
        if find_format(layout).template is not None:
            return None
        try:
            messages = read_conversation(layout, row, self.roles, self.turn_fields).messages
        except RowProblem:
            return None
        return messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else None

    def answered(self, index: int, prompt: str, text: str) -> str | Conversation:
        """The conversation of a row of predict with this answer; the text itself where rows are plain texts."""
        layout = self._rows("predict").info(index)["format"]
        if find_format(layout).template is not None:
            return super().answered(index, prompt, text)
        asked = self.prompt_encoder(layout).conversation(self._asked(self.example(index)))
        messages = asked.messages
        messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        return replace(asked, messages=[*messages, {"role": "assistant", "content": text.strip()}])

    def _asked(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row of a conversation to be answered."""
        return row

    def score(self, predictions: dict[int, str]) -> dict[str, float]:
        """Share of predictions equal to their reference, ignoring spaces around them; empty without references."""
        pairs = [(text, self.reference(index)) for index, text in predictions.items()]
        hits = [text.strip() == wanted.strip() for text, wanted in pairs if wanted is not None]
        if 0 < len(hits) < len(pairs):
            self._warn_once(f"predict/exact_match is over {len(hits)} of {len(pairs)} answers; the other rows have no "
                            "response to compare with.")
        return {"exact_match": sum(hits) / len(hits)} if hits else {}

    @abstractmethod
    def _choices(self) -> Choices:
        """Settings of what is rendered and learned of a conversation."""

    def _encoding_settings(self) -> dict[str, Any]:
        names = ("template", "dataset_format", "roles", "turn_fields", "reasoning", "system_prompt",
                 "replace_system_prompt", "chat_template_kwargs", "source_max_length", "target_max_length",
                 "on_overflow", "max_length")
        return {name: getattr(self, name) for name in names}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        layout = source.format or self.dataset_format or detect_format(
            first.values, f"{first.file}:{first.line}", prompts_only)
        return self._conversations(layout, prompts_only)

    def _conversations(self, layout: str, prompts_only: bool) -> tuple[SFTEncoder, dict[str, Any]]:
        """Encoder of conversations of a layout, and facts about it for the report."""
        encoder = self._sft_encoder(layout, prompts_only)
        template = find_format(layout).template or self._template_name()
        return encoder, {"format": layout, "template": template, "notes": encoder.renderer.notes}

    def _regrouped(self, rows: Iterable[Row], info: dict[str, Any]) -> Iterator[Row]:
        return find_format(info["format"]).regroup(rows)

    def _texts(self, row: dict[str, Any], info: dict[str, Any]) -> list[str]:
        return self._spoken(read_conversation(info["format"], row, self.roles, self.turn_fields).messages)

    def _context(self, row: dict[str, Any], info: dict[str, Any]) -> str:
        """System turns, tools and the like, which decide on the answer."""
        return self._surroundings(read_conversation(info["format"], row, self.roles, self.turn_fields))

    def _surroundings(self, conversation: Conversation) -> str:
        is_replaced = self.replace_system_prompt and self.system_prompt is not None
        system = [message["content"] for message in conversation.messages
                  if message["role"] == "system" and not is_replaced]
        parts = [system, conversation.tools, conversation.documents, conversation.template_kwargs]
        return json.dumps(parts, sort_keys=True, default=str) if any(parts) else ""

    def _spoken(self, messages: list[Message]) -> list[str]:
        """Texts of turns, without those of the system, which many rows share."""
        parts = ("input", "content", *(["reasoning_content"] if self.reasoning == "keep" else []))
        texts = [text for message in messages if message["role"] != "system" for text in (
            *(message.get(part) for part in parts), *texts_in(message.get("tool_calls")))]
        return [text for text in texts if text]

    def _sft_encoder(self, layout: str, prompts_only: bool) -> SFTEncoder:
        tokenizer = self.tokenizer
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-text token, so no response could end; name one with "
                            "data.eos_token")
        text = TextEncoder(tokenizer)
        name = find_format(layout).template or self._template_name()
        renderer = (ChatTemplateRenderer(tokenizer, text, tokenizer.eos_token, self.chat_template_kwargs)
                    if name == "tokenizer" else
                    TemplateRenderer(name, text, tokenizer.eos_token, tokenizer.bos_token))
        on_overflow = self.on_overflow or ("truncate_turns" if name == "tokenizer" else "truncate_prompt")
        # The encoder itself leaves room for one token after a prompt.
        longest = self.max_length - (self.new_tokens - 1 if prompts_only else 0)
        limits = Limits(longest, self.source_max_length, self.target_max_length, on_overflow)
        return SFTEncoder(layout, renderer, text, limits, self._choices(), self.roles, self.turn_fields, prompts_only)

    def _template_name(self) -> str:
        if is_template_file(self.template):
            return "tokenizer"
        return self.template or ("tokenizer" if self.tokenizer.chat_template else "alpaca")

    def _batch_keys(self) -> tuple[str, ...]:
        return ("input_ids", "labels", *(["loss_weights"] if self._has_weights() else []))

    def _has_weights(self) -> bool:
        """True if rows may have different weights, which for a stream is unknown."""
        return self.streaming or any((rows.column("weight") != 1).any() for rows in self._splits.sets.values())

    def _prompt(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"][: row["prompt_length"]], "index": row["index"]}


class SFTData(SFTDataFields, ConversationData):
    """Conversations for supervised fine-tuning; one row of a batch is one conversation."""

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        """As of `TaskHooks`. Raises UserError: the layout is unknown, as no other task recognised the rows."""
        return f"the layout of the rows is {detect_format(row.values, f'{row.file}:{row.line}')}"

    def _choices(self) -> Choices:
        return Choices(self.train_on, self.turns, self.reasoning, self.system_prompt, self.replace_system_prompt)

    def _encoding_settings(self) -> dict[str, Any]:
        return {**super()._encoding_settings(), "train_on": self.train_on, "turns": self.turns}

    def train_batches(self) -> StatefulLoader | StreamLoader:
        """As of `DataModule`. Raises UserError where answers are to be drawn and the trainer takes parts of epochs."""
        if self.on_policy is not None:
            self._check_on_policy()
        return super().train_batches()

    def _check_on_policy(self) -> None:
        """Say how many rows leave no room for a drawn answer. Raises UserError."""
        for key, name, whole in (("overfit_batches", "overfit_batches", (None, 0)),
                                 ("limit_train_batches", "train_limit", (None, 1.0))):
            if (value := getattr(self.trainer, name, None)) not in whole:
                raise UserError(f"trainer.{key} is {value}, but model.teacher.on_policy draws answers for the whole "
                                "steps of whole epochs: take it out, and give data.source a `limit` of rows")
        prompts, most = self._rows("train").column("prompt_length"), self.on_policy.max_new_tokens
        full = int((~self.on_policy.has_room(prompts)).sum())
        room = (f"a prompt to which an answer of model.teacher.max_new_tokens {most} fits within data.max_length "
                f"{self.max_length}")
        if full == len(prompts):
            raise UserError(f"model.teacher.on_policy is {self.on_policy.share}, but none of the {len(prompts)} "
                            f"training rows has {room}: lower the former or raise the latter.")
        if full and NO_ROOM not in self._warned and getattr(self.trainer, "is_global_zero", True):
            warn(f"{full:,} of {len(prompts):,} training rows do not have {room}. They keep the answers they have.")
        self._warned.add(NO_ROOM)
