"""The parser of recipes and command lines: it reads within limits, builds Lightning's objects, and errs in one line."""

import argparse
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, get_args

import yaml
from jsonargparse import get_loader, set_loader
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lmmods.commands.jsonargparse_compat import hide_classes, options_of, take_no_files, type_of
from lmmods.commands.registry import COMMANDS, command_parser
from lmmods.commands.trust import refuse_import
from lmmods.core.errors import UserError, readable
from lmmods.core.recipes import guarded
from lmmods.core.redaction import redact
from lmmods.core.settings import Generation, LoRA, Optimizer

set_loader("yaml", guarded(get_loader("yaml")), exceptions=(yaml.YAMLError,))  # for whatever a key or an option holds


class Parser(LightningArgumentParser):
    """A parser whose errors are one line with a suggestion.

    `hidden` are the keys whose help lists classes, with what tells from an import path that one does not work here.
    """

    hidden: dict[str, Callable[[str], Any]] = {}
    commands: Mapping[str, argparse.ArgumentParser] = {}  # their parsers, by name

    def error(self, message: str, ex: Exception | None = None) -> None:
        """Tell what is wrong and leave with status 2."""
        denied = re.search(r"Importing '([^']+)' is not allowed", message)
        if denied:
            key = re.search(r'Parser key "([^"]+)"', message)
            refuse_import(key and key[1], denied[1])
        sys.stderr.write(redact(readable(f"error: {_tidy(message)}{self._suggestion(message)}\n")))
        sys.exit(2)

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """A recipe as text, of `--print_config` and of config.yaml, without passwords and tokens."""
        return redact(super().dump(*args, **kwargs))

    def add_subcommands(self, **kwargs: Any):
        from lmmods.commands.report.command import report_parser

        subcommands = super().add_subcommands(**kwargs)
        self.commands = subcommands.choices
        for name, parser in [*((name, command_parser(name)) for name in COMMANDS), ("report", report_parser())]:
            subcommands.add_subcommand(name, parser, help=parser.description)
        return subcommands

    def add_lightning_class_args(self, lightning_class: type, nested_key: str, subclass_mode: bool = False,
                                 required: bool = True) -> list[str]:
        """As Lightning's, for classes of either engine."""
        if issubclass(lightning_class, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            added = self.add_subclass_arguments(lightning_class, nested_key, fail_untyped=False, required=required)
        else:  # trainers are made later, when their callbacks have been
            added = self.add_class_arguments(lightning_class, nested_key, fail_untyped=False, sub_configs=True,
                                             instantiate=nested_key != "trainer")
        take_no_files(self)  # else `source: rows.jsonl` is read as a configuration where there is such a file
        for option in options_of(self):
            if option.dest in self.hidden:
                hide_classes(option, self.hidden[option.dest])
        return added

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """As jsonargparse's; what a class of Lightning has against its settings is the recipe's mistake."""
        return super().instantiate(*args, **kwargs, instantiators=[(_built, Callback, True), (_built, Logger, True),
                                                                   (_built, Strategy, True), (_built, Profiler, True)])

    def _suggestion(self, message: str) -> str:
        known = sorted(_known_names(self))
        for name in re.findall(r"'(?:--)?([\w.]+)'|--([\w.]+)", message):
            wrong = (name[0] or name[1]).rsplit(".", 1)[-1]
            near = difflib.get_close_matches(wrong, known, 1, 0.7)
            if near and wrong not in known:
                return f" Did you mean {near[0]}?"
        return ""


class OnlyHelp(argparse.Action):
    """`--trust_recipe_code`, read before there is a parser: here only its help, so that no file and no dump has it."""

    def __init__(self, option_strings: list[str], **_: Any):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=1, default=argparse.SUPPRESS, metavar="true|false",
                         help="Let the recipe name code outside of lightning, torch and this project, which then runs. "
                              "On the command line only, never in a file. (default: false)")

    def __call__(self, *_: Any) -> None:
        """Never reached: the command line is parsed without it."""


def untried_strategy(class_path: str) -> bool:
    """Whether a strategy is one of Lightning's that `lmmods.torch_engine.strategies.choose` refuses."""
    return class_path.startswith("lightning.") and class_path.rsplit(".", 1)[-1] not in (
        "DDPStrategy", "SingleDeviceStrategy")


def _built(kind: type, *args: Any, **kwargs: Any) -> Any:
    """An object of Lightning's; of other classes the errors are their own."""
    if not kind.__module__.startswith("lightning."):
        return kind(*args, **kwargs)
    try:
        return kind(*args, **kwargs)
    except (MisconfigurationException, ModuleNotFoundError, TypeError, ValueError) as error:
        raise UserError(f"{kind.__name__}: {error}") from error


def _known_names(parser: Parser) -> set[str]:
    """Last parts of all keys and the short names of all classes that a recipe may hold."""
    options = [option for each in (parser, *parser.commands.values()) for option in options_of(each)]
    names = {string.rsplit(".", 1)[-1].lstrip("-") for option in options for string in option.option_strings}
    classes = [Optimizer, LoRA, Generation]
    for option in options:
        for kind in get_args(type_of(option)):
            classes += [kind, *kind.__subclasses__()] if isinstance(kind, type) else []
    for kind in classes:
        names.add(kind.__name__)
        names |= {name for base in kind.__mro__ if base.__module__.startswith("lmmods")
                  for name in inspect.signature(base.__init__).parameters}
    return names - {"self", "kwargs", "args", "common"}


def _tidy(message: str) -> str:
    return re.sub(r"\s+", " ", message).strip()
