"""Which files make a checkpoint folder, and how it goes without taking with it what somebody else put there."""

import json
import os
from pathlib import Path

from lmmods.core.files import is_plain_name, read_text
from lmmods.runs.inside import delete

MANIFEST = "manifest.json"  # name of each file, with size and checksum
PLAIN = "state.json"  # everything but arrays, and where the arrays go


def own_files(checkpoint: Path) -> list[str]:
    """Names of the files that make a checkpoint; none where the folder is something else."""
    try:
        manifest = json.loads(read_text(checkpoint / MANIFEST))
    except (OSError, ValueError, RecursionError):
        return []
    is_ours = isinstance(manifest, dict) and PLAIN in manifest and all(map(is_plain_name, manifest))
    return [*manifest, MANIFEST] if is_ours else []


def holds_checkpoint(checkpoints: Path) -> bool:
    return any(own_files(path) for path in checkpoints.glob("step=*"))


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint; what is none, a link, and files that somebody put into its folder stay.

    At no moment is half of one there under its name, except beside such files.
    """
    names = own_files(checkpoint)
    if not names or checkpoint.is_symlink():
        return
    folders = {path.name for path in checkpoint.iterdir() if path.is_dir()}  # of nobody's checkpoint
    if not folders and {path.name for path in checkpoint.iterdir()} <= set(names):
        hidden = checkpoint.with_name(f".dropped-{checkpoint.name}")
        delete(hidden)
        os.replace(checkpoint, hidden)
        delete(hidden)
        return
    for name in sorted(set(names) - folders, key=lambda name: name == MANIFEST):  # tells whose they are: the last to go
        delete(checkpoint / name)


def keep_foreign_files(old: Path, new: Path) -> None:
    """Delete a checkpoint that `new` replaces; what else lay beside its files goes on in `new`."""
    names = own_files(old)
    for path in old.iterdir() if names else ():
        if path.name not in names and not (new / path.name).exists():
            os.replace(path, new / path.name)
    delete(old)


def remove_checkpoints(checkpoints: Path) -> None:
    """Delete every checkpoint in a folder with `last` and `best`, and nothing else."""
    remove_unfinished(checkpoints)
    for path in checkpoints.glob("step=*"):
        remove_checkpoint(path)
    for alias in ("last", "best"):
        if (checkpoints / alias).is_symlink():
            (checkpoints / alias).unlink()


def remove_unfinished(checkpoints: Path) -> None:
    """Delete what writers that were killed have left."""
    for pattern in (".step=*", ".old-step=*", ".dropped-step=*", ".last-*", ".best-*"):
        for path in checkpoints.glob(pattern):
            delete(path)
