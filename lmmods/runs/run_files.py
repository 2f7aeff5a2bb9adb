"""Files of a run: the rules for writing and deleting them, and functions that follow these rules.

A run only writes and deletes its own files, inside its folder. A run folder may come from anybody, for example from an
archive with links in it, so its content is not trusted:

- Inside: nothing is written or deleted through a link. New files are renamed into place, which replaces a link; folders
  are created again (`fresh_folder`); links with the name of a file are removed. Names read from a file must be plain
  names (`inside`). Only model and checkpoints may be links, and only if a file `.run-folder` in the target contains the
  path of this run folder (`check_links`). No program writes that file, and an archive cannot place it outside of
  itself, so it proves that the user made the link.
- Own: a list in the folder records each path before it is created (`RunFiles.claim`); it may only contain paths that
  runs write. The files of a checkpoint are those in its manifest.
- Complete: readers see either the old or the complete new file or folder, even if the writer is killed. Engines and
  libraries write into new folders, which `commit_folder` renames.
"""

import json
import os
import re
import secrets
import shlex
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from lmmods.core.errors import UserError
from lmmods.core.files import MAX_TABLE_BYTES, is_plain_name, read_bytes, read_text
from lmmods.recipe.classes import declared, list_all
from lmmods.recipe.files import read_recipe
from lmmods.runs.loggers import logger_paths

OWNER = ".run-folder"  # in the target of a link: the path of the run folder that owns it
MAY_BE_LINKS = ("checkpoints", "model")
REPLACED = ".replaced-"
MANIFEST = "manifest.json"  # of a checkpoint: name of each file, with size and checksum
PLAIN = "state.json"  # of a checkpoint: its content without arrays, with references to them

# ---------------------------------------------------------------------------------------------------------------------
# Inside: links and names.

def check_links(root: Path, names: Iterable[str]) -> None:
    """Raise UserError if a name that a run writes in its folder is a link that must not be followed."""
    for name in names:
        path = root / name
        if not path.is_symlink() or name in MAY_BE_LINKS and _is_owned(path, root):
            continue
        if name in MAY_BE_LINKS and path.is_dir():
            target = path.resolve()
            raise UserError(f"{path} is a link to {target}, outside of the run folder. If you made it, and only this "
                            f"run uses the target, confirm that: echo {shlex.quote(str(root.resolve()))} > "
                            f"{shlex.quote(str(target / OWNER))}. If not, delete the link (docs/runs.md).")
        raise UserError(f"{path} is a link, but a run only writes inside its folder. Remove the link, or set another "
                        "trainer.default_root_dir.")


def _is_owned(link: Path, root: Path) -> bool:
    """True if the target of a link names this run folder as its owner."""
    try:
        owner = Path(read_text(link / OWNER, max_bytes=2**16).strip())
        return owner.is_absolute() and os.path.samefile(owner, root)
    except (OSError, ValueError):
        return False


def inside(folder: Path, name: str) -> Path:
    """Join a folder with a name read from a file, such as `config.json` or `templates/tools.jinja`.

    Raises:
        UserError: It leads out of the folder.
    """
    parts = name.split("/")
    parents = [folder.joinpath(*parts[:count]) for count in range(1, len(parts))]
    if not all(map(is_plain_name, parts)) or any(parent.is_symlink() for parent in parents):
        raise UserError(f"{folder}: the file name {name!r} leads out of this folder. Delete the link, or set another "
                        "trainer.default_root_dir.")
    return folder / name


def find_escape(root: Path, target: str | os.PathLike) -> Path | None:
    """Return a path that leads out of the run folder: `target`, where a library will write, or a link in it. Or None.

    Links that `check_links` checks are skipped, and so are W&B's files of earlier starts, which are not written again.
    """
    top, start = root.resolve(), Path(target).resolve()
    if not start.is_relative_to(top):
        return Path(target)
    for folder, folders, files in os.walk(start):
        current = Path(folder)
        for name in (*folders, *files):
            path = current / name
            is_checked = current == top and name in MAY_BE_LINKS
            if path.is_symlink() and not is_checked and not path.resolve().is_relative_to(top):
                return path
        folders[:] = [name for name in folders
                      if current.name != "wandb" and not (current == top and name in MAY_BE_LINKS)]
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Complete: atomic writes, and deletions.

