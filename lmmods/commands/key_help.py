"""`--help` of a command that takes a recipe: every key, those of model and data by task; `--help KEY`: that one."""

import dataclasses
import shutil
import textwrap
from typing import Any

from lmmods.commands import declarations
from lmmods.commands.keys import (
    REQUIRED,
    Key,
    block_in,
    in_words,
    keys_of,
    nearest,
    recipe_keys,
    task_classes,
    walk,
)
from lmmods.commands.mistakes import Mistakes, class_of, read_layers
from lmmods.commands.registry import COMMANDS
from lmmods.core.errors import UserError
from lmmods.core.recipes import as_yaml

HELP = ("--help", "-h")
CONFIG = ("-c, --config FILE\nA recipe: a file, or the name of one that comes with the project. Later ones go over "
          "earlier ones.")
PRINT = "--print_config\nPrint the recipe that all of it makes, and do nothing."
TRUST = ("--trust_recipe_code true or false (default: false)\nLet the recipe name code outside of lightning, torch and "
         "this project, which then runs. On the command line only, never in a file.")


def wants_help(words: list[str]) -> bool:
    """Whether a command line asks for help."""
    return any(word.partition("=")[0] in HELP for word in words)


def help_of(command: str, words: list[str], engine: str) -> str:
    """The help that a command line asks for: of a key, or of all.

    Raises:
        UserError: There is no key of this name, or a recipe cannot be read.
    """
    index = next(number for number, word in enumerate(words) if word.partition("=")[0] in HELP)
    option, equals, name = words[index].partition("=")
    rest = words[:index] + words[index + 1:]
    if not equals and index < len(rest) and not rest[index].startswith("-"):
        name = rest.pop(index)
    keys = recipe_keys(command, engine)
    classes = _classes(rest, Mistakes(keys, engine))
    return _one(name, keys, classes, engine) if name else _all(command, keys, classes, engine)


def _classes(words: list[str], mistakes: Mistakes) -> dict[str, tuple[type, ...]]:
    """The classes of model and data that the recipe names; all of them where it names none, or one of its own."""
    layers = read_layers(words, mistakes)
    named = {block: class_of(block, layers, mistakes) for block in declarations.TASKS}
    for block, other in (("model", "data"), ("data", "model")):  # each tells the other
        if named[block] is None and (known := named[other]):
            short = known.__name__
            named[block] = getattr(declarations, f"{short}Data" if block == "data" else short.removesuffix("Data"))
    return {block: (kind,) if kind else task_classes(block) for block, kind in named.items()}


def _with_classes(key: Key, engine: str) -> Key:
    """A key whose values are classes of libraries, with the names of those that were tried."""
    listed = declarations.CLASSES[engine].get(key.name)
    return dataclasses.replace(key, text=f"{key.text} Classes: {', '.join(listed)}.") if listed else key


def _one(name: str, keys: dict[str, Key], classes: dict[str, tuple[type, ...]], engine: str) -> str:
    """A key: its sentence, type and default; of a group its keys."""
    name = name.lstrip("-").replace(".init_args.", ".")
    found = {key.name: _with_classes(key, engine) for key in walk(keys, classes)}
    if name not in found:
        everywhere = {key.name: key for key in walk(keys, {block: task_classes(block) for block in classes})}
        if name not in everywhere:
            near = nearest(name, list(found))
            raise UserError(f"--help {name}: there is no such key." + (f" Did you mean {near}?" if near else
                                                                      " Without a name, --help lists all."))
        found = everywhere
    lines = [_entry(found[name])]
    inner = [key for key in found.values() if key.name.startswith(f"{name}.")]
    lines += [_entry(key) for key in inner if key.name.count(".") == name.count(".") + 1]
    block = name.partition(".")[0]
    if block in classes and "." in name:
        has = [kind.__name__ for kind in task_classes(block) if name.split(".")[1] in keys_of(kind)]
        if len(has) < len(task_classes(block)):
            lines.append(f"Of {', '.join(has)} alone.")
    return "\n".join([*lines, f"More: docs/{'fields' if '.' in name or inner else 'commands'}.md"])


def _all(command: str, keys: dict[str, Key], classes: dict[str, tuple[type, ...]], engine: str) -> str:
    """Every key, in the blocks of a recipe."""
    parts = [f"usage: python train.py {command} --config RECIPE [--KEY VALUE …]", COMMANDS[command].line,
             "Every key of a recipe is an option too: trainer: {max_steps: 3} is --trainer.max_steps 3. One key alone: "
             f"{command} --help KEY."]
    top = [key for key in keys.values() if block_in(key.type) is None and key.text]
    lines = ["\n\n".join(_wrapped(part) for part in parts), f"Options of {command}:",
             *map(_indented, (CONFIG, PRINT, TRUST)), *(_entry(key) for key in top)]
    for name in ("trainer", "model", "data", "checkpoint", "samples", "mmlu", "publish"):
        kinds = classes.get(name)
        if kinds is None:
            inner = {each: _with_classes(key, engine) for each, key in keys_of(block_in(keys[name].type), name).items()}
            lines += ["", f"{name}: {keys[name].text}", *_entries(inner)]
        elif len(kinds) == 1:
            lines += ["", f"{name} ({kinds[0].__name__}): {(kinds[0].__doc__ or '').strip()}",
                      *_entries(keys_of(kinds[0], name))]
        else:
            lines += _by_task(name, kinds)
    return "\n".join(lines)


def _by_task(name: str, kinds: tuple[type, ...]) -> list[str]:
    """Keys of all classes of a block, then of each what it has beside them."""
    own = {kind: keys_of(kind, name) for kind in kinds}
    common = {each: key for each, key in own[kinds[0]].items() if all(each in keys for keys in own.values())}
    lines = ["", f"{name}, of every task ({', '.join(kind.__name__ for kind in kinds)}):", *_entries(common)]
    told: dict[str, list[str]] = {}
    for kind, keys in own.items():
        for each in keys.keys() - common.keys():
            told.setdefault(each, []).append(kind.__name__)
    groups: dict[str, dict[str, Key]] = {}
    for keys in own.values():
        for each, key in keys.items():
            if each in told:
                groups.setdefault(", ".join(told[each]), {}).setdefault(each, key)
    for names, keys in groups.items():
        lines += ["", f"{name}, of {names}:", *_entries(keys)]
    return lines


def _entries(keys: dict[str, Key]) -> list[str]:
    lines, explained = [], set()
    for key in keys.values():
        lines.append(_entry(key))
        kind = block_in(key.type)
        if kind is not None and (kind, key.name.rpartition(".")[0]) not in explained:
            explained.add((kind, key.name.rpartition(".")[0]))  # the keys of a source once for all sources
            lines += [_entry(inner) for inner in keys_of(kind, key.name).values()]
    return lines


def _entry(key: Key) -> str:
    is_block = block_in(key.type) is not None
    kind = "" if is_block and "." not in key.name else f" {in_words(key.type, key.name)}"
    has_default = key.default is None or key.default is not REQUIRED and not is_block
    default = f" (default: {_value(key.default)})" if has_default else ""
    return _indented(f"--{key.name}{kind}{default}\n{key.text}")


def _value(value: Any) -> str:
    return as_yaml([value], default_flow_style=True).strip()[1:-1]


def _indented(text: str) -> str:
    head, _, body = text.partition("\n")
    return "\n".join([f"  {head}", *textwrap.wrap(" ".join(body.split()), _width(), initial_indent=" " * 6,
                                                 subsequent_indent=" " * 6, break_on_hyphens=False)])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _width(), break_on_hyphens=False)


def _width() -> int:
    return max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
