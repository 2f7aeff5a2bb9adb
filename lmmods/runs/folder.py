"""The run folder: its files, and the checks before a run starts or resumes in it.

Both engines write the same folder. No torch, no jax.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.recipe.classes import named_models
from lmmods.recipe.files import as_yaml, read_recipe
from lmmods.recipe.values import A_CHECKPOINT, check_ckpt_path
from lmmods.runs.eval_results import eval_results, write_eval_results
from lmmods.runs.lock import FILE as LOCK
from lmmods.runs.lock import FolderLock
from lmmods.runs.loggers import logger_paths
from lmmods.runs.repair import repair_numbers
from lmmods.runs.run_files import (
    FILES,
    LIST,
    NAMES,
    REPLACED,
    RESULTS,
    STEP_FOLDERS,
    RunFiles,
    check_links,
    commit_files,
    commit_folder,
    copy_file,
    delete,
    files_in,
    fresh_folder,
    remove_checkpoint,
    remove_steps,
    remove_unfinished,
    restore,
    write_json,
    write_text,
)

if TYPE_CHECKING:
    from lmmods.data.codec import Predictions  # which imports torch

CHECKPOINT_PREFIX = "step="
CHECKPOINT_NAME = re.compile(r"step=[0-9]{1,18}(\+[0-9]{1,9})?")


class RunFolder:
    """Paths and rules of one run. `root` is `trainer.default_root_dir`."""

    def __init__(self, root: str | os.PathLike):
        self.root = Path(root)
        self.config = self.root / "config.yaml"
        self.data_report = self.root / "data_report.json"
        self.manifest = self.root / "manifest.json"
        self.metrics_csv = self.root / "metrics.csv"
        self.metrics_json = self.root / "metrics.json"
        self.predictions = self.root / "predictions.jsonl"
        self.samples = self.root / "samples.jsonl"
        self.classes = self.root / "classes.json"
        self.resumes = self.root / "resumes.jsonl"
        self.loss_png = self.root / "loss.png"
        self.checkpoints = self.root / "checkpoints"
        self.rollouts = self.root / "rollouts"
        self.model = self.root / "model"
        self.completed = self.root / "completed"
        self.files, self._lock = RunFiles(self.root), FolderLock(self.root)
        self.problem: UserError | None = None  # error of the first process, which all processes then raise

    # Ownership -------------------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, command: str, check: Callable[[], None] = lambda: None, is_first: bool = True,
             stores_error: bool = False) -> Iterator[None]:
        """Lock the folder while a command runs; the command's first process holds the lock.

        Args:
            command: Name of the command, for the message to other processes that want the folder.
            check: Checks whether the command may work in the folder; raises UserError.
            is_first: True in the first process of the command.
            stores_error: Store the error as `problem` instead of raising it, because other processes wait for it.
        """
        try:
            try:
                if is_first:
                    check_writable(self.root)
                    check_links(self.root, (*NAMES, LIST, LOCK, f"{REPLACED}model"))
                    # Before `check`, so that no other run changes the folder between its checks and this run.
                    self._lock.take(command)
                    # Finish or undo replacements that a killed process did not complete.
                    for old in (*self.root.glob(f"{REPLACED}model"), *self.checkpoints.glob(f"{REPLACED}step=*")):
                        restore(old)
                    check()
            except UserError as error:
                if not stores_error:
                    raise
                self.problem = error
            yield
        finally:
            self._lock.release()

    def check_fit(self, ckpt_path: str | None, overwrite: bool, recipe: dict[str, Any], stop_at: int | None = None
                  ) -> None:
        """Raise UserError if training would overwrite another run or foreign files, or stop before it starts."""
        check_inputs(self.root, NAMES, recipe)
        checkpoint = find_checkpoint_to_resume(self, ckpt_path)
        if stop_at is not None:
            name = checkpoint.name if checkpoint is not None else ""
            step = checkpoint_position(name)[0] if CHECKPOINT_NAME.fullmatch(name) else 0
            if stop_at <= step:
                raise UserError(f"--stop_at is {stop_at}, but must be more than {step}"
                                + (", the step of the checkpoint." if step else "."))
        if checkpoint:
            self.check_can_resume(checkpoint, overwrite)
        else:
            # "auto" restarts an unfinished run that has no checkpoint, without asking.
            self.check_can_start(overwrite or ckpt_path == "auto" and not self.completed.exists())

    def check_results(self, recipe: dict[str, Any]) -> None:
        """Raise UserError if predict would overwrite its own inputs."""
        check_inputs(self.root, ("predictions.jsonl", *RESULTS), recipe)

    # Starting --------------------------------------------------------------------------------------------------------

    def check_can_start(self, overwrite: bool) -> None:
        """Raise UserError if a new run would overwrite another one or foreign files. Leaves no file behind."""
        check_writable(self.root)
        if not overwrite and self.has_run() and {"config.yaml", "checkpoints"} & self.files.entries():
            restart, last = "start again with --overwrite true, which deletes its files", self.find("last")
            if self.completed.exists():
                raise UserError(f"{self.root} contains a finished run. Set another trainer.default_root_dir, or "
                                f"{restart}.")
            if last:
                raise UserError(f"{self.root} contains an unfinished run ({last.name}). Resume it with --ckpt_path "
                                f"last, or {restart}.")
            raise UserError(f"{self.root} contains an unfinished run without a checkpoint. Set another "
                            f"trainer.default_root_dir, or {restart}.")
        check_names(self.root, self.files)

    def check_can_resume(self, checkpoint: Path, overwrite: bool) -> None:
        """Raise UserError if a resumed run would overwrite another run or, without `overwrite`, later checkpoints."""
        if not self._owns(checkpoint):
            return self.check_can_start(overwrite)
        check_writable(self.root)
        check_kinds(self.root, self.checkpoints)
        check_names(self.root, self.files)
        later = self._later_than(checkpoint)
        if later and not overwrite:
            raise UserError(f"{self.root} contains later checkpoints than {checkpoint.name} ({later[-1].name}). Resume "
                            "with --ckpt_path last, or add --overwrite true, which deletes the later ones.")

    def begin(self, checkpoint: Path | None) -> None:
        """Prepare the folder: delete an earlier run, or everything it wrote after `checkpoint`."""
        self.root.mkdir(parents=True, exist_ok=True)
        # A checkpoint of another folder starts a new run here.
        if checkpoint is not None and self._owns(checkpoint):
            self.completed.unlink(missing_ok=True)
            remove_unfinished(self.checkpoints)
            for folder in self._later_than(checkpoint):
                remove_checkpoint(folder)
            for name in STEP_FOLDERS:
                remove_steps(self.root / name, after=checkpoint_position(checkpoint.name)[0])
        elif foreign := self.files.delete():
            print(f"Kept, because no run wrote them: {', '.join(map(str, foreign))}.", flush=True)
        self.files.claim("config.yaml", "data_report.json", "metrics.csv", "metrics.json", "checkpoints")

    def has_run(self) -> bool:
        return any((self.root / name).exists() for name in ("config.yaml", "checkpoints", "metrics.csv"))

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def checkpoint(self, name: str) -> Path:
        return self.checkpoints / name

    def names(self) -> list[str]:
        """Return the names of the complete checkpoints, oldest first."""
        return checkpoint_names(self.checkpoints)

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        return [checkpoint_position(name)[0] for name in self.names()]

    def find(self, alias: str) -> Path | None:
        """Return the checkpoint that `last` or `best` refers to.

        `last` is the newest one, even if a run was killed before it updated the link.
        """
        if alias == "last":
            return self.checkpoint(self.names()[-1]) if self.names() else None
        link = self.checkpoints / alias
        return link.resolve() if link.exists() else None

    def resolve(self, ckpt_path: str) -> Path:
        """Return the checkpoint folder that `--ckpt_path` names: `last`, `best`, a step number or a path.

        Raises:
            UserError: It does not exist, or the path is not a checkpoint.
        """
        check_ckpt_path(ckpt_path)
        checkpoint = None
        if ckpt_path in ("last", "best"):
            checkpoint = self.find(ckpt_path)
        elif CHECKPOINT_NAME.fullmatch(f"{CHECKPOINT_PREFIX}{ckpt_path.removeprefix(CHECKPOINT_PREFIX)}"):
            checkpoint = next((self.checkpoint(name) for name in self.names()
                               if checkpoint_position(name) == checkpoint_position(ckpt_path)), None)
        else:
            with suppress(OSError, ValueError, RuntimeError):  # too long, a NUL in it, a cycle of links
                checkpoint = path if (path := Path(ckpt_path).resolve()).exists() else None
        if checkpoint is None or not checkpoint.exists():
            available = ", ".join(self.names()) or "none"
            raise UserError(f"--ckpt_path {ckpt_path} does not exist. Use a checkpoint of {self.checkpoints}: "
                            f"{available}.")
        reject_other_path(ckpt_path, checkpoint)
        return checkpoint

    def point(self, alias: str, checkpoint: Path) -> None:
        """Point the link `last` or `best` at a checkpoint, atomically."""
        link = self.checkpoints / alias
        temporary = self.checkpoints / f".{alias}-{os.getpid()}"
        delete(temporary)  # left by a killed process with the same pid
        # A symlink cannot be changed atomically: create a new one under another name, then rename it.
        temporary.symlink_to(checkpoint.name)
        os.replace(temporary, link)

    def _owns(self, checkpoint: Path) -> bool:
        return checkpoint.parent.resolve() == self.checkpoints.resolve()

    def _later_than(self, checkpoint: Path) -> list[Path]:
        position = checkpoint_position(checkpoint.name)
        return [self.checkpoint(name) for name in self.names() if checkpoint_position(name) > position]

    def write_start(self, recipe: dict[str, Any], report: dict[str, Any]) -> None:
        """Write config.yaml and data_report.json."""
        if recipe:
            self.files.claim(*logger_paths(recipe, self.root))
            write_text(self.config, as_yaml(recipe))
        write_json(self.data_report, report)

    # Results ---------------------------------------------------------------------------------------------------------

    def create_model_folder(self) -> Path:
        """Return a new folder to export into; `replace_model` turns it into model/."""
        self.files.claim("model")
        # A link or mount cannot be replaced by a rename, so export into a folder within it, on its file system.
        is_fixed = self.model.is_symlink() or self.model.is_mount()
        return self._new_folder("model/.new" if is_fixed else ".model")

    def create_upload_folder(self) -> Path:
        """Return a new folder for a copy of the model that is deleted after its upload."""
        return self._new_folder(".publish")

    def _new_folder(self, name: str) -> Path:
        self.files.claim(name)
        return fresh_folder(self.root / name)

    def replace_model(self, exported: Path) -> None:
        """Replace model/ with an exported folder, keeping foreign files.

        Raises:
            UserError: A foreign file has the name of an exported one.
        """
        old, new = self.files.inside("model"), files_in(exported)
        self.files.claim(*(f"model/{name}" for name in new))
        # A rename would lose a mount or foreign files, so files are moved one by one into such a folder.
        if exported.parent == self.model or files_in(self.model) - old:
            commit_files(exported, self.model)
        else:
            commit_folder(exported, self.model)
        self.files.drop(*(f"model/{name}" for name in old - new))

    def complete(self) -> None:
        """Copy the loss curves from model/ to the top of the run folder, and mark the run as completed."""
        self.files.claim("loss.png", "completed")
        if (self.model / "loss.png").exists():
            copy_file(self.model / "loss.png", self.loss_png)
        write_text(self.completed, "")

    def was_complete(self, step: int, max_steps: int, max_epochs: int | float | None, stopped: list[str],
                     out_of_time: bool = False) -> bool:
        """Return whether a run that is resumed with nothing left to train was complete, and report it.

        Args:
            stopped: Why each callback stopped the run; empty strings for callbacks that did not.
            out_of_time: True if `trainer.max_time` has passed.
        """
        if any(stopped):
            why = f"{' '.join(filter(None, stopped))} Raise its patience, or remove the callback, to train longer."
        elif max_steps not in (-1, None) and step >= max_steps:
            why = f"trainer.max_steps is {max_steps}. Raise it to train longer."
        elif out_of_time:
            why = "trainer.max_time has passed. Raise it to train longer."
        else:
            why = f"trainer.max_epochs is {max_epochs}. Raise it to train longer."
        is_complete = self.completed.exists()
        say(f"{self.root} already contains a run that finished at step {step}. Nothing was changed: {why}"
            if is_complete else f"{self.root} contains a run that stopped at step {step}, before its end. Writing its "
            f"results now: {why}")
        return is_complete

    def write_files(self, files: dict[str, Any]) -> None:
        """Write results as JSON files, from contents by file name."""
        self.files.claim(*files)
        for name, content in files.items():
            write_json(self.root / name, content)

    def merge_metrics(self, metrics: dict[str, float]) -> None:
        """Merge metrics into metrics.json and, if the run has finished, update the scores in its model's folder."""
        self.files.claim("metrics.json")
        merged = {**repair_numbers(self.metrics_json), **metrics}
        write_json(self.metrics_json, merged)
        if self.completed.exists() and self.config.is_file():
            files = eval_results(read_recipe(self.config), merged, {name.partition("/")[0] for name in metrics})
            self.files.claim(*(f"model/{name}" for name in files))
            write_eval_results(self.model, files)

    def write_predictions(self, predictions: "Predictions") -> str:
        """Write the rows, files and scores of predict. Returns a message for the user."""
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in predictions.rows]
        self.files.claim("predictions.jsonl")
        write_text(self.predictions, "".join(lines))
        self.write_files(predictions.files)
        scores = {f"predict/{name}": value for name, value in predictions.scores.items()}
        self.merge_metrics(scores)
        return (f"Wrote {len(lines)} rows to {self.predictions}. "
                + "  ".join(f"{name} {value:.4g}" for name, value in scores.items()))


