"""What the error for an unknown key says: where it stands, and what it is here if another program has it."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from lmmods.commands.migration.draft import OPTIMIZERS, PRECISIONS, SCHEDULES, VALUES
from lmmods.commands.migration.foreign_keys import counterparts
from lmmods.core.errors import UserError
from lmmods.core.recipes import CONFIG_OPTIONS, RecipeLoader, config_argument, guarded, option_values

# Keys here whose values have other names elsewhere.
OURS = {"name": OPTIMIZERS, "schedule": SCHEDULES, "precision": PRECISIONS,
        "quantize": {"4bit": "nf4", "int4": "nf4", "4": "nf4", "8bit": "int8", "8": "int8"}}


def told(key: str, value: Any = None) -> str | None:
    """What is said of an unknown key, with its value where that has another name here; None where no table has it."""
    found = counterparts(key)
    if not found:
        return None
    key = key.replace(".init_args.", ".")
    settings = VALUES.get(key.rsplit(".", 1)[-1], lambda _: {})(value) if value is not None else {}
    if settings:
        shown = (f"{ours}: {yaml.safe_dump(is_now, default_flow_style=True).splitlines()[0]}"
                 for ours, is_now in settings.items())
        return f"{key} is no key. Here: {', '.join(shown)}."
    ours, note = found[0]
    if not ours:
        return f"{key} is no key, and there is none for it: {note}."
    note = "" if re.search(r"\bthere\b", note) else note  # that is about one program among several
    others = "".join(f", or {' and '.join(each)}" for each, _ in found[1:] if each)
    return f"{key} is no key. Here: {' and '.join(ours)}{others}{f' ({note})' if note else ''}."


def foreign_value(key: str, value: str) -> str:
    """A sentence that says what a wrong value is here, where another program has it; else nothing."""
    ours = OURS.get(key.rpartition(".")[2], {}).get(value.lower())
    return f" Other programs' {value} is {ours} here." if ours else ""


def keys_given(arguments: list[str]) -> list[str]:
    """Every key that a command line gives, in its words and in the recipes that it names, without `init_args`."""
    names: list[str] = []
    for name, value in _options(arguments):
        if name not in ("config", "c"):
            names += [name, *_walk(_loaded(value), f"{name}.")]
    for _, recipe in _recipes(arguments):
        names += _walk(recipe, "")
    return [name.replace(".init_args.", ".") for name in names]


def _recipes(arguments: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What `--config` is given, and the recipe that it is."""
    for value in option_values(arguments, *CONFIG_OPTIONS):
        try:
            yield value, config_argument(value)
        except UserError:  # told where it is read
            continue


def _options(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Names and values; that of an option without one is true."""
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            yield name, value if equals else "true" if following.startswith("--") else following


def _walk(value: Any, prefix: str) -> Iterator[str]:
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        for name, each in part.items() if isinstance(part, dict) else ():
            yield f"{prefix}{name}"
            yield from _walk(each, f"{prefix}{name}.")


def _loaded(text: str) -> Any:
    try:
        return guarded(lambda checked: yaml.load(checked, Loader=RecipeLoader))(text)
    except (yaml.YAMLError, ValueError):
        return text
