"""Gradient accumulation: loss sums and gradients of a step's micro-batches are summed and divided once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmmods.core.errors import UserError
from lmmods.core.labels import has_tokens
from lmmods.runs.step_metrics import check_finite
from lmmods.torch_engine.compat.torch import scale_all
from lmmods.torch_engine.nn import sharding
from lmmods.torch_engine.nn.loss import LossSums
from lmmods.torch_engine.nn.optim import total_norm


@dataclass(frozen=True)
class StepSums:
    """Sums of an optimiser step over all processes.

    Args:
        numbers: [5 + 2 M] float64, on the device: summed loss, weight, real tokens, rows, summed values and weight of
            each metric, norm of the averaged gradient.
        metric_names: Names of the M metrics.
    """

    numbers: Tensor
    lr: float
    metric_names: tuple[str, ...] = ()

    def step_metrics(self) -> dict[str, float]:
        """Return them by name, with the mean loss; metrics of weight 0 are left out. Synchronises with the device."""
        total, weight, num_tokens, num_rows, *sums, grad_norm = self.numbers.tolist()
        metrics = {name: value / count for name, value, count in zip(self.metric_names, sums[::2], sums[1::2],
                                                                     strict=True) if count}
        return {"loss": total / (weight or 1), "weight": weight, "lr": self.lr, "grad_norm": grad_norm,
                "num_tokens": num_tokens, "num_rows": num_rows, **metrics}


class GradientAccumulation:
    """Running sums of the current optimiser step, and the metrics of the last one."""

    # Gradients of summed losses are large. Dividing by a power of two keeps them in the range of fp16 and is exact.
    GRADIENT_SCALE = 1024.0

    def __init__(self, metric_names: tuple[str, ...] = ()) -> None:
        self._metric_names = metric_names
        self._sums: Tensor | None = None
        self.last: StepSums | None = None

    @classmethod
    def divisor(cls, accumulated: int) -> float:
        """Return the divisor of accumulating gradients of summed losses.

        It is the product of the divisions in `training_step` (GRADIENT_SCALE) and in Lightning (`accumulated`).

        Args:
            accumulated: `accumulate_grad_batches` of the trainer.
        """
        return cls.GRADIENT_SCALE * accumulated

    @property
    def is_open(self) -> bool:
        """True if micro-batches have been added since the last optimiser step."""
        return self._sums is not None

    def add(self, sums: LossSums, num_tokens: Tensor, num_rows: Tensor) -> None:
        """Add a chunk of a micro-batch: its loss sums, number of real (not padding) tokens and of rows."""
        # float64, as float32 rounds counts of tokens from 2^24 on.
        new = torch.stack([sums.total.detach(), sums.weight, num_tokens, num_rows]).double()
        if sums.metrics is not None:
            new = torch.cat([new, sums.metrics.flatten().double()])
        self._sums = new if self._sums is None else self._sums + new

    def sums(self) -> Tensor:
        """Return the sums of the current step on this rank, [4 + 2 M] float64.

        They are summed loss, weight, real tokens, rows, then summed values and weight of each metric.
        """
        return self._sums

    def average(self, optimizer: torch.optim.Optimizer, strategy: Any, accumulated: int, lr: float) -> Tensor:
        """Rescale the gradient of the summed loss to that of the mean over the step, and end the step.

        Lightning would average means of micro-batches and of ranks, regardless of their numbers of tokens.

        Args:
            accumulated: As in `divisor`.
            lr: Learning rate of the step.

        Returns:
            Norm of the averaged gradient.
        """
        # Over all processes. Those of a tensor-parallel group computed the same loss, which counts once.
        sums = strategy.reduce(self._sums, reduce_op="sum") / sharding.num_repeats(strategy)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        weight = torch.where(sums[1] > 0, sums[1], 1)  # a step without labels has gradient 0, not NaN
        # Undoes the divisions of the losses (`divisor`) and the mean over processes (`num_losses`), then divides by the
        # weight of the whole step: the result depends neither on micro-batches nor on processes.
        factor = self.divisor(accumulated) * sharding.num_losses(strategy) / weight
        for device in {grad.device for grad in grads}:  # several under model.max_memory
            scale_all([sharding.local(grad) for grad in grads if grad.device == device], factor.to(device))
        norm = total_norm(grads)  # before Lightning clips
        self.finish(sums, norm, lr)
        return norm

    def finish(self, sums: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Record the metrics of a step over all ranks; the next micro-batch begins a new step.

        Args:
            sums: As returned by `sums`, summed over the ranks.
            grad_norm: Norm of the averaged gradient before clipping.
        """
        if hasattr(grad_norm, "full_tensor"):  # sharded gradients
            grad_norm = grad_norm.full_tensor()
        self.last = StepSums(torch.cat([sums, grad_norm.to(sums).unsqueeze(0)]), lr, self._metric_names)
        self._sums = None

    def check_finite(self, step: int, epoch: int) -> None:
        """Raise UserError if the last step's loss or gradient norm is not finite. Synchronises with the device."""
        if self.last is not None:
            check_finite(self.last.step_metrics(), step, epoch)


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


def tokens_per_piece(asked: int | None, is_alone: bool, device: torch.device, hidden_size: int) -> int:
    """Return the tokens per chunk of a micro-batch; 0 for no chunks.

    Only a single CPU process splits: several processes synchronise in each backward pass, and GPUs are most efficient
    on large products.

    Args:
        asked: `piece_tokens` of the recipe.
        is_alone: True if a single process trains without gradient scaling.

    Raises:
        UserError: `piece_tokens` is set with several processes, or with 16-mixed and its scaled gradients.
    """
    if asked and not is_alone:
        raise UserError(f"model.piece_tokens is {asked}, but only one process splits micro-batches, and "
                        "not with precision 16-mixed: set it to 0 or null.")
    if asked is not None:
        return asked
    return max(FEATURES // hidden_size, LEAST_TOKENS) if is_alone and device.type == "cpu" else 0


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
