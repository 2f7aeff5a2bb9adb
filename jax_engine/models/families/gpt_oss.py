"""gpt-oss (OpenAI 2025): experts with biases and clipped gates, attention sinks, alternating windows."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Experts
from jax_engine.models.families.llama import MODULES, layer_windows, llama_family, llama_like, with_modules


def architecture(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias, norm="rms_wide",
                      windows=layer_windows(config), sinks=True, experts=Experts(
                          config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, bias=True,
                          transposed=True, clamp=(config.swiglu_alpha, config.swiglu_limit)))


FAMILY = llama_family(architecture, "GptOss", qa_base=None, modules=with_modules("embed.tokens", "layers.attn_norm", {
    "layers.attn": "layers.{}.self_attn", **{f"layers.attn.{part}": MODULES[f"layers.attn.{part}"] for part in "qkvo"},
    "layers.moe.router": "layers.{}.mlp.router", "layers.moe.experts": "layers.{}.mlp.experts"}))
