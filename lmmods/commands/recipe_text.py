"""The text of a recipe that `new` writes, every block with a comment that says why."""

import json
import math
import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lmmods.commands.memory_plan import ROOM, Machine, MemoryPlan, as_options
from lmmods.core.recipes import as_yaml

RATES = {"SFT": 2e-5, "CLM": 2e-5, "MLM": 5e-5, "QA": 3e-5, "Preference": 1e-6}  # of full tuning
SMALL = 50_000_000  # parameters below which full tuning of a decoder takes a rate ten times as high; encoders of any
ENCODERS = ("MLM", "QA")  # size are tuned at 2e-5 to 5e-5 (Devlin et al., 2019, appendix A.3)
ADAPTER_RATES = {"Preference": 1e-5}  # others: 2e-4
WIDTH = 120  # of a line
EPOCHS = {"SFT": 3, "CLM": 1, "MLM": 3, "QA": 2, "Preference": 1}


@dataclass
class Facts:
    """What a recipe is made of.

    Args:
        path: Of the recipe.
        why: What the task follows from.
        loss: Of preferences; None for other tasks.
        batch: Rows of a step.
        options: Keys of `data`, with `notes` on some.
        rows: Rows of batches among those read, of which there may be more (`is_sample`).
    """

    path: str
    model: str
    data: str
    task: str
    why: str
    loss: str | None
    num_params: int
    machine: Machine
    plan: MemoryPlan
    batch: int
    options: dict[str, Any]
    notes: dict[str, str]
    rows: int
    is_sample: bool
    table: str

    @cached_property
    def training(self) -> str:
        """How the model is tuned, in words."""
        return "QLoRA" if self.plan.quantize else "LoRA" if self.plan.lora else "full tuning"

    @cached_property
    def summary(self) -> str:
        """The recipe in a line."""
        plan = self.plan
        return (f"{self.task} by {self.training}, rows of {self.options['max_length']} tokens, {plan.batch_size} × "
                f"{self.batch // plan.batch_size} a step, about {self.gibibytes} GiB")

    @cached_property
    def gibibytes(self) -> str:
        """Memory of a step."""
        return f"{self.plan.needed / 2**30:.2f}"


