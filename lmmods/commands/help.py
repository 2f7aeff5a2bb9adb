"""Help of the commands: `--help` lists every key, model and data by task; `--help KEY` shows one key.

It imports a library only for the help of that library's class (`--trainer.logger.help WandbLogger`).
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
from lmmods.recipe.images import ImageDataFields, ImageFields
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
from lmmods.recipe.tasks.base import ConversationFields
from lmmods.recipe.tasks.sft import SFTFields

HELP = ("--help", "-h")
CONFIG = ("-c, --config FILE\nRecipe file, or the name of a shipped recipe. May be repeated; later files override "
          "earlier ones.")
PRINT = "--print_config\nPrint the resolved recipe and exit."
TRUST = ("--trust_recipe_code boolean (default: false)\nAllow the recipe to run code from outside lightning, torch "
         "and this project. Command line only, never in a file.")


def wants_help(words: list[str]) -> bool:
    """True if a command line asks for help."""
    return any(map(_is_help_option, words))


def help_of(command: str, words: list[str]) -> str:
    """Return the requested help of a command: for one key or class, or for all.

    Raises:
        UserError: The key does not exist, or a recipe cannot be read.
    """
    index = next(position for position, word in enumerate(words) if _is_help_option(word))
    option, equals, name = words[index].partition("=")
    rest = words[:index] + words[index + 1:]
    if not equals and index < len(rest) and not rest[index].startswith("-"):
        name = rest.pop(index)
    options, unnamed = options_of(command)
    if COMMANDS[command].takes != "recipe":
        return _help_of_options(command, options, unnamed, name)
    engine = engine_of(rest)
    reader = Reader(recipe_keys(options, engine), engine)
    if option.endswith(".help"):
        return _help_of_class(option[2:].removesuffix(".help"), name, reader)
    classes = _named_classes(rest, reader)
    if name:
        return _help_of_key(name, reader.keys, classes, engine)
    return _help_of_all(command, reader.keys, classes, engine)


def _is_help_option(word: str) -> bool:
    option = word.partition("=")[0]
    return option in HELP or option.startswith("--") and option.endswith(".help")


def _help_of_options(command: str, options: dict[str, Key], unnamed: list[Key], name: str) -> str:
    """Return the help of a command that takes no recipe, or of one of its options."""
    if name:
        by_name = {key.name: key for key in (*walk(options, {}), *unnamed)}
        if name.lstrip("-") not in by_name:
            match = nearest(name.lstrip("-"), list(by_name))
            raise UserError(f"--help {name}: unknown option." + (f" Did you mean {match}?" if match else ""))
        return _entry(by_name[name.lstrip("-")])
    words = [key.name.upper() if key.default is REQUIRED else f"[{key.name.upper()}]" for key in unnamed]
    words += [f"--{key.name} {key.name.upper()}" for key in options.values() if key.default is REQUIRED]
    note = " Also takes the options of fit." if COMMANDS[command].takes else ""
    lines = [_wrap(" ".join(["usage: python train.py", command, *words, "[--OPTION VALUE …]"])), "",
             _wrap(COMMANDS[command].line + note), ""]
    lines += [_indent(f"{key.name.upper()}\n{key.text}") for key in unnamed]
    return "\n".join([*lines, *_entries(options)])


def _help_of_class(key: str, name: str, reader: Reader) -> str:
    """Return the help of a class, which may be a value of a key."""
    if key in BASES and (not name or known_class(key, name, reader.engine)):
        classes = (known_class(key, name, reader.engine),) if name else task_classes(key)
        return "\n".join(_help_of_block(key, classes))
    types, hint = load_engine(reader.engine), None if key in BASES else _type_of_key(key, reader)
    bases = (getattr(types, key),) if key in BASES else tuple(
        types.libraries[library] for library in library_classes(hint) if library in types.libraries)
    cls = find_class(name, bases, key) if name else None
    if cls is None:
        names = ", ".join(names_of(key, reader.engine))
        raise UserError(f"--{key}.help needs the name of a class. Use one of {names}, or an import path.")
    summary = (cls.__doc__ or "").strip().split("\n\n")[0]
    return "\n".join([_wrap(f"{key} ({class_name(cls)}): {' '.join(summary.split())}"),
                      *_entries(keys_of(cls, key))])


def _type_of_key(key: str, reader: Reader) -> Any:
    by_name = {entry.name: entry for entry in walk(reader.keys, {})}
    if key not in by_name:
        match = nearest(key, list(by_name))
        raise UserError(f"--{key}.help: unknown key." + (f" Did you mean {match}?" if match else ""))
    return by_name[key].type


def _named_classes(words: list[str], reader: Reader) -> dict[str, tuple[type, ...]]:
    """Return the model and data classes of the recipe; all classes if it names none or a user's own."""
    layers = reader.layers(words)
    named = {block: reader.class_of(block, layers) for block in BASES}
    if named["model"] and not named["data"]:  # each implies the other
        named["data"] = declared("data").get(named["model"].takes)
    elif named["data"] and not named["model"]:
        data_name = class_name(named["data"])
        named["model"] = next((task for task in declared("model").values() if task.takes == data_name), None)
    return {block: (cls,) if cls else task_classes(block) for block, cls in named.items()}


