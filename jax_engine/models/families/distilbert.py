"""DistilBERT (Sanh et al. 2019): BERT without token types."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Classifier, Family, initial_std, plain_layers, refuse
from jax_engine.models.families.bert import TOKEN, label_classes
from jax_engine.models.linear import check_activation

NORM_EPS = 1e-12  # fixed in its torch module


def architecture(config: PreTrainedConfig) -> Architecture:
    refuse(config, tie_word_embeddings=True)
    head_dim, std = config.dim // config.n_heads, initial_std(config)
    act = check_activation(config.activation)
    return Architecture(
        vocab_size=config.vocab_size, hidden_size=config.dim, num_layers=config.n_layers, num_heads=config.n_heads,
        num_kv_heads=config.n_heads, head_dim=head_dim, mlp_size=config.hidden_dim, activation=act,
        head_activation=act, norm_eps=NORM_EPS, init_std=std, layer_std=std, residual_std=std, causal=False,
        norms=("sum",), head_bias=True, max_positions=config.max_position_embeddings, padding_id=config.pad_token_id,
        sinusoid_init=config.sinusoidal_pos_embds, embedding_dropout=config.dropout,
        attention_dropout=config.attention_dropout, mlp_dropout=config.dropout,
        **plain_layers(config.n_layers, head_dim**-0.5))


def sequence_head(config: PreTrainedConfig) -> Classifier:
    return Classifier("first", dense=True, activation="relu", dropout=config.seq_classif_dropout)


ROWS = {"head.dense": "pre_classifier", "head": "classifier"}
FAMILY = Family(
    architecture=architecture,
    base="distilbert",
    modules={
        "embed.tokens": "embeddings.word_embeddings",
        "embed.positions": "embeddings.position_embeddings",
        "embed.norm": "embeddings.LayerNorm",
        "layers.attn.q": "transformer.layer.{}.attention.q_lin",
        "layers.attn.k": "transformer.layer.{}.attention.k_lin",
        "layers.attn.v": "transformer.layer.{}.attention.v_lin",
        "layers.attn.o": "transformer.layer.{}.attention.out_lin",
        "layers.attn_norm": "transformer.layer.{}.sa_layer_norm",
        "layers.mlp.up": "transformer.layer.{}.ffn.lin1",
        "layers.mlp.down": "transformer.layer.{}.ffn.lin2",
        "layers.mlp_norm": "transformer.layer.{}.output_layer_norm",
    },
    classes={"masked": "DistilBertForMaskedLM", "qa": "DistilBertForQuestionAnswering",
             **label_classes("DistilBert")},
    head_modules={
        "masked": {"head.dense": "vocab_transform", "head.norm": "vocab_layer_norm", "head": "vocab_projector"},
        "qa": {"head": "qa_outputs"}, "sequence": ROWS, "token": TOKEN, "choice": ROWS,
    },
    dropouts={"embed": "embeddings.dropout", "layers.attn.weights": "transformer.layer.{}.attention.weights",
              "layers.mlp": "transformer.layer.{}.ffn.dropout"},
    head_dropouts=dict.fromkeys(("qa", "sequence", "token", "choice"), {"head": "dropout"}),
    classifiers={"qa": lambda config: Classifier(dropout=config.qa_dropout), "sequence": sequence_head,
                 "token": lambda config: Classifier(dropout=config.dropout), "choice": sequence_head},
    tied={"masked": {"vocab_projector.weight": "embed.tokens.weight"}},
)
