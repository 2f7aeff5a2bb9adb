"""Phi-3, and Phi-4 of the same type (Microsoft 2024): Llama with fused matrices and partial rotary embeddings."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture
from jax_engine.models.families.llama import MODULES, llama_family, llama_like
from jax_engine.models.rope import rope_of

OWN = {"layers.attn.o": "layers.{}.self_attn.o_proj", "layers.attn.qkv": "layers.{}.self_attn.qkv_proj",
       "layers.mlp.gate_up": "layers.{}.mlp.gate_up_proj", "layers.mlp.down": "layers.{}.mlp.down_proj"}


def architecture(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, rope=rope_of(config, partial=True), qkv="fused", fused_gate_up=True,
                      windows=(config.sliding_window,) * config.num_hidden_layers,
                      residual_dropout=config.resid_pdrop, mlp_dropout=config.resid_pdrop)


FAMILY = llama_family(
    architecture, "Phi3", qa_base=None,
    modules={"embed.tokens": MODULES["embed.tokens"]} | OWN | {
        name: MODULES[name] for name in ("layers.attn_norm", "layers.mlp_norm", "norm")},
    dropouts={"layers.attn": "layers.{}.resid_attn_dropout", "layers.mlp": "layers.{}.resid_mlp_dropout"})
