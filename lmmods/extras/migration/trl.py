"""Migrate TRL's YAML, as for `trl sft --config`. Source: its SFTConfig, ModelConfig and ScriptArguments."""

from typing import Any

from lmmods.core.preference_losses import METHODS, REFUSED
from lmmods.extras.migration import training
from lmmods.extras.migration.draft import Draft
from lmmods.extras.migration.training import PROMPT, Names, refuse_objective, take_quantization, take_training

# By task.
NAMES = {"SFT": Names(default_lr=2e-5), "Preference": Names(default_lr=1e-6), "Reward": Names(default_lr=1e-4),
         "GRPO": Names(default_lr=1e-6)}
# Keys unique to RLOO, which has those of GRPO too, and for which there is no task here.
RLOO = ("normalize_advantages", "reward_clip_range", "rloo_k")
GRPO = ("num_generations", "reward_funcs", "reward_model_name_or_path", "steps_per_generation", "scale_rewards",
        "mask_truncated_completions", "importance_sampling_level")
GKD = ("lmbda", "seq_kd", "teacher_model_name_or_path")  # keys unique to GKD, of TRL's experimental trainers
# Keys unique to preference trainers -> the trainer, most specific first.
PREFERENCES = {"desirable_weight": "kto", "undesirable_weight": "kto", "cpo_alpha": "cpo", "simpo_gamma": "cpo",
               "beta": "dpo", "precompute_ref_log_probs": "dpo", "sync_ref_model": "dpo", "loss_weights": "dpo",
               "f_divergence_type": "dpo", "label_smoothing": "dpo"}


def trl(content: dict[str, Any]) -> Draft:
    """Return the recipe of a TRL configuration. Raises UserError: the objective has no task here."""
    draft = Draft("trl", content)
    refuse_objective(draft, "rloo" if any(key in content for key in RLOO) else None)
    if draft.get("env"):
        draft.note("env: set these variables in the shell.")
    if any(key in content for key in GRPO):
        training.take_grpo(draft, "")
    elif any(key in content for key in GKD):
        _take_gkd(draft)
    elif trainer := _preference_trainer(content):
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
        _take_scored(draft)
    draft.content.setdefault("logging_steps", 10)
    take_training(draft, NAMES[task])
    draft.finish()
    return draft


def _losses(content: dict[str, Any]) -> list[str]:
    """Return the names in `loss_type`, which is one name or a list."""
    named = content.get("loss_type") or []
    return [named] if isinstance(named, str) else list(named)


def _preference_trainer(content: dict[str, Any]) -> str | None:
    """Return the preference trainer that a file is for: dpo, cpo or kto; None if it is for none."""
    losses = _losses(content)
    if any(name in METHODS and not METHODS[name].is_paired for name in losses):
        return "kto"
    found = next((PREFERENCES[key] for key in PREFERENCES if content.get(key) is not None), None)
    if found == "dpo" and losses == ["simpo"]:
        return "cpo"
    return found or ("dpo" if any(name in METHODS or name in REFUSED for name in losses) else None)


def _is_reward(content: dict[str, Any]) -> bool:
    """True if a file is for `trl reward`, of whose keys one is its own."""
    return "center_rewards_coefficient" in content or content.get("lora_task_type") == "SEQ_CLS"


def _take_gkd(draft: Draft) -> None:
    draft.put("model", "SFT", "lmbda")
    draft.put("data", "SFTData", "")
    if (teacher := draft.get("teacher_model_name_or_path")) is None:
        teacher = "WRITE HERE WHO TEACHES"
        draft.note("No teacher is named: write model.teacher.pretrained.")
    draft.put("model.teacher.pretrained", teacher, "teacher_model_name_or_path")
    draft.put("model.teacher.ratio", 1.0, "")  # no cross-entropy
    draft.put("model.teacher.beta", float(draft.get("beta", 0.5)), "beta")
    share = float(draft.get("lmbda", 0.5))
    draft.put("model.teacher.on_policy", share, "lmbda")
    most, temperature = draft.get("max_new_tokens", 128), float(draft.get("temperature", 0.9))
    if share:
        draft.put("model.teacher.max_new_tokens", most, "max_new_tokens")
        draft.put("model.teacher.sampling_temperature", temperature, "temperature")
    if 0 < share < 1:
        draft.note("lmbda is the share of batches that the student answers there, and of rows here.")
    if draft.get("seq_kd"):
        draft.lose("seq_kd", "rows may hold answers of the teacher, which predict writes")
    draft.get("disable_dropout")


