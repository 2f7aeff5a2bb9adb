"""Values written back into recipe files: only their own characters change, so comments and layout stay."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.recipes import CONFIG_OPTIONS, RecipeLoader, option_values, read_recipe, read_text
from lmmods.runs.atomic import write_text
from lmmods.runs.run_files import LIST

Value = int | float


class RecipeFiles:
    """The files that a command line's `--config` options name, the later of which override the earlier.

    Keys are dotted paths as a file has them, for example `model.init_args.optimizer.lr`.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        # What is written out in place of a path cannot be written back.
        self._paths = [Path(value) for value in option_values(arguments, *CONFIG_OPTIONS) if _is_file(value)]

    def check(self, keys: list[str]) -> None:
        """Raise UserError where a value of one of these keys could not be written."""
        self._edited(dict.fromkeys(keys, 1))

    def put(self, found: dict[str, Value], write: bool) -> None:
        """Write what was found into the files, or only say what would be.

        Raises:
            UserError: As `check`.
        """
        if not write:
            shown = " ".join(f"--{key.replace('.init_args', '')} {as_text(value)}" for key, value in found.items())
            return say(f"Nothing was written: give {shown}, or let find do it with --write true.")
        for path, text in self._edited(found).items():
            write_text(path.resolve(), text)  # the user's own link stays one
        for key, value in found.items():
            say(f"Wrote {key.replace('.init_args', '')}: {as_text(value)} to {self._file_of(key)}.")

    def _edited(self, found: dict[str, Value]) -> dict[Path, str]:
        texts: dict[Path, str] = {}
        for key, value in found.items():
            path = self._file_of(key)
            texts[path] = edited(texts.get(path) or read_text(path), key, value, str(path))
        return texts

    def _file_of(self, key: str) -> Path:
        """The last file that has the key; else the last one that has the mapping it belongs to."""
        short = key.replace(".init_args", "")
        typed = {f"--{name}" for name in (key, short)}
        if given := next((word for word in self._arguments if word.partition("=")[0] in typed), None):
            raise UserError(f"--write true: {short} is given on the command line ({given}), which overrides the "
                            "recipe's files. Take it out, or leave --write away.")
        for keys in (key.split("."), key.split(".")[:-1]):
            holding = [path for path in self._paths if _holds(read_recipe(path), keys, keys == key.split("."))]
            if holding:
                if (holding[-1].parent / LIST).exists():
                    raise UserError(f"--write true: {holding[-1]} belongs to a run, whose files find leaves alone. "
                                    "Copy it to a recipe of your own.")
                return holding[-1]
        raise UserError(f"--write true: no recipe file has a place for {key}. Add the key to a file, with any value.")


def edited(text: str, key: str, value: Value, name: str) -> str:
    """A recipe's text with another value of a key, which stands in it or whose mapping does.

    Args:
        name: Of the file, for messages.

    Raises:
        UserError: The value is used in another place of the file too, or is no single value.
    """
    *parents, leaf = key.split(".")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    uses = Counter(map(id, _nodes(root)))
    node, on_the_way = root, [root]
    for part in parents:
        node = _child(node, part)
        on_the_way.append(node)
    old = _child(node, leaf)
    on_the_way += [old] if old is not None else []
    line = on_the_way[-1].start_mark.line + 1
    if any(uses[id(each)] > 1 for each in on_the_way):
        raise UserError(f"--write true: {name}:{line}: {key} stands behind an anchor (&) that another place repeats "
                        "(*), and would change there too. Write it out.")
    if old is None and node.value:
        first = node.value[0][0].start_mark
        start = end = first.index
        new = f"{leaf}: {as_text(value)}" + (", " if node.flow_style else "\n" + " " * first.column)
    elif isinstance(old, yaml.ScalarNode):
        start, end, new = old.start_mark.index, old.end_mark.index, as_text(value)
    else:
        raise UserError(f"--write true: {name}:{line}: {key} is no single value that could be replaced.")
    result = text[:start] + new + text[end:]
    wanted = _load(text)
    _set(wanted, key.split("."), value)
    if _load(result) != wanted:
        raise UserError(f"--write true: {name}:{line}: {key} cannot be replaced without changing what stands around "
                        f"it. Write {as_text(value)} there by hand.")
    return result


def as_text(value: Value) -> str:
    """A number as YAML 1.1 reads it: 3.2e-4, not 3.2e-04 nor 0.00032."""
    if isinstance(value, int):
        return str(value)
    return re.sub(r"e([+-])0*(\d)", r"e\1\2", f"{value:.1e}")


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):
        return False


def _holds(content: Any, keys: list[str], is_value: bool) -> bool:
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            return False
        content = content[key]
    return is_value or isinstance(content, dict) and bool(content)


def _child(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for name, value in node.value if name.value == key), None)


def _nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    """Every node, one behind an anchor as often as it stands in the text."""
    yield node
    for each in node.value if isinstance(node, yaml.CollectionNode) else ():
        for child in each if isinstance(each, tuple) else (each,):
            yield from _nodes(child)


def _load(text: str) -> Any:
    return yaml.load(text, Loader=RecipeLoader)


def _set(content: dict[str, Any], keys: list[str], value: Value) -> None:
    for key in keys[:-1]:
        content = content[key]
    content[keys[-1]] = value
