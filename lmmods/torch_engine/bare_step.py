"""A training step outside of Lightning's loops, in their order: without values it is planned, with values measured."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lmmods.torch_engine.tasks.base import TaskModule


class Ranks:
    """What a task asks of a strategy of Lightning's, of several processes.

    Args:
        root_device: Of the first one.
        tensor_parallel_size: And `context_parallel_size`: as of `strategies.FSDP2`.
    """

    global_rank = 0

    def __init__(self, root_device: torch.device, world_size: int, tensor_parallel_size: int = 1,
                 context_parallel_size: int = 1):
        self.root_device, self.world_size = root_device, world_size
        self.tensor_parallel_size, self.context_parallel_size = tensor_parallel_size, context_parallel_size

    def reduce(self, tensor: Tensor, reduce_op: str = "mean") -> Tensor:
        """A sum over processes, as large as what it is of."""
        return tensor


def stand_in(data: Any, precision: str, accumulated: int, ranks: int = 1, device: str = "cpu",
             sharers: tuple[int, int] = (1, 1)) -> Any:
    """What a task asks of Lightning's trainer.

    Args:
        precision: Lightning's name.
        accumulated: Micro-batches of a step.
        ranks: Processes.
        device: For which the network is built.
        sharers: Processes that share matrices, and those that share rows.
    """
    place = torch.device(device)
    strategy = SingleDeviceStrategy(place) if ranks == 1 else Ranks(place, ranks, *sharers)
    plugin = Precision()
    if precision.endswith("true") and precision != "32-true":
        plugin = HalfPrecision(precision)
    elif precision.endswith("mixed"):
        scaler = torch.amp.GradScaler("cpu", enabled=False) if precision == "16-mixed" else None
        plugin = MixedPrecision(precision, "cpu", scaler)
    return SimpleNamespace(datamodule=data, strategy=strategy, precision=precision, precision_plugin=plugin,
                           accumulate_grad_batches=accumulated, num_data_ranks=ranks // math.prod(sharers), data_rank=0,
                           batches_per_step=accumulated * ranks // math.prod(sharers), current_epoch=0, global_step=0,
                           world_size=ranks)


def full_batch(example: dict[str, Tensor], rows: int, max_length: int) -> dict[str, Tensor]:
    """A micro-batch of rows as long as they may be, of ones: all tokens are real and scored.

    Args:
        example: One of the loader.
    """
    axis = example["input_ids"].ndim - 1
    return {name: torch.ones((rows, *x.shape[1:axis], *((max_length,) if x.ndim > axis else ()), *x.shape[axis + 1:]),
                             dtype=x.dtype) for name, x in example.items()}


def take_step(module: TaskModule, optimizer: torch.optim.Optimizer | None, batches: list[dict[str, Tensor]],
              clipping: tuple[float | None, str | None], seen: Callable[[str], None] = lambda _: None) -> None:
    """One optimiser step.

    Args:
        optimizer: None leaves it at the gradients.
        clipping: Value and algorithm.
        seen: Is told of each pass that has ended: `survey`, `forward`, `backward`.
    """
    def surveyed() -> Iterator[dict[str, Tensor]]:
        for batch in batches:
            yield batch
            seen("survey")

    module.survey(surveyed())
    for place, batch in enumerate(batches):
        with module.trainer.precision_plugin.forward_context():
            loss = module.training_step(batch, place)
        seen("forward")
        if place == 0:  # only now, so the last step's gradients are there in the forward pass
            for param in module.parameters():
                param.grad = None
        module.backward(loss)
        del loss
        seen("backward")
    stepping = optimizer or SimpleNamespace(param_groups=[{"params": list(module.trainable().values()), "lr": 0.0}])
    module.configure_gradient_clipping(stepping, *clipping)
    if optimizer is not None:
        optimizer.step()
