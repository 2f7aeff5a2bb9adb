"""RoBERTa (Liu et al. 2019): BERT with positions that count real tokens after the padding id."""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Family
from jax_engine.models.families.bert import DROPOUTS, MODULES, bert_like
from lmmods.core.errors import UserError


def architecture(config: PreTrainedConfig) -> Architecture:
    if config.pad_token_id is None:
        raise UserError(f"model.config: {config.model_type} counts positions from pad_token_id, which is missing.")
    return bert_like(config, positions_after_padding=True, head_activation="gelu")


FAMILY = Family(
    architecture=architecture,
    base="roberta",
    modules={name: MODULES[name] for name in ("embed.tokens", "embed.types", "embed.norm")} | MODULES,
    classes={"masked": "RobertaForMaskedLM", "qa": "RobertaForQuestionAnswering"},
    head_modules={
        "masked": {"head": "lm_head", "head.dense": "lm_head.dense", "head.norm": "lm_head.layer_norm"},
        "qa": {"head": "qa_outputs"},
    },
    dropouts=DROPOUTS,
    tied={"masked": {"lm_head.decoder.weight": "embed.tokens.weight", "lm_head.decoder.bias": "head.bias"}},
)