def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content atomically: after a crash it has all of the old content or all of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A random name, so that nobody can have placed a link there.
    temporary = path.with_name(f".{path.name[:50]}-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            # Without this, a crash after the rename could leave an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:  # for example, the disk is full
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file's text atomically. If it is a link, the link is replaced and its target does not change."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_json(path: Path, value: object) -> None:
    """Append a line to a small .jsonl file. The file is on disk when this returns."""
    # The whole file is rewritten, as an interrupted append would leave a partial line.
    before = read_bytes(path, MAX_TABLE_BYTES) if path.exists() else b""
    write_bytes(path, before + json.dumps(value, ensure_ascii=False).encode() + b"\n")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content; `target` is replaced as in `write_text`."""
    write_bytes(target, read_bytes(source, MAX_TABLE_BYTES))


def open_to_append(path: Path) -> TextIO:
    """Open a text file written by `write_text` for appending. Raises OSError if it has become a link."""
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return open(os.open(path, flags), "a", newline="", encoding="utf-8")


def files_in(folder: Path) -> set[str]:
    """Return the paths of all files and links in `folder`, relative to it; an empty set if it does not exist."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def commit_folder(temporary: Path, final: Path) -> None:
    """Rename a finished folder to its final name, replacing an older one, once its files are on disk."""
    sync(temporary)
    # A rename cannot replace a folder that is not empty, so rename the old one first. If the process is killed between
    # the two renames, `restore` renames it back at the next start.
    old = final.with_name(f"{REPLACED}{final.name}")
    restore(old)
    if final.is_symlink():
        final.unlink()
    elif final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    restore(old)
    _flush(final.parent)


def restore(old: Path) -> None:
    """Complete an interrupted `commit_folder`: delete the old folder if the new one exists, else rename it back."""
    final = old.with_name(old.name.removeprefix(REPLACED))
    if old.is_symlink():
        old.unlink()  # not created by this program
    elif old.is_dir() and final.exists():
        keep_foreign_files(old, final)
    elif old.is_dir():
        os.replace(old, final)


def commit_files(temporary: Path, final: Path) -> None:
    """Like `commit_folder`, but move each file, because the final folder is a link or a mount or has foreign files.

    Raises:
        UserError: A folder in it is a link.
    """
    sync(temporary)
    # Check all targets before the first file is moved.
    targets = {name: inside(final, name) for name in sorted(files_in(temporary))}
    for name, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary / name, target)
    # Reverse order, so that inner folders come before the outer ones.
    for folder in sorted((path for path in temporary.rglob("*") if path.is_dir()), reverse=True):
        folder.rmdir()
    temporary.rmdir()
    _flush(final)


def sync(folder: Path) -> None:
    """Flush all files of a folder to disk."""
    # Folders too, as they contain the entries of new files.
    for path in (*folder.rglob("*"), folder):
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def delete(path: Path) -> None:
    """Delete a file, a folder with its content, or a link but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fresh_folder(path: Path) -> Path:
    """Create an empty folder, deleting anything that has its name."""
    delete(path)
    path.mkdir(parents=True)
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Own: files of a checkpoint, deleted without foreign files in its folder.

def list_checkpoint_files(checkpoint: Path) -> list[str]:
    """Return the names of the files of a checkpoint; empty if the folder is not one."""
    try:
        manifest = json.loads(read_text(checkpoint / MANIFEST))
    except (OSError, ValueError, RecursionError):
        return []
    is_checkpoint = isinstance(manifest, dict) and PLAIN in manifest and all(map(is_plain_name, manifest))
    return [*manifest, MANIFEST] if is_checkpoint else []


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint. Folders that are not checkpoints, links, and foreign files in its folder are kept.

    A partly deleted checkpoint never has its name, unless there are such files.
    """
    names = list_checkpoint_files(checkpoint)
    if not names or checkpoint.is_symlink():
        return
    folders = {path.name for path in checkpoint.iterdir() if path.is_dir()}  # always foreign
    if not folders and {path.name for path in checkpoint.iterdir()} <= set(names):
        # Rename first, so that a process killed meanwhile leaves no incomplete checkpoint with this name.
        hidden = checkpoint.with_name(f".dropped-{checkpoint.name}")
        delete(hidden)
        os.replace(checkpoint, hidden)
        delete(hidden)
        return
    # The manifest last: it lists the others.
    for name in sorted(set(names) - folders, key=lambda name: name == MANIFEST):
        delete(checkpoint / name)


