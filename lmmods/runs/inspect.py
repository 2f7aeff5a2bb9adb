"""`inspect`: what a recipe would train on, without training."""

import sys
from typing import Any

from lmmods.core.labels import IGNORED
from lmmods.runs.folder import as_yaml

SCORED, PLAIN = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")


def show_data(recipe: dict[str, Any], datamodule: Any, rows: int, which: str | list[int]) -> None:
    """Print the resolved recipe, the data report and rows with their loss mask.

    Args:
        datamodule: Set up for `fit`.
        which: `first`, `longest`, `most_cut`, `most_unknown` or numbers of rows.
    """
    print(as_yaml(recipe))
    print(datamodule.report_table())
    print(f"\n{histogram(datamodule.report['splits']['train']['length_histogram'])}")
    print(f"\nRows as the model sees them; scored tokens are {'green' if SCORED[0] == chr(27) else '[[marked]]'}.")
    for row in datamodule.rows_for_inspection(rows, which):
        scored = sum(label != IGNORED for label in row["labels"])
        weights = row.get("weights", [1.0])
        counted = "" if weights == [1.0] else f", weight {', '.join(f'{weight:g}' for weight in weights)}"
        print(f"\n--- row {row['index']} ({row['location']}): {len(row['input_ids'])} tokens, {scored} scored{counted}")
        print(marked_text(datamodule.tokenizer, row["input_ids"], row["labels"]))
        if prompts := datamodule.inference_prompts(row["index"]) if "prompt_length" in row else []:
            print(compared_prompt(datamodule.tokenizer, row["input_ids"][: row["prompt_length"]], prompts))


def compared_prompt(tokenizer: Any, prompt: list[int], at_inference: list[list[int]]) -> str:
    """What a row's prompt is beside those that `apply_chat_template` makes of its conversation.

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
    """Rows by length, a bar a bin; `counts` has `edges` [n + 1] in tokens and `rows` [n]."""
    most = max(counts["rows"], default=0) or 1
    bins = zip(counts["edges"], counts["edges"][1:], counts["rows"])
    lines = [f"{low:>6} to {high:<6} {number:>8}  {'#' * round(width * number / most)}" for low, high, number in bins]
    return "\n".join(["training rows by length in tokens", *lines])


def marked_text(tokenizer: Any, input_ids: list[int], labels: list[int]) -> str:
    """The decoded tokens, with what is scored marked; a run of equal marking is decoded as a whole."""
    text, start = "", 0
    for i in range(1, len(input_ids) + 1):
        if i == len(input_ids) or (labels[i] == IGNORED) != (labels[start] == IGNORED):
            piece = tokenizer.decode(input_ids[start:i])
            text += piece if labels[start] == IGNORED else f"{SCORED}{piece}{PLAIN}"
            start = i
    return text