def _with_classes(key: Key, engine: str) -> Key:
    """Add the tested class names to the text of a key whose values are library classes."""
    listed = CLASSES[engine].get(key.name)
    return dataclasses.replace(key, text=f"{key.text} Classes: {', '.join(listed)}.") if listed else key


def _help_of_key(name: str, keys: dict[str, Key], classes: dict[str, tuple[type, ...]], engine: str) -> str:
    """Return the help of one key: description, type and default; for a group, its keys."""
    name = name.lstrip("-").replace(".init_args.", ".")
    by_name = {key.name: _with_classes(key, engine) for key in walk(keys, classes)}
    if name not in by_name:
        all_by_name = {key.name: key for key in walk(keys, {block: task_classes(block) for block in classes})}
        if name not in all_by_name:
            match = nearest(name, list(by_name))
            raise UserError(f"--help {name}: unknown key." + (f" Did you mean {match}?" if match
                                                             else " --help alone lists all keys."))
        by_name = all_by_name
    lines = [_entry(by_name[name])]
    inner = [key for key in by_name.values() if key.name.startswith(f"{name}.")]
    lines += [_entry(key) for key in inner if key.name.count(".") == name.count(".") + 1]
    block = name.partition(".")[0]
    if block in classes and name.count(".") == 1 and len(classes[block]) > 1:
        variants = _variants(name.partition(".")[2], {cls: keys_of(cls, block) for cls in classes[block]})
        if len(variants) > 1:
            lines = [line for key, names in variants for line in (_entry(key), f"Only for {', '.join(names)}.")]
            return "\n".join([*lines, f"More: docs/{_page(name)}.md"])
    if block in classes and "." in name:
        class_names = [class_name(cls) for cls in task_classes(block) if name.split(".")[1] in keys_of(cls)]
        if len(class_names) < len(task_classes(block)):
            lines.append(f"Only for {', '.join(class_names)}.")
    return "\n".join([*lines, f"More: docs/{_page(name) if '.' in name or inner else 'commands'}.md"])


def _page(name: str) -> str:
    """Return the page of docs/ with the table of a key: that of its task, unless several tasks share the table."""
    block, *rest = name.split(".")
    if block not in BASES or not rest:
        return "metrics" if block == "mmlu" else "fields"
    if rest[0] in {"model": ImageFields, "data": ImageDataFields}[block].__annotations__:
        return "images"
    shared = {"model": SFTFields, "data": ConversationFields}[block]
    owner = next(cls for cls in (BASES[block], shared, *task_classes(block)) if rest[0] in keys_of(cls))
    return "fields" if owner in (BASES[block], shared) else f"tasks/{owner.__module__.rpartition('.')[2]}"


