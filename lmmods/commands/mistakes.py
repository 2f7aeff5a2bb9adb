"""Report all mistakes in a command line and its recipes at once, before a parser or library is imported.

A command line is a sequence of layers: recipe files and options, later ones overriding earlier ones. Each value in
every layer is checked against the type of its key; the merged values are then checked by their classes. Anything that
the declarations do not cover, such as a user-defined task or a logger's settings, is left to the engine's parser:
nothing is refused here that it would accept.
"""

import difflib
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jsonargparse import dict_to_namespace

from lmmods.commands import declarations
from lmmods.commands.keys import (
    REQUIRED,
    Key,
    block_in,
    in_words,
    is_left,
    keys_of,
    listed_in,
    members,
    nearest,
    recipe_keys,
    task_classes,
    walk,
)
from lmmods.commands.trainer_keys import check_values
from lmmods.core.errors import UserError, gathering, user_error_in
from lmmods.recipe.allowed_callbacks import REFUSED, check_callback
from lmmods.recipe.engines import ENGINES
from lmmods.recipe.files import CONFIG_OPTIONS, Written, as_yaml, plain, read_value, read_written, shortened
from lmmods.recipe.foreign_keys import PROGRAMS, written_for

LEFT = object()  # placeholder for a value that only the engine can validate
WRONG = object()  # placeholder for a rejected value
CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
NUMBER = re.compile(r"-\d+|-\d*\.\d+")


@dataclass
class Layer:
    """Values set by one recipe or one option.

    Args:
        place: File name or option key; empty for a recipe given inline on the command line.
        is_file: Whether the layer is a file.
        tree: Keys and values, nested as in a recipe.
        word: Index of the word on the command line, and the prefix of the value within it (`--model.lora=`).
    """

    place: str
    is_file: bool
    tree: dict[Any, Any]
    word: tuple[int, str]

    def at(self, key: str, line: int | None) -> str:
        """Return the location prefix of a key in a message."""
        if self.is_file:
            return f"{self.place}:{line}: " if line else f"{self.place}: "
        return "" if not self.place else "--" if key == self.place else f"--{self.place}: "


