"""Keys of other programs and their counterparts here: the tables of foreign_keys.txt, read on demand."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).with_name("foreign_keys.txt")
NOT_NEEDED = "not needed"
NO_KEY = ("none", NOT_NEEDED)


@dataclass(frozen=True)
class Row:
    """Row of a table.

    Args:
        program: Program whose table (a section of the file) contains the row.
        cells: The columns old, ours and notes, verbatim.
        pairs: Each foreign key with its keys here; empty if there is no counterpart.
    """

    program: str
    cells: tuple[str, str, str]
    pairs: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def note(self) -> str:
        """Notes as plain text, without Markdown."""
        return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", self.cells[2]).replace("`", "")


@functools.cache
def read_rows() -> tuple[Row, ...]:
    """Return all rows in file order."""
    rows, program = [], ""
    for line in TABLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            program = line.strip("[]")
        elif line and not line.startswith("#"):
            old, ours, note = (cell.strip() for cell in line.removeprefix("* ").split("|", 2))
            rows.append(Row(program, (old, ours, note), _pairs(old, ours)))
    return tuple(rows)


def rows_of(program: str) -> dict[str, Row]:
    """Map each foreign key of a program to its row."""
    return {name: row for row in read_rows() if row.program == program for name, _ in row.pairs}


def counterparts(key: str) -> list[tuple[tuple[str, ...], str]]:
    """Return the counterparts of any program's key, each with its note; those without keys are last.

    Args:
        key: Dotted key; `lora.r` is looked up as lora_r before r.
    """
    parts = re.sub(r"\.(init_args|dict_kwargs)\b", "", key).replace("-", "_").split(".")
    for name in ("_".join(parts[-2:]), parts[-1]):
        notes: dict[tuple[str, ...], str] = {}
        for row in read_rows():
            for old, ours in row.pairs:
                if old == name and not notes.get(ours):
                    notes[ours] = row.note
        if notes:
            return sorted(notes.items(), key=lambda item: not item[0])
    return []


def _pairs(old: str, ours: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    names, keys = _names(old), () if ours in NO_KEY else tuple(ours.split(", "))
    if len(names) == len(keys):
        return tuple((name, (key,)) for name, key in zip(names, keys, strict=True))
    return tuple((name, keys) for name in names)


def _names(cell: str) -> list[str]:
    """Return the keys in a cell: items with a space are not keys, and text after a colon is a value."""
    names = []
    for item in cell.split(", "):
        name, colon, _ = item.partition(":")
        if re.fullmatch(r"[\w.\[\]]+", name):
            names.append(name)
        if colon:
            break
    return names


# ---------------------------------------------------------------------------------------------------------------------
# Values that have a different name here, by foreign key; each entry maps a value to settings of a recipe.

OPTIMIZERS = {
    "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adam": "adamw",
    "adamw_bnb_8bit": "adamw_8bit", "adamw_8bit": "adamw_8bit", "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit", "paged_adamw_32bit": "paged_adamw_32bit",
    "paged_adamw_8bit": "paged_adamw_8bit", "adafactor": "adafactor", "sgd": "sgd", "lion": "lion",
    "lion_32bit": "lion", "lion_8bit": "lion_8bit", "muon": "muon", "paged_lion_8bit": "paged_lion_8bit"}
SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd", "wsd": "wsd"}
ATTENTION = {
    "auto": None, "fa2": "flash_attention_2", "flash_attention_2": "flash_attention_2", "sdpa": "sdpa",
    "eager": "eager", "disabled": "eager"}
TEMPLATES = ("alpaca", "chatml", "llama2", "llama3", "mistral", "gemma", "vicuna", "zephyr")
PRECISIONS = {"bfloat16": "bf16-mixed", "bf16": "bf16-mixed", "float16": "16-mixed", "fp16": "16-mixed",
              "float32": "32-true", "fp32": "32-true", "auto": "auto"}

Settings = dict[str, Any]


def _translate_by(key: str, names: dict[str, Any]) -> Callable[[Any], Settings]:
    """Return a function that translates a value by `names`; unknown values give no settings."""
    return lambda value: {key: names[name]} if (name := str(value).lower()) in names else {}


def _if_true(key: str, ours: Any) -> Callable[[Any], Settings]:
    return lambda value: {key: ours} if value is True else {}


def _translate_attention(value: object) -> Settings:
    return {"model.attention": ATTENTION[value]} if value in ATTENTION else {}


def _translate_targets(value: str | list[str]) -> Settings:
    """Translate LoRA targets: `all`, `all-linear`, comma-separated names or a list, but no regular expression."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if names and all(isinstance(name, str) and name.replace("_", "").replace(".", "").replace("-", "").isalnum()
                     for name in names):
        return {"model.lora.targets": "all-linear" if names[0] in ("all", "all-linear") else names}
    return {}