def _help_of_all(command: str, keys: dict[str, Key], classes: dict[str, tuple[type, ...]], engine: str) -> str:
    """Return the help of every key, grouped by recipe block."""
    parts = [f"usage: python train.py {command} --config RECIPE [--KEY VALUE …]", COMMANDS[command].line,
             "Every recipe key is also an option: --trainer.max_steps 3 sets trainer: {max_steps: 3}. Help for one "
             f"key: {command} --help KEY."]
    top = [key for key in keys.values() if block_in(key.type) is None and key.text]
    lines = ["\n\n".join(_wrap(part) for part in parts), "", "Options:",
             *map(_indent, (CONFIG, PRINT, TRUST)), *(_entry(key) for key in top)]
    for name in ("trainer", "model", "data", "checkpoint", "samples", "mmlu", "publish"):
        block_classes = classes.get(name)
        if block_classes is None:
            inner = keys_of(block_in(keys[name].type), name)
            inner = {key_name: _with_classes(key, engine) for key_name, key in inner.items()}
            lines += ["", f"{name}: {keys[name].text}", *_entries(inner)]
        else:
            lines += ["", *_help_of_block(name, block_classes)]
    return "\n".join(lines)


def _help_of_block(name: str, classes: tuple[type, ...]) -> list[str]:
    """Return the help of `model` or `data` for these classes."""
    if len(classes) > 1:
        return _help_by_task(name, classes)
    summary = (classes[0].__doc__ or "").split("\n\n")[0].strip()
    return [f"{name} ({class_name(classes[0])}): {summary}", *_entries(keys_of(classes[0], name))]


def _help_by_task(name: str, classes: tuple[type, ...]) -> list[str]:
    """Return the keys common to all classes of a block, then the additional keys of each class."""
    keys_by_class = {cls: keys_of(cls, name) for cls in classes}
    common = {key_name: key for key_name, key in keys_by_class[classes[0]].items()
              if all(key_name in keys for keys in keys_by_class.values())}
    lines = [f"{name}, for every task ({', '.join(class_name(cls) for cls in classes)}):", *_entries(common)]
    groups: dict[str, dict[str, Key]] = {}
    for cls, keys in keys_by_class.items():
        for key_name, key in keys.items():
            if key_name not in common:
                names = next(names for _, names in _variants(key_name, keys_by_class) if class_name(cls) in names)
                groups.setdefault(", ".join(names), {}).setdefault(key_name, key)
    for names, keys in groups.items():
        lines += ["", f"{name}, for {names}:", *_entries(keys)]
    return lines


def _variants(name: str, keys_by_class: dict[type, dict[str, Key]]) -> list[tuple[Key, list[str]]]:
    """Return the different declarations of a key, such as `loss`, each with the names of its classes."""
    variants: list[tuple[Key, list[str]]] = []
    for cls, keys in keys_by_class.items():
        if name in keys:
            names = next((names for key, names in variants if key == keys[name]), None)
            if names is None:
                variants.append((keys[name], names := []))
            names.append(class_name(cls))
    return variants


def _entries(keys: dict[str, Key]) -> list[str]:
    lines, explained = [], set()
    for key in keys.values():
        lines.append(_entry(key))
        block_class = block_in(key.type)
        if block_class is not None and (block_class, key.name.rpartition(".")[0]) not in explained:
            explained.add((block_class, key.name.rpartition(".")[0]))  # explain the keys of a source only once
            lines += [_entry(inner) for inner in keys_of(block_class, key.name).values()]
    return lines


def _entry(key: Key) -> str:
    is_block = block_in(key.type) is not None
    type_text = "" if is_block and "." not in key.name else f" {in_words(key.type, key.name, as_type=True)}"
    has_default = key.default is None or key.default is not REQUIRED and not is_block
    default = f" (default: {_value(key.default)})" if has_default else ""
    return _indent(f"--{key.name}{type_text}{default}\n{key.text}")


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
