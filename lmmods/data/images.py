"""The codec of conversations with images."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.image_models import PROCESSOR_FILES
from lmmods.data.batch.collate import Collate, Collator
from lmmods.data.batch.images import ImageCollator, ImageSet
from lmmods.data.codec import ModelFacts
from lmmods.data.encode.chat_renderer import ChatTemplateRenderer, to_template_turn
from lmmods.data.encode.chat_template import REFUSALS, bounded_rendering
from lmmods.data.encode.conversations import SFTEncoder
from lmmods.data.encode.encoder import TextEncoder
from lmmods.data.encode.image_conversations import ImageEncoder
from lmmods.data.encode.images import ImageProcessor
from lmmods.data.read.conversation import Conversation, Message
from lmmods.data.read.formats import read_conversation
from lmmods.data.read.images import FOLDER, checksum, images_of
from lmmods.data.read.readers import Row
from lmmods.data.sft import SFTCodec, SFTSettings
from lmmods.data.store.rows import PromptSet, RowSet

SHOWN = 200  # characters of an image's bytes, from which predictions only have their number


def read_messages(values: dict[str, Any], layout: str, roles: dict[str, str], turn_fields: dict[str, str]
                  ) -> list[Message]:
    """Return the turns of a row with their images. Raises RowProblem."""
    return read_conversation(layout, values, roles, turn_fields, reads_images=True).messages


class ImageCodec(SFTCodec):
    """Conversations with images in turns that are no targets.

    Args:
        images: The model's processor.

    Raises:
        UserError: The model has no chat template, or the tokenizer writes images as text.
    """

    def __init__(self, settings: SFTSettings, tokenizer: Any, model: ModelFacts, images: ImageProcessor) -> None:
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
        for record in super().regroup(records, info):
            folder = Path(record.file).expanduser().resolve().parent if Path(record.file).is_file() else None
            yield record if folder is None else record._replace(values={**record.values, FOLDER: str(folder)})

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

    def _with_inputs(self, rows: RowSet) -> ImageSet:
        read = partial(read_messages, roles=self.settings.roles, turn_fields=self.settings.turn_fields)
        return ImageSet(rows, read, self.images)

    def make_items(self, rows: RowSet, by_source: bool) -> ImageSet:
        return self._with_inputs(rows)

    def make_collator(self, collator: Collator, sets: Sequence[RowSet], added: Sequence[str] = ()) -> Collate:
        return ImageCollator(super().make_collator(collator, sets, added), self.images.family)

    def make_prompts(self, rows: RowSet) -> PromptSet:
        return PromptSet(self._with_inputs(rows), self.prompt_of)

    def prompt_of(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, **super().prompt_of(row)}

    def make_prompt_collator(self, collator: Collator, sets: Sequence[RowSet]) -> Collate:
        return ImageCollator(super().make_prompt_collator(collator, sets), self.images.family)

    # Prompts and predictions

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
