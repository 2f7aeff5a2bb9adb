"""Guards that keep what a run writes and deletes inside its folder, by real path, whoever created that folder.

A run folder may come from anybody, unpacked from an archive with all its links. So all code that writes or deletes
files of a run uses this module or `lmmods.runs.atomic`, which keep three rules:

- Nothing is written or deleted through a link. New files appear by a rename, which replaces a link; folders are created
  anew; a link in the way is itself removed.
- Names read from a file must be plain names.
- Only model and checkpoints may be links, and only if the folder behind the link names this run folder as its owner, in
  a file `.run-folder`. No program writes that file, and an archive cannot place it outside of itself, so it shows that
  the user made the link.
"""

import os
import re
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.files import is_plain_name, read_text
from lmmods.core.hub import HUB_ID
from lmmods.data.sources.readers import READERS, file_type

OWNER = ".run-folder"  # in the target of a link: the path of the run folder that owns it
MAY_BE_LINKS = ("checkpoints", "model")


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
        owner = Path(read_text(link / OWNER, most=2**16).strip())
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


def way_out(root: Path, place: str | os.PathLike) -> Path | None:
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
# Local paths in published texts: relative to the run folder, or only their last part; and hub ids.

_ABSOLUTE = re.compile(r"(?:file://|local://)?(?:[/~\\]|[A-Za-z]:[\\/])")


def is_local_path(text: str) -> bool:
    """True if a text contains an absolute path of this machine, also as `file://` or in a `::` chain of fsspec."""
    return "\n" not in text and any(_ABSOLUTE.match(part) for part in text.split("::"))


def hub_id(name: str | None) -> str | None:
    """Return `name` if it is a hub id, else None: the hub refuses a card that names anything else."""
    is_local = not name or Path(name).exists() or file_type(name) in READERS
    return name if not is_local and HUB_ID.fullmatch(name) else None


def shown_path(text: str, root: Path) -> str:
    """Shorten a path for publication; other texts are returned unchanged."""
    if not is_local_path(text):
        return text
    return "::".join(_shown(part, root) if _ABSOLUTE.match(part) else part for part in text.split("::"))


def shown_paths(value: Any, root: Path) -> Any:
    """Return a copy of nested mappings and lists with `shown_path` of each text; equal keys are numbered."""
    if isinstance(value, str):
        return shown_path(value, root)
    if isinstance(value, list):
        return [shown_paths(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    shown: dict[Any, Any] = {}
    for key, item in value.items():
        name, number = shown_paths(key, root), 2
        while name in shown:
            name, number = f"{shown_paths(key, root)} ({number})", number + 1
        shown[name] = item if key == "prompts" else shown_paths(item, root)  # of `samples`: the user's own words
    return shown


def _shown(path: str, root: Path) -> str:
    path = os.path.expanduser(re.sub(r"^(?:file|local)://", "", path))
    inside = os.path.relpath(os.path.abspath(path), os.path.abspath(root))
    if inside.split(os.sep)[0] != "..":
        return inside
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] or path
