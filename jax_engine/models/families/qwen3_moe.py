"""Qwen3 with experts (Yang et al. 2025)."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, ExpertFiles, Experts
from jax_engine.models.families.llama import MODULES, llama_family, llama_like, with_modules
from jax_engine.models.families.mixtral import EXPERTS, ROUTER

DENSE = {f"layers.mlp.{part}": MODULES[f"layers.mlp.{part}"] for part in ("gate", "up", "down")}


def architecture(config: PreTrainedConfig) -> Architecture:
    num = config.num_hidden_layers
    dense = tuple(layer for layer in range(num) if layer in config.mlp_only_layers or not config.num_experts
                  or (layer + 1) % config.decoder_sparse_step)
    experts = Experts(config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size,
                      normalised=config.norm_topk_prob)
    mixes = {"experts": experts, "dense_layers": dense} if len(dense) < num else {}
    return llama_like(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias, qk_norm="head",
                      windows=(config.sliding_window,) * num, **mixes)


FAMILY = llama_family(architecture, "Qwen3Moe", expert_files=ExpertFiles(), modules=with_modules(
    "layers.attn.k_norm", "layers.attn_norm", EXPERTS | ROUTER | DENSE))
