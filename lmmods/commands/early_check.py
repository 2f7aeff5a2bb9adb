"""Print help and report errors in a command line or its recipes before an engine's libraries are imported.

Importing the libraries takes seconds, so the command line is first parsed against light declarations that validate
fields as the real classes do. The engine's own parser runs only if this finds no error. Anything that the declarations
do not cover, such as a user-defined task or a callback's settings, is left to that parser: nothing is refused here
that it would accept.
"""

import dataclasses
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import yaml

from lmmods.commands import declarations
from lmmods.commands.command_line import CommandLine, RecipeTypes
from lmmods.commands.keys import (
    REQUIRED,
    TRAINERS,
    Key,
    block_in,
    in_words,
    keys_of,
    nearest,
    recipe_keys,
    task_classes,
    walk,
)
from lmmods.commands.mistakes import Mistakes, check_name, class_of, find_mistakes, read_layers
from lmmods.commands.registry import COMMANDS, ENGINE_COMMANDS
from lmmods.commands.trainer_keys import check_recipe_values
from lmmods.core.errors import UserError, user_error_in
from lmmods.evaluation.mmlu import MMLUEvaluator
from lmmods.evaluation.samples import SampleWriter
from lmmods.recipe.files import as_yaml
from lmmods.recipe.jsonargparse_compat import list_classes, options_of, replace_check
from lmmods.recipe.trust import ForeignCode, guarded_imports
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.hub_upload import Publisher

# Modules that this stage may import when a recipe names them; none of them imports a heavy library.
LIGHT = (declarations.__name__, "lmmods.core.settings", "lmmods.recipe.source")
LEFT = object()  # placeholder for a value that only the engine can validate


class EarlyCommandLine(CommandLine):
    """Command line built from the declarations."""

    def __init__(self, engine: str, arguments: list[str]):
        types = RecipeTypes(TRAINERS[engine], declarations.TaskModule, declarations.DataModule, CheckpointPolicy,
                            SampleWriter, MMLUEvaluator, Publisher)
        super().__init__(types, engine, arguments)
        listed = declarations.TASKS | declarations.CLASSES[engine]
        for option in (option for parser in self.commands.values() for option in options_of(parser)):
            if option.dest in listed:
                list_classes(option, listed[option.dest])
                replace_check(option, self._check_known(option.dest))

    def judge(self, arguments: list[str]) -> None:
        """Validate `arguments` as `check_early` does."""
        try:
            with guarded_imports(LIGHT):
                config = self.parse(arguments)
                recipe = config[config.subcommand]
                if config.subcommand in self.commands and all(recipe.get(key) is None or _is_known(recipe[key], names)
                                                              for key, names in declarations.TASKS.items()):
                    check_recipe_values(self.commands[config.subcommand], recipe, self.engine)
                    self._check_fields(config, recipe)
        except (ForeignCode, ImportError):  # code that the engine's parser may be able to import
            return

    def _check_fields(self, config: Any, recipe: Any) -> None:
        """Raise the UserError of a constructor that rejects its fields; leave other exceptions to the engine."""
        for key in declarations.CLASSES[self.engine]:
            recipe[key] = None
        try:
            made = self.parser.instantiate(config)[config.subcommand]
            made.model.check_data(made.data)
        except Exception as error:
            if mistake := user_error_in(error):
                raise mistake from error

    def _check_known(self, key: str) -> Callable[[Callable[[Any], Any], Any, Any], Any]:
        """Return a check of blocks with a declared class; blocks of other classes are left to the engine."""
        names = declarations.TASKS.get(key, ())

        def check(original: Callable[[Any], Any], value: Any, before: Any) -> Any:
            for path in map(_class_path, value if isinstance(value, list) else [value]):
                if re.fullmatch(r"[A-Z]\w+", path) and yaml.safe_load(path) == path:
                    check_name(key, path, self.engine)
            return original(value) if _is_known(value if _class_path(value) else before, names) else LEFT

        return check


