"""The run folder: its names, atomic writes, and the rules by which runs start, resume and are kept apart.

Both engines write the same folder. No torch, no jax.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from lmmods.errors import UserError

CHECKPOINT_PREFIX = "step="
_CHECKPOINT_NAME = re.compile(r"step=[0-9]{1,18}(\+[0-9]{1,9})?")


class RunFolder:
    """Paths and rules of one run.

    Args:
        root: `trainer.default_root_dir`.
    """

    OWN_FILES = ("config.yaml", "data_report.json", "metrics.csv", "metrics.json", "predictions.jsonl", "loss.png",
                 "predictions.json", "nbest_predictions.json", "null_odds.json",
                 "samples.jsonl", "resumes.jsonl", "evaluate.json", "completed")
    OWN_FOLDERS = ("checkpoints", "model", "wandb")

    def __init__(self, root: str | os.PathLike):
        self.root = Path(root)
        self.config = self.root / "config.yaml"
        self.data_report = self.root / "data_report.json"
        self.metrics_csv = self.root / "metrics.csv"
        self.metrics_json = self.root / "metrics.json"
        self.predictions = self.root / "predictions.jsonl"
        self.samples = self.root / "samples.jsonl"
        self.resumes = self.root / "resumes.jsonl"
        self.loss_png = self.root / "loss.png"
        self.checkpoints = self.root / "checkpoints"
        self.model = self.root / "model"
        self.completed = self.root / "completed"

    # Starting --------------------------------------------------------------------------------------------------------

    def check_can_start(self, overwrite: bool) -> None:
        """Refuse to start a fresh run over another one. Raises UserError; writes nothing that stays."""
        self._check_writable()
        if overwrite or not self.holds_run():
            return
        if self.completed.exists():
            raise UserError(f"{self.root} holds a finished run. Choose another trainer.default_root_dir, "
                            "or start again with --overwrite true (its files are then deleted).")
        last = self.find("last")
        remedy = "go on with --ckpt_path last, or start again with --overwrite true (its files are then deleted)"
        if last is None:
            remedy = "it saved no checkpoint yet; start again with --overwrite true (its files are then deleted)"
        raise UserError(f"{self.root} holds an unfinished run{f' ({last.name})' if last else ''}: {remedy}.")

    def check_can_resume(self, checkpoint: Path, overwrite: bool) -> None:
        """Refuse to resume over another run, or behind later checkpoints of the same run, unless they may go."""
        if not self._owns(checkpoint):
            return self.check_can_start(overwrite)
        self._check_writable()
        later = self._later_than(checkpoint)
        if later and not overwrite:
            raise UserError(f"{self.root} holds later checkpoints than {checkpoint.name} ({later[-1].name}). Resume "
                            "from --ckpt_path last, or add --overwrite true (the later ones are then deleted).")

    def begin(self, checkpoint: Path | None) -> None:
        """Make the folder ready: empty of an earlier run, or of what came after `checkpoint`."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.completed.unlink(missing_ok=True)
        if checkpoint is not None and self._owns(checkpoint):
            for folder in (*self._later_than(checkpoint), *self.checkpoints.glob(".*")):
                shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink()
            return
        for name in self.OWN_FILES:
            (self.root / name).unlink(missing_ok=True)
        for name in self.OWN_FOLDERS:
            if (self.root / name).is_dir():
                shutil.rmtree(self.root / name)

    def holds_run(self) -> bool:
        return any((self.root / name).exists() for name in ("config.yaml", "checkpoints", "metrics.csv"))

    def _check_writable(self) -> None:
        parent = next(p for p in (self.root, *self.root.absolute().parents) if p.exists())
        if not parent.is_dir():
            raise UserError(f"trainer.default_root_dir is {self.root}, but {parent} is a file. Choose another folder.")
        probe = parent / f".writable-{os.getpid()}"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(f"trainer.default_root_dir is {self.root}, but {parent} cannot be written "
                            f"({error.strerror}). Choose another folder.") from error

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def checkpoint(self, name: str) -> Path:
        return self.checkpoints / name

    def names(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        return checkpoint_names(self.checkpoints)

    def find(self, alias: str) -> Path | None:
        """The checkpoint that `last` or `best` stands for.

        The newest is the last even where a run died before the link was set on it.
        """
        if alias == "last":
            return self.checkpoint(self.names()[-1]) if self.names() else None
        link = self.checkpoints / alias
        return link.resolve() if link.exists() else None

    def resolve(self, ckpt_path: str) -> Path:
        """The checkpoint folder that `--ckpt_path` names: `last`, `best`, a step number or a path.

        Raises:
            UserError: There is none.
        """
        if ckpt_path in ("last", "best"):
            found = self.find(ckpt_path)
        elif ckpt_path.isdigit():
            found = self.checkpoint(checkpoint_name(int(ckpt_path)))
        else:
            found = Path(ckpt_path).resolve()
        if found is None or not found.is_dir():
            here = ", ".join(self.names()) or "none"
            raise UserError(f"--ckpt_path {ckpt_path}: there is no such checkpoint (in {self.checkpoints}: {here}).")
        return found

    def point(self, alias: str, checkpoint: Path) -> None:
        """Let `last` or `best` stand for a checkpoint, in one step."""
        link = self.checkpoints / alias
        temporary = self.checkpoints / f".{alias}-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(checkpoint.name)
        os.replace(temporary, link)

    def drop_checkpoint(self, name: str) -> None:
        """Delete a checkpoint; at no moment is half of one there under its name."""
        hidden = self.checkpoint(f".dropped-{name}-{os.getpid()}")
        os.replace(self.checkpoint(name), hidden)
        hidden.unlink() if hidden.is_symlink() else shutil.rmtree(hidden)

    def _owns(self, checkpoint: Path) -> bool:
        return checkpoint.parent.resolve() == self.checkpoints.resolve()

    def _later_than(self, checkpoint: Path) -> list[Path]:
        position = checkpoint_position(checkpoint.name)
        return [self.checkpoint(name) for name in self.names() if checkpoint_position(name) > position]

    def write_start(self, recipe: dict[str, Any], report: dict[str, Any]) -> None:
        """Write what a run is made of: its whole recipe and what its data turned out to be."""
        if recipe:
            write_text(self.config, as_yaml(recipe))
        write_json(self.data_report, report)

    # Results ---------------------------------------------------------------------------------------------------------

    def show_curves(self) -> None:
        """Put the curves that lie beside the model where one looks for them."""
        if (self.model / "loss.png").exists():
            shutil.copyfile(self.model / "loss.png", self.loss_png)

    def merge_metrics(self, metrics: dict[str, float]) -> None:
        """Add final numbers to metrics.json."""
        known = json.loads(self.metrics_json.read_text()) if self.metrics_json.exists() else {}
        write_json(self.metrics_json, {**known, **metrics})

    def write_predictions(self, found: Any) -> str:
        """Write `rows`, `files` and `scores` of predict; returns what to say of it."""
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows]
        write_text(self.predictions, "".join(lines))
        for name, content in found.files.items():
            write_json(self.root / name, content)
        scores = {f"predict/{name}": value for name, value in found.scores.items()}
        self.merge_metrics(scores)
        return (f"Wrote {len(lines)} rows to {self.predictions}. "
                + "  ".join(f"{name} {value:.4g}" for name, value in scores.items()))


