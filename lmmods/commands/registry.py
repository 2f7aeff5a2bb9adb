"""The commands that are functions: their arguments are their options."""

import importlib
from collections.abc import Callable

from lmmods.commands.argument_parser import Parser

COMMANDS = ("merge", "evaluate", "dashboard")  # each a function in the module of its name


def command_parser(name: str) -> Parser:
    """The command line of a command."""
    function = _function(name)
    parser = Parser(prog=f"train.py {name}", description=function.__doc__.split("\n")[0])
    parser.add_function_arguments(function, as_group=False)
    return parser


def run_command(name: str, arguments: list[str]) -> None:
    """Parse the arguments of a command and run it."""
    _function(name)(**command_parser(name).parse_args(arguments).as_dict())


def _function(name: str) -> Callable[..., None]:
    return getattr(importlib.import_module(f"lmmods.commands.{name}"), name)
