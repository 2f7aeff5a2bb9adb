"""Files of a run: the rules by which they are written and deleted, and the functions that keep them.

What a run writes or deletes lies, by its real path, inside its folder, and was made by it. A run folder may come from
anybody, unpacked from an archive with all its links, so nothing that the folder says is trusted:

- Inside: nothing is written or deleted through a link. New files appear by a rename, which replaces a link; folders are
  created again (`fresh_folder`); a link in the way is itself removed. Names read from a file must be plain names
  (`inside`). Only model and checkpoints may be links, and only if the folder behind the link names this run folder as
  its owner, in a file `.run-folder` (`check_links`). No program writes that file, and an archive cannot place it
  outside of itself, so it shows that the user made the link.
- Made by it: a list in the folder has each path before it is created (`RunFiles.claim`), and paths that no run writes
  are not accepted in it. The files of a checkpoint are those that its manifest names.
- Whole: readers see the old file or folder or the complete new one, even if the writer is killed. Engines and libraries
  write into new folders, which `commit_folder` renames.
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
PLAIN = "state.json"  # of a checkpoint: everything but arrays, and where the arrays go

# ---------------------------------------------------------------------------------------------------------------------
# Inside: links and names.

def check_links(root: Path, names: Iterable[str]) -> None:
    """Raise UserError if a name that a run writes in its folder is a link that must not be followed."""
    for name in names:
        path = root / name
        if not path.is_symlink() or name in MAY_BE_LINKS and _belongs(path, root):
            continue
        if name in MAY_BE_LINKS and path.is_dir():
            target = path.resolve()
            raise UserError(f"{path} is a link to {target}, out of the run folder. If you have made it and that folder "
                            f"is for this run alone, say so there: echo {shlex.quote(str(root.resolve()))} > "
                            f"{shlex.quote(str(target / OWNER))}. If not, delete the link (docs/runs.md).")
        raise UserError(f"{path} is a link, and what a run writes lies in its folder. Move the link away, or choose "
                        "another trainer.default_root_dir.")


def _belongs(link: Path, root: Path) -> bool:
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
        raise UserError(f"{folder}: the name {name!r} of a file of the run leads out of that folder. Delete the link, "
                        "or choose another trainer.default_root_dir.")
    return folder / name


def find_escape(root: Path, place: str | os.PathLike) -> Path | None:
    """Return a path that leads out of the run folder below `place`, where a library will write; None if there is none.

    The path is `place` itself or a link in it. Links that `check_links` has checked are skipped, and so are W&B's files
    of earlier starts, which are not written again.
    """
    top, start = root.resolve(), Path(place).resolve()
    if not start.is_relative_to(top):
        return Path(place)
    for folder, folders, files in os.walk(start):
        here = Path(folder)
        for name in (*folders, *files):
            path = here / name
            if path.is_symlink() and not (here == top and name in MAY_BE_LINKS) and not path.resolve().is_relative_to(
                    top):
                return path
        folders[:] = [name for name in folders if here.name != "wandb" and not (here == top and name in MAY_BE_LINKS)]
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Whole: atomic writes, and deletions.

def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content atomically; it is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # An unguessable, unused name: nobody can have placed a link there.
    temporary = path.with_name(f".{path.name[:50]}-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            # Without this, a crash after the rename could leave an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:  # the disk is full: leave no partial file
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file's text atomically. A link of this name is replaced itself; its target is left alone."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_json(path: Path, value: object) -> None:
    """Append a line to a small .jsonl file. The file is on disk when this returns."""
    # Rewritten as a whole: an append that is cut off would leave half a line.
    before = read_bytes(path, MAX_TABLE_BYTES) if path.exists() else b""
    write_bytes(path, before + json.dumps(value, ensure_ascii=False).encode() + b"\n")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content; `target` is replaced as by `write_text`."""
    write_bytes(target, read_bytes(source, MAX_TABLE_BYTES))


def open_to_append(path: Path) -> TextIO:
    """Open a text file written by `write_text` for appending. Raises OSError if it has become a link."""
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return open(os.open(path, flags), "a", newline="", encoding="utf-8")