@dataclass
class Mistakes:
    """Collector of the mistakes in a command line.

    Args:
        keys: Allowed keys.
        classes: Classes of `model` and `data`. A block missing here takes its class from its key's type; one with None
            is left to the engine.
    """

    keys: dict[str, Key]
    engine: str = "torch"
    classes: dict[str, type | None] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)  # blocks whose class is named, declared or not
    found: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)  # merged plain values of all layers
    places: dict[str, str] = field(default_factory=dict)  # key -> its location prefix in messages
    dropped: set[str] = field(default_factory=set)  # keys already rejected, or the likely target of a rejected key

    # Layers -----------------------------------------------------------------------------------------------------------

    def read(self, layers: list[Layer]) -> None:
        """Check every value against the type of its key and merge the layers."""
        for layer in layers:
            values = self._block(layer.tree, self.keys, "", layer)
            self.given = _overlaid(self.given, values)

    def _block(self, tree: dict[Any, Any], keys: dict[str, Key], name: str, layer: Layer,
               names_class: bool = False) -> dict[str, Any]:
        """Return the valid values of a block.

        Args:
            names_class: Whether the block may have a `class_path`, with its keys under `init_args`.
        """
        result: dict[str, Any] = {}
        for written, value in tree.items():
            head, _, rest = written.partition(".")
            line = getattr(written, "line", None)
            if rest:
                value = {Written.of(rest, rest, line or 1): value}
            if names_class and head == "init_args" and isinstance(value, dict):
                result = _overlaid(result, self._block(value, keys, name, layer))
                continue
            if names_class and head == "class_path":
                continue  # read by class_of
            key = keys.get(head.removesuffix("+"))
            if key is None:
                self._unknown(f"{name}.{head}".removeprefix("."), value, layer, line)
                continue
            self.places[key.name] = layer.at(key.name, line)
            read = self._value(value, key.type, key, layer, line)
            if read is not WRONG:
                result[key.name.rpartition(".")[2]] = read
        return result

    def _value(self, value: Any, hint: Any, key: Key, layer: Layer, line: int | None) -> Any:
        """Convert a value to the type of its key; `WRONG` if it is rejected."""
        if key.name in self.classes and self.classes[key.name] is None:
            self._mean(value, keys_of(block_in(hint)))
            return LEFT
        if is_left(hint):
            self._check_names(key.name, value, layer, line)
            return LEFT
        if isinstance(value, Written) and value[:1] in ("[", "{") and str not in members(hint):
            value = read_value(value)  # a quoted mapping or list
        if isinstance(value, dict) and (kind := self.classes.get(key.name) or block_in(hint)):
            if len(members(hint)) > 1 and any(name in value for name in CLASS_KEYS):
                return LEFT
            return self._block(value, keys_of(kind, key.name), key.name, layer, key.name in self.classes)
        if isinstance(value, Written) and key.name in self.classes:
            return {} if value else self._refuse(value, key, layer, line)  # a class name
        if isinstance(value, Written) and "." not in key.name and block_in(hint) and "://" in value:
            return LEFT  # a remote file
        if isinstance(value, Written) and value.reads_as is None and type(None) not in members(hint):
            if key.name.startswith("trainer."):
                return None  # Lightning sets its own defaults for these
            if key.default is not REQUIRED and "." in key.name and block_in(hint) is None:
                wanted = f"set; without the key it is {shown(key.default)}"
                return self._refuse(value, key, layer, line, wanted)
        read = converted(value, hint)
        return self._refuse(value, key, layer, line) if read is WRONG else self._inner(value, read, hint, key, layer)

    def _mean(self, tree: Any, keys: dict[str, Key]) -> None:
        """Keep texts of an undeclared class verbatim, for keys that every class has."""
        for name, value in tree.items() if isinstance(tree, dict) else ():
            if name in keys and not isinstance(value, dict):
                converted(value, keys[name].type)
            self._mean(value, keys if name == "init_args" else {})

    def _inner(self, value: Any, read: Any, hint: Any, key: Key, layer: Layer) -> Any:
        """Check the mappings in a list that may contain blocks."""
        if not isinstance(value, list):
            return read
        kind = next(filter(None, (block_in(get_args(each)[0]) for each in members(hint) if get_origin(each) is list)),
                    None)
        if kind is None:
            return read
        read = [LEFT if isinstance(each, dict) and any(name in each for name in CLASS_KEYS) else
                self._block(each, keys_of(kind, key.name), key.name, layer) if isinstance(each, dict) else is_now
                for each, is_now in zip(value, read, strict=True)]
        return LEFT if LEFT in read else read

    # Messages ---------------------------------------------------------------------------------------------------------

    def tell_of(self, place: str, message: str) -> None:
        """Record a mistake once, with its location prefix."""
        if f"{place}{message}" not in self.found:
            self.found.append(f"{place}{message}")

    def _refuse(self, value: Any, key: Key, layer: Layer, line: int | None, wanted: str | None = None) -> Any:
        from lmmods.recipe.foreign_keys import foreign_value

        at = layer.at(key.name, getattr(value, "line", line) if layer.is_file else None)
        wanted = wanted or ("a class_path and its init_args" if key.name in self.classes
                            else in_words(key.type, key.name))
        other = foreign_value(key.name, value) if isinstance(value, Written) else ""
        near = difflib.get_close_matches(str(value), listed_in(key.type), 1, 0.7) if isinstance(value, Written) else []
        other = other or (f" Did you mean {near[0]}?" if near else "")
        self.tell_of(at, f"{key.name} is {shown(value)}, but must be {wanted}.{other}")
        self.dropped.add(key.name)
        return WRONG

    def _unknown(self, name: str, value: Any, layer: Layer, line: int | None) -> None:
        from lmmods.recipe.foreign_keys import told

        at = layer.at(name, line)
        if name == "config":
            self.tell_of(at, "config is no key of a recipe, which names no other. Give several on the command line: "
                           "--config A --config B.")
        elif others := self._others_with(name):
            self.tell_of(at, f"{name} is no key of {self.classes[name.partition('.')[0]].__name__}: "
                           f"{' and '.join(others)} {'have' if len(others) > 1 else 'has'} it.")
        elif "trainer" not in self.keys:
            near = nearest(name, self.names)
            self.dropped.add(near or "")
            self.tell_of(at, f"{name} is no option." + (f" Did you mean --{near}?" if near else ""))
        elif foreign := told(name, plain(value) if isinstance(value, Written) else None):
            self.tell_of(at, foreign)
        else:
            near = nearest(name, self.names)
            self.dropped.add(near or "")
            self.tell_of(at, f"{name} is no key." + (f" Did you mean {near}?" if near else ""))

    def _others_with(self, name: str) -> list[str]:
        """Return the classes that have a key which the named class lacks."""
        block, _, leaf = name.partition(".")
        return [kind.__name__ for kind in task_classes(block) if leaf in keys_of(kind)] if (
            self.classes.get(block)) else []

    @property
    def names(self) -> list[str]:
        """Return all key names for the named classes; for a block without one, those of every declared class."""
        classes = {block: (kind,) if kind else task_classes(block) for block, kind in self.classes.items()}
        return [key.name for key in walk(self.keys, classes)]

    def _check_names(self, key: str, value: Any, layer: Layer, line: int | None) -> None:
        """Reject short names of classes that do not exist."""
        for path in map(_class_path, value if isinstance(value, list) else [value]):
            if re.fullmatch(r"[A-Z]\w+", path or "") and path.reads_as == path:
                try:
                    check_name(key, path, self.engine)
                except UserError as error:
                    self.tell_of(layer.at(key, line), str(error))
                    self.dropped.add(key)

    # Merged layers ----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Report missing keys, and check the merged values against their classes and the engine."""
        for key in self.keys.values():
            if key.name in self.classes:
                if key.name not in self.named and not self._is_dropped(key.name):
                    names = declarations.TASKS[key.name]
                    self.tell_of("", f"{key.name} is missing: name its class, as in --{key.name} {names[-1]} "
                                   f"({', '.join(names)}).")
            elif key.default is REQUIRED and block_in(key.type) is None and key.name not in self.given:
                self._missing(key)
        made = {name: self._made(name, kind) for name, kind in
                ((key.name, self.classes.get(key.name) or block_in(key.type)) for key in self.keys.values())
                if kind is not None and name != "trainer" and (name in self.given or name not in self.classes)
                and not (name in self.classes and self.classes[name] is None)}
        if "trainer" in self.keys:
            self._gather(lambda: check_values(self._recipe(), self.engine))
        if made.get("model") is not None and made.get("data") is not None:
            self._gather(lambda: made["model"].check_data(made["data"]))

    def _missing(self, key: Key) -> None:
        if not self._is_dropped(key.name):
            option = "" if "." in key.name else "--"
            self.tell_of("", f"{option}{key.name} is missing: it must be {in_words(key.type, key.name)}.")

    def _made(self, name: str, kind: type) -> Any:
        """Instantiate a block's class; None if that fails."""
        values = self.given.get(name, {})
        return self._object(kind, name, values) if isinstance(values, dict) else None

    def _object(self, kind: type, name: str, values: dict[str, Any]) -> Any:
        keys, options = keys_of(kind, name), dict(values)
        if LEFT in options.values():
            return None
        for key, value in values.items():
            inner = block_in(keys[key].type)
            parts = value if isinstance(value, list) else [value]
            if inner and any(isinstance(each, dict) for each in parts):
                made = [self._object(inner, keys[key].name, each) if isinstance(each, dict) else each for each in parts]
                if None in made and keys[key].default is REQUIRED:
                    return None
                if None in made:
                    options.pop(key)
                else:
                    options[key] = made if isinstance(value, list) else made[0]
        missing = [key for key in keys.values() if key.default is REQUIRED
                   and key.name.rpartition(".")[2] not in options]
        for key in missing:
            self._missing(key)
        return None if missing else self._gather(lambda: kind(**options), name.partition(".")[0])

    def _gather(self, make: Callable[[], Any], block: str = "") -> Any:
        """Call a function and record its UserErrors; other exceptions are left to the engine."""
        made = None
        with gathering() as messages:
            try:
                made = make()
            except Exception as error:
                if mistake := user_error_in(error):
                    messages.append(str(mistake))
                elif not messages:
                    return None
        for message in messages:
            name = message.partition(" ")[0]
            if f"{block}.{name}" in self.places:
                message, name = f"{block}.{message}", f"{block}.{name}"
            if self._is_dropped(*re.findall(r"[\w.]+\w", message)):
                continue
            self.dropped.add(name)
            self.tell_of(self.places.get(name, "") if message.startswith(f"{name} is ") else "", message)
        return None if messages else made

    def _is_dropped(self, *words: str) -> bool:
        """True if one of these words is, or ends, a key that was already rejected."""
        return any(word == key or f".{key}".endswith(f".{word}") for word in words for key in self.dropped)

    def _recipe(self) -> Any:
        recipe = {key.name: key.default for key in self.keys.values() if block_in(key.type) is None}
        recipe |= {name: value for name, value in self.given.items() if name not in self.classes and name != "trainer"}
        defaults = {name: key.default for name, key in keys_of(block_in(self.keys["trainer"].type), "trainer").items()}
        trainer = self.given.get("trainer", {})
        recipe["trainer"] = defaults | {name: value for name, value in trainer.items() if value is not LEFT}
        for block in self.classes:
            value = self.given.get(block)
            recipe[block] = {"class_path": block, "init_args": value if isinstance(value, dict) else {}}
        return dict_to_namespace(recipe)


