"""Table of all commands: group and line in the program help, and the function that performs the command.

To add a command, add a row to `COMMANDS` and a function whose documented arguments become its options.
"""

import difflib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lmmods.core.errors import UserError

if TYPE_CHECKING:
    from lmmods.recipe.keys import Key

GROUPS = {"train": "Train", "tune": "Tune", "data": "Prepare", "results": "Use a trained model", "help": "Set up"}


@dataclass(frozen=True)
class Command:
    """Command of the program.

    Args:
        group: Key of `GROUPS`.
        line: One-line description for the help.
        function: Its function, as module:name below lmmods.
        positional: Arguments of the function that users give without option names.
        takes: `recipe` if all other options are recipe keys and the function gets the recipe as its first argument;
            `words` if it gets the recipe's words instead; empty for a command without a recipe.
        example: Complete example arguments; empty if none are needed or the command prints its own.
    """

    group: str
    line: str
    function: str
    positional: tuple[str, ...] = ()
    takes: Literal["recipe", "words", ""] = ""
    example: str = ""


RECIPE = "--config configs/sft_qlora.yaml"
COMMANDS = {
    "fit": Command("train", "Train a model.", "commands.train:fit", takes="recipe", example=RECIPE),
    "validate": Command("train", "Evaluate on the validation set.", "commands.train:validate", takes="recipe",
                        example=RECIPE),
    "test": Command("train", "Evaluate on the test set.", "commands.train:test", takes="recipe", example=RECIPE),
    "predict": Command("train", "Run the model on the predict set and write predictions.jsonl.",
                       "commands.train:predict", takes="recipe", example=RECIPE),
    "recipes": Command("help", "List the shipped recipes with task, model, hardware and time.",
                       "commands.recipes:recipes"),
    "new": Command("data", "Create a recipe for your model and data.", "commands.new:new", ("name",),
                   example="mine --model demo/llama --data demo/instructions.jsonl"),
    "inspect": Command("data", "Show training rows, loss mask, sizes and memory, without training.",
                       "commands.inspect:inspect", takes="recipe", example=RECIPE),
    "plan": Command("data", "Estimate memory and step time on hardware you do not have.", "commands.plan:plan",
                    takes="recipe", example=f"{RECIPE} --on 8xH100"),
    "find": Command("tune", "Find a learning rate and the fastest batch size that fits.", "extras.find:find",
                    takes="recipe", example=RECIPE),
    "sweep": Command("tune", "Search hyperparameters, locally (Optuna) or with W&B agents.",
                     "extras.sweep.command:sweep", ("parameters",), "words"),
    "chat": Command("results", "Chat with a run, a checkpoint, a model folder or a hub model.", "extras.chat:chat"),
    "merge": Command("results", "Merge a run's adapter into its base model and write a Hugging Face folder.",
                     "commands.merge:merge", example="--run runs/sft_qlora --out merged"),
    "evaluate": Command("results", "Run lm-eval benchmarks on a run.", "commands.evaluate:evaluate",
                        example="--run runs/sft_qlora --tasks hellaswag"),
    "verify": Command("results", "Check a run's files against its manifest.",
                      "extras.verify:verify", ("run",), example="runs/sft_qlora"),
    "report": Command("results", "Compare runs on one HTML page.", "extras.report.command:report", ("runs",),
                      example="runs/sft_qlora"),
    "doctor": Command("help", "Check this machine: versions, devices, kernels, disk, accounts.",
                      "extras.doctor:doctor"),
    "dashboard": Command("results", "Set up a W&B workspace for a project.", "extras.dashboard:dashboard"),
    "migrate": Command("help", "Convert an axolotl, LLaMA-Factory or TRL config to a recipe.",
                       "extras.migration.command:migrate", ("file",), example="theirs.yaml --out mine.yaml"),
}
RECIPE_COMMANDS = tuple(name for name, command in COMMANDS.items() if command.takes == "recipe")


def program_help() -> str:
    """Return the output of `train.py --help`: all commands, by group."""
    width = max(map(len, COMMANDS)) + 2
    groups = [[f"{title}:", *(f"  {name:<{width}}{command.line}" for name, command in COMMANDS.items()
                              if command.group == group)] for group, title in GROUPS.items()]
    return "\n\n".join([
        "usage: python train.py COMMAND [options]",
        "Train language models from one YAML recipe, on torch (Lightning) or JAX (Flax).",
        *("\n".join(lines) for lines in groups if len(lines) > 1),
        textwrap.dedent("""\
            python train.py COMMAND --help lists its options; fit --help lists every recipe key.
            A first run: python train.py fit --config configs/sft_qlora.yaml""")])


def check_command(name: str) -> None:
    """Raise UserError if no command has this name."""
    if name not in COMMANDS:
        matches = difflib.get_close_matches(name, COMMANDS, 1)
        raise UserError(f"Unknown command {name!r}." + (f" Did you mean {matches[0]}?" if matches else "")
                        + " See python train.py --help.")


def function_of(name: str) -> Callable[..., None]:
    """Import the function of a command."""
    module, _, function = COMMANDS[name].function.partition(":")
    return getattr(importlib.import_module(f"lmmods.{module}"), function)


def options_of(name: str) -> tuple[dict[str, "Key"], list["Key"]]:
    """Return the options of a command, and the keys of its positional arguments."""
    from lmmods.recipe.keys import keys_of  # not needed to list the commands

    keys, command = keys_of(function_of(name)), COMMANDS[name]
    unnamed = [keys.pop(argument) for argument in command.positional]
    if command.takes:
        keys.pop(next(argument for argument in inspect.signature(function_of(name)).parameters
                      if argument not in command.positional))
    return keys, unnamed


def parse_command(name: str, words: list[str]) -> dict[str, Any]:
    """Return the arguments of a command that does not read a recipe. Raises UserError: a word is invalid."""
    from lmmods.recipe.reader import parse_options
    from lmmods.recipe.values import check_strings

    command, (keys, unnamed) = COMMANDS[name], options_of(name)
    recipe: dict[str, Any] = {}
    if command.takes == "words":
        first = next(iter(inspect.signature(function_of(name)).parameters))
        words, recipe[first] = _split_words(words, keys)
    values = parse_options(words, keys, unnamed, f"{name} {command.example}" if command.example else "")
    check_strings(values, "")
    return recipe | values


def _split_words(words: list[str], options: dict[str, "Key"]) -> tuple[list[str], list[str]]:
    """Separate the words of a command's options from those of a recipe."""
    command_words, recipe_words, remaining = [], [], list(words)
    while remaining:
        word = remaining.pop(0)
        is_recipe_key = word.startswith("-") and word.partition("=")[0].lstrip("-") not in options
        target = recipe_words if is_recipe_key else command_words
        target.append(word)
        if word.startswith("-") and "=" not in word and remaining:
            target.append(remaining.pop(0))  # the value of the option
    return command_words, recipe_words
