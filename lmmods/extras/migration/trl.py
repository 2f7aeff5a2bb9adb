"""Convert TRL's YAML, as for `trl sft --config`. Source: its SFTConfig, ModelConfig and ScriptArguments."""

import re
from typing import Any

from lmmods.core.preference_losses import METHODS, UNSUPPORTED
from lmmods.extras.migration import training
from lmmods.extras.migration.draft import Draft
from lmmods.extras.migration.training import PROMPT_LENGTH, Names, reject_objective, take_quantization, take_training

VISION = re.compile(r"vlm|-vl\b|llava|internvl|idefics|gemma-[34]|qwen3\.5", re.IGNORECASE)  # of models' names
# By task.
NAMES = {"SFT": Names(default_lr=2e-5), "Preference": Names(default_lr=1e-6), "Reward": Names(default_lr=1e-4),
         "GRPO": Names(default_lr=1e-6)}
# Keys unique to RLOO, which also has the keys of GRPO and has no task here.
RLOO = ("normalize_advantages", "reward_clip_range", "rloo_k")
GRPO = ("num_generations", "reward_funcs", "reward_model_name_or_path", "steps_per_generation", "scale_rewards",
        "mask_truncated_completions", "importance_sampling_level")
GKD = ("lmbda", "seq_kd", "teacher_model_name_or_path")  # keys unique to GKD, of TRL's experimental trainers
# Keys unique to preference trainers -> the trainer, most specific first.
PREFERENCES = {"desirable_weight": "kto", "undesirable_weight": "kto", "cpo_alpha": "cpo", "simpo_gamma": "cpo",
               "beta": "dpo", "precompute_ref_log_probs": "dpo", "sync_ref_model": "dpo", "loss_weights": "dpo",
               "f_divergence_type": "dpo", "label_smoothing": "dpo"}


def trl(content: dict[str, Any]) -> Draft:
    """Convert a TRL config to a draft. Raises UserError: no task here has its objective."""
    draft = Draft("trl", content)
    reject_objective(draft, "rloo" if any(key in content for key in RLOO) else None)
    if draft.get("env"):
        draft.note("env: set these environment variables in the shell.")
    if any(key in content for key in GRPO):
        training.take_grpo(draft, "")
    elif any(key in content for key in GKD):
        _take_gkd(draft)
    elif trainer := _find_preference_trainer(content):
        _take_preferences(draft, trainer)
        training.take_data(draft)
        if length := draft.get("max_completion_length"):
            draft.put("data.target_max_length", length, "max_completion_length")
    elif _is_reward(content):
        training.take_reward(draft, "center_rewards_coefficient")
        draft.get("disable_dropout")
        training.take_data(draft)
    else:
        draft.put("model", "SFT", "")
        draft.put("data", "SFTData", "")
    task = draft.settings["model"][0]
    _take_model(draft)
    _take_sources(draft)
    _take_rows(draft, task)
    if task == "SFT":
        _take_targets(draft)
    if task in ("SFT", "Preference") and VISION.search(str(draft.get("model_name_or_path"))):
        draft.note("TRL trains on the images that rows have, with all parts of the model. For such rows set "
                   "model.images: true, data.on_overflow: truncate_turns and, without an "
                   "adapter, model.trainable_parameters: [''].")
    draft.content.setdefault("logging_steps", 10)
    take_training(draft, NAMES[task])
    draft.finish()
    return draft


def _list_losses(content: dict[str, Any]) -> list[str]:
    """Return the names in `loss_type`, which is one name or a list."""
    loss_type = content.get("loss_type") or []
    return [loss_type] if isinstance(loss_type, str) else list(loss_type)


def _find_preference_trainer(content: dict[str, Any]) -> str | None:
    """Return the preference trainer that a file is for: dpo, cpo, kto or None."""
    losses = _list_losses(content)
    if any(name in METHODS and not METHODS[name].is_paired for name in losses):
        return "kto"
    trainer = next((PREFERENCES[key] for key in PREFERENCES if content.get(key) is not None), None)
    if trainer == "dpo" and losses == ["simpo"]:
        return "cpo"
    return trainer or ("dpo" if any(name in METHODS or name in UNSUPPORTED for name in losses) else None)


def _is_reward(content: dict[str, Any]) -> bool:
    """True if a file is for `trl reward`."""
    return "center_rewards_coefficient" in content or content.get("lora_task_type") == "SEQ_CLS"


