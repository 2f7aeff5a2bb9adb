"""Help of the commands: `--help` lists every key, model and data by task; `--help KEY` shows one key.

No library is imported for it, except for the class of a library (`--trainer.logger.help WandbLogger`).
"""

import dataclasses
import shutil
import textwrap
from typing import Any

from lmmods.commands.registry import COMMANDS, options_of
from lmmods.core.errors import UserError
from lmmods.recipe.classes import BASES, CLASSES, class_name, declared, find_class, known_class, names_of
from lmmods.recipe.engines import load_engine
from lmmods.recipe.files import as_yaml
from lmmods.recipe.keys import (
    REQUIRED,
    Key,
    block_in,
    in_words,
    keys_of,
    library_classes,
    nearest,
    recipe_keys,
    task_classes,
    walk,
)
from lmmods.recipe.reader import Reader, engine_of

HELP = ("--help", "-h")
CONFIG = ("-c, --config FILE\nRecipe file, or the name of a shipped recipe. May be repeated; later files override "
          "earlier ones.")
PRINT = "--print_config\nPrint the resolved recipe and exit."
TRUST = ("--trust_recipe_code boolean (default: false)\nAllow the recipe to run code from outside lightning, torch "
         "and this project. Command line only, never in a file.")


def wants_help(words: list[str]) -> bool:
    """True if a command line asks for help."""
    return any(map(_asks, words))


def help_of(command: str, words: list[str]) -> str:
    """Return the requested help of a command: for one key or class, or for all.

    Raises:
        UserError: There is no such key, or a recipe cannot be read.
    """
    index = next(number for number, word in enumerate(words) if _asks(word))
    option, equals, name = words[index].partition("=")
    rest = words[:index] + words[index + 1:]
    if not equals and index < len(rest) and not rest[index].startswith("-"):
        name = rest.pop(index)
    options, unnamed = options_of(command)
    if COMMANDS[command].takes != "recipe":
        return _of_options(command, options, unnamed, name)
    engine = engine_of(rest)
    reader = Reader(recipe_keys(options, engine), engine)
    if option.endswith(".help"):
        return _of_class(option[2:].removesuffix(".help"), name, reader)
    classes = _classes(rest, reader)
    return _one(name, reader.keys, classes, engine) if name else _all(command, reader.keys, classes, engine)


def _asks(word: str) -> bool:
    option = word.partition("=")[0]
    return option in HELP or option.startswith("--") and option.endswith(".help")


def _of_options(command: str, options: dict[str, Key], unnamed: list[Key], name: str) -> str:
    """Return the help of a command that takes no recipe, or of one of its options."""
    if name:
        found = {key.name: key for key in (*walk(options, {}), *unnamed)}
        if name.lstrip("-") not in found:
            near = nearest(name.lstrip("-"), list(found))
            raise UserError(f"--help {name}: unknown option." + (f" Did you mean {near}?" if near else ""))
        return _entry(found[name.lstrip("-")])
    words = [key.name.upper() if key.default is REQUIRED else f"[{key.name.upper()}]" for key in unnamed]
    words += [f"--{key.name} {key.name.upper()}" for key in options.values() if key.default is REQUIRED]
    others = " Also takes the options of fit." if COMMANDS[command].takes else ""
    lines = [_wrap(" ".join(["usage: python train.py", command, *words, "[--OPTION VALUE …]"])), "",
             _wrap(COMMANDS[command].line + others), ""]
    lines += [_indent(f"{key.name.upper()}\n{key.text}") for key in unnamed]
    return "\n".join([*lines, *_entries(options)])