def _translate_bits(value: object) -> Settings:
    return {"model.quantize": {4: "nf4", 8: "int8", 16: None, 32: None}[value]} if value in (4, 8, 16, 32) else {}


def _translate_interval(value: object) -> Settings:
    return {"trainer.val_check_interval": None} if value == "epoch" else {}


def _translate_init(value: object) -> Settings:
    # PEFT's values: True samples A, and `pissa_niter_16` is a faster approximation of `pissa`.
    if value is True:
        return {"model.lora.init": "kaiming"}
    return {"model.lora.init": "pissa"} if str(value).startswith("pissa") else {}


# Foreign key -> function from its value to settings here; empty if the value has no counterpart.
VALUES: dict[str, Callable[[Any], Settings]] = {
    "optim": _translate_by("model.optimizer.name", OPTIMIZERS),
    "optimizer": _translate_by("model.optimizer.name", OPTIMIZERS),
    "adafactor": _if_true("model.optimizer.name", "adafactor"),
    "use_muon": _if_true("model.optimizer.name", "muon"),
    "lr_scheduler_type": _translate_by("model.optimizer.schedule", SCHEDULES),
    "lr_scheduler": _translate_by("model.optimizer.schedule", SCHEDULES),
    "scheduler": _translate_by("model.optimizer.schedule", SCHEDULES),
    "bf16": _if_true("trainer.precision", "bf16-mixed"), "bfloat16": _if_true("trainer.precision", "bf16-mixed"),
    "fp16": _if_true("trainer.precision", "16-mixed"), "float16": _if_true("trainer.precision", "16-mixed"),
    "pure_bf16": _if_true("trainer.precision", "bf16-true"),
    "dtype": _translate_by("trainer.precision", PRECISIONS),
    "torch_dtype": _translate_by("trainer.precision", PRECISIONS),
    "load_in_4bit": _if_true("model.quantize", "nf4"), "load_in_8bit": _if_true("model.quantize", "int8"),
    "bits": _translate_bits, "quantization_bit": _translate_bits,
    "bnb_4bit_quant_type": lambda value: {"model.quantize": value} if value in ("nf4", "fp4") else {},
    "flash_attention": _if_true("model.attention", "flash_attention_2"),
    "flash_attn": lambda value: _translate_attention("fa2" if value is True else value),
    "attn_implementation": _translate_attention, "attention": _translate_attention,
    "sdp_attention": _if_true("model.attention", "sdpa"), "eager_attention": _if_true("model.attention", "eager"),
    "lora_target_modules": _translate_targets, "target_modules": _translate_targets,
    "lora_target": _translate_targets,
    "pissa_init": _if_true("model.lora.init", "pissa"),
    "init_lora_weights": _translate_init, "peft_init_lora_weights": _translate_init,
    "lora_target_linear": _if_true("model.lora.targets", "all-linear"),
    "disable_gradient_checkpointing": lambda value: {"model.gradient_checkpointing": not value},
    "activation_offloading": _if_true("model.gradient_checkpointing", "offload"),
    "deepspeed": _if_true("trainer.strategy", "lmmods.strategies.DeepSpeed"),
    "fsdp": lambda value: {"trainer.strategy": "fsdp"} if value else {},
    "mask_history": _if_true("data.train_on", "last"), "train_on_prompt": _if_true("data.train_on", "all"),
    "train_on_inputs": _if_true("data.train_on", "all"),
    "eval_strategy": _translate_interval, "evaluation_strategy": _translate_interval,
    "eval_on_start": _if_true("trainer.num_sanity_val_steps", -1),
    "greater_is_better": lambda value: {"checkpoint.mode": "max" if value else "min"},
    "train_sampling_strategy": lambda value: {"data.group_by_length": value == "group_by_length"},
    "dataset_exact_deduplication": _if_true("data.deduplicate", "exact"),
    "curriculum_sampling": lambda value: {"data.shuffle": not value},
    "gpu_memory_limit": lambda value: {"model.max_memory": f"{value}GiB" if isinstance(value, int) else value},
    "use_cpu": _if_true("trainer.accelerator", "cpu"), "no_cuda": _if_true("trainer.accelerator", "cpu"),
    "validation_split_percentage": lambda value: {"data.val_size": value / 100},
    "hub_strategy": lambda value: {"publish.when": {"every_save": "save"}.get(value, value)},
}


