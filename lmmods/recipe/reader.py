"""Read a command line and its recipes into typed fields, and report all mistakes at once.

A command line is a sequence of layers: recipe files and options, later ones overriding earlier ones. Each value in
every layer is checked against the type of its key; the merged values are then checked by the dataclasses of fields. No
library is imported for this. Values whose classes belong to a library or to the user, such as a logger or the user's
own task, are skipped: `with_library_classes` reads them, in the same way, once the engine's libraries are imported.
"""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, get_origin

from lmmods.core.errors import UserError, gathering, refuse_value, user_error_in
from lmmods.recipe.classes import (
    BASES,
    CLASSES,
    check_callback,
    check_name,
    class_name,
    declared,
    find_class,
    import_path,
    known_class,
)
from lmmods.recipe.conversion import WRONG, convert, convert_word, format_value, init_args_of
from lmmods.recipe.engines import ENGINES, load_engine
from lmmods.recipe.files import (
    CONFIG_OPTIONS,
    Scalar,
    is_inline,
    option_values,
    plain,
    read_value,
    read_with_lines,
    shorten,
)
from lmmods.recipe.foreign_keys import PROGRAMS, find_program, foreign_value, hint_for
from lmmods.recipe.keys import (
    BLOCKS,
    REQUIRED,
    Key,
    block_in,
    in_words,
    keys_of,
    library_classes,
    listed_in,
    members,
    nearest,
    only_block_in,
    recipe_keys,
    takes_any_key,
    task_classes,
    walk,
)
from lmmods.recipe.objects import ClassArguments, fill, fill_value, items_of, objects, without_objects
from lmmods.recipe.values import check_values

PLAIN = bool | int | float | str | list | dict | timedelta | None
UNREAD = object()  # placeholder for a value whose class is a library's or the user's
CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
TASKS = ("model", "data")  # blocks that name a class
NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


@dataclass
class Layer:
    """Values set by one recipe or one option.

    Args:
        origin: File name or option key; empty for an inline recipe on the command line.
        is_file: True for a file.
        tree: Keys and values, nested as in a recipe.
        option: The option as typed, with a `+` that appends; empty for a recipe.
        value: The text of the option's value.
    """

    origin: str
    is_file: bool
    tree: dict[Any, Any]
    option: str = ""
    value: str = ""

    def location(self, key: str, line: int | None) -> str:
        """Return the location prefix of a key in a message."""
        if self.is_file:
            return f"{self.origin}:{line}: " if line else f"{self.origin}: "
        return "" if not self.origin else "--" if key == self.origin else f"--{self.origin}: "


@dataclass
class Recipe:
    """A command and its recipe: what the command line and its files set, converted to the right types.

    Args:
        options: Options of the command itself, with their defaults.
        seed: `seed_everything`.
        explicit: Values set in each block, without class names: {"trainer": {...}, "model": {...}, ...}. `UNREAD`
            stands for values that only the engine's libraries can read.
        classes: Fields of the declared classes of `model` and `data`; None if the user's own class is named.
        layers: Recipes and options that set the values, in order.
        words: The command line.
        keys: Top-level keys.
    """

    command: str
    engine: str
    options: dict[str, Any]
    seed: bool | int
    explicit: dict[str, dict[str, Any]]
    classes: dict[str, type | None]
    layers: list[Layer]
    words: list[str]
    keys: dict[str, Key]

    def values(self, block: str) -> dict[str, Any]:
        """Return the plain values of a block with defaults filled in."""
        return fill(self.fields_class(block), self.explicit.get(block, {}))

    def fields_class(self, block: str) -> type:
        """Return the dataclass with the fields of a block."""
        return self.classes.get(block) or only_block_in(recipe_keys({}, self.engine)[block].type)

    def whole(self) -> dict[str, Any]:
        """Return the recipe as plain values with defaults filled in, secrets included."""
        blocks = {name: without_objects(self.values(name)) for name in ("trainer", *self.classes, *BLOCKS)}
        for name in self.classes:
            cls = self.fields_class(name)
            is_declared = cls in declared(name).values()
            blocks[name] = {"class_path": class_name(cls) if is_declared else import_path(cls),
                            "init_args": blocks[name]}
        return {"seed_everything": self.seed, **{name: blocks[name] for name in ("trainer", "model", "data")},
                "engine": self.engine, **{name: blocks[name] for name in BLOCKS}}

    def is_typed_true(self, key: str) -> bool:
        """Return True if the last option of the command line for a key sets it to true, whatever files say."""
        return find_typed_value(self.layers, key) is True


