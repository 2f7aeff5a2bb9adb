"""Which program a configuration was written for."""

from typing import Any

PROGRAMS = {"axolotl": "axolotl", "llamafactory": "LLaMA-Factory", "trl": "TRL"}
BLOCKS = ("trainer", "model", "data", "checkpoint", "samples", "mmlu", "publish")  # of a recipe
# Keys that a program alone has, of which one is enough.
MARKS = {
    "axolotl": {"base_model", "sequence_len", "micro_batch_size", "val_set_size", "sample_packing", "num_epochs",
                "lora_target_linear", "dataset_prepared_path", "rl", "rl_beta", "dpo_loss_type"},
    "llamafactory": {"stage", "finetuning_type", "cutoff_len", "lora_rank", "lora_target", "quantization_bit",
                     "dataset_dir", "max_samples", "model_class", "train_dataset", "dist_config",
                     "pref_loss", "pref_beta"},
    "trl": {"dataset_name", "dataset_train_split", "use_peft", "dataset_text_field", "assistant_only_loss",
            "completion_only_loss", "bnb_4bit_quant_type", "use_bnb_nested_quant", "eval_packing", "dataset_num_proc",
            "loss_type", "desirable_weight", "undesirable_weight"},
}


def written_for(content: dict[str, Any]) -> str | None:
    """The program, of `PROGRAMS`, whose keys a mapping has most of; None for a recipe, and where it is unclear."""
    if any(isinstance(content.get(block), dict) for block in BLOCKS):
        return None
    counts = {program: len(marks & content.keys()) for program, marks in MARKS.items()}
    best = max(counts, key=lambda program: counts[program])
    return best if counts[best] and list(counts.values()).count(counts[best]) == 1 else None
