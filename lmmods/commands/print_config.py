"""`--print_config`: print the resolved recipe, with all defaults."""

from importlib.metadata import version
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.redaction import redact
from lmmods.recipe.files import as_yaml
from lmmods.recipe.keys import DEFAULT_SEED
from lmmods.recipe.objects import fill
from lmmods.recipe.reader import Recipe, with_library_classes

FLAGS = ("skip_null", "skip_default")


def print_config(parsed: Recipe, option: str) -> None:
    """Print a recipe, passwords and tokens redacted.

    Args:
        option: The option as typed: `--print_config`, or `--print_config=skip_null`.

    Raises:
        UserError: The option has an unknown value.
    """
    flags = [flag for flag in option.partition("=")[2].split(",") if flag]
    if unknown := [flag for flag in flags if flag not in FLAGS]:
        raise UserError(f"--print_config is {unknown[0]}, but must be {' or '.join(FLAGS)}.")
    tree = with_library_classes(parsed).whole() | parsed.options
    if "skip_default" in flags:
        tree = _list_changes(tree, _defaults(parsed))
    if "skip_null" in flags:
        tree = _drop_null(tree)
    print(redact(f"# lightning.pytorch=={version('lightning')}\n{as_yaml(tree)}"), end="")


def _defaults(parsed: Recipe) -> dict[str, Any]:
    blocks = {name: fill(parsed.fields_class(name), {}) for name in parsed.explicit}
    tasks = {name: {"init_args": blocks[name]} for name in parsed.classes}
    return {"seed_everything": DEFAULT_SEED, **blocks, **tasks, **dict.fromkeys(parsed.options), "overwrite": False}


def _list_changes(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the defaults."""
    result = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _list_changes(value, default)
            if not value:
                continue
        elif name in defaults and value == default:
            continue
        result[name] = value
    return result


def _drop_null(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are not null."""
    return {name: _drop_null(value) if isinstance(value, dict) else value
            for name, value in values.items() if value is not None}
