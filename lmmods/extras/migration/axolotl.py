"""Convert axolotl's YAML. Source: its schemas (axolotl/utils/schemas) of July 2026."""

from typing import Any

from lmmods.extras.migration import training
from lmmods.extras.migration.draft import OFF, Draft
from lmmods.extras.migration.training import Names, reject_objective, take_quantization, take_training
from lmmods.recipe.foreign_keys import NOT_NEEDED, TEMPLATES, rows_of

GRPO = "grpo"
NAMES = Names(epochs="num_epochs", batch_size="micro_batch_size", eval_batch_size="eval_batch_size",
              optimizer="optimizer", schedule="lr_scheduler", default_epochs=1, default_batch_size=1,
              default_schedule="cosine", default_warmup=0.03)
DATASET_KEYS = {  # dataset keys that are converted or can be inferred from the rows
    "path", "name", "split", "revision", "type", "data_files", "ds_type", "field", "text_column", "field_messages",
    "message_property_mappings", "message_field_role", "message_field_content", "roles", "roles_to_train",
    "train_on_eos", "train_on_eot", "message_field_training", "chat_template", "conversation", "template_thinking_key",
    "split_thinking", "field_thinking", "field_tools"}
FIELDS = {"field_system": "system", "field_instruction": "instruction", "field_input": "input",
          "field_output": "output"}
PARALLEL = ("dp_replicate_size", "tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree",
            "expert_parallel_size")  # 1 is off
TURN_ENDS = ("train_on_eos", "train_on_eot")  # dataset keys for which `none` is a valid choice, not a disabled feature
KERNELS = ("liger", "cut_cross_entropy")  # substrings in the names of plugins with faster kernels
RL_LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo", "kto": "kto"}
ANSWERS = {"field_chosen": "chosen", "field_rejected": "rejected", "field_label": "label", "field_prompt": "prompt",
           "field_completion": "completion"}  # keys of a dataset or of its type
OVERFLOW = {"drop": "skip", "truncate": "truncate", "raise": "error"}