def _take_preferences(draft: Draft, trainer: str) -> None:
    names = _losses({"loss_type": draft.get("loss_type")})
    weights = draft.get("loss_weights") or [1.0] * len(names)
    pairs = {name: weight for name, weight in zip(names, weights, strict=False) if name != "sft"}
    first = next(iter(pairs), "kto" if trainer == "kto" else "sigmoid")
    is_cpo = trainer == "cpo"
    loss = training.take_loss(draft, "cpo" if is_cpo and first == "sigmoid" else first, "loss_type")
    if len(pairs) > 1:
        draft.lose("loss_weights", f"one loss, to which model.sft_weight may be added; {first} is taken")
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
        draft.note("The keys do not tell `trl dpo` from `trl orpo`: for ORPO set model.loss to orpo.")
    if draft.get("sync_ref_model"):
        draft.lose("sync_ref_model", "the reference stays as it was before the first step")
    if draft.get("f_divergence_type", "reverse_kl") != "reverse_kl":
        draft.lose("f_divergence_type", "reverse_kl")
    draft.get("disable_dropout")
    training.take_reference(draft, loss)
    training.note_differences(draft)


def _take_model(draft: Draft) -> None:
    draft.put("model.pretrained", draft.get("model_name_or_path"), "model_name_or_path")
    peft, targets = draft.get("use_peft", False), draft.get("lora_target_modules")
    options = {key: draft.get(key, default) for key, default in
               (("lora_r", 16), ("lora_alpha", 32), ("lora_dropout", 0.05))}
    named = {ours: draft.get(f"lora_{ours}") for ours in ("modules_to_save", "target_parameters")}
    if peft:
        for key, ours in (("lora_r", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
            draft.put(f"model.lora.{ours}", options[key], key)
        if isinstance(targets, list) and len(targets) == 1:
            draft.content["lora_target_modules"] = targets[0]
        if targets is None or not draft.put_value("lora_target_modules"):
            draft.put("model.lora.targets", ["q_proj", "v_proj"], "")
            draft.note("lora_target_modules is left to PEFT, which adapts q_proj and v_proj in Llama, Qwen, Mistral "
                       "and Gemma; other architectures call them otherwise. all-linear learns more.")
        for ours, names in named.items():
            if names:
                draft.put(f"model.lora.{ours}", names, f"lora_{ours}")
    take_quantization(draft, False)
    dtype = str(draft.get("dtype", draft.get("torch_dtype", "float32")))
    bf16, fp16 = draft.get("bf16"), draft.get("fp16", False)
    bf16 = not fp16 if bf16 is None else bf16
    pure = dtype in ("bfloat16", "bf16") and not peft
    draft.put("trainer.precision", "bf16-true" if pure else "bf16-mixed" if bf16 else "16-mixed" if fp16 else "32-true",
              "dtype" if pure else "bf16" if bf16 else "fp16")
    draft.put("model.gradient_checkpointing", bool(draft.get("gradient_checkpointing", True)), "gradient_checkpointing")
    attention = draft.get("attn_implementation")
    if attention in ("eager", "sdpa"):
        draft.put("model.attention", attention, "attn_implementation")
    elif attention:
        draft.note(f"attn_implementation {attention}: left to model.attention: null, which takes the fastest there is; "
                   "flash_attention_2 insists on that package.")


def _take_sources(draft: Draft) -> None:
    name, mixture = draft.get("dataset_name"), draft.get("datasets") or []
    train, test = draft.get("dataset_train_split", "train"), draft.get("dataset_test_split", "test")
    config, text = draft.get("dataset_config"), draft.get("dataset_text_field", "text")
    columns = {"columns": {text: "text"}} if text != "text" else {}
    sources = [each for row in mixture for each in _of_mixture(draft, row)]
    if name and not mixture:
        options = {**({"name": config} if config else {}), **({"split": train} if train != "train" else {}), **columns}
        sources = [{"path": name, **options}] if options else [name]
    if not sources:
        sources = ["WRITE HERE WHERE THE ROWS ARE"]
        draft.note("No dataset is named: write data.source.")
    draft.put("data.source", sources[0] if len(sources) == 1 else sources, "dataset_name", "datasets",
              "dataset_config", "dataset_train_split")
    if share := draft.get("test_split_size"):
        draft.put("data.val_size", share, "test_split_size")
    elif name and draft.get("eval_strategy", "no") != "no":
        draft.put("data.val_source", {"path": name, **({"name": config} if config else {}), "split": test, **columns},
                  "dataset_test_split", "eval_strategy")
    if draft.get("dataset_streaming"):
        draft.put("data.streaming", True, "dataset_streaming")


def _of_mixture(draft: Draft, row: dict[str, Any]) -> list[Any]:
    files = row.get("data_files") or []
    files = [files] if isinstance(files, str) else list(files)
    local = row.get("path") in ("json", "csv", "parquet", "text", "arrow")
    paths = [file if local or "://" in file else f"hf://datasets/{row['path']}/{file}" for file in files]
    for key in ("columns", "data_dir"):
        if row.get(key):
            draft.lose(f"datasets[].{key}", "every column that a layout needs is read")
    options = {key: row[key] for key in ("name", "split") if row.get(key) and not files}
    if fraction := row.get("fraction"):
        options["weight"] = fraction
    return [{"path": path, **options} if options else path for path in paths or [row.get("path")]]


def _take_rows(draft: Draft, task: str) -> None:
    if task == "GRPO":
        answer = draft.get("max_completion_length", 512)
        draft.put("data.max_length", draft.get("max_prompt_length", PROMPT) + answer, "max_prompt_length",
                  "max_completion_length")
        if draft.get("max_prompt_length") is None:
            draft.note(f"TRL takes prompts of any length; data.max_length leaves {PROMPT} tokens for one.")
        return
    length = draft.get("max_length", draft.get("max_seq_length", 1024))
    draft.put("data.max_length", length, "max_length", "max_seq_length")
    draft.get("truncation_mode")
    # `trl reward` leaves out pairs of which one answer is too long.
    draft.put("data.on_overflow", "skip" if task == "Reward" else "truncate", "truncation_mode")
    packs, free, strategy = draft.get("packing"), draft.get("padding_free"), draft.get("packing_strategy", "bfd")
    if task != "SFT":  # no packing there
        packs = free = False
    if packs or free:
        draft.put("data.packing", True, "packing" if packs else "padding_free")
    if packs and strategy == "wrapped":
        draft.note("packing_strategy wrapped cuts rows anywhere; here whole rows are packed. Task CLM joins texts.")
    for key in ("eos_token", "pad_token"):
        if draft.get(key):
            draft.put(f"data.{key}", draft.content[key], key)


def _take_scored(draft: Draft) -> None:
    completion, assistant = draft.get("completion_only_loss"), draft.get("assistant_only_loss")
    if completion is False or completion is None and not assistant:
        draft.put("data.train_on", "all" if completion is False else "responses", "completion_only_loss")
        if completion is None:
            draft.note("Without assistant_only_loss and completion_only_loss TRL scores responses of prompt-completion "
                       "rows, but all turns of conversations; here data.train_on is one choice: responses, or all.")
    else:
        draft.put("data.train_on", "responses", "assistant_only_loss" if assistant else "completion_only_loss")
    kind = draft.get("loss_type", "nll")
    if kind == "dft":
        draft.put("model.dft", True, "loss_type")
    elif kind not in ("nll", "chunked_nll"):
        draft.lose("loss_type", "nll: plain cross-entropy")
