"""Supervised fine-tuning: full, LoRA or QLoRA."""

from lmmods.recipe.tasks.sft import SFTFields
from lmmods.torch_engine.tasks.causal_task import CausalModule


class SFT(SFTFields, CausalModule):
    """Fine-tune a causal LM on instructions or chats; predict generates answers."""