def files_in(folder: Path) -> set[str]:
    """Return the paths of all files and links in `folder`, relative to it; none if there is no such folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def commit_folder(temporary: Path, final: Path) -> None:
    """Rename a finished folder to its final name, replacing an older one, after its files have reached the disk."""
    sync(temporary)
    # A folder cannot be renamed over another that is not empty: move the old one aside first. If the process is killed
    # between the two renames, `restore` puts it back at the next start.
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
    """Complete an interrupted `commit_folder`: remove the old folder if the new one exists, else put it back."""
    final = old.with_name(old.name.removeprefix(REPLACED))
    if old.is_symlink():
        old.unlink()  # not created by this program
    elif old.is_dir() and final.exists():
        keep_foreign_files(old, final)
    elif old.is_dir():
        os.replace(old, final)


def commit_files(temporary: Path, final: Path) -> None:
    """Like `commit_folder`, file by file, for a folder that must not be replaced: a link, a mount, one with other
    files.

    Raises:
        UserError: A folder in it is a link.
    """
    sync(temporary)
    # All places are checked before the first file is moved.
    places = {name: inside(final, name) for name in sorted(files_in(temporary))}
    for name, place in places.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary / name, place)
    # Reverse order: inner folders come before those that contain them.
    for folder in sorted((path for path in temporary.rglob("*") if path.is_dir()), reverse=True):
        folder.rmdir()
    temporary.rmdir()
    _flush(final)


def sync(folder: Path) -> None:
    """Flush all files of a folder to disk."""
    # Folders too, as the entry of a new file is part of its folder.
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
    """Create an empty folder, deleting whatever has this name."""
    delete(path)
    path.mkdir(parents=True)
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Made by it: files of a checkpoint folder, deleted without those of somebody else.

def own_files(checkpoint: Path) -> list[str]:
    """Return the names of the files of a checkpoint; empty if the folder is not one."""
    try:
        manifest = json.loads(read_text(checkpoint / MANIFEST))
    except (OSError, ValueError, RecursionError):
        return []
    is_ours = isinstance(manifest, dict) and PLAIN in manifest and all(map(is_plain_name, manifest))
    return [*manifest, MANIFEST] if is_ours else []


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


# ---------------------------------------------------------------------------------------------------------------------
# Made by it: files of a run without a list, of an earlier version, recognised by name and content.

# Names at the top of the folder of any run.
FILES = ("config.yaml", "data_report.json", "metrics.csv", "metrics.json", "samples.jsonl", "resumes.jsonl",
         "loss.png", "completed", "predictions.jsonl", "evaluate.json")
# Files that single tasks write there.
RESULTS = list_all("model", lambda task: task.own_files)
# Files that exports write: models, adapters, tokenizers, card and curves.
EXPORTED = re.compile(
    r"(config|generation_config|adapter_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json"
    r"|(model|adapter_model)(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.(jinja|json)|README\.md|loss\.png")


def recognise_files(root: Path) -> set[str]:
    """Return the paths of a run without that list, recognised by its recipe and checkpoints; none without a run."""
    recipe = _recipe(root)
    has_checkpoint = any(own_files(path) for path in (root / "checkpoints").glob("step=*"))
    if not (recipe and (root / "data_report.json").is_file()) and not has_checkpoint:
        return set()
    task = declared("model").get(recipe["model"].get("class_path", "") if recipe else "")
    found = {name for name in (*FILES, *(task.own_files if task else ())) if (root / name).is_file()}
    if has_checkpoint:
        found.add("checkpoints")
    found |= {name for name in (".model", ".publish") if (root / name).is_dir()}  # incomplete exports
    found |= {"manifest.json"} if _is_manifest(root / "manifest.json") else set()
    return found | _find_exported(root) | logger_paths(recipe, root)


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


def _find_exported(root: Path) -> set[str]:
    """Return model/ and its exported files if its card is one of this program."""
    card = root / "model" / "README.md"
    try:
        is_ours = re.search(r"^- lmmods$", read_text(card).split("\n---")[0], re.M)
    except (OSError, ValueError):
        return set()
    return {"model", *(f"model/{path.name}" for path in card.parent.iterdir() if EXPORTED.fullmatch(path.name))
            } if is_ours else set()


# ---------------------------------------------------------------------------------------------------------------------
# Made by it: the list.

LIST = ".run-files.json"
# Folders of single tasks with files by step, and hidden ones in which tasks prepare something.
STEP_FOLDERS = list_all("model", lambda task: task.own_folders)
_HIDDEN = tuple(f".{name}" for name in STEP_FOLDERS)
# All that commands write at the top of a run folder. For model and wandb the list also holds their content.
NAMES = (*FILES, *RESULTS, "manifest.json", "checkpoints", "model", *STEP_FOLDERS, "wandb", ".model", ".publish",
         *_HIDDEN)
FOLDERS = ("checkpoints", "model", *STEP_FOLDERS, "wandb")
UNDER_WAY = (".model", ".publish", *_HIDDEN, "model/.new")  # folders being written, without files of the user


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
            return recognise_files(self.root)
        try:
            paths = {str(path) for path in json.loads(read_text(self.path))["paths"]}
            if foreign := sorted(path for path in paths if not _is_a_runs(path)):
                raise ValueError(f"no run writes {foreign[0]!r}")
            return paths
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"{self.path} is damaged ({error}), so what runs wrote into this folder is not known. "
                            "Delete it; the run is then recognised by its config.yaml and checkpoints.") from error

    def claim(self, *paths: str) -> None:
        """Record paths that are about to be written.

        Raises:
            UserError: A file that no run wrote is in the way, or a link leads out of the folder.
        """
        with self._turn:
            known = self.entries()
            for path in paths:
                place = self._real(path)
                if path not in known and _is_taken(place):
                    raise UserError(f"{place} was written by no run, so no run may write over it. Move it, "
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

    def _real(self, path: str) -> Path:
        """Return where a path of the list lies. Raises UserError: a link in it leads out of the folder."""
        top, _, rest = path.partition("/")
        if rest or top in FOLDERS:  # other names are those of files: a link is then replaced or deleted itself
            check_links(self.root, (top,))
        return inside(self.root / top, rest) if rest else self.root / top

    def _delete(self, path: str) -> None:
        target, (top, _, rest) = self._real(path), path.partition("/")
        if path in UNDER_WAY:
            delete(target)
        elif top == "wandb" and rest:
            # Path.glob skips broken links, and `latest-run` is one once its target is deleted: so glob only `*`.
            for each in list(target.parent.glob(rest)) if "*" in rest else [target]:
                delete(each)
        elif path == "checkpoints":
            remove_checkpoints(target)
            _delete_if_empty(target)
        elif path in STEP_FOLDERS:
            remove_steps(target)
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


OF_STEP = re.compile(r"step=(\d+)\.(jsonl|safetensors)")
UNFINISHED = re.compile(r"\.step=\d+\.(jsonl|safetensors)-[0-9a-f]{16}")  # left by a kill, see `write_bytes`


def remove_steps(folder: Path, after: int = -1) -> None:
    """Delete the files in a folder that were written after more than `after` steps, and unfinished files."""
    for path in list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        match = OF_STEP.fullmatch(path.name)
        if match and int(match[1]) > after or UNFINISHED.fullmatch(path.name):
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
