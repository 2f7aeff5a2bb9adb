"""Causal language modelling: from scratch, full or with adapters."""

from lmmods.modules.generation import CausalModule


class CLM(CausalModule):
    """Train a causal LM on text; predict goes on from the texts it is given."""
