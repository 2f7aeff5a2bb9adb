"""SmolVLM (Marafioti et al. 2025): Idefics 3 in small."""

from dataclasses import replace

from jax_engine.models.families import idefics3

FAMILY = replace(idefics3.FAMILY, classes={"causal": "SmolVLMForConditionalGeneration"})
