"""DeBERTa 2 and 3 (He et al. 2021): BERT with disentangled attention to relative positions."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Classifier, Convolution, Family, refuse
from jax_engine.models.families.bert import DROPOUTS, MODULES, TOKEN, bert_like, label_classes
from jax_engine.models.linear import check_activation
from jax_engine.models.relative import Relative


def architecture(config: PreTrainedConfig) -> Architecture:
    refuse(config, legacy=True, embedding_size=config.hidden_size)
    kinds = tuple(kind for kind in ("c2p", "p2c") if kind in (config.pos_att_type or ()))
    scale = (config.hidden_size // config.num_attention_heads * (1 + len(kinds))) ** -0.5
    return bert_like(config, positions="learned" if config.position_biased_input else "none",
                     attention_scales=(scale,) * config.num_hidden_layers, relative=_relative(config, kinds),
                     convolution=_convolution(config))


def _convolution(config: PreTrainedConfig) -> Convolution | None:
    width = getattr(config, "conv_kernel_size", 0)
    if width <= 0:
        return None
    if width % 2 == 0:  # transformers' network fails with an even width
        refuse(config, conv_kernel_size=width - 1)
    return Convolution(width, getattr(config, "conv_groups", 1),
                       check_activation(getattr(config, "conv_act", "tanh")))


def _relative(config: PreTrainedConfig, kinds: tuple[str, ...]) -> Relative | None:
    if not config.relative_attention:
        return None
    # Optional fields of the configuration, with transformers' defaults.
    buckets, norms = getattr(config, "position_buckets", -1), getattr(config, "norm_rel_ebd", "none")
    distance = config.max_relative_positions
    distance = distance if distance > 0 else config.max_position_embeddings
    return Relative(span=buckets if buckets > 0 else distance, max_distance=distance if buckets > 0 else None,
                    scores=kinds, normed="layer_norm" in norms.lower(), shared=getattr(config, "share_att_key", False))


def pooler_head(config: PreTrainedConfig) -> Classifier:
    refuse(config, pooler_hidden_size=config.hidden_size)
    rate = getattr(config, "cls_dropout", None)
    return Classifier("first", dense=True, activation=check_activation(config.pooler_hidden_act),
                      dense_dropout=config.pooler_dropout,
                      dropout=config.hidden_dropout_prob if rate is None else rate)


POOLED = {"head.dense": "pooler.dense", "head": "classifier"}
POOLED_DROPOUTS = {"head.dense": "pooler.dropout", "head": "dropout"}
SELF = "encoder.layer.{}.attention.self"
PROJECTIONS = {
    "layers.attn.q": f"{SELF}.query_proj",
    "layers.attn.k": f"{SELF}.key_proj",
    "layers.attn.v": f"{SELF}.value_proj",
    "layers.attn.place_k": f"{SELF}.pos_key_proj",
    "layers.attn.place_q": f"{SELF}.pos_query_proj",
}
FAMILY = Family(
    architecture=architecture,
    base="deberta",
    modules={name: torch_name for name, torch_name in MODULES.items() if name.startswith("embed.")} | PROJECTIONS | {
        name: torch_name for name, torch_name in MODULES.items()
        if name.startswith("layers.") and name not in PROJECTIONS} | {
        "embed.relative": "encoder.rel_embeddings", "embed.relative_norm": "encoder.LayerNorm",
        "embed.conv": "encoder.conv.conv", "embed.conv_norm": "encoder.conv.LayerNorm"},
    classes={"masked": "DebertaV2ForMaskedLM", "qa": "DebertaV2ForQuestionAnswering",
             **label_classes("DebertaV2")},
    head_modules={
        "masked": {"head": "cls.predictions", "head.dense": "cls.predictions.transform.dense",
                   "head.norm": "cls.predictions.transform.LayerNorm"},
        "qa": {"head": "qa_outputs"}, "sequence": POOLED, "token": TOKEN, "choice": POOLED,
    },
    dropouts=DROPOUTS | {"embed.conv": "encoder.conv.dropout"},
    head_dropouts={"sequence": POOLED_DROPOUTS, "token": {"head": "dropout"}, "choice": POOLED_DROPOUTS},
    classifiers={"sequence": pooler_head, "token": lambda config: Classifier(dropout=config.hidden_dropout_prob),
                 "choice": pooler_head},
    tied={"masked": {"cls.predictions.decoder.weight": "embed.tokens.weight",
                     "cls.predictions.decoder.bias": "head.bias"}},
)
