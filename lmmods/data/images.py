"""Conversations with images, for the tasks that train vision-language models."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lmmods.core import fingerprints
from lmmods.core.errors import UserError
from lmmods.core.image_models import PROCESSOR_FILES, find_image_family
from lmmods.data.batch.collate import Collate, Collator
from lmmods.data.batch.images import INPUTS, ImageCollator, ImageSet
from lmmods.data.codec import Codec, ModelFacts
from lmmods.data.conversations import ConversationCodec, ConversationData, ConversationSettings
from lmmods.data.encode.chat_renderer import ChatTemplateRenderer, to_template_turn
from lmmods.data.encode.conversations import SFTEncoder
from lmmods.data.encode.encoder import TextEncoder
from lmmods.data.encode.image_conversations import COLUMNS, ImageEncoder
from lmmods.data.read.conversation import Conversation, Message
from lmmods.data.read.formats import read_conversation
from lmmods.data.read.images import FOLDER, checksum, images_of
from lmmods.data.read.readers import Row
from lmmods.data.store.rows import PromptSet, RowSet
from lmmods.recipe.images import ImageDataFields

if TYPE_CHECKING:
    from lmmods.data.encode.images import ImageProcessor

SHOWN = 200  # characters of an image's bytes, from which predictions only have their number


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
        return {**super().encoding_settings(), "images": self.images.state(), "image_columns": COLUMNS}

    def regroup(self, records: Iterable[Row], info: dict[str, Any]) -> Iterator[Row]:
        folders: dict[str, str | None] = {}
        for record in super().regroup(records, info):
            if record.file not in folders:
                path = Path(record.file).expanduser()
                folders[record.file] = str(path.parent) if path.is_file() else None
            # Set in any case: a row must not choose its folder.
            yield record._replace(values={**record.values, FOLDER: folders[record.file]})

    def chat_renderer(self, text: TextEncoder, **options: Any) -> ChatTemplateRenderer:
        return super().chat_renderer(text, images=self.images, **options)

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

    def apply_template(self, messages: list[Message], template: str | None, variables: dict[str, Any]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [to_template_turn(message, in_parts=True) for message in messages], chat_template=template,
            add_generation_prompt=True, tokenize=False, **variables)
        first, *others = text.split(self.images.token)
        texts = self.images.texts(tuple(picture.size for picture in images_of(messages)))
        text = first + "".join(image + other for image, other in zip(texts, others, strict=True))
        adds = not text.startswith(self.tokenizer.bos_token or "\0")
        return self.tokenizer(text, add_special_tokens=adds)["input_ids"]

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
            UserError: The model has no processor, or one without an option of the recipe; or its rows with images
                cannot be packed.
        """
        super().connect(**settings)
        if image_model is None:
            return
        from lmmods.data.encode.images import ImageProcessor  # imports transformers

        path, model_type = image_model
        if self.packing and not find_image_family(model_type).can_pack:
            raise UserError(f"data.packing is not supported with images for a model of type {model_type}. Set it to "
                            "false.", "data.packing", "model.images")
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
