"""Convert LLaMA-Factory's YAML. Source: its dataclasses (llamafactory/hparams) of August 2026."""

import json
from pathlib import Path
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.image_models import LANGUAGE
from lmmods.extras.migration import training
from lmmods.extras.migration.draft import Draft
from lmmods.extras.migration.training import Names, reject_objective, take_training
from lmmods.recipe.foreign_keys import TEMPLATES

NAMES = Names()
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}  # other columns keep their names
TAGS = {"role_tag": "role", "content_tag": "content"}
ROLES = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool"}
MIXING = {"interleave_under": "exhaust", "interleave_over": "upsample"}
PIXELS = {"max_pixels": 768 * 768, "min_pixels": 32 * 32}
PROJECTOR = "multi_modal_projector|connector|merger|embed_vision"  # by families
HAS_IMAGES = "columns.images of dataset_info.json"
RECOGNISED = {"from", "value", "role", "content", "human", "gpt", "user", "assistant", "system", "observation", "tool"}


def llamafactory(content: dict[str, Any], folder: Path) -> Draft:
    """Convert a LLaMA-Factory config to a draft.

    Args:
        folder: Folder of the file; `dataset_dir` is also searched in it and its parents.

    Raises:
        UserError: No task here has its objective, or the file has LLaMA-Factory's second layout.
    """
    if "model_class" in content or "dist_config" in content or "peft_config" in content:
        raise UserError("This is LLaMA-Factory's second layout (model, train_dataset, peft_config), which migrate does "
                        "not support. Rewrite it with model_name_or_path, stage, finetuning_type and dataset, or start "
                        "from a recipe in configs/.")
    draft = Draft("llamafactory", content)
    stage = draft.get("stage", "sft")
    reject_objective(draft, None if stage in ("sft", "pt", "dpo", "kto", "rm") else stage)
    is_text = stage == "pt"
    if stage in ("dpo", "kto"):
        _take_preferences(draft, stage)
        training.take_data(draft)
    elif stage == "rm":
        training.take_reward(draft, "stage")
        draft.note("The score comes from transformers' head for one label, without bias and dropout. LLaMA-Factory "
                   "uses TRL's value head, whose files (value_head.safetensors) are not loaded.")
        training.take_data(draft)
    else:
        draft.put("model", "CLM" if is_text else "SFT", "stage")
        draft.put("data", "CLMData" if is_text else "SFTData", "")
    _take_model(draft)
    _take_sources(draft, folder, is_text)
    _take_rows(draft, is_text)
    _take_images(draft)
    take_training(draft, NAMES)
    if draft.get("template") and is_text:
        draft.note("template applies only to conversations; texts do not use it.")
    draft.finish()
    return draft


def _take_preferences(draft: Draft, stage: str) -> None:
    loss = training.take_loss(draft, "kto" if stage == "kto" else draft.get("pref_loss", "sigmoid"),
                              "stage" if stage == "kto" else "pref_loss")
    training.take_number(draft, "beta", "pref_beta", 0.1)
    if stage == "kto":
        training.take_number(draft, "desirable_weight", "kto_chosen_weight", 1.0)
        training.take_number(draft, "undesirable_weight", "kto_rejected_weight", 1.0)
    elif loss == "simpo":
        training.take_number(draft, "gamma", "simpo_gamma", 0.5)
    training.take_smoothing(draft, loss, "dpo_label_smoothing", ("sigmoid",))
    if weight := draft.get("pref_ftx"):
        if loss == "kto":
            draft.lose("pref_ftx", "rows are single answers, not pairs")
        else:
            draft.put("model.sft_weight", float(weight) + (1.0 if loss == "orpo" else 0.0), "pref_ftx")
    for key in ("ref_model", "ref_model_adapters"):
        if draft.get(key):
            draft.lose(key, "the reference is always the model that the run starts from")
    if draft.get("pref_bco_weight"):
        draft.lose("pref_bco_weight", "only one loss is supported, in addition to model.sft_weight")
    training.note_differences(draft)


