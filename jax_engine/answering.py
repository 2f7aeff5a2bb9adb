"""Answer one prompt at a time with a causal network on JAX."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_engine.checkpoint import unpack_trainable
from jax_engine.distributed import devices as machines
from jax_engine.distributed.tree import merge
from jax_engine.models.building import COMPUTE_DTYPES, build_network
from jax_engine.models.generate import stream
from jax_engine.tasks.base import check_supported
from lmmods.core.errors import UserError
from lmmods.core.settings import Generation
from lmmods.data.base import DataModule
from lmmods.recipe.tasks.base import CausalFields
from lmmods.runs.averaging import load_averages
from lmmods.runs.checkpoint import check_manifest, open_checkpoint

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "tpu")


def connect(device: str) -> None:
    """Select the device to answer on; raise UserError if this engine does not support it."""
    if device not in ACCELERATORS:
        raise UserError(f"--device {device} is not supported by the JAX engine. Use one of {', '.join(ACCELERATORS)}.")
    machines.start(device, 1, 1, "auto", False)


def choose_precision() -> str:
    """Return the precision that `auto` selects for a model without a run."""
    return machines.choose_precision()[0].replace("mixed", "true")


class TextModel:
    """A causal network that answers prompts.

    Args:
        fields: The task's fields, which describe the network.
        data: The data module, which provides the tokenizer.
        precision: Precision, by Lightning's name.
        seed: Seed of the parameters that no file contains.
        checkpoint: Checkpoint whose parameters replace the initial ones.
        frozen: As in `build_network`.

    Raises:
        UserError: The model cannot be found, read or built, or the checkpoint does not fit it.
    """

    def __init__(self, fields: CausalFields, data: DataModule, *, precision: str, seed: int,
                 checkpoint: Path | None = None, frozen: bool = False):
        check_supported(fields)
        if precision not in COMPUTE_DTYPES:
            raise UserError(f"--precision {precision} is not supported by the JAX engine. Use one of "
                            f"{', '.join(COMPUTE_DTYPES)}.")
        self._network, params, _ = build_network(fields, "causal", data, precision=precision, seed=seed, frozen=frozen)
        if checkpoint:
            network, (trainable, others) = self._network, self._network.split(params)
            like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), trainable)
            check_manifest(checkpoint)
            content = open_checkpoint(checkpoint)
            content["state_dict"] = load_averages(content, network.num_named_layers)
            params = merge(unpack_trainable(content, like, network.to_torch, network.from_torch), others)
        self._params = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)), params)
        self._pad = data.tokenizer.pad_token_id

    def answer(self, prompt: list[int], settings: Generation, stop_token_ids: list[int], seed: int, row: int,
               on_token: Callable[[int], bool], images: dict[str, Any] | None = None) -> bool:
        """Answer a prompt; return True if an end token was generated, which is not passed to `on_token`.

        Args:
            row: Index of the prompt, which determines its random numbers.
            on_token: Called with each token of the answer as soon as it is sampled. False ends the answer.
            images: Columns of the prompt's images, as of `ImageCodec.collate_images`.
        """
        inputs = {name: np.asarray(column) for name, column in (images or {}).items()}
        return stream(self._network, self._params, prompt, settings, stop_token_ids, self._pad, seed, row, on_token,
                      inputs)
