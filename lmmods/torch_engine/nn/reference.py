"""The network as it was before it was trained: what the answers of preference optimisation are compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from lmmods.torch_engine.compat.peft import adapters_off
from lmmods.torch_engine.nn import sharding


class Reference:
    """Lets a network stand for its reference for a while; the weights that do not train are there once.

    Args:
        kind: `base` is the network without its adapter; `copy` has a copy of what trains, taken now.
        trainable: What trains. Shards of it stay shards.
    """

    def __init__(self, model: nn.Module, kind: Literal["base", "copy"], trainable: dict[str, nn.Parameter]) -> None:
        self._model, self._kind = model, kind
        params = [sharding.local(param.detach()) for param in trainable.values()] if kind == "copy" else []
        self._copies = [(param, param.clone()) for param in params]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """While this runs the network is the reference, without gradient and dropout. Not within a forward pass."""
        with evaluating(self._model), self._weights():
            yield

    @contextmanager
    def _weights(self) -> Iterator[None]:
        if self._kind == "base":
            with adapters_off(self._model):
                yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for param, copy in self._copies:
            _exchange(param, copy)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While this runs a network that trains has neither gradient nor dropout."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def _exchange(one: Tensor, other: Tensor) -> None:
    before = one.clone()
    one.copy_(other)
    other.copy_(before)
