"""Settings that the three programs share via transformers' Trainer: optimisation, length, evaluation, saving.

Defaults that differ from the recipe's are written into the recipe.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.optimizers import SHARDABLE
from lmmods.core.preference_losses import METHODS, UNSUPPORTED
from lmmods.extras.migration.draft import Draft
from lmmods.recipe.classes import declared
from lmmods.recipe.engines import LOGGERS
from lmmods.recipe.foreign_keys import OPTIMIZERS, PROGRAMS, SCHEDULES

REPORT_TO = {name.removesuffix("Logger").lower(): name for name in LOGGERS}


@dataclass(frozen=True)
class Names:
    """A program's names of shared settings, and its defaults.

    Args:
        warmup: Default without `warmup_ratio` and `warmup_steps`.
    """

    epochs: str = "num_train_epochs"
    batch_size: str = "per_device_train_batch_size"
    eval_batch_size: str = "per_device_eval_batch_size"
    optimizer: str = "optim"
    schedule: str = "lr_scheduler_type"
    default_epochs: float = 3
    default_batch_size: int = 8
    default_lr: float = 5e-5
    default_schedule: str = "linear"
    default_warmup: float = 0


def take_training(draft: Draft, names: Names) -> None:
    """Convert all shared settings. Call it after the data is converted."""
    _take_length(draft, names)
    _take_optimizer(draft, names)
    _take_schedule(draft, names)
    _take_evaluation(draft)
    _take_saving(draft)
    _take_loggers(draft)
    _take_strategy(draft)
    smoothing = draft.get("label_smoothing_factor")
    if smoothing and draft.settings["model"][0] in ("SFT", "CLM"):
        draft.put("model.label_smoothing", float(smoothing), "label_smoothing_factor")
    elif smoothing:
        draft.lose("label_smoothing_factor", "only SFT and CLM support it")
    clip = draft.get("max_grad_norm", 1.0)
    draft.put("trainer.gradient_clip_val", clip or None, "max_grad_norm")
    draft.put("trainer.log_every_n_steps", max(int(draft.get("logging_steps", 500)), 1), "logging_steps")
    draft.put("trainer.default_root_dir", draft.get("output_dir", "runs/migrated"), "output_dir")
    if draft.get("push_to_hub") and draft.get("hub_model_id"):
        draft.put("publish.repo", draft.content["hub_model_id"], "hub_model_id")
    elif draft.get("push_to_hub") or draft.get("hub_model_id"):
        draft.note("Nothing is uploaded. Set publish.repo to upload the model.")
    draft.get("logging_strategy")
    if draft.get("overwrite_output_dir"):
        draft.note("To replace an earlier run in the folder, add --overwrite true on the command line.")
    if draft.get("trust_remote_code"):
        draft.lose("trust_remote_code", "set it on the command line: --model.trust_remote_code true")
    if draft.get("resume_from_checkpoint") or draft.get("auto_resume_from_checkpoints"):
        draft.note("To resume a run, add --ckpt_path last on the command line.")
    if draft.settings["model"][0] != "Preference":
        draft.note("The loss of a step is divided once, by all its target tokens. It may differ from a mean over "
                   "micro-batches if rows differ in length.")


def take_images(draft: Draft, key: str, trained: list[str] | None) -> None:
    """Train on the images of rows. Call it after the model and the rows are converted.

    Args:
        key: Foreign key that asks for images.
        trained: `model.trainable_parameters` of full fine-tuning; None trains the language model.
    """
    if draft.settings["model"][0] not in ("SFT", "Preference"):
        draft.lose(key, "only SFT and Preference read images")
        return
    draft.put("model.images", True, key)
    if draft.has("model.lora") or draft.has("model.adapter"):
        draft.note("Adapters stay in the language model; what sees images is frozen.")
    elif trained and not draft.has("model.trainable_parameters"):
        draft.put("model.trainable_parameters", trained, key)
    if draft.settings.get("data.on_overflow", ("",))[0] == "truncate":
        draft.put("data.on_overflow", "truncate_turns", "an image cannot be truncated")
    draft.note("Images are files next to the data file, or bytes in its rows; nothing is downloaded.")


def take_quantization(draft: Draft, double: bool) -> None:
    """Convert `load_in_4bit` and related keys, for adapters only. `double` is the default of double quantisation."""
    four, eight = draft.get("load_in_4bit"), draft.get("load_in_8bit")
    if not (four or eight):
        return
    if not (draft.has("model.lora") or draft.has("model.adapter")):
        draft.note("The base is quantised without an adapter. Quantised weights cannot be trained here, so "
                   "model.quantize is not set.")
    elif eight and not four:
        draft.put("model.quantize", "int8", "load_in_8bit")
    else:
        draft.put("model.quantize", draft.get("bnb_4bit_quant_type", "nf4"), "load_in_4bit", "bnb_4bit_quant_type")
        draft.put("model.double_quant", draft.get("use_bnb_nested_quant", double), "use_bnb_nested_quant")


def note_attention(draft: Draft, requested: str) -> None:
    """Note that the recipe does not name the requested attention implementation."""
    draft.note(f"{requested}: model.attention is null, which picks the fastest available implementation. Set it to "
               "flash_attention_2 to require that package.")


def _take_length(draft: Draft, names: Names) -> None:
    epochs, steps = draft.get(names.epochs), draft.get("max_steps", -1)
    if steps > 0:
        draft.put("trainer.max_steps", int(steps), "max_steps")
    else:
        draft.put("trainer.max_epochs", epochs or names.default_epochs, names.epochs)
    draft.put("data.batch_size", draft.get(names.batch_size, names.default_batch_size), names.batch_size)
    draft.put("trainer.accumulate_grad_batches", draft.get("gradient_accumulation_steps", 1),
              "gradient_accumulation_steps")
    if size := draft.get(names.eval_batch_size):
        draft.put("data.eval_batch_size", size, names.eval_batch_size)
    if draft.get("seed"):
        draft.put("seed_everything", draft.content["seed"], "seed")


def _take_optimizer(draft: Draft, names: Names) -> None:
    name = str(draft.get(names.optimizer, "adamw_torch")).lower()
    if name not in OPTIMIZERS:
        draft.lose(names.optimizer, f"{name} is not supported; adamw is used instead, so tune lr again")
    elif name == "adamw_torch_8bit":
        draft.note("adamw_torch_8bit is torchao's optimiser; adamw_8bit is bitsandbytes', which rounds differently.")
    draft.put("model.optimizer.name", OPTIMIZERS.get(name, "adamw"), names.optimizer)
    draft.put("model.optimizer.lr", draft.get("learning_rate", names.default_lr), "learning_rate")
    if decay := draft.get("weight_decay"):
        draft.put("model.optimizer.weight_decay", float(decay), "weight_decay")
    betas = draft.get("adam_beta1", 0.9), draft.get("adam_beta2", 0.999)
    if betas != (0.9, 0.999):
        draft.put("model.optimizer.betas", list(betas), "adam_beta1", "adam_beta2")
    if eps := draft.get("adam_epsilon"):
        draft.put("model.optimizer.eps", float(eps), "adam_epsilon")


def _take_schedule(draft: Draft, names: Names) -> None:
    name = draft.get(names.schedule, names.default_schedule)
    if name not in SCHEDULES:
        draft.lose(names.schedule, f"{name} is not supported; cosine is used instead")
    draft.put("model.optimizer.schedule", SCHEDULES.get(name, "cosine"), names.schedule)
    steps, fraction = draft.get("warmup_steps", 0), draft.get("warmup_ratio", names.default_warmup)
    if name == "constant" and (steps or fraction):
        draft.note("transformers' schedule constant has no warmup, so the warmup setting has no effect and is omitted.")
    elif steps:
        draft.put("model.optimizer.warmup", steps if steps < 1 else int(steps), "warmup_steps")
    elif fraction:
        draft.put("model.optimizer.warmup", float(fraction), "warmup_ratio")
    options = draft.get("lr_scheduler_kwargs", {})
    min_ratio = draft.get("cosine_min_lr_ratio", options.get("min_lr_rate") if isinstance(options, dict) else None)
    if min_ratio is None and isinstance(options, dict) and "min_lr" in options:
        min_ratio = float(options["min_lr"]) / float(draft.get("learning_rate", names.default_lr))
    if min_ratio is not None:
        draft.put("model.optimizer.min_lr_ratio", float(min_ratio), "cosine_min_lr_ratio", "lr_scheduler_kwargs")
    elif options:
        draft.lose("lr_scheduler_kwargs", "see model.optimizer.min_lr_ratio and model.optimizer.decay")


def _take_evaluation(draft: Draft) -> None:
    steps, per_epoch = draft.get("eval_steps"), draft.get("evals_per_epoch")
    strategy = draft.get("eval_strategy", draft.get("evaluation_strategy"))
    if not (draft.has("data.val_size") or draft.has("data.val_source")):
        return
    if per_epoch:
        draft.put("trainer.val_check_interval", round(1 / per_epoch, 6), "evals_per_epoch")
    elif steps and steps >= 1:
        draft.put("trainer.val_check_interval", int(steps), "eval_steps")
    elif steps:
        epochs = draft.settings.get("trainer.max_epochs", (0, ""))[0]
        if not 0 < steps * epochs <= 1:
            draft.lose("eval_steps", "it is a fraction of the run, but trainer.val_check_interval is a fraction of an "
                                     "epoch; validation runs once per epoch")
        else:
            draft.put("trainer.val_check_interval", float(steps * epochs), "eval_steps")
    elif strategy in ("no", False):
        draft.note("With eval_strategy: no, validation rows are held out but not used; here they are evaluated once "
                   "per epoch. Set trainer.limit_val_batches: 0 to skip that.")


def _take_saving(draft: Draft) -> None:
    strategy, steps, per_epoch = (draft.get(key) for key in ("save_strategy", "save_steps", "saves_per_epoch"))
    if per_epoch is not None or strategy in ("epoch", "no", "best", False) or steps is not None and steps < 1:
        draft.put("checkpoint.every_n_steps", None, "saves_per_epoch", "save_strategy", "save_steps")
        draft.note("A checkpoint is written after each validation and at the end.")
    elif steps:
        draft.put("checkpoint.every_n_steps", int(steps), "save_steps")
    if limit := draft.get("save_total_limit"):
        draft.put("checkpoint.keep_last", max(int(limit), 1), "save_total_limit")
    metric = draft.get("metric_for_best_model")
    if draft.get("load_best_model_at_end"):
        draft.note("model/ has the weights of the last step. --ckpt_path best uses the best checkpoint, which is kept.")
    if metric not in (None, "loss", "eval_loss"):
        draft.lose("metric_for_best_model", "set checkpoint.monitor to a metric of metrics.csv, such as val/loss")
    if patience := draft.get("early_stopping_patience", draft.get("early_stopping_steps")):
        draft.put("trainer.callbacks", [{"class_path": "EarlyStopping", "init_args": {
            "monitor": "val/loss", "patience": int(patience)}}], "early_stopping_patience", "early_stopping_steps")


def _take_loggers(draft: Draft) -> None:
    requested = draft.get("report_to", [])
    requested = [requested] if isinstance(requested, str) else list(requested)
    options = {option: draft.get(key) for key, option in (("wandb_project", "project"), ("wandb_name", "name"))}
    if run_name := draft.get("run_name"):
        options["name"] = options["name"] or run_name
    requested += [key for key in ("wandb", "tensorboard", "mlflow", "comet") if draft.get(f"use_{key}")]
    if options["project"]:
        requested.append("wandb")
    loggers = []
    for name in dict.fromkeys(requested):
        if name in REPORT_TO:
            init_args = {key: value for key, value in options.items() if value} if name == "wandb" else {}
            if name == "tensorboard":
                init_args = {"save_dir": str(draft.get("output_dir", "runs/migrated"))}
            loggers.append({"class_path": REPORT_TO[name], **({"init_args": init_args} if init_args else {})})
        elif name not in ("none", "all"):
            draft.lose("report_to", f"{name} is not supported; use one of {', '.join(LOGGERS)}")
    if loggers:
        draft.put("trainer.logger", loggers, "report_to", "wandb_project")


def _take_strategy(draft: Draft) -> None:
    deepspeed, fsdp, config = (draft.get(key) for key in ("deepspeed", "fsdp", "fsdp_config"))
    quantized = draft.has("model.quantize")
    if deepspeed:
        stage, offload = zero_stage(deepspeed)
        if stage is None:
            draft.note("The ZeRO stage of the DeepSpeed configuration is unknown; the recipe uses stage 2.")
        if stage == 3 and quantized:
            draft.note("ZeRO stage 3 cannot shard quantised weights; strategy fsdp is used instead.")
            draft.put("trainer.strategy", "fsdp", "deepspeed")
        elif stage == 0:
            draft.put("trainer.strategy", "ddp", "deepspeed")
        else:
            stage = 3 if stage == 3 else 2
            offloads = {"offload_optimizer": True, **({"offload_parameters": True} if stage == 3 else {})}
            draft.put("trainer.strategy", {"class_path": "lmmods.strategies.DeepSpeed", "init_args": {
                "stage": stage, **(offloads if offload else {})}}, "deepspeed")
            draft.note("DeepSpeed needs its package: pip install -e '.[deepspeed]'. Strategy fsdp needs no package.")
    elif fsdp or isinstance(config, dict) and config or int(draft.get("dp_shard_size", 1)) > 1:
        draft.put("trainer.strategy", "fsdp", "fsdp", "fsdp_config", "dp_shard_size")
        if isinstance(config, dict) and any(key.endswith("offload_params") and is_on for key, is_on in config.items()):
            draft.lose("fsdp_config.offload_params", "parameters stay on the devices")
        if isinstance(config, dict) and any("activation_checkpointing" in key and is_on
                                            for key, is_on in config.items()):
            draft.put("model.gradient_checkpointing", True, "fsdp_config.activation_checkpointing")
    strategy = draft.settings.get("trainer.strategy", ("", ""))[0]
    name = draft.settings["model.optimizer.name"][0]
    if strategy == "fsdp" and name not in SHARDABLE:
        draft.note(f"Strategy fsdp does not support {name}; adamw is used instead.")
        draft.put("model.optimizer.name", "adamw", "optimizer", "optim")
    if strategy == "fsdp" and draft.settings.get("model.quantize", ("", ""))[0] == "int8":
        draft.note("Strategy fsdp cannot shard int8; nf4 is used instead.")
        draft.put("model.quantize", "nf4", "load_in_8bit")


def zero_stage(config: Any) -> tuple[int | None, bool]:
    """Return the ZeRO stage of a DeepSpeed configuration (None if unknown), and whether it offloads to host memory.

    Args:
        config: Content or path of the configuration. If the file does not exist, the stage is guessed from its name.
    """
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            match = re.search(r"z(?:ero)?[_-]?([0-3])", Path(config).name)
            return int(match[1]) if match else None, "offload" in config
    zero = config.get("zero_optimization", {}) if isinstance(config, dict) else {}
    stage = zero.get("stage")
    offload = any(str(zero.get(key, {}).get("device", "none")) != "none" for key in ("offload_optimizer",
                  "offload_param") if isinstance(zero.get(key, {}), dict))
    return (stage if stage in (0, 1, 2, 3) else None), offload


# ---------------------------------------------------------------------------------------------------------------------
# Preference optimisation and reward models of the other programs: names of losses and related settings.

NEAREST = {"kto_pair": "kto"}  # LLaMA-Factory's KTO of pairs; here each answer of a pair is its own row
PACKING_KEYS = ("packing", "neat_packing", "padding_free", "sample_packing")
GENERATION_KEYS = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "num_beams", "repetition_penalty",
                   "length_penalty")
TARGET_KEYS = ("train_on_prompt", "mask_history", "train_on_inputs", "completion_only_loss", "assistant_only_loss")


def take_loss(draft: Draft, name: str, origin: str) -> str:
    """Set the task with a loss, or with sigmoid if the name is unknown; return the loss."""
    loss = name if name in METHODS else NEAREST.get(name, "sigmoid")
    if loss != name:
        draft.lose(origin, f"{UNSUPPORTED.get(name, f'{name} is not supported')}; {loss} is used instead")
    draft.put("model", "Preference", "")
    draft.put("model.loss", loss, origin)
    return loss


def take_number(draft: Draft, name: str, key: str, default: float) -> None:
    """Set a parameter of the loss. `default` is the other program's."""
    draft.put(f"model.{name}", float(draft.get(key, default)), key)


