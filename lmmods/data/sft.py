"""Supervised fine-tuning: conversations with a loss on the responses."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lmmods.core import fingerprints
from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.core.image_models import PROCESSOR_FILES
from lmmods.data.base import DataModule
from lmmods.data.batch.collate import Collate, Collator
from lmmods.data.batch.images import INPUTS, ImageCollator, ImageSet
from lmmods.data.batch.loader import StatefulLoader
from lmmods.data.batch.stream import StreamLoader
from lmmods.data.codec import Codec, ModelFacts, Settings
from lmmods.data.encode.chat_renderer import (
    ChatTemplateRenderer,
    is_template_file,
    read_template_file,
    to_template_turn,
)
from lmmods.data.encode.chat_template import REFUSALS, bounded_rendering
from lmmods.data.encode.conversations import Choices, Limits, SFTEncoder
from lmmods.data.encode.encoder import Encoder, TextEncoder
from lmmods.data.encode.image_conversations import ImageEncoder
from lmmods.data.encode.templates import TEMPLATES, TemplateRenderer, template_jinja
from lmmods.data.encode.words import texts_in
from lmmods.data.on_policy import OnPolicy
from lmmods.data.read.conversation import Conversation, Message, RowProblem
from lmmods.data.read.formats import detect_format, find_format, read_conversation
from lmmods.data.read.images import FOLDER, checksum, images_of
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.rows import PromptSet, RowSet
from lmmods.recipe.images import ImageDataFields
from lmmods.recipe.tasks.base import ConversationFields
from lmmods.recipe.tasks.sft import SFTDataFields, TrainOn

if TYPE_CHECKING:
    from lmmods.data.encode.images import ImageProcessor

NO_ROOM = "no_room"  # a warning that has been given
SHOWN = 200  # characters of an image's bytes, from which predictions only have their number

# ---------------------------------------------------------------------------------------------------------------------
# Conversations, shared by fine-tuning, preference optimisation, reward models and reinforcement learning.


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

    def chat_renderer(self, text: TextEncoder) -> ChatTemplateRenderer:
        """Return the renderer of the tokenizer's chat template."""
        return ChatTemplateRenderer(self.tokenizer, text, self.tokenizer.eos_token, self.settings.chat_template_kwargs)

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
        messages = [to_template_turn(message) for message in conversation.messages]
        template = self.chat_template(rows)
        prompts = []
        for position, message in enumerate(messages):
            # Templates may reject a conversation up to some turn; its prompt is then omitted.
            if position and message["role"] == "assistant":
                with suppress(*REFUSALS), bounded_rendering():
                    prompts.append(list(self.tokenizer.apply_chat_template(
                        messages[:position], chat_template=template, add_generation_prompt=True, tokenize=True,
                        return_dict=False, **variables)))
        return prompts

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


# ---------------------------------------------------------------------------------------------------------------------
# Conversations with images, shared by fine-tuning and preference optimisation.

def read_messages(values: dict[str, Any], layout: str, select: Callable[[dict[str, Any]], dict[str, Any]],
                  roles: dict[str, str], turn_fields: dict[str, str]) -> list[Message]:
    """Return the turns of a row with their images. Raises RowProblem.

    Args:
        select: As `ConversationCodec.select_prompt`.
    """
    return read_conversation(layout, select(values), roles, turn_fields, reads_images=True).messages


