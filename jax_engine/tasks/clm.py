"""Causal language modelling on JAX: from scratch, full fine-tuning or adapters."""

from jax_engine.tasks.causal_task import CausalTask
from lmmods.recipe.tasks.clm import CLMFields


class CLM(CLMFields, CausalTask):
    """Train a causal LM on text; predict continues the given texts."""