def take_smoothing(draft: Draft, loss: str, key: str, used_by: Sequence[str]) -> None:
    """Set the label smoothing if the other program uses it for this loss.

    Args:
        used_by: Losses for which the other program uses it.
    """
    value = draft.get(key)
    if value and loss in used_by and METHODS[loss].smooths:
        draft.put("model.label_smoothing", float(value), key)
    elif value:
        draft.lose(key, f"the other program does not use it with the loss {loss}")


def take_reference(draft: Draft, loss: str) -> None:
    """Set the source of the reference's log-probabilities if they are precomputed."""
    key = "precompute_ref_log_probs"
    if draft.get(key) and METHODS[loss].has_reference:
        draft.put("model.reference", "cache", key)


def take_reward(draft: Draft, origin: str) -> None:
    """Set the task of reward models, and report what they do not use."""
    draft.put("model", "Reward", origin)
    if weight := draft.get("center_rewards_coefficient"):
        draft.put("model.center_rewards_coefficient", float(weight), "center_rewards_coefficient")
    for key in GENERATION_KEYS:
        if draft.get(key):
            draft.lose(key, "a reward model does not generate text")
    if draft.get("router_aux_loss_coef"):
        draft.lose("router_aux_loss_coef", "not supported for reward models")
    note_differences(draft)


