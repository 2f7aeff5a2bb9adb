"""Help, and what is wrong with a command line or its recipes, before the libraries of an engine are imported.

Importing them takes seconds, so the command line is first parsed with declarations in their classes' places, whose
fields are checked as those of the classes are; only if that finds nothing wrong, the engine's own parser reads it. What
the declarations do not know, such as a task of one's own or the settings of a callback, is left to that one: nothing is
refused here that it would accept.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import yaml

from lmmods.commands import declarations
from lmmods.commands.command_line import CommandLine, RecipeTypes
from lmmods.commands.jsonargparse_compat import list_classes, options_of, replace_check
from lmmods.commands.key_help import help_of, wants_help
from lmmods.commands.keys import TRAINERS
from lmmods.commands.mistakes import check_name, find_mistakes
from lmmods.commands.registry import COMMANDS, ENGINE_COMMANDS
from lmmods.commands.trainer_keys import check_recipe_values
from lmmods.commands.trust import ForeignCode, guarded_imports
from lmmods.core.errors import user_error_in
from lmmods.evaluation.mmlu import MMLUEvaluator
from lmmods.evaluation.samples import SampleWriter
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.hub_upload import Publisher

# All that this stage imports because a recipe names it; none of it imports a library.
LIGHT = (declarations.__name__, "lmmods.core.settings", "lmmods.data.sources.source")
LEFT = object()  # in place of a value that only the engine can judge


class EarlyCommandLine(CommandLine):
    """The command line over declarations."""

    def __init__(self, engine: str, arguments: list[str]):
        types = RecipeTypes(TRAINERS[engine], declarations.TaskModule, declarations.DataModule, CheckpointPolicy,
                            SampleWriter, MMLUEvaluator, Publisher)
        super().__init__(types, engine, arguments)
        listed = declarations.TASKS | declarations.CLASSES[engine]
        for option in (option for parser in self.commands.values() for option in options_of(parser)):
            if option.dest in listed:
                list_classes(option, listed[option.dest])
                replace_check(option, self._check_known(option.dest))

    def judge(self, arguments: list[str]) -> None:
        """As `check_early`."""
        try:
            with guarded_imports(LIGHT):
                config = self.parse(arguments)
                recipe = config[config.subcommand]
                if config.subcommand in self.commands and all(recipe.get(key) is None or _is_known(recipe[key], names)
                                                              for key, names in declarations.TASKS.items()):
                    check_recipe_values(self.commands[config.subcommand], recipe, self.engine)
                    self._check_fields(config, recipe)
        except (ForeignCode, ImportError):  # of code that the engine's parser may know
            return

    def _check_fields(self, config: Any, recipe: Any) -> None:
        """Raise the UserError of a constructor that refuses its fields; what else one raises is left to the engine."""
        for key in declarations.CLASSES[self.engine]:
            recipe[key] = None
        try:
            made = self.parser.instantiate(config)[config.subcommand]
            made.model.check_data(made.data)
        except Exception as error:
            if mistake := user_error_in(error):
                raise mistake from error

    def _check_known(self, key: str) -> Callable[[Callable[[Any], Any], Any, Any], Any]:
        """A check of blocks whose class is declared; those of others it leaves to the engine."""
        names = declarations.TASKS.get(key, ())

        def check(original: Callable[[Any], Any], value: Any, before: Any) -> Any:
            for path in map(_class_path, value if isinstance(value, list) else [value]):
                if re.fullmatch(r"[A-Z]\w+", path) and yaml.safe_load(path) == path:
                    check_name(key, path, self.engine)
            return original(value) if _is_known(value if _class_path(value) else before, names) else LEFT

        return check


def check_early(arguments: list[str], engine: str) -> None:
    """Print help, refuse what is wrong, or return where nothing is or only the engine's parser can tell.

    Raises:
        SystemExit: The help is printed, or an error.
        UserError: A value is of the right type, but none that an engine could use.
    """
    if arguments[0] in ENGINE_COMMANDS:
        if wants_help(arguments):
            print(help_of(arguments[0], arguments[1:], engine))
            sys.exit(0)
        if not any(word.partition("=")[0].endswith(".help") for word in arguments):
            find_mistakes(arguments, engine, COMMANDS[arguments[0]].example)
    if all(map(_is_judged, arguments, [*arguments[1:], ""])):
        EarlyCommandLine(engine, arguments).judge(arguments)


def _is_judged(word: str, following: str) -> bool:
    """Whether the declarations are enough to understand a word of the command line."""
    option, equals, value = word.partition("=")
    if option.endswith(".help"):
        names = declarations.TASKS.get(option[2:-5], ())
        return bool(names) and (value if equals else following) in ("", *names)
    return not option.startswith("--pr") and "://" not in word  # --print_config; files that are read over the network


def _is_known(value: Any, names: tuple[str, ...]) -> bool:
    """Whether a block names a declared class."""
    return _class_path(value).removeprefix(f"{declarations.__name__}.") in names


def _class_path(value: Any) -> str:
    """The class that the value of a block names; empty where it names none."""
    if isinstance(value, tuple):  # jsonargparse's form of an option such as --model.class_path SFT
        value = dict([value])
    path = value if isinstance(value, str) else value.get("class_path") if hasattr(value, "get") else None
    return path if isinstance(path, str) else ""
