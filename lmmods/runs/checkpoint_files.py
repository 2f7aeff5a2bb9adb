"""The files of a checkpoint folder, and how to delete them without deleting files that somebody else put there."""

import json
import os
from pathlib import Path

from lmmods.core.files import is_plain_name, read_text
from lmmods.runs.inside import delete

MANIFEST = "manifest.json"  # name of each file, with size and checksum
PLAIN = "state.json"  # everything but arrays, and where the arrays go


def own_files(checkpoint: Path) -> list[str]:
    """Return the names of the files of a checkpoint; empty if the folder is not one."""
    try:
        manifest = json.loads(read_text(checkpoint / MANIFEST))
    except (OSError, ValueError, RecursionError):
        return []
    is_ours = isinstance(manifest, dict) and PLAIN in manifest and all(map(is_plain_name, manifest))
    return [*manifest, MANIFEST] if is_ours else []


def holds_checkpoint(checkpoints: Path) -> bool:
    return any(own_files(path) for path in checkpoints.glob("step=*"))


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint. Other folders, links, and files that somebody put into its folder are kept.

    A partly deleted checkpoint never keeps its name, unless such files lie in its folder.
    """
    names = own_files(checkpoint)
    if not names or checkpoint.is_symlink():
        return
    folders = {path.name for path in checkpoint.iterdir() if path.is_dir()}  # no checkpoint has folders
    if not folders and {path.name for path in checkpoint.iterdir()} <= set(names):
        # Rename before deleting: a process killed meanwhile leaves no incomplete checkpoint under this name.
        hidden = checkpoint.with_name(f".dropped-{checkpoint.name}")
        delete(hidden)
        os.replace(checkpoint, hidden)
        delete(hidden)
        return
    # The manifest last: it lists the others.
    for name in sorted(set(names) - folders, key=lambda name: name == MANIFEST):
        delete(checkpoint / name)


def keep_foreign_files(old: Path, new: Path) -> None:
    """Delete a checkpoint that `new` replaces; move files of others from its folder to `new`."""
    names = own_files(old)
    for path in old.iterdir() if names else ():
        if path.name not in names and not (new / path.name).exists():
            os.replace(path, new / path.name)
    delete(old)


def remove_checkpoints(checkpoints: Path) -> None:
    """Delete all checkpoints in a folder and the links `last` and `best`, nothing else."""
    remove_unfinished(checkpoints)
    for path in checkpoints.glob("step=*"):
        remove_checkpoint(path)
    for alias in ("last", "best"):
        if (checkpoints / alias).is_symlink():
            (checkpoints / alias).unlink()


def remove_unfinished(checkpoints: Path) -> None:
    """Delete temporary files left by killed writers."""
    for pattern in (".step=*", ".old-step=*", ".dropped-step=*", ".last-*", ".best-*"):
        for path in checkpoints.glob(pattern):
            delete(path)