def check_early(arguments: list[str], engine: str) -> None:
    """Print help or reject an invalid command line; return if it is valid or only the engine's parser can tell.

    Raises:
        SystemExit: Help or an error was printed.
        UserError: A value has the right type, but no engine can use it.
    """
    if arguments[0] in ENGINE_COMMANDS:
        if wants_help(arguments):
            print(help_of(arguments[0], arguments[1:], engine))
            sys.exit(0)
        if not any(word.partition("=")[0].endswith(".help") for word in arguments):
            find_mistakes(arguments, engine, COMMANDS[arguments[0]].example)
    if all(map(_is_judged, arguments, [*arguments[1:], ""])):
        EarlyCommandLine(engine, arguments).judge(arguments)


def _is_judged(word: str, following: str) -> bool:
    """True if the declarations suffice to interpret a word of the command line."""
    option, equals, value = word.partition("=")
    if option.endswith(".help"):
        names = declarations.TASKS.get(option[2:-5], ())
        return bool(names) and (value if equals else following) in ("", *names)
    return not option.startswith("--pr") and "://" not in word  # --print_config, or a remote file


def _is_known(value: Any, names: tuple[str, ...]) -> bool:
    """True if a block names a declared class."""
    return _class_path(value).removeprefix(f"{declarations.__name__}.") in names


def _class_path(value: Any) -> str:
    """Return the class path in a block's value; empty if there is none."""
    if isinstance(value, tuple):  # jsonargparse's form of an option such as --model.class_path SFT
        value = dict([value])
    path = value if isinstance(value, str) else value.get("class_path") if hasattr(value, "get") else None
    return path if isinstance(path, str) else ""


# ---------------------------------------------------------------------------------------------------------------------
# Help of commands that take a recipe: `--help` lists every key, model and data by task; `--help KEY` shows one key.

HELP = ("--help", "-h")
CONFIG = ("-c, --config FILE\nA recipe: a file, or the name of one that comes with the project. Later ones go over "
          "earlier ones.")
PRINT = "--print_config\nPrint the recipe that all of it makes, and do nothing."
TRUST = ("--trust_recipe_code true or false (default: false)\nLet the recipe name code outside of lightning, torch and "
         "this project, which then runs. On the command line only, never in a file.")


def wants_help(words: list[str]) -> bool:
    """True if a command line asks for help."""
    return any(word.partition("=")[0] in HELP for word in words)


def help_of(command: str, words: list[str], engine: str) -> str:
    """Return the requested help: for one key, or for all.

    Raises:
        UserError: There is no such key, or a recipe cannot be read.
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
    """Return the model and data classes that the recipe names; all of them if it names none or a user-defined one."""
    layers = read_layers(words, mistakes)
    named = {block: class_of(block, layers, mistakes) for block in declarations.TASKS}
    for block, other in (("model", "data"), ("data", "model")):  # one implies the other
        if named[block] is None and (known := named[other]):
            short = known.__name__
            named[block] = getattr(declarations, f"{short}Data" if block == "data" else short.removesuffix("Data"))
    return {block: (kind,) if kind else task_classes(block) for block, kind in named.items()}


def _with_classes(key: Key, engine: str) -> Key:
    """Add the tested class names to the text of a key whose values are library classes."""
    listed = declarations.CLASSES[engine].get(key.name)
    return dataclasses.replace(key, text=f"{key.text} Classes: {', '.join(listed)}.") if listed else key


def _one(name: str, keys: dict[str, Key], classes: dict[str, tuple[type, ...]], engine: str) -> str:
    """Return the help of one key: description, type and default; for a group, its keys."""
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
    """Return the help of every key, grouped by recipe block."""
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
    """Return the keys common to all classes of a block, then the additional keys of each class."""
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
            explained.add((kind, key.name.rpartition(".")[0]))  # explain the keys of a source only once
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
