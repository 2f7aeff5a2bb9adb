"""`migrate`: convert a configuration of another program to a recipe."""

import shlex
from pathlib import Path
from typing import Any, Literal

from lmmods.commands.registry import options_of
from lmmods.core.console import tell
from lmmods.core.errors import UserError
from lmmods.extras.migration.axolotl import axolotl
from lmmods.extras.migration.draft import Draft
from lmmods.extras.migration.llamafactory import llamafactory
from lmmods.extras.migration.trl import trl
from lmmods.recipe.files import read_recipe
from lmmods.recipe.foreign_keys import BLOCKS, PROGRAMS, find_program
from lmmods.recipe.reader import parse
from lmmods.runs.folder import write_text


def migrate(file: str, out: str | None = None, program: Literal["axolotl", "llamafactory", "trl"] | None = None,
            overwrite: bool = False) -> None:
    """Convert an axolotl, LLaMA-Factory or TRL config to a recipe, and list what has no counterpart.

    Args:
        file: YAML config of the other program.
        out: Recipe file to write. Default: print the recipe.
        program: Program that the config is for. Default: detected from its keys.
        overwrite: Replace an existing `out` file.

    Raises:
        UserError: The file cannot be read, is for another program or has an objective without a task here, or `out`
            exists.
    """
    if out is not None and Path(out).exists() and not overwrite:
        raise UserError(f"--out {out} already exists. Use another file, or add --overwrite true.")
    try:
        content = read_recipe(file)
    except UserError as error:
        raise UserError(str(error).removeprefix("--config ")) from error
    draft = as_draft(content, Path(file), program)
    text = draft.as_yaml(f"Converted from {Path(file).name} ({PROGRAMS[draft.program]}) by python train.py migrate.")
    check_recipe_text(text)
    if out is None:
        print(text, end="")
    else:
        try:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            write_text(Path(out), text)
        except OSError as error:
            raise UserError(f"--out {out} cannot be written ({error.strerror}). Use another file.") from error
    tell(_summary(draft, out))


def as_draft(content: dict[str, Any], path: Path, program: str | None = None) -> Draft:
    """Convert a config to a draft. Raises UserError as `migrate` does."""
    if any(isinstance(content.get(block), dict) and ("init_args" in content[block] or block == "trainer")
           for block in BLOCKS):
        raise UserError(f"{path} is already a recipe. Use python train.py fit --config {path}")
    program = program or find_program(content)
    if program is None:
        raise UserError(f"{path}: its keys do not show whether it is for axolotl, LLaMA-Factory or TRL. Add "
                        "--program axolotl, --program llamafactory or --program trl.")
    try:
        if program == "llamafactory":
            return llamafactory(content, path.parent)
        return {"axolotl": axolotl, "trl": trl}[program](content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # such as a list instead of a number
        raise UserError(f"{path}: a value has a type that {PROGRAMS[program]} does not accept: {error}") from error


def check_recipe_text(text: str) -> None:
    """Raise UserError if `fit` does not accept a recipe."""
    parse(["fit", "--config", text], options_of("fit")[0])


def _summary(draft: Draft, out: str | None) -> str:
    lines = []
    for heading, items in draft.remarks().items():
        lines += [heading, *(f"  - {item}" for item in items)]
    if out is not None:
        name = shlex.quote(out)
        lines.append(f"Wrote {out}: {len(draft.settings)} keys. Check its rows with python train.py inspect --config "
                     f"{name}")
    return "\n".join(lines)