def checkpoint_name(step: int, open_batches: int = 0) -> str:
    """`step=50`, or `step=50+3` where 3 micro-batches of the next step are done."""
    return f"{CHECKPOINT_PREFIX}{step}" + (f"+{open_batches}" if open_batches else "")


def checkpoint_names(folder: Path) -> list[str]:
    """Names of the checkpoints in a folder, oldest first; what is called otherwise is none."""
    names = [path.name for path in folder.glob(f"{CHECKPOINT_PREFIX}*")
             if _CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(names, key=checkpoint_position)


def checkpoint_position(name: str) -> tuple[int, int]:
    """(optimiser step, micro-batches since) of a checkpoint's name."""
    step, _, open_batches = name.removeprefix(CHECKPOINT_PREFIX).partition("+")
    return int(step), int(open_batches or 0)


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:  # the disk is full: no half of it stays
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


def as_yaml(recipe: dict[str, Any]) -> str:
    """A recipe as config.yaml holds it."""
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def commit_folder(temporary: Path, final: Path) -> None:
    """Move a finished folder to its name after its files have reached the disk; an older one there is replaced."""
    for path in (*temporary.rglob("*"), temporary):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if final.exists():
        old = final.with_name(f".old-{final.name}-{os.getpid()}")
        os.replace(final, old)
        os.replace(temporary, final)
        shutil.rmtree(old)
    else:
        os.replace(temporary, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
