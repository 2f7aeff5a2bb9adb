"""Why a run may not start in a folder: it cannot be written, holds another run, or files that no run wrote."""

import tempfile
from pathlib import Path

from lmmods.core.errors import UserError
from lmmods.runs.run_files import RunFiles


def check_writable(root: Path) -> None:
    """Raise UserError where a folder cannot be made or written. Leaves nothing behind."""
    parent = next(p for p in (root, *root.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise UserError(f"trainer.default_root_dir is {root}, but {parent} is a file. Choose another folder.")
    try:
        with tempfile.NamedTemporaryFile(prefix=".writable-", dir=parent):
            pass
    except OSError as error:
        raise UserError(f"trainer.default_root_dir is {root}, but {parent} cannot be written "
                        f"({error.strerror}). Choose another folder.") from error


def check_names(root: Path, files: RunFiles) -> None:
    """Raise UserError where something that no run wrote has a name that runs write."""
    if foreign := files.foreign_names():
        raise UserError(f"{root} holds {', '.join(foreign)}, which no run wrote, and a run needs "
                        f"{'this name' if len(foreign) == 1 else 'these names'}. Move them, or choose another "
                        "trainer.default_root_dir.")


def refuse_other_run(root: Path, last: Path | None, completed: bool) -> None:
    """Raise the UserError for a folder that holds a run already.

    Args:
        last: Its last checkpoint, if it has saved one.
        completed: Whether it is finished.
    """
    again = "start again with --overwrite true (its files are then deleted)"
    if completed:
        raise UserError(f"{root} holds a finished run. Choose another trainer.default_root_dir, or {again}.")
    remedy = f"go on with --ckpt_path last, or {again}" if last else f"it saved no checkpoint yet; {again}"
    raise UserError(f"{root} holds an unfinished run{f' ({last.name})' if last else ''}: {remedy}.")


def check_stop(stop_at: int, step: int) -> None:
    """Raise UserError where a run that stands at `step` is to stop there or before."""
    if stop_at <= step:
        raise UserError(f"--stop_at is {stop_at}, but must be more than {step}"
                        + (", the step of the checkpoint." if step else "."))
