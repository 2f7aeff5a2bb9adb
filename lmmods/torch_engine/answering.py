"""Inference with a causal LM, one prompt at a time."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria, StoppingCriteriaList

from lmmods.core.errors import UserError
from lmmods.core.generation_config import sampling_uniforms
from lmmods.core.settings import Generation, num_layers
from lmmods.data.base import DataModule
from lmmods.recipe.tasks.base import CausalFields
from lmmods.runs.averaging import load_averages
from lmmods.runs.checkpoint import read_checkpoint
from lmmods.runs.identity import check_parameters
from lmmods.torch_engine import precision as precisions
from lmmods.torch_engine.callbacks.checkpoint import TORCH
from lmmods.torch_engine.nn.building import build_network
from lmmods.torch_engine.nn.capturing import choose_capture
from lmmods.torch_engine.nn.decoding import generate
from lmmods.torch_engine.nn.images import ImageInputs
from lmmods.torch_engine.nn.loading import COMPUTE_DTYPES
from lmmods.torch_engine.tasks.causal_task import generation_config

PREFIX = "model."  # prefix of parameter names in a checkpoint: the network is this attribute of a LightningModule


def choose_device(device: str) -> torch.device:
    """Return the named device; `auto` is a GPU if there is one. Raises UserError if there is no such device."""
    try:
        result = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        torch.empty(0, device=result)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: torch has no such device here. Remove it, or use cpu, cuda or cuda:1."
                        ) from error
    return result


def choose_precision(device: torch.device) -> str:
    """Return the precision that `auto` selects for a model without a run."""
    return precisions.choose_precision(device.type)[0].replace("mixed", "true") if device.type != "cpu" else "32-true"


class TextModel:
    """A causal LM that answers prompts.

    Args:
        fields: Fields of the task that describe the network.
        data: The data module, for its tokenizer.
        precision: Lightning's name of the precision.
        seed: Seed of all weights that are not loaded from a file.
        checkpoint: Checkpoint of a run, whose parameters replace the initial ones.
        frozen: As in `build_network`.

    Raises:
        UserError: The model cannot be found, read or built, or the checkpoint does not fit it.
    """

    def __init__(self, fields: CausalFields, data: DataModule, *, precision: str, device: torch.device, seed: int,
                 checkpoint: Path | None = None, frozen: bool = False):
        if precision not in COMPUTE_DTYPES:
            raise UserError(f"--precision {precision}: not supported by engine torch. Use {', '.join(COMPUTE_DTYPES)}.")
        network = build_network(fields, fields.auto_class, "CAUSAL_LM", data, precision=precision, device=device,
                                seed=seed, frozen=frozen)
        if checkpoint:
            _load(network, load_averages(read_checkpoint(checkpoint, TORCH),
                                         num_layers(name for name, _ in network.named_parameters())))
        if getattr(fields, "images", False):
            network.further_inputs = ImageInputs(network)
        if fields.max_memory is None:
            nn.Module.to(network, device)  # transformers' own `to` rejects quantised models
        self._capture = choose_capture(fields.cuda_graphs, device)
        self._network, self._device, self._precision, self._tokenizer = (network.eval(), device, precision,
                                                                         data.tokenizer)

    @torch.no_grad()
    def answer(self, prompt: list[int], settings: Generation, stop_token_ids: list[int], seed: int, row: int,
               on_token: Callable[[int], bool], images: dict[str, Tensor] | None = None) -> bool:
        """Answer a prompt; return True if the answer has an end token, which is not passed to `on_token`.

        Beam search finishes before `on_token` receives the first token.

        Args:
            row: Index of the prompt, on which sampling depends.
            on_token: Called with each token of the answer as soon as it is chosen; returns True to continue.
            images: Columns of the prompt's images, as of `ImageCodec.collate_images`.
        """
        ids = torch.tensor([prompt], device=self._device)
        columns = {name: column.to(self._device) for name, column in (images or {}).items()}
        further_inputs = getattr(self._network, "further_inputs", lambda _: {})
        watch = _Watch(on_token, set(stop_token_ids)) if settings.num_beams == 1 else None
        torch.manual_seed(seed)  # beam sampling uses torch's generator
        uniforms = torch.from_numpy(sampling_uniforms(seed, [row], settings.max_new_tokens)).to(self._device)
        with self._autocast():
            tokens = generate(self._network, ids, torch.ones_like(ids),
                              generation_config(settings, self._tokenizer, stop_token_ids), uniforms=uniforms,
                              capture=self._capture,
                              **further_inputs({"input_ids": ids, **columns}),
                              **({"stopping_criteria": StoppingCriteriaList([watch])} if watch else {}))
        answer = tokens[0, len(prompt):].tolist()
        has_end = bool(answer) and answer[-1] in stop_token_ids
        if watch is None:
            all(map(on_token, answer[:len(answer) - has_end]))  # stops at the first False
        return has_end

    def _autocast(self) -> contextlib.AbstractContextManager:
        """Return the autocast context that Lightning uses under this precision."""
        if not self._precision.endswith("mixed"):
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, COMPUTE_DTYPES[self._precision])


class _Watch(StoppingCriteria):
    """Stopping criterion that passes each token to a callback, and stops generation when it returns False."""

    def __init__(self, on_token: Callable[[int], bool], ends: set[int]):
        self._on_token, self._ends = on_token, ends

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        token = int(input_ids[0, -1])
        # End tokens stop generation anyway and are not passed on.
        stops = token not in self._ends and not self._on_token(token)
        return torch.full((len(input_ids),), stops, device=input_ids.device)


@torch.no_grad()
def _load(network: nn.Module, saved: dict[str, Tensor]) -> None:
    """Load the parameters of a checkpoint. Raises UserError if it belongs to another model."""
    trained = {PREFIX + name: param for name, param in network.named_parameters() if param.requires_grad}
    check_parameters(*({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (saved, trained)))
    for name, param in trained.items():
        param.copy_(saved[name])