def parse(arguments: list[str], options: dict[str, Key], example: str = "", checked: bool = True) -> Recipe:
    """Read the command line of a command that takes a recipe.

    Args:
        arguments: The command and its words.
        options: Options of the command itself.
        example: Valid arguments to show if something is missing.
        checked: False accepts an incomplete recipe, and values that contradict each other.

    Raises:
        UserError: The command line or a recipe has mistakes; the message lists all.
    """
    command, *words = arguments
    files: dict[str, dict[Any, Any]] = {}
    # The engine first, since it determines the keys of `trainer`; then the classes of `model` and `data`, which
    # determine theirs; then all values.
    engine = engine_of(words, files)
    reader = Reader(recipe_keys(options, engine), engine, files=files)
    layers = reader.layers(words)
    for block in TASKS:
        reader.classes[block] = reader.class_of(block, layers)
    reader.merge(layers)
    if not reader.mistakes and all(layer.origin == "engine" for layer in layers):
        raise UserError(f"{command} needs a recipe. For example: python train.py {command} {example}")
    if checked:
        reader.check()
    refuse(reader.mistakes, f"{command} {example}")
    command_options = {name: reader.values.get(name, key.default) for name, key in options.items()}
    typed_overwrite = find_typed_value(layers, "overwrite")
    if typed_overwrite is not None and "overwrite" not in options:
        raise UserError(f"--overwrite applies only to fit, not to {command}. Remove it.")
    if "overwrite" in options:  # an option takes precedence over any file, as it may delete a run
        folder = reader.values.get("trainer", {}).get("default_root_dir")
        command_options["overwrite"] = (
            _may_overwrite(layers, folder) if typed_overwrite is None else typed_overwrite is True)
    # Blocks only: the other keys are options, the seed and the engine.
    blocks = {name: reader.values.get(name, {}) for name in reader.keys if block_in(reader.keys[name].type)}
    seed = reader.values.get("seed_everything", reader.keys["seed_everything"].default)
    return Recipe(command, engine, command_options, seed, blocks, reader.classes, layers, words, reader.keys)


def with_library_classes(recipe: Recipe) -> Recipe:
    """Read the values that only the classes of the engine's libraries, or the user's own, can check.

    If there is none, no engine is imported.

    Raises:
        UserError: A class does not exist or may not be named, or its arguments are wrong.
    """
    if not any(value is UNREAD for values in recipe.explicit.values() for value in (
            values.values() if isinstance(values, dict) else (values,))):
        return recipe
    types = load_engine(recipe.engine)
    reader = Reader(recipe.keys, recipe.engine,
                    libraries=types.libraries | {BASES["model"]: types.model, BASES["data"]: types.data})
    for block in TASKS:
        reader.classes[block] = reader.class_of(block, recipe.layers)
        if recipe.explicit[block] is UNREAD and block not in reader.named_blocks:
            names = [*declared(block)]
            reader.report("", f"{block}.class_path is missing. Name its class, for example --{block} {names[0]} "
                              f"({', '.join(names)}).")
    refuse(reader.mistakes)
    reader.merge(recipe.layers)
    blocks = {block: reader.values.get(block, {}) if values is UNREAD else {
        name: reader.values[block].get(name) if value is UNREAD else value for name, value in values.items()}
        for block, values in recipe.explicit.items()}
    for block, cls in reader.classes.items():
        if recipe.classes[block] is None:
            reader.complete(cls, blocks[block], block)
    for name, value in blocks["trainer"].items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ClassArguments):
                reader.complete(item.kind, item.init_args, f"trainer.{name}")
    refuse(reader.mistakes)
    return dataclasses.replace(recipe, explicit=blocks, classes=reader.classes)


def engine_of(words: list[str], files: dict[str, dict[Any, Any]] | None = None) -> str:
    """Return the engine named by `--engine`, or else by the last `--config` that names one.

    Args:
        files: Recipes read before, by the argument of `--config`. This function adds the recipes that it reads.

    Raises:
        UserError: A recipe file cannot be read, or no engine has this name.
    """
    engine, files = "torch", {} if files is None else files
    for value in option_values(words, *CONFIG_OPTIONS):
        files[value] = read_with_lines(value)
        engine = plain(files[value].get("engine", engine))
    engine = next(reversed(option_values(words, "--engine")), engine)
    if engine not in ENGINES:
        raise UserError(f"engine is {engine!r}, but must be torch or jax.")
    return engine


def find_typed_value(layers: list[Layer], key: str) -> Any:
    """Return the value that the last option for a key sets; None without one."""
    values = [layer.value for layer in layers if layer.option and _name(layer.option) == key]
    return plain(read_value(values[-1])) if values else None


