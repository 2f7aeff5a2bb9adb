"""The README.md beside an exported model."""

import json

import yaml

from lmmods.run import RunFolder


def model_card(folder: RunFolder, base: str | None, is_adapter: bool, auto_class: str) -> str:
    """Markdown with the metadata block that the Hugging Face hub reads: base, how to load, data, metrics, recipe.

    Args:
        folder: The run, its other files written.
        base: Model it started from, if any.
        is_adapter: Whether model/ is an adapter of `base`.
        auto_class: transformers' class that loads it.
    """
    recipe = folder.config.read_text() if folder.config.exists() else ""
    report = json.loads(folder.data_report.read_text())
    metrics = json.loads(folder.metrics_json.read_text())
    header = {"library_name": "peft" if is_adapter else "transformers", "tags": ["lmmods"]}
    if base:
        header["base_model"] = base
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {folder.root.name}",
        f"{'An adapter for' if is_adapter else 'Fine-tuned from'} `{base}`." if base else "Trained from scratch.",
        "## Load\n\n```python\n" + _how_to_load(base, is_adapter, auto_class) + "\n```",
        "## Metrics\n\n" + _table(metrics),
        "## Data\n\n" + _table({name: value for name, value in report.items() if not isinstance(value, (dict, list))}),
    ]
    if recipe:
        parts.append(f"## Recipe\n\n```yaml\n{recipe.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _how_to_load(base: str | None, is_adapter: bool, auto_class: str) -> str:
    lines = [f"from transformers import {auto_class}, AutoTokenizer", "",
             'folder = "."  # this folder', "tokenizer = AutoTokenizer.from_pretrained(folder)"]
    if not is_adapter:
        return "\n".join([*lines, f"model = {auto_class}.from_pretrained(folder)"])
    return "\n".join(["from peft import PeftModel", *lines, f'base = {auto_class}.from_pretrained("{base}")',
                      "if len(tokenizer) > base.get_input_embeddings().num_embeddings:",
                      "    base.resize_token_embeddings(len(tokenizer))",
                      "model = PeftModel.from_pretrained(base, folder)"])


def _table(values: dict) -> str:
    rows = [f"| {name} | {value:.6g} |" if isinstance(value, float) else f"| {name} | {value} |"
            for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])
