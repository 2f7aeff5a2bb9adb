"""What the error for an unknown key says: where it stands, and what it is here if another program has it."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from lmmods.commands.migration.detection import PROGRAMS, written_for
from lmmods.commands.migration.foreign_keys import counterparts
from lmmods.commands.migration.values import OPTIMIZERS, PRECISIONS, SCHEDULES, VALUES
from lmmods.core.errors import UserError
from lmmods.core.recipes import CONFIG_OPTIONS, RecipeLoader, config_argument, guarded, option_values

# Keys here whose values have other names elsewhere.
OURS = {"name": OPTIMIZERS, "schedule": SCHEDULES, "precision": PRECISIONS,
        "quantize": {"4bit": "nf4", "int4": "nf4", "4": "nf4", "8bit": "int8", "8": "int8"}}
UNKNOWN = r"Option '([\w.]+)' is not accepted|does not accept option '([\w.]+)'|Key '([\w.]+)' is not expected"


def advice(message: str, arguments: list[str], suggest: Callable[[str], str]) -> str | None:
    """What is said instead of a parser's message about keys or a value that belong to another program; else None.

    Args:
        message: Of jsonargparse, on one line.
        arguments: The command line that it is about; recipes are read for where the key stands in them.
        suggest: Gives the question for the nearest right key, or nothing.
    """
    if value := _foreign_value(message):
        return value
    if "unrecognized arguments: " in message:
        words = re.findall(r"(?<!\S)--([\w.\[\]-]+)", message.split("unrecognized arguments: ", 1)[1])
    else:
        words = ["".join(found) for found in re.findall(UNKNOWN, message)]
    if not words or not arguments:
        return None
    for file, recipe in _recipes(arguments):
        if (program := written_for(recipe)) and Path(file).is_file():
            return (f"{file} is a configuration of {PROGRAMS[program]}, not a recipe. Make one of it: "
                    f"python train.py migrate {file} --out recipe.yaml")
    given = list(_given(arguments))
    places = [next((each for each in given if f".{each[0]}".endswith(f".{word}")), (word, None)) for word in words]
    lines = [told(*place) for place in places]
    if not any(lines):
        return None
    return " ".join(line or f"{word} is no key.{suggest(word)}" for line, word in zip(lines, words, strict=True))


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


def _foreign_value(message: str) -> str | None:
    """The message about a wrong value with what it is here, where another program has it."""
    found = re.search(r'^Parser key "(?:[\w.]+\.)?(\w+)".* value: (\w+)$', message)
    ours = OURS.get(found[1], {}).get(found[2].lower()) if found else None
    return f"{message}. Other programs' {found[2]} is {ours} here." if ours else None


def _given(arguments: list[str]) -> Iterator[tuple[str, Any]]:
    """Every key that a command line gives, in its words and in the recipes that it names, with its value."""
    for name, value in _options(arguments):
        if name not in ("config", "c"):
            yield name, (loaded := _loaded(value))
            yield from _walk(loaded, f"{name}.")
    for _, recipe in _recipes(arguments):
        yield from _walk(recipe, "")


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


def _walk(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, each in value.items() if isinstance(value, dict) else ():
        yield f"{prefix}{name}", each
        yield from _walk(each, f"{prefix}{name}.")


def _loaded(text: str) -> Any:
    try:
        return guarded(lambda checked: yaml.load(checked, Loader=RecipeLoader))(text)
    except (yaml.YAMLError, ValueError):
        return text