class ImageCodec(ConversationCodec):
    """Conversations with images in turns that are no targets. Abstract: a task's codec is its other base.

    Args:
        images: The model's processor.

    Raises:
        UserError: The model has no chat template, or the tokenizer writes images as text.
    """

    def __init__(self, settings: ConversationSettings, tokenizer: Any, model: ModelFacts, images: "ImageProcessor"
                 ) -> None:
        super().__init__(settings, tokenizer, model)
        self.images = images
        if self._template_name() != "tokenizer":
            raise UserError("model.images needs a chat template that renders images. Use a model that has one, or set "
                            "data.template to a Jinja file.", "data.template")
        if images.token not in TextEncoder(tokenizer).control:
            raise UserError(f"model.images: {images.token}, which stands for an image, is not a special token of the "
                            "tokenizer. Use the model's own tokenizer.", "data.tokenizer")

    # From records to rows

    def encoding_settings(self) -> dict[str, Any]:
        return {**super().encoding_settings(), "images": self.images.state()}

    def regroup(self, records: Iterable[Row], info: dict[str, Any]) -> Iterator[Row]:
        folders: dict[str, str | None] = {}
        for record in super().regroup(records, info):
            if record.file not in folders:
                path = Path(record.file).expanduser()
                folders[record.file] = str(path.parent) if path.is_file() else None
            # Set in any case: a row must not choose its folder.
            yield record._replace(values={**record.values, FOLDER: folders[record.file]})

    def chat_renderer(self, text: TextEncoder) -> ChatTemplateRenderer:
        return ChatTemplateRenderer(self.tokenizer, text, self.tokenizer.eos_token, self.settings.chat_template_kwargs,
                                    self.images)

    def encoder_of(self, *arguments: Any) -> SFTEncoder:
        return ImageEncoder(*arguments, images=self.images, never_targets=tuple(self.images.token_ids))

    def read(self, record: dict[str, Any], info: dict[str, Any]) -> Conversation:
        values = {name: value for name, value in record.items() if name != FOLDER}
        return read_conversation(info["format"], values, self.settings.roles, self.settings.turn_fields,
                                 reads_images=True)

    def surroundings_of(self, conversation: Conversation) -> str:
        """See `ConversationCodec`. Images distinguish rows of equal texts."""
        sources = [image.source for image in images_of(conversation.messages)]
        images = [source if isinstance(source, str) else checksum(source) for source in sources]
        return super().surroundings_of(conversation) + (str(images) if images else "")

    # From rows to batches

    def _with_inputs(self, items: Any, rows: RowSet) -> ImageSet:
        read = partial(read_messages, select=self.select_prompt, roles=self.settings.roles,
                       turn_fields=self.settings.turn_fields)
        return ImageSet(items, rows, read, self.images)

    def make_items(self, rows: RowSet, by_source: bool) -> Any:
        return self._with_inputs(super().make_items(rows, by_source), rows)

    def fingerprint_files(self, rows: RowSet) -> str:
        checksums = [fingerprints.of_array(values) for store in rows.stores
                     for values, _ in store.lists("image_checksums")]
        return fingerprints.combine_fingerprints(checksums)

    def make_collator(self, collator: Collator, sets: Sequence[RowSet], added: Sequence[str] = ()) -> Any:
        return ImageCollator(super().make_collator(collator, sets, added), self.images.family)

    def make_prompts(self, rows: RowSet) -> PromptSet:
        return PromptSet(self._with_inputs(rows, rows), self.prompt_of)

    def prompt_of(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, **super().prompt_of(row)}

    def make_prompt_collator(self, collator: Collator, sets: Sequence[RowSet]) -> Collate:
        return ImageCollator(super().make_prompt_collator(collator, sets), self.images.family)

    def collate_images(self, pictures: list[Any]) -> dict[str, Any]:
        """Return the columns of a batch of one row with these pictures, which are PIL's."""
        return ImageCollator(lambda rows: {}, self.images.family)([{INPUTS: self.images.inputs(pictures)}])

    # Prompts and predictions

    def decode_prompts(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """See `Codec`. The tokens of an image are written once."""
        images = set(self.images.token_ids)
        return super().decode_prompts([[int(token) for before, token in zip([None, *row], row, strict=False)
                                        if before != token or int(token) not in images] for row in rows])

    def inference_prompts(self, rows: RowSet, index: int) -> list[list[int]]:
        layout = rows.info(index)["format"]
        conversation = self.conversation_encoder(layout, prompts_only=False).conversation(rows.source_row(index))
        variables = {**(self.settings.chat_template_kwargs or {}), **conversation.template_kwargs,
                     "tools": conversation.tools or None, "documents": conversation.documents or None}
        template, prompts = self.chat_template(rows), []
        for position, message in enumerate(conversation.messages):
            if not position or message["role"] != "assistant":
                continue
            turns = conversation.messages[:position]
            with suppress(*REFUSALS), bounded_rendering():
                text = self.tokenizer.apply_chat_template(
                    [to_template_turn(turn, in_parts=True) for turn in turns], chat_template=template,
                    add_generation_prompt=True, tokenize=False, **variables)
                first, *others = text.split(self.images.token)
                texts = self.images.texts(tuple(picture.size for picture in images_of(turns)))
                text = first + "".join(image + other for image, other in zip(texts, others, strict=True))
                adds = not text.startswith(self.tokenizer.bos_token or "\0")
                prompts.append(self.tokenizer(text, add_special_tokens=adds)["input_ids"])
        return prompts

    def model_files(self, find_base_file: Callable[[str], Path | None]) -> dict[str, Any]:
        # Those of the base, as a processor without its part for videos cannot be written.
        paths = {name: path for name in PROCESSOR_FILES if (path := find_base_file(name)) is not None}
        files = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}
        changed = self.images.changed_fields()
        if "image_processor" in (processor := files.get("processor_config.json", {})):
            processor["image_processor"] |= changed
        if "preprocessor_config.json" in files:
            files["preprocessor_config.json"] |= changed
        return files

    def example(self, rows: RowSet, index: int) -> dict[str, Any]:
        """See `Codec`. Predictions have the length of an image's bytes instead of these."""
        values = rows.source_row(index)
        values.pop(FOLDER, None)
        return _without_bytes(values)