def axolotl(content: dict[str, Any]) -> Draft:
    """Convert an axolotl config to a draft. Raises UserError: no task here has its objective."""
    draft = Draft("axolotl", content)
    rl = draft.get("rl")
    is_reward, labels = bool(draft.get("reward_model")), draft.get("num_labels")
    reject_objective(draft, rl if rl and rl not in (*RL_LOSSES, GRPO) else next((key for key in (
        "process_reward_model", "diffusion", "ebft") if draft.get(key)),
        "num_labels" if labels and not (is_reward and labels == 1) else None))
    texts = draft.get("pretraining_dataset") or []
    rows = draft.get("datasets") or []
    texts, rows = ([source] if isinstance(source, str | dict) else source for source in (texts, rows))
    texts, rows = ([{"path": source} if isinstance(source, str) else source for source in sources]
                   for sources in (texts, rows))
    is_text = bool(texts) or bool(rows) and all(_get_type(row) == "completion" for row in rows)
    if rl == GRPO:
        # TRL's keys are in their own block.
        draft.content = {**Draft(draft.program, draft.get("trl") or {}).content, **draft.content}
        training.take_grpo(draft, "rl")
    elif rl:
        _take_preferences(draft, rl)
        training.take_data(draft)
    elif is_reward:
        training.take_reward(draft, "reward_model")
        training.take_data(draft)
    else:
        draft.put("model", "CLM" if is_text else "SFT", "datasets[].type" if rows else "pretraining_dataset")
        draft.put("data", "CLMData" if is_text else "SFTData", "")
    _take_model(draft)
    _take_sources(draft, texts or rows, is_text)
    _take_rows(draft, is_text, bool(texts))
    if draft.get("batch_size"):
        size = draft.get("micro_batch_size", 1)
        draft.content["gradient_accumulation_steps"] = max(draft.content["batch_size"] // size, 1)
    if "warmup_steps" not in content and "warmup_ratio" not in content:
        draft.note("Without warmup_steps and warmup_ratio, axolotl warms up over 3 % of the run, at most 100 steps; "
                   "here it is always 3 %.")
    freezes = draft.get("freeze_mm_modules", False)
    if draft.get("processor_type"):
        training.take_images(draft, "processor_type", None if freezes else [""])
    _take_plugins(draft)
    draft.content.setdefault("logging_steps", 10)
    take_training(draft, NAMES)
    draft.finish()
    return draft


def _take_plugins(draft: Draft) -> None:
    """Report plugins without counterpart. The table covers plugins with faster kernels."""
    plugins = draft.content.get("plugins") or []
    others = [plugin for plugin in ([plugins] if isinstance(plugins, str) else plugins)
              if not any(name in str(plugin).lower() for name in KERNELS)]
    if others:
        draft.lose("plugins", f"{', '.join(map(str, others))}: axolotl's code does not run here")


def _take_preferences(draft: Draft, rl: str) -> None:
    loss_type = draft.get("dpo_loss_type")
    names = [loss_type] if isinstance(loss_type, str) else loss_type or []
    first = names[0] if rl == "dpo" and names else RL_LOSSES[rl]
    loss = training.take_loss(draft, first, "dpo_loss_type" if names else "rl")
    if len(names) > 1 or draft.get("dpo_loss_weights"):
        draft.lose("dpo_loss_weights", f"only one loss is supported, in addition to model.sft_weight; {first} is used")
    training.take_number(draft, "beta", "orpo_alpha" if rl == "orpo" else "rl_beta", 0.1)
    training.take_smoothing(draft, loss, "dpo_label_smoothing", ("robust", "exo_pair"))
    if rl == "simpo":
        training.take_number(draft, "gamma", "simpo_gamma", 0.5)
        training.take_number(draft, "sft_weight", "cpo_alpha", 1.0)
    elif draft.get("rpo_alpha") and rl == "dpo":
        training.take_number(draft, "sft_weight", "rpo_alpha", 0.0)
    if rl == "kto":
        for name in ("desirable_weight", "undesirable_weight"):
            training.take_number(draft, name, f"kto_{name}", 1.0)
    training.take_reference(draft, loss)
    training.note_differences(draft)


def _take_model(draft: Draft) -> None:
    draft.put("model.pretrained", draft.get("base_model"), "base_model")
    adapter, folder = draft.get("adapter"), draft.get("lora_model_dir")
    if folder:
        draft.put("model.adapter", folder, "lora_model_dir")
    elif adapter in ("lora", "qlora"):
        draft.put("model.lora.rank", draft.get("lora_r", 8), "lora_r")
        draft.put("model.lora.alpha", draft.get("lora_alpha", 16), "lora_alpha")
        draft.put("model.lora.dropout", float(draft.get("lora_dropout", 0.0)), "lora_dropout")
        _take_targets(draft)
        for name in ("modules_to_save", "target_parameters"):
            if names := draft.get(f"lora_{name}"):
                draft.put(f"model.lora.{name}", names, f"lora_{name}")
    elif adapter:
        draft.lose("adapter", f"{adapter} is not supported; the whole model trains unless model.lora is set")
    for key in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear",
                "lora_modules_to_save", "lora_target_parameters"):
        draft.get(key)
    if adapter == "qlora" and draft.get("load_in_4bit") is None:
        draft.content["load_in_4bit"] = True
    options = draft.get("bnb_config_kwargs", {})
    take_quantization(draft, bool(options.get("bnb_4bit_use_double_quant", True)))
    _take_precision(draft, full=not (draft.has("model.lora") or draft.has("model.adapter")))
    # Both may be true or a string that says where inputs are kept: offload, offload_disk, legacy, disk.
    checkpointing, offloading = draft.get("gradient_checkpointing", False), draft.get("activation_offloading", False)
    if checkpointing or offloading:
        key = "activation_offloading" if offloading else "gradient_checkpointing"
        offloads = offloading or isinstance(checkpointing, str)
        draft.put("model.gradient_checkpointing", "offload" if offloads else True, key)
        if "disk" in str(draft.content[key]):
            draft.lose(key, "inputs of layers are kept in the host's memory, not on disk")
    attention = next((key for key in ("flash_attention", "xformers_attention", "sdp_attention", "flex_attention")
                      if draft.get(key)), None)
    implementation = draft.get("attn_implementation")
    if implementation in ("eager", "sdpa"):
        draft.put("model.attention", implementation, "attn_implementation")
    elif draft.get("eager_attention"):
        draft.put("model.attention", "eager", "eager_attention")
    elif attention or implementation:
        training.note_attention(draft, attention or f"attn_implementation {implementation}")
    if fields := draft.get("overrides_of_model_config", draft.get("model_config")):
        draft.put("model.config_overrides", fields, "overrides_of_model_config", "model_config")
    if draft.get("base_model_config") == draft.get("base_model"):
        draft.content.pop("base_model_config", None)
    for key in PARALLEL:
        if isinstance(draft.content.get(key), int) and draft.content[key] <= 1:
            draft.get(key)
    draft.get("fsdp_version")
    if draft.get("torch_compile") is True:
        draft.put("model.compile", True, "torch_compile")


def _take_targets(draft: Draft) -> None:
    linear, modules = draft.get("lora_target_linear"), draft.get("lora_target_modules")
    if linear:
        draft.put("model.lora.targets", "all-linear", "lora_target_linear")
        if modules:
            draft.note("lora_target_modules is not needed with lora_target_linear.")
    elif not modules or not draft.put_value("lora_target_modules"):
        draft.put("model.lora.targets", "all-linear", "")
        draft.note("model.lora.targets: all-linear is a guess. Set the name endings of the modules to adapt.")


