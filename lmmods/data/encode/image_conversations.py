"""Encoding of conversations with images: ids, and which images of the row they contain."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lmmods.data.encode.conversations import SFTEncoder
from lmmods.data.encode.encoder import Ragged
from lmmods.data.read.conversation import Conversation, Message
from lmmods.data.read.formats import read_conversation
from lmmods.data.read.images import FOLDER, checksum, decode_image, images_of, read_bytes

if TYPE_CHECKING:
    from lmmods.data.encode.images import ImageProcessor


COLUMNS = ("images", "image_checksums", "image_shapes")  # of `ImageEncoder`


class Picture(NamedTuple):
    """What tokens need to know of an image.

    Args:
        number: Its number among the images of the row.
        size: Width and height in pixels.
        checksum: Of its file.
    """

    number: int
    size: tuple[int, int]
    checksum: int


@dataclass
class ImageEncoder(SFTEncoder):
    """Encodes conversations whose turns have images.

    Args:
        images: The model's processor.
    """

    images: "ImageProcessor" = field(kw_only=True)

    def conversation(self, row: dict[str, Any]) -> Conversation:
        """Read and prepare the conversation of a row, and decode its images once, so that no batch meets a broken one.

        Raises RowProblem.
        """
        columns = {name: value for name, value in row.items() if name != FOLDER}
        conversation = self.normalise(read_conversation(self.dataset_format, columns, self.roles, self.turn_fields,
                                                        reads_images=True))
        return replace(conversation, messages=[self._open(message, row.get(FOLDER))
                                               for message in conversation.messages])

    def _open(self, message: Message, folder: str | None) -> Message:
        if "images" not in message:
            return message
        pictures = []
        for image in message["images"]:
            data = read_bytes(image.source, folder)
            pictures.append(Picture(image.number, decode_image(data, self.images.max_pixels).size, checksum(data)))
        return {**message, "images": pictures}

    def further_columns(self, conversations: list[Conversation]) -> dict[str, Any]:
        pictures = [images_of(conversation.messages) for conversation in conversations]
        lists = ([[picture.number for picture in row] for row in pictures],
                 [[picture.checksum for picture in row] for row in pictures],
                 [self.images.shapes(tuple(picture.size for picture in row)) for row in pictures])
        return dict(zip(COLUMNS, map(_ragged, lists), strict=True))


def _ragged(lists: list[list[int]]) -> Ragged:
    return Ragged.from_lists([np.array(numbers, np.int32) for numbers in lists])