def _take_model(draft: Draft) -> None:
    key = "model.config" if draft.get("train_from_scratch") else "model.pretrained"
    draft.put(key, draft.get("model_name_or_path"), "model_name_or_path")
    tuning, adapter = draft.get("finetuning_type", "lora"), draft.get("adapter_name_or_path")
    rank = draft.get("lora_rank", 8)
    alpha, dropout, target = draft.get("lora_alpha", 2 * rank), draft.get("lora_dropout", 0.0), draft.get("lora_target")
    if tuning not in ("lora", "full"):
        draft.lose("finetuning_type", f"{tuning} is not supported; model.lora, which also trains few weights, is used "
                                      "instead")
    if adapter and tuning == "lora":
        draft.put("model.adapter", adapter.split(",")[-1].strip() if isinstance(adapter, str) else adapter[-1],
                  "adapter_name_or_path")
        if isinstance(adapter, list) or "," in str(adapter):
            draft.note("With several adapters, LLaMA-Factory trains the last one on a base with the others merged. "
                       "Merge them first, with the command merge.")
    elif tuning != "full":
        draft.put("model.lora.rank", rank, "lora_rank")
        draft.put("model.lora.alpha", alpha,
                  "lora_alpha" if "lora_alpha" in draft.content else "default: twice the rank")
        draft.put("model.lora.dropout", float(dropout), "lora_dropout")
        if target is None or not draft.put_value("lora_target"):
            draft.put("model.lora.targets", "all-linear", "")
        if modules := draft.get("additional_target"):
            draft.put("model.lora.modules_to_save", [name.strip() for name in modules.split(",")], "additional_target")
    bits, method = draft.get("quantization_bit"), draft.get("quantization_method", "bnb")
    if bits and method not in ("bnb", "bitsandbytes"):
        draft.lose("quantization_method", f"{method} is not supported; bitsandbytes is used instead, at the start "
                                          "of the run")
    if bits and tuning != "full":
        draft.put("model.quantize", "int8" if bits == 8 else draft.get("quantization_type", "nf4"), "quantization_bit")
        if bits != 8:
            draft.put("model.double_quant", draft.get("double_quantization", True), "double_quantization")
        if bits not in (4, 8):
            draft.note(f"quantization_bit {bits}: 4 bits are used instead.")
    recompute = not draft.get("disable_gradient_checkpointing", False)
    draft.put("model.gradient_checkpointing", recompute, "disable_gradient_checkpointing")
    pure, bf16, fp16 = (draft.get(key) for key in ("pure_bf16", "bf16", "fp16"))
    draft.put("trainer.precision", "bf16-true" if pure else "bf16-mixed" if bf16 else "16-mixed" if fp16 else "32-true",
              "pure_bf16" if pure else "bf16" if bf16 else "fp16")
    attention = draft.get("flash_attn", "auto")
    if attention in ("sdpa", "disabled"):
        draft.put_value("flash_attn")
    elif attention != "auto":
        training.note_attention(draft, f"flash_attn {attention}")


def _take_sources(draft: Draft, folder: Path, is_text: bool) -> None:
    names, size = _split_names(draft.get("dataset")), draft.get("max_samples")
    info = _read_dataset_info(draft, folder)
    sources = [_make_source(draft, name, info, size, is_text) for name in names]
    strategy = draft.get("mix_strategy", "concat")
    if strategy not in ("concat", *MIXING):
        draft.lose("mix_strategy", f"{strategy} is not supported; each row is used once, shuffled with all others")
    elif rule := MIXING.get(strategy):
        weights = [float(weight) for weight in _split_names(draft.get("interleave_probs"))] or [1.0] * len(sources)
        draft.put("data.mixing", {"rule": rule}, "mix_strategy")
        draft.note("mix_strategy: rows are spread evenly by the weights, not sampled.")
        sources = [{**(source if isinstance(source, dict) else {"path": source}), "weight": weight}
                   for source, weight in zip(sources, weights, strict=False)]
    if not sources:
        draft.put("data.source", "WRITE A PATH OR HUB ID HERE", "")
        draft.note("No dataset is named. Set data.source.")
    else:
        draft.put("data.source", sources[0] if len(sources) == 1 else sources, "dataset")
    if val_names := _split_names(draft.get("eval_dataset")):
        val_sources = [_make_source(draft, name, info, size, is_text) for name in val_names]
        draft.put("data.val_source", val_sources, "eval_dataset")
    elif val_size := draft.get("val_size", 0):
        draft.put("data.val_size", val_size if val_size < 1 else int(val_size), "val_size")
        draft.note("val_size: data.seed selects the held-out rows, so they differ from LLaMA-Factory's.")
    if names and not info:
        draft.note(f"dataset_info.json, which describes {', '.join(names)}, was not found. Set data.source to the "
                   "file or hub id that it names, or run migrate next to it.")


