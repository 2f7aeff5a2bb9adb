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
        # A copy, as a stream gives its own row.
        values, info = dict(self.rows.source_row(row["index"])), self.rows.info(row["index"])
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

    def outline(self, batch: list[list[int]]) -> dict[str, np.ndarray]:
        """Return the columns that `ImageCollator` adds to a batch, as zeros without memory.

        It reads no images, so that processes know the shapes of each other's batches.

        Args:
            batch: Indices of the rows in each row of the batch: one, several that are packed, or none in padding.
        """
        stored = [[self.rows[index]["image_shapes"] for index in rows] for rows in batch]
        # For each row of the batch that has images, [rows with images, axes of all inputs].
        axes = [np.array(shapes) for rows in stored if (shapes := [shape for shape in rows if len(shape)])]
        columns: dict[str, np.ndarray] = {}
        for name, example in self._examples.items() if axes else ():
            # As in `join_inputs` and `ImageCollator`.
            shape = np.max([[sizes[:, 0].sum(), *sizes[:, 1:example.ndim].max(0)] for sizes in axes], 0).tolist()
            axes = [sizes[:, example.ndim:] for sizes in axes]
            if name not in self._images.family.whole_rows:
                columns[COUNT + name] = np.zeros(len(batch), np.int64)
            columns[PER_ROW + name] = np.broadcast_to(np.zeros((), example.dtype), (len(batch), *shape))
        return columns


@dataclass
class ImageCollator:
    """Adds the images of rows to batches, as columns whose names start with PER_ROW.

    An input that has n entries of a row is [B, max n, ...], padded with zeros to the largest of the batch. An input
    that the network takes without padding also has the column COUNT + name [B]. Batches without images have no such
    columns.

    Args:
        collator: Collator of the other columns.
        family: Which inputs the network takes with padding.
    """

    collator: Collate
    family: ImageFamily

    def __call__(self, rows: list[dict[str, Any] | None]) -> dict[str, torch.Tensor]:
        batch = self.collator(rows)
        inputs = [(row or {}).get(INPUTS) or {} for row in rows]
        for name in dict.fromkeys(name for row in inputs for name in row):
            arrays: list[Any] = [as_array(row[name]) if name in row else None for row in inputs]
            if name not in self.family.whole_rows:
                batch[COUNT + name] = torch.tensor([0 if array is None else len(array) for array in arrays])
            blank = next(array for array in arrays if array is not None)
            blank = np.zeros([0] * blank.ndim, blank.dtype)
            batch[PER_ROW + name] = torch.from_numpy(as_array([blank if array is None else array for array in arrays]))
        return batch


def join_inputs(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Join the inputs of several rows with images into one row's, padded as in `ImageCollator`."""
    joined = {}
    for name in rows[0]:
        arrays = [as_array(row[name]) for row in rows]
        shape = np.max([array.shape[1:] for array in arrays], 0)
        joined[name] = np.concatenate([
            np.pad(array, [(0, 0), *((0, size) for size in shape - array.shape[1:])]) for array in arrays])
    return joined


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
