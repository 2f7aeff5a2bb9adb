"""ELECTRA (Clark et al. 2020): BERT with an embedding that may be narrower than the network.

The masked head is the generator's; the discriminator, which detects replaced tokens, is the model to fine-tune.
"""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Classifier, Family, refuse
from jax_engine.models.families.bert import DROPOUTS, MODULES, TOKEN, bert_like, label_classes, token_head
from jax_engine.models.families.roberta import TWO_DROPOUTS, TWO_LAYERS, two_layers
from jax_engine.models.linear import check_activation


def architecture(config: PreTrainedConfig) -> Architecture:
    narrow = config.embedding_size if config.embedding_size != config.hidden_size else None
    return bert_like(config, embedding_size=narrow, head_activation="gelu")


def of_summary(config: PreTrainedConfig) -> Classifier:
    refuse(config, summary_type="first", summary_use_proj=True, summary_proj_to_labels=False)
    activation = config.summary_activation
    return Classifier("first", dense=True, activation=check_activation(activation) if activation else None,
                      dense_dropout=getattr(config, "summary_first_dropout", 0.0), dropout=config.summary_last_dropout)


EMBED = {name: torch_name for name, torch_name in MODULES.items() if name.startswith("embed.")}
FAMILY = Family(
    architecture=architecture,
    base="electra",
    modules=EMBED | {"embed.project": "embeddings_project"} | MODULES,
    classes={"masked": "ElectraForMaskedLM", "qa": "ElectraForQuestionAnswering", **label_classes("Electra")},
    head_modules={
        "masked": {"head.norm": "generator_predictions.LayerNorm", "head.dense": "generator_predictions.dense",
                   "head": "generator_lm_head"},
        "qa": {"head": "qa_outputs"}, "sequence": TWO_LAYERS, "token": TOKEN,
        "choice": {"head.dense": "sequence_summary.summary", "head": "classifier"},
    },
    dropouts=DROPOUTS,
    head_dropouts={"sequence": TWO_DROPOUTS, "token": {"head": "dropout"}, "choice": {
        "head.dense": "sequence_summary.first_dropout", "head": "sequence_summary.last_dropout"}},
    classifiers={"sequence": two_layers("gelu"), "token": token_head, "choice": of_summary},
    tied={"masked": {"generator_lm_head.weight": "embed.tokens.weight"}},
)
