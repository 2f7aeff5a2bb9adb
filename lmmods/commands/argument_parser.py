"""Parser of recipes and command lines: bounded YAML, one-line errors, and no heavy imports."""

import argparse
import contextlib
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, get_args

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_dumper, set_loader

from lmmods.core.errors import readable
from lmmods.core.redaction import redact
from lmmods.core.settings import Generation, LoRA, Optimizer
from lmmods.recipe.files import as_yaml, guarded, shortened
from lmmods.recipe.jsonargparse_compat import options_of, take_no_files, type_of
from lmmods.recipe.trust import refuse_import, resolved

set_loader("yaml", guarded(get_loader("yaml")), exceptions=(yaml.YAMLError,))  # values of keys and options too
set_dumper("yaml", as_yaml)


_arguments: ContextVar[Sequence[str]] = ContextVar("arguments", default=())


class Parser(ArgumentParser):
    """Argument parser that reports errors on one line, with a suggestion."""

    commands: Mapping[str, argparse.ArgumentParser] = {}  # subcommand parsers by name

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs, allow_abbrev=False)  # treat abbreviated options as misspelt, as YAML keys are

    def error(self, message: str, ex: Exception | None = None) -> None:
        """Print the error and exit with status 2."""
        denied = re.search(r"Importing '([^']+)' is not allowed", message)
        if denied:
            key = re.search(r'Parser key "([^"]+)"', message)
            refuse_import(key and key[1], denied[1])
        from lmmods.recipe.foreign_keys import keys_given, told  # only needed for errors

        types = {option.dest: type_of(option) for option in options_of(self) if type_of(option) is not None}
        arguments = list(_arguments.get())  # empty if the input was not typed by a user
        said = in_english(message, types, keys_given(arguments) if arguments else [], known_names(self), told)
        sys.stderr.write(redact(readable(f"error: {said}\n")))
        sys.exit(2)

    def dump(self, cfg: Namespace, *args: Any, **kwargs: Any) -> str:
        """Return a recipe as YAML, for `--print_config` and config.yaml, with passwords and tokens redacted.

        Keys of library classes that are null and default to null are left out: a logger has some thirty options.
        """
        cfg = cfg.clone()
        trainer = cfg.get("trainer")
        if not isinstance(trainer, Namespace):  # reported where it is used
            trainer = Namespace()
        for key in ("logger", "callbacks", "strategy", "plugins", "profiler"):
            value = trainer.get(key)
            for spec in value if isinstance(value, list) else [value]:
                if isinstance(spec, Namespace) and "init_args" in spec:
                    _leave_out_unset(spec)
        return redact(super().dump(cfg, *args, **kwargs))

    def add_subcommands(self, **kwargs: Any) -> Any:
        subcommands = super().add_subcommands(**kwargs)
        self.commands = subcommands.choices
        return subcommands

    def add_class(self, kind: type, key: str, instantiate: bool = True) -> None:
        """Add the constructor arguments of a class as a block."""
        self.add_class_arguments(kind, key, fail_untyped=False, sub_configs=True, instantiate=instantiate)
        take_no_files(self)  # else `source: rows.jsonl` would load an existing file as a configuration

    def add_subclass(self, base: type, key: str) -> None:
        """Add a block that names a subclass of `base`."""
        self.add_subclass_arguments(base, key, fail_untyped=False, required=True)
        take_no_files(self)


class OnlyHelp(argparse.Action):
    """Help-only entry for `--trust_recipe_code`, which is read before parsing, so that no file or dump can hold it."""

    def __init__(self, option_strings: list[str], **_: Any):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=1, default=argparse.SUPPRESS, metavar="true|false",
                         help="Let the recipe name code outside of lightning, torch and this project, which then runs. "
                              "On the command line only, never in a file. (default: false)")

    def __call__(self, *_: Any) -> None:
        """Never called: the flag is removed before the command line is parsed."""