def _take_gkd(draft: Draft) -> None:
    draft.put("model", "SFT", "lmbda")
    draft.put("data", "SFTData", "")
    if (teacher := draft.get("teacher_model_name_or_path")) is None:
        teacher = "WRITE THE TEACHER'S PATH OR HUB ID HERE"
        draft.note("No teacher is named. Set model.teacher.pretrained.")
    draft.put("model.teacher.pretrained", teacher, "teacher_model_name_or_path")
    draft.put("model.teacher.ratio", 1.0, "")  # no cross-entropy
    draft.put("model.teacher.beta", float(draft.get("beta", 0.5)), "beta")
    on_policy = float(draft.get("lmbda", 0.5))
    draft.put("model.teacher.on_policy", on_policy, "lmbda")
    max_new_tokens, temperature = draft.get("max_new_tokens", 128), float(draft.get("temperature", 0.9))
    if on_policy:
        draft.put("model.teacher.max_new_tokens", max_new_tokens, "max_new_tokens")
        draft.put("model.teacher.sampling_temperature", temperature, "temperature")
    if 0 < on_policy < 1:
        draft.note("lmbda is a fraction of batches in TRL; model.teacher.on_policy is a fraction of rows.")
    if draft.get("seq_kd"):
        draft.lose("seq_kd", "generate the teacher's answers with predict and train on them")
    draft.get("disable_dropout")


def _take_preferences(draft: Draft, trainer: str) -> None:
    names = _list_losses({"loss_type": draft.get("loss_type")})
    weights = draft.get("loss_weights") or [1.0] * len(names)
    pairs = {name: weight for name, weight in zip(names, weights, strict=False) if name != "sft"}
    first = next(iter(pairs), "kto" if trainer == "kto" else "sigmoid")
    is_cpo = trainer == "cpo"
    loss = training.take_loss(draft, "cpo" if is_cpo and first == "sigmoid" else first, "loss_type")
    if len(pairs) > 1:
        draft.lose("loss_weights", f"only one loss is supported, in addition to model.sft_weight; {first} is used")
    training.take_number(draft, "beta", "beta", 0.1)
    training.take_smoothing(draft, loss, "label_smoothing", ("cpo", "simpo") if is_cpo else ("robust", "exo_pair"))
    if is_cpo:
        training.take_number(draft, "sft_weight", "cpo_alpha", 1.0)
    elif "sft" in names:
        draft.put("model.sft_weight", weights[names.index("sft")] / pairs.get(first, 1.0), "loss_weights")
    if loss == "simpo":
        training.take_number(draft, "gamma", "simpo_gamma", 0.5)
    if trainer == "kto":
        for name in ("desirable_weight", "undesirable_weight"):
            training.take_number(draft, name, name, 1.0)
    if trainer == "dpo" and not names:
        draft.note("The keys do not distinguish `trl dpo` from `trl orpo`. For ORPO, set model.loss to orpo.")
    if draft.get("sync_ref_model"):
        draft.lose("sync_ref_model", "the reference model never changes during training")
    if draft.get("f_divergence_type", "reverse_kl") != "reverse_kl":
        draft.lose("f_divergence_type", "only reverse_kl is supported")
    draft.get("disable_dropout")
    training.take_reference(draft, loss)
    training.note_differences(draft)


