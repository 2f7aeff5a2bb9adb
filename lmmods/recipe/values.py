"""Check recipe values that no engine could use, such as devices, seeds and paths, before anything is built."""

import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from lmmods.core.errors import UserError, refuse_value
from lmmods.core.settings import as_yaml_word
from lmmods.recipe.files import DEMO, shorten
from lmmods.recipe.trainer_fields import check_length

MAX_SEED = 2**32 - 1
A_CHECKPOINT = "a folder step=N in checkpoints/ of a run folder"
MAX_DEVICES = 256  # per machine; on a CPU each device is a process
ACCELERATORS = {"torch": ("auto", "cpu", "gpu", "cuda", "mps", "tpu"), "jax": ("auto", "cpu", "gpu", "cuda", "tpu")}
PATHS = ("pretrained", "adapter", "config", "tokenizer", "cache_dir", "source", "val_source", "test_source",
         "predict_source", "decontaminate", "path", "ckpt_path", "default_root_dir",
         # options of commands without a recipe
         "run", "runs", "out", "file", "folder", "name", "model", "data", "show", "space", "task_folder", "plot",
         "result")
NEVER_EMPTY = ("pretrained", "adapter", "tokenizer", "cache_dir", "default_root_dir", "out", "folder")
FRACTION_KEYS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches",
                 "overfit_batches")
MINIMUMS = {"num_nodes": 1, "accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "log_every_n_steps": 1,
            "max_steps": -1, "num_sanity_val_steps": -1, "min_steps": 0, "min_epochs": 0}


def check_values(recipe: dict[str, Any], engine: str) -> None:
    """Raise UserError for numbers, names and paths that no engine can use; the message has the key and the value."""
    check_strings(recipe, "")
    check_ckpt_path(recipe.get("ckpt_path"))
    check_seed(recipe.get("seed_everything"))
    trainer = recipe["trainer"]
    check_devices(trainer.get("accelerator", "auto"), trainer.get("devices", "auto"), engine)
    for name, minimum in MINIMUMS.items():
        value = trainer.get(name)
        if value is not None and value < minimum:
            _refuse(f"trainer.{name}", value, f"{minimum} or more")
    for name in FRACTION_KEYS:
        check_fraction(f"trainer.{name}", trainer.get(name))
    clip, interval = trainer.get("gradient_clip_val"), trainer.get("val_check_interval")
    if trainer["max_steps"] == 0:
        _refuse("trainer.max_steps", 0, "1 or more, or -1 to use trainer.max_epochs")
    if trainer["max_epochs"] == 0:
        _refuse("trainer.max_epochs", 0, "more than 0, or -1 to use trainer.max_steps")
    if trainer.get("limit_train_batches") == 0:
        _refuse("trainer.limit_train_batches", 0, "more than 0, or null for the whole epoch")
    check_length(trainer["max_epochs"], trainer["max_steps"])
    check_time(trainer.get("max_time"))
    if clip is not None and not 0 <= clip < math.inf:
        _refuse("trainer.gradient_clip_val", clip, "0 or more, or null not to clip")
    if trainer.get("gradient_clip_algorithm") not in (None, "norm", "value"):
        _refuse("trainer.gradient_clip_algorithm", trainer["gradient_clip_algorithm"], "norm or value")
    if interval is not None and (interval < 1 if isinstance(interval, int) else not 0 < interval <= 1):
        _refuse("trainer.val_check_interval", interval, "a fraction of an epoch up to 1.0, or an integer number "
                "of optimiser steps from 1")
    if trainer["default_root_dir"] is None:
        _refuse("trainer.default_root_dir", None, "the path of a folder")


def check_ckpt_path(ckpt_path: str | None) -> None:
    """Raise UserError if `--ckpt_path` is given but empty."""
    if ckpt_path is not None and not ckpt_path.strip():
        raise UserError(f"--ckpt_path is empty, but must be last, best, a step number, or {A_CHECKPOINT}.",
                        "ckpt_path")