def _leave_out_unset(spec: Namespace) -> None:
    parameters = inspect.signature(resolved(spec.class_path).__init__).parameters
    for name, value in list(vars(spec.init_args).items()):
        if value is None and (name not in parameters or parameters[name].default is None):
            del spec.init_args[name]


@contextlib.contextmanager
def parsing(arguments: list[str]) -> Iterator[None]:
    """Context in which parser errors look up their keys in this command line and its recipes."""
    token = _arguments.set(arguments)
    try:
        yield
    finally:
        _arguments.reset(token)


def suggestion(name: str, known: set[str]) -> str:
    """Return a "did you mean" question for the nearest known name; empty if none is near or the name is known."""
    wrong = name.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(wrong, sorted(known), 1, 0.7)
    return f" Did you mean {near[0]}?" if near and wrong not in known else ""


def known_names(parser: Parser) -> set[str]:
    """Return the last parts of all keys and the short names of all classes that a recipe may hold."""
    options = [option for each in (parser, *parser.commands.values()) for option in options_of(each)]
    names = {string.rsplit(".", 1)[-1].lstrip("-") for option in options for string in option.option_strings}
    classes = {Optimizer, LoRA, Generation}
    for option in options:
        for kind in get_args(type_of(option)):
            classes |= {kind, *kind.__subclasses__()} if isinstance(kind, type) else set()
    for kind in classes:
        names.add(kind.__name__)
        names |= {name for base in kind.__mro__ if base.__module__.startswith("lmmods")
                  for name in inspect.signature(base.__init__).parameters}
    return names - {"self", "kwargs", "args", "common"}


SAYS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "list": "a list",
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
    from lmmods.commands.declarations import CLASSES  # only needed for errors
    from lmmods.commands.keys import in_words

    message = " ".join(message.replace("lmmods.commands.declarations.", "").split())

    def whole(name: str) -> str:
        return next((key for key in given if f".{key}".endswith(f".{name}")), name)

    if found := re.search(r"class_path '([^']+)': (?:No module named|module '[^']+' has no attribute|.*not found)",
                          message):
        return f"There is no class {found[1]}."
    if found := re.search(r"(?:Group '[^']*' does not accept option|Option|Key) '([^']*)'", message):
        key = whole(found[1])
        elsewhere = foreign(key)
        return f"{key} is no key there.{suggestion(key, known)}" if elsewhere is None else elsewhere
    if found := re.match(r'Parser key "([^"]+)": (.*?)(?:(?:Given|Got) value: (.*))?$', message):
        key, told, value = whole(found[1]), found[2], found[3]
        if found[1] in types:
            wanted = in_words(types[found[1]], key)
        else:
            listed = re.findall(r"Expected an? (?:typing\.)?Literal\[([^\]]*)\]", told)
            parts = [SAYS[each] for each in re.findall(r"Expected (\w+)", told) if each in SAYS]
            wanted = " or ".join(dict.fromkeys([*(each.replace("'", "") for each in listed), *parts]))
        if wanted:
            shown = "of another kind" if value is None else shortened(value) or "empty"
            classes = {each.rsplit(".", 1)[-1]: each for listed in CLASSES.values() for each in listed.get(key, ())}
            near = difflib.get_close_matches(shown, classes, 1, 0.7)
            return f"{key} is {shown}, but must be {wanted}." + (f" Did you mean {classes[near[0]]}?" if near else "")
    if found := re.match(r"the following arguments are required: (.*)", message):
        return f"{' and '.join(found[1].split(', '))} must be given."
    if found := re.match(r"unrecognized arguments: (.*)", message):
        words = [word for word in found[1].split() if word.startswith("-")] or found[1].split()[:1]
        return " ".join(f"{word} is no option.{suggestion(word.lstrip('-').partition('=')[0], known)}"
                        for word in words)
    if found := re.match(r"argument (\S+): expected one argument", message):
        return f"{found[1]} has no value: {found[1].split('/')[-1]} VALUE."
    return re.sub(r"(?:\ba )?<class '(?:[\w.]+\.)?(\w+)'>", r"\1", message)
