"""Causal language modelling: from scratch, full or with adapters."""

from lmmods.recipe.tasks.clm import CLMFields
from lmmods.torch_engine.tasks.causal_task import CausalModule


class CLM(CLMFields, CausalModule):
    """Train a causal LM on text; predict continues texts."""
