"""StarCoder 2 (Lozhkov et al. 2024): Llama's attention with biases, LayerNorm and an ungated MLP."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture
from jax_engine.models.families.llama import MODULES, llama_family, llama_like

MLP = {"layers.mlp.up": "layers.{}.mlp.c_fc", "layers.mlp.down": "layers.{}.mlp.c_proj"}


def architecture(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, qkv_bias=config.use_bias, out_bias=config.use_bias, mlp_bias=config.use_bias,
                      gated=False, norm="layer", norm_eps=config.norm_epsilon,
                      windows=(config.sliding_window,) * config.num_hidden_layers,
                      embedding_dropout=config.embedding_dropout, residual_dropout=config.residual_dropout,
                      mlp_dropout=config.residual_dropout)


FAMILY = llama_family(architecture, "Starcoder2", qa_base=None, modules=MODULES | MLP, dropouts={
    "embed": "", "layers.attn": "layers.{}.self_attn", "layers.mlp": "layers.{}.mlp"})
