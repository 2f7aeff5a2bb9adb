"""Draft of a migrated recipe: settings with their origins, keys without counterpart or need, and differences."""

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from lmmods.recipe.files import as_yaml, shorten
from lmmods.recipe.foreign_keys import NOT_NEEDED, VALUES, Row, counterparts, rows_of

CLASSES = ("model", "data")
OFF = (None, False, "", "none", "None", [], {})  # a disabled feature needs no counterpart
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
FOREIGN = "transformers"  # table shared by all three programs
# Keys set only by a program's own module: their values differ in form from any foreign value, or are in no file.
BY_HAND = {"ckpt_path", "overwrite", "publish.repo", "trainer.logger", "trainer.callbacks", "trainer.strategy",
           "trainer.log_every_n_steps", "trainer.val_check_interval", "model.lora", "model.config",
           "model.config_overrides", "data.source", "data.val_source", "data.source.path", "data.source.weight",
           "data.mixing", "data.columns", "data.image_options", "checkpoint.every_n_steps", "checkpoint.monitor"}


class Draft:
    """Conversion of a config to a recipe.

    Args:
        program: Name of the program, which selects the table of keys.
        content: Its keys and values. `finish` converts the keys that `get` has not read, by the tables.
    """

    def __init__(self, program: str, content: dict[str, Any]) -> None:
        self.program = program
        self.content = {key: _to_number(value) for key, value in content.items()}
        self.settings: dict[str, tuple[Any, str]] = {}  # our key -> (value, origin), in order
        self.lost: dict[str, str] = {}  # key without counterpart -> reason
        self.unneeded: dict[str, list[str]] = {}  # reason -> keys that need no counterpart, with values
        self.notes: list[str] = []  # differences, and things to do by hand
        self._handled: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a foreign key, treating None as unset, and mark the key as handled."""
        self._handled.add(key)
        value = self.content.get(key)
        return default if value is None else value

    def put(self, key: str, value: Any, *origins: str) -> None:
        """Set a recipe key. Origins are foreign keys, which are cited if they are set, or plain words."""
        cited = [name for name in origins if self.content.get(name) is not None]
        citations = [f"{name}: {shorten(_to_flow_style(self.content[name]), 60)}" for name in cited]
        words = [name if not re.fullmatch(r"\w+", name) else f"default of {name}" for name in origins[:1] if not cited]
        self.settings[key] = value, ", ".join(citations or words)

    def has(self, key: str) -> bool:
        """True if the recipe sets a key, or one below it, to a truthy value."""
        return any((name == key or name.startswith(f"{key}.")) and value for name, (value, _) in self.settings.items())

    def lose(self, key: str, reason: str) -> None:
        """Record a foreign key without counterpart."""
        self._handled.add(key)
        self.lost[key] = reason

    def skip(self, key: str, value: Any, reason: str) -> None:
        """Record a foreign key that needs no counterpart."""
        self._handled.add(key)
        self.unneeded.setdefault(reason, []).append(f"{key}: {shorten(_to_flow_style(value), 60)}")

    def note(self, text: str) -> None:
        """Record a difference once."""
        if text not in self.notes:
            self.notes.append(text)

    def put_value(self, key: str) -> bool:
        """Set the counterpart of a foreign key's value according to `VALUES`. Return whether it has one."""
        value = self.get(key)
        settings = VALUES[key](value) if value is not None else {}
        for recipe_key, setting in settings.items():
            self.put(recipe_key, setting, key)
        if not settings and value not in OFF:
            self.lost[key] = f"the value {shorten(_to_flow_style(value), 60)} has no counterpart"
        return bool(settings)

    def finish(self) -> None:
        """Convert the keys that `get` has not read, by the tables."""
        shared = rows_of(FOREIGN) | rows_of(self.program)
        for key, value in self.content.items():
            if key not in self._handled and value not in OFF:
                self._convert(key, value, shared.get(key), shared.get(f"use_{str(key).split('_')[0]}"))

    def _convert(self, key: str, value: Any, row: Row | None, feature: Row | None) -> None:
        if row is None:
            notes = [note for recipe_keys, note in counterparts(key) if not recipe_keys]
            notes += [feature.note] if feature else []  # for example galore_rank belongs to use_galore
            self.lose(key, notes[0] if notes else "unknown key")
            return
        recipe_keys = dict(row.pairs)[key]
        if row.cells[1] == NOT_NEEDED:
            self.skip(key, value, row.note)
        elif not recipe_keys:
            self.lose(key, row.note)
        elif key in VALUES:
            self.put_value(key)
        elif len(recipe_keys) == 1 and recipe_keys[0] not in BY_HAND | self.settings.keys():
            self.put(recipe_keys[0], value, key)
        else:
            self.lose(key, f"see {' and '.join(recipe_keys)}{f' ({row.note})' if row.note else ''}")

    # The file ---------------------------------------------------------------------------------------------------------

    def as_yaml(self, title: str) -> str:
        """Return the recipe with each key's origin as a comment, after a comment with the remarks."""
        lines = [f"# {title}"]
        for heading, items in self.remarks().items():
            lines += ["#", f"# {heading}", *(line for item in items for line in _wrap(item))]
        return "\n".join([*lines, *_format_lines(self._tree(), 0)]) + "\n"

    def remarks(self) -> dict[str, list[str]]:
        """Return the remarks on the recipe by heading."""
        remarks = {"Different, or to do by hand:": self.notes,
                   "No counterpart:": [f"{key}: {reason}" for key, reason in self.lost.items()],
                   "Not needed here:": [f"{', '.join(keys)} ({reason})" for reason, keys in self.unneeded.items()]}
        return {heading: items for heading, items in remarks.items() if items}

    def _tree(self) -> dict[str, Any]:
        """Return the settings as nested blocks with class_path and init_args; leaves are (value, origin)."""
        tree: dict[str, Any] = {}
        for block in ("seed_everything", "trainer", *CLASSES, "checkpoint"):
            for key, leaf in self.settings.items():
                if key.split(".")[0] == block:
                    _insert(tree, key, leaf)
        for key, leaf in self.settings.items():
            _insert(tree, key, leaf)
        return tree


def _insert(tree: dict[str, Any], key: str, leaf: tuple[Any, str]) -> None:
    block, *names = key.split(".")
    path = [block, "class_path"] if block in CLASSES and not names else (
        [block, "init_args", *names] if block in CLASSES else [block, *names])
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree.setdefault(path[-1], leaf)


def _format_lines(tree: dict[str, Any], depth: int) -> Iterator[str]:
    for key, value in tree.items():
        start = f"{'  ' * depth}{key}:"
        if isinstance(value, dict):
            yield start
            yield from _format_lines(value, depth + 1)
            continue
        content, origin = value
        comment = f"  # {origin}" if origin else ""
        if isinstance(content, list) and any(isinstance(item, dict) for item in content):
            yield f"{start}{comment}"
            yield from (f"{'  ' * depth}  - {_to_flow_style(item)}" for item in content)
        else:
            yield f"{start} {_to_flow_style(content)}{comment}"


def _to_flow_style(value: Any) -> str:
    """Format a value as one line of YAML."""
    text = as_yaml(value, default_flow_style=True, width=2**20)
    text = text.removesuffix("...\n").strip()
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 116, initial_indent="# - ", subsequent_indent="#   ",
                         break_long_words=False, break_on_hyphens=False)


def _to_number(value: Any) -> Any:
    """Convert numeric text to a number, as YAML 1.1 reads 2e-5 as a string."""
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        return float(value) if re.search(r"[.eE]", value) else int(value)
    return value
