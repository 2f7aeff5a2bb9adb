"""Values of a recipe whose classes belong to a library or to the user: loggers, callbacks, strategies, own tasks.

jsonargparse reads them, by the signatures of the classes that the recipe names, once the engine's libraries are
imported. Everything else is read by `lmmods.recipe.reader`.
"""

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Union, get_args, get_origin

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, get_loader, set_dumper, set_loader

from lmmods.core.errors import readable
from lmmods.core.redaction import redact
from lmmods.core.settings import BestOf, Generation, LoRA, Optimizer, Teacher
from lmmods.recipe.classes import BASES, CLASSES, class_name
from lmmods.recipe.engines import EngineTypes, load_engine
from lmmods.recipe.files import Loader, as_yaml, guarded, plain, shortened
from lmmods.recipe.foreign_keys import hint_for, keys_given
from lmmods.recipe.jsonargparse_compat import options_of, take_no_files, type_of
from lmmods.recipe.keys import BLOCKS, in_words, keys_of, members
from lmmods.recipe.reader import LEFT, Layer, Recipe
from lmmods.recipe.trust import refuse_import, resolved

set_loader("yaml", guarded(get_loader("yaml")), exceptions=(yaml.YAMLError,))  # values of keys and options too
set_dumper("yaml", as_yaml)


# The command line: jsonargparse makes a separate parser for each class, which reports errors too.
_words: ContextVar[list[str]] = ContextVar("words", default=[])  # noqa: B039 - never changed in place


class LibraryClasses:
    """Values of a recipe that only the classes of an engine's libraries, or the user's own, can read.

    Args:
        recipe: The recipe; if none of its values is left, nothing is parsed and no engine is imported.

    Raises:
        SystemExit: An error was printed.
    """

    def __init__(self, recipe: Recipe):
        # Keys whose values the reader has left: of the trainer one by one, of `model` and `data` whole blocks.
        self.keys = [f"trainer.{name}" for name, value in recipe.given["trainer"].items() if value is LEFT]
        self.keys += [block for block, kind in recipe.classes.items() if kind is None]
        self.parser, self.values = Parser(prog="train.py"), Namespace()
        if not self.keys:
            return
        types = load_engine(recipe.engine)
        self.parser.add_argument("--config", action=ActionConfigFile)
        hints = keys_of(recipe.kind("trainer"))
        for key in self.keys:
            if key in BASES:
                self.parser.add_subclass(getattr(types, key), key)
            else:
                hint = hints[key.partition(".")[2]]
                self.parser.add_argument(f"--{key}", type=substituted(hint.type, types.libraries), default=hint.default)
        take_no_files(self.parser)  # else `source: rows.jsonl` would load an existing file as a configuration
        # One --config or option per layer, in order, so that later layers override earlier ones here as well.
        words = [word for layer in recipe.layers for word in self._words(layer)]
        # For messages, which name keys as they were typed.
        token = _words.set(words)
        try:
            self.values = self.parser.parse_args(words)
        finally:
            _words.reset(token)

    def _words(self, layer: Layer) -> list[str]:
        """Return the words that set the same values as a layer, without those that are read already."""
        if layer.option and any(f"{layer.place}.".startswith(f"{key}.") for key in self.keys):
            value = layer.value
            # Dumped again from the tree, in which texts are marked.
            if value[:1] in ("[", "{"):  # texts such as `12345e67` in it keep their meaning
                tree = layer.tree
                for part in layer.place.split("."):
                    tree = tree[part]
                value = as_yaml(plain(tree), default_flow_style=True, width=10**6).strip()
            return [f"{layer.option}={value}"]
        tree, left = nested(plain(layer.tree)), {}
        for key in self.keys:
            block, _, name = key.partition(".")
            inner = tree.get(block)
            if not name and block in tree:
                left[block] = inner
            elif isinstance(inner, dict) and (found := {each: value for each, value in inner.items()
                                                        if each.removesuffix("+") == name}):
                # A key with a `+` appends, and belongs to the same name.
                left.setdefault(block, {}).update(found)
        return ["--config", as_yaml(left)] if left else []

    def plain(self) -> dict[str, Any]:
        """Return all values as a recipe writes them, with the defaults of their classes.

        Of a library's class, keys that are null and default to null are left out: a logger has some thirty options.
        """
        values = self.values.clone()
        # The files that were read, not a key of the recipe.
        values.pop("config", None)
        trainer = values.get("trainer")
        for value in vars(trainer).values() if isinstance(trainer, Namespace) else ():
            for spec in value if isinstance(value, list) else [value]:
                if isinstance(spec, Namespace) and "init_args" in spec:
                    _leave_out_unset(spec)
        return yaml.load(self.parser.dump(values, skip_none=False, skip_validation=True), Loader=Loader) or {}

    def instantiate(self, instantiators: Sequence[Any]) -> Namespace:
        """Build the objects; `instantiators` as of jsonargparse."""
        return self.parser.instantiate(self.values, instantiators=list(instantiators))