def recipe_text(facts: Facts) -> str:
    """The recipe as YAML with comments, which `fit` and `inspect` take on either engine."""
    plan, steps = facts.plan, math.ceil(max(1, facts.rows - facts.options["val_size"]) / facts.batch)
    epochs = EPOCHS[facts.task]
    counted = f"{'at least ' if facts.is_sample else 'about '}{steps} steps each"
    full = RATES[facts.task] * (10 if facts.num_params < SMALL and facts.task not in ENCODERS else 1)
    rate = ADAPTER_RATES.get(facts.task, 2e-4) if plan.lora else full
    data = {"source": facts.data, **facts.options}
    lines = [
        f"# {facts.task} of {_plain(facts.model)} on {_plain(facts.data)}, by {facts.training}.",
        "# Written by `new`: change what you like.",
        "#",
        f"#   python train.py inspect --config {_plain(facts.path)}",
        f"#   python train.py fit --config {_plain(facts.path)}",
        "#",
        f"# Hardware: {facts.machine.memory / 2**30:.0f} GiB ({facts.machine.name}); a step takes about "
        f"{facts.gibibytes} GiB",
        f"# Time: {epochs * steps} steps{' or more' if facts.is_sample else ''}; the first lines of fit say how long",
        "",
        *_line("engine", "torch", "or jax: the same recipe"),
        *_line("seed_everything", 42),
        "trainer:",
        *_line("max_epochs", epochs, counted, 2),
        *_line("accumulate_grad_batches", facts.batch // plan.batch_size,
               f"so that a step has {facts.batch} rows; divide by the number of devices", 2),
        *_line("gradient_clip_val", 1.0, "", 2),
        *_line("precision", "auto", "bf16-mixed where the hardware has it, else 32-true", 2),
        *_line("devices", 1, "", 2),
        *(_line("val_check_interval", 0.5, "validates twice an epoch", 2) if data["val_size"] else []),
        *_line("log_every_n_steps", min(10, steps), "", 2),
        *_line("default_root_dir", f"runs/{Path(facts.path).stem}", "the run folder, with metrics.csv and loss.png", 2),
        "  # logger: [{class_path: WandbLogger}]   # or TensorBoardLogger with init_args: {save_dir: …}",
        "model:",
        *_line("class_path", facts.task, facts.why, 2),
        "  init_args:",
        *_line("pretrained", facts.model, f"{facts.num_params:,} parameters", 4),
        *_model_lines(facts),
        *_line("optimizer", {"name": "adamw", "lr": rate, "schedule": "cosine", "warmup": 0.03},
               "what matters most: try lr three times higher and lower", 4),
        "data:",
        *_line("class_path", f"{facts.task}Data", "", 2),
        "  init_args:",
        *[line for key, value in data.items() for line in _line(key, value, facts.notes.get(key, ""), 4)],
        *_line("batch_size", plan.batch_size, _why_so_many_rows(facts), 4),
        "checkpoint:",
        *_line("every_n_steps", max(1, min(500, steps // 2)), "resume with --ckpt_path last", 2),
        *_line("keep_last", 2, "", 2)]
    if facts.task in ("SFT", "CLM", "Preference"):
        what = "[Once upon a time]" if facts.task == "CLM" else "[Name three fruits.]"
        lines.append(f"# samples: {{prompts: {what}, every_n_steps: 100}}   # what it writes, during training")
    return "\n".join(lines) + "\n"


def _why_so_many_rows(facts: Facts) -> str:
    plan = facts.plan
    if not plan.fits:
        return f"rows of a micro-batch: even so few need more than {ROOM:.0%} of the memory"
    if plan.batch_size == facts.batch:
        return "rows of a micro-batch: all of a step at once"
    return (f"rows of a micro-batch: twice as many would need more than {ROOM:.0%} of the memory"
            + ("" if plan.checkpointing else " without gradient_checkpointing, which takes longer"))


def _model_lines(facts: Facts) -> list[str]:
    plan, options = facts.plan, as_options(facts.plan)
    notes = {"quantize": "the frozen base in 4 bits (QLoRA): in 16 it would not fit",
             "lora": "adapters train, the base is frozen; null trains the model itself"}
    lines = [line for key, value in options.items() for line in _line(key, value, notes[key], 4)]
    if facts.loss:
        lines = [*_line("loss", facts.loss, "others: docs/tasks/preference.md", 4),
                 *_line("beta", 0.1, "lower lets the model go further from where it starts", 4), *lines]
    if not plan.lora:
        rate = ADAPTER_RATES.get(facts.task, 2e-4)
        lines.append(f"    # lora: {{rank: 16, alpha: 32}}   # adapters instead of full tuning, with lr {_value(rate)}")
    if plan.checkpointing:
        lines += _line("gradient_checkpointing", True, "a third more time, for a part of the memory", 4)
    return lines


def _line(key: str, value: Any, comment: str = "", indent: int = 0) -> list[str]:
    """A key with its comment beside it, or above it where both would be too long for a line."""
    text = f"{' ' * indent}{key}: {_value(value)}"
    if not comment:
        return [text]
    beside = f"{text}   # {_plain(comment)}"
    if len(beside) <= WIDTH:
        return [beside]
    mark = f"{' ' * indent}# "
    return [*textwrap.wrap(_plain(comment), WIDTH, initial_indent=mark, subsequent_indent=mark), text]


def _plain(text: str) -> str:
    """A text for a comment, which a line's end would end."""
    return " ".join(text.split())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(name)}: {_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, float) and 0 < value < 0.01:  # YAML reads 2e-05 as a text
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits}e{int(exponent)}"
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)  # on one line
    return as_yaml([value], default_flow_style=True, width=math.inf)[1:-2]
