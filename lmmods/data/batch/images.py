"""Images of rows as inputs of the network, with a line per row, so that any split of a batch keeps them together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lmmods.core.errors import UserError
from lmmods.core.image_models import COUNT, ImageFamily
from lmmods.core.labels import PER_ROW
from lmmods.data.batch.collate import Collate
from lmmods.data.read.conversation import Message, RowProblem
from lmmods.data.read.images import FOLDER, checksum, decode_image, images_of, read_bytes
from lmmods.data.store.rows import RowSet

if TYPE_CHECKING:
    from lmmods.data.encode.images import ImageProcessor

INPUTS = "image_inputs"  # key of an item


class ImageSet(Dataset):
    """Items with the network's inputs from the images of their rows. Item -1 is None, a padding row.

    Args:
        items: Items with the columns of `ImageEncoder`, one for each of `rows`.
        read: Returns the turns of a row as read, from its values and its layout.
        images: The model's processor.
    """

    def __init__(self, items: Any, rows: RowSet, read: Callable[[dict[str, Any], str], list[Message]],
                 images: "ImageProcessor") -> None:
        self.items, self.rows, self._read, self._images = items, rows, read, images
        self.lengths, self.truncated = items.lengths, items.truncated
        self.tokens, self.num_answers = getattr(items, "tokens", items.lengths), getattr(items, "num_answers", 1)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        row = self.items[index]
        if row is None or not len(row["images"]):
            return row
        values, info = self.rows.source_row(row["index"]), self.rows.info(row["index"])
        folder = values.pop(FOLDER, None)
        images = images_of(self._read(values, info["format"]))
        has_changed = UserError(f"{self.rows.location(row['index'])}: an image has changed since the row was encoded. "
                                "Restore the file, or set data.rebuild_cache to true for a new run.")
        try:
            files = [read_bytes(images[number].source, folder) for number in row["images"]]
        except RowProblem as problem:
            raise has_changed from problem
        if [checksum(data) for data in files] != row["image_checksums"].tolist():
            raise has_changed
        return {**row, INPUTS: self._images.inputs([decode_image(data, self._images.max_pixels) for data in files])}

    @cached_property
    def _examples(self) -> dict[str, np.ndarray]:
        """The network's inputs from a small image, in the order of the column `image_shapes`."""
        from PIL import Image

        return {name: as_array(value) for name, value in self._images.inputs([Image.new("RGB", (64, 64))]).items()}

    def outline(self, indices: list[int]) -> dict[str, np.ndarray]:
        """Return the columns that `ImageCollator` adds to a batch of these rows, as zeros without memory.

        It reads no images, so that processes know the shapes of each other's batches.
        """
        stored = [self.rows[index]["image_shapes"] if index >= 0 else np.empty(0, np.int32) for index in indices]
        rows = np.array([sizes for sizes in stored if len(sizes)])  # [rows with images, axes of all inputs]
        columns: dict[str, np.ndarray] = {}
        for name, example in self._examples.items() if len(rows) else ():
            rows, sizes = rows[:, example.ndim:], rows[:, :example.ndim]
            shape = sizes.max(0).tolist()
            if name in self._images.family.whole_rows:
                shape = shape[1:]
            else:
                columns[COUNT + name] = np.zeros(len(indices), np.int64)
            columns[PER_ROW + name] = np.broadcast_to(np.zeros((), example.dtype), (len(indices), *shape))
        return columns


@dataclass
class ImageCollator:
    """Adds the images of rows to batches, as columns whose names start with PER_ROW.

    An input with an entry per row is [B, ...]. Others have n entries of a row, and are [B, max n, ...] with the column
    COUNT + name [B]. Shapes are padded with zeros to the largest of the batch. Batches without images have no such
    columns.

    Args:
        collator: Collator of the other columns.
        family: Which inputs have an entry per row.
    """

    collator: Collate
    family: ImageFamily

    def __call__(self, rows: list[dict[str, Any] | None]) -> dict[str, torch.Tensor]:
        batch = self.collator(rows)
        inputs = [(row or {}).get(INPUTS) or {} for row in rows]
        for name in dict.fromkeys(name for row in inputs for name in row):
            arrays: list[Any] = [as_array(row[name]) if name in row else None for row in inputs]
            if name in self.family.whole_rows:
                arrays = [None if array is None else array[0] for array in arrays]
            else:
                batch[COUNT + name] = torch.tensor([0 if array is None else len(array) for array in arrays])
            blank = next(array for array in arrays if array is not None)
            blank = np.zeros([0] * blank.ndim, blank.dtype)
            batch[PER_ROW + name] = torch.from_numpy(as_array([blank if array is None else array for array in arrays]))
        return batch


def as_array(value: Any) -> np.ndarray:
    """Return an array from an array or a list of arrays, which are padded with zeros to the largest of them."""
    if not isinstance(value, list) or not value or np.isscalar(value[0]):
        return np.asarray(value)
    parts = [as_array(part) for part in value]
    shape = np.max([part.shape for part in parts], 0)
    result = np.zeros((len(parts), *shape), parts[0].dtype)
    for index, part in enumerate(parts):
        region: tuple[Any, ...] = (index, *(slice(size) for size in part.shape))
        result[region] = part
    return result
