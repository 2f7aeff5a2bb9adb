"""Qwen3 with experts (Yang et al. 2025)."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, ExpertFiles, Experts, refuse
from jax_engine.models.families.llama import llama_family, llama_like, with_modules
from jax_engine.models.families.mixtral import EXPERTS, ROUTER


def architecture(config: PreTrainedConfig) -> Architecture:
    refuse(config, mlp_only_layers=[], decoder_sparse_step=1)
    return llama_like(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias, qk_norm="head",
                      windows=(config.sliding_window,) * config.num_hidden_layers, experts=Experts(
                          config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size,
                          normalised=config.norm_topk_prob))


FAMILY = llama_family(architecture, "Qwen3Moe", expert_files=ExpertFiles(), modules=with_modules(
    "layers.attn.k_norm", "layers.attn_norm", EXPERTS | ROUTER))
