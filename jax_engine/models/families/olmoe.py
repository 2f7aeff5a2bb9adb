"""OLMoE (Muennighoff et al. 2024): Llama with experts, and norms on whole query and key projections."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, ExpertFiles, Experts
from jax_engine.models.families.llama import llama_family, llama_like
from jax_engine.models.families.mixtral import MODULES


def architecture(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias, qk_norm="projection",
                      qkv_limit=config.clip_qkv, experts=Experts(
                          config.num_experts, config.num_experts_per_tok, config.intermediate_size,
                          normalised=config.norm_topk_prob))


FAMILY = llama_family(architecture, "Olmoe", qa_base=None, labels=(), modules=MODULES, expert_files=ExpertFiles())
