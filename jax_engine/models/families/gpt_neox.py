"""GPT-NeoX and Pythia (Black et al. 2022): parallel attention and MLP, and partial rotary embeddings."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Family, initial_std, plain_layers
from jax_engine.models.families.llama import last_token_head, token_head
from jax_engine.models.linear import check_activation
from jax_engine.models.rope import rope_of


def architecture(config: PreTrainedConfig) -> Architecture:
    head_dim, std = config.hidden_size // config.num_attention_heads, initial_std(config)
    return Architecture(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads, num_kv_heads=config.num_attention_heads, head_dim=head_dim,
        mlp_size=config.intermediate_size, activation=check_activation(config.hidden_act),
        norm_eps=config.layer_norm_eps, final_norm_eps=config.layer_norm_eps, init_std=std, layer_std=std,
        residual_std=std, causal=True, positions="rope",
        ropes=(rope_of(config, partial=True),) * config.num_hidden_layers, qkv="fused_by_head",
        qkv_bias=config.attention_bias, out_bias=config.attention_bias, parallel=config.use_parallel_residual,
        tied=config.tie_word_embeddings, embedding_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout, residual_dropout=config.hidden_dropout,
        mlp_dropout=config.hidden_dropout, **plain_layers(config.num_hidden_layers, head_dim**-0.5))


FAMILY = Family(
    architecture=architecture,
    base="gpt_neox",
    modules={
        "embed.tokens": "embed_in",
        "layers.attn_norm": "layers.{}.input_layernorm",
        "layers.mlp_norm": "layers.{}.post_attention_layernorm",
        "layers.attn.qkv": "layers.{}.attention.query_key_value",
        "layers.attn.o": "layers.{}.attention.dense",
        "layers.mlp.up": "layers.{}.mlp.dense_h_to_4h",
        "layers.mlp.down": "layers.{}.mlp.dense_4h_to_h",
        "norm": "final_layer_norm",
    },
    classes={"causal": "GPTNeoXForCausalLM", "qa": "GPTNeoXForQuestionAnswering",
             "sequence": "GPTNeoXForSequenceClassification", "token": "GPTNeoXForTokenClassification"},
    head_modules={"causal": {"head": "lm_head"}, "qa": {"head": "qa_outputs"}, "sequence": {"head": "score"},
                  "token": {"head": "classifier"}},
    older={"embed_out.": "lm_head."},
    dropouts={"embed": "emb_dropout", "layers.attn.weights": "layers.{}.attention.weights",
              "layers.attn": "layers.{}.post_attention_dropout", "layers.mlp": "layers.{}.post_mlp_dropout"},
    head_dropouts={"token": {"head": "dropout"}},
    classifiers={"sequence": last_token_head, "token": token_head},
    tied={"causal": {"lm_head.weight": "embed.tokens.weight"}},
)
