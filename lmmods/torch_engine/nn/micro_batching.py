"""A micro-batch in pieces: sums over its rows do not depend on how the rows are split, but the speed of a CPU does.

Rows of similar length share a piece, which is padded to its own longest row, and what a piece computes stays in the
cache of the processor. Time and memory shrink; loss and gradient are the same sums in another order.
"""

import torch
from torch import Tensor

from lmmods.core.errors import UserError

MULTIPLE = 8  # lengths of pieces, like those of batches
# A piece has about this many hidden features: small enough for a processor's cache. Products are fast from 512 rows on.
FEATURES, LEAST_TOKENS = 2**18, 512


def tokens_per_piece(asked: int | None, is_alone: bool, device: torch.device, hidden_size: int) -> int:
    """Tokens of a piece of a micro-batch; 0 computes it whole.

    Several processes meet in each backward pass, and GPUs like large products: only a CPU by itself splits. Raises
    UserError: `piece_tokens` asks for what several processes, or 16-mixed with its scaled gradients, cannot do.

    Args:
        asked: `piece_tokens` of the recipe.
        is_alone: Whether one process trains, without scaling its gradients.
    """
    if asked and not is_alone:
        raise UserError(f"model.piece_tokens is {asked}, but only one process splits micro-batches, and "
                        "not with precision 16-mixed: set it to 0 or null.")
    if asked is not None:
        return asked
    return max(FEATURES // hidden_size, LEAST_TOKENS) if is_alone and device.type == "cpu" else 0


def split_rows(batch: dict[str, Tensor], num_tokens: int) -> list[dict[str, Tensor]]:
    """Pieces of whole rows with at most `num_tokens` tokens each, padding included; a longer row is one alone.

    Args:
        batch: Arrays with one leading length; `attention_mask` [B, T], or [B, A, T] where a row is several sequences,
            tells what is padding. Padding on the right that no row of a piece needs is cut off; positions on the left
            stay where they are.
    """
    mask = batch["attention_mask"]
    width, num_answers = mask.shape[-1], mask[0].numel() // mask.shape[-1]
    lengths = width - mask.flip(-1).argmax(-1)  # up to the last real token
    lengths = lengths.view(len(mask), -1).amax(1)
    lengths = (-(-lengths // MULTIPLE) * MULTIPLE).clamp(max=width)
    order = torch.argsort(lengths, descending=True, stable=True)
    pieces, start, longest = [], 0, lengths[order].tolist()
    while start < len(order):
        size = max(num_tokens // (num_answers * longest[start]), 1)
        pieces.append((order[start : start + size], longest[start]))
        start += size
    if len(pieces) == 1 and longest[0] == width:
        return [batch]
    return [{name: values[rows][..., :length] if values.ndim == mask.ndim else values[rows]
             for name, values in batch.items()}
            for rows, length in pieces]