def keep_foreign_files(old: Path, new: Path) -> None:
    """Delete a checkpoint that `new` replaces; move foreign files from its folder to `new`."""
    names = list_checkpoint_files(old)
    for path in old.iterdir() if names else ():
        if path.name not in names and not (new / path.name).exists():
            os.replace(path, new / path.name)
    delete(old)


def remove_checkpoints(checkpoints: Path) -> None:
    """Delete all checkpoints in a folder and the links `last` and `best`, but nothing else."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Own: files of a run of an earlier version, which has no list, recognised by name and content.

# Files at the top of any run folder.
FILES = ("config.yaml", "data_report.json", "metrics.csv", "metrics.json", "samples.jsonl", "resumes.jsonl",
         "loss.png", "completed", "predictions.jsonl", "evaluate.json")
# Files that some tasks write there.
RESULTS = list_all("model", lambda task: task.own_files)
# Files of an exported model or adapter.
EXPORTED = re.compile(
    r"(config|generation_config|adapter_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json"
    r"|(model|adapter_model)(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.(jinja|json)|README\.md|loss\.png")


def recognise_files(root: Path) -> set[str]:
    """Return the paths of a run without a list, recognised by its recipe and checkpoints; empty without a run."""
    recipe = _read_own_recipe(root)
    has_checkpoint = any(list_checkpoint_files(path) for path in (root / "checkpoints").glob("step=*"))
    if not (recipe and (root / "data_report.json").is_file()) and not has_checkpoint:
        return set()
    task = declared("model").get(recipe["model"].get("class_path", "") if recipe else "")
    names = {name for name in (*FILES, *(task.own_files if task else ())) if (root / name).is_file()}
    if has_checkpoint:
        names.add("checkpoints")
    names |= {name for name in (".model", ".publish") if (root / name).is_dir()}  # incomplete exports
    names |= {"manifest.json"} if _is_manifest(root / "manifest.json") else set()
    return names | _find_exported(root) | logger_paths(recipe, root)


def _is_manifest(path: Path) -> bool:
    """True if a run wrote this file, which may also be a user's file of the same name."""
    try:
        return {"starts", "end"} <= json.loads(read_text(path)).keys()
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _read_own_recipe(root: Path) -> dict[str, Any]:
    """Return config.yaml if a run wrote it, else {}."""
    try:
        recipe = read_recipe(root / "config.yaml")
    except UserError:
        return {}
    has_parts = all(isinstance(recipe.get(part), dict) and "init_args" in recipe[part] for part in ("model", "data"))
    return recipe if has_parts and isinstance(recipe.get("trainer"), dict) else {}


def _find_exported(root: Path) -> set[str]:
    """Return model/ and its exported files if this program wrote its card."""
    card = root / "model" / "README.md"
    try:
        is_own_card = re.search(r"^- lmmods$", read_text(card).split("\n---")[0], re.M)
    except (OSError, ValueError):
        return set()
    return {"model", *(f"model/{path.name}" for path in card.parent.iterdir() if EXPORTED.fullmatch(path.name))
            } if is_own_card else set()


# ---------------------------------------------------------------------------------------------------------------------
# Own: the list.

LIST = ".run-files.json"
# Folders of some tasks with one file per step, and their hidden temporary folders.
STEP_FOLDERS = list_all("model", lambda task: task.own_folders)
_HIDDEN = tuple(f".{name}" for name in STEP_FOLDERS)
# Everything that commands write at the top of a run folder. The list also contains the files in model and wandb.
NAMES = (*FILES, *RESULTS, "manifest.json", "checkpoints", "model", *STEP_FOLDERS, "wandb", ".model", ".publish",
         *_HIDDEN)
FOLDERS = ("checkpoints", "model", *STEP_FOLDERS, "wandb")
UNFINISHED_FOLDERS = (".model", ".publish", *_HIDDEN, "model/.new")  # temporary folders, without foreign files


