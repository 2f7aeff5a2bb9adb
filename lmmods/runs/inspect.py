"""The command `inspect`: show what a recipe would train on, without training."""

import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from lmmods.core.console import printable, say, shows_colour
from lmmods.core.labels import IGNORED
from lmmods.data.base import DataModule
from lmmods.data.shown_rows import Which
from lmmods.recipe.files import as_yaml
from lmmods.recipe.trainer_fields import TrainerFields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Lightning's defaults for keys that are null; see TrainerFields.
TRAINER_MEANS = {"log_every_n_steps": 50, "num_sanity_val_steps": 2}


def show_data(datamodule: DataModule, rows: int, which: Which | list[int]) -> None:
    """Print the data report and rows with what is scored in them, in colour if the terminal supports it.

    Args:
        datamodule: Set up for `fit`.
        rows: Number of rows.
        which: `first`, `longest`, `most_cut`, `most_unknown` or row numbers.
    """
    marks = ("\033[32m", "\033[0m") if shows_colour(sys.stdout) else ("[[", "]]")
    say(datamodule.report_table())
    if train := datamodule.report["splits"].get("train"):
        say(f"\n{histogram(train['length_histogram'])}")
    shown = datamodule.rows_for_inspection(rows, which)
    marked = f"; scored tokens are {'green' if marks[0] != '[[' else '[[marked]]'}"
    say(f"\nRows as the model sees them{marked if any('labels' in row for row in shown) else ''}.")
    for row in shown:
        labels = row.get("labels", [IGNORED] * len(row["input_ids"]))
        scored = f", {sum(label != IGNORED for label in labels)} scored" if "labels" in row else ""
        weights = row.get("weights", [1.0])
        counted = "" if weights == [1.0] else f", weight {', '.join(f'{weight:g}' for weight in weights)}"
        name = f", {row['name']}" if "name" in row else ""
        say(f"\n--- row {row['index']} ({row['location']}){name}: {len(row['input_ids'])} tokens{scored}{counted}")
        print(marked_text(datamodule.tokenizer, row["input_ids"], labels, marks))
        if "scored" in row:
            say(f"scored: {printable(row['scored'])}")
        if prompts := datamodule.inference_prompts(row["index"]) if "prompt_length" in row else []:
            say(compared_prompt(datamodule.tokenizer, row["input_ids"][: row["prompt_length"]], prompts))


def show_recipe(recipe: dict[str, Any], datamodule: DataModule) -> None:
    """Print the resolved recipe: values that it leaves to a default, the model or the engine are filled in."""
    recipe = {key: value for key, value in recipe.items() if key not in ("rows", "which", "recipe", "parity")}
    defaults = {field.name: field.default for field in fields(TrainerFields)}
    trainer = defaults | recipe["trainer"]
    trainer |= {key: value for key, value in TRAINER_MEANS.items() if trainer[key] is None}
    data = dict(recipe["data"]["init_args"])
    for key in [key for key, value in data.items() if value is None and key != "tokenizer"]:
        known = getattr(datamodule, key, None)
        data[key] = known if isinstance(known, str | int | float) else None
    data["tokenizer"] = data["tokenizer"] or datamodule.tokenizer.name_or_path
    say("\n" + as_yaml({"engine": recipe["engine"], **recipe, "trainer": trainer,
                        "data": {**recipe["data"], "init_args": data}}))


def compared_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: list[int], at_inference: list[list[int]]) -> str:
    """Compare a row's prompt to those that `apply_chat_template` makes from its conversation.

    Args:
        prompt: Token ids before the last response of the row.
        at_inference: Token ids of the prompt of each response.
    """
    if prompt in at_inference:
        return "prompt: the tokens that apply_chat_template(add_generation_prompt=True) gives"
    nearest = min(at_inference, key=lambda ids: abs(len(ids) - len(prompt)))
    text = tokenizer.decode(nearest)
    if text == tokenizer.decode(prompt):
        return "prompt: the text that apply_chat_template(add_generation_prompt=True) gives, in other tokens"
    return f"prompt: not what apply_chat_template(add_generation_prompt=True) gives, which is:\n{text}"


def histogram(counts: dict[str, list[int]], width: int = 40) -> str:
    """Bar chart of rows by length; `counts` has `edges` [n + 1] in tokens and `rows` [n]."""
    most = max(counts["rows"], default=0) or 1
    bins = zip(counts["edges"], counts["edges"][1:], counts["rows"])
    lines = [f"{low:>6} to {high:<6} {number:>8}  {'#' * round(width * number / most)}" for low, high, number in bins]
    return "\n".join(["training rows by length in tokens", *lines])


def marked_text(tokenizer: "PreTrainedTokenizerBase", input_ids: list[int], labels: list[int],
                marks: tuple[str, str]) -> str:
    """Decode tokens with scored ones between `marks`; consecutive tokens with equal marking are decoded together."""
    text, start = "", 0
    for i in range(1, len(input_ids) + 1):
        if i == len(input_ids) or (labels[i] == IGNORED) != (labels[start] == IGNORED):
            piece = printable(str(tokenizer.decode(input_ids[start:i])))
            text += piece if labels[start] == IGNORED else piece.join(marks)
            start = i
    return text