# Types ----------------------------------------------------------------------------------------------------------------


def converted(value: Any, hint: Any) -> Any:
    """Convert a value to a type; `WRONG` if it does not match.

    If the type includes text, a value that matches none of its other types is kept as written: `1234567`, `no`,
    `12345e67`. Mappings of blocks are returned unchanged.
    """
    kinds = members(hint)
    if isinstance(value, dict):
        if any(block_in(each) for each in kinds):
            return value
        for each in kinds:
            if each is Any or each is dict:
                return plain(value)
            if get_origin(each) is dict:
                inner = {converted(name, get_args(each)[0]): converted(item, get_args(each)[1])
                         for name, item in value.items()}
                return WRONG if WRONG in inner or WRONG in inner.values() else inner
        return WRONG
    if isinstance(value, list):
        for each in kinds:
            if each is Any:
                return plain(value)
            if get_origin(each) is list:
                items = [converted(item, get_args(each)[0]) for item in value]
                return WRONG if any(item is WRONG for item in items) else items
        return WRONG
    return _scalar(value, kinds)


def _scalar(value: Written, kinds: tuple[Any, ...]) -> Any:
    for reads_as in (value.reads_as, *([_read_again(value)] if value.reads_as == value and str not in kinds else [])):
        if any(each is Any or each is type(reads_as) and each is not str or each is float and type(reads_as) is int
               for each in kinds):
            return reads_as
    if any(get_origin(each) is Literal and value in get_args(each) for each in kinds):
        return str(value)
    if str in kinds:
        value.is_meant = True
        return str(value)
    return WRONG