def _may_overwrite(layers: list[Layer], folder: str | None) -> bool:
    """Return True if a recipe lets `fit` start over in a run folder: its key counts only for the folder next to it."""
    overwrites = False
    for layer in layers:
        if "overwrite" in layer.tree:
            tree = plain(layer.tree)
            trainer = tree.get("trainer")
            named_folder = trainer.get("default_root_dir") if isinstance(trainer, dict) else None
            # If an option or another recipe names the folder, the author of this key did not mean to delete it.
            overwrites = tree["overwrite"] is True and named_folder is not None and named_folder == folder
    return overwrites


def parse_options(words: list[str], keys: dict[str, Key], positional: Sequence[Key], example: str) -> dict[str, Any]:
    """Read the command line of a command without a recipe: its arguments by name, groups of settings as objects.

    Args:
        positional: Keys of positional words.
        example: Valid command line to show if something is missing.

    Raises:
        UserError: The command line has mistakes; the message lists all.
    """
    reader = Reader(keys | {key.name: key for key in positional})
    reader.merge(reader.layers(words, positional))
    instances = reader.check()
    refuse(reader.mistakes, example)
    values = {name: reader.values.get(name, key.default) for name, key in reader.keys.items()}
    return values | {name: instance for name, instance in instances.items() if name in reader.values}


def refuse(mistakes: list[UserError], example: str = "") -> None:
    """Raise a UserError that lists these mistakes, if any; with an example if all are missing keys."""
    messages = [str(mistake) for mistake in mistakes]
    example_lines = []
    if example and all(" is missing" in message for message in messages):
        example_lines = [f"For example: python train.py {example}"]
    if len(messages) == 1:
        raise UserError(" ".join([*messages, *example_lines]))
    if messages:
        raise UserError(f"{len(messages)} mistakes:\n  " + "\n  ".join([*messages, *example_lines]))


def read_object(cls: Callable[..., Any], settings: dict[str, Any], key: str) -> Any:
    """Call a class or function with a mapping of plain values as its arguments, read like the blocks of a recipe.

    Args:
        key: Key of the mapping, for messages.

    Raises:
        UserError: A key is unknown or missing, or has a value of another type. Within `gathering` all such errors are
            recorded, and None is returned.
    """
    reader, keys = Reader({}), keys_of(cls, key)
    values = reader.read_block(settings, keys, key, Layer("", False, {}))
    for argument in keys.values():
        if argument.default is REQUIRED and argument.name.removeprefix(f"{key}.") not in values:
            reader.report_missing(argument)
    for mistake in reader.mistakes:
        refuse_value(str(mistake), *mistake.keys)
    return None if reader.mistakes else cls(**objects(cls, values))


# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Reader:
    """Reads the layers of a command line and collects their mistakes.

    Args:
        keys: Allowed keys.
        files: Recipes read before, by the argument of `--config`.
        classes: Fields of the classes of `model` and `data`. The class of a block that is missing here is the type of
            its key; None leaves the block to the engine.
        libraries: Class in the fields -> the engine's class. None skips values of such classes.
    """

    keys: dict[str, Key]
    engine: str = "torch"
    files: dict[str, dict[Any, Any]] = field(default_factory=dict)
    classes: dict[str, type | None] = field(default_factory=dict)
    libraries: dict[type, Any] | None = None
    named_blocks: set[str] = field(default_factory=set)  # blocks with a class name, declared or not
    mistakes: list[UserError] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # merged plain values of all layers
    locations: dict[str, str] = field(default_factory=dict)  # key -> its location prefix in messages
    rejected: set[str] = field(default_factory=set)  # keys already rejected, or the likely target of a rejected key

    @property
    def takes_recipe(self) -> bool:
        """True for the command line of a command that takes a recipe."""
        return "trainer" in self.keys

    # Words of the command line ---------------------------------------------------------------------------------------

    def layers(self, words: list[str], positional: Sequence[Key] = ()) -> list[Layer]:
        """Return the layers of a command line; mistakes in its words are recorded.

        Args:
            positional: Keys of positional words.
        """
        layers, rest, loose_words = [], list(words), []
        # Keys of all classes, as the classes of this command line are not known yet.
        names = {key.name for key in walk(self.keys, {block: task_classes(block) for block in TASKS})}
        while rest:
            word = rest.pop(0)
            if word == "--":
                raise UserError("-- ends the options, and nothing may follow them. Remove it.")
            # A word with a space before `=` is a string that starts with a dash, not an option.
            if not word.startswith("-") or " " in word.partition("=")[0]:
                loose_words.append(word)
                continue
            option, equals, value = word.partition("=")
            # argparse's short form without a space: -cFILE.
            if option.startswith("-c") and not option.startswith("--") and option != "-c":
                option, equals, value = "-c", "=", word[2:].removeprefix("=")
            if option == "--print_config":
                continue
            if not equals:
                # No value follows if the next word looks like an option; -, negative numbers and words with spaces do
                # not.
                if not rest or rest[0].startswith("-") and rest[0] != "-" and " " not in rest[0] and (
                        not NEGATIVE_NUMBER.fullmatch(rest[0])):
                    if option in CONFIG_OPTIONS or _name(option) in names or not self.takes_recipe:
                        self.report("", f"{option} has no value. Use {option} VALUE.")
                        self.rejected.add(_name(option))
                        continue
                    value = "true"  # a flag of another program
                else:
                    value = rest.pop(0)
            if option in CONFIG_OPTIONS and self.takes_recipe:
                layers.append(self._read_config(value))
            else:
                layers.append(self._read_option(option, value))
        return layers + self._read_positional(loose_words, positional)

    def _read_positional(self, words: list[str], positional: Sequence[Key]) -> list[Layer]:
        """Return the layers of the words that do not belong to an option."""
        layers = []
        for index, key in enumerate(positional):
            # A list takes all remaining words.
            if get_origin(key.type) is list:
                items, words = words[index:], words[:index]
                if items:
                    layers.append(Layer(key.name, False, {key.name: [Scalar.of(word, word) for word in items]}))
                elif key.default is REQUIRED:
                    self.report("", f"{key.name.upper()} is missing: {key.text}")
            elif index < len(words):
                layers.append(Layer(key.name, False, {key.name: Scalar.of(words[index], words[index])}))
            elif key.default is REQUIRED:
                self.report("", f"{key.name.upper()} is missing: {key.text}")
        example = "--trainer.max_steps 3" if self.takes_recipe else f"--{next(iter(self.keys), 'help')} …"
        for word in words[len(positional):]:
            if self.takes_recipe and _is_file(word):
                raise UserError(f"Unexpected argument {word}. To pass a recipe, use --config {word}.")
            self.report("", f"Unexpected argument {shorten(word)}. Options start with --, for example {example}.")
        self.rejected |= {key.name for key in positional}  # a missing one has been reported
        return layers

    def _read_config(self, value: str) -> Layer:
        tree = self.files[value] if value in self.files else read_with_lines(value)
        is_file = not is_inline(value)
        if is_file and (program := find_program(plain(tree))):
            raise UserError(f"{value} is a configuration of {PROGRAMS[program]}, not a recipe. Convert it: "
                            f"python train.py migrate {value} --out recipe.yaml")
        return Layer(value if is_file else "", is_file, tree)

    def _read_option(self, option: str, value: str) -> Layer:
        name = _name(option)
        block = block_in(self.keys[name].type) if name in self.keys else None
        if block and name not in TASKS and not value.lstrip().startswith("{") and _is_file(value):
            return Layer(value, True, {name: read_with_lines(value)})  # --trainer FILE
        # Keep a string verbatim: a commit 1234567 is not a number.
        is_text = name in self.keys and set(members(self.keys[name].type)) <= {str, type(None)}
        tree: Any = Scalar.of(value, value) if is_text else read_value(value)
        # Nest the value from the inside out; a `+` appends to the last part of the key.
        for part in reversed(name.split(".")):
            part = Scalar.of(part, part)
            tree = {part: [tree] if option.endswith("+") and part == name.split(".")[-1] and not isinstance(tree, list)
                    else tree}
        return Layer(name, False, tree, option, value)

    # Classes ---------------------------------------------------------------------------------------------------------

    def class_of(self, block: str, layers: list[Layer]) -> type | None:
        """Return the class of `model` or `data`; None if it is not declared, or not named."""
        # The last layer that names a class counts.
        name: Scalar | None = None
        for candidate in layers:
            for word, value in candidate.tree.items():
                if word == f"{block}.class_path":
                    name, layer = value, candidate
                elif word == block and (path := _class_path(value)):
                    name, layer = path, candidate
                elif word == block and isinstance(value, dict) and "class_path" in value:
                    self.named_blocks.add(block)
                    line = next((getattr(key, "line", None) for key in value if key == "class_path"), None)
                    self.report(candidate.location(block, line),
                                f"{block}.class_path is {format_value(value['class_path'])}, but must "
                                "be the name of a class.")
        if name is None:
            return None
        self.named_blocks.add(block)
        if cls := known_class(block, name, self.engine):
            return cls
        try:
            if self.libraries is not None:
                cls = find_class(name, (self.libraries[BASES[block]],), block)
                if cls is None:
                    self.report(layer.location(block, name.line),
                                f"{block} is {shorten(name)}, but must be a class_path and its init_args.", block)
                return cls
            # A short name: report at once if the class does not exist. Import paths are left to the engine.
            if re.fullmatch(r"[A-Z]\w+", name) and name.yaml_value == name:
                check_name(block, name, self.engine)
        except UserError as error:
            self.report(layer.location(block, name.line), str(error), block)
        return None

    # Values ----------------------------------------------------------------------------------------------------------

    def merge(self, layers: list[Layer]) -> None:
        """Check every value against the type of its key and merge the layers."""
        for layer in layers:
            values = self.read_block(layer.tree, self.keys, "", layer)
            self.values = self._overlay(self.values, values, self.keys, layer)

    def _overlay(self, base: dict[str, Any], updates: dict[str, Any], keys: dict[str, Key], layer: Layer
                 ) -> dict[str, Any]:
        """Override values by a layer's: blocks are merged, other values replaced.

        A block that may also be a string, such as a source, is replaced if its mapping is as complete as the string.
        """
        result = dict(base)
        for name, value in updates.items():
            if name not in keys:  # an argument of a class that takes any
                result[name] = value
                continue
            key, old_value = keys[name], result.get(name)
            # A named class has other keys than the type of its block.
            cls = self.classes.get(key.name) or block_in(key.type)
            is_entry = layer.origin.startswith(f"{key.name}.")  # an option that sets one entry of a mapping
            if (isinstance(value, dict) and isinstance(old_value, dict) and cls
                    and (is_entry or not _is_complete(value, cls, key.type))):
                result[name] = self._overlay(old_value, value, keys_of(cls, key.name), layer)
            elif isinstance(value, dict) and isinstance(old_value, dict) and is_entry:
                result[name] = old_value | value
            elif layer.option.endswith("+") and isinstance(value, list):
                old_items = old_value if isinstance(old_value, list) else [] if old_value is None else [old_value]
                result[name] = [*old_items, *value]
            else:
                result[name] = value
        return result

    def read_block(self, tree: dict[Any, Any], keys: dict[str, Key], name: str, layer: Layer,
                   names_class: bool = False, takes_any: bool = False) -> dict[str, Any]:
        """Return the valid values of a block; mistakes in the others are recorded.

        Args:
            names_class: True if the block may have a `class_path`, with its keys under `init_args`.
            takes_any: True if other keys are allowed too. A name similar to one of `keys` is still a mistake.
        """
        result: dict[str, Any] = {}
        for word, value in tree.items():
            head, _, rest = str(word).partition(".")
            line = getattr(word, "line", None)
            # A dotted key `a.b: x` is read as `a: {b: x}`.
            if rest:
                value = {Scalar.of(rest, rest, line or 1): value}
            # Keys under `init_args` and keys next to it belong to the same block.
            if names_class and head in ("init_args", "dict_kwargs") and isinstance(value, dict):
                inner = self.read_block(value, keys, name, layer, takes_any=takes_any)
                result = self._overlay(result, inner, keys, layer)
                continue
            if names_class and head == "class_path":
                continue  # read by class_of
            key = keys.get(head.removesuffix("+"))
            if key is None and takes_any and not difflib.get_close_matches(head, keys, 1, 0.7):
                result[head] = plain(value)
                continue
            if key is None:
                self._report_unknown(f"{name}.{head}".removeprefix("."), value, layer, line, keys)
                continue
            self.locations[key.name] = layer.location(key.name, line)
            converted = self._convert(value, key.type, key, layer, line)
            if converted is not WRONG:
                result[key.name.rpartition(".")[2]] = converted
        return result

    def _convert(self, value: Any, hint: Any, key: Key, layer: Layer, line: int | None) -> Any:
        """Convert a value to the type of its key; `WRONG` if it is rejected."""
        # A user's class: only its signature has the types of its keys.
        if key.name in self.classes and self.classes[key.name] is None:
            self._keep_strings(value, keys_of(only_block_in(hint)))
            return UNREAD
        # Words such as null or true need no library; all other values of these keys do.
        if library_classes(hint):
            if self.libraries is None:
                self._check_names(key.name, value, layer, line)
            converted = convert_word(value, hint)
            return converted if converted is not WRONG else UNREAD if self.libraries is None else (
                self._read_class(value, hint, key, layer, line))
        # A mapping or list in quotes, as in --key '[1, 2]'.
        if isinstance(value, Scalar) and value[:1] in ("[", "{") and str not in members(hint):
            value = read_value(value)
        if isinstance(value, dict) and (cls := self.classes.get(key.name) or block_in(hint)):
            # Dumped configurations name the class of a member of a union.
            if len(members(hint)) > 1 and any(name in value for name in CLASS_KEYS):
                settings = init_args_of(value, cls)
                if settings is WRONG:
                    return self._refuse(value, key, layer, line)
                value = settings
            return self.read_block(value, keys_of(cls, key.name), key.name, layer, key.name in self.classes)
        if isinstance(value, Scalar) and key.name in self.classes:
            return {} if value else self._refuse(value, key, layer, line)  # a class name
        # An explicit null for a type without null.
        if isinstance(value, Scalar) and value.yaml_value is None and type(None) not in members(hint):
            if key.name.startswith("trainer."):
                return None  # Lightning sets its own defaults for these
            if key.default is not REQUIRED and "." in key.name and block_in(hint) is None:
                expected = f"set. Remove the key for its default, {format_value(key.default)}"
                return self._refuse(value, key, layer, line, expected)
        converted = convert(value, hint)
        if converted is WRONG:
            return self._refuse(value, key, layer, line)
        return self._read_items(value, converted, hint, key, layer)

    def _read_class(self, value: Any, hint: Any, key: Key, layer: Layer, line: int | None) -> Any:
        """Read the class that a value names, with its arguments; `WRONG` if it is rejected."""
        if isinstance(value, Scalar) and value[:1] in ("[", "{"):
            value = read_value(value)
        if isinstance(value, list):
            item_type = items_of(hint)
            if item_type is Any:
                return self._refuse(value, key, layer, line)
            classes = [self._read_class(item, item_type, key, layer, line) for item in value]
            return WRONG if WRONG in classes else classes
        # Arguments of the class that an earlier layer names; in a list, of the last one.
        previous: Any = self.values
        for part in key.name.split("."):
            previous = previous.get(part) if isinstance(previous, dict) else None
        earlier, last = (previous[:-1], previous[-1]) if isinstance(previous, list) and previous else ([], previous)
        cls, path = None, _class_path(value)
        if isinstance(value, dict) and "class_path" not in value and isinstance(last, ClassArguments):
            cls = last.kind
        elif path is not None:
            bases = tuple((self.libraries or {}).get(base, base) for base in library_classes(hint))
            try:
                cls = find_class(path, bases, key.name)
                if cls is not None and key.name == "trainer.callbacks" and self.engine == "torch":
                    check_callback(import_path(cls))
            except UserError as error:
                self.report(layer.location(key.name, path.line), str(error), key.name)
                self.rejected.add(key.name)
                return WRONG
        if cls is None:
            text = convert(value, hint) if isinstance(value, Scalar) and str in members(hint) else WRONG
            return self._refuse(value, key, layer, line) if text is WRONG else text
        arguments = dict(last.init_args) if isinstance(last, ClassArguments) and last.kind is cls else {}
        if isinstance(value, dict):
            keys = keys_of(cls, key.name)
            arguments |= self.read_block(value, keys, key.name, layer, True, takes_any_key(cls))
        result = ClassArguments(cls, arguments)
        return [*earlier, result] if path is None and isinstance(previous, list) else result

    def complete(self, cls: Any, arguments: dict[str, Any], name: str) -> None:
        """Fill in the defaults of a class's arguments, and report those that are missing."""
        for argument, key in (keys_of(cls, name) if inspect.isclass(cls) else {}).items():
            value = arguments.get(argument)
            if isinstance(value, ClassArguments):
                self.complete(value.kind, value.init_args, key.name)
            elif isinstance(value, dict) and block_in(key.type):
                self.complete(block_in(key.type), value, key.name)
            elif argument in arguments:
                arguments[argument] = fill_value(value, key.type)
            elif key.default is REQUIRED:
                location = self.locations.get(name, "")
                self.report_missing(key, "" if location.startswith("--") else location)
            # Other defaults, such as functions, cannot be written in a recipe.
            elif isinstance(key.default, PLAIN):
                arguments[argument] = key.default

    def _keep_strings(self, tree: Any, keys: dict[str, Key]) -> None:
        """Keep strings of an undeclared class verbatim, for keys that every class has."""
        for name, value in tree.items() if isinstance(tree, dict) else ():
            # For its side effect: it marks strings as such (`Scalar.is_text`), so that `plain` keeps them.
            if name in keys and not isinstance(value, dict):
                convert(value, keys[name].type)
            self._keep_strings(value, keys if name == "init_args" else {})

    def _read_items(self, value: Any, converted: Any, hint: Any, key: Key, layer: Layer) -> Any:
        """Check the mappings in a list that may contain blocks."""
        if not isinstance(value, list):
            self._note_locations(value, key.name, layer)
            return converted
        if (cls := block_in(items_of(hint))) is None:
            self._note_locations(value, key.name, layer)
            return converted
        return [self._convert(item, cls, key, layer, None) if isinstance(item, dict) else converted_item
                for item, converted_item in zip(value, converted, strict=True)]

    def _note_locations(self, value: Any, name: str, layer: Layer) -> None:
        """Record the locations of keys that only the class of a block can check, such as rewards."""
        items = {f"{name}.{word}": (word, item) for word, item in value.items()} if isinstance(value, dict) else {
            f"{name}[{index}]": (next(iter(item), None) if isinstance(item, dict) else item, item)
            for index, item in enumerate(value)} if isinstance(value, list) else {}
        for inner, (word, item) in items.items():
            self.locations[inner] = layer.location(inner, getattr(word, "line", None))
            self._note_locations(item, inner, layer)

    # Messages ---------------------------------------------------------------------------------------------------------

    def report(self, location: str, message: str, *keys: str) -> None:
        """Record a mistake once, with its location prefix.

        Args:
            keys: See UserError.
        """
        if all(f"{location}{message}" != str(mistake) for mistake in self.mistakes):
            self.mistakes.append(UserError(f"{location}{message}", *keys))

    def _refuse(self, value: Any, key: Key, layer: Layer, line: int | None, expected: str | None = None) -> Any:
        location = layer.location(key.name, getattr(value, "line", line) if layer.is_file else None)
        expected = expected or ("a class_path and its init_args" if key.name in self.classes
                                else in_words(key.type, key.name))
        hint = foreign_value(key.name, value) if isinstance(value, Scalar) else ""
        names = [*listed_in(key.type), *CLASSES[self.engine].get(key.name, ())]
        near = difflib.get_close_matches(value, names, 1, 0.7) if isinstance(value, str) else []
        hint = hint or (f" Did you mean {near[0]}?" if near else "")
        self.report(location, f"{key.name} is {format_value(value)}, but must be {expected}.{hint}", key.name)
        self.rejected.add(key.name)
        return WRONG

    def _report_unknown(self, name: str, value: Any, layer: Layer, line: int | None, keys: dict[str, Key]) -> None:
        """Record an unknown key.

        Args:
            keys: Keys that its block has.
        """
        location = layer.location(name, line)
        if not self.keys:  # the arguments of one object
            near = nearest(name.rpartition(".")[2], list(keys))
            self.report(location, f"{name} is not a key. The keys there are {', '.join(keys)}."
                        + (f" Did you mean {near}?" if near else ""), name)
        elif name == "config":
            self.report(location, "config is not a key: a recipe cannot name another one. Use several on the command "
                                  "line: --config A --config B.")
        elif (cls := self.classes.get(name.partition(".")[0])) and (classes := self._find_classes_with(name)):
            self.report(location, f"{name} is not a key of {class_name(cls)}: "
                                  f"{' and '.join(classes)} {'have' if len(classes) > 1 else 'has'} it.")
        elif not self.takes_recipe:
            near = nearest(name, self.names)
            self.rejected.add(near or "")
            self.report(location, f"{name} is not an option." + (f" Did you mean --{near}?" if near else ""))
        elif foreign := hint_for(name, plain(value) if isinstance(value, Scalar) else None):
            self.report(location, foreign)
        else:
            names = self.names
            if keys and next(iter(keys.values())).name not in names:  # the arguments of a library's class
                near = nearest(name.rpartition(".")[2], list(keys))
                near = near and keys[near].name
            else:
                near = nearest(name, names)
            self.rejected.add(near or "")
            self.report(location, f"{name} is not a key." + (f" Did you mean {near}?" if near else ""))

    def _find_classes_with(self, name: str) -> list[str]:
        """Return the names of the classes of a block that have this key."""
        block, _, leaf = name.partition(".")
        return [class_name(cls) for cls in task_classes(block) if leaf in keys_of(cls)]

    @property
    def names(self) -> list[str]:
        """Return all key names of the named classes; for a block without one, of every declared class."""
        classes = {block: (cls,) if cls else task_classes(block) for block, cls in self.classes.items()}
        return [key.name for key in walk(self.keys, classes)]

    def _check_names(self, key: str, value: object, layer: Layer, line: int | None) -> None:
        """Reject short names of classes that do not exist."""
        for path in map(_class_path, value if isinstance(value, list) else [value]):
            if path is not None and re.fullmatch(r"[A-Z]\w+", path) and path.yaml_value == path:
                try:
                    check_name(key, path, self.engine)
                except UserError as error:
                    self.report(layer.location(key, line), str(error))
                    self.rejected.add(key)

    # Merged layers ----------------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Report missing keys and values that their class or the engine rejects; return the objects of valid blocks."""
        # Missing keys first; blocks that lack one are not built below.
        for key in self.keys.values():
            if key.name in self.classes:
                if key.name not in self.named_blocks and not self._is_rejected(key.name):
                    names = [*declared(key.name)]
                    self.report("", f"{key.name} is missing. Name its class, for example --{key.name} {names[0]} "
                                   f"({', '.join(names)}).")
            elif key.default is REQUIRED and block_in(key.type) is None and key.name not in self.values:
                self.report_missing(key)
        # Neither `trainer`, which the engine builds, nor the user's own classes.
        instances = {name: self._build_block(name, cls) for name, cls in
                     ((key.name, self.classes.get(key.name) or block_in(key.type)) for key in self.keys.values())
                     if cls is not None and name != "trainer" and (name in self.values or name not in self.classes)
                     and not (name in self.classes and self.classes[name] is None)}
        if self.takes_recipe:
            self._gather(lambda: check_values(self._build_recipe(), self.engine))
        if instances.get("model") is not None and instances.get("data") is not None:
            self._gather(lambda: instances["model"].check_data(instances["data"]))
        return instances

    def report_missing(self, key: Key, location: str = "") -> None:
        """Record that a key is missing, unless a mistake about it is recorded."""
        if not self._is_rejected(key.name):
            option = "" if "." in key.name else "--"
            self.report(location, f"{option}{key.name} is missing. It must be {in_words(key.type, key.name)}.",
                        key.name)

    def _build_block(self, name: str, cls: type) -> Any:
        """Build the object of a block; None if that fails."""
        values = self.values.get(name, {})
        return self._build(cls, name, values) if isinstance(values, dict) else None

    def _build(self, cls: type, name: str, values: dict[str, Any]) -> Any:
        keys, options = keys_of(cls, name), dict(values)
        # The engine builds this object once its libraries are imported.
        if UNREAD in options.values():
            return None
        for key, value in values.items():
            inner = block_in(items_of(keys[key].type) if isinstance(value, list) else keys[key].type)
            items = value if isinstance(value, list) else [value]
            if inner and any(isinstance(item, dict) for item in items):
                built = [self._build(inner, keys[key].name, item) if isinstance(item, dict) else item for item in items]
                # The inner object's mistake is reported: build the outer one without it, if possible.
                if None in built and keys[key].default is REQUIRED:
                    return None
                if None in built:
                    options.pop(key)
                else:
                    options[key] = built if isinstance(value, list) else built[0]
        missing = [key for key in keys.values() if key.default is REQUIRED
                   and key.name.rpartition(".")[2] not in options]
        for missing_key in missing:
            self.report_missing(missing_key)
        return None if missing else self._gather(lambda: cls(**options), name.partition(".")[0])

    def _gather(self, make: Callable[[], Any], block: str = "") -> Any:
        """Call a function and record its UserErrors; other exceptions are left to the engine."""
        result = None
        with gathering() as errors:
            try:
                result = make()
            except Exception as error:
                if mistake := user_error_in(error):
                    errors.append(mistake)
                elif not errors:
                    return None
        for problem in errors:
            # A rejected key has its default here: do not report errors that follow from that.
            if self._is_rejected(*problem.keys):
                continue
            message, name = str(problem), next(iter(problem.keys), "")
            if f"{block}.{name}" in self.locations:
                message, name = f"{block}.{message}", f"{block}.{name}"
            self.rejected.add(name)
            # A key that is missing in an item of a list gets the item's location.
            location = self.locations.get(name, self.locations.get(name.rpartition(".")[0], "") if "]." in name else "")
            self.report(location, message, name)
        return None if errors else result

    def _is_rejected(self, *keys: str) -> bool:
        """Return True if one of these keys was already rejected; they may lack the name of their block."""
        return any(f".{rejected_key}".endswith(f".{key}") for key in keys for rejected_key in self.rejected)

    def _build_recipe(self) -> dict[str, Any]:
        """Return the values with defaults filled in, for checks of the whole recipe."""
        recipe = {key.name: key.default for key in self.keys.values() if block_in(key.type) is None}
        recipe |= {name: value for name, value in self.values.items() if name not in self.classes and name != "trainer"}
        keys = keys_of(only_block_in(self.keys["trainer"].type), "trainer")
        defaults = {name: key.default for name, key in keys.items()}
        trainer = self.values.get("trainer", {})
        recipe["trainer"] = defaults | {name: value for name, value in trainer.items() if value is not UNREAD}
        for block in self.classes:
            value = self.values.get(block)
            recipe[block] = {"class_path": block, "init_args": value if isinstance(value, dict) else {}}
        return recipe


# ---------------------------------------------------------------------------------------------------------------------


def _is_complete(value: dict[str, Any], cls: type, hint: Any) -> bool:
    """Return True if a mapping is as complete as a string: `{path: rows.jsonl}` is `rows.jsonl`."""
    required = {name for name, key in keys_of(cls).items() if key.default is REQUIRED}
    return str in members(hint) and bool(required) and required <= value.keys()


def _name(option: str) -> str:
    """Return the key that an option sets."""
    return option.lstrip("-").removesuffix("+").replace(".init_args.", ".")


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):
        return False


def _class_path(value: object) -> Scalar | None:
    """Return the class path in a block's value; None if there is none."""
    path = value.get("class_path") if isinstance(value, dict) else value
    return path if isinstance(path, Scalar) else None
