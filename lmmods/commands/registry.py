"""Table of all commands: group and line in the program help, and the function that implements the command.

To add a command, add a row to `COMMANDS` and a function whose documented arguments become its options.
"""

import difflib
import importlib
import inspect
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import docstring_parser

from lmmods.commands.argument_parser import Parser
from lmmods.commands.trainer_keys import check_texts
from lmmods.core.errors import UserError
from lmmods.recipe.jsonargparse_compat import options_of

GROUPS = {"train": "Train", "tune": "Tune", "data": "Look at the data", "results": "Use and compare results",
          "help": "Find your way"}


@dataclass(frozen=True)
class Command:
    """Command of the program.

    Args:
        group: Key of `GROUPS`.
        line: One-line description for the help.
        function: Its function, as module:name below lmmods; None for a method of the engine's trainer.
        positional: Arguments of the function that are given without their names.
        takes_recipe: Whether all other options are those of fit; the function gets them as its first argument.
        example: Complete example arguments; empty if none are needed or the command reports them itself.
    """

    group: str
    line: str
    function: str | None = None
    positional: tuple[str, ...] = ()
    takes_recipe: bool = False
    example: str = ""


RECIPE = "--config configs/sft_qlora.yaml"
COMMANDS = {
    "fit": Command("train", "Train.", example=RECIPE),
    "validate": Command("train", "Evaluate on the validation set.", example=RECIPE),
    "test": Command("train", "Evaluate on the test set.", example=RECIPE),
    "predict": Command("train", "Write predictions.jsonl.", example=RECIPE),
    "recipes": Command("help", "List the recipes that come with the project: task, model, hardware, time.",
                       "commands.recipes:recipes"),
    "new": Command("data", "Write a recipe for your own model and data.", "commands.new:new", ("name",),
                   example="mine --model demo/llama --data demo/instructions.jsonl"),
    "inspect": Command("data", "Show what would be trained on, and train nothing.", example=RECIPE),
    "plan": Command("data", "Say whether a recipe fits on devices that are not here, and how long it runs.",
                    example=f"{RECIPE} --on 8xH100"),
    "find": Command("tune", "Find the learning rate and the fastest batch size of a recipe.", example=RECIPE),
    "sweep": Command("tune", "Train a recipe with many settings, on this machine (Optuna) or by W&B's agents.",
                     "extras.sweep.command:sweep", ("parameters",), takes_recipe=True),
    "chat": Command("results", "Talk to a run, a checkpoint, a model folder or a hub model.", "extras.chat:chat"),
    "merge": Command("results", "Merge a run's adapter into its base: a plain Hugging Face folder.",
                     "commands.merge:merge", example="--run runs/sft_qlora --out merged"),
    "evaluate": Command("results", "Evaluate a run on tasks of lm-eval.", "commands.evaluate:evaluate",
                        example="--run runs/sft_qlora --tasks hellaswag"),
    "verify": Command("results", "Check a run against its manifest.json; train its first steps again.",
                      "extras.verify:verify", ("run",), example="runs/sft_qlora"),
    "report": Command("results", "Lay runs side by side on one HTML page.", "extras.report.command:report", ("runs",),
                      example="runs/sft_qlora"),
    "doctor": Command("help", "Say what works on this machine: versions, devices, kernels, disk, accounts.",
                      "extras.doctor:doctor"),
    "dashboard": Command("results", "Lay out the W&B workspace of a project.", "extras.dashboard:dashboard"),
    "migrate": Command("help", "Make a recipe of a YAML of axolotl, LLaMA-Factory or TRL.",
                       "extras.migration.command:migrate", ("file",), example="theirs.yaml --out mine.yaml"),
}
ENGINE_COMMANDS = tuple(name for name, command in COMMANDS.items() if command.function is None)


