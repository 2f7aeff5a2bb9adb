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
    paths = shipped_recipes()
    if show is not None:
        print(_find_recipe(paths, show).read_text(encoding="utf-8"), end="")
        return
    rows = {name: describe(path) for name, path in paths.items()}
    print("\n".join([table(list(rows.values())), "", *_how_to_use(paths)]))


def describe(path: Path) -> dict[str, str]:
    """Return the values of `COLUMNS` for a recipe. Raises UserError: its header comment lacks a value."""
    header, content = header_of(path), read_recipe(path)
    model = content.get("model", {})
    options = model.get("init_args", {})
    return {"recipe": path.stem, "task": model.get("class_path", "any"), "training": _training_method(options),
            "model": _model_name(options), "hardware": header.hardware, "time": header.time}


def table(rows: list[dict[str, str]]) -> str:
    """Format recipes as a table with aligned columns."""
    widths = {name: max(len(row[name]) for row in [*rows, {name: name for name in COLUMNS}]) for name in COLUMNS}

    def line(row: dict[str, str]) -> str:
        return "  ".join(f"{row[name]:<{widths[name]}}" for name in COLUMNS).rstrip()

    return "\n".join([line({name: name for name in COLUMNS}), *map(line, rows)])


def _training_method(options: dict[str, Any]) -> str:
    if not options:
        return "any"
    if options.get("config") is not None:
        return "from scratch"
    if options.get("lora") is None and options.get("adapter") is None:
        return "full"
    return "QLoRA" if options.get("quantize") else "LoRA"


def _model_name(options: dict[str, Any]) -> str:
    name = options.get("pretrained") or options.get("config") or "any"
    return name if isinstance(name, str) else name.get("model_type", "custom")


def _find_recipe(paths: dict[str, Path], name: str) -> Path:
    if name not in paths:
        matches = difflib.get_close_matches(name, paths, 1)
        raise UserError(f"--show {name}: no recipe has this name." + (f" Did you mean {matches[0]}?" if matches else
                                                                     " Remove --show to list all."))
    return paths[name]


def _how_to_use(paths: dict[str, Path]) -> list[str]:
    lines = [f"They are in {recipe_folder()}. Run one with fit --config NAME, copy it with recipes --show NAME > "
             "mine.yaml, or create one for your model and data with new."]
    demo_recipes = [name for name, path in paths.items() if DEMO.search(path.read_text(encoding="utf-8"))]
    if not Path("demo").is_dir():
        lines.append(f"{', '.join(demo_recipes)} need demo/ of the project's repository. Run them in a clone "
                     "of it.")
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    return [part for line in lines for part in textwrap.wrap(line, min(width, 120), break_on_hyphens=False)]
