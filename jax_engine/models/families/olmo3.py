"""OLMo 3 (OLMo Team 2025): OLMo 2 with windows in most layers, and scaled rotary embeddings in the others."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture
from jax_engine.models.families.llama import MODULES, layer_ropes, layer_windows, llama_family
from jax_engine.models.families.olmo2 import OUT_NORMS, olmo2_like


def architecture(config: PreTrainedConfig) -> Architecture:
    return olmo2_like(config, windows=layer_windows(config), ropes=layer_ropes(config))


FAMILY = llama_family(architecture, "Olmo3", qa_base=None, modules=MODULES | OUT_NORMS, labels=("sequence",))
