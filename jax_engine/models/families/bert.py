"""BERT (Devlin et al. 2019), and helpers for its descendants."""

from typing import Any

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Classifier, Family, Head, initial_std, plain_layers, refuse
from jax_engine.models.linear import check_activation

MODULES = {
    "embed.tokens": "embeddings.word_embeddings",
    "embed.positions": "embeddings.position_embeddings",
    "embed.types": "embeddings.token_type_embeddings",
    "embed.norm": "embeddings.LayerNorm",
    "layers.attn.q": "encoder.layer.{}.attention.self.query",
    "layers.attn.k": "encoder.layer.{}.attention.self.key",
    "layers.attn.v": "encoder.layer.{}.attention.self.value",
    "layers.attn.o": "encoder.layer.{}.attention.output.dense",
    "layers.attn_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "layers.mlp.up": "encoder.layer.{}.intermediate.dense",
    "layers.mlp.down": "encoder.layer.{}.output.dense",
    "layers.mlp_norm": "encoder.layer.{}.output.LayerNorm",
}
DROPOUTS = {
    "embed": "embeddings.dropout",
    "layers.attn.weights": "encoder.layer.{}.attention.self.weights",
    "layers.attn": "encoder.layer.{}.attention.output.dropout",
    "layers.mlp": "encoder.layer.{}.output.dropout",
}


def bert_like(config: PreTrainedConfig, **overrides: Any) -> Architecture:
    """Return the architecture of a BERT-like network; `overrides` override fields."""
    refuse(config, is_decoder=False, add_cross_attention=False, tie_word_embeddings=True,
           position_embedding_type="absolute")
    head_dim, std = config.hidden_size // config.num_attention_heads, initial_std(config)
    act = check_activation(config.hidden_act)
    return Architecture(**{
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads, "num_kv_heads": config.num_attention_heads, "head_dim": head_dim,
        "mlp_size": config.intermediate_size, "activation": act, "head_activation": act,
        "norm_eps": config.layer_norm_eps, "init_std": std, "layer_std": std, "residual_std": std, "causal": False,
        "norms": ("sum",), "head_bias": True, "max_positions": config.max_position_embeddings,
        "num_types": config.type_vocab_size, "padding_id": config.pad_token_id,
        "embedding_dropout": config.hidden_dropout_prob, "attention_dropout": config.attention_probs_dropout_prob,
        "residual_dropout": config.hidden_dropout_prob, "mlp_dropout": config.hidden_dropout_prob,
        **plain_layers(config.num_hidden_layers, head_dim**-0.5), **overrides})


def head_dropout(config: PreTrainedConfig) -> float:
    """Return the dropout rate of label heads, from the fields of BERT and its descendants."""
    return config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout


def label_classes(name: str) -> dict[Head, str]:
    """Return transformers' classes of the label heads."""
    return {"sequence": f"{name}ForSequenceClassification", "token": f"{name}ForTokenClassification",
            "choice": f"{name}ForMultipleChoice"}


def pooler_head(config: PreTrainedConfig) -> Classifier:
    return Classifier("first", dense=True, activation="tanh", dropout=head_dropout(config))


def token_head(config: PreTrainedConfig) -> Classifier:
    return Classifier(dropout=head_dropout(config))


TOKEN, POOLED = {"head": "classifier"}, {"head.dense": "bert.pooler.dense", "head": "classifier"}
FAMILY = Family(
    architecture=bert_like,
    base="bert",
    modules=MODULES,
    classes={"masked": "BertForMaskedLM", "qa": "BertForQuestionAnswering", **label_classes("Bert")},
    head_modules={
        "masked": {"head": "cls.predictions", "head.dense": "cls.predictions.transform.dense",
                   "head.norm": "cls.predictions.transform.LayerNorm"},
        "qa": {"head": "qa_outputs"}, "sequence": POOLED, "token": TOKEN, "choice": POOLED,
    },
    dropouts=DROPOUTS,
    head_dropouts=dict.fromkeys(("sequence", "token", "choice"), {"head": "dropout"}),
    classifiers={"sequence": pooler_head, "token": token_head, "choice": pooler_head},
    tied={"masked": {"cls.predictions.decoder.weight": "embed.tokens.weight",
                     "cls.predictions.decoder.bias": "head.bias"}},
)