def _take_model(draft: Draft) -> None:
    draft.put("model.pretrained", draft.get("model_name_or_path"), "model_name_or_path")
    peft, targets = draft.get("use_peft", False), draft.get("lora_target_modules")
    options = {key: draft.get(key, default) for key, default in
               (("lora_r", 16), ("lora_alpha", 32), ("lora_dropout", 0.05))}
    named = {name: draft.get(f"lora_{name}") for name in ("modules_to_save", "target_parameters")}
    if peft:
        for key, name in (("lora_r", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
            draft.put(f"model.lora.{name}", options[key], key)
        if isinstance(targets, list) and len(targets) == 1:
            draft.content["lora_target_modules"] = targets[0]
        if targets is None or not draft.put_value("lora_target_modules"):
            draft.put("model.lora.targets", ["q_proj", "v_proj"], "")
            draft.note("lora_target_modules is not set, so PEFT adapts q_proj and v_proj in Llama, Qwen, Mistral and "
                       "Gemma; other architectures have other names. all-linear learns more.")
        for name, names in named.items():
            if names:
                draft.put(f"model.lora.{name}", names, f"lora_{name}")
    take_quantization(draft, False)
    dtype = str(draft.get("dtype", draft.get("torch_dtype", "float32")))
    bf16, fp16 = draft.get("bf16"), draft.get("fp16", False)
    bf16 = not fp16 if bf16 is None else bf16
    pure = dtype in ("bfloat16", "bf16") and not peft
    draft.put("trainer.precision", "bf16-true" if pure else "bf16-mixed" if bf16 else "16-mixed" if fp16 else "32-true",
              "dtype" if pure else "bf16" if bf16 else "fp16")
    offloads, recomputes = draft.get("activation_offloading", False), draft.get("gradient_checkpointing", True)
    draft.put("model.gradient_checkpointing", "offload" if offloads else bool(recomputes),
              "activation_offloading" if offloads else "gradient_checkpointing")
    attention = draft.get("attn_implementation")
    if attention in ("eager", "sdpa"):
        draft.put("model.attention", attention, "attn_implementation")
    elif attention:
        training.note_attention(draft, f"attn_implementation {attention}")


def _take_sources(draft: Draft) -> None:
    name, mixture = draft.get("dataset_name"), draft.get("datasets") or []
    train, test = draft.get("dataset_train_split", "train"), draft.get("dataset_test_split", "test")
    config, text = draft.get("dataset_config"), draft.get("dataset_text_field", "text")
    columns = {"columns": {text: "text"}} if text != "text" else {}
    sources = [source for row in mixture for source in _make_mixture_sources(draft, row)]
    if name and not mixture:
        options = {**({"name": config} if config else {}), **({"split": train} if train != "train" else {}), **columns}
        sources = [{"path": name, **options}] if options else [name]
    if not sources:
        sources = ["WRITE A PATH OR HUB ID HERE"]
        draft.note("No dataset is named. Set data.source.")
    draft.put("data.source", sources[0] if len(sources) == 1 else sources, "dataset_name", "datasets",
              "dataset_config", "dataset_train_split")
    if fraction := draft.get("test_split_size"):
        draft.put("data.val_size", fraction, "test_split_size")
    elif name and draft.get("eval_strategy", "no") != "no":
        draft.put("data.val_source", {"path": name, **({"name": config} if config else {}), "split": test, **columns},
                  "dataset_test_split", "eval_strategy")
    if draft.get("dataset_streaming"):
        draft.put("data.streaming", True, "dataset_streaming")


def _make_mixture_sources(draft: Draft, row: dict[str, Any]) -> list[Any]:
    files = row.get("data_files") or []
    files = [files] if isinstance(files, str) else list(files)
    is_local = row.get("path") in ("json", "csv", "parquet", "text", "arrow")
    paths = [file if is_local or "://" in file else f"hf://datasets/{row['path']}/{file}" for file in files]
    for key in ("columns", "data_dir"):
        if row.get(key):
            draft.lose(f"datasets[].{key}", "the columns that the layout needs are read")
    options = {key: row[key] for key in ("name", "split") if row.get(key) and not files}
    if fraction := row.get("fraction"):
        options["weight"] = fraction
    return [{"path": path, **options} if options else path for path in paths or [row.get("path")]]


def _take_rows(draft: Draft, task: str) -> None:
    if task == "GRPO":
        answer = draft.get("max_completion_length", 512)
        draft.put("data.max_length", draft.get("max_prompt_length", PROMPT_LENGTH) + answer, "max_prompt_length",
                  "max_completion_length")
        if draft.get("max_prompt_length") is None:
            draft.note(f"TRL does not limit prompts; data.max_length leaves {PROMPT_LENGTH} tokens for a prompt.")
        return
    length = draft.get("max_length", draft.get("max_seq_length", 1024))
    draft.put("data.max_length", length, "max_length", "max_seq_length")
    draft.get("truncation_mode")
    # `trl reward` drops pairs with an answer that is too long.
    draft.put("data.on_overflow", "skip" if task == "Reward" else "truncate", "truncation_mode")
    is_packed, is_padding_free = draft.get("packing"), draft.get("padding_free")
    strategy = draft.get("packing_strategy", "bfd")
    if task != "SFT":  # TRL packs only in SFT
        is_packed = is_padding_free = False
    if is_packed or is_padding_free:
        draft.put("data.packing", True, "packing" if is_packed else "padding_free")
    if is_packed and strategy == "wrapped":
        draft.note("packing_strategy wrapped splits rows anywhere; here whole rows are packed. Use the task CLM to "
                   "join texts.")
    for key in ("eos_token", "pad_token"):
        if draft.get(key):
            draft.put(f"data.{key}", draft.content[key], key)


def _take_targets(draft: Draft) -> None:
    completion, assistant = draft.get("completion_only_loss"), draft.get("assistant_only_loss")
    if completion is False or completion is None and not assistant:
        draft.put("data.train_on", "all" if completion is False else "responses", "completion_only_loss")
        if completion is None:
            draft.note("Without assistant_only_loss and completion_only_loss, TRL trains on the responses of "
                       "prompt-completion rows, but on all turns of conversations. data.train_on is either "
                       "responses or all.")
    else:
        draft.put("data.train_on", "responses", "assistant_only_loss" if assistant else "completion_only_loss")
    loss_type = draft.get("loss_type", "nll")
    if loss_type == "dft":
        draft.put("model.dft", True, "loss_type")
    elif loss_type not in ("nll", "chunked_nll"):
        draft.lose("loss_type", "only nll (plain cross-entropy) and dft are supported")
