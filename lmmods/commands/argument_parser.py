"""The parser of recipes and command lines: it reads within limits, errs in one line, and imports no library."""

import argparse
import contextlib
import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, get_args

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_dumper, set_loader

from lmmods.commands.jsonargparse_compat import options_of, take_no_files, type_of
from lmmods.commands.trust import refuse_import, resolved
from lmmods.core.errors import readable
from lmmods.core.recipes import as_yaml, guarded
from lmmods.core.redaction import redact
from lmmods.core.settings import Generation, LoRA, Optimizer

set_loader("yaml", guarded(get_loader("yaml")), exceptions=(yaml.YAMLError,))  # for whatever a key or an option holds
set_dumper("yaml", as_yaml)


_arguments: ContextVar[Sequence[str]] = ContextVar("arguments", default=())


class Parser(ArgumentParser):
    """A parser whose errors are one line with a suggestion."""

    commands: Mapping[str, argparse.ArgumentParser] = {}  # their parsers, by name
    example = ""  # a command line that has all that is required; of the parser of a command

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs, allow_abbrev=False)  # a beginning of an option's name is a misspelt name, as in YAML

    def error(self, message: str, ex: Exception | None = None) -> None:
        """Print what is wrong and leave with status 2."""
        denied = re.search(r"Importing '([^']+)' is not allowed", message)
        if denied:
            key = re.search(r'Parser key "([^"]+)"', message)
            refuse_import(key and key[1], denied[1])
        from lmmods.commands.migration.advice import advice  # tables that only errors need

        tidy = _tidy(message)
        known = known_names(self)
        told = advice(tidy, list(_arguments.get()), lambda name: suggestion(name, known))
        told = told or self._lacks(message) or f"{tidy}{_suggestion(message, known)}"
        sys.stderr.write(redact(readable(f"error: {told}\n")))
        sys.exit(2)

    def _lacks(self, message: str) -> str | None:
        """What is said of a command without what it requires; None of anything else."""
        missing = re.fullmatch("the following arguments are required: (.+)", message)
        if not missing or not self.example:
            return None
        lacking, named = missing[1].split(", "), {option.dest for option in options_of(self) if option.option_strings}
        blocks = [name for name in lacking if name in ("data", "model") and "config" in named]
        names = [f"--{name}" if name in named else name.upper() for name in lacking if name not in blocks]
        wanted = [*([f"a recipe with {' and '.join(blocks)}"] if blocks else []), *names]
        return f"{self.example.split()[0]} needs {' and '.join(wanted)}. For example: python train.py {self.example}"

    def dump(self, cfg: Namespace, *args: Any, **kwargs: Any) -> str:
        """A recipe as text, of `--print_config` and of config.yaml, without passwords and tokens.

        Of a library's class (a logger has some thirty options) it has no key that is null by default and null here.
        """
        cfg = cfg.clone()
        trainer = cfg.get("trainer")
        if not isinstance(trainer, Namespace):  # what is wrong with it is told when it is used
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
        """Add the constructor's arguments of a class as a block."""
        self.add_class_arguments(kind, key, fail_untyped=False, sub_configs=True, instantiate=instantiate)
        take_no_files(self)  # else `source: rows.jsonl` is read as a configuration where there is such a file

    def add_subclass(self, base: type, key: str) -> None:
        """Add a block that names a class of this base."""
        self.add_subclass_arguments(base, key, fail_untyped=False, required=True)
        take_no_files(self)


class OnlyHelp(argparse.Action):
    """`--trust_recipe_code`, read before there is a parser: here only its help, so that no file and no dump has it."""

    def __init__(self, option_strings: list[str], **_: Any):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=1, default=argparse.SUPPRESS, metavar="true|false",
                         help="Let the recipe name code outside of lightning, torch and this project, which then runs. "
                              "On the command line only, never in a file. (default: false)")

    def __call__(self, *_: Any) -> None:
        """Never reached: the command line is parsed without it."""


def _leave_out_unset(spec: Namespace) -> None:
    parameters = inspect.signature(resolved(spec.class_path).__init__).parameters
    for name, value in list(vars(spec.init_args).items()):
        if value is None and (name not in parameters or parameters[name].default is None):
            del spec.init_args[name]


@contextlib.contextmanager
def parsing(arguments: list[str]) -> Iterator[None]:
    """Within it, a parser's errors look for their keys in this command line, which names recipes."""
    token = _arguments.set(arguments)
    try:
        yield
    finally:
        _arguments.reset(token)


def suggestion(name: str, known: set[str]) -> str:
    """The question for the nearest right name; empty where none is near, or the name itself is right."""
    wrong = name.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(wrong, sorted(known), 1, 0.7)
    return f" Did you mean {near[0]}?" if near and wrong not in known else ""


def _suggestion(message: str, known: set[str]) -> str:
    names = re.findall(r"'(?:--)?([\w.]+)'|--([\w.]+)", message)
    return next(filter(None, (suggestion(name[0] or name[1], known) for name in names)), "")


def known_names(parser: Parser) -> set[str]:
    """Last parts of all keys and the short names of all classes that a recipe may hold."""
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


def _tidy(message: str) -> str:
    """A message in one line, types by their own names, and declared classes as recipes name them."""
    message = re.sub(r"(?:\ba )?<class '(?:[\w.]+\.)?(\w+)'>", r"\1", message)
    return re.sub(r"\s+", " ", message.replace("lmmods.commands.declarations.", "")).strip()
