"""The command line of fit, validate, test, predict and inspect, made of the types that an engine's recipes are of."""

from dataclasses import dataclass
from typing import Any, Literal

import docstring_parser
from jsonargparse import ActionConfigFile, Namespace

from lmmods.commands.argument_parser import OnlyHelp, Parser
from lmmods.commands.declarations import EngineCommands
from lmmods.commands.jsonargparse_compat import parse_alone
from lmmods.commands.registry import COMMANDS, command_parser
from lmmods.commands.trust import FLAG
from lmmods.core.engines import ENGINES
from lmmods.core.errors import UserError

ENGINE_COMMANDS = ("fit", "validate", "test", "predict", "inspect")
DEFAULT_SEED = 42


@dataclass
class RecipeTypes:
    """The types that an engine's recipes are made of, or what stands for them before its libraries are imported.

    Args:
        model: Base of all tasks.
        data: Base of all data modules.
    """

    trainer: type
    model: type
    data: type
    checkpoint: type
    samples: type
    mmlu: type
    publish: type


class CommandLine:
    """The whole command line.

    `parser` is its parser, `commands` are those of the engine's commands, `options` what these take beside a recipe.

    Args:
        engine: Its name, the only value that the key `engine` may then have.
        arguments: What is to be parsed: where it begins with a command, only that one's parser is made.
    """

    def __init__(self, types: RecipeTypes, engine: str, arguments: list[str]):
        self.engine = engine
        self.parser = _parser("Train language models.")
        asked = arguments[0] if arguments and arguments[0] in ENGINE_COMMANDS else None
        self.commands = {name: _command_parser(name, types, engine) for name in ([asked] if asked else ENGINE_COMMANDS)}
        self.options = {name: parser.add_method_arguments(EngineCommands, name)
                        for name, parser in self.commands.items()}
        subcommands = self.parser.add_subcommands()
        for name, parser in {**self.commands, **({} if asked else _other_parsers())}.items():
            subcommands.add_subcommand(name, parser, help=parser.description)

    def parse(self, arguments: list[str]) -> Any:
        """The command and its recipe, of the right types.

        Raises:
            UserError: A file that a key names, as in `--trainer FILE`, cannot be read.
            SystemExit: The help is printed, or what else is wrong.
        """
        command, *rest = arguments or [""]
        try:
            if command in self.commands:
                return Namespace({"subcommand": command, command: parse_alone(self.commands[command], rest)})
            return self.parser.parse_args(arguments)
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"A file that the command line names cannot be read ({error}).") from error


def _parser(description: str) -> Parser:
    parser = Parser(description=description, env_prefix="PL", default_env=False)
    parser.add_argument("-c", "--config", action=ActionConfigFile,
                        help="Path to a configuration file in json or yaml format.")
    return parser


def _command_parser(name: str, types: RecipeTypes, engine: str) -> Parser:
    parser = _parser(docstring_parser.parse(getattr(EngineCommands, name).__doc__).short_description)
    parser.add_argument("--seed_everything", type=bool | int, default=DEFAULT_SEED,
                        help="Seed of everything that is drawn; true draws the seed itself.")
    parser.add_class(types.trainer, "trainer", instantiate=False)  # made later, when its callbacks have been
    parser.add_subclass(types.model, "model")
    parser.add_subclass(types.data, "data")
    parser.add_argument("--engine", type=Literal[ENGINES], default=engine, help="torch (Lightning) or jax (Flax)")
    parser.add_argument(FLAG, action=OnlyHelp)
    for key in ("checkpoint", "samples", "mmlu", "publish"):
        parser.add_class(getattr(types, key), key)
    return parser


def _other_parsers() -> dict[str, Parser]:
    """Of the commands that are functions."""
    from lmmods.commands.report.command import report_parser

    return {**{name: command_parser(name) for name in COMMANDS}, "report": report_parser()}
