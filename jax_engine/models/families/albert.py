"""ALBERT (Lan et al. 2019): BERT with shared layers and a narrow embedding."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Classifier, Family
from jax_engine.models.families.bert import TOKEN, bert_like, label_classes


def architecture(config: PreTrainedConfig) -> Architecture:
    depth, inner = config.num_hidden_layers, config.inner_group_num
    groups = [int(n / (depth / config.num_hidden_groups)) for n in range(depth)]
    passes = tuple(group * inner + index for group in groups for index in range(inner))
    scale = (config.hidden_size // config.num_attention_heads) ** -0.5
    return bert_like(config, num_layers=len(passes), passes=passes, layers_per_group=inner,
                     windows=(None,) * len(passes), attention_scales=(scale,) * len(passes),
                     embedding_size=config.embedding_size, mlp_dropout=0.0)


def pooler_head(config: PreTrainedConfig) -> Classifier:
    return Classifier("first", dense=True, activation="tanh", dropout=config.classifier_dropout_prob)


def token_head(config: PreTrainedConfig) -> Classifier:
    return Classifier(dropout=config.classifier_dropout_prob)


POOLED = {"head.dense": "albert.pooler", "head": "classifier"}
LAYER = "encoder.albert_layer_groups.{}.albert_layers.{}"
FAMILY = Family(
    architecture=architecture,
    base="albert",
    modules={
        "embed.tokens": "embeddings.word_embeddings",
        "embed.positions": "embeddings.position_embeddings",
        "embed.types": "embeddings.token_type_embeddings",
        "embed.norm": "embeddings.LayerNorm",
        "embed.project": "encoder.embedding_hidden_mapping_in",
        "layers.mlp_norm": f"{LAYER}.full_layer_layer_norm",
        "layers.attn.q": f"{LAYER}.attention.query",
        "layers.attn.k": f"{LAYER}.attention.key",
        "layers.attn.v": f"{LAYER}.attention.value",
        "layers.attn.o": f"{LAYER}.attention.dense",
        "layers.attn_norm": f"{LAYER}.attention.LayerNorm",
        "layers.mlp.up": f"{LAYER}.ffn",
        "layers.mlp.down": f"{LAYER}.ffn_output",
    },
    classes={"masked": "AlbertForMaskedLM", "qa": "AlbertForQuestionAnswering", **label_classes("Albert")},
    head_modules={
        "masked": {"head": "predictions", "head.norm": "predictions.LayerNorm", "head.dense": "predictions.dense"},
        "qa": {"head": "qa_outputs"}, "sequence": POOLED, "token": TOKEN, "choice": POOLED,
    },
    dropouts={"embed": "embeddings.dropout", "layers.attn.weights": f"{LAYER}.attention.weights",
              "layers.attn": f"{LAYER}.attention.output_dropout"},
    head_dropouts=dict.fromkeys(("sequence", "token", "choice"), {"head": "dropout"}),
    classifiers={"sequence": pooler_head, "token": token_head, "choice": pooler_head},
    tied={"masked": {"predictions.decoder.weight": "embed.tokens.weight", "predictions.decoder.bias": "head.bias"}},
)
