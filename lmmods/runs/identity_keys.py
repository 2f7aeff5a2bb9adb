"""Which keys of a recipe may change when a run is resumed: `REPORTED`, `NOT_COMPARED` and, where a step keeps its rows,
`CUT`; all others are refused.

tests/test_identity.py holds the lists in the documentation against these, and that each key is in exactly one.
"""

import re

_TRAINER = """accelerator devices num_nodes strategy precision plugins deterministic benchmark inference_mode profiler
    max_epochs min_epochs max_steps min_steps max_time fast_dev_run barebones gradient_clip_val gradient_clip_algorithm
    val_check_interval check_val_every_n_epoch limit_val_batches limit_test_batches
    limit_predict_batches num_sanity_val_steps log_every_n_steps logger callbacks enable_checkpointing
    enable_progress_bar detect_anomaly heartbeat_timeout model_registry"""
_MODEL = """generation top_k gradient_checkpointing attention save_dtype piece_tokens fast_kernels compile quant_storage
    max_memory trust_remote_code optimizer.lr optimizer.weight_decay optimizer.schedule optimizer.warmup optimizer.decay
    optimizer.min_lr_ratio"""
_DATA = """val_source test_source predict_source eval_batch_size pad_to_multiple_of num_workers num_proc cache_dir
    rebuild_cache n_best_size max_answer_length null_score_diff_threshold version_2_with_negative"""

REPORTED = {
    "engine", "checkpoint", "samples", "mmlu", "publish",
    *(f"trainer.{name}" for name in _TRAINER.split()),
    *(f"model.{name}" for name in _MODEL.split()),
    *(f"data.{name}" for name in _DATA.split()),
}

_ROWS = """class_path source columns val_size tokenizer pad_token bos_token eos_token add_tokens tokenizer_options
    max_length packing streaming stream_window group_by_length shuffle seed template dataset_format roles
    turn_fields train_on_prompt train_on_last train_on turns reasoning system_prompt replace_system_prompt
    chat_template_kwargs source_max_length target_max_length on_overflow text_column documents join mlm_probability
    whole_word_masking stride question_max_length"""
_NETWORK = """class_path pretrained config config_overrides revision quantize double_quant lora adapter optimizer.name
    optimizer.betas optimizer.eps optimizer.momentum loss beta label_smoothing gamma sft_weight desirable_weight
    undesirable_weight reference balance_loss"""

REFUSED = {
    "seed_everything",
    "trainer.limit_train_batches", "trainer.overfit_batches", "trainer.reload_dataloaders_every_n_epochs",
    "trainer.sync_batchnorm",
    *(f"model.{name}" for name in _NETWORK.split()),
    *(f"data.{name}" for name in _ROWS.split()),
}

# How the rows of an optimiser step are cut, together with the devices. Reported where their product stays the same.
CUT = {"data.batch_size", "trainer.accumulate_grad_batches"}

# Where a run is stored and what its loggers call it, which may differ at each start.
NOT_COMPARED = {"trainer.default_root_dir", "trainer.logger.init_args.id", "trainer.logger.init_args.version",
                "trainer.logger.init_args.save_dir", "trainer.logger.init_args.dir"}

# What a recipe must share with a checkpoint to evaluate it: the keys that define the function its weights belong to.
WEIGHTS_DEFINING = {"model.pretrained", "model.config", "model.config_overrides", "model.adapter", "model.lora.rank",
                    "model.lora.alpha", "model.lora.targets", "model.lora.modules_to_save", "model.lora.dora",
                    "model.lora.rslora"}

# Keys whose floats are fractions of a whole, and whose integers are counts: 1.0 is everything, 1 is one.
FRACTIONS = {"trainer.val_check_interval", "trainer.overfit_batches", "trainer.limit_train_batches",
             "trainer.limit_val_batches", "model.optimizer.warmup", "model.optimizer.decay",
             "data.val_size"}


def is_among(key: str, keys: set[str]) -> bool:
    """Whether a key or a block that it is in is among `keys`. Numbers of lists' items (`[0]`) do not count."""
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    return any(".".join(parts[:length]) in keys for length in range(1, len(parts) + 1))
