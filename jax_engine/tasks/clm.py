"""Causal language modelling on JAX: from scratch, full or with adapters."""

from jax_engine.tasks.causal_task import CausalTask
from lmmods.core.task_fields import CLMFields


class CLM(CLMFields, CausalTask):
    """Train a causal LM on text; predict goes on from the texts it is given."""
