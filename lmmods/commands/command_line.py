"""The command line of the commands that take a recipe, made of the types that an engine's recipes are of."""

from argparse import SUPPRESS
from dataclasses import dataclass
from typing import Any, Literal

from jsonargparse import ActionConfigFile, Namespace

from lmmods.commands.argument_parser import OnlyHelp, Parser, parsing
from lmmods.commands.declarations import EngineCommands
from lmmods.commands.jsonargparse_compat import parse_alone
from lmmods.commands.mistakes import with_texts_as_meant
from lmmods.commands.registry import COMMANDS, ENGINE_COMMANDS
from lmmods.commands.trust import FLAG
from lmmods.core.engines import ENGINES
from lmmods.core.errors import UserError
from lmmods.core.recipes import CONFIG_OPTIONS, config_argument, may_overwrite, option_values, shortened

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
        asked = arguments[:1] if arguments[:1] and arguments[0] in ENGINE_COMMANDS else ENGINE_COMMANDS
        self.commands = {name: _command_parser(name, types, engine) for name in asked}
        self.options = {name: parser.add_method_arguments(EngineCommands, name)
                        for name, parser in self.commands.items()}
        subcommands = self.parser.add_subcommands()
        for name, parser in self.commands.items():
            subcommands.add_subcommand(name, parser, help=parser.description)

    def parse(self, arguments: list[str]) -> Any:
        """The command and its recipe, of the right types.

        Raises:
            UserError: A file that a key names, as in `--trainer FILE`, cannot be read.
            SystemExit: The help is printed, or what else is wrong.
        """
        command, *rest = arguments or [""]
        if command in self.commands:
            rest = with_texts_as_meant(command, rest, self.engine)
        for value in option_values(rest, *CONFIG_OPTIONS):
            if value and "config" in config_argument(value):
                raise UserError(f"--config {shortened(value)}: config is no key of a recipe, which names no other. "
                                "Give several on the command line: --config A --config B.")
        try:
            with parsing(arguments):
                if command in self.commands:
                    config = Namespace({"subcommand": command, command: parse_alone(self.commands[command], rest)})
                else:
                    config = self.parser.parse_args(arguments)
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"A file that the command line names cannot be read ({error}).") from error
        recipe = config[config.subcommand]
        if config.subcommand == "fit":
            recipe.overwrite = may_overwrite(arguments, getattr(recipe.trainer, "default_root_dir", None))
        elif option_values(arguments, "--overwrite"):
            raise UserError(f"--overwrite is for fit: {config.subcommand} deletes nothing. Leave it out.")
        return config


def _parser(description: str) -> Parser:
    parser = Parser(description=description, env_prefix="PL", default_env=False)
    parser.add_argument("-c", "--config", action=ActionConfigFile,
                        help="Path to a configuration file in json or yaml format.")
    return parser


def _command_parser(name: str, types: RecipeTypes, engine: str) -> Parser:
    parser = _parser(COMMANDS[name].line)
    parser.add_argument("--seed_everything", type=bool | int, default=DEFAULT_SEED,
                        help="Seed of everything that is drawn; true draws the seed itself.")
    parser.add_class(types.trainer, "trainer", instantiate=False)  # made later, when its callbacks have been
    parser.add_subclass(types.model, "model")
    parser.add_subclass(types.data, "data")
    parser.add_argument("--engine", type=Literal[ENGINES], default=engine, help="torch (Lightning) or jax (Flax)")
    parser.add_argument(FLAG, action=OnlyHelp)
    if name != "fit":  # a recipe that says it to fit serves the other commands too
        parser.add_argument("--overwrite", type=bool, default=False, help=SUPPRESS)
    for key in ("checkpoint", "samples", "mmlu", "publish"):
        parser.add_class(getattr(types, key), key)
    return parser