def _read_again(value: Written) -> Any:
    """Parse a quoted text as if it had no quotes."""
    read = read_value(str(value))
    return read.reads_as if isinstance(read, Written) else value


def shown(value: Any) -> str:
    """Format a value as in a recipe, on one line."""
    if isinstance(value, Written):
        return shortened(str(value)) if value else "null" if value.reads_as is None else "empty"
    text = as_yaml(plain(value), default_flow_style=True, width=10**6).strip().removesuffix("\n...")
    return shortened(text)


# Words of the command line --------------------------------------------------------------------------------------------


def read_layers(words: list[str], mistakes: Mistakes, unnamed: Sequence[Key] = ()) -> list[Layer]:
    """Return the layers of a command line; mistakes in its words are recorded.

    Args:
        unnamed: Keys that positional words stand for.
    """
    layers, index, strays = [], 0, []
    known = {key.name for key in walk(mistakes.keys, {block: task_classes(block) for block in declarations.TASKS})}
    while index < len(words):
        word, at = words[index], index
        index += 1
        if word == "--":
            raise UserError("-- ends the options, and nothing may follow those of a recipe. Take it out.")
        if not word.startswith("-") or " " in word.partition("=")[0]:
            strays.append(word)
            continue
        option, equals, value = word.partition("=")
        if option.startswith("-c") and not option.startswith("--") and option != "-c":
            option, equals, value = "-c", "=", word[2:].removeprefix("=")
        if option.startswith("--print_config"):
            continue
        if not equals:
            following = words[index] if index < len(words) else None
            if following is None or following.startswith("-") and following != "-" and " " not in following and (
                    not NUMBER.fullmatch(following)):
                if option in CONFIG_OPTIONS or _name(option) in known or "trainer" not in mistakes.keys:
                    mistakes.tell_of("", f"{option} has no value: {option} VALUE.")
                    mistakes.dropped.add(_name(option))
                    continue
                value = "true"  # a flag of another program
            else:
                value, at, index = following, index, index + 1
        if option in CONFIG_OPTIONS and "trainer" in mistakes.keys:
            layers += _config(value, (at, f"{option}=" if equals else ""), mistakes)
        elif layer := _option(option, value, (at, f"{option}=" if equals else ""), mistakes):
            layers.append(layer)
    if not any(get_origin(key.type) is list for key in unnamed):
        example = "--trainer.max_steps 3" if "trainer" in mistakes.keys else f"--{next(iter(mistakes.keys))} …"
        for word in strays[len(unnamed):]:
            if "trainer" in mistakes.keys and _is_file(word):
                raise UserError(f"{word} is no option. A recipe is given as in --config {word}.")
            mistakes.tell_of("", f"{shortened(word)} is no option: options begin with --, as in {example}.")
    for key in unnamed[len(strays):]:
        if key.default is REQUIRED:
            mistakes.tell_of("", f"{key.name.upper()} is missing: {key.text}")
    return layers


