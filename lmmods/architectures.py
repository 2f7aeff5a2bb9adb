"""What is known here of transformers' configurations, in both engines."""

from typing import Any

# In RoBERTa and its kin the first token's position is the one after the padding token's id.
COUNT_FROM_PADDING = ("roberta", "camembert", "data2vec-text", "mpnet", "longformer")


def position_limit(fields: dict[str, Any]) -> int | None:
    """Longest row that a configuration of these fields allows, where it says so."""
    positions = fields.get("max_position_embeddings", fields.get("n_positions"))
    if positions and any(kin in fields.get("model_type", "") for kin in COUNT_FROM_PADDING):
        return positions - (1 if fields.get("pad_token_id") is None else fields["pad_token_id"]) - 1
    return positions
