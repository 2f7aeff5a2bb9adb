"""Images as tokens and as inputs of a network, by the model's own processor.

A processor writes a text for each image, such as `<image><image>…`, whose length depends on the sizes of the row's
images. Arrays of pixels are made only when a batch is assembled, on CPUs, by transformers' PIL image processors.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from lmmods.core.compat import without_parts
from lmmods.core.errors import UserError, one_line
from lmmods.core.hub import loading
from lmmods.core.image_models import PROCESSOR_FILES, ImageFamily, find_image_family
from lmmods.data.read.conversation import RowProblem

MAX_CACHED = 10_000  # combinations of sizes
OWN_TEXTS = ("input_ids", "attention_mask", "text_replacement_offsets", "token_type_ids", "mm_token_type_ids")


@dataclass
class ImageProcessor:
    """The processor of a model; picklable, as each process loads its own.

    Args:
        path: Folder or hub id of the model.
        model_type: Type of its configuration.
        options: Fields of its image processor to override.
        max_pixels: Maximum number of pixels in an image.

    Raises:
        UserError: The model type is not supported.
    """

    path: str
    model_type: str
    revision: str | None = None
    trust_remote_code: bool = False
    options: dict[str, Any] | None = None
    max_pixels: int = 0

    def __post_init__(self) -> None:
        self.family: ImageFamily = find_image_family(self.model_type)
        self._of_sizes: dict[tuple[tuple[int, int], ...], tuple[list[str], list[int]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**{name: value for name, value in vars(self).items() if name != "_processor"}, "_of_sizes": {}}

    @cached_property
    def _processor(self) -> Any:
        """Transformers' processor, without parts for videos or sound. Raises UserError."""
        import transformers
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
        from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        source: dict[str, Any] = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        try:
            with loading("model.images", self.path, revision=self.revision, missing=(OSError,)):
                values, _ = ProcessorMixin.get_processor_dict(self.path, **source)
                image_processor = AutoImageProcessor.from_pretrained(self.path, backend="pil", **source)
                tokenizer = AutoTokenizer.from_pretrained(self.path, **source)
                if not os.path.isdir(self.path):
                    with suppress(EntryNotFoundError):  # not needed here, but an exported model has it
                        hf_hub_download(self.path, PROCESSOR_FILES[-1], revision=self.revision)
            cls = getattr(transformers, values.get("processor_class") or PROCESSOR_MAPPING_NAMES[self.model_type])
            parts = {"tokenizer": tokenizer, "image_processor": self._with_options(image_processor, cls)}
            cls = without_parts(cls)
            return cls.from_args_and_dict([parts.get(name) for name in cls.get_attributes()], values)
        except (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"model.images: {self.path} has no processor that can be loaded ({type(error).__name__}: "
                            f"{one_line(error)[:300]}). Use a model with the files of its processor, or set "
                            "model.images to false.", "model.images") from error

    def _with_options(self, image_processor: Any, cls: type) -> Any:
        """Return the image processor with `options`. Raises UserError: one is unknown."""
        settings, fixed = image_processor.to_dict(), getattr(cls, "images_kwargs", {})
        settings.pop("image_processor_type", None)
        known = {*type(image_processor).valid_kwargs.__annotations__, *settings} - {"return_tensors", *fixed}
        for name in self.options or {}:
            if name not in known:
                raise UserError(f"data.image_options.{name}: {type(image_processor).__name__} has no such field. Use "
                                f"one of {', '.join(sorted(known))}.", "data.image_options")
        return type(image_processor)(**settings | (self.options or {})) if self.options else image_processor

    @property
    def chat_template(self) -> str | None:
        """The processor's chat template, which its tokenizer may lack."""
        template = self._processor.chat_template
        return template if isinstance(template, str) else None

    @property
    def token(self) -> str:
        """Token that chat templates write for an image."""
        return self._processor.image_token

    @property
    def token_ids(self) -> list[int]:
        """Ids of the tokens whose embeddings the network replaces by image features."""
        return self._processor.image_token_ids

    def state(self) -> dict[str, Any]:
        """Everything that tokens and pixels depend on, besides the images; plain values."""
        processor = self._processor
        texts = {name: value for name, value in vars(processor).items() if isinstance(value, int | str | float | bool)}
        return {"processor": type(processor).__name__, "image_processor": processor.image_processor.to_dict(), **texts,
                "images_kwargs": getattr(processor, "images_kwargs", None), "max_pixels": self.max_pixels}

    def changed_fields(self) -> dict[str, Any]:
        """Return the fields of the image processor that files of the model must have; none without `options`."""
        settings = self._processor.image_processor.to_dict() if self.options else {}
        return {name: value for name, value in settings.items() if name != "image_processor_type"}

    def texts(self, sizes: tuple[tuple[int, int], ...]) -> list[str]:
        """Return the text of each image of a row, which depends only on the sizes (width, height) of all of them.

        Raises:
            RowProblem: The processor does not accept such images.
        """
        return self._process_blank(sizes)[0]

    def shapes(self, sizes: tuple[tuple[int, int], ...]) -> list[int]:
        """Return the shapes of all `inputs` of a row, one after the other; arguments and errors as for `texts`."""
        return self._process_blank(sizes)[1]

    def _process_blank(self, sizes: tuple[tuple[int, int], ...]) -> tuple[list[str], list[int]]:
        if not sizes:
            return [], []
        if sizes not in self._of_sizes:
            if len(self._of_sizes) == MAX_CACHED:
                self._of_sizes.clear()
            # Blank pictures, so that equal sizes cost nothing.
            inputs, texts = self._run([Image.new("RGB", size) for size in sizes])
            self._of_sizes[sizes] = texts, [int(size) for value in inputs.values() for size in _shape(value)]
        return self._of_sizes[sizes]

    def inputs(self, pictures: list[Image.Image]) -> dict[str, Any]:
        """Return the network's inputs from the images of a row: arrays [n, ...], or lists of n arrays."""
        return self._run(pictures)[0]

    def _run(self, pictures: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        try:
            output = self._processor(images=[pictures], text=[self.token * len(pictures)],
                                     return_text_replacement_offsets=True)
        except ValueError as error:  # such as Qwen's for a picture that is much wider than high
            raise RowProblem(f"the model's processor rejects an image: {one_line(error)[:100]}") from error
        texts = [offset["replacement"] for offset in output["text_replacement_offsets"][0]]
        return {name: value[0] if name in self.family.whole_rows else value
                for name, value in output.items() if name not in OWN_TEXTS}, texts


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of an array, or of a list of arrays that are padded to the largest of them."""
    if not isinstance(value, list) or not value or np.isscalar(value[0]):
        return np.shape(value)
    return (len(value), *np.max([_shape(part) for part in value], 0))
