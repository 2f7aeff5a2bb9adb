"""Micro-batches of an optimiser step: the sums over them, and their chunks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from lmmods.core.errors import UserError
from lmmods.core.labels import has_tokens
from lmmods.torch_engine.nn.loss import LossSums


@dataclass(frozen=True)
class StepSums:
    """Sums of an optimiser step over all processes.

    Args:
        numbers: [5 + 2 M] float64, on the device: summed loss, weight, real tokens, rows, summed values and weight of
            each metric, norm of the gradient before clipping.
        target_weight: Weight that gradients were divided by, which is that of the losses.
        lr: Learning rate of the step.
        metric_names: Names of the M metrics.
    """

    numbers: Tensor
    target_weight: Tensor
    lr: float
    metric_names: tuple[str, ...] = ()

    def step_metrics(self) -> dict[str, float]:
        """Return them by name, with the mean loss; metrics of weight 0 are left out. Synchronises with the device."""
        total, weight, num_tokens, num_rows, *sums, grad_norm = self.numbers.tolist()
        metrics = {name: value / count for name, value, count in zip(self.metric_names, sums[::2], sums[1::2],
                                                                     strict=True) if count}
        return {"loss": total / (weight or 1), "weight": weight, "lr": self.lr, "grad_norm": grad_norm,
                "num_tokens": num_tokens, "num_rows": num_rows, **metrics}


def stack_sums(sums: LossSums, num_tokens: Tensor, num_rows: Tensor) -> Tensor:
    """Return the numbers of `StepSums`, without the norm, for a chunk of a micro-batch."""
    # float64, as float32 rounds counts of tokens from 2^24 on.
    numbers = torch.stack([sums.total.detach(), sums.weight, num_tokens, num_rows]).double()
    return numbers if sums.metrics is None else torch.cat([numbers, sums.metrics.flatten().double()])


def sum_over_processes(numbers: Tensor, strategy: Any) -> Tensor:
    """Sum numbers over all processes, in place. A collective call."""
    # Not `strategy.reduce`, which waits for all processes a second time.
    if isinstance(strategy, ParallelStrategy):
        torch.distributed.all_reduce(numbers)
    return numbers


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Undo the context of the forward pass, in which Lightning runs all of `training_step`.

    Otherwise products in the backward passes of custom functions and in optimisers would be rounded to 16 bits.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(default)


def gather(parts: dict[int, Any], world_size: int) -> dict[int, Any]:
    """Merge the mappings of all processes, on every process. A collective call."""
    if world_size == 1:
        return parts
    everywhere: list = [None] * world_size
    torch.distributed.all_gather_object(everywhere, parts)
    return {key: value for part in everywhere for key, value in part.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Chunks of a micro-batch: sums over rows do not depend on how the rows are split, but speed on a CPU does.
#
# Rows of similar length share a chunk, which is padded to its own longest row, and a chunk's activations fit the
# processor's cache. This saves time and memory; loss and gradient are the same sums in another order.

MULTIPLE = 8  # lengths of chunks are multiples of this, like those of batches
# Approximate hidden features of a chunk, to fit the cache, and its least tokens: each chunk dequantises the weights
# anew, and fewer rows make matrix products less efficient.
FEATURES, LEAST_TOKENS = 2**18, 1024


def tokens_per_piece(asked: int | None, is_whole: bool, device: torch.device, hidden_size: int) -> int:
    """Return the tokens per chunk of a micro-batch; 0 for no chunks.

    GPUs are most efficient on large products, so only CPUs split by default.

    Args:
        asked: `piece_tokens` of the recipe.
        is_whole: True if each process has all parameters. Processes with shards gather them for each chunk, so all of
            them would need as many chunks.

    Raises:
        UserError: `piece_tokens` is set where parameters are sharded.
    """
    if asked and not is_whole:
        raise UserError(f"model.piece_tokens is {asked}, but micro-batches cannot be split where parameters are "
                        "sharded over processes: set it to 0 or null.")
    if asked is not None:
        return asked
    return max(FEATURES // hidden_size, LEAST_TOKENS) if is_whole and device.type == "cpu" else 0


def split_rows(batch: dict[str, Tensor], num_tokens: int) -> list[dict[str, Tensor]]:
    """Split a batch into chunks of whole rows of at most `num_tokens` tokens, padding included.

    A longer row forms a chunk of its own. Padding on the right that no row of a chunk needs is removed; positions on
    the left are kept.

    Args:
        batch: Tensors with the same first dimension B; `attention_mask` is [B, T], or [B, A, T] if a row consists of
            several sequences.
    """
    mask = batch["attention_mask"]
    width, num_answers = mask.shape[-1], mask[0].numel() // mask.shape[-1]
    lengths = width - mask.flip(-1).argmax(-1)  # up to the last real token
    lengths = lengths.view(len(mask), -1).amax(1)  # [B]: the longest sequence of each row
    lengths = (-(-lengths // MULTIPLE) * MULTIPLE).clamp(max=width)
    # Longest first: the first row of a chunk determines its length. Stable, so equal lengths keep their order.
    order = torch.argsort(lengths, descending=True, stable=True)
    chunks, start, longest = [], 0, lengths[order].tolist()
    while start < len(order):
        size = max(num_tokens // (num_answers * longest[start]), 1)  # all rows as wide as the first
        chunks.append((order[start : start + size], longest[start]))
        start += size
    if len(chunks) == 1 and longest[0] == width:  # nothing to split or trim
        return [batch]
    # Columns without a token axis have values per row.
    return [{name: values[rows][..., :length] if has_tokens(name, values.ndim, values.is_floating_point(),
                                                            mask.ndim - 1) else values[rows]
             for name, values in batch.items()}
            for rows, length in chunks]
