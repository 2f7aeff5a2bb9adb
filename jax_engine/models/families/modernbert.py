"""ModernBERT (Warner et al. 2024): rotary positions, windows in most layers, pre-norm, no biases.

The embedding is normed, so the first layer's attention has no input norm.
"""

import math
from dataclasses import replace

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Classifier, Family, Head, initial_std, plain_layers, refuse
from jax_engine.models.families.bert import label_classes
from jax_engine.models.families.llama import layer_ropes
from jax_engine.models.linear import check_activation


def residual_std(config: PreTrainedConfig) -> float:
    return initial_std(config) / math.sqrt(2 * config.num_hidden_layers)


def architecture(config: PreTrainedConfig) -> Architecture:
    refuse(config, tie_word_embeddings=True)
    head_dim, std = config.hidden_size // config.num_attention_heads, initial_std(config)
    # transformers' sliding_window is the number of tokens to each side, without the query.
    windows = tuple(config.sliding_window + 1 if kind == "sliding_attention" else None for kind in config.layer_types)
    return Architecture(**{
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads, "num_kv_heads": config.num_attention_heads, "head_dim": head_dim,
        "mlp_size": config.intermediate_size, "activation": check_activation(config.hidden_activation),
        "norm": "layer" if config.norm_bias else "layer_no_bias", "norm_eps": config.norm_eps,
        "final_norm_eps": config.norm_eps, "first_norm": False, "init_std": std, "layer_std": std,
        "residual_std": residual_std(config), "init_cut": config.initializer_cutoff_factor or 3, "causal": False,
        "positions": "rope", "ropes": layer_ropes(config), "padding_id": config.pad_token_id,
        "qkv": "fused", "qkv_bias": config.attention_bias, "out_bias": config.attention_bias, "gated": True,
        "fused_gate_up": True, "mlp_bias": config.mlp_bias, "head_bias": config.decoder_bias,
        "head_activation": check_activation(config.classifier_activation), "head_dense_bias": config.classifier_bias,
        "head_std": residual_std(config),
        "embedding_dropout": config.embedding_dropout, "attention_dropout": config.attention_dropout,
        "residual_dropout": config.attention_dropout, "mlp_inner_dropout": config.mlp_dropout,
        **plain_layers(config.num_hidden_layers, head_dim**-0.5),
        "windows": windows})


def token_head(config: PreTrainedConfig) -> Classifier:
    return Classifier(dense=True, activation=check_activation(config.classifier_activation), norm=True,
                      dense_bias=config.classifier_bias, dropout=config.classifier_dropout,
                      std=config.hidden_size**-0.5, dense_std=residual_std(config))


def sequence_head(config: PreTrainedConfig) -> Classifier:
    return replace(token_head(config), pooling={"cls": "first", "mean": "mean"}[config.classifier_pooling])


SCORING: tuple[Head, ...] = ("qa", "sequence", "token", "choice")  # heads without a vocabulary
PARTS = {"head.dense": "head.dense", "head.norm": "head.norm", "head": "classifier"}
FAMILY = Family(
    architecture=architecture,
    base="model",
    modules={
        "embed.tokens": "embeddings.tok_embeddings",
        "embed.norm": "embeddings.norm",
        "layers.attn_norm": "layers.{}.attn_norm",
        "layers.attn.qkv": "layers.{}.attn.Wqkv",
        "layers.attn.o": "layers.{}.attn.Wo",
        "layers.mlp_norm": "layers.{}.mlp_norm",
        "layers.mlp.gate_up": "layers.{}.mlp.Wi",
        "layers.mlp.down": "layers.{}.mlp.Wo",
        "norm": "final_norm",
    },
    classes={"masked": "ModernBertForMaskedLM", "qa": "ModernBertForQuestionAnswering",
             **label_classes("ModernBert")},
    head_modules={
        "masked": {"head.dense": "head.dense", "head.norm": "head.norm", "head": "decoder"},
        **dict.fromkeys(SCORING, PARTS),
    },
    dropouts={"embed": "embeddings.drop", "layers.attn.weights": "layers.{}.attn.weights",
              "layers.attn": "layers.{}.attn.out_drop", "layers.mlp.inner": "layers.{}.mlp.drop"},
    head_dropouts=dict.fromkeys(SCORING, {"head": "drop"}),
    classifiers={"qa": token_head, "sequence": sequence_head, "token": token_head, "choice": sequence_head},
    tied={"masked": {"decoder.weight": "embed.tokens.weight"}},
)