def whole(recipe: Recipe, libraries: LibraryClasses) -> dict[str, Any]:
    """Return a recipe as plain values with defaults filled in, secrets included."""
    others = libraries.plain()

    def block(name: str) -> Any:
        if name not in recipe.classes:
            values = recipe.values(name)
            return values | {key: others[name][key] for key, value in values.items() if value is LEFT}
        kind = recipe.classes[name]
        return others.get(name) if kind is None else {"class_path": class_name(kind), "init_args": recipe.values(name)}

    return {"seed_everything": recipe.seed, **{name: block(name) for name in ("trainer", "model", "data")},
            "engine": recipe.engine, **{name: block(name) for name in BLOCKS}}


def substituted(hint: Any, classes: Mapping[type, Any]) -> Any:
    """Return a type hint with stand-ins replaced by the classes that they stand for."""
    if get_origin(hint) is list:
        return list[substituted(get_args(hint)[0], classes)]
    if len(members(hint)) > 1:
        # Members of a union are replaced one by one.
        return Union[tuple(substituted(each, classes) for each in members(hint))]  # noqa: UP007 - members from a list
    return classes.get(hint, hint) if inspect.isclass(hint) else hint


def nested(tree: Any) -> dict[str, Any]:
    """Return a recipe's tree without dotted keys at its top: {"trainer.logger": x} is {"trainer": {"logger": x}}."""
    result: dict[str, Any] = {}
    for name, value in tree.items():
        head, _, rest = name.partition(".")
        inner = nested({rest: value}) if rest else value
        both = isinstance(result.get(head), dict) and isinstance(inner, dict)
        result[head] = result[head] | inner if both else inner
    return result


def print_help(key: str, name: str, hint: Any, types: EngineTypes) -> None:
    """Print the help of a class that a key may name. Raises SystemExit: it has been printed, or an error was."""
    parser = Parser(prog="train.py")
    parser.add_argument(f"--{key}", type=substituted(hint, types.libraries))
    parser.parse_args([f"--{key}.help", *([name] if name else [])])


