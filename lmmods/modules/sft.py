"""Supervised fine-tuning: full, LoRA or QLoRA."""

from lmmods.modules.generation import CausalModule


class SFT(CausalModule):
    """Fine-tune a causal LM on instructions or chats; predict generates answers."""
