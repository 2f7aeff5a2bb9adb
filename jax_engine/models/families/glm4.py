"""GLM-4 (GLM Team 2024): norms before and after each sublayer, and interleaved rotary embeddings."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture
from jax_engine.models.families.llama import MODULES, llama_family, llama_like
from jax_engine.models.rope import rope_of


def architecture(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, rope=rope_of(config, partial=True, interleaved=True), qkv_bias=config.attention_bias,
                      norms=("input", "output"), fused_gate_up=True)


FAMILY = llama_family(architecture, "Glm4", qa_base=None, modules={
    name: MODULES[name] for name in ("embed.tokens", "layers.attn.q", "layers.attn.k", "layers.attn.v", "layers.attn.o")
} | {"layers.mlp.gate_up": "layers.{}.mlp.gate_up_proj"} | {
    name: MODULES[name] for name in ("layers.mlp.down", "layers.attn_norm", "layers.mlp_norm")
} | {"layers.attn_out_norm": "layers.{}.post_self_attn_layernorm",
     "layers.mlp_out_norm": "layers.{}.post_mlp_layernorm", "norm": MODULES["norm"]})
