"""Local paths and hub ids in published texts. Paths become relative to the run folder, or only their last part."""

import os
import re
from pathlib import Path
from typing import Any

from lmmods.core.hub import HUB_ID
from lmmods.data.read.readers import READERS, file_type

_ABSOLUTE = re.compile(r"(?:file://|local://)?(?:[/~\\]|[A-Za-z]:[\\/])")


def is_local_path(text: str) -> bool:
    """True if a text is an absolute path of this machine, also as `file://` or in a `::` chain of fsspec."""
    return "\n" not in text and any(_ABSOLUTE.match(part) for part in text.split("::"))


def hub_id(name: str | None) -> str | None:
    """Return `name` if it is a hub id, else None, as the hub rejects cards with other names."""
    if not name or Path(name).exists() or file_type(name) in READERS:
        return None
    return name if HUB_ID.fullmatch(name) else None


def show_path(text: str, root: Path) -> str:
    """Shorten a path for publication; other texts are returned unchanged."""
    if not is_local_path(text):
        return text
    return "::".join(_show(part, root) if _ABSOLUTE.match(part) else part for part in text.split("::"))


def show_paths(value: Any, root: Path) -> Any:
    """Return a copy of nested mappings and lists with all strings shortened by `show_path`; equal keys get numbers."""
    if isinstance(value, str):
        return show_path(value, root)
    if isinstance(value, list):
        return [show_paths(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    shown: dict[Any, Any] = {}
    for key, item in value.items():
        name, count = show_paths(key, root), 2
        while name in shown:
            name, count = f"{show_paths(key, root)} ({count})", count + 1
        shown[name] = item if key == "prompts" else show_paths(item, root)  # `samples.prompts` are texts, not paths
    return shown


def _show(path: str, root: Path) -> str:
    path = os.path.expanduser(re.sub(r"^(?:file|local)://", "", path))
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(root))
    if relative.split(os.sep)[0] != "..":
        return relative
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] or path
