"""XLM-R (Conneau et al. 2020): RoBERTa of a hundred languages."""

from dataclasses import replace

from jax_engine.models.families import roberta

# Its classes make the head before the network, so torch knows the tied table by the head's name.
FAMILY = replace(
    roberta.FAMILY, classes={"masked": "XLMRobertaForMaskedLM", "qa": "XLMRobertaForQuestionAnswering"},
    first=("masked", "qa"),
    renamed={"masked": {"roberta.embeddings.word_embeddings.weight": "lm_head.decoder.weight"}})