class RunFiles:
    """The list of a run's files: relative paths, each recorded before it is created.

    A folder of an earlier version has no list; its run's files are recognised by its recipe and checkpoints.
    """

    def __init__(self, root: Path):
        self.root, self.path = root, root / LIST
        self._write_lock = threading.Lock()  # the thread that writes checkpoints claims paths, too

    def entries(self) -> set[str]:
        """Return all paths that runs wrote. Raises UserError if the list is damaged."""
        if not self.path.exists():
            return recognise_files(self.root)
        try:
            paths = {str(path) for path in json.loads(read_text(self.path))["paths"]}
            if foreign := sorted(path for path in paths if not _may_list(path)):
                raise ValueError(f"no run writes {foreign[0]!r}")
            return paths
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"{self.path} is damaged ({error}), so the run's files are unknown. Delete it to recognise "
                            "the run by config.yaml and checkpoints.") from error

    def claim(self, *paths: str) -> None:
        """Record paths that are about to be written.

        Raises:
            UserError: A foreign file has one of these paths, or a link leads out of the folder.
        """
        with self._write_lock:
            listed = self.entries()
            for path in paths:
                target = self._real(path)
                if path not in listed and _is_occupied(target):
                    raise UserError(f"{target} was not written by a run, so it is not overwritten. Move it, or set "
                                    "another trainer.default_root_dir.")
            self._write(listed | set(paths))

    def foreign_names(self) -> list[str]:
        """Return names that runs need, but that foreign files have."""
        listed = self.entries()
        return [name for name in NAMES if name not in listed and _is_occupied(self.root / name)]

    def inside(self, folder: str) -> set[str]:
        """Return the listed paths in a folder, relative to it."""
        return {path.removeprefix(f"{folder}/") for path in self.entries() if path.startswith(f"{folder}/")}

    def drop(self, *paths: str) -> None:
        """Delete listed files, and remove them from the list."""
        for path in paths:
            self._delete(path)
        with self._write_lock:
            self._write(self.entries() - set(paths))

    def delete(self) -> list[Path]:
        """Delete everything listed. Returns the foreign files in the run's folders, which are kept."""
        listed = self.entries()
        check_links(self.root, NAMES)
        self._write(listed)
        for path in sorted(listed, key=lambda path: (-path.count("/"), path)):
            self._delete(path)
        folders = {path for path in listed if path in FOLDERS and (self.root / path).is_dir()}
        self._write(folders)
        return [file for path in sorted(folders) for file in sorted((self.root / path).iterdir()) if file.name != OWNER]

    def _real(self, path: str) -> Path:
        """Join the root and a path of the list. Raises UserError: a link in it leads out of the folder."""
        top, _, subpath = path.partition("/")
        if subpath or top in FOLDERS:  # others are files, and links to files are replaced or deleted
            check_links(self.root, (top,))
        return inside(self.root / top, subpath) if subpath else self.root / top

    def _delete(self, path: str) -> None:
        target, (top, _, subpath) = self._real(path), path.partition("/")
        if path in UNFINISHED_FOLDERS:
            delete(target)
        elif top == "wandb" and subpath:
            # Without `*` do not glob, as Path.glob skips broken links such as `latest-run` without its target.
            for match in list(target.parent.glob(subpath)) if "*" in subpath else [target]:
                delete(match)
        elif path == "checkpoints":
            remove_checkpoints(target)
            _delete_if_empty(target)
        elif path in STEP_FOLDERS:
            remove_steps(target)
            _delete_if_empty(target)
        elif target.is_dir() and not target.is_symlink():
            _delete_if_empty(target)
        elif path not in FOLDERS:  # links with the names of folders are the user's
            delete(target)

    def _write(self, paths: set[str]) -> None:
        if not paths:
            self.path.unlink(missing_ok=True)
        elif not self.path.exists() or paths != self.entries():
            write_json(self.path, {"paths": sorted(paths)})


STEP_FILE = re.compile(r"step=(\d+)\.(jsonl|safetensors)")
UNFINISHED_FILE = re.compile(r"\.step=\d+\.(jsonl|safetensors)-[0-9a-f]{16}")  # after a kill, see `write_bytes`


def remove_steps(folder: Path, after: int = -1) -> None:
    """Delete the files of steps after `after`, and unfinished files, in a folder."""
    for path in list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        match = STEP_FILE.fullmatch(path.name)
        if match and int(match[1]) > after or UNFINISHED_FILE.fullmatch(path.name):
            delete(path)


def _may_list(path: str) -> bool:
    """True if a run may write this path. The list is not trusted, as it may come from anybody."""
    top, _, subpath = path.partition("/")
    parts = subpath.split("/")
    return path in NAMES or all(map(is_plain_name, parts)) and (top == "model" or top == "wandb" and len(parts) == 1)


def _is_occupied(path: Path) -> bool:
    """True if a path exists, unless it is an empty folder or the user's link to one."""
    return os.path.lexists(path) and not (path.is_dir() and {entry.name for entry in path.iterdir()} <= {OWNER})


def _delete_if_empty(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and not os.path.ismount(folder) and not any(folder.iterdir()):
        folder.rmdir()
