"""RoBERTa (Liu et al. 2019): BERT with positions that count real tokens after the padding id."""

from collections.abc import Callable

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Classifier, Family
from jax_engine.models.families.bert import DROPOUTS, MODULES, TOKEN, bert_like, head_dropout, label_classes, token_head
from lmmods.core.errors import UserError


def architecture(config: PreTrainedConfig) -> Architecture:
    if config.pad_token_id is None:
        raise UserError(f"model.config: {config.model_type} counts positions from pad_token_id, which is missing. Set "
                        "it.")
    return bert_like(config, positions_after_padding=True, head_activation="gelu")


def two_layers(activation: str) -> Callable[[PreTrainedConfig], Classifier]:
    """Return the description of a sequence head with a dense layer, and dropout before both layers."""
    def sequence_head(config: PreTrainedConfig) -> Classifier:
        rate = head_dropout(config)
        return Classifier("first", dense=True, activation=activation, dense_dropout=rate, dropout=rate)

    return sequence_head


def pooler_head(config: PreTrainedConfig) -> Classifier:
    return Classifier("first", dense=True, activation="tanh", dropout=config.hidden_dropout_prob)


TWO_LAYERS = {"head.dense": "classifier.dense", "head": "classifier.out_proj"}
TWO_DROPOUTS = {"head.dense": "classifier.dropout", "head": "classifier.dropout"}
FAMILY = Family(
    architecture=architecture,
    base="roberta",
    modules={name: MODULES[name] for name in ("embed.tokens", "embed.types", "embed.norm")} | MODULES,
    classes={"masked": "RobertaForMaskedLM", "qa": "RobertaForQuestionAnswering", **label_classes("Roberta")},
    head_modules={
        "masked": {"head": "lm_head", "head.dense": "lm_head.dense", "head.norm": "lm_head.layer_norm"},
        "qa": {"head": "qa_outputs"}, "sequence": TWO_LAYERS, "token": TOKEN,
        "choice": {"head.dense": "roberta.pooler.dense", "head": "classifier"},
    },
    dropouts=DROPOUTS,
    head_dropouts={"sequence": TWO_DROPOUTS, "token": {"head": "dropout"}, "choice": {"head": "dropout"}},
    classifiers={"sequence": two_layers("tanh"), "token": token_head, "choice": pooler_head},
    tied={"masked": {"lm_head.decoder.weight": "embed.tokens.weight", "lm_head.decoder.bias": "head.bias"}},
)
