"""Atomic writes: a reader finds the old file or folder or the new one, complete, even if the writer is killed."""

import json
import os
from pathlib import Path
from typing import Any

from lmmods.runs.checkpoint_files import keep_foreign_files

REPLACED = ".replaced-"


def write_text(path: Path, text: str) -> None:
    """Replace a file's text atomically. Links are followed."""
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:  # the disk is full: leave no partial file
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_json(path: Path, value: Any) -> None:
    """Add a line to a .jsonl file, on disk when this returns."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def files_in(folder: Path) -> set[str]:
    """Paths of all files and links in `folder`, relative to it; none if there is no such folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def commit_folder(temporary: Path, final: Path) -> None:
    """Move a finished folder to its name after its files have reached the disk; an older one there is replaced."""
    sync(temporary)
    old = final.with_name(f"{REPLACED}{final.name}")
    restore(old)
    if final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    restore(old)
    _flush(final.parent)


def restore(old: Path) -> None:
    """Complete an interrupted `commit_folder`: remove the old folder if the new one is there, else put it back."""
    final = old.with_name(old.name.removeprefix(REPLACED))
    if old.is_dir() and final.exists():
        keep_foreign_files(old, final)
    elif old.is_dir():
        os.replace(old, final)


def commit_files(temporary: Path, final: Path) -> None:
    """`commit_folder` file by file, for a folder that must not be replaced: a link, a mount, one with other files."""
    sync(temporary)
    for name in sorted(files_in(temporary)):
        (final / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary / name, final / name)
    for folder in sorted((path for path in temporary.rglob("*") if path.is_dir()), reverse=True):
        folder.rmdir()
    temporary.rmdir()
    _flush(final)


def sync(folder: Path) -> None:
    """Wait until all files of a folder are on the disk."""
    for path in (*folder.rglob("*"), folder):
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
