"""CTRL (Keskar et al. 2019): sinusoidal positions, scaled embedding, a bias on the logits."""

import math

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Family, initial_std, plain_layers
from jax_engine.models.families.llama import last_token_head

BLOCK_NORM_EPS = 1e-6  # only the last norm reads layer_norm_epsilon


def architecture(config: PreTrainedConfig) -> Architecture:
    head_dim = config.n_embd // config.n_head
    std = initial_std(config)
    return Architecture(
        vocab_size=config.vocab_size, hidden_size=config.n_embd, num_layers=config.n_layer, num_heads=config.n_head,
        num_kv_heads=config.n_head, head_dim=head_dim, mlp_size=config.dff, activation="relu",
        norm_eps=BLOCK_NORM_EPS, final_norm_eps=config.layer_norm_epsilon, init_std=std, layer_std=std,
        residual_std=std, causal=True, positions="sinusoid", max_positions=config.n_positions,
        embedding_scale=math.sqrt(config.n_embd), tied=config.tie_word_embeddings, head_bias=True,
        embedding_dropout=config.embd_pdrop, residual_dropout=config.resid_pdrop, mlp_dropout=config.resid_pdrop,
        **plain_layers(config.n_layer, head_dim**-0.5))


FAMILY = Family(
    architecture=architecture,
    base="transformer",
    modules={
        "embed.tokens": "w",
        "layers.attn.q": "h.{}.multi_head_attention.Wq",
        "layers.attn.k": "h.{}.multi_head_attention.Wk",
        "layers.attn.v": "h.{}.multi_head_attention.Wv",
        "layers.attn.o": "h.{}.multi_head_attention.dense",
        "layers.mlp.up": "h.{}.ffn.0",
        "layers.mlp.down": "h.{}.ffn.2",
        "layers.attn_norm": "h.{}.layernorm1",
        "layers.mlp_norm": "h.{}.layernorm2",
        "norm": "layernorm",
    },
    classes={"causal": "CTRLLMHeadModel", "sequence": "CTRLForSequenceClassification"},
    head_modules={"causal": {"head": "lm_head"}, "sequence": {"head": "classifier"}},
    dropouts={"embed": "dropout", "layers.attn": "h.{}.dropout1", "layers.mlp": "h.{}.dropout2"},
    classifiers={"sequence": last_token_head},
    tied={"causal": {"lm_head.weight": "embed.tokens.weight"}},
)