def take_data(draft: Draft) -> None:
    """Set the data module of pairs and report what it does not support."""
    draft.put("data", f"{draft.settings['model'][0]}Data", "")
    for key in PACKING_KEYS:
        if draft.get(key):
            draft.lose(key, "the answers of a pair stay together; data.group_by_length avoids most padding")
    for key in TARGET_KEYS:
        if draft.get(key):
            draft.lose(key, "the targets are always the tokens of the answers")


def note_differences(draft: Draft) -> None:
    """Note the differences that apply to every loss."""
    draft.note("Each term of the loss is divided once, by the number of pairs (or answers) in the step. Other programs "
               "divide per micro-batch, some terms by the number of tokens.")
    draft.note("Dropout is off, except model.lora.dropout and rates set in model.config_overrides.")


# ---------------------------------------------------------------------------------------------------------------------
# GRPO of TRL, and of axolotl, which trains by TRL's.

POLICY_LOSSES = {"dapo": "dapo", "bnpo": "dapo", "grpo": "grpo", "dr_grpo": "dr_grpo", "cispo": "cispo"}
RATIOS = {"token": "token", "sequence": "sequence"}
SCALES = {"group": "group", "batch": "batch", "none": "none", "True": "group", "False": "none"}
# TRL's own rewards, by the names that its files may have.
TRL_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"name": "math", "column": "solution"},
    "think_format_reward": {"name": "regex", "pattern": r"(?s)\A<think>(?!.*<think>).*?</think>"},
    "get_soft_overlong_punishment": {"name": "length", "max_tokens": 1280, "soft_tokens": 256},
    "reasoning_accuracy_reward": {"function": "trl.rewards.reasoning_accuracy_reward"},
}
PROMPT_LENGTH = 512  # maximum number of prompt tokens if the other program sets no limit
# Keys that change the distribution that answers are sampled from -> values that do not change it.
DISTRIBUTION = {"top_p": (1, 1.0), "top_k": (0, -1), "min_p": (0, 0.0), "repetition_penalty": (1, 1.0),
                "generation_kwargs": ({},)}