def _take_precision(draft: Draft, full: bool) -> None:
    fp16 = draft.get("fp16", draft.get("float16"))
    bf16 = draft.get("bf16", draft.get("bfloat16", False if fp16 else "auto"))
    if bf16:
        draft.put("trainer.precision", "bf16-true" if full else "bf16-mixed" if bf16 is True else "auto", "bf16")
        if full:
            draft.note("trainer.precision: bf16-true stores all weights in bfloat16, as axolotl does in full "
                       "fine-tuning. bf16-mixed keeps small updates, in float32 weights that take twice the memory.")
    else:
        draft.put("trainer.precision", "16-mixed" if fp16 else "32-true", "fp16" if fp16 else "bf16")


def _get_type(row: dict[str, Any]) -> str:
    row_type = row.get("type")
    return "fields" if isinstance(row_type, dict) else str(row_type or "").split(":")[0].split(".")[0]


def _take_sources(draft: Draft, rows: list[dict[str, Any]], is_text: bool) -> None:
    if not rows:
        draft.put("data.source", "WRITE A PATH OR HUB ID HERE", "")
        draft.note("No dataset is named. Set data.source.")
        return
    sources = [source for row in rows for source in _make_sources(draft, row, is_text)]
    draft.put("data.source", sources[0] if len(sources) == 1 and isinstance(sources[0], str) else sources,
              "datasets[].path" if draft.get("datasets") else "pretraining_dataset")
    _report_dataset_keys(draft, rows, "datasets" if draft.get("datasets") else "pretraining_dataset")


def _report_dataset_keys(draft: Draft, rows: list[dict[str, Any]], name: str) -> None:
    """Report each key of the datasets under `name` that is not converted or not needed."""
    table = rows_of("axolotl")
    for key, value in (item for row in rows for item in sorted(row.items())):
        table_row = table.get(f"datasets[].{key}")
        if key in TURN_ENDS and value not in (None, "turn"):
            draft.lose(f"{name}[].{key}", f"{value}: the end token of a target turn is a target, no other end token")
        elif key in ANSWERS or key == "type" or value in OFF:
            continue
        elif key not in DATASET_KEYS:
            draft.lose(f"{name}[].{key}", "rows are used unchanged")
        elif table_row and table_row.cells[1] == NOT_NEEDED:
            draft.skip(f"{name}[].{key}", value, table_row.note)


def _make_sources(draft: Draft, row: dict[str, Any], is_text: bool) -> list[Any]:
    files, path = row.get("data_files"), row.get("path")
    files = [files] if isinstance(files, str) else list(files or [])
    if files and path not in ("json", "csv", "parquet", "text", "arrow"):
        files = [f"hf://datasets/{path}/{file}" if "://" not in file else file for file in files]
    row_type = _get_type(row)
    fields = FIELDS | (ANSWERS if draft.settings["model"][0] in ("Preference", "Reward") else {})
    columns = {row[key]: recipe_column for key, recipe_column in ANSWERS.items() if key in fields and row.get(key)}
    if row_type == "bradley_terry":  # its rows are {system, input, chosen, rejected}
        columns = {"input": "prompt", **columns}
    if row_type == "fields":
        columns = {row["type"][key]: recipe_column for key, recipe_column in fields.items() if row["type"].get(key)}
        for key in sorted(row["type"].keys() - fields.keys()):
            draft.lose(f"datasets[].type.{key}", "data.template renders prompts")
    if (messages := row.get("field_messages")) not in (None, "messages", "conversations", "conversation"):
        columns[messages] = "messages"
    if tools := row.get("field_tools"):
        columns[tools] = "tools"
    text = row.get("text_column", row.get("field"))
    if is_text and text and text != "text":
        columns[text] = "text"
    columns = {column: recipe_column for column, recipe_column in columns.items() if column != recipe_column}
    hub = {key: row[key] for key in ("name", "split", "revision") if row.get(key) and not files}
    layout = {"alpaca": "alpaca", "sharegpt": "sharegpt"}.get(row_type)
    options = {**hub, **({"columns": columns} if columns else {}),
               **({"format": layout} if layout and not is_text else {})}
    return [{"path": file, **options} if options else file for file in files or [path]]