def _config(value: str, word: tuple[int, str], mistakes: Mistakes) -> list[Layer]:
    tree = read_written(value)
    is_file = not re.search(r"[{\n]", value)
    if is_file and (program := written_for(plain(tree))):
        raise UserError(f"{value} is a configuration of {PROGRAMS[program]}, not a recipe. Make one of it: "
                        f"python train.py migrate {value} --out recipe.yaml")
    return [Layer(value if is_file else "", is_file, tree, word)]


def _name(option: str) -> str:
    """Return the key that an option sets."""
    return option.lstrip("-").removesuffix("+").replace(".init_args.", ".")


def _option(option: str, value: str, word: tuple[int, str], mistakes: Mistakes) -> Layer | None:
    name = _name(option)
    block = block_in(mistakes.keys[name].type) if name in mistakes.keys else None
    if block and name not in mistakes.classes and not value.lstrip().startswith("{") and _is_file(value):
        return Layer(value, True, {name: read_written(value)}, word)  # --trainer FILE
    is_text = name in mistakes.keys and set(members(mistakes.keys[name].type)) <= {str, type(None)}
    tree = Written.of(value, value) if is_text else read_value(value)
    for part in reversed(name.split(".")):
        tree = {part: [tree] if option.endswith("+") and part == name.split(".")[-1] and not isinstance(tree, list)
                else tree}
    return Layer(name, False, tree, word)


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):
        return False


def as_meant(words: list[str], layers: list[Layer]) -> list[str]:
    """Inline the recipes and mappings in which YAML would misread a text, such as a number-like revision."""
    words = list(words)
    for layer in layers:
        before, tree = as_yaml(_unmeant(layer.tree)), plain(layer.tree)
        index, beginning = layer.word
        if as_yaml(tree) == before or not layer.is_file and layer.place and words[index][len(beginning):][:1] not in (
                "[", "{"):
            continue
        if layer.place and not layer.is_file:
            for part in layer.place.split("."):
                tree = tree[part]
        elif layer.is_file and words[index - 1:index] not in ([each] for each in CONFIG_OPTIONS) and not beginning:
            tree = next(iter(tree.values()))
        words[index] = f"{beginning}{as_yaml(tree, default_flow_style=True, width=10**6).strip()}"
    return words


def _unmeant(tree: Any) -> Any:
    if isinstance(tree, Written):
        return tree.reads_as
    if isinstance(tree, dict):
        return {_unmeant(key): _unmeant(value) for key, value in tree.items()}
    return [_unmeant(each) for each in tree] if isinstance(tree, list) else tree


# Classes --------------------------------------------------------------------------------------------------------------


def class_of(block: str, layers: list[Layer], mistakes: Mistakes) -> type | None:
    """Return the declared class that `model` or `data` ends up with; None if it is another one, or none is named."""
    name, layer = None, None
    for each in layers:
        for written, value in each.tree.items():
            if written == f"{block}.class_path":
                name, layer = value, each
            elif written == block and (path := _class_path(value)):
                name, layer = path, each
            elif written == block and isinstance(value, dict) and "class_path" in value:
                mistakes.named.add(block)
                line = next((getattr(key, "line", None) for key in value if key == "class_path"), None)
                mistakes.tell_of(each.at(block, line), f"{block}.class_path is {shown(value['class_path'])}, but must "
                                                       "be the name of a class.")
    if name is None:
        return None
    mistakes.named.add(block)
    short = name.removeprefix(f"{declarations.__name__}.")
    if short in declarations.TASKS[block]:
        return getattr(declarations, short)
    if re.fullmatch(r"[A-Z]\w+", name) and name.reads_as == name:
        try:
            check_name(block, name, mistakes.engine)
        except UserError as error:
            mistakes.tell_of(layer.at(block, name.line), str(error))
    return None


