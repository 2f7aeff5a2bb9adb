"""The command `inspect`: show what a recipe would train on, without training."""

import re
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
TRAINER_DEFAULTS = {"log_every_n_steps": 50, "num_sanity_val_steps": 2}


def show_data(datamodule: DataModule, rows: int, which: Which | list[int]) -> None:
    """Print the data report and rows with their target tokens marked, in colour if the terminal supports it.

    Args:
        datamodule: Set up for `fit`.
        rows: Number of rows.
        which: `first`, `longest`, `most_cut`, `most_unknown` or row indices.
    """
    marks = ("\033[32m", "\033[0m") if shows_colour(sys.stdout) else ("[[", "]]")
    say(datamodule.report_table())
    if train := datamodule.report["splits"].get("train"):
        say(f"\n{histogram(train['length_histogram'])}")
    shown = datamodule.rows_for_inspection(rows, which)
    legend = f"; target tokens are {'green' if marks[0] != '[[' else '[[marked]]'}"
    say(f"\nRows as the model sees them{legend if any('labels' in row for row in shown) else ''}.")
    for row in shown:
        labels = row.get("labels", [IGNORED] * len(row["input_ids"]))
        num_targets = f", {sum(label != IGNORED for label in labels)} targets" if "labels" in row else ""
        weights = row.get("weights", [1.0])
        weight_text = "" if weights == [1.0] else f", weight {', '.join(f'{weight:g}' for weight in weights)}"
        name = f", {row['name']}" if "name" in row else ""
        say(f"\n--- row {row['index']} ({row['location']}){name}: {len(row['input_ids'])} tokens{num_targets}"
            f"{weight_text}")
        print(mark_targets(datamodule.tokenizer, row["input_ids"], labels, marks))
        if "scored" in row:
            say(f"targets: {printable(row['scored'])}")
        if prompts := datamodule.inference_prompts(row["index"]) if "prompt_length" in row else []:
            say(compare_prompt(datamodule.tokenizer, row["input_ids"][: row["prompt_length"]], prompts))


def show_recipe(recipe: dict[str, Any], datamodule: DataModule) -> None:
    """Print the resolved recipe, with the values of keys that are null."""
    recipe = {key: value for key, value in recipe.items() if key not in ("rows", "which", "recipe", "parity")}
    defaults = {field.name: field.default for field in fields(TrainerFields)}
    trainer = defaults | recipe["trainer"]
    trainer |= {key: value for key, value in TRAINER_DEFAULTS.items() if trainer[key] is None}
    data = dict(recipe["data"]["init_args"])
    for key in [key for key, value in data.items() if value is None and key != "tokenizer"]:
        resolved = getattr(datamodule, key, None)
        data[key] = resolved if isinstance(resolved, str | int | float) else None
    data["tokenizer"] = data["tokenizer"] or datamodule.tokenizer.name_or_path
    say("\n" + as_yaml({"engine": recipe["engine"], **recipe, "trainer": trainer,
                        "data": {**recipe["data"], "init_args": data}}))


def compare_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: list[int], at_inference: list[list[int]]) -> str:
    """Describe whether a row's prompt equals one that `apply_chat_template` makes from its conversation.

    Args:
        prompt: Token ids before the row's last response.
        at_inference: Token ids of the prompts that `apply_chat_template` makes, one per response.
    """
    if prompt in at_inference:
        return "prompt: same tokens as apply_chat_template(add_generation_prompt=True)"
    nearest = min(at_inference, key=lambda ids: abs(len(ids) - len(prompt)))
    text = tokenizer.decode(nearest)
    if text == tokenizer.decode(prompt):
        return "prompt: same text as apply_chat_template(add_generation_prompt=True), but other tokens"
    return f"prompt: differs from apply_chat_template(add_generation_prompt=True), which gives:\n{text}"


def histogram(counts: dict[str, list[int]], width: int = 40) -> str:
    """Return a bar chart of rows by length; `counts` has `edges` [n + 1] in tokens and `rows` [n]."""
    max_rows = max(counts["rows"], default=0) or 1
    bins = zip(counts["edges"], counts["edges"][1:], counts["rows"])
    lines = [f"{low:>6} to {high:<6} {count:>8}  {'#' * round(width * count / max_rows)}" for low, high, count in bins]
    return "\n".join(["training rows by length in tokens", *lines])


def mark_targets(tokenizer: "PreTrainedTokenizerBase", input_ids: list[int], labels: list[int],
                 marks: tuple[str, str]) -> str:
    """Decode tokens, with target tokens between `marks`. Consecutive tokens with equal marking are decoded together.

    A special token that is repeated four times or more, such as an image's, is written once with its number.
    """
    text, start, added = "", 0, tokenizer.added_tokens_decoder
    special = {re.escape(str(added[token])) for token in set(input_ids) & added.keys() if added[token].special}
    repeated = re.compile(rf"({'|'.join(special) or '(?!)'})\1{{3,}}")

    def shorten(match: re.Match) -> str:
        return f"{match[1]}×{len(match[0]) // len(match[1])}"

    for end in range(1, len(input_ids) + 1):
        if end == len(input_ids) or (labels[end] == IGNORED) != (labels[start] == IGNORED):
            span = printable(repeated.sub(shorten, str(tokenizer.decode(input_ids[start:end]))))
            text += span if labels[start] == IGNORED else span.join(marks)
            start = end
    return text