def _take_rows(draft: Draft, is_text: bool, streams: bool) -> None:
    rows = draft.get("datasets") or []
    rows = rows if isinstance(rows, list) else [rows]
    answer = draft.settings.get("model.max_new_tokens", (512,))[0] if draft.settings["model"][0] == "GRPO" else 0
    draft.put("data.max_length", draft.get("sequence_len", 512) + answer, "sequence_len")
    is_packed = draft.get("sample_packing") or draft.get("pretraining_sample_concatenation")
    if is_text:
        draft.put("data.join", True, "pretraining_dataset" if streams else "datasets[].type")
        if not streams:
            draft.note("type completion: texts are concatenated and split into full blocks; data.join: false keeps "
                       "them separate.")
    elif is_packed and draft.settings["data"][0] == "SFTData":
        draft.put("data.packing", True, "sample_packing")
    if not is_text:
        _take_conversations(draft, [row for row in rows if isinstance(row, dict)])
        strategy = draft.get("excess_length_strategy", "drop")
        draft.put("data.on_overflow", OVERFLOW.get(strategy, "skip"), "excess_length_strategy")
    if streams or draft.get("streaming"):
        draft.put("data.streaming", True, "pretraining_dataset" if streams else "streaming")
    if draft.get("pad_to_sequence_len"):
        draft.put("data.pad_to_multiple_of", draft.get("sequence_len", 512), "pad_to_sequence_len")
    tests = draft.get("test_datasets")
    if tests:
        tests = tests if isinstance(tests, list) else [tests]
        sources = [source for row in tests for source in _make_sources(draft, row, is_text)]
        draft.put("data.val_source", sources, "test_datasets")
        _report_dataset_keys(draft, tests, "test_datasets")
    elif size := draft.get("val_set_size", 0):
        if draft.has("data.streaming"):
            draft.lose("val_set_size", "a stream has no rows to hold out; set data.val_source")
        else:
            draft.put("data.val_size", size if size < 1 else int(size), "val_set_size")
            draft.note("val_set_size: data.seed selects the held-out rows, so they differ from axolotl's.")
    tokens = draft.get("special_tokens", {})
    for name in ("pad_token", "bos_token", "eos_token"):
        if tokens.get(name):
            draft.put(f"data.{name}", tokens[name], f"special_tokens.{name}: {tokens[name]!r}")
    if tokens.get("bos_token") or tokens.get("eos_token"):
        draft.note("data.bos_token and data.eos_token apply only if the tokenizer has none.")
    if tokens.get("unk_token"):
        draft.lose("special_tokens.unk_token", "the tokenizer's unk_token is used")
    extra = [*(tokens.get("additional_special_tokens") or []),
             *(added if isinstance(added := draft.get("tokens", []), list) else [])]
    if extra:
        draft.put("data.add_tokens", extra, "tokens", "special_tokens")


def _take_conversations(draft: Draft, rows: list[dict[str, Any]]) -> None:
    template, jinja = draft.get("chat_template"), draft.get("chat_template_jinja")
    types = {_get_type(row) for row in rows}
    if types <= {"alpaca", "alpaca_chat", "alpaca_w_system", "fields"} and types:
        draft.put("data.template", "alpaca", "datasets[].type")
    elif jinja or template == "jinja":
        draft.lose("chat_template_jinja", "write it to a file and set data.template to its path")
    elif template in TEMPLATES:
        draft.put("data.template", template, "chat_template")
    elif template not in (None, "tokenizer_default"):
        draft.note(f"chat_template {template}: the tokenizer's chat template is used (data.template: null). Check rows "
                   "with inspect.")
    if types - {"alpaca", "chat_template", "sharegpt", "completion", "fields", "alpaca_chat", "alpaca_w_system", ""}:
        draft.note(f"datasets[].type {', '.join(sorted(types))}: the layout is recognised by the columns, and one "
                   "data.template renders all rows. Check them with inspect.")
    elif "alpaca" in types and len(types) > 1:
        draft.note("The datasets have several prompt styles; here one data.template renders them all.")
    if system := draft.get("default_system_message"):
        draft.put("data.system_prompt", system, "default_system_message")
    if draft.settings["data"][0] == "SFTData" and (
            draft.get("train_on_inputs") or any("user" in (row.get("roles_to_train") or []) for row in rows)):
        draft.put("data.train_on", "all", "train_on_inputs", "datasets[].roles_to_train")
    fields: dict[str, str] = {}
    roles: dict[str, str] = {}
    for row in rows:
        names = {part: row[f"message_field_{part}"] for part in ("role", "content") if row.get(f"message_field_{part}")}
        names |= row.get("message_property_mappings") or {}
        fields |= {part: name for part, name in names.items() if (part, name) not in (
            ("role", "from"), ("content", "value"), ("role", "role"), ("content", "content"))}
        roles |= {alias: role for role, aliases in (row.get("roles") or {}).items() for alias in aliases
                  if alias != role}
        if row.get("field_thinking"):
            fields["reasoning_content"] = row["field_thinking"]
    if fields:
        draft.put("data.turn_fields", fields, "datasets[].message_property_mappings")
    if roles:
        draft.put("data.roles", roles, "datasets[].roles")
