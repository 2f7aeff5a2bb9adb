"""Mistral (Jiang et al. 2023): Llama with a sliding window."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, refuse
from jax_engine.models.families.llama import llama_family, llama_like


def architecture(config: PreTrainedConfig) -> Architecture:
    refuse(config, layer_types=None)
    return llama_like(config, windows=(config.sliding_window,) * config.num_hidden_layers)


FAMILY = llama_family(architecture, "Mistral", qa_base="model")
