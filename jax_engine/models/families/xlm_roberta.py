"""XLM-R (Conneau et al. 2020): multilingual RoBERTa."""

from dataclasses import replace

from jax_engine.models.families import roberta

# Its classes create the head before the network, so torch registers the tied table under the head's name.
FAMILY = replace(
    roberta.FAMILY, classes={"masked": "XLMRobertaForMaskedLM", "qa": "XLMRobertaForQuestionAnswering"},
    first=("masked", "qa"),
    renamed={"masked": {"roberta.embeddings.word_embeddings.weight": "lm_head.decoder.weight"}})
