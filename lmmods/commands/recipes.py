"""`recipes`: list the recipes shipped with the project, with task, model, hardware and time."""

import difflib
import shutil
import textwrap
from pathlib import Path
from typing import Any

from lmmods.core.errors import UserError
from lmmods.recipe.files import DEMO, header_of, read_recipe, recipe_folder, shipped_recipes

COLUMNS = ("recipe", "task", "training", "model", "hardware", "time")


def recipes(show: str | None = None) -> None:
    """List the shipped recipes with task, model, hardware and time.

    Args:
        show: Print this recipe instead, for example to copy it: recipes --show clm > mine.yaml.

    Raises:
        UserError: No recipe has this name.
    """
    found = shipped_recipes()
    if show is not None:
        print(_chosen(found, show).read_text(encoding="utf-8"), end="")
        return
    rows = {name: describe(path) for name, path in found.items()}
    print("\n".join([table(list(rows.values())), "", *_how_to_use(found)]))


def describe(path: Path) -> dict[str, str]:
    """Return the `COLUMNS` of a recipe. Raises UserError: its header comment lacks one."""
    header, content = header_of(path), read_recipe(path)
    model = content.get("model", {})
    options = model.get("init_args", {})
    return {"recipe": path.stem, "task": model.get("class_path", "any"), "training": _training(options),
            "model": _model(options), "hardware": header.hardware, "time": header.time}


def table(rows: list[dict[str, str]]) -> str:
    """Format recipes as a table with aligned columns."""
    widths = {name: max(len(row[name]) for row in [*rows, {name: name for name in COLUMNS}]) for name in COLUMNS}

    def line(row: dict[str, str]) -> str:
        return "  ".join(f"{row[name]:<{widths[name]}}" for name in COLUMNS).rstrip()

    return "\n".join([line({name: name for name in COLUMNS}), *map(line, rows)])


def _training(options: dict[str, Any]) -> str:
    if not options:
        return "any"
    if options.get("config") is not None:
        return "from scratch"
    if options.get("lora") is None and options.get("adapter") is None:
        return "full"
    return "QLoRA" if options.get("quantize") else "LoRA"


def _model(options: dict[str, Any]) -> str:
    named = options.get("pretrained") or options.get("config") or "any"
    return named if isinstance(named, str) else named.get("model_type", "of its own")


def _chosen(found: dict[str, Path], name: str) -> Path:
    if name not in found:
        near = difflib.get_close_matches(name, found, 1)
        raise UserError(f"--show {name}: no recipe has this name." + (f" Did you mean {near[0]}?" if near else
                                                                     " Remove --show to list all."))
    return found[name]


def _how_to_use(found: dict[str, Path]) -> list[str]:
    lines = [f"They are in {recipe_folder()}. Run one with fit --config NAME, copy it with recipes --show NAME > "
             "mine.yaml, or create one for your model and data with new."]
    lacking = [name for name, path in found.items() if DEMO.search(path.read_text(encoding="utf-8"))]
    if not Path("demo").is_dir():
        lines.append(f"{', '.join(lacking)} need the files in demo/ of a clone of the project. Run them "
                     "there.")
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    return [part for line in lines for part in textwrap.wrap(line, min(width, 120), break_on_hyphens=False)]