def _of_class(key: str, name: str, reader: Reader) -> str:
    """Return the help of a class that a key may name."""
    if key in BASES and (not name or known_class(key, name, reader.engine)):
        kinds = (known_class(key, name, reader.engine),) if name else task_classes(key)
        return "\n".join(_block(key, kinds))
    types, hint = load_engine(reader.engine), None if key in BASES else _hint(key, reader)
    bases = (getattr(types, key),) if key in BASES else tuple(
        types.libraries[each] for each in library_classes(hint) if each in types.libraries)
    kind = find_class(name, bases, key) if name else None
    if kind is None:
        names = ", ".join(names_of(key, reader.engine))
        raise UserError(f"--{key}.help needs the name of a class. Use one of {names}, or an import path.")
    summary = (kind.__doc__ or "").strip().split("\n\n")[0]
    return "\n".join([_wrap(f"{key} ({class_name(kind)}): {' '.join(summary.split())}"),
                      *_entries(keys_of(kind, key))])


def _hint(key: str, reader: Reader) -> Any:
    found = {each.name: each for each in walk(reader.keys, {})}
    if key not in found:
        near = nearest(key, list(found))
        raise UserError(f"--{key}.help: unknown key." + (f" Did you mean {near}?" if near else ""))
    return found[key].type


def _classes(words: list[str], reader: Reader) -> dict[str, tuple[type, ...]]:
    """Return the model and data classes that the recipe names; all of them if it names none or a user-defined one."""
    layers = reader.layers(words)
    named = {block: reader.class_of(block, layers) for block in BASES}
    if named["model"] and not named["data"]:  # one implies the other
        named["data"] = declared("data").get(named["model"].takes)
    elif named["data"] and not named["model"]:
        kind = class_name(named["data"])
        named["model"] = next((task for task in declared("model").values() if task.takes == kind), None)
    return {block: (kind,) if kind else task_classes(block) for block, kind in named.items()}


def _with_classes(key: Key, engine: str) -> Key:
    """Add the tested class names to the text of a key whose values are library classes."""
    listed = CLASSES[engine].get(key.name)
    return dataclasses.replace(key, text=f"{key.text} Classes: {', '.join(listed)}.") if listed else key


def _one(name: str, keys: dict[str, Key], classes: dict[str, tuple[type, ...]], engine: str) -> str:
    """Return the help of one key: description, type and default; for a group, its keys."""
    name = name.lstrip("-").replace(".init_args.", ".")
    found = {key.name: _with_classes(key, engine) for key in walk(keys, classes)}
    if name not in found:
        everywhere = {key.name: key for key in walk(keys, {block: task_classes(block) for block in classes})}
        if name not in everywhere:
            near = nearest(name, list(found))
            raise UserError(f"--help {name}: unknown key." + (f" Did you mean {near}?" if near else
                                                                      " --help alone lists all."))
        found = everywhere
    lines = [_entry(found[name])]
    inner = [key for key in found.values() if key.name.startswith(f"{name}.")]
    lines += [_entry(key) for key in inner if key.name.count(".") == name.count(".") + 1]
    block = name.partition(".")[0]
    if block in classes and name.count(".") == 1 and len(classes[block]) > 1:
        variants = _variants(name.partition(".")[2], {kind: keys_of(kind, block) for kind in classes[block]})
        if len(variants) > 1:
            lines = [line for key, names in variants for line in (_entry(key), f"Only for {', '.join(names)}.")]
            return "\n".join([*lines, "More: docs/fields.md"])
    if block in classes and "." in name:
        has = [class_name(kind) for kind in task_classes(block) if name.split(".")[1] in keys_of(kind)]
        if len(has) < len(task_classes(block)):
            lines.append(f"Only for {', '.join(has)}.")
    return "\n".join([*lines, f"More: docs/{'fields' if '.' in name or inner else 'commands'}.md"])


