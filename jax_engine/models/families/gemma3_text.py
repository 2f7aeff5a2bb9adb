"""Gemma 3, text only (Gemma Team 2025): Gemma 2 with norms on queries and keys, and a rope per layer type."""

from dataclasses import replace

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, refuse
from jax_engine.models.families.gemma2 import SANDWICHED, gemma2_like
from jax_engine.models.families.llama import layer_ropes, llama_family


def architecture(config: PreTrainedConfig) -> Architecture:
    refuse(config, attn_logit_softcapping=None)  # transformers' attention ignores this field
    return gemma2_like(config, qk_norm="head", ropes=layer_ropes(config))


GEMMA3 = llama_family(architecture, "Gemma3", qa_base=None, modules=SANDWICHED, labels=("sequence",))
# The class name without Text belongs to the model that also reads images.
FAMILY = replace(GEMMA3, classes=GEMMA3.classes | {"sequence": "Gemma3TextForSequenceClassification"})