def check_time(value: str | dict[str, int] | timedelta | None) -> None:
    """Raise UserError unless a time limit is positive: otherwise the run would end without a step."""
    try:
        if isinstance(value, str):
            match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", value)
            days, hours, minutes, seconds = map(int, match.groups() if match else (0, 0, 0, 0))
            time: timedelta | None = timedelta(days, hours=hours, minutes=minutes, seconds=seconds)
        else:
            time = timedelta(**value) if isinstance(value, dict) else value
    except (OverflowError, TypeError):  # too long; an unknown unit
        time = timedelta()
    if time is not None and time <= timedelta():
        _refuse("trainer.max_time", value, "more than 0: DD:HH:MM:SS, for example 00:08:00:00, or a mapping of weeks, "
                "days, hours, minutes and seconds, for example {hours: 8}")


def check_seed(seed: bool | int | None) -> None:
    """Raise UserError unless a seed fits 32 bits; true picks one at random."""
    if seed is not True and (seed is None or seed is False or not 0 <= seed <= MAX_SEED):
        _refuse("seed_everything", seed, f"an integer from 0 to {MAX_SEED}, or true to pick one at random")


def check_strings(value: object, key: str) -> None:
    """Raise UserError for a string with a NUL byte, and for a path or hub id that is empty or too long for a path."""
    if isinstance(value, str):
        if "\0" in value:
            _refuse(key, value, "a string without NUL bytes")
        if not value.strip() and key.rsplit(".", 1)[-1] in NEVER_EMPTY:
            _refuse(key, value, "a path or a name. Remove the key if there is none")
        max_bytes = max(len(part.encode(errors="replace")) for part in value.split("/"))
        if key.rsplit(".", 1)[-1] in PATHS and "://" not in value and (max_bytes > 255 or len(value) > 4095):
            raise UserError(f"{key} is {shorten(value)}, which is too long for a path. Use a shorter one.", key)
        if DEMO.match(value) and not Path("demo").is_dir():
            raise UserError(f"{key} is {value}, but {Path.cwd()} has no demo files. Run the command in a clone of the "
                            "project, or set the key to your own path.", key)
    elif isinstance(value, list | tuple):
        for item in value:
            check_strings(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            check_strings(item, f"{key}.{name}".removeprefix(".").replace(".init_args", ""))


def check_devices(accelerator: str, devices: str | int | list[int] | None, engine: str) -> None:
    """Raise UserError for an unknown accelerator, or a wrong number or list of devices."""
    if accelerator not in ACCELERATORS[engine]:
        _refuse("trainer.accelerator", accelerator, f"one of {', '.join(ACCELERATORS[engine])}")
    expected = "auto or a number from 1" + (", or on GPUs a list of their indices" if engine == "torch" else "")
    if isinstance(devices, str) and devices != "auto":
        parts = devices.strip("[] ").split(",")
        indices = [int(part) if part.strip().isdigit() and len(part) < 9 else -2 for part in parts if part.strip()]
        is_valid = devices.strip() == "-1" or indices and -2 not in indices
        if not is_valid or accelerator == "cpu" and len(indices) != 1 and devices.strip() != "-1":
            _refuse("trainer.devices", devices, expected)
        devices = indices[0] if len(indices) == 1 and "," not in devices and "[" not in devices else indices
    if isinstance(devices, list):
        if accelerator == "cpu" or not devices or len(set(devices)) < len(devices) or min(devices) < 0:
            _refuse("trainer.devices", devices, expected)
    elif devices is None or isinstance(devices, int) and devices != -1 and not 1 <= devices <= MAX_DEVICES:
        _refuse("trainer.devices", devices, expected)


def check_fraction(key: str, value: int | float | None) -> None:
    """Raise UserError unless a value is a number of micro-batches, or a fraction of all."""
    if value is not None and not (value >= 0 if isinstance(value, int) else 0 <= value <= 1):
        _refuse(key, value, "an integer number of micro-batches from 0, or a fraction from 0.0 to 1.0")


def _refuse(key: str, value: object, expected: str) -> None:
    is_word = value is None or isinstance(value, bool)
    refuse_value(f"{key} is {as_yaml_word(value) if is_word else shorten(repr(value))}, but must be {expected}.",
                 key)
