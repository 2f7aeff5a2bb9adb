"""A micro-batch in pieces: sums over its rows do not care how the rows are cut, but a CPU does.

Rows of similar length share a piece, which is padded to its own longest row, and what a piece computes stays in the
cache of the processor. Time and memory shrink; loss and gradient are the same sums in another order.
"""

import torch
from torch import Tensor

MULTIPLE = 8  # lengths of pieces, like those of batches
# A piece has about this many hidden features: small enough for a processor's cache. Products are fast from 512 rows on.
FEATURES, LEAST_TOKENS = 2**18, 512


def default_size(hidden_size: int) -> int:
    """Tokens of a piece that a CPU computes fast."""
    return max(FEATURES // hidden_size, LEAST_TOKENS)


def cut(batch: dict[str, Tensor], num_tokens: int) -> list[dict[str, Tensor]]:
    """Pieces of whole rows with at most `num_tokens` tokens each, padding included; a longer row is one alone.

    Args:
        batch: Arrays with one leading length; `attention_mask` [B, T] tells what is padding. Padding on the right that
            no row of a piece needs is cut off; positions on the left stay where they are.
        num_tokens: Bound on rows times length.
    """
    mask = batch["attention_mask"]
    lengths = mask.shape[1] - mask.flip(1).argmax(1)  # up to the last real token
    lengths = (-(-lengths // MULTIPLE) * MULTIPLE).clamp(max=mask.shape[1])
    order = torch.argsort(lengths, descending=True, stable=True)
    pieces, start, longest = [], 0, lengths[order].tolist()
    while start < len(order):
        size = max(num_tokens // longest[start], 1)
        pieces.append((order[start : start + size], longest[start]))
        start += size
    if len(pieces) == 1 and longest[0] == mask.shape[1]:
        return [batch]
    return [{name: values[rows, :length] if values.ndim > 1 else values[rows] for name, values in batch.items()}
            for rows, length in pieces]