def _read_dataset_info(draft: Draft, folder: Path) -> dict[str, Any]:
    dataset_dir = str(draft.get("dataset_dir", "data"))
    for candidate in (Path(dataset_dir), *(parent / dataset_dir for parent in (folder, *folder.resolve().parents[:4]))):
        try:
            content = json.loads((candidate / "dataset_info.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return {name: {**entry, "_folder": candidate} for name, entry in content.items() if isinstance(entry, dict)}
    return {}


def _make_source(draft: Draft, name: str, info: dict[str, Any], size: int | None, is_text: bool) -> Any:
    """Return a source as described by `dataset_info.json`."""
    entry = info.get(name, {})
    if info and not entry:
        draft.note(f"dataset {name} is not in dataset_info.json. Set data.source to its file or hub id.")
    has_pairs = draft.settings["model"][0] in ("Preference", "Reward")
    if entry.get("ranking") and not has_pairs:
        draft.note(f"{name} contains preferences: the chosen answer is used, and the data report lists the rejected "
                   "one as not used.")
    file = entry.get("file_name")
    path = str(entry["_folder"] / file) if file else entry.get("hf_hub_url") or entry.get("ms_hub_url") or name
    declared = entry.get("columns", {})
    columns = {column: COLUMNS.get(part, part) for part, column in declared.items()
               if part in (*COLUMNS, "messages", "history", "system", "tools", "images",
                           *(("chosen", "rejected", "kto_tag") if has_pairs else ())) and column
               and column not in (COLUMNS.get(part, part), "conversations")}
    if is_text and declared.get("prompt"):
        columns = {declared["prompt"]: "text"} if declared["prompt"] != "text" else {}
    for part in {"videos", "audios"} & declared.keys():
        draft.lose(f"dataset {name}: {part}", "videos and sound are not supported")
    if declared.get("images"):
        draft.content.setdefault(HAS_IMAGES, name)
    _take_tags(draft, entry.get("tags", {}))
    options = {key: entry[column] for key, column in (("name", "subset"), ("split", "split"))
               if entry.get(column) and not file}
    limit = size or entry.get("num_samples")
    options |= {**({"columns": columns} if columns else {}), **({"limit": int(limit)} if limit else {})}
    return {"path": path, **options} if options else path


def _take_tags(draft: Draft, tags: dict[str, str]) -> None:
    fields = {name: tags[tag] for tag, name in TAGS.items() if tags.get(tag) and tags[tag] not in RECOGNISED}
    roles = {tags[tag]: name for tag, name in ROLES.items() if tags.get(tag) and tags[tag] not in RECOGNISED}
    if fields:
        draft.put("data.turn_fields", fields, "tags of dataset_info.json")
    if roles:
        draft.put("data.roles", roles, "tags of dataset_info.json")


def _take_rows(draft: Draft, is_text: bool) -> None:
    draft.put("data.max_length", draft.get("cutoff_len", 2048), "cutoff_len")
    packs, neat = draft.get("packing"), draft.get("neat_packing")
    if is_text:
        draft.put("data.join", packs is not False, "packing" if "packing" in draft.content else "stage")
    elif (packs or neat) and draft.settings["data"][0] == "SFTData":
        draft.put("data.packing", True, "neat_packing" if neat else "packing")
        if not neat:
            draft.note("In LLaMA-Factory, rows packed without neat_packing attend to each other; here they never do.")
    if draft.get("streaming"):
        draft.put("data.streaming", True, "streaming")
    if is_text:
        return
    draft.note("Rows over data.max_length: LLaMA-Factory truncates prompt and response in proportion; here "
               "data.on_overflow applies, and the data report counts these rows.")
    template = draft.get("template")
    if template in TEMPLATES:
        draft.put("data.template", template, "template")
    elif template:
        draft.note(f"template {template}: the tokenizer's chat template is used (data.template: null). Check rows with "
                   "inspect.")
    if str(template).endswith(("_nothink", "_no_think")) and draft.get("enable_thinking") is None:
        draft.put("data.chat_template_kwargs", {"enable_thinking": False}, "template")
    elif draft.get("enable_thinking") is not None:
        draft.put("data.chat_template_kwargs", {"enable_thinking": draft.content["enable_thinking"]}, "enable_thinking")
    if draft.settings["data"][0] == "SFTData":
        if draft.get("train_on_prompt"):
            draft.put("data.train_on", "all", "train_on_prompt")
        elif draft.get("mask_history"):
            draft.put("data.train_on", "last", "mask_history")
    if draft.get("disable_shuffling"):
        draft.put("data.shuffle", False, "disable_shuffling")
    for key in ("add_tokens", "add_special_tokens"):
        if tokens := _split_names(draft.get(key)):
            draft.put("data.add_tokens", tokens, key)
    for key in ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k"):
        if draft.get(key) is not None and draft.settings["model"][0] != "Reward":
            draft.put(f"model.generation.{key}", draft.content[key], key)


def _take_images(draft: Draft) -> None:
    """Train on images if a dataset has them, or if a key is about them."""
    freezes = {part: draft.get(f"freeze_{part}", part != "language_model")
               for part in ("vision_tower", "multi_modal_projector", "language_model")}
    limits = {name: draft.get(f"image_{name}", default) for name, default in PIXELS.items()}
    keys = (HAS_IMAGES, *(f"image_{name}" for name in PIXELS), *(f"freeze_{part}" for part in freezes))
    key = next((key for key in keys if draft.content.get(key) is not None), None)
    if key is None:
        return
    draft.get(HAS_IMAGES)
    trained = tuple(part for part, is_frozen in freezes.items() if not is_frozen)
    choices = {("language_model",): None, ("multi_modal_projector", "language_model"): [LANGUAGE, PROJECTOR],
               tuple(freezes): [""]}
    if trained not in choices:
        draft.lose("freeze_vision_tower", "name the parts that train in model.trainable_parameters")
    training.take_images(draft, key, choices.get(trained))
    name = str(draft.get("model_name_or_path")).lower()
    if "qwen" in name and draft.has("model.images"):
        draft.put("data.image_options", limits, "image_max_pixels", "image_min_pixels")
    else:
        draft.note(f"LLaMA-Factory resizes images to {limits['min_pixels']:,} to {limits['max_pixels']:,} pixels. Here "
                   "fields of the model's image processor are overridden by data.image_options.")


def _split_names(value: Any) -> list[str]:
    """Split a list or comma-separated names."""
    items = value.split(",") if isinstance(value, str) else value or []
    return [str(item).strip() for item in items if str(item).strip()]