def find_checkpoint_to_resume(folder: RunFolder, ckpt_path: str | None) -> Path | None:
    """Return the checkpoint that fit resumes from; None if it starts a run, as `auto` does without a checkpoint.

    Raises:
        UserError: See `RunFolder.resolve`.
    """
    if ckpt_path is None:
        return None
    return folder.find("last") if ckpt_path == "auto" else folder.resolve(ckpt_path)


def checkpoint_name(step: int) -> str:
    """Return `step=50`."""
    return f"{CHECKPOINT_PREFIX}{step}"


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, oldest first. Folders with other names are ignored."""
    names = [path.name for path in folder.glob(f"{CHECKPOINT_PREFIX}*")
             if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(names, key=checkpoint_position)


def checkpoint_position(name: str) -> tuple[int, int]:
    """Return (optimiser step, micro-batches since) from a checkpoint's name.

    Earlier versions saved inside steps, too: `step=50+3` was saved after 3 micro-batches of the next step.
    """
    step, _, open_batches = name.removeprefix(CHECKPOINT_PREFIX).partition("+")
    return int(step), int(open_batches or 0)


# ---------------------------------------------------------------------------------------------------------------------
# Check that a run does not overwrite its own inputs.

DATA_KEYS = ("tokenizer", "source", "val_source", "test_source", "predict_source", "decontaminate")


def check_inputs(root: Path, names: Iterable[str], recipe: dict[str, Any]) -> None:
    """Raise UserError if a recipe reads files that its own run would replace.

    Args:
        names: Names that the run writes in `root`.
    """
    written = {name: (root / name).resolve() for name in names}
    for key, path in _paths(recipe):
        if not os.path.lexists(path):  # e.g. an id on the hub
            continue
        for name, target in written.items():
            if path.resolve() == target or target in path.resolve().parents:  # the target or a path in it
                raise UserError(f"{key} is {path}, but a run in {root} overwrites {name}. Set another "
                                "trainer.default_root_dir, or move the input to another folder.")


def _paths(recipe: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield recipe keys with the paths they name; for a glob pattern, the folder before its first wildcard."""
    model, data = ((recipe.get(block) or {}).get("init_args") or {} for block in ("model", "data"))
    for named in named_models(model):
        if named.last != "config":
            yield f"model.{named.key}", _before_pattern(named.name)
    for key in DATA_KEYS:
        for text in _names(data.get(key)):
            yield f"data.{key}", _before_pattern(text)
    for text in _names((recipe.get("mmlu") or {}).get("source")):
        yield "mmlu.source", _before_pattern(text)


