"""Tiny random checkpoints of image-and-text models, written by transformers."""

from pathlib import Path
from typing import Any

import torch

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}
LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TEXT | {"sliding_window": 8}, "vision_config": VISION, "mm_tokens_per_image": 4},
    "gemma4": {"text_config": TEXT | LAYERS | {
        "sliding_window": 8, "global_head_dim": 16, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 4,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
        "vision_config": {"num_key_value_heads": 2, "head_dim": 8, **VISION}},
    "qwen3_5": {"text_config": TEXT | {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                                       "linear_key_head_dim": 8, "linear_value_head_dim": 8},
                "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2,
                                  "out_hidden_size": 32, "num_position_embeddings": 16},
                "tie_word_embeddings": True},
    "mistral3": {"text_config": TEXT | {"model_type": "mistral"},
                 "vision_config": {"model_type": "pixtral", "head_dim": 8, **VISION}},
    "llama4": {"text_config": TEXT | {"intermediate_size_mlp": 48, "num_local_experts": 2},
               "vision_config": {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
                                 **VISION}},
}


def save_image_model(model_type: str, folder: Path, vocab_size: int = 64) -> Any:
    """Write a checkpoint and return its transformers model in evaluation mode."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    fields = KINDS[model_type]
    tables = {"vocab_size": vocab_size} | (
        {"vocab_size_per_layer_input": vocab_size} if model_type == "gemma4" else {})
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**fields | {"text_config": fields["text_config"] | tables})
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def text_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, T, V] of an image-and-text model for text alone."""
    base = model.model.language_model
    with torch.no_grad():
        return model.lm_head(base(ids).last_hidden_state)
