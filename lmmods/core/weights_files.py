"""Weights files that cannot be read: one clear message, the same in both engines."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lmmods.core.errors import UserError, first_line
from lmmods.core.out_of_memory import is_out_of_memory

UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, AttributeError, TypeError, pickle.UnpicklingError,
              SafetensorError)
TORCH_FILES = (b"PK\x03\x04", b"\x80")  # zip, and the pickle of torch before 1.6
POINTER = b"version https://git-lfs"


@contextmanager
def reading_weights(pretrained: str) -> Iterator[None]:
    """Wrap the reading of a folder's or hub id's weights. Raises UserError if they cannot be read."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"model.pretrained: a pytorch_model.bin of {pretrained} is damaged, or holds more than tensors, and is not "
            "loaded, as reading such a file runs the code in it. Fetch it again, or take a folder with "
            "model.safetensors; one you trust can be made of it with torch.load(…, weights_only=False) and "
            "safetensors.torch.save_file.") from error
    except UNREADABLE as error:
        if is_out_of_memory(error) or isinstance(error, UserError):
            raise
        reason = first_line(error)
        reason = reason if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {reason}"
        raise UserError(f"model.pretrained: cannot load {pretrained!r}: {reason}") from error


def check_weights(pretrained: str) -> None:
    """Raise UserError for files that are not weights at all, for which libraries have unhelpful messages."""
    folder = Path(pretrained)
    for file in sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin")):
        check_file("model.pretrained", file)


def check_file(key: str, file: Path) -> None:
    """`check_weights` of one file that `key` has led to."""
    if not file.is_file():
        raise UserError(f"{key}: {file} is no regular file: fetch it again.")
    with open(file, "rb") as opened:
        start = opened.read(len(POINTER))
    if start == POINTER:
        raise UserError(f"{key}: {file} is a pointer of Git LFS, not the weights: run git lfs pull in its folder.")
    if not start or file.suffix == ".bin" and not start.startswith(TORCH_FILES):
        raise UserError(f"{key}: {file} is {'empty' if not start else 'no file of torch'}: fetch it again.")