def _names(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _names(item)
    elif isinstance(value, dict):
        yield from _names(value.get("path"))


def _before_pattern(text: str) -> Path:
    parts = Path(text).expanduser().parts
    end = next((index for index, part in enumerate(parts) if any(wildcard in part for wildcard in "*?[")), len(parts))
    return Path(*parts[:end])


# ---------------------------------------------------------------------------------------------------------------------
# Checks that a run can write its files in a folder.

def check_writable(root: Path) -> None:
    """Raise UserError if a folder cannot be created or written. Leaves nothing behind."""
    parent = next(p for p in (root, *root.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise UserError(f"trainer.default_root_dir is {root}, but {parent} is a file. Use another folder.")
    try:
        with tempfile.NamedTemporaryFile(prefix=".writable-", dir=parent):
            pass
    except OSError as error:
        raise UserError(f"trainer.default_root_dir is {root}, but {parent} cannot be written "
                        f"({error.strerror}). Use another folder.") from error


def check_names(root: Path, files: RunFiles) -> None:
    """Raise UserError if a file that no run wrote has a name that runs write."""
    if foreign := files.foreign_names():
        raise UserError(f"{root} contains {', '.join(foreign)}, which no run wrote, but a run needs "
                        f"{'this name' if len(foreign) == 1 else 'these names'}. Move "
                        f"{'it' if len(foreign) == 1 else 'them'}, or set another trainer.default_root_dir.")


# ---------------------------------------------------------------------------------------------------------------------
# Checks of `--ckpt_path`, and of the folder of a resumed run.

def reject_other_path(ckpt_path: str, path: Path) -> None:
    """Raise UserError, describing the path, unless it may be a checkpoint."""
    if path.is_dir() and ((path / "state.json").exists() or path.name.startswith("step=")):
        return  # reading it reports damage
    raise UserError(f"--ckpt_path {ckpt_path} is {_describe(path)}, but must be last, best, a step number, or "
                    f"{A_CHECKPOINT}.")


def _describe(path: Path) -> str:
    if not path.is_dir():
        return ("a weights file (to start from it, set model.pretrained or model.adapter to its folder)"
                if path.suffix == ".safetensors" else "a single file, as other programs write")
    by_file = {"checkpoints": "a run folder", "last": "the checkpoints of a run",
               "trainer_state.json": "a checkpoint of transformers' Trainer (model.pretrained or model.adapter starts "
                                     "from its weights)",
               "adapter_config.json": "an adapter (model.adapter starts from it)",
               "config.json": "a model folder (model.pretrained starts from it)"}
    return next((description for name, description in by_file.items() if os.path.lexists(path / name)),
                "a folder without a state.json")


def check_kinds(root: Path, checkpoints: Path) -> None:
    """Check that a resumed run can write its files, checkpoints and links.

    Raises:
        UserError: A folder has the name of a file, a file the name of a checkpoint, or a copy the name of a link.
    """
    expectations = [(root / name, Path.is_file, "a file") for name in (*FILES, "manifest.json")]
    expectations += [(checkpoints / alias, Path.is_symlink, "a link to a checkpoint (a copy does not work)")
                     for alias in ("last", "best")]
    expectations += [(path, Path.is_dir, "a checkpoint folder") for path in checkpoints.glob("step=*")
                     if CHECKPOINT_NAME.fullmatch(path.name)]
    for path, is_right, expected in expectations:
        if os.path.lexists(path) and not is_right(path):
            raise UserError(f"{path} is not {expected}, which the run must write there. Move or delete it.")