class Parser(ArgumentParser):
    """Argument parser that reports errors on one line, with a suggestion."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs, allow_abbrev=False)  # treat abbreviated options as misspelt, as YAML keys are

    def error(self, message: str, ex: Exception | None = None) -> None:
        """Print the error and exit with status 2."""
        # jsonargparse raises the refusal of `guarded_imports` as an ordinary error of parsing.
        denied = re.search(r"Importing '([^']+)' is not allowed", message)
        if denied:
            key = re.search(r'Parser key "([^"]+)"', message)
            refuse_import(key and key[1], denied[1])
        types = {option.dest: type_of(option) for option in options_of(self) if type_of(option) is not None}
        said = in_english(message, types, keys_given(_words.get()), known_names(self), hint_for)
        sys.stderr.write(redact(readable(f"error: {said}\n")))
        sys.exit(2)

    def add_subclass(self, base: type, key: str) -> None:
        """Add a block that names a subclass of `base`."""
        self.add_subclass_arguments(base, key, fail_untyped=False, required=True)


def _leave_out_unset(spec: Namespace) -> None:
    parameters = inspect.signature(resolved(spec.class_path).__init__).parameters
    for name, value in list(vars(spec.init_args).items()):
        if value is None and (name not in parameters or parameters[name].default is None):
            del spec.init_args[name]


def suggestion(name: str, known: set[str]) -> str:
    """Return a "did you mean" question for the nearest known name; empty if none is near or the name is known."""
    wrong = name.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(wrong, sorted(known), 1, 0.7)
    return f" Did you mean {near[0]}?" if near and wrong not in known else ""


def known_names(parser: Parser) -> set[str]:
    """Return the last parts of all keys and the short names of all classes that a recipe may contain."""
    options = options_of(parser)
    names = {string.rsplit(".", 1)[-1].lstrip("-") for option in options for string in option.option_strings}
    classes = {Optimizer, LoRA, Generation, BestOf, Teacher}
    for option in options:
        for kind in get_args(type_of(option)):
            classes |= {kind, *kind.__subclasses__()} if isinstance(kind, type) else set()
    for kind in classes:
        names.add(kind.__name__)
        names |= {name for base in kind.__mro__ if base.__module__.startswith("lmmods")
                  for name in inspect.signature(base.__init__).parameters}
    return names - {"self", "kwargs", "args", "common"}


SAYS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string", "list": "a list",
        "dict": "a mapping", "NoneType": "null"}  # jsonargparse's type names in plain words


def in_english(message: str, types: Mapping[str, Any], given: Sequence[str], known: set[str],
               foreign: Callable[[str], str | None]) -> str:
    """Rephrase a jsonargparse message with full recipe keys and readable type names.

    Args:
        types: Types of the parser's options by key.
        given: Keys on the command line; the message may mention only their last part.
        known: Candidate names for suggestions.
        foreign: Returns the hint for a key of another program.
    """
    message = " ".join(message.split())

    # jsonargparse names keys relative to the class it is parsing: complete them from the command line.
    def whole(name: str) -> str:
        return next((key for key in given if f".{key}".endswith(f".{name}")), name)

    # The order matters: patterns further down match more messages.
    if found := re.search(r"class_path '([^']+)': (?:No module named|module '[^']+' has no attribute|.*not found)",
                          message):
        return f"There is no class {found[1]}."
    if found := re.search(r"(?:Group '[^']*' does not accept option|Option|Key) '([^']*)'", message):
        key = whole(found[1])
        elsewhere = foreign(key)
        return f"{key} is not a key there.{suggestion(key, known)}" if elsewhere is None else elsewhere
    if found := re.match(r'Parser key "([^"]+)": (.*?)(?:(?:Given|Got) value: (.*))?$', message):
        key, said, value = whole(found[1]), found[2], found[3]
        if found[1] in types:
            wanted = in_words(types[found[1]], key)
        else:
            listed = re.findall(r"Expected an? (?:typing\.)?Literal\[([^\]]*)\]", said)
            parts = [SAYS[each] for each in re.findall(r"Expected (\w+)", said) if each in SAYS]
            wanted = " or ".join(dict.fromkeys([*(each.replace("'", "") for each in listed), *parts]))
        if wanted:
            shown = "of another type" if value is None else shortened(value) or "empty"
            classes = {each.rsplit(".", 1)[-1]: each for listed in CLASSES.values() for each in listed.get(key, ())}
            # The value may be a misspelt class: compare it with the short names.
            near = difflib.get_close_matches(shown, classes, 1, 0.7)
            return f"{key} is {shown}, but must be {wanted}." + (f" Did you mean {classes[near[0]]}?" if near else "")
    if found := re.match(r"the following arguments are required: (.*)", message):
        return f"{' and '.join(found[1].split(', '))} must be set."
    if found := re.match(r"unrecognized arguments: (.*)", message):
        words = [word for word in found[1].split() if word.startswith("-")] or found[1].split()[:1]
        return " ".join(f"{word} is not an option.{suggestion(word.lstrip('-').partition('=')[0], known)}"
                        for word in words)
    if found := re.match(r"argument (\S+): expected one argument", message):
        return f"{found[1]} has no value. Use {found[1].split('/')[-1]} VALUE."
    return re.sub(r"(?:\ba )?<class '(?:[\w.]+\.)?(\w+)'>", r"\1", message)