def _all(command: str, keys: dict[str, Key], classes: dict[str, tuple[type, ...]], engine: str) -> str:
    """Return the help of every key, grouped by recipe block."""
    parts = [f"usage: python train.py {command} --config RECIPE [--KEY VALUE …]", COMMANDS[command].line,
             "Every recipe key is also an option: --trainer.max_steps 3 sets trainer: {max_steps: 3}. Help for one "
             "key: "
             f"{command} --help KEY."]
    top = [key for key in keys.values() if block_in(key.type) is None and key.text]
    lines = ["\n\n".join(_wrap(part) for part in parts), "", "Options:",
             *map(_indent, (CONFIG, PRINT, TRUST)), *(_entry(key) for key in top)]
    for name in ("trainer", "model", "data", "checkpoint", "samples", "mmlu", "publish"):
        kinds = classes.get(name)
        if kinds is None:
            inner = {each: _with_classes(key, engine) for each, key in keys_of(block_in(keys[name].type), name).items()}
            lines += ["", f"{name}: {keys[name].text}", *_entries(inner)]
        else:
            lines += ["", *_block(name, kinds)]
    return "\n".join(lines)


def _block(name: str, kinds: tuple[type, ...]) -> list[str]:
    """Return the help of `model` or `data` for these classes."""
    if len(kinds) > 1:
        return _by_task(name, kinds)
    summary = (kinds[0].__doc__ or "").split("\n\n")[0].strip()
    return [f"{name} ({class_name(kinds[0])}): {summary}", *_entries(keys_of(kinds[0], name))]


def _by_task(name: str, kinds: tuple[type, ...]) -> list[str]:
    """Return the keys common to all classes of a block, then the additional keys of each class."""
    own = {kind: keys_of(kind, name) for kind in kinds}
    common = {each: key for each, key in own[kinds[0]].items() if all(each in keys for keys in own.values())}
    lines = [f"{name}, for every task ({', '.join(class_name(kind) for kind in kinds)}):", *_entries(common)]
    groups: dict[str, dict[str, Key]] = {}
    for kind, keys in own.items():
        for each, key in keys.items():
            if each not in common:
                names = next(names for _, names in _variants(each, own) if class_name(kind) in names)
                groups.setdefault(", ".join(names), {}).setdefault(each, key)
    for names, keys in groups.items():
        lines += ["", f"{name}, for {names}:", *_entries(keys)]
    return lines


def _variants(name: str, own: dict[type, dict[str, Key]]) -> list[tuple[Key, list[str]]]:
    """Return the different declarations of a key, as `loss`, with the names of the classes that have each.

    Args:
        own: The keys of each class.
    """
    found: list[tuple[Key, list[str]]] = []
    for kind, keys in own.items():
        if name in keys:
            names = next((names for key, names in found if key == keys[name]), None)
            if names is None:
                found.append((keys[name], names := []))
            names.append(class_name(kind))
    return found


def _entries(keys: dict[str, Key]) -> list[str]:
    lines, explained = [], set()
    for key in keys.values():
        lines.append(_entry(key))
        kind = block_in(key.type)
        if kind is not None and (kind, key.name.rpartition(".")[0]) not in explained:
            explained.add((kind, key.name.rpartition(".")[0]))  # explain the keys of a source only once
            lines += [_entry(inner) for inner in keys_of(kind, key.name).values()]
    return lines


def _entry(key: Key) -> str:
    is_block = block_in(key.type) is not None
    kind = "" if is_block and "." not in key.name else f" {in_words(key.type, key.name, as_type=True)}"
    has_default = key.default is None or key.default is not REQUIRED and not is_block
    default = f" (default: {_value(key.default)})" if has_default else ""
    return _indent(f"--{key.name}{kind}{default}\n{key.text}")


def _value(value: Any) -> str:
    return as_yaml([value], default_flow_style=True).strip()[1:-1]


def _indent(text: str) -> str:
    head, _, body = text.partition("\n")
    return "\n".join([f"  {head}", *textwrap.wrap(" ".join(body.split()), _width(), initial_indent=" " * 6,
                                                 subsequent_indent=" " * 6, break_on_hyphens=False)])


def _wrap(text: str) -> str:
    return textwrap.fill(text, _width(), break_on_hyphens=False)


def _width() -> int:
    return max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
