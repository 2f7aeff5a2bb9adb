"""XLM-R (Conneau et al. 2020): multilingual RoBERTa."""

from dataclasses import replace

from jax_engine.models.families import roberta
from jax_engine.models.families.bert import label_classes

# Its classes create the head before the network, so torch registers the tied table under the head's name.
FAMILY = replace(
    roberta.FAMILY, classes={"masked": "XLMRobertaForMaskedLM", "qa": "XLMRobertaForQuestionAnswering",
                             **label_classes("XLMRoberta")},
    first=("masked", "qa", "sequence", "token", "choice"),
    renamed={"masked": {"roberta.embeddings.word_embeddings.weight": "lm_head.decoder.weight"}})
