"""Mixtral (Jiang et al. 2024): Mistral with experts."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, ExpertFiles, Experts, refuse
from jax_engine.models.families.llama import llama_family, llama_like, with_modules

ROUTER, EXPERTS = {"layers.moe.router": "layers.{}.mlp.gate"}, {"layers.moe.experts": "layers.{}.mlp.experts"}
MODULES = with_modules("layers.attn.k_norm", "layers.attn_norm", ROUTER | EXPERTS)


def architecture(config: PreTrainedConfig) -> Architecture:
    refuse(config, router_jitter_noise=0.0)
    return llama_like(config, windows=(config.sliding_window,) * config.num_hidden_layers, experts=Experts(
        config.num_local_experts, config.num_experts_per_tok, config.intermediate_size))


FAMILY = llama_family(architecture, "Mixtral", qa_base="model", modules=MODULES,
                      expert_files=ExpertFiles("block_sparse_moe", "w1", "w3", "w2"))
