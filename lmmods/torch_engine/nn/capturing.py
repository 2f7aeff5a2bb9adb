"""Decoding steps as CUDA graphs.

On an H100, torch took 18 ms for a token of 64 answers of a model of 1.2 billion parameters, JAX 6 ms: Python starts
hundreds of kernels one after the other. A graph starts them all at once. It repeats the same operations on the same
memory, so the cache has a fixed size, positions are tensors, and another number of rows needs another graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmmods.core.hf_config import ropes_by_length
from lmmods.torch_engine.compat.bitsandbytes import is_8bit
from lmmods.torch_engine.compat.transformers import FixedLayer, attention_name, can_compile_steps, has_whole_layers
from lmmods.torch_engine.nn.attention import VARLEN
from lmmods.torch_engine.nn.experts import packed_parameter_names
from lmmods.torch_engine.nn.sharding import is_sharded

# Returns a function that repeats the operations of a function, which must not run yet.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
ROOM = 256  # minimum number of further tokens in a cache of fixed size: each enlargement needs another graph
ALIGNMENT = 64  # of the cache's size; torch copies masks whose size is not a multiple of 16 in each layer


class CapturedSteps:
    """Decoding steps of a token per row.

    The first step after a change of shapes runs as usual, so that libraries allocate and load what they need. The
    second is captured, and later ones repeat it.

    Args:
        model: A model for which `uncapturable_reason` is None.
        kwargs: Inputs of the next step with T tokens before it: the cache, `attention_mask` and `position_ids`
            [B, T + 1].
        cache: Name of the cache in `kwargs`.
        capture: Captures a step.
    """

    # Remove ended rows once they are this fraction of the batch: each time, a graph is captured.
    ended_fraction = 0.5

    def __init__(self, model: nn.Module, kwargs: dict[str, Any], cache: str, capture: Capture) -> None:
        self._model, self._cache_name, self._cache, self._capture = model, cache, kwargs[cache], capture
        self._visible, self._positions = kwargs["attention_mask"].bool(), kwargs["position_ids"][:, -1:].clone()
        self._length = self._visible.shape[1] - 1  # number of tokens in the cache
        self._allocate()

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Run the model on the last tokens of `input_ids` [B, T]; return the logits [B, V], valid until the next call.
        """
        if self._length == self._visible.shape[1]:
            self._allocate()
        self._tokens.copy_(input_ids[:, -1:])
        self._length += 1
        if self._step is None:
            self._step = self._run
        elif self._step == self._run:
            self._step = self._capture(self._run)
        return self._step()

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self._cache.reorder_cache(rows)
        self._visible, self._positions = self._visible[rows], self._positions[rows]
        self._allocate()

    def _allocate(self) -> None:
        """Allocate the tensors of a step with room for further tokens, unless there is room."""
        self._step: Callable[[], Tensor] | None = None  # first, as a graph keeps its memory
        size = self._visible.shape[1]
        if size - self._length < 2:
            size = -(-(self._length + ROOM) // ALIGNMENT) * ALIGNMENT
        self._visible = F.pad(self._visible, (0, size - self._visible.shape[1]), value=True)
        self._tokens = torch.empty_like(self._positions)
        self._columns = torch.arange(size, device=self._visible.device)
        self._column = self._columns[self._length:self._length + 1].clone()  # where a step writes
        for index, layer in enumerate(self._cache.layers):  # one by one, so that only one is in memory twice
            self._cache.layers[index] = FixedLayer(layer, self._length, size, self._column)

    def _run(self) -> Tensor:
        mask = (self._visible & (self._columns <= self._column))[:, None, None]  # [B, 1, 1, size]
        with torch.compiler.set_stance("force_eager"):  # a compiled layer would be compiled again for these shapes
            outputs = self._model(input_ids=self._tokens, attention_mask=mask, position_ids=self._positions,
                                  use_cache=True, return_dict=True, **{self._cache_name: self._cache})
        self._column += 1
        self._positions += 1
        return outputs.logits[:, -1]


def choose_capture(is_wanted: bool, device: torch.device) -> Capture | None:
    """Return the capture of CUDA graphs if they are wanted and the device has them."""
    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    return capture if is_wanted and device.type == "cuda" else None


def uncapturable_reason(model: nn.Module, kwargs: dict[str, Any], cache: str) -> str | None:
    """Return why the decoding steps of a model cannot be captured; None if they can.

    Args:
        kwargs: Inputs of the step after the prompts.
        cache: Name of the cache in `kwargs`.
    """
    config = model.config.get_text_config()
    tensors = {name for name, value in kwargs.items() if torch.is_tensor(value)}
    if not kwargs["use_cache"] or not has_whole_layers(kwargs.get(cache)):
        return "its cache does not keep the keys and values of all tokens"
    if tensors != {"attention_mask", "position_ids"} or getattr(config, "alibi", False):
        return "its steps have other inputs than tokens, positions and a mask"
    if attention_name(model) not in ("sdpa", VARLEN):
        return f"its attention is {attention_name(model)} instead of sdpa"
    if ropes_by_length(config):
        return "its rotary embeddings depend on the length"
    if any(map(is_8bit, model.modules())) or packed_parameter_names(model):
        return "int8 layers and 4-bit experts wait for the GPU"
    if any(map(is_sharded, model.parameters())):
        return "its parameters are sharded"
    if len({param.device for param in model.parameters()}) > 1:
        return "it is spread over several devices"
    return None if can_compile_steps(model) else "transformers does not mark it as fit for compiled steps"
