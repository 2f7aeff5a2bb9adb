"""Conversations, as fine-tuning, preference optimisation, reward models and reinforcement learning read them."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import cached_property
from typing import Any

from lmmods.core.errors import UserError
from lmmods.data.base import DataModule
from lmmods.data.codec import Codec, Settings
from lmmods.data.encode.chat_renderer import (
    ChatTemplateRenderer,
    is_template_file,
    read_template_file,
    to_template_turn,
)
from lmmods.data.encode.chat_template import REFUSALS, bounded_rendering
from lmmods.data.encode.conversations import Choices, Limits, SFTEncoder
from lmmods.data.encode.encoder import Encoder, TextEncoder
from lmmods.data.encode.templates import TEMPLATES, TemplateRenderer, template_jinja
from lmmods.data.encode.words import texts_in
from lmmods.data.read.conversation import Conversation, Message, RowProblem
from lmmods.data.read.formats import detect_format, find_format, read_conversation
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.rows import RowSet
from lmmods.recipe.tasks.base import ConversationFields


class ConversationSettings(ConversationFields, Settings):
    """See `Settings`."""

    roles: dict[str, str]
    turn_fields: dict[str, str]


class ConversationCodec(Codec):
    """Conversations in a template. Abstract: a task decides on the targets, and which records it takes."""

    settings: ConversationSettings
    train_on, turns = Choices.train_on, Choices.turns

    # From records to rows

    def encoding_settings(self) -> dict[str, Any]:
        names = ("template", "dataset_format", "roles", "turn_fields", "reasoning", "system_prompt",
                 "replace_system_prompt", "chat_template_kwargs", "source_max_length", "target_max_length",
                 "on_overflow", "max_length")
        return {name: getattr(self.settings, name) for name in names}

    def make_encoder(self, reader: SourceReader, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        layout = reader.source.format or self.settings.dataset_format or detect_format(
            first.values, f"{first.file}:{first.line}", prompts_only)
        return self.encoder_and_facts(layout, prompts_only)

    def encoder_and_facts(self, layout: str, prompts_only: bool) -> tuple[SFTEncoder, dict[str, Any]]:
        """Return the encoder of conversations of a layout, and facts about it for the report."""
        encoder = self.conversation_encoder(layout, prompts_only)
        template = find_format(layout).template or self._template_name()
        return encoder, {"format": layout, "template": template, "notes": encoder.renderer.notes}

    def conversation_encoder(self, layout: str, prompts_only: bool) -> SFTEncoder:
        """Return the encoder of conversations of a layout.

        Raises:
            UserError: The tokenizer has no end token, or the template is damaged.
        """
        settings, tokenizer = self.settings, self.tokenizer
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-text token, so no response could end; set "
                            "data.eos_token")
        text = TextEncoder(tokenizer)
        name = find_format(layout).template or self._template_name()
        renderer = (self.chat_renderer(text) if name == "tokenizer" else
                    TemplateRenderer(name, text, tokenizer.eos_token, tokenizer.bos_token))
        on_overflow = settings.on_overflow or ("truncate_turns" if name == "tokenizer" else "truncate_prompt")
        # The encoder itself leaves space for one token after a prompt.
        longest = settings.max_length - (self.model.new_tokens - 1 if prompts_only else 0)
        limits = Limits(longest, settings.source_max_length, settings.target_max_length, on_overflow)
        choices = Choices(self.train_on, self.turns, settings.reasoning, settings.system_prompt,
                          settings.replace_system_prompt)
        return self.encoder_of(layout, renderer, text, limits, choices, settings.roles, settings.turn_fields,
                               prompts_only)

    def chat_renderer(self, text: TextEncoder, **options: Any) -> ChatTemplateRenderer:
        """Return the renderer of the tokenizer's chat template."""
        return ChatTemplateRenderer(self.tokenizer, text, self.tokenizer.eos_token, self.settings.chat_template_kwargs,
                                    **options)

    def encoder_of(self, *arguments: Any) -> SFTEncoder:
        """Return the encoder of conversations with these arguments."""
        return SFTEncoder(*arguments)

    def prompt_encoder(self, layout: str) -> SFTEncoder:
        """Return the encoder of conversations in the form of a layout's training rows, up to the response."""
        return self.conversation_encoder(layout, prompts_only=True)

    def _template_name(self) -> str:
        if is_template_file(self.settings.template):
            return "tokenizer"
        return self.settings.template or ("tokenizer" if self.tokenizer.chat_template else "alpaca")

    def regroup(self, records: Iterable[Row], info: dict[str, Any]) -> Iterator[Row]:
        return find_format(info["format"]).regroup(records)

    def read(self, record: dict[str, Any], info: dict[str, Any]) -> Conversation:
        """Return the conversation of a record. Raises RowProblem."""
        return read_conversation(info["format"], record, self.settings.roles, self.settings.turn_fields)

    def list_texts(self, record: dict[str, Any], info: dict[str, Any]) -> list[str]:
        return self.list_spoken(self.read(record, info).messages)

    def context_of(self, record: dict[str, Any], info: dict[str, Any]) -> str:
        """Return system turns, tools and the like, which decide on the answer."""
        return self.surroundings_of(self.read(record, info))

    def surroundings_of(self, conversation: Conversation) -> str:
        """Return what decides on the answer besides the turns of users, as JSON; nothing if there is nothing."""
        is_replaced = self.settings.replace_system_prompt and self.settings.system_prompt is not None
        system = [message["content"] for message in conversation.messages
                  if message["role"] == "system" and not is_replaced]
        parts = [system, conversation.tools, conversation.documents, conversation.template_kwargs]
        return json.dumps(parts, sort_keys=True, default=str) if any(parts) else ""

    def list_spoken(self, messages: list[Message]) -> list[str]:
        """Return the texts of turns, without those of the system, which many records share."""
        parts = ("input", "content", *(["reasoning_content"] if self.settings.reasoning == "keep" else []))
        texts: list[Any] = [text for message in messages if message["role"] != "system" for text in (
            *(message.get(part) for part in parts), *texts_in(message.get("tool_calls")))]
        return [text for text in texts if text]

    # From rows to batches

    def batch_columns(self, sets: Sequence[RowSet]) -> tuple[str, ...]:
        # The rows of a stream may have weights, which is not known before.
        has_weights = self.settings.streaming or any((rows.column("weight") != 1).any() for rows in sets)
        return ("input_ids", "labels", *(["loss_weights"] if has_weights else []))

    def prompt_of(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"][: row["prompt_length"]], "index": row["index"]}

    # Prompts and answers

    @cached_property
    def stop_token_ids(self) -> list[int]:
        """Tokens on which generation must stop: the tokenizer's end token and the template's terminator."""
        return self.conversation_encoder("messages", prompts_only=False).stop_token_ids

    def chat_template(self, rows: RowSet) -> str | None:
        """Return the Jinja template of training rows, the tokenizer's own or a named one; None if all are plain texts.
        """
        if all(find_format(store.info["format"]).template for store in rows.stores):
            return None
        renderer = self.conversation_encoder("messages", prompts_only=False).renderer
        if isinstance(renderer, TemplateRenderer):
            return template_jinja(renderer)
        return self.tokenizer.get_chat_template()

    def encode_prompts(self, texts: list[str], training_rows: Callable[[], RowSet]) -> list[list[int]]:
        """Return the token ids of user turns in the template of the training rows, up to the response.

        Raises:
            UserError: The template cannot render one.
        """
        encoder = self.prompt_encoder(training_rows().info(0)["format"])
        try:
            return encoder.prompts([[{"role": "user", "content": text}] for text in texts])
        except RowProblem as problem:
            raise UserError(f"samples.prompts: {problem}") from problem

    def inference_prompts(self, rows: RowSet, index: int) -> list[list[int]]:
        """Return the token ids of the prompts of a record's answers, as transformers renders them; [] if it rejects."""
        layout = rows.info(index)["format"]
        if find_format(layout).template:
            return []
        conversation = self.conversation_encoder(layout, prompts_only=False).conversation(rows.source_row(index))
        variables = {**(self.settings.chat_template_kwargs or {}), **conversation.template_kwargs,
                     "tools": conversation.tools or None, "documents": conversation.documents or None}
        template, prompts = self.chat_template(rows), []
        for position, message in enumerate(conversation.messages):
            # Templates may reject a conversation up to some turn; its prompt is then omitted.
            if position and message["role"] == "assistant":
                with suppress(*REFUSALS), bounded_rendering():
                    prompts.append(self.apply_template(conversation.messages[:position], template, variables))
        return prompts

    def apply_template(self, messages: list[Message], template: str | None, variables: dict[str, Any]) -> list[int]:
        """Return the token ids of the prompt that transformers makes from turns. Raises one of REFUSALS."""
        return list(self.tokenizer.apply_chat_template(
            [to_template_turn(message) for message in messages], chat_template=template, add_generation_prompt=True,
            tokenize=True, return_dict=False, **variables))

    # From outputs to predictions

    def reference(self, rows: RowSet, index: int) -> str | None:
        """Return the response in the data for a row of predict, or None."""
        layout = rows.info(index)["format"]
        if find_format(layout).template is not None:
            return None
        try:
            messages = self.read(self.example(rows, index), rows.info(index)).messages
        except RowProblem:
            return None
        return messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else None

    def build_reward_input(self, rows: RowSet, index: int, prompt: str, text: str) -> str | Conversation:
        """Return the conversation of a row of predict with this answer; the text itself where rows are plain texts."""
        layout = rows.info(index)["format"]
        if find_format(layout).template is not None:
            return super().build_reward_input(rows, index, prompt, text)
        conversation = self.prompt_encoder(layout).conversation(self.select_prompt(self.example(rows, index)))
        messages = conversation.messages
        messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        return replace(conversation, messages=[*messages, {"role": "assistant", "content": text.strip()}])

    @staticmethod  # for processes that prepare batches, which get the function alone
    def select_prompt(record: dict[str, Any]) -> dict[str, Any]:
        """Return the record of a conversation to be answered. Default: the record."""
        return record

    def score(self, rows: RowSet, texts: dict[int, str]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return the fraction of texts equal to their reference, ignoring outer spaces; none without references."""
        pairs = [(text, self.reference(rows, index)) for index, text in texts.items()]
        hits = [text.strip() == reference.strip() for text, reference in pairs if reference is not None]
        warnings = (f"predict/exact_match covers {len(hits)} of {len(pairs)} answers; the other rows have no response "
                    "to compare with.",) if 0 < len(hits) < len(pairs) else ()
        return ({"exact_match": sum(hits) / len(hits)} if hits else {}), warnings


class ConversationData(ConversationFields, DataModule):
    """Conversations in a template. Abstract: a task names the codec."""

    adds_padding = False  # another row in the output head would change every probability

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_format is not None:
            find_format(self.dataset_format)
        self.roles = self.roles or {}
        self.turn_fields = self.turn_fields or {}
        # Part of the tokenizer's options: added tokens that occur in the template become special.
        template = TEMPLATES.get(self.template or "alpaca")
        texts = [] if template is None else [text for text in astuple(template) if isinstance(text, str)]
        self._tokenizer = replace(self._tokenizer, template="\n".join(texts))
        if is_template_file(self.template):
            self._tokenizer = replace(self._tokenizer, chat_template=read_template_file(self.template))
