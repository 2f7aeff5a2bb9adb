"""Micro-batches of an optimiser step: sums over them, and their split into chunks."""

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
        numbers: [5 + 2 M] float64, on the device: summed loss, weight, number of real tokens, number of rows, summed
            values and weight of each metric, gradient norm before clipping.
        target_weight: Weight that gradients were divided by; must equal the weight of the losses.
        lr: Learning rate of the step.
        metric_names: Names of the M metrics.
    """

    numbers: Tensor
    target_weight: Tensor
    lr: float
    metric_names: tuple[str, ...] = ()

    def step_metrics(self) -> dict[str, float]:
        """Return the mean loss and other metrics by name, without those of weight 0. Synchronises with the device."""
        total, weight, num_tokens, num_rows, *sums, grad_norm = self.numbers.tolist()
        metrics = {name: value / count for name, value, count in zip(self.metric_names, sums[::2], sums[1::2],
                                                                     strict=True) if count}
        return {"loss": total / (weight or 1), "weight": weight, "lr": self.lr, "grad_norm": grad_norm,
                "num_tokens": num_tokens, "num_rows": num_rows, **metrics}


def stack_sums(sums: LossSums, num_tokens: Tensor, num_rows: Tensor) -> Tensor:
    """Return `StepSums.numbers` of a chunk of a micro-batch, without the gradient norm."""
    # float64, as float32 rounds token counts from 2^24 on.
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
    """Leave the autocast context in which Lightning runs all of `training_step`.

    Otherwise matrix products in custom backward passes and in optimisers would be rounded to 16 bits.
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
    all_parts: list = [None] * world_size
    torch.distributed.all_gather_object(all_parts, parts)
    return {key: value for part in all_parts for key, value in part.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Splitting a micro-batch into chunks saves time and memory on a CPU.
#
# Rows of similar length share a chunk, which is padded to its own longest row, and a chunk's activations fit the
# processor's cache. Loss and gradient are the same sums in another order.

MULTIPLE = 8  # chunk lengths are multiples of this, as are batch lengths
# Approximate number of hidden features of a chunk, to fit the cache, and its minimum number of tokens: every chunk
# dequantises the weights again, and fewer rows make matrix products less efficient.
FEATURES, MIN_TOKENS = 2**18, 1024


def choose_chunk_tokens(piece_tokens: int | None, is_whole: bool, device: torch.device, hidden_size: int) -> int:
    """Return the number of tokens per chunk of a micro-batch, 0 for no chunks.

    GPUs are most efficient on large products, so only CPUs split by default.

    Args:
        piece_tokens: Key of the recipe.
        is_whole: True if each process has all parameters. Processes with shards gather them for each chunk, so they
            would all need the same number of chunks.

    Raises:
        UserError: `piece_tokens` is set where parameters are sharded.
    """
    if piece_tokens and not is_whole:
        raise UserError(f"model.piece_tokens is {piece_tokens}, but micro-batches cannot be split when parameters are "
                        "sharded over processes. Set it to 0 or null.")
    if piece_tokens is not None:
        return piece_tokens
    return max(FEATURES // hidden_size, MIN_TOKENS) if is_whole and device.type == "cpu" else 0


def split_rows(batch: dict[str, Tensor], num_tokens: int) -> list[dict[str, Tensor]]:
    """Split a batch into chunks of whole rows of at most `num_tokens` tokens, padding included.

    A longer row is a chunk by itself. Right padding that no row of a chunk needs is removed; left padding stays.

    Args:
        batch: Tensors [B, ...]; `attention_mask` is [B, T], or [B, A, T] if a row consists of several sequences.
    """
    mask = batch["attention_mask"]
    width, num_answers = mask.shape[-1], mask[0].numel() // mask.shape[-1]
    lengths = width - mask.flip(-1).argmax(-1)  # including the last real token
    lengths = lengths.view(len(mask), -1).amax(1)  # [B], of the longest sequence of each row
    lengths = (-(-lengths // MULTIPLE) * MULTIPLE).clamp(max=width)
    # Longest first, so that the first row of a chunk determines its length. Stable, so equal lengths keep their order.
    order = torch.argsort(lengths, descending=True, stable=True)
    chunks, start, sorted_lengths = [], 0, lengths[order].tolist()
    while start < len(order):
        size = max(num_tokens // (num_answers * sorted_lengths[start]), 1)  # all rows as wide as the first
        chunks.append((order[start : start + size], sorted_lengths[start]))
        start += size
    if len(chunks) == 1 and sorted_lengths[0] == width:  # nothing to split or trim
        return [batch]
    # Columns without a token axis have values per row.
    return [{name: values[rows][..., :length] if has_tokens(name, values.ndim, values.is_floating_point(),
                                                            mask.ndim - 1) else values[rows]
             for name, values in batch.items()}
            for rows, length in chunks]
