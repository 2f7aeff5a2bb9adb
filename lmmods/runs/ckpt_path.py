"""Checks of `--ckpt_path`: what a path that is no checkpoint is instead, and whether a run can write its files."""

import os
import re
from pathlib import Path

from lmmods.core.errors import UserError
from lmmods.recipe.values import A_CHECKPOINT

CHECKPOINT_NAME = re.compile(r"step=[0-9]{1,18}(\+[0-9]{1,9})?")


def place_of(text: str) -> Path | None:
    """Return the path that a text names; None if it does not exist or cannot be a path."""
    try:
        path = Path(text).resolve()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL in it, a cycle of links
        return None


def refuse_foreign(asked: str, path: Path) -> None:
    """Raise UserError, naming what the path is, unless it may be a checkpoint."""
    if path.is_dir() and ((path / "state.json").exists() or path.name.startswith("step=")):
        return  # whole or damaged: shown by reading it
    raise UserError(f"--ckpt_path {asked} is {_what(path)}, but must be last, best, a step number, or {A_CHECKPOINT}.")


def _what(path: Path) -> str:
    if not path.is_dir():
        return ("a file of weights (name the folder it is in as model.pretrained or model.adapter to start from it)"
                if path.suffix == ".safetensors" else "a single file, as other programs write")
    kinds = {"checkpoints": "a run folder", "last": "the checkpoints of a run",
             "trainer_state.json": "a checkpoint of transformers' Trainer (model.pretrained or model.adapter starts "
                                   "from its weights)",
             "adapter_config.json": "an adapter (model.adapter starts from it)",
             "config.json": "a model folder (model.pretrained starts from it)"}
    return next((kind for name, kind in kinds.items() if os.path.lexists(path / name)), "a folder without a state.json")


def check_places(root: Path, checkpoints: Path) -> None:
    """Refuse to resume in a run folder if something of another kind has a name that the run will write.

    Raises:
        UserError: A folder instead of a file, a file instead of a checkpoint, a copy of one instead of the link to it.
    """
    for name in ("config.yaml", "data_report.json", "manifest.json", "metrics.csv", "metrics.json", "samples.jsonl",
                 "resumes.jsonl", "loss.png", "completed"):
        _refuse(root / name, (root / name).is_file(), "a file")
    for alias in ("last", "best"):
        link = checkpoints / alias
        _refuse(link, link.is_symlink(), "a link to a checkpoint (a copy of it is none)")
    for path in checkpoints.glob("step=*"):
        is_foreign = not CHECKPOINT_NAME.fullmatch(path.name)
        _refuse(path, is_foreign or path.is_dir(), "the folder of a checkpoint")


def _refuse(path: Path, is_right: bool, wanted: str) -> None:
    if os.path.lexists(path) and not is_right:
        raise UserError(f"{path} is where the run writes {wanted}. Move it away, or delete it.")