def _without_bytes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: f"{len(item)} characters" if key in ("bytes", "base64") and isinstance(item, str)
                and len(item) > SHOWN else _without_bytes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_bytes(item) for item in value]
    is_long_url = isinstance(value, str) and value.startswith("data:") and len(value) > SHOWN
    return f"data: {len(value)} characters" if is_long_url else value


class ImageData(ImageDataFields, ConversationData):
    """Conversations that may have images. Abstract: a task names the codec for these, too."""

    image_codec_class: type[ImageCodec]
    _images: "ImageProcessor | None" = None

    def connect(self, *, image_model: tuple[str, str] | None = None, **settings: Any) -> None:
        """See `DataModule`.

        Args:
            image_model: Path and type of a model that trains on images.

        Raises:
            UserError: The model has no processor, or one without an option of the recipe.
        """
        super().connect(**settings)
        if image_model is None:
            return
        from lmmods.data.encode.images import ImageProcessor  # imports transformers

        path, model_type = image_model
        self._images = ImageProcessor(path, model_type, settings.get("revision"), settings["trust_remote_code"],
                                      self.image_options, self.max_image_pixels)
        self._tokenizer = replace(self._tokenizer, path=self._tokenizer.path or path)
        if self.template is None and (template := self._images.chat_template) is not None:
            self._tokenizer = replace(self._tokenizer, chat_template=template)

    def make_codec(self) -> Codec:
        if self._images is None:
            return super().make_codec()
        return self.image_codec_class(cast(ConversationSettings, self), self.tokenizer, self._model, self._images)

    def identity(self) -> dict[str, Any]:
        if self._images is None:
            return super().identity()
        state = json.dumps(self._images.state(), sort_keys=True, default=str)
        return {**super().identity(), "images": fingerprints.combine_fingerprints([state])}


# ---------------------------------------------------------------------------------------------------------------------
# Supervised fine-tuning.


class SFTSettings(SFTDataFields, ConversationSettings):
    """See `Settings`."""

    train_on: TrainOn


class SFTCodec(ConversationCodec):
    """Conversations with chosen turns as targets; one row of a batch is one conversation."""

    settings: SFTSettings

    def __init__(self, settings: SFTSettings, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self.train_on, self.turns = settings.train_on, settings.turns

    def encoding_settings(self) -> dict[str, Any]:
        return {**super().encoding_settings(), "train_on": self.train_on, "turns": self.turns}


class ImageSFTCodec(ImageCodec, SFTCodec):
    """`SFTCodec` with images."""


class SFTData(SFTDataFields, ImageData):
    """Conversations for supervised fine-tuning."""

    codec_class, image_codec_class = SFTCodec, ImageSFTCodec

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        """See `DataModule`. Raises UserError: the layout is unknown, as no other task recognised the rows."""
        return f"the layout of the rows is {detect_format(row.values, f'{row.file}:{row.line}')}"

    def train_batches(self) -> StatefulLoader | StreamLoader:
        """See `DataModule`. Raises UserError if answers are sampled and the trainer takes parts of epochs."""
        if isinstance(self._row_source, OnPolicy):
            self._check_on_policy(self._row_source)
        return super().train_batches()

    def _check_on_policy(self, on_policy: OnPolicy) -> None:
        """Report how many rows leave no space for a sampled answer. Raises UserError."""
        for key, name, allowed in (("overfit_batches", "overfit_batches", (None, 0)),
                                   ("limit_train_batches", "train_limit", (None, 1.0))):
            if (value := getattr(self.trainer, name, None)) not in allowed:
                raise UserError(f"trainer.{key} is {value}, but model.teacher.on_policy samples answers for whole "
                                "epochs. Remove it, and limit the rows with data.source.limit")
        prompts, max_new_tokens = self.rows("train").column("prompt_length"), on_policy.max_new_tokens
        full = int((~on_policy.has_space(prompts)).sum())
        space = (f"space for an answer of model.teacher.max_new_tokens {max_new_tokens} tokens within data.max_length "
                 f"{self.max_length}")
        if full == len(prompts):
            raise UserError(f"model.teacher.on_policy is {on_policy.fraction}, but none of the {len(prompts)} training "
                            f"rows has {space}. Lower max_new_tokens or raise max_length.")
        if full and NO_ROOM not in self._warned and getattr(self.trainer, "is_global_zero", True):
            warn(f"{full:,} of {len(prompts):,} training rows do not have {space}. They keep their given answers.")
        self._warned.add(NO_ROOM)
