"""Llama (Touvron et al. 2023), and helpers for its descendants."""

from typing import Any

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Classifier, Family, Head, initial_std, plain_layers
from jax_engine.models.linear import check_activation
from jax_engine.models.rope import Rope, rope_of

MODULES = {
    "embed.tokens": "embed_tokens",
    "layers.attn.q": "layers.{}.self_attn.q_proj",
    "layers.attn.k": "layers.{}.self_attn.k_proj",
    "layers.attn.v": "layers.{}.self_attn.v_proj",
    "layers.attn.o": "layers.{}.self_attn.o_proj",
    "layers.attn.q_norm": "layers.{}.self_attn.q_norm",
    "layers.attn.k_norm": "layers.{}.self_attn.k_norm",
    "layers.mlp.gate": "layers.{}.mlp.gate_proj",
    "layers.mlp.up": "layers.{}.mlp.up_proj",
    "layers.mlp.down": "layers.{}.mlp.down_proj",
    "layers.attn_norm": "layers.{}.input_layernorm",
    "layers.mlp_norm": "layers.{}.post_attention_layernorm",
    "norm": "norm",
}


def llama_like(config: PreTrainedConfig, **overrides: Any) -> Architecture:
    """Return the architecture of a Llama-like network.

    Args:
        overrides: Fields of Architecture to override; `rope` sets the rope of all layers, and `norm_eps` also
            applies to the final norm.
    """
    rope = overrides.pop("rope", None) or (None if "ropes" in overrides else rope_of(config))
    eps = overrides.pop("norm_eps", None) or config.rms_norm_eps
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    std = initial_std(config)
    return Architecture(**{
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads, "head_dim": head_dim,
        "mlp_size": config.intermediate_size, "norm": "rms", "norm_eps": eps, "final_norm_eps": eps,
        "activation": check_activation(overrides.pop("activation", None) or config.hidden_act), "init_std": std,
        "layer_std": std, "residual_std": std, "causal": True, "positions": "rope",
        "ropes": (rope,) * config.num_hidden_layers, "padding_id": config.pad_token_id,
        "qkv_bias": False, "out_bias": False, "mlp_bias": False, "gated": True,
        "tied": overrides.pop("tied") if "tied" in overrides else config.tie_word_embeddings,
        "attention_dropout": config.attention_dropout or 0.0,
        **plain_layers(config.num_hidden_layers, head_dim**-0.5), **overrides})


def last_token_head(config: PreTrainedConfig) -> Classifier:
    """Return the sequence head of a decoder: scores of the last token, without bias."""
    return Classifier("last", bias=False)


def token_head(config: PreTrainedConfig) -> Classifier:
    """Return the token head of a decoder."""
    rates = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
    return Classifier(bias=getattr(config, "token_classification_bias", True),
                      dropout=next((rate for rate in rates if rate is not None), 0.1))


LABELS: tuple[Head, ...] = ("sequence", "token")


def llama_family(architecture: Any, name: str, qa_base: str | None = "transformer",
                 modules: dict[str, str] = MODULES, dropouts: dict[str, str] | None = None,
                 labels: tuple[Head, ...] = LABELS, **fields: Any) -> Family:
    """Return a family with Llama's key table or `modules`, and dropout on attention weights and at `dropouts`.

    Its classes are `{name}ForCausalLM`, the heads in `labels`, and with `qa_base` `{name}ForQuestionAnswering`.
    `fields` are other fields of Family.
    """
    classes = {"causal": f"{name}ForCausalLM", "sequence": f"{name}ForSequenceClassification",
               "token": f"{name}ForTokenClassification"}
    classes = {head: class_name for head, class_name in classes.items() if head in ("causal", *labels)}
    head_modules = {"causal": {"head": "lm_head"}, **dict.fromkeys(labels, {"head": "score"})}
    if qa_base:
        classes["qa"], head_modules["qa"] = f"{name}ForQuestionAnswering", {"head": "qa_outputs"}
    return Family(architecture=architecture, base="model", modules=modules, classes=classes,
                  head_modules=head_modules,
                  dropouts={"layers.attn.weights": "layers.{}.self_attn.weights", **(dropouts or {})},
                  head_dropouts={"token": {"head": "dropout"}},
                  classifiers={"sequence": last_token_head, "token": token_head},
                  tied={"causal": {"lm_head.weight": "embed.tokens.weight"}},
                  base_of={"qa": qa_base} if qa_base else {}, **fields)


def with_modules(before: str, after: str, modules: dict[str, str]) -> dict[str, str]:
    """Return Llama's key table with the entries between two modules replaced by a family's, in order."""
    names = list(MODULES)
    first, last = names.index(before) + 1, names.index(after)
    return {name: MODULES[name] for name in names[:first]} | modules | {name: MODULES[name] for name in names[last:]}


def layer_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, from `layer_types`."""
    return tuple(config.sliding_window if layer_type == "sliding_attention" else None
                 for layer_type in config.layer_types)


def layer_ropes(config: PreTrainedConfig) -> tuple[Rope, ...]:
    """Return the rotary embedding of each layer, from `layer_types`."""
    ropes = {layer_type: rope_of(config, layer_type) for layer_type in set(config.layer_types)}
    return tuple(ropes[layer_type] for layer_type in config.layer_types)


def architecture(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias, mlp_bias=config.mlp_bias)


FAMILY = llama_family(architecture, "Llama")
