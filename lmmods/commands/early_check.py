"""Help, and what is wrong with a command line or its recipes, before the libraries of an engine are imported.

Importing them takes seconds, so the command line is first parsed with declarations in their classes' places; only if
that finds nothing wrong, the engine's own parser reads it again. What the declarations do not know, such as a task of
one's own or the settings of a callback, is left to that one: nothing is refused here that it would accept.
"""

from collections.abc import Callable
from typing import Any

from lmmods.commands import declarations
from lmmods.commands.command_line import CommandLine, RecipeTypes
from lmmods.commands.jsonargparse_compat import list_classes, options_of, replace_check
from lmmods.commands.trainer_keys import check_recipe_values
from lmmods.commands.trust import ForeignCode, guarded_imports
from lmmods.evaluation.mmlu import MMLUEvaluator
from lmmods.evaluation.samples import SampleWriter
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.hub_upload import Publisher

TRAINERS = {"torch": declarations.TorchTrainerKeys, "jax": declarations.JaxTrainerKeys}
# All that this stage imports because a recipe names it; none of it imports a library.
LIGHT = (declarations.__name__, "lmmods.core.settings", "lmmods.data.sources.source")
LEFT = object()  # in place of a value that only the engine can judge


class EarlyCommandLine(CommandLine):
    """The command line over declarations.

    Args:
        engine: `torch` or `jax`.
        arguments: What is to be parsed.
    """

    def __init__(self, engine: str, arguments: list[str]):
        types = RecipeTypes(TRAINERS[engine], declarations.TaskModule, declarations.DataModule, CheckpointPolicy,
                            SampleWriter, MMLUEvaluator, Publisher)
        super().__init__(types, engine, arguments)
        listed = declarations.TASKS | declarations.CLASSES[engine]
        for option in (option for parser in self.commands.values() for option in options_of(parser)):
            if option.dest in listed:
                list_classes(option, listed[option.dest])
                replace_check(option, _check_known(declarations.TASKS.get(option.dest, ())))

    def judge(self, arguments: list[str]) -> None:
        """As `check_early`."""
        try:
            with guarded_imports(LIGHT):
                config = self.parse(arguments)
        except (ForeignCode, ImportError):  # of code that the engine's parser may know
            return
        recipe = config[config.subcommand]
        if config.subcommand in self.commands and all(recipe.get(key) is None or _is_known(recipe[key], names)
                                                      for key, names in declarations.TASKS.items()):
            check_recipe_values(self.commands[config.subcommand], recipe, self.engine)


def check_early(arguments: list[str], engine: str) -> None:
    """Print help, refuse what is wrong, or return where nothing is or only the engine's parser can tell.

    Raises:
        SystemExit: The help is printed, or an error.
        UserError: A value is of the right type, but none that an engine could use.
    """
    if all(map(_is_judged, arguments, [*arguments[1:], ""])):
        EarlyCommandLine(engine, arguments).judge(arguments)


def _is_judged(word: str, following: str) -> bool:
    """Whether the declarations are enough to understand a word of the command line."""
    option, equals, value = word.partition("=")
    if option.endswith(".help"):
        names = declarations.TASKS.get(option[2:-5], ())
        return bool(names) and (value if equals else following) in ("", *names)
    return not option.startswith("--pr") and "://" not in word  # --print_config; files that are read over the network


def _check_known(names: tuple[str, ...]) -> Callable[[Callable[[Any], Any], Any, Any], Any]:
    """A check of blocks whose class is one of these; those of others it leaves to the engine."""
    return lambda check, value, before: (check(value) if _is_known(value if _class_path(value) else before, names)
                                         else LEFT)


def _is_known(value: Any, names: tuple[str, ...]) -> bool:
    """Whether a block names a declared class."""
    return _class_path(value).removeprefix(f"{declarations.__name__}.") in names


def _class_path(value: Any) -> str:
    """The class that the value of a block names; empty where it names none."""
    if isinstance(value, tuple):  # jsonargparse's form of an option such as --model.class_path SFT
        value = dict([value])
    path = value if isinstance(value, str) else value.get("class_path") if hasattr(value, "get") else None
    return path if isinstance(path, str) else ""
