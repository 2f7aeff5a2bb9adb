"""Command line of the commands that take a recipe, built from an engine's types."""

from argparse import SUPPRESS
from dataclasses import dataclass
from typing import Any, Literal

from jsonargparse import ActionConfigFile, Namespace

from lmmods.commands.argument_parser import OnlyHelp, Parser, parsing
from lmmods.commands.declarations import EngineCommands
from lmmods.commands.mistakes import with_texts_as_meant
from lmmods.commands.registry import COMMANDS, ENGINE_COMMANDS
from lmmods.core.errors import UserError
from lmmods.recipe.engines import ENGINES
from lmmods.recipe.files import CONFIG_OPTIONS, config_argument, may_overwrite, option_values, shortened
from lmmods.recipe.jsonargparse_compat import parse_alone
from lmmods.recipe.trust import FLAG

DEFAULT_SEED = 42


@dataclass
class RecipeTypes:
    """Types of an engine's recipe blocks, or their stand-ins before its libraries are imported.

    Args:
        model: Base class of all tasks.
        data: Base class of all data modules.
    """

    trainer: type
    model: type
    data: type
    checkpoint: type
    samples: type
    mmlu: type
    publish: type


class CommandLine:
    """Parser of an engine's whole command line.

    `parser` is the top-level parser, `commands` holds the subcommand parsers, and `options` the names of each
    command's own options beside the recipe.

    Args:
        engine: Name of the engine, the only value allowed for the key `engine`.
        arguments: Arguments to parse; if they begin with a command, only that command's parser is built.
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
        """Parse the command and its recipe into the declared types.

        Raises:
            UserError: A file named by an option, as in `--trainer FILE`, cannot be read.
            SystemExit: Help or another error was printed.
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
    parser.add_class(types.trainer, "trainer", instantiate=False)  # instantiated after its callbacks
    parser.add_subclass(types.model, "model")
    parser.add_subclass(types.data, "data")
    parser.add_argument("--engine", type=Literal[ENGINES], default=engine, help="torch (Lightning) or jax (Flax)")
    parser.add_argument(FLAG, action=OnlyHelp)
    if name != "fit":  # accept and ignore: recipes written for fit may set it
        parser.add_argument("--overwrite", type=bool, default=False, help=SUPPRESS)
    for key in ("checkpoint", "samples", "mmlu", "publish"):
        parser.add_class(getattr(types, key), key)
    return parser
