"""ELECTRA (Clark et al. 2020): BERT with an embedding that may be narrower than the network.

The masked head is the generator's; the discriminator, which detects replaced tokens, is the model to fine-tune.
"""

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Family
from jax_engine.models.families.bert import DROPOUTS, MODULES, bert_like


def architecture(config: PreTrainedConfig) -> Architecture:
    narrow = config.embedding_size if config.embedding_size != config.hidden_size else None
    return bert_like(config, embedding_size=narrow, head_activation="gelu")


EMBED = {name: theirs for name, theirs in MODULES.items() if name.startswith("embed.")}
FAMILY = Family(
    architecture=architecture,
    base="electra",
    modules=EMBED | {"embed.project": "embeddings_project"} | MODULES,
    classes={"masked": "ElectraForMaskedLM", "qa": "ElectraForQuestionAnswering"},
    head_modules={
        "masked": {"head.norm": "generator_predictions.LayerNorm", "head.dense": "generator_predictions.dense",
                   "head": "generator_lm_head"},
        "qa": {"head": "qa_outputs"},
    },
    dropouts=DROPOUTS,
    tied={"masked": {"generator_lm_head.weight": "embed.tokens.weight"}},
)
