"""Values of other programs' keys that have another name here, by foreign key: each gives settings of a recipe."""

from collections.abc import Callable
from typing import Any

OPTIMIZERS = {
    "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adam": "adamw",
    "adamw_bnb_8bit": "adamw_8bit", "adamw_8bit": "adamw_8bit", "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit", "paged_adamw_32bit": "paged_adamw_32bit",
    "paged_adamw_8bit": "paged_adamw_8bit", "adafactor": "adafactor", "sgd": "sgd", "lion": "lion",
    "lion_32bit": "lion", "lion_8bit": "lion_8bit", "paged_lion_8bit": "paged_lion_8bit"}
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


def _named(key: str, names: dict[str, Any]) -> Callable[[Any], Settings]:
    """A value that has another name here; nothing where it has none."""
    return lambda value: {key: names[name]} if (name := str(value).lower()) in names else {}


def _if_true(key: str, ours: Any) -> Callable[[Any], Settings]:
    return lambda value: {key: ours} if value is True else {}


def _attention(value: Any) -> Settings:
    return {"model.attention": ATTENTION[value]} if value in ATTENTION else {}


def _targets(value: Any) -> Settings:
    """`all` and `all-linear`, names with commas between them, a list of names, but no regular expression."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if names and all(isinstance(name, str) and name.replace("_", "").replace(".", "").replace("-", "").isalnum()
                     for name in names):
        return {"model.lora.targets": "all-linear" if names[0] in ("all", "all-linear") else names}
    return {}


def _bits(value: Any) -> Settings:
    return {"model.quantize": {4: "nf4", 8: "int8", 16: None, 32: None}[value]} if value in (4, 8, 16, 32) else {}


def _interval(value: Any) -> Settings:
    return {"trainer.val_check_interval": None} if value == "epoch" else {}


# Foreign key -> its value as settings here, nothing where the value has no counterpart.
VALUES: dict[str, Callable[[Any], Settings]] = {
    "optim": _named("model.optimizer.name", OPTIMIZERS), "optimizer": _named("model.optimizer.name", OPTIMIZERS),
    "adafactor": _if_true("model.optimizer.name", "adafactor"),
    "lr_scheduler_type": _named("model.optimizer.schedule", SCHEDULES),
    "lr_scheduler": _named("model.optimizer.schedule", SCHEDULES),
    "scheduler": _named("model.optimizer.schedule", SCHEDULES),
    "bf16": _if_true("trainer.precision", "bf16-mixed"), "bfloat16": _if_true("trainer.precision", "bf16-mixed"),
    "fp16": _if_true("trainer.precision", "16-mixed"), "float16": _if_true("trainer.precision", "16-mixed"),
    "pure_bf16": _if_true("trainer.precision", "bf16-true"),
    "dtype": _named("trainer.precision", PRECISIONS), "torch_dtype": _named("trainer.precision", PRECISIONS),
    "load_in_4bit": _if_true("model.quantize", "nf4"), "load_in_8bit": _if_true("model.quantize", "int8"),
    "bits": _bits, "quantization_bit": _bits,
    "bnb_4bit_quant_type": lambda value: {"model.quantize": value} if value in ("nf4", "fp4") else {},
    "flash_attention": _if_true("model.attention", "flash_attention_2"),
    "flash_attn": lambda value: _attention("fa2" if value is True else value),
    "attn_implementation": _attention, "attention": _attention,
    "sdp_attention": _if_true("model.attention", "sdpa"), "eager_attention": _if_true("model.attention", "eager"),
    "lora_target_modules": _targets, "target_modules": _targets, "lora_target": _targets,
    "lora_target_linear": _if_true("model.lora.targets", "all-linear"),
    "disable_gradient_checkpointing": lambda value: {"model.gradient_checkpointing": not value},
    "deepspeed": _if_true("trainer.strategy", "lmmods.strategies.DeepSpeed"),
    "fsdp": lambda value: {"trainer.strategy": "fsdp"} if value else {},
    "mask_history": _if_true("data.train_on", "last"), "train_on_prompt": _if_true("data.train_on", "all"),
    "train_on_inputs": _if_true("data.train_on", "all"),
    "eval_strategy": _interval, "evaluation_strategy": _interval,
    "eval_on_start": _if_true("trainer.num_sanity_val_steps", -1),
    "greater_is_better": lambda value: {"checkpoint.mode": "max" if value else "min"},
    "train_sampling_strategy": lambda value: {"data.group_by_length": value == "group_by_length"},
    "curriculum_sampling": lambda value: {"data.shuffle": not value},
    "gpu_memory_limit": lambda value: {"model.max_memory": f"{value}GiB" if isinstance(value, int) else value},
    "use_cpu": _if_true("trainer.accelerator", "cpu"), "no_cuda": _if_true("trainer.accelerator", "cpu"),
    "validation_split_percentage": lambda value: {"data.val_size": value / 100},
    "hub_strategy": lambda value: {"publish.when": {"every_save": "save"}.get(value, value)},
}
