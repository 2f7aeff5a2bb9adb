"""The list, stored in a run folder, of the files that runs wrote there. Nothing else is ever deleted or overwritten."""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.files import is_plain_name, read_text
from lmmods.recipe.classes import declared
from lmmods.recipe.files import read_recipe
from lmmods.runs.atomic import write_json
from lmmods.runs.checkpoint_files import holds_checkpoint, remove_checkpoints
from lmmods.runs.inside import OWNER, check_links, delete, inside
from lmmods.runs.loggers import logger_paths

# ---------------------------------------------------------------------------------------------------------------------
# Files of a run in a folder without that list, of an earlier version: recognised by name and content.

# Names at the top of the folder of any run.
FILES = ("config.yaml", "data_report.json", "metrics.csv", "metrics.json", "samples.jsonl", "resumes.jsonl",
         "loss.png", "completed", "predictions.jsonl", "evaluate.json")
# Files that single tasks write there.
RESULTS = tuple(dict.fromkeys(name for task in declared("model").values() for name in task.own_files))
# Files that exports write: models, adapters, tokenizers, card and curves.
EXPORTED = re.compile(
    r"(config|generation_config|adapter_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json"
    r"|(model|adapter_model)(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.(jinja|json)|README\.md|loss\.png")


def recognised(root: Path) -> set[str]:
    """Return the paths of a run without that list, recognised by its recipe and checkpoints; none without a run."""
    recipe = _recipe(root)
    has_checkpoint = holds_checkpoint(root / "checkpoints")
    if not (recipe and (root / "data_report.json").is_file()) and not has_checkpoint:
        return set()
    task = declared("model").get(recipe["model"].get("class_path", "") if recipe else "")
    found = {name for name in (*FILES, *(task.own_files if task else ())) if (root / name).is_file()}
    if has_checkpoint:
        found.add("checkpoints")
    found |= {name for name in (".model", ".publish") if (root / name).is_dir()}  # incomplete exports
    found |= {"manifest.json"} if _is_manifest(root / "manifest.json") else set()
    return found | _exported(root) | logger_paths(recipe, root)


def _is_manifest(path: Path) -> bool:
    """True if a run wrote this file; the user may have one of the same name."""
    try:
        return {"starts", "end"} <= json.loads(read_text(path)).keys()
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _recipe(root: Path) -> dict[str, Any]:
    """Return config.yaml if a run wrote it, else {}."""
    try:
        recipe = read_recipe(root / "config.yaml")
    except UserError:
        return {}
    has_parts = all(isinstance(recipe.get(part), dict) and "init_args" in recipe[part] for part in ("model", "data"))
    return recipe if has_parts and isinstance(recipe.get("trainer"), dict) else {}


def _exported(root: Path) -> set[str]:
    """Return model/ and its exported files if its card is one of this program."""
    card = root / "model" / "README.md"
    try:
        is_ours = re.search(r"^- lmmods$", read_text(card).split("\n---")[0], re.M)
    except (OSError, ValueError):
        return set()
    return {"model", *(f"model/{path.name}" for path in card.parent.iterdir() if EXPORTED.fullmatch(path.name))
            } if is_ours else set()


LIST = ".run-files.json"
# All that commands write at the top of a run folder. For model and wandb the list also holds their content.
NAMES = (*FILES, *RESULTS, "manifest.json", "checkpoints", "model", "rollouts", "wandb", ".model", ".publish",
         ".rollouts")
FOLDERS = ("checkpoints", "model", "rollouts", "wandb")
UNDER_WAY = (".model", ".publish", ".rollouts", "model/.new")  # folders being written, without files of the user


