"""The recipes that come with the project: where they lie, and what the comment at the top of each says."""

import re
from dataclasses import dataclass
from pathlib import Path

from lmmods.core.errors import UserError

PACKAGE = Path(__file__).parents[1]
# What recipes name of the demo's files, which are in a clone only.
DEMO = re.compile(r"demo/(llama|bert|corpus|squad|instructions|mmlu)\b")


@dataclass(frozen=True)
class Header:
    """What the comment at the top of a recipe says.

    Args:
        hardware: What it needs.
        time: How long it takes there.
    """

    hardware: str
    time: str


def recipe_folder() -> Path:
    """`configs`: inside of the installed package, or of a clone."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def shipped_recipes() -> dict[str, Path]:
    """Every recipe by its name, those on the demo's files first."""
    folder = recipe_folder()
    return {path.stem: path for path in [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("recipes/*.yaml"))]}


def header_of(path: Path) -> Header:
    """The comment at the top of a recipe. Raises UserError where a part of it is missing."""
    comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))[0]
    found = {name: re.search(rf"^# {name.capitalize()}: (.+)$", comment, re.M) for name in ("hardware", "time")}
    if missing := [name for name, match in found.items() if match is None]:
        raise UserError(f"{path}: the comment at its top does not say the {missing[0]}, as that of configs/clm.yaml "
                        "does.")
    return Header(**{name: match[1] for name, match in found.items()})


def as_file(value: str) -> str:
    """What `--config` is given, with the path of a shipped recipe in place of its name. A file of that name goes
    before it."""
    for name, path in shipped_recipes().items():
        if value in (name, str(path.relative_to(recipe_folder().parent))) and not Path(value).exists():
            return str(path)
    return value
