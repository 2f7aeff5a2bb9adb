"""Supervised fine-tuning on JAX: full or LoRA."""

from jax_engine.tasks.causal_task import CausalTask


class SFT(CausalTask):
    """Fine-tune a causal LM on instructions or chats; predict generates answers."""