class RunFiles:
    """The list of one run folder: relative paths, each recorded before it is created.

    A folder of an earlier version has no list; its run's files are recognised by its recipe and checkpoints.
    """

    def __init__(self, root: Path):
        self.root, self.path = root, root / LIST
        self._turn = threading.Lock()  # the thread that writes checkpoints claims paths too

    def entries(self) -> set[str]:
        """Return all paths that runs wrote. Raises UserError if the list is damaged."""
        if not self.path.exists():
            return recognised(self.root)
        try:
            paths = {str(path) for path in json.loads(read_text(self.path))["paths"]}
            if foreign := sorted(path for path in paths if not _is_a_runs(path)):
                raise ValueError(f"no run writes {foreign[0]!r}")
            return paths
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"{self.path} is damaged ({error}), so what runs wrote into this folder is not known. "
                            "Delete it; the run is then recognised by its config.yaml and checkpoints.") from error

    def claim(self, *paths: str) -> None:
        """Record paths that are about to be written. Raises UserError: a file that no run wrote is in the way."""
        with self._turn:
            known = self.entries()
            for path in paths:
                if path not in known and _is_taken(self.root / path):
                    raise UserError(f"{self.root / path} was written by no run, so no run may write over it. Move it, "
                                    "or choose another trainer.default_root_dir.")
            self._write(known | set(paths))

    def foreign_names(self) -> list[str]:
        """Return names that runs need but that files of others have."""
        known = self.entries()
        return [name for name in NAMES if name not in known and _is_taken(self.root / name)]

    def inside(self, folder: str) -> set[str]:
        """Return the listed paths in a folder, relative to it."""
        return {path.removeprefix(f"{folder}/") for path in self.entries() if path.startswith(f"{folder}/")}

    def drop(self, *paths: str) -> None:
        """Delete listed files, and remove them from the list."""
        for path in paths:
            self._delete(path)
        with self._turn:
            self._write(self.entries() - set(paths))

    def delete(self) -> list[Path]:
        """Delete everything listed. Returns files in the run's folders that are not the run's; they are kept."""
        known = self.entries()
        check_links(self.root, NAMES)
        self._write(known)
        for path in sorted(known, key=lambda path: (-path.count("/"), path)):
            self._delete(path)
        left = {path for path in known if path in FOLDERS and (self.root / path).is_dir()}
        self._write(left)
        return [each for path in sorted(left) for each in sorted((self.root / path).iterdir()) if each.name != OWNER]

    def _delete(self, path: str) -> None:
        top, _, rest = path.partition("/")
        target = inside(self.root / top, rest) if rest else self.root / top
        if path in UNDER_WAY:
            delete(target)
        elif top == "wandb" and rest:
            # Path.glob skips broken links, and `latest-run` is one once its target is deleted: so glob only `*`.
            for each in list(target.parent.glob(rest)) if "*" in rest else [target]:
                delete(each)
        elif path == "checkpoints":
            remove_checkpoints(target)
            _delete_if_empty(target)
        elif path == "rollouts":
            remove_rollouts(target)
            _delete_if_empty(target)
        elif target.is_dir() and not target.is_symlink():
            _delete_if_empty(target)
        elif path not in FOLDERS:  # a link of these names is the user's and is kept
            delete(target)

    def _write(self, paths: set[str]) -> None:
        if not paths:
            self.path.unlink(missing_ok=True)
        elif not self.path.exists() or paths != self.entries():
            write_json(self.path, {"paths": sorted(paths)})


ROLLOUT = re.compile(r"step=(\d+)\.(jsonl|safetensors)")
UNFINISHED_ROLLOUT = re.compile(r"\.step=\d+\.(jsonl|safetensors)-[0-9a-f]{16}")  # left by a kill, see `atomic`


def remove_rollouts(folder: Path, after: int = -1) -> None:
    """Delete the rollouts in a folder that were drawn after more than `after` steps, and unfinished files."""
    for path in list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        found = ROLLOUT.fullmatch(path.name)
        if found and int(found[1]) > after or UNFINISHED_ROLLOUT.fullmatch(path.name):
            delete(path)


def _is_a_runs(path: str) -> bool:
    """True if runs write this path. The list is not trusted: it may come from anybody."""
    top, _, rest = path.partition("/")
    parts = rest.split("/")
    return path in NAMES or all(map(is_plain_name, parts)) and (top == "model" or top == "wandb" and len(parts) == 1)


def _is_taken(path: Path) -> bool:
    """True if something that could be lost has this path; not an empty folder, or the user's link to one."""
    return os.path.lexists(path) and not (path.is_dir() and {each.name for each in path.iterdir()} <= {OWNER})


def _delete_if_empty(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and not os.path.ismount(folder) and not any(folder.iterdir()):
        folder.rmdir()