# ---------------------------------------------------------------------------------------------------------------------
# Hints for unknown keys: their counterpart here if another program has them.

# Keys here whose values are named differently in other programs.
OURS = {"name": OPTIMIZERS, "schedule": SCHEDULES, "precision": PRECISIONS,
        "quantize": {"4bit": "nf4", "int4": "nf4", "4": "nf4", "8bit": "int8", "8": "int8"}}


def hint_for(key: str, value: object = None) -> str | None:
    """Return the hint for an unknown key, with its value if it has another name here; None if no table has the key."""
    matches = counterparts(key)
    if not matches:
        return None
    key = key.replace(".init_args.", ".")
    settings = VALUES.get(key.rsplit(".", 1)[-1], lambda _: {})(value) if value is not None else {}
    if settings:
        shown = (f"{ours}: {yaml.safe_dump(translated, default_flow_style=True).splitlines()[0]}"
                 for ours, translated in settings.items())
        return f"{key} is not a key. Here: {', '.join(shown)}."
    ours, note = matches[0]
    if not ours:
        return f"{key} is not a key, and has no counterpart: {note}."
    note = "" if re.search(r"\bthere\b", note) else note  # a note about one program only
    others = "".join(f", or {' and '.join(keys)}" for keys, _ in matches[1:] if keys)
    return f"{key} is not a key. Here: {' and '.join(ours)}{others}{f' ({note})' if note else ''}."


def foreign_value(key: str, value: str) -> str:
    """Return a hint with our name for a value of another program; empty if there is none."""
    ours = OURS.get(key.rpartition(".")[2], {}).get(value.lower())
    return f" Other programs' {value} is {ours} here." if ours else ""


# ---------------------------------------------------------------------------------------------------------------------
# Detection of the program that a configuration was written for.

PROGRAMS = {"axolotl": "axolotl", "llamafactory": "LLaMA-Factory", "trl": "TRL"}
BLOCKS = ("trainer", "model", "data", "checkpoint", "samples", "mmlu", "publish")  # of a recipe
# Keys unique to a program; one of them is enough to identify it.
MARKS = {
    "axolotl": {"base_model", "sequence_len", "micro_batch_size", "val_set_size", "sample_packing", "num_epochs",
                "lora_target_linear", "dataset_prepared_path", "rl", "rl_beta", "dpo_loss_type"},
    "llamafactory": {"stage", "finetuning_type", "cutoff_len", "lora_rank", "lora_target", "quantization_bit",
                     "dataset_dir", "max_samples", "model_class", "train_dataset", "dist_config",
                     "pref_loss", "pref_beta"},
    "trl": {"dataset_name", "dataset_train_split", "use_peft", "dataset_text_field", "assistant_only_loss",
            "completion_only_loss", "bnb_4bit_quant_type", "use_bnb_nested_quant", "eval_packing", "dataset_num_proc",
            "loss_type", "desirable_weight", "undesirable_weight", "num_generations", "reward_funcs",
            "max_completion_length"},
}


def find_program(content: dict[str, Any]) -> str | None:
    """Return the program in `PROGRAMS` that most keys of a mapping belong to; None for a recipe or if unclear."""
    if any(isinstance(content.get(block), dict) for block in BLOCKS):
        return None
    counts = {program: len(marks & content.keys()) for program, marks in MARKS.items()}
    best = max(counts, key=lambda program: counts[program])
    return best if counts[best] and list(counts.values()).count(counts[best]) == 1 else None