def program_help() -> str:
    """Return the output of `train.py --help`: all commands, by group."""
    width = max(map(len, COMMANDS)) + 2
    groups = [[f"{title}:", *(f"  {name:<{width}}{command.line}" for name, command in COMMANDS.items()
                              if command.group == group)] for group, title in GROUPS.items()]
    return "\n\n".join([
        "usage: python train.py COMMAND [options]",
        "lmmods trains language models: a recipe is one YAML file, the engine torch (Lightning) or JAX (Flax).",
        *("\n".join(lines) for lines in groups if len(lines) > 1),
        textwrap.dedent("""\
            python train.py COMMAND --help explains its options; of fit, every key of a recipe.
            A first run: python train.py fit --config configs/sft_qlora.yaml""")])


def check_command(name: str) -> None:
    """Raise UserError if there is no command of this name."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        raise UserError(f"There is no command {name!r}." + (f" Did you mean {near[0]}?" if near else "")
                        + " python train.py --help lists all.")


def command_parser(name: str) -> Parser:
    """Build the parser of a command that is a function."""
    function, positional = _function(name), COMMANDS[name].positional
    others = " All other options are those of fit." if COMMANDS[name].takes_recipe else ""
    parser = Parser(prog=f"train.py {name}", description=COMMANDS[name].line + others)
    texts = {each.arg_name: each.description for each in docstring_parser.parse(function.__doc__).params}
    for argument, parameter in inspect.signature(function).parameters.items():
        if argument in positional:
            parser.add_argument(argument, help=texts[argument], **_positional(parameter))
    # The first argument of a command that takes a recipe receives the options of fit.
    skipped = {*positional, *list(inspect.signature(function).parameters)[: COMMANDS[name].takes_recipe]}
    parser.add_function_arguments(function, as_group=False, skip=skipped)
    return parser


def parse_command(name: str, arguments: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments for a command's function."""
    parser = command_parser(name)
    if not COMMANDS[name].takes_recipe:
        return [], _values(name, parser, arguments)
    known = {word for option in options_of(parser) for word in option.option_strings}
    positional, own, recipe, words = [], [], [], iter(arguments)
    for word in words:
        kind = positional if not word.startswith("-") else own if word.partition("=")[0] in known else recipe
        kind.append(word)
        if kind is not positional and "=" not in word and word not in ("-h", "--help"):
            kind.extend(itertools.islice(words, 1))  # the next word is the option's value
    return [recipe], _values(name, parser, [*positional, *own])


def _values(name: str, parser: Parser, arguments: list[str]) -> dict[str, Any]:
    """Parse the arguments by name, groups of settings into objects. Raises UserError: one is wrong."""
    if not any(word.partition("=")[0].endswith((".help", "--help")) or word == "-h" for word in arguments):
        from lmmods.commands.keys import keys_of  # not needed to list the commands
        from lmmods.commands.mistakes import find_mistakes_of_options

        keys, command = keys_of(_function(name)), COMMANDS[name]
        unnamed = [keys.pop(argument) for argument in command.positional]
        if command.takes_recipe:
            keys.pop(next(iter(keys)))
        find_mistakes_of_options(arguments, keys, unnamed, f"{name} {command.example}" if command.example else "")
    found = parser.parse_args(arguments)
    check_texts(vars(found), "")
    return vars(parser.instantiate(found))


def run_command(name: str, arguments: list[str]) -> None:
    """Parse the arguments of a command that is a function and run it."""
    unnamed, named = parse_command(name, arguments)
    _function(name)(*unnamed, **named)


def _positional(parameter: inspect.Parameter) -> dict[str, Any]:
    """Return the argparse options of a positional argument: its type and nargs."""
    many, required = get_origin(parameter.annotation) is list, parameter.default is parameter.empty
    return {"type": get_args(parameter.annotation)[0] if many else parameter.annotation,
            **({"nargs": "+" if required else "*"} if many else {} if required else {"nargs": "?"}),
            **({} if required else {"default": parameter.default})}


def _function(name: str) -> Callable[..., None]:
    module, _, function = COMMANDS[name].function.partition(":")
    return getattr(importlib.import_module(f"lmmods.{module}"), function)
