"""Supervised fine-tuning on JAX: full or with adapters."""

from jax_engine.tasks.causal_task import CausalTask
from lmmods.recipe.tasks.sft import SFTFields


class SFT(SFTFields, CausalTask):
    """Fine-tune a causal LM on instructions or chats; predict generates answers."""