def take_grpo(draft: Draft, origin: str) -> None:
    """Set the task of GRPO and its own settings."""
    draft.put("model", "GRPO", origin)
    draft.put("data", "PromptData", "")
    draft.put("model.rewards", _read_rewards(draft), "reward_funcs", "reward_model_name_or_path")
    for key, name in (("num_generations", "num_generations"), ("max_completion_length", "max_new_tokens"),
                      ("num_iterations", "num_iterations"), ("num_generations_eval", "num_generations_eval"),
                      ("mask_truncated_completions", "mask_truncated"),
                      ("use_bias_correction_kl", "use_bias_correction_kl")):
        if draft.get(key) is not None:
            draft.put(f"model.{name}", draft.content[key], key)
    for key in ("temperature", "beta", "epsilon", "epsilon_high"):
        if draft.get(key) is not None:
            take_number(draft, key, key, 0.0)
    for key, name, values in (("loss_type", "loss", POLICY_LOSSES), ("importance_sampling_level", "ratio", RATIOS),
                              ("scale_rewards", "scale_rewards", SCALES)):
        value = draft.get(key)
        if value is not None and str(value) in values:
            draft.put(f"model.{name}", values[str(value)], key)
        elif value is not None:
            draft.lose(key, f"{value} is not supported; the default of model.{name} is used instead")
    if draft.content.get("loss_type") == "bnpo":
        draft.note("loss_type bnpo divides by the tokens of a micro-batch; dapo, which is used instead, divides by the "
                   "tokens of the step.")
    micro, steps = draft.get("steps_per_generation"), draft.get("gradient_accumulation_steps", 1)
    if micro and micro % steps == 0:
        draft.put("model.steps_per_rollout", micro // steps, "steps_per_generation")
    elif micro:
        draft.lose("steps_per_generation", "a rollout covers whole optimiser steps; see model.steps_per_rollout")
    for key, off in DISTRIBUTION.items():
        if draft.get(key) is not None and draft.content[key] not in off:
            draft.lose(key, "answers are sampled from the full distribution, whose probabilities the loss uses")
    if draft.get("use_vllm"):
        draft.lose("use_vllm", "the model in training generates the answers, unless model.rollouts names a vLLM server")
    if draft.get("sync_ref_model"):
        draft.lose("sync_ref_model", "the reference model never changes during training")
    draft.get("disable_dropout")
    draft.note("Dropout is off, except model.lora.dropout and rates set in model.config_overrides.")


def _read_rewards(draft: Draft) -> list[dict[str, Any]]:
    model, functions = draft.get("reward_model_name_or_path"), draft.get("reward_funcs") or []
    rewards = [{"model": model}] if model else []
    for name in [functions] if isinstance(functions, str) else functions:
        if name not in TRL_REWARDS and "." not in name and "/" not in name:
            draft.note(f"reward_funcs: add the module of {name}, for example my_rewards.{name}.")
            name = f"WRITE.HERE.{name}"
        rewards.append(dict(TRL_REWARDS[name]) if name in TRL_REWARDS else
                       {"model": name} if "/" in name else {"function": name})
    if any("function" in reward for reward in rewards):
        draft.note("Your own functions run only with --trust_recipe_code true.")
    if not rewards:
        draft.note("No rewards are named. Set model.rewards (docs/rewards.md).")
        return [{"name": "exact_match"}]
    weights = draft.get("reward_weights")
    if weights is not None and len(weights) != len(rewards):
        draft.lose("reward_weights", f"{len(weights)} weights for {len(rewards)} rewards; set weight in each reward")
    elif weights is not None:
        rewards = [{**reward, "weight": float(weight)} for reward, weight in zip(rewards, weights, strict=True)]
    return rewards


# ---------------------------------------------------------------------------------------------------------------------
# Objectives of other programs without a task here.

# Foreign name -> description.
WITHOUT_TASK = {
    "process_reward_model": "a reward for each step of an answer", "num_labels": "labels of texts",
    **dict.fromkeys(("ppo", "gdpo", "rloo"), "rewards"),
    "diffusion": "diffusion", "ebft": "features of its own answers"}


def reject_objective(draft: Draft, name: str | None) -> None:
    """Raise UserError for an objective without a task here; None stands for a supported one."""
    if name is None:
        return
    raise UserError(f"This {PROGRAMS[draft.program]} config trains on {WITHOUT_TASK.get(name, name)} ({name}), which "
                    f"is not supported. Use a config for one of the tasks {', '.join(declared('model'))}.")