def _class_path(value: Any) -> Written | None:
    """Return the class path in a block's value; None if there is none."""
    path = value.get("class_path") if isinstance(value, dict) else value
    return path if isinstance(path, Written) else None


def check_name(key: str, name: str, engine: str) -> None:
    """Raise UserError for the short name of a class that does not exist."""
    listed = (declarations.TASKS | declarations.CLASSES[engine]).get(key, ())
    folders = {each: declarations.FOLDERS[each].get(key) for each in ENGINES}
    folder = folders.pop(engine)
    if key == "trainer.callbacks" and engine == "torch" and name in REFUSED:
        check_callback(f"lightning.{name}")
    if folder is None or name in _classes_in(folder):
        return
    if key == "model":
        for other, elsewhere in folders.items():
            if name in _classes_in(elsewhere):
                raise UserError(f"model is {name}, a task of engine {other} alone: {folder} has no file for it. "
                                f"Use --engine {other}, or write that file (docs/extending.md).")
    if name in listed:
        return
    near = difflib.get_close_matches(name, listed, 1)
    raise UserError(f"{key} is {name}, but must be {', '.join(listed)} or the import path of a class."
                    + (f" Did you mean {near[0]}?" if near else ""))


def _classes_in(package: str) -> set[str]:
    """Return the class names defined in a package's files, without importing them."""
    files = [path for folder in importlib.import_module(package).__path__ for path in Path(folder).glob("*.py")]
    return {name for path in files for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)}


# The whole command line -----------------------------------------------------------------------------------------------


def _overlaid(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(under)
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = _overlaid(result[name], value) if both else value
    return result


def read_recipe_words(command: str, words: list[str], engine: str) -> tuple[Mistakes, list[Layer]]:
    """Return the mistakes in the values of a recipe command, and its layers."""
    mistakes = Mistakes(recipe_keys(command, engine), engine)
    layers = read_layers(words, mistakes)
    for block in declarations.TASKS:
        mistakes.classes[block] = class_of(block, layers, mistakes)
    mistakes.read(layers)
    return mistakes, layers


def find_mistakes(arguments: list[str], engine: str, example: str = "") -> None:
    """Raise a UserError that lists every mistake of a command that takes a recipe, if there are any.

    Args:
        example: Valid command line to show if something is missing.
    """
    command, *words = arguments
    mistakes, layers = read_recipe_words(command, words, engine)
    if not mistakes.found and all(layer.place == "engine" for layer in layers):
        raise UserError(f"{command} needs a recipe. For example: python train.py {command} {example}")
    if not any(word.startswith("--print_config") for word in words):  # an incomplete recipe can be printed too
        mistakes.judge()
    refuse(mistakes.found, f"{command} {example}")


def find_mistakes_of_options(words: list[str], keys: dict[str, Key], unnamed: Sequence[Key], example: str) -> None:
    """Raise a UserError that lists every mistake in the options of a command, if there are any.

    Args:
        unnamed: Keys that positional words stand for.
        example: Valid command line to show if something is missing.
    """
    mistakes = Mistakes(keys)
    mistakes.read(read_layers(words, mistakes, unnamed))
    mistakes.judge()
    refuse(mistakes.found, example)


def with_texts_as_meant(command: str, words: list[str], engine: str) -> list[str]:
    """Rewrite the words of a command so that every parser reads texts as texts: `revision: 12345e67`."""
    return as_meant(words, read_recipe_words(command, words, engine)[1])


def refuse(found: list[str], example: str = "") -> None:
    """Raise a UserError that lists these mistakes, if any; with an example if all are missing keys."""
    is_example_wanted = example and all(" is missing" in each for each in found)
    added = f"For example: python train.py {example}" if is_example_wanted else ""
    if len(found) == 1:
        raise UserError(f"{found[0]} {added}".rstrip())
    if found:
        raise UserError(f"{len(found)} mistakes:\n  " + "\n  ".join([*found, added] if added else found))
