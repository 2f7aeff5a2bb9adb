"""GPT (Radford et al. 2018): post-norm, without a final norm."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Family, initial_std, plain_layers, refuse
from jax_engine.models.families.llama import last_token_head

# This model has its own activations: "gelu" is the tanh approximation.
ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}
CONV1D_STD = 0.02  # torch's Conv1D uses this and ignores initializer_range


def architecture(config: PreTrainedConfig) -> Architecture:
    if config.afn not in ACTIVATIONS:
        refuse(config, afn="gelu")
    head_dim = config.n_embd // config.n_head
    return Architecture(
        vocab_size=config.vocab_size, hidden_size=config.n_embd, num_layers=config.n_layer, num_heads=config.n_head,
        num_kv_heads=config.n_head, head_dim=head_dim, mlp_size=4 * config.n_embd,
        activation=ACTIVATIONS[config.afn], norm_eps=config.layer_norm_epsilon, init_std=initial_std(config),
        layer_std=CONV1D_STD, residual_std=CONV1D_STD, causal=True, norms=("sum",),
        max_positions=config.n_positions, qkv="fused", conv1d=True, tied=config.tie_word_embeddings,
        embedding_dropout=config.embd_pdrop, attention_dropout=config.attn_pdrop,
        residual_dropout=config.resid_pdrop, mlp_dropout=config.resid_pdrop,
        **plain_layers(config.n_layer, head_dim**-0.5))


FAMILY = Family(
    architecture=architecture,
    base="transformer",
    modules={
        "embed.tokens": "tokens_embed",
        "embed.positions": "positions_embed",
        "layers.attn.qkv": "h.{}.attn.c_attn",
        "layers.attn.o": "h.{}.attn.c_proj",
        "layers.attn_norm": "h.{}.ln_1",
        "layers.mlp.up": "h.{}.mlp.c_fc",
        "layers.mlp.down": "h.{}.mlp.c_proj",
        "layers.mlp_norm": "h.{}.ln_2",
    },
    classes={"causal": "OpenAIGPTLMHeadModel", "sequence": "OpenAIGPTForSequenceClassification"},
    head_modules={"causal": {"head": "lm_head"}, "sequence": {"head": "score"}},
    dropouts={"embed": "drop", "layers.attn.weights": "h.{}.attn.weights", "layers.attn": "h.{}.attn.resid_dropout",
              "layers.mlp": "h.{}.mlp.dropout"},
    classifiers={"sequence": last_token_head},
    tied={"causal": {"lm_head.weight": "embed.tokens.weight"}},
)
