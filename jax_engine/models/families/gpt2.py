"""GPT-2 (Radford et al. 2019)."""

import math

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Family, initial_std, refuse
from jax_engine.models.families.llama import last_token_head, token_head
from jax_engine.models.linear import check_activation


def architecture(config: PreTrainedConfig) -> Architecture:
    refuse(config, add_cross_attention=False)
    layers, head_dim = config.n_layer, config.n_embd // config.n_head
    scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
    scales = tuple(scale / (n + 1 if config.scale_attn_by_inverse_layer_idx else 1) for n in range(layers))
    return Architecture(
        vocab_size=config.vocab_size, hidden_size=config.n_embd, num_layers=layers, num_heads=config.n_head,
        num_kv_heads=config.n_head, head_dim=head_dim, mlp_size=config.n_inner or 4 * config.n_embd,
        activation=check_activation(config.activation_function), norm_eps=config.layer_norm_epsilon,
        final_norm_eps=config.layer_norm_epsilon, init_std=initial_std(config),
        layer_std=config.initializer_range, residual_std=config.initializer_range / math.sqrt(2 * layers),
        causal=True, windows=(None,) * layers, attention_scales=scales, passes=tuple(range(layers)),
        max_positions=config.n_positions, qkv="fused", conv1d=True, tied=config.tie_word_embeddings,
        embedding_dropout=config.embd_pdrop, attention_dropout=config.attn_pdrop,
        residual_dropout=config.resid_pdrop, mlp_dropout=config.resid_pdrop)


FAMILY = Family(
    architecture=architecture,
    base="transformer",
    modules={
        "embed.tokens": "wte",
        "embed.positions": "wpe",
        "layers.attn_norm": "h.{}.ln_1",
        "layers.attn.qkv": "h.{}.attn.c_attn",
        "layers.attn.o": "h.{}.attn.c_proj",
        "layers.mlp_norm": "h.{}.ln_2",
        "layers.mlp.up": "h.{}.mlp.c_fc",
        "layers.mlp.down": "h.{}.mlp.c_proj",
        "norm": "ln_f",
    },
    classes={"causal": "GPT2LMHeadModel", "qa": "GPT2ForQuestionAnswering",
             "sequence": "GPT2ForSequenceClassification", "token": "GPT2ForTokenClassification"},
    head_modules={"causal": {"head": "lm_head"}, "qa": {"head": "qa_outputs"}, "sequence": {"head": "score"},
                  "token": {"head": "classifier"}},
    dropouts={"embed": "drop", "layers.attn.weights": "h.{}.attn.weights", "layers.attn": "h.{}.attn.resid_dropout",
              "layers.mlp": "h.{}.mlp.dropout"},
    head_dropouts={"token": {"head": "dropout"}},
    classifiers={"sequence": last_token_head, "token": token_head},
    tied={"causal": {"lm_head.weight": "embed.tokens.weight"}},
)
