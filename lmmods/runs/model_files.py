"""What lies beside the weights in an exported model: tokenizer, generation settings, card and curves."""

import copy
import json
from pathlib import Path
from typing import Any

from lmmods.core.console import warn
from lmmods.core.errors import one_line
from lmmods.core.generation_config import GENERATION_CONFIG, exported_generation
from lmmods.core.task_fields import CausalFields, TaskFields
from lmmods.data.hooks import TaskHooks
from lmmods.runs.atomic import write_json
from lmmods.runs.folder import RunFolder
from lmmods.runs.model_card import find_file, model_card
from lmmods.runs.repair import read_table


def complete_model(folder: Path, run: RunFolder, task: TaskFields, auto_class: str, data: TaskHooks) -> None:
    """Write all but weights and configuration into the folder of an exported model or adapter.

    Args:
        run: Whose model it is.
        auto_class: transformers' class that loads it.
        data: The data module, set up.
    """
    chat_template = data.chat_template
    save_tokenizer(data.tokenizer, chat_template, folder)
    if isinstance(task, CausalFields):
        base = base_generation(task.pretrained, task.revision)
        tokenizer = data.tokenizer
        write_json(folder / GENERATION_CONFIG, exported_generation(
            task.generation, base, data.stop_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id))
    card = model_card(run, task.pretrained, task.trains_adapter, auto_class, chat_template is not None)
    (folder / "README.md").write_text(card, encoding="utf-8")
    draw_curves(run.metrics_csv, folder / "loss.png")


def save_tokenizer(tokenizer: Any, chat_template: str | None, folder: Path) -> None:
    """Write a transformers tokenizer, with this chat template in place of its own unless it is None."""
    own = tokenizer.chat_template
    if chat_template is not None and chat_template not in (own.values() if isinstance(own, dict) else [own]):
        tokenizer = copy.copy(tokenizer)  # the run's own stays as it was: it counts in the identity of the run
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def base_generation(pretrained: str | None, revision: str | None) -> dict[str, Any]:
    """What the model that a run started from says of generation, as far as it is on this machine.

    As in transformers, the end tokens of config.json stand in for a file that is missing.
    """
    for file, keys in ((GENERATION_CONFIG, None), ("config.json", ("eos_token_id",))):
        path = pretrained and find_file(pretrained, file, revision)
        if path:
            return {key: value for key, value in _fields(path).items() if keys is None or key in keys}
    return {}


def _fields(path: Path) -> dict[str, Any]:
    """What a JSON file says. The end of a run must not fail of a file that training went without."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        warn(f"{path} cannot be read ({one_line(error)}): the exported model takes nothing over from it.")
        return {}


# ---------------------------------------------------------------------------------------------------------------------
# loss.png of the run folder.

def draw_curves(metrics_csv: Path, picture: Path) -> None:
    """Draw training and validation loss over the steps; nothing where no step was logged."""
    if not metrics_csv.exists():
        return
    rows = read_table(metrics_csv).rows
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in (("train/loss", {"linewidth": 1.2}), ("val/loss", {"marker": "o", "markersize": 4})):
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set_xlabel("optimiser step")
    is_preference = any(row.get("train/rewards/chosen") for row in rows)
    axes.set_ylabel("loss" if is_preference else "loss (nats per token)")
    if axes.lines:
        axes.legend()
    figure.savefig(picture, dpi=120)
