"""Images of a row: where they stand in its turns, and their pictures.

An image is a file in the folder of the row's file, or bytes in the row. Nothing is downloaded: the same row must give
the same picture whenever it is read.
"""

import base64
import binascii
import os
import stat
import struct
import warnings
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from lmmods.data.read.cells import Values, is_blank
from lmmods.data.read.conversation import Message, RowProblem

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "\U0010fffc"  # stands for an image in the text of a turn
MARK = "<image>"  # in texts of a dataset with a column of images
COLUMNS = ("images", "image")
TYPES = ("image", "image_url", "input_image")  # of a part of a turn
SOURCES = ("bytes", "image", "url", "path", "base64", "image_url")  # keys of an image's source, the first that is set
FOLDER = "(folder)"  # column that `ImageCodec` adds: the folder of a row's file
# Formats that PIL itself decodes. Others start programs (EPS) or are animations by nature.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_BYTES = 2**28  # of an image file
BROKEN = "an image is broken, or in a format that is not supported"
UNREADABLE = (OSError, SyntaxError, ValueError, TypeError, EOFError, IndexError, KeyError, struct.error, zlib.error,
              OverflowError)


class ImageReference(NamedTuple):
    """An image of a row.

    Args:
        number: Its number among the images of the row.
        source: Path in the folder of the row's file, data: URL, or the bytes of an image file.
    """

    number: int
    source: str | bytes


# ---------------------------------------------------------------------------------------------------------------------
# Places of images in the turns.

def find_source(value: Any) -> str | bytes | None:
    """Return where an image is, from a path, a URL, bytes or an object with one of them; None if it does not say.

    Raises RowProblem if the value is something else.
    """
    if isinstance(value, dict):
        key = next((key for key in SOURCES if not is_blank(value.get(key)) and value[key] != b""), None)
        if key in ("bytes", "base64") and isinstance(value[key], str):
            return "data:;base64," + value[key]
        return None if key is None else find_source(value[key])
    if not isinstance(value, str | bytes):
        raise RowProblem("an image is neither a path nor bytes")
    return value


def take_column(values: Values) -> list[Any]:
    """Remove a row's columns of images, and return these."""
    taken = [values.pop(column, None) for column in COLUMNS]
    return [image for value in taken if not is_blank(value)
            for image in (value if isinstance(value, list) else [value])]


def place_images(messages: list[Message], column: list[Any]) -> None:
    """Give each turn its images, and mark their places in its text with IMAGE, in place.

    Images without a source get those of `column`, in order. If no turn has a place for an image, they precede the
    first turn of the user, as in TRL.

    Args:
        messages: Turns with IMAGE for each part that is an image, and its source, or None, in `images`.

    Raises:
        RowProblem: The images and their places do not fit.
    """
    for message in messages:
        if "input" in message:
            message["content"] += "\n\n" + message.pop("input")
        if message["content"].count(IMAGE) != len(message.get("images", ())):
            raise RowProblem("a text contains U+10FFFC, which is not a character")
    has_parts = any("images" in message for message in messages)
    if column and not has_parts:
        for message in messages:
            if count := message["content"].count(MARK):
                message["content"] = message["content"].replace(MARK, IMAGE)
                message["images"] = [None] * count
        if not any("images" in message for message in messages):
            first = next((message for message in messages if message["role"] == "user"), None)
            if first is not None:
                first["content"] = IMAGE * len(column) + first["content"]
                first["images"] = [None] * len(column)
    waiting, number = list(column), 0
    for message in messages:
        for position, source in enumerate(message.get("images", ())):
            if message["role"] == "assistant":
                raise RowProblem("an image in a turn of the assistant, which writes only text")
            if source is None and not waiting:
                raise RowProblem("the row has fewer images than places for them")
            source = find_source(waiting.pop(0)) if source is None else source
            if source is None:
                raise RowProblem("an image is empty")
            message["images"][position] = ImageReference(number, source)
            number += 1
    if waiting:
        raise RowProblem("the row has more images than places for them")


def images_of(messages: list[Message]) -> list[Any]:
    """Return the images of turns in order: `ImageReference` as read, `Picture` once an encoder has opened them."""
    return [image for message in messages for image in message.get("images", ())]


# ---------------------------------------------------------------------------------------------------------------------
# Pictures.

def read_bytes(source: str | bytes, folder: str | None) -> bytes:
    """Return the bytes of an image file.

    Args:
        folder: Folder of the row's file, in which paths must be; None if it is not on this machine.

    Raises:
        RowProblem: There is no such file, or it must not be read.
    """
    if isinstance(source, bytes):
        return source
    if source.startswith("data:"):
        try:
            return base64.b64decode(source.partition(",")[2], validate=True)
        except (binascii.Error, ValueError) as error:
            raise RowProblem(BROKEN) from error
    if "://" in source:
        raise RowProblem("an image is a URL, and nothing is downloaded: save it next to the data file")
    if folder is None:
        raise RowProblem("an image is a path, but the data file is not on this machine")
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, source.replace("\0", "")))
    if os.path.isabs(source) or os.path.commonpath([path, root]) != root:
        raise RowProblem("an image is outside the folder of the data file: use a path relative to the data file")
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise RowProblem("an image is not a regular file")
        if status.st_size > MAX_BYTES:
            raise RowProblem(f"an image file has more than {MAX_BYTES:,} bytes")
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise RowProblem("an image file is missing or cannot be read") from error


def decode_image(data: bytes, max_pixels: int) -> "Image":
    """Return the picture in RGB, turned as its EXIF orientation says, as transformers' `load_image` does.

    Raises:
        RowProblem: It cannot be decoded, has more pixels than `max_pixels`, or is animated.
    """
    from io import BytesIO

    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL warns of damaged metadata, and below its own limit of pixels
            image = Image.open(BytesIO(data), formats=FORMATS)
            if image.width * image.height > max_pixels:
                raise RowProblem("an image has more pixels than data.max_image_pixels")
            if getattr(image, "is_animated", False) and image.format != "MPO":  # a photograph and its preview
                raise RowProblem("an image is animated")
            return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as error:
        raise RowProblem("an image has more pixels than data.max_image_pixels") from error
    except UNREADABLE as error:
        raise RowProblem(BROKEN) from error


def checksum(data: bytes) -> int:
    """Return the CRC-32 of an image file as a signed 32-bit integer."""
    return int.from_bytes(zlib.crc32(data).to_bytes(4, "little"), "little", signed=True)
